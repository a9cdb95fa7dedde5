"""A report of made-up traces as tools/profile_bubbles.py makes it, its invariants checked."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from rollpacker.profiling.bubble_report.clocks import align_clocks
from rollpacker.profiling.bubble_report.inputs import read_sources
from rollpacker.profiling.bubble_report.report import Report, build_report
from rollpacker.profiling.bubble_report.stage_names import StageNamer
from rollpacker.profiling.bubble_report.timeline import build_timelines


def make_report(
    *paths: Path,
    is_span: bool = False,
    offsets: tuple[str, ...] = (),
    by_nccl: bool = False,
    nodes: tuple[str, ...] = (),
    stages: tuple[str, ...] = (),
) -> Report:
    namer = StageNamer(stages)
    sources = read_sources([str(path) for path in paths], namer, nodes)
    alignment = align_clocks(sources, offsets, by_nccl=by_nccl)
    report = build_report(
        sources, build_timelines(sources, namer, is_span=is_span), alignment, "span" if is_span else "common"
    )
    check_sums(report)
    return report


def check_sums(report: Report) -> None:
    """The invariants of every report, in whole nanoseconds."""
    by_gpu = defaultdict(int)
    for row in report.rows:
        t = row.times
        assert min(t.compute, t.comm, t.copy, t.idle, t.leading, t.inside, t.tail, t.between) >= 0
        assert t.compute + t.comm + t.copy + t.idle == t.window
        assert t.leading + t.inside + t.tail + t.between == t.idle
        by_gpu[row.gpu] += t.window
    for gpu, times in report.gpus:
        assert by_gpu[gpu] == times.window == next(t.window.total for t in report.timelines if t.gpu == gpu)


def ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6


def rows_of(report: Report) -> dict[tuple, object]:
    return {(row.step, row.stage, row.gpu.name): row.times for row in report.rows}
