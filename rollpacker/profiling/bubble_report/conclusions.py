"""The three sentences that come first: how much was lost, where and to whom, and what to do about it."""

from __future__ import annotations

from collections import defaultdict

from rollpacker.profiling.bubble_report.names import duration, percent, step_name
from rollpacker.profiling.bubble_report.report import Report, Times, Wait
from rollpacker.profiling.bubble_report.timeline import UNATTRIBUTED

_ADVICE = {
    "tail": "the long tail: give the last GPU less or shorter work (tail batching, a shorter cap, better routing of long "
    "responses), or let the others start the next stage",
    "leading": "a late start: look at what the stage waits for before its first operation (weights, data, other ranks)",
    "between": "time between the stages: look at what the program does there (waking engines, moving samples, Python)",
    "sync call": "blocking CUDA calls: take out .item(), .cpu(), cudaMalloc and synchronize, or move them off the path",
    "launch-bound": "launches that cannot keep up: use CUDA graphs, larger batches or fused kernels",
    "device wait": "streams that wait for each other: overlap them, or reorder what they wait for",
    "nothing": "a host that is busy outside CUDA: move rewards, data loading and Python off the thread that launches",
    "unknown": "gaps whose cause was not recorded: capture with CUDA API tracing (nsys -t cuda,nvtx)",
    "comm": "GPUs that wait inside collectives: balance the ranks or overlap communication with compute",
}


def conclusions(report: Report) -> list[str]:
    """Exactly three sentences; fewer only when there is nothing to say."""
    if not report.gpus:
        return ["No GPU work was found in these files, so nothing can be said about idle time."]
    return [_how_much(report), _where(report), _what_to_do(report)]


def _how_much(report: Report) -> str:
    total = report.total
    worst = max(report.gpus, key=lambda item: item[1].bubble_ratio)
    sentence = (
        f"{len(report.gpus)} GPU{'s were' if len(report.gpus) > 1 else ' was'} idle for {percent(total.bubble_ratio)} of "
        f"the time ({duration(total.idle)} of {duration(total.window)} GPU time; compute "
        f"{percent(total.compute / total.window)}, communication only {percent(total.comm / total.window)}, copies only "
        f"{percent(total.copy / total.window)})"
    )
    if len(report.gpus) > 1:
        sentence += f"; the idlest is {report.names[worst[0]]} with {percent(worst[1].bubble_ratio)}"
    return sentence + "."


def _where(report: Report) -> str:
    total, stages = report.total, report.by_stage()
    if not total.idle:
        return "There is no idle time to explain."
    stage, times = max(stages.items(), key=lambda item: item[1].idle)
    if set(stages) == {UNATTRIBUTED}:
        number, length = (sum(v[i] for v in report.long_gaps.values()) for i in (0, 1))
        return (
            f"The ranges in the files name no stage (name them with --stages REGEX=NAME); {number} gaps of 1 ms or more "
            f"hold {percent(length / total.idle)} of the idle time, and the largest is "
            f"{duration(max((g.end - g.start for g in report.gaps), default=0))}."
        )
    place = "outside all stages" if stage == UNATTRIBUTED else f"in {stage}"
    sentence = f"{percent(times.idle / total.idle)} of the idle time lies {place}"
    if stage != UNATTRIBUTED:
        sentence += (
            f", most of it {_WORDS[_main_part(times)]} ({percent(getattr(times, _main_part(times)) / times.idle)})"
        )
    wait = _worst_wait(report)
    if wait is not None:
        where = f"{wait.stage} of step {step_name(wait.step)}" if wait.step is not None else wait.stage
        waited = f"the others waited {duration(wait.waited)} of GPU time for it"
        sentence += f"; in {where} {report.names[wait.last]} was last, and {waited}"
    return sentence + "."


_WORDS = {
    "leading": "before a GPU's first operation",
    "inside": "between operations or without any",
    "tail": "after a GPU's last operation",
    "between": "between stages",
}


def _main_part(times: Times) -> str:
    return max(("leading", "inside", "tail", "between"), key=lambda part: getattr(times, part))


def _worst_wait(report: Report) -> Wait | None:
    waits = [wait for wait in report.waits if wait.waited > 0]
    return waits[0] if waits else None


def _what_to_do(report: Report) -> str:
    total = report.total
    part = _main_part(total)
    if total.comm > total.idle:
        return f"Most of the loss hides in communication ({duration(total.comm)} of GPU time): {_ADVICE['comm']}."
    if not total.idle:
        return "Look at the time per operation next."
    stages = {row.stage for row in report.rows}
    if part in ("tail", "leading") or (part == "between" and stages != {UNATTRIBUTED}):
        return f"Act first on {_ADVICE[part]}."
    by_cause: dict[str, int] = defaultdict(int)
    for gap in report.gaps:
        by_cause[gap.cause.kind] += gap.end - gap.start
    if not by_cause:
        return "All gaps are shorter than 0.1 ms: the kernels are small; larger batches, fusion or CUDA graphs help."
    cause = max(by_cause, key=lambda kind: by_cause[kind])
    share = by_cause[cause] / sum(by_cause.values())
    return f"Act first on {_ADVICE[cause]} (behind {share:.0%} of the {len(report.gaps)} largest gaps)."
