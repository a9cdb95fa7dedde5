"""Group-relative advantages against the statistics module."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.training.advantages import GROUP_STD_EPSILON, group_advantages, overlong_penalty, returns_to_go

ESTIMATORS = [("grpo", True), ("grpo", False), ("dr_grpo", True), ("dr_grpo", False)]
scores = st.floats(-10, 10, allow_subnormal=False)
groups = st.lists(scores, min_size=2, max_size=16)
# Multiples of 1/8: sums and differences of these are exact, so a shift loses nothing before the code under test.
eighths = st.integers(-80, 80).map(lambda n: n / 8)


@given(groups)
def test_grpo_is_the_standard_score(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (std + GROUP_STD_EPSILON) for r in rewards]
    ours = group_advantages(rewards, adv_estimator="grpo", divide_by_std=True)
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-8)  # absolute: rounding of the mean, over the epsilon


@pytest.mark.parametrize(("adv_estimator", "divide_by_std"), ESTIMATORS[1:])
@given(rewards=groups)
def test_without_the_division_it_is_the_distance_to_the_mean(
    rewards: list[float], adv_estimator: str, divide_by_std: bool
) -> None:
    expected = [r - statistics.fmean(rewards) for r in rewards]
    ours = group_advantages(rewards, adv_estimator=adv_estimator, divide_by_std=divide_by_std)
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("adv_estimator", "divide_by_std"), ESTIMATORS)
@given(reward=scores, size=st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(reward: float, size: int, adv_estimator: str, divide_by_std: bool) -> None:
    """Not almost zero: a group that teaches nothing must not move the model, nor count as one that does."""
    ours = group_advantages([reward] * size, adv_estimator=adv_estimator, divide_by_std=divide_by_std)
    assert ours == [0.0] * size


@pytest.mark.parametrize(("adv_estimator", "divide_by_std"), ESTIMATORS)
@given(rewards=st.lists(eighths, min_size=2, max_size=16), shift=eighths)
def test_a_constant_shift_changes_nothing(
    rewards: list[float], shift: float, adv_estimator: str, divide_by_std: bool
) -> None:
    ours = group_advantages(rewards, adv_estimator=adv_estimator, divide_by_std=divide_by_std)
    shifted = group_advantages([r + shift for r in rewards], adv_estimator=adv_estimator, divide_by_std=divide_by_std)
    assert shifted == pytest.approx(ours, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("adv_estimator", "divide_by_std"), ESTIMATORS)
@given(rewards=groups)
def test_the_advantages_of_a_group_sum_to_zero(rewards: list[float], adv_estimator: str, divide_by_std: bool) -> None:
    ours = group_advantages(rewards, adv_estimator=adv_estimator, divide_by_std=divide_by_std)
    assert sum(ours) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("low", [0.0, -1.0, 0.5])
@pytest.mark.parametrize("distance", [1.0, 0.25, 8.0])
def test_a_group_of_two(low: float, distance: float) -> None:
    """The mean is half-way, and the standard deviation (n - 1) is distance / sqrt(2)."""
    rewards = [low, low + distance]
    half, std = distance / 2, distance / 2**0.5
    score = half / (std + 1e-6)
    assert group_advantages(rewards, adv_estimator="grpo", divide_by_std=True) == pytest.approx([-score, score])
    assert group_advantages(rewards, adv_estimator="dr_grpo", divide_by_std=True) == pytest.approx([-half, half])


@given(groups)
def test_rloo_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert group_advantages(rewards, adv_estimator="rloo", divide_by_std=True) == pytest.approx(expected, abs=1e-12)
    assert group_advantages(rewards[:1], adv_estimator="rloo", divide_by_std=True) == rewards[:1]


@given(st.integers(0, 40), st.integers(1, 20))
def test_the_overlong_penalty_falls_from_zero_to_minus_the_factor(num_tokens: int, buffer_len: int) -> None:
    penalty = overlong_penalty(num_tokens, max_response_length=20, buffer_len=buffer_len, factor=0.5)
    inside = max(min(num_tokens, 20) - (20 - buffer_len), 0)
    assert penalty == pytest.approx(-0.5 * inside / buffer_len)


def test_returns_to_go() -> None:
    assert returns_to_go(1.0, np.array([0.1, 0.2, 0.3])) == pytest.approx([0.4, 0.5, 0.7])
    assert len(returns_to_go(1.0, np.zeros(0))) == 0


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_an_unknown_estimator_is_refused(divide_by_std: bool) -> None:
    with pytest.raises(ValueError, match="unknown group estimator 'gae'"):
        group_advantages([0.0, 1.0], adv_estimator="gae", divide_by_std=divide_by_std)
