"""Sets of half-open intervals of whole nanoseconds: the arithmetic under every number of the report.

Invariants: an `Intervals` is sorted and disjoint (touching intervals are one); the order in which intervals are given is
irrelevant; every sum is an exact integer. numpy, where it is installed, only makes long lists faster.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, islice, pairwise
from typing import Any

_NUMPY_PAYS_FROM = 5_000


@cache
def numpy_or_none() -> Any:
    """The numpy module, loaded at the first call; None where it is not installed."""
    return importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None


class Intervals:
    """An immutable set of nanoseconds, as sorted disjoint intervals [starts[i], ends[i])."""

    __slots__ = ("_before", "ends", "starts")

    def __init__(self, starts: array[int], ends: array[int]) -> None:
        """Take sorted, disjoint, non-empty intervals as they are; `Intervals.of` takes any."""
        self.starts = starts
        self.ends = ends
        self._before: Sequence[int] | None = None

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Intervals:
        """The union of intervals in any order, overlapping or not; one that ends where it starts adds nothing."""
        ordered = sorted(pair for pair in pairs if pair[1] > pair[0])
        return cls.from_arrays(array("q", [s for s, _ in ordered]), array("q", [e for _, e in ordered]))

    @classmethod
    def from_arrays(cls, starts: array[int], ends: array[int]) -> Intervals:
        """The union of [starts[i], ends[i]), in any order."""
        numpy = numpy_or_none() if len(starts) >= _NUMPY_PAYS_FROM else None
        if numpy is not None:
            merged = merge_with_numpy(numpy, numpy.frombuffer(starts, "i8"), numpy.frombuffer(ends, "i8"))
            return cls(array("q", merged[0].tobytes()), array("q", merged[1].tobytes()))
        pairs: Iterable[tuple[int, int]] = zip(starts, ends, strict=True)
        if not all(map(operator.le, starts, islice(starts, 1, None))):
            pairs = sorted(pairs)
        merged_starts, merged_ends = array("q"), array("q")
        open_start, open_end = 0, None
        for start, end in pairs:
            if end <= start:
                continue
            if open_end is None or start > open_end:
                if open_end is not None:
                    merged_starts.append(open_start)
                    merged_ends.append(open_end)
                open_start, open_end = start, end
            elif end > open_end:
                open_end = end
        if open_end is not None:
            merged_starts.append(open_start)
            merged_ends.append(open_end)
        return cls(merged_starts, merged_ends)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.ends, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and self.starts == other.starts and self.ends == other.ends

    def __repr__(self) -> str:
        return f"Intervals({list(self)!r})"

    @property
    def total(self) -> int:
        """All nanoseconds of the set."""
        return self._lengths_before()[-1]

    def measure(self, start: int, end: int) -> int:
        """Nanoseconds of the set within [start, end)."""
        if end <= start or not self.starts:
            return 0
        return self._up_to(end) - self._up_to(start)

    def clip(self, start: int, end: int) -> Intervals:
        """The part within [start, end)."""
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        if end <= start or low >= high:
            return Intervals(array("q"), array("q"))
        starts, ends = self.starts[low:high], self.ends[low:high]
        starts[0], ends[-1] = max(starts[0], start), min(ends[-1], end)
        return Intervals(starts, ends)

    def union(self, *others: Intervals) -> Intervals:
        """The union with other sets."""
        if not any(len(other) for other in others):
            return self
        starts, ends = array("q", self.starts), array("q", self.ends)
        for other in others:
            starts.extend(other.starts)
            ends.extend(other.ends)
        return Intervals.from_arrays(starts, ends)

    def minus(self, other: Intervals) -> Intervals:
        """The part that is not in `other`; time grows with this set and what it overlaps, not with all of `other`."""
        if len(self) >= _NUMPY_PAYS_FROM and len(other) and (numpy := numpy_or_none()) is not None:
            return _minus_with_numpy(numpy, self, other)
        starts, ends = array("q"), array("q")
        for start, end in self:
            index = bisect_right(other.ends, start)
            while index < len(other.starts) and other.starts[index] < end:
                if other.starts[index] > start:
                    starts.append(start)
                    ends.append(other.starts[index])
                start = other.ends[index]
                index += 1
            if start < end:
                starts.append(start)
                ends.append(end)
        return Intervals(starts, ends)

    def intersect(self, other: Intervals) -> Intervals:
        """What both sets hold."""
        return self.minus(self.minus(other))

    def shift(self, by: int) -> Intervals:
        """The set moved by so many nanoseconds."""
        if not by or not self.starts:
            return self
        if len(self) >= _NUMPY_PAYS_FROM and (numpy := numpy_or_none()) is not None:
            starts, ends = (array("q", (numpy.frombuffer(a, "i8") + by).tobytes()) for a in (self.starts, self.ends))
            return Intervals(starts, ends)
        return Intervals(array("q", [s + by for s in self.starts]), array("q", [e + by for e in self.ends]))

    def first_in(self, start: int, end: int) -> int | None:
        """The first nanosecond of the set in [start, end), or None."""
        index = bisect_right(self.ends, start)
        if end <= start or index == len(self.starts) or self.starts[index] >= end:
            return None
        return max(self.starts[index], start)

    def last_in(self, start: int, end: int) -> int | None:
        """The end of the last part of the set in [start, end), or None."""
        index = bisect_left(self.starts, end) - 1
        if end <= start or index < 0 or self.ends[index] <= start:
            return None
        return min(self.ends[index], end)

    def gaps(self, at_least: int) -> list[tuple[int, int]]:
        """The holes between neighbours that last at least so many nanoseconds, in order."""
        if len(self) >= _NUMPY_PAYS_FROM and (numpy := numpy_or_none()) is not None:
            starts, ends = numpy.frombuffer(self.starts, "i8"), numpy.frombuffer(self.ends, "i8")
            where = numpy.flatnonzero(starts[1:] - ends[:-1] >= at_least).tolist()
        else:
            holes = map(operator.sub, islice(self.starts, 1, None), self.ends)
            where = [index for index, hole in enumerate(holes) if hole >= at_least]
        return [(self.ends[index], self.starts[index + 1]) for index in where]

    def hull(self) -> tuple[int, int] | None:
        """The first and the last nanosecond, or None for the empty set."""
        return (self.starts[0], self.ends[-1]) if self.starts else None

    def bridge(self, at_most: int) -> Intervals:
        """The set with every hole of at most so many nanoseconds filled."""
        pairs = [(start, end) for start, end in self]
        pairs += [(a[1], b[0]) for a, b in pairwise(self) if b[0] - a[1] <= at_most]
        return Intervals.of(pairs)

    def _lengths_before(self) -> Sequence[int]:
        """The nanoseconds before each interval, and before the end."""
        if self._before is None:
            numpy = numpy_or_none() if len(self) >= _NUMPY_PAYS_FROM else None
            if numpy is not None:
                lengths = numpy.frombuffer(self.ends, "i8") - numpy.frombuffer(self.starts, "i8")
                self._before = array("q", [0]) + array("q", numpy.cumsum(lengths).tobytes())
            else:
                self._before = list(accumulate(map(operator.sub, self.ends, self.starts), initial=0))
        return self._before

    def _up_to(self, time: int) -> int:
        index = bisect_right(self.starts, time)
        if index == 0:
            return 0
        before = self._lengths_before()
        return before[index - 1] + min(time, self.ends[index - 1]) - self.starts[index - 1]


def merge_with_numpy(numpy: Any, starts: Any, ends: Any) -> tuple[Any, Any]:
    """The union of int64 arrays of intervals, sorted or not, as two arrays."""
    keep = ends > starts
    if not keep.all():
        starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return starts, ends
    if (starts[1:] < starts[:-1]).any():
        order = numpy.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = numpy.maximum.accumulate(ends)
    breaks = numpy.flatnonzero(starts[1:] > reach[:-1])
    return starts[numpy.concatenate(([0], breaks + 1))], reach[numpy.concatenate((breaks, [len(reach) - 1]))]


def _minus_with_numpy(numpy: Any, whole: Intervals, part: Intervals) -> Intervals:
    """`whole` without `part`: each interval that n of `part` touch becomes n + 1 pieces, of which the empty ones go."""
    starts, ends = numpy.frombuffer(whole.starts, "i8"), numpy.frombuffer(whole.ends, "i8")
    part_starts, part_ends = numpy.frombuffer(part.starts, "i8"), numpy.frombuffer(part.ends, "i8")
    low = numpy.searchsorted(part_ends, starts, "right")
    touched = numpy.maximum(numpy.searchsorted(part_starts, ends, "left") - low, 0)
    owner = numpy.repeat(numpy.arange(len(starts)), touched + 1)
    nth = numpy.arange(len(owner)) - numpy.repeat(numpy.cumsum(touched + 1) - touched - 1, touched + 1)
    hole = low[owner] + nth
    before, after = numpy.maximum(hole - 1, 0), numpy.minimum(hole, len(part_starts) - 1)
    piece_starts = numpy.where(nth == 0, starts[owner], numpy.maximum(part_ends[before], starts[owner]))
    piece_ends = numpy.where(nth == touched[owner], ends[owner], numpy.minimum(part_starts[after], ends[owner]))
    keep = piece_ends > piece_starts
    return Intervals(array("q", piece_starts[keep].tobytes()), array("q", piece_ends[keep].tobytes()))
