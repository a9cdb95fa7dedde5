"""The numbers: per GPU, per stage x step x GPU, who was last, which gaps are the largest and why.

Invariants: compute + comm + copy + idle = window in whole nanoseconds, for every row; the rows of one GPU's stages
(with "unattributed") add up to its window; idle = leading + inside + tail + between.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rollpacker.profiling.bubble_report.causes import judge
from rollpacker.profiling.bubble_report.clocks import Alignment
from rollpacker.profiling.bubble_report.intervals import Intervals
from rollpacker.profiling.bubble_report.model import CAUSES, MILLISECOND, Cause, GpuId, Source
from rollpacker.profiling.bubble_report.names import full_names
from rollpacker.profiling.bubble_report.timeline import UNATTRIBUTED, GpuTimeline, Label, Piece

K = TypeVar("K", bound=Hashable)
LONG_GAP_NS = MILLISECOND
_SHORTEST_GAP_NS = 100_000
_NUM_GAPS = 16


@dataclass
class Times:
    """Nanoseconds of a window: four kinds that add up to it, then the idle part by where it lies.

    leading: before the GPU's first operation in the stage; tail: after its last; inside: between operations, or all of
    a stage that gives the GPU nothing to do; between: outside all stages.
    """

    window: int = 0
    compute: int = 0
    comm: int = 0
    copy: int = 0
    idle: int = 0
    leading: int = 0
    inside: int = 0
    tail: int = 0
    between: int = 0

    def add(self, other: Times) -> None:
        """Add another window to this one."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def bubble_ratio(self) -> float:
        """Idle share of the window; 0 for an empty one."""
        return self.idle / self.window if self.window else 0.0


@dataclass(frozen=True)
class Row:
    """One GPU in one stage of one step."""

    stage: str
    step: Label | None
    gpu: GpuId
    times: Times


@dataclass(frozen=True)
class Wait:
    """In a stage of a step the compute of `last` ended last; the others had stopped `waited` GPU-ns earlier, in sum."""

    stage: str
    step: Label | None
    last: GpuId
    waited: int


@dataclass(frozen=True)
class Gap:
    """A hole between two operations of a GPU, where it lies, and what the host did meanwhile."""

    gpu: GpuId
    start: int
    end: int
    stage: str
    step: Label | None
    cause: Cause


@dataclass
class Report:
    """Everything the outputs show; times in ns, `origin` is the wall clock at time 0 of the pictures."""

    timelines: list[GpuTimeline]
    gpus: list[tuple[GpuId, Times]]
    rows: list[Row]
    waits: list[Wait]
    gaps: list[Gap]
    long_gaps: dict[GpuId, tuple[int, int]]
    sources: list[Source]
    alignment: Alignment
    window_mode: str
    origin: int
    not_captured: list[GpuId] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    distrust: list[str] = field(default_factory=list)

    @property
    def is_trusted(self) -> bool:
        """Whether nothing speaks against the numbers."""
        return not self.distrust

    @cached_property
    def names(self) -> dict[GpuId, str]:
        """What people call each GPU: host/GPU."""
        return full_names([gpu for gpu, _ in self.gpus])

    @property
    def total(self) -> Times:
        """All GPUs together."""
        return _sum(times for _, times in self.gpus)

    def by_stage(self) -> dict[str, Times]:
        """All GPUs and steps, by stage, in the order in which stages first occur."""
        return _group(self.rows, lambda row: row.stage)

    def by_step(self) -> dict[Label | None, Times]:
        """All GPUs and stages, by step."""
        return _group(self.rows, lambda row: row.step)


def build_report(
    sources: Sequence[Source], timelines: Sequence[GpuTimeline], alignment: Alignment, window_mode: str
) -> Report:
    """Measure the pieces of the timelines."""
    rows: dict[tuple[Label | None, str, GpuId], Row] = {}
    gpus: list[tuple[GpuId, Times]] = []
    measured = [_Measured(timeline) for timeline in timelines]
    for gpu in measured:
        timeline, total = gpu.timeline, Times()
        for piece in timeline.pieces:
            times = gpu.times(piece)
            total.add(times)
            key = (piece.step, piece.stage, timeline.gpu)
            if key not in rows:
                rows[key] = Row(piece.stage, piece.step, timeline.gpu, Times())
            rows[key].times.add(times)
        gpus.append((timeline.gpu, total))
    seen = {timeline.gpu for timeline in timelines}
    report = Report(
        timelines=list(timelines),
        gpus=gpus,
        rows=_ordered(rows.values(), timelines),
        waits=_waits(timelines),
        gaps=_largest_gaps(sources, measured),
        long_gaps={m.timeline.gpu: _long_gaps(m) for m in measured},
        sources=list(sources),
        alignment=alignment,
        window_mode=window_mode,
        origin=min((t.window.starts[0] for t in timelines), default=0),
        not_captured=sorted({gpu for source in sources for gpu in source.not_captured} - seen),
    )
    _collect_notes(report)
    return report


class _Measured:
    """One GPU's work as disjoint kinds: compute wins over communication, communication over copies."""

    def __init__(self, timeline: GpuTimeline) -> None:
        self.timeline = timeline
        self.compute = timeline.work.compute
        self.comm = timeline.work.comm.minus(self.compute)
        self.copy = timeline.work.copy.minus(self.compute).minus(self.comm)
        self.holes = self._holes()

    def times(self, piece: Piece) -> Times:
        """The times of one uninterrupted stay in a stage."""
        start, end = piece.start, piece.end
        kinds = [part.measure(start, end) for part in (self.compute, self.comm, self.copy)]
        times = Times(end - start, kinds[0], kinds[1], kinds[2], end - start - sum(kinds))
        if piece.stage == UNATTRIBUTED:
            times.between = times.idle
            return times
        first, last = self.timeline.work.hull(start, end) or (start, end)
        times.leading, times.tail = first - start, end - last
        times.inside = times.idle - times.leading - times.tail
        return times

    def _holes(self) -> list[tuple[int, int]]:
        """Holes of at least _SHORTEST_GAP_NS between operations of any kind, the longest first."""
        others = self.comm.union(self.copy)
        hull = self.timeline.work.hull()
        assert hull is not None, "a GPU without work has no timeline"
        holes = [hull]
        if self.compute.starts:
            edges = [(hull[0], self.compute.starts[0]), (self.compute.ends[-1], hull[1])]
            holes = [*edges, *self.compute.gaps(_SHORTEST_GAP_NS)]
        left = [(s, e) for s, e in Intervals.of(holes).minus(others) if e - s >= _SHORTEST_GAP_NS]
        return sorted(left, key=lambda hole: (hole[0] - hole[1], hole[0]))


def _sum(all_times: Iterable[Times]) -> Times:
    total = Times()
    for times in all_times:
        total.add(times)
    return total


def _group(rows: Sequence[Row], key: Callable[[Row], K]) -> dict[K, Times]:
    groups: dict[K, Times] = defaultdict(Times)
    for row in rows:
        groups[key(row)].add(row.times)
    return dict(groups)


def _ordered(rows: Iterable[Row], timelines: Sequence[GpuTimeline]) -> list[Row]:
    """By step as it comes, then stage as it comes, then GPU; what is outside steps and stages comes last."""
    place = {timeline.gpu: index for index, timeline in enumerate(timelines)}
    first: dict[Label | None, int] = {}
    first_stage: dict[str, int] = {}
    for timeline in timelines:
        for piece in timeline.pieces:
            first[piece.step] = min(first.get(piece.step, piece.start), piece.start)
            first_stage[piece.stage] = min(first_stage.get(piece.stage, piece.start), piece.start)
    return sorted(
        rows,
        key=lambda r: (
            r.step is None,
            first[r.step],
            str(r.step),
            r.stage == UNATTRIBUTED,
            first_stage[r.stage],
            r.stage,
            place[r.gpu],
        ),
    )


def _waits(timelines: Sequence[GpuTimeline]) -> list[Wait]:
    """Per stage and step: the GPU whose compute ended last, and how long the others had been done, in sum.

    Compute, because a GPU that waits inside a collective looks busy; one without compute counts by any work, and one
    without work has waited since the stage began. Needs two GPUs.
    """
    stops: dict[tuple[str, Label | None], dict[GpuId, int]] = defaultdict(dict)
    for timeline in timelines:
        for piece in timeline.pieces:
            if piece.stage == UNATTRIBUTED:
                continue
            last = timeline.work.compute.last_in(piece.start, piece.end)
            if last is None:
                _, last = timeline.work.hull(piece.start, piece.end) or (0, piece.start)
            stops[piece.stage, piece.step][timeline.gpu] = last  # pieces come in the order of time
    waits = []
    for (stage, step), of_gpu in stops.items():
        if len(of_gpu) > 1:
            last_gpu = max(of_gpu, key=lambda gpu: (of_gpu[gpu], gpu))
            waits.append(Wait(stage, step, last_gpu, sum(of_gpu[last_gpu] - stop for stop in of_gpu.values())))
    return sorted(waits, key=lambda w: (-w.waited, w.stage, str(w.step)))


def _long_gaps(measured: _Measured) -> tuple[int, int]:
    """(number, total ns) of the holes of at least LONG_GAP_NS between operations, as far as they are in the window."""
    window = measured.timeline.window
    lengths = [window.measure(start, end) for start, end in measured.holes if end - start >= LONG_GAP_NS]
    lengths = [length for length in lengths if length >= LONG_GAP_NS]
    return len(lengths), sum(lengths)


def _largest_gaps(sources: Sequence[Source], gpus: Sequence[_Measured]) -> list[Gap]:
    """The largest holes of all GPUs with their causes; of equal ones the first."""
    found: list[tuple[int, int, int, GpuTimeline]] = []
    for measured in gpus:
        window = measured.timeline.window
        inside = (hole for hole in measured.holes if window.measure(*hole) == hole[1] - hole[0])
        found += [(start - end, start, end, measured.timeline) for start, end in islice(inside, _NUM_GAPS)]
    found.sort(key=lambda item: (item[0], item[1], item[3].gpu))
    gaps = []
    for _, start, end, timeline in found[:_NUM_GAPS]:
        piece = max(
            (p for p in timeline.pieces if p.start < end and p.end > start),
            key=lambda p: min(p.end, end) - max(p.start, start),
        )
        gaps.append(Gap(timeline.gpu, start, end, piece.stage, piece.step, _cause(sources, timeline, start, end)))
    return gaps


def _cause(sources: Sequence[Source], timeline: GpuTimeline, start: int, end: int) -> Cause:
    """Ask each process of the GPU; a process that says something definite wins over one that was idle itself."""
    causes = []
    for index, process in timeline.processes:
        source = sources[index]
        if source.explain is not None:
            causes.append(source.explain(process, start - source.clock_ns, end - source.clock_ns))
    return min(causes, key=lambda cause: CAUSES.index(cause.kind)) if causes else judge(start, end, (), None)


def _collect_notes(report: Report) -> None:
    short = Counter(Path(source.path).name for source in report.sources)
    for source in report.sources:
        name = Path(source.path).name if short[Path(source.path).name] == 1 else source.path
        report.distrust += [f"{name}: {reason}" for reason in source.distrust]
        report.notes += [f"{name}: {note}" for note in dict.fromkeys(source.notes)]
        if source.launch_coverage is not None and source.launch_coverage < 1:
            report.notes.append(
                f"{name}: {source.launch_coverage:.1%} of the GPU operations have their launch in the file"
            )
    if report.alignment.distrust:
        report.distrust.append(report.alignment.distrust)
    if report.alignment.note:
        report.notes.append(report.alignment.note)
    for gpu in report.not_captured:
        report.notes.append(
            f"{gpu.host or 'unknown host'} GPU {gpu.name}: not captured (no GPU work in any file); not counted as idle"
        )
    if not report.gpus:
        report.distrust.append(
            "no GPU work in any of the files: nothing was captured, which is not the same as 100 % idle"
        )
