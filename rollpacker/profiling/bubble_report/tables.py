"""The report as text for a terminal, as JSON (its keys are a contract) and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rollpacker.profiling.bubble_report.conclusions import conclusions
from rollpacker.profiling.bubble_report.model import GpuId
from rollpacker.profiling.bubble_report.names import duration, gpu_names, percent, seconds, step_name
from rollpacker.profiling.bubble_report.report import Report, Row, Times
from rollpacker.profiling.bubble_report.timeline import UNATTRIBUTED, Label

_MAX_ROWS = 24
_MAX_GPUS = 16
_MAX_STEPS = 20
_MAX_NOTES = 12


def text_report(report: Report) -> str:
    """What the command prints: conclusions, trust, then tables from the whole to the parts."""
    parts = [*_header(report), *(f"{n}. {line}" for n, line in enumerate(conclusions(report), 1))]
    blocks = ["\n".join(parts)]
    if report.gpus:
        blocks += [_gpu_table(report), _stage_table(report), _step_table(report), _full_table(report)]
        blocks += [_wait_table(report), _gap_table(report)]
    blocks.append(_notes(report))
    return "\n\n".join(block for block in blocks if block) + "\n"


def json_report(report: Report) -> dict[str, Any]:
    """The report as plain data; seconds everywhere, start times count from the window's first moment."""
    names = gpu_names([*(gpu for gpu, _ in report.gpus), *report.not_captured])

    def gpu_fields(gpu: GpuId) -> dict[str, Any]:
        return {"host": gpu.host, "gpu": names[gpu], "gpu_uuid": gpu.key if _is_uuid(gpu) else None}

    steps: dict[tuple[Label | None, GpuId], Times] = {}
    for row in report.rows:
        steps.setdefault((row.step, row.gpu), Times()).add(row.times)
    error = report.alignment.error_ns
    return {
        "summary": conclusions(report),
        "trusted": report.is_trusted,
        "untrusted_because": report.distrust,
        "notes": report.notes,
        "window": report.window_mode,
        "alignment_error_s": None if error is None else seconds(error),
        "total": _times_json(report.total),
        "gpus": [
            {
                **gpu_fields(gpu),
                **_times_json(times),
                "num_gaps_over_1ms": report.long_gaps[gpu][0],
                "gaps_over_1ms_s": seconds(report.long_gaps[gpu][1]),
            }
            for gpu, times in report.gpus
        ],
        "stages": [
            {"stage": row.stage, "step": row.step, **gpu_fields(row.gpu), **_times_json(row.times)}
            for row in report.rows
        ],
        "steps": [
            {"step": step, **gpu_fields(gpu), **_times_json(times)}
            for (step, gpu), times in steps.items()
            if step is not None
        ],
        "waits": [
            {"stage": w.stage, "step": w.step, **gpu_fields(w.last), "waited_gpu_s": seconds(w.waited)}
            for w in report.waits
        ],
        "gaps": [
            {
                **gpu_fields(gap.gpu),
                "stage": gap.stage,
                "step": gap.step,
                "start_s": seconds(gap.start - report.origin),
                "duration_s": seconds(gap.end - gap.start),
                "cause": gap.cause.kind,
                "detail": gap.cause.detail,
            }
            for gap in report.gaps
        ],
        "not_captured": [gpu_fields(gpu) for gpu in report.not_captured],
        "files": [{"path": source.path, "kind": source.kind} for source in report.sources],
    }


def csv_report(report: Report) -> str:
    """Stage x step x GPU, one line each."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    names = gpu_names([gpu for gpu, _ in report.gpus])
    columns = list(_times_json(Times()))
    writer.writerow(["step", "stage", "host", "gpu", *columns])
    for row in report.rows:
        values = [f"{value:.9g}" for value in _times_json(row.times).values()]
        writer.writerow(["" if row.step is None else row.step, row.stage, row.gpu.host, names[row.gpu], *values])
    return output.getvalue()


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """A table in monospaced columns, words to the left and numbers to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    is_word = [not any(line[i][:1].isdigit() or line[i][:1] in "+-" for line in lines[1:]) for i in range(len(header))]
    text = [
        "  ".join(c.ljust(w) if word else c.rjust(w) for c, w, word in zip(line, widths, is_word, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*([title] if title else []), *text])


def _header(report: Report) -> list[str]:
    if report.is_trusted:
        return []
    return [
        "UNTRUSTED: the numbers below may be wrong, because",
        *(f"  - {reason}" for reason in report.distrust),
        "",
    ]


def _times_json(times: Times) -> dict[str, float]:
    return {
        "window_s": seconds(times.window),
        "compute_s": seconds(times.compute),
        "comm_s": seconds(times.comm),
        "copy_s": seconds(times.copy),
        "idle_s": seconds(times.idle),
        "bubble_ratio": times.bubble_ratio,
        "leading_wait_s": seconds(times.leading),
        "inside_s": seconds(times.inside),
        "tail_wait_s": seconds(times.tail),
        "between_stages_s": seconds(times.between),
    }


def _is_uuid(gpu: GpuId) -> bool:
    return bool(gpu.key) and "/" not in gpu.key and ":" not in gpu.key and " " not in gpu.key


TIMES_HEADER = ("bubble", "window", "compute", "comm only", "copy only", "idle", "leading", "inside", "tail", "between")


def times_cells(times: Times) -> list[str]:
    """The cells below TIMES_HEADER."""
    shown = [times.window, times.compute, times.comm, times.copy, times.idle]
    shown += [times.leading, times.inside, times.tail, times.between]
    return [percent(times.bubble_ratio), *(duration(value) if value else "0" for value in shown)]


def _gpu_table(report: Report) -> str:
    shown = report.gpus
    title = "By GPU"
    if len(shown) > _MAX_GPUS:
        shown = sorted(shown, key=lambda item: -item[1].bubble_ratio)[:_MAX_GPUS]
        title = f"By GPU (the {_MAX_GPUS} idlest of {len(report.gpus)}; all are in --csv and --json)"
    rows = [[report.names[gpu], *times_cells(times), str(report.long_gaps[gpu][0])] for gpu, times in shown]
    if len(report.gpus) > 1:
        rows.append(["all", *times_cells(report.total), str(sum(number for number, _ in report.long_gaps.values()))])
    return grid(["GPU", *TIMES_HEADER, "gaps >= 1 ms"], rows, title)


def _stage_table(report: Report) -> str:
    stages = report.by_stage()
    if set(stages) == {UNATTRIBUTED}:
        return ""
    ordered = sorted(stages.items(), key=lambda item: -item[1].idle)
    rows = [[stage, percent(times.idle / (report.total.idle or 1)), *times_cells(times)] for stage, times in ordered]
    return grid(["stage", "of all idle", *TIMES_HEADER], rows, "By stage (all GPUs and steps)")


def _step_table(report: Report) -> str:
    """Steps down, stages across: the bubble of each, over all GPUs."""
    steps = [step for step in report.by_step() if step is not None]
    if not steps:
        return ""
    stages = list(dict.fromkeys(row.stage for row in report.rows))
    cells: dict[tuple[Label | None, str], Times] = {}
    for row in report.rows:
        cells.setdefault((row.step, row.stage), Times()).add(row.times)
    whole = report.by_step()
    shown, title = steps, "Bubble by step and stage (all GPUs)"
    if len(steps) > _MAX_STEPS:
        worst = set(sorted(steps, key=lambda step: -whole[step].idle)[:_MAX_STEPS])
        shown = [step for step in steps if step in worst]
        title += f", the {_MAX_STEPS} steps of {len(steps)} with the most idle time"
    rows = [
        [
            step_name(step),
            duration(whole[step].window),
            percent(whole[step].bubble_ratio),
            *(percent(cells[step, stage].bubble_ratio) if (step, stage) in cells else "." for stage in stages),
        ]
        for step in shown
    ]
    return grid(["step", "GPU time", "bubble", *stages], rows, title)


def _full_table(report: Report) -> str:
    if all(row.step is None and row.stage == UNATTRIBUTED for row in report.rows):
        return ""
    shown: list[Row] = report.rows
    title = "By step, stage and GPU"
    if len(shown) > _MAX_ROWS:
        shown = sorted(shown, key=lambda row: -row.times.idle)[:_MAX_ROWS]
        title += f" (the {_MAX_ROWS} rows of {len(report.rows)} with the most idle time; all are in --csv and --json)"
    rows = [[step_name(row.step), row.stage, report.names[row.gpu], *times_cells(row.times)] for row in shown]
    return grid(["step", "stage", "GPU", *TIMES_HEADER], rows, title)


def _wait_table(report: Report) -> str:
    waits, names = report.waits[:10], report.names
    rows = [[step_name(w.step), w.stage, names[w.last], duration(w.waited)] for w in waits if w.waited > 0]
    return grid(["step", "stage", "last GPU", "others waited (GPU time)"], rows, "Who was last") if rows else ""


def _gap_table(report: Report) -> str:
    rows = [
        [
            duration(gap.end - gap.start),
            f"{seconds(gap.start - report.origin):.6f} s",
            report.names[gap.gpu],
            step_name(gap.step),
            gap.stage,
            gap.cause.kind,
            gap.cause.detail,
        ]
        for gap in report.gaps
    ]
    header = ["length", "at", "GPU", "step", "stage", "cause", "what the host did"]
    return grid(header, rows, "Largest gaps between operations") if rows else ""


def _notes(report: Report) -> str:
    if not report.notes:
        return ""
    lines = [f"  - {note}" for note in report.notes[:_MAX_NOTES]]
    if len(report.notes) > _MAX_NOTES:
        lines.append(f"  - and {len(report.notes) - _MAX_NOTES} more (--json has them all)")
    return "\n".join(["Notes", *lines])
