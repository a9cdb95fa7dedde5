from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.profiling.bubbles import (
    idle_ratio,
    reward_bubble_ratio,
    rollout_bubble_ratio,
)


def test_known_ratios() -> None:
    # Four ranks, a round of 10 s: 40 rank-seconds, 25 of them busy.
    assert rollout_bubble_ratio([10.0, 8.0, 5.0, 2.0], 10.0) == pytest.approx(0.375)
    assert idle_ratio("train", [2.0, 4.0], 4.0) == pytest.approx(0.25)
    assert idle_ratio("rollout", [0.0, 0.0], 5.0) == 1.0
    # 3 s of a step of 12 s pass between the last generation and the last reward.
    assert reward_bubble_ratio(6.0, 9.0, 12.0) == pytest.approx(0.25)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=64), st.floats(1e-3, 1e6))
def test_ratio_is_a_share_and_counts_every_idle_second(shares: list[float], wall_s: float) -> None:
    busy_s = [share * wall_s for share in shares]
    ratio = idle_ratio("gen", busy_s, wall_s)
    assert 0.0 <= ratio <= 1.0
    assert ratio * len(busy_s) * wall_s == pytest.approx(sum(wall_s - b for b in busy_s), abs=1e-9 * wall_s * 64)


def test_rounding_is_forgiven() -> None:
    third = sum([0.1] * 3)  # a little above 0.3
    assert third > 0.3
    assert idle_ratio("gen", [third, third], 0.3) == 0.0


@pytest.mark.parametrize("busy", [10.1, -0.1, float("nan")])
def test_impossible_busy_time_is_an_error_with_the_numbers(busy: float) -> None:
    with pytest.raises(ValueError, match=rf"rollout.*rank 1 was busy for {busy:g} s of 10 s"):
        rollout_bubble_ratio([1.0, busy], 10.0)


def test_undefined_ratios_are_errors() -> None:
    with pytest.raises(ValueError, match="no rank"):
        idle_ratio("gen", [], 1.0)
    for wall_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="wall time"):
            idle_ratio("gen", [0.0], wall_s)


@pytest.mark.parametrize(("generation", "reward"), [(9.0, 6.0), (0.0, 13.0), (0.0, float("nan"))])
def test_reward_wait_outside_the_step_is_an_error(generation: float, reward: float) -> None:
    with pytest.raises(ValueError, match="last reward returned at"):
        reward_bubble_ratio(generation, reward, 12.0)
