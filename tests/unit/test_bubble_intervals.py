"""Interval arithmetic against sets of single nanoseconds, with numpy and without."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.profiling.bubble_report import intervals
from rollpacker.profiling.bubble_report.intervals import Intervals

PAIRS = st.lists(st.tuples(st.integers(-20, 60), st.integers(-3, 25)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


@pytest.fixture(params=["numpy", "pure"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every property holds for both; numpy is forced for short lists too."""
    if request.param == "numpy":
        pytest.importorskip("numpy")
        monkeypatch.setattr(intervals, "_NUMPY_PAYS_FROM", 0)
    else:
        monkeypatch.setattr(intervals, "_NUMPY_PAYS_FROM", 1 << 60)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in pairs for t in range(start, end)}


def check(found: Intervals, expected: set[int]) -> None:
    pairs = list(found)
    assert points(pairs) == expected
    assert all(start < end for start, end in pairs)
    assert all(a[1] < b[0] for a, b in pairwise(pairs)), "sorted, disjoint, not touching"
    assert found.total == len(expected)


@given(PAIRS, PAIRS, st.integers(-25, 90), st.integers(-25, 90))
def test_everything_equals_brute_force(a: list, b: list, low: int, high: int) -> None:
    x, y, p, q = Intervals.of(a), Intervals.of(b), points(a), points(b)
    check(x, p)
    check(x.union(y), p | q)
    check(x.minus(y), p - q)
    check(x.intersect(y), p & q)
    check(x.shift(7), {t + 7 for t in p})
    inside = {t for t in p if low <= t < high}
    check(x.clip(low, high), inside)
    assert x.measure(low, high) == len(inside)
    assert x.first_in(low, high) == min(inside, default=None)
    assert x.last_in(low, high) == (max(inside) + 1 if inside else None)
    assert x.hull() == ((min(p), max(p) + 1) if p else None)


@given(PAIRS, st.integers(1, 20))
def test_gaps_and_bridges(a: list, size: int) -> None:
    x, pairs = Intervals.of(a), list(Intervals.of(a))
    holes = [(p[1], q[0]) for p, q in pairwise(pairs)]
    assert x.gaps(size) == [(s, e) for s, e in holes if e - s >= size]
    bridged = x.bridge(size)
    assert points(list(bridged)) == points(a) | points([(s, e) for s, e in holes if e - s <= size])


@given(PAIRS, st.randoms())
def test_the_order_of_intervals_is_irrelevant(a: list, random) -> None:
    shuffled = list(a)
    random.shuffle(shuffled)
    starts, ends = (array("q", [p[i] for p in shuffled]) for i in (0, 1))
    assert Intervals.from_arrays(starts, ends) == Intervals.of(a)
    assert Intervals.of(shuffled) == Intervals.of(a)
