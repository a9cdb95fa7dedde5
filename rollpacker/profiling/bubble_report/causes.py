"""Why a GPU had nothing to do for a while, as far as the calls of its process into CUDA tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rollpacker.profiling.bubble_report.intervals import Intervals
from rollpacker.profiling.bubble_report.model import Cause

_SYNC = re.compile(
    r"Synchronize|^(cuda|hip)Memcpy(?!Async)\w*$|^cuMemcpy(?!.*Async)\w*$|^(cuda|hip)(Free|Malloc)(?!Async)|^cuMem(Free|Alloc)"
)
_VERSION = re.compile(r"(_v\d+)+$")
_HALF = 0.5


def plain_name(name: str) -> str:
    """The call's name without the version that Nsight Systems appends: cudaLaunchKernel_v7000 -> cudaLaunchKernel."""
    return _VERSION.sub("", name)


def judge(start: int, end: int, calls: Iterable[tuple[int, int, str]], launch: int | None) -> Cause:
    """The cause of the gap [start, end), in ns.

    `calls` are (start, end, name) of the process's CUDA calls that touch the gap, `launch` is when the operation that
    ended the gap was launched (None: not recorded). A kind needs half of the gap: a call that blocks ("sync call"),
    other calls ("launch-bound"). Else an operation that was launched before the gap began waited for another stream
    ("device wait"), and one that came late came from a host that did something outside CUDA ("nothing").
    """
    blocking: list[tuple[int, int]] = []
    other: list[tuple[int, int]] = []
    time_in: Counter[str] = Counter()
    for call_start, call_end, raw_name in calls:
        name = plain_name(raw_name)
        low, high = max(call_start, start), min(call_end, end)
        if high > low:
            (blocking if _SYNC.search(name) else other).append((low, high))
            time_in[name] += high - low
    length = end - start
    blocked = Intervals.of(blocking)
    called = Intervals.of(other).minus(blocked).total
    main = time_in.most_common(1)[0][0] if time_in else ""
    if blocked.total >= _HALF * length:
        name = max((n for n in time_in if _SYNC.search(n)), key=lambda n: time_in[n])
        return Cause("sync call", f"the host sat in {name} for {blocked.total / length:.0%} of it")
    if called >= _HALF * length:
        count = f"{len(other)} CUDA calls" if len(other) > 1 else "one CUDA call"
        return Cause("launch-bound", f"the host spent {called / length:.0%} of it in {count}, most in {main}")
    if launch is not None and launch < start:
        return Cause("device wait", "the next operation was queued already and waited for another stream or device")
    if launch is None and not time_in:
        return Cause("unknown", "no CUDA calls of this process were recorded around it")
    share = (blocked.total + called) / length
    return Cause(
        "nothing",
        f"the host was outside CUDA for {1 - share:.0%} of it (Python, waiting for data or for other processes)",
    )
