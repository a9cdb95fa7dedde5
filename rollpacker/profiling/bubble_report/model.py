"""What the readers hand over: the GPU work and the named ranges of one trace file, on one clock.

Times are whole nanoseconds; `Source.clock_ns` is what to add to them to get wall-clock time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollpacker.profiling.bubble_report.intervals import Intervals

MILLISECOND = 1_000_000
SECOND = 1_000_000_000


COLLECTIVE_WORDS = ("nccl", "rccl", "nvshmem", "cross_device_reduce", "multimem_all", "deep_ep")
"""Kernels with one of these in their name, in any case, only communicate: NCCL, RCCL, NVSHMEM, vLLM's all-reduce,
multimem, DeepEP."""


class BadTrace(ValueError):
    """A file that cannot be read as a trace: names the file, what is wrong, and what to do, in one line."""


@dataclass(frozen=True, order=True)
class GpuId:
    """One physical GPU (or MIG instance): two with equal fields are the same one.

    `host` is empty where the trace does not tell. `key` is the uuid where it is known, else whatever keeps the GPU apart
    from others; `name` is what people call it on that host ("0", "rank 3").
    """

    host: str
    key: str
    name: str = field(compare=False)


@dataclass(frozen=True)
class Work:
    """When one GPU worked for one process, by kind; the kinds may overlap."""

    compute: Intervals
    comm: Intervals
    copy: Intervals

    def merged(self, other: Work) -> Work:
        """The work of two processes on one GPU."""
        return Work(self.compute.union(other.compute), self.comm.union(other.comm), self.copy.union(other.copy))

    def shift(self, by: int) -> Work:
        """The work moved by so many nanoseconds."""
        return Work(self.compute.shift(by), self.comm.shift(by), self.copy.shift(by))

    def hull(self, low: int = -(1 << 62), high: int = 1 << 62) -> tuple[int, int] | None:
        """First start and last end of any work within [low, high), or None."""
        kinds = (self.compute, self.comm, self.copy)
        firsts = [first for kind in kinds if (first := kind.first_in(low, high)) is not None]
        lasts = [last for kind in kinds if (last := kind.last_in(low, high)) is not None]
        return (min(firsts), max(lasts)) if firsts else None


@dataclass(frozen=True)
class Range:
    """A named range of one process: [start, end) of the host's time, as the program marked it."""

    name: str
    process: int
    start: int
    end: int


@dataclass(frozen=True)
class Cause:
    """What the host did during a gap of the GPU: `kind` is one of CAUSES, `detail` says it in words."""

    kind: str
    detail: str


CAUSES = ("sync call", "launch-bound", "device wait", "nothing", "unknown")
"""The most definite first: of several processes on a GPU the one that says most is heard."""

# (process, start, end) of a gap -> why; the times are the file's own.
Explain = Callable[[int, int, int], Cause]
# (process, times) -> when the GPU had drained what that process launched before each time, never earlier than the time;
# for as many of the first times as it affords.
Drain = Callable[[int, Sequence[int]], list[int]]


@dataclass
class Source:
    """One trace file.

    `work` holds the GPU work by (process, GPU). `captured` is the span in
    which the file would have recorded work, or None where that is unknown. `distrust` are reasons to disbelieve the
    numbers, `notes` what the reader should know besides. `clock_group` names files that share one clock, `monotonic_ns`
    is that host's monotonic clock at time 0 where it is known. `collective_ends` reads when the collectives of each GPU
    ended, in order.
    """

    path: str
    kind: str
    host: str
    work: dict[tuple[int, GpuId], Work]
    ranges: list[Range]
    clock_ns: int = 0
    has_wall_clock: bool = True
    clock_group: str = ""
    monotonic_ns: int | None = None
    captured: tuple[int, int] | None = None
    not_captured: list[GpuId] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    distrust: list[str] = field(default_factory=list)
    collective_ends: Callable[[], list[list[int]]] = list
    launch_coverage: float | None = None
    explain: Explain | None = None
    drain: Drain | None = None

    def hull(self) -> tuple[int, int] | None:
        """First and last time of any work or range, on the wall clock."""
        hulls = [h for work in self.work.values() if (h := work.hull())]
        hulls += [(r.start, r.end) for r in self.ranges]
        if not hulls:
            return None
        return min(h[0] for h in hulls) + self.clock_ns, max(h[1] for h in hulls) + self.clock_ns
