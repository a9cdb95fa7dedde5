"""avg@k, maj@k, pass@k against the enumeration of every draw."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.runtime.val_core import Attempt, average, majority, pass_at, pass_sizes, val_core

attempts = st.lists(
    st.builds(Attempt, st.sampled_from([-1.0, 0.0, 0.25, 1.0]), st.sampled_from(["a", "b", "c", "", None])),
    min_size=1,
    max_size=7,
)


def by_text(*pairs: tuple[str | None, float]) -> list[Attempt]:
    return [Attempt(score, answer) for answer, score in pairs]


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_one(n: int) -> None:
    for c in range(n + 1):
        correct = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(correct, k))
            assert pass_at(k, n, c) == pytest.approx(float(Fraction(sum(map(any, subsets)), len(subsets))), abs=1e-15)


def test_pass_at_k_of_many_responses_neither_overflows_nor_leaves_the_unit_interval() -> None:
    values = [pass_at(k, 4096, 3) for k in pass_sizes(4096)]
    assert values == sorted(values) and values[-1] == 1.0 and values[0] == pytest.approx(3 / 4096)
    for k, n, c in ((0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1)):
        with pytest.raises(ValueError, match="expected k, c <= n"):
            pass_at(k, n, c)


def test_pass_at_k_is_unbiased() -> None:
    """The mean over every outcome of n draws that are correct with probability p is 1 - (1 - p)^k."""
    n, p = 6, 0.3
    for k in pass_sizes(n):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at(k, n, c) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes_are_powers_of_two_and_n(n: int, sizes: list[int]) -> None:
    assert pass_sizes(n) == sizes


@settings(deadline=None)
@given(attempts)
def test_majority_is_the_mean_over_voters_of_the_winning_answers(given_attempts: list[Attempt]) -> None:
    """Drawing a winner fairly among tied answers and then one of its voters fairly: the expected score, enumerated."""
    names = [f"nobody else's {i}" if a.answer is None else a.answer for i, a in enumerate(given_attempts)]
    counts = Counter(names)
    winners = [name for name, count in counts.items() if count == max(counts.values())]
    expected = Fraction(0)
    for winner in winners:
        voters = [a for a, name in zip(given_attempts, names, strict=True) if name == winner]
        for voter in voters:
            expected += Fraction(voter.score) / len(voters) / len(winners)
    assert majority(given_attempts) == pytest.approx(float(expected), abs=1e-12)
    shuffled = list(reversed(given_attempts))
    assert majority(shuffled) == pytest.approx(majority(given_attempts), abs=1e-12)


def test_majority_on_known_votes() -> None:
    assert majority(by_text(("4", 1.0), ("5", 0.0), ("4", 1.0))) == 1.0
    assert majority(by_text(("4", 1.0), ("5", 0.0), ("5", 0.0))) == 0.0
    assert majority(by_text(("4", 1.0), ("5", 0.0))) == 0.5  # a tie: a fair coin
    assert majority(by_text(("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0), ("6", 0.0))) == 0.5
    assert majority(by_text(("4", 1.0), ("4", 0.0), ("5", 0.0))) == 0.5  # the same answer, once cut at the cap
    assert majority(by_text(("4", 1.0), (None, 0.0), (None, 0.0))) == pytest.approx(1 / 3)  # no answer is no bloc
    assert majority(by_text(("", 0.0), ("", 0.0), ("4", 1.0))) == 0.0  # an empty answer is one


def test_a_single_greedy_response_gives_the_same_three_times() -> None:
    groups = [("maths", by_text(("1", 1.0))), ("maths", by_text(("2", 0.0))), ("maths", by_text(("3", 1.0)))]
    assert val_core(groups, 1) == {f"val-core/maths/{m}@1": pytest.approx(2 / 3) for m in ("avg", "maj", "pass")}


def test_domains_are_averaged_over_their_prompts_and_all_over_all_prompts() -> None:
    right, wrong, partial = ("r", 1.0), ("w", 0.0), ("p", 0.5)
    groups = [
        ("maths", by_text(right, right, wrong, wrong)),
        ("code", by_text(wrong, wrong, wrong, wrong)),
        ("maths", by_text(right, wrong, partial, partial)),
    ]
    metrics = val_core(groups, 4)
    assert list(metrics) == [
        f"val-core/{domain}/{name}"
        for domain in ("maths", "code", "all")
        for name in ("avg@4", "maj@4", "pass@1", "pass@2", "pass@4")
    ]
    assert metrics["val-core/maths/avg@4"] == 0.5 and metrics["val-core/all/avg@4"] == pytest.approx(1 / 3)
    assert metrics["val-core/maths/maj@4"] == 0.5  # a tie, and half a point
    assert metrics["val-core/maths/pass@1"] == pytest.approx((0.5 + 0.25) / 2)  # half a point is not a pass
    assert metrics["val-core/maths/pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert metrics["val-core/all/pass@4"] == pytest.approx(2 / 3) and metrics["val-core/code/pass@4"] == 0.0


def test_averages_are_exact_for_many_prompts() -> None:
    assert average([Attempt(0.1, None)] * 10) == 0.1
