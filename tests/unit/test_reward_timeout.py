"""Time limits per test case: T = min(max(T_min, 1.5 anchor), T_max), anchored by correct responses alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.messages import RequestFinished, RewardDone, ScoreResponse
from rollpacker.policy.timeout import AdaptiveTimeout


def test_before_any_correct_response_the_limit_is_the_maximum() -> None:
    timeout = AdaptiveTimeout()
    assert (timeout.case_timeouts_s("p"), timeout.max_s) == ((), 30.0)


def test_the_limit_is_1_5_times_the_longest_correct_execution() -> None:
    timeout = AdaptiveTimeout()
    timeout.observe("p", [4.0, 0.1, 28.0], 1.0)
    timeout.observe("p", [3.0, 0.2, 1.0], 1.0)
    assert timeout.case_timeouts_s("p") == (6.0, 2.0, 30.0)


def test_only_correct_responses_move_an_anchor() -> None:
    timeout = AdaptiveTimeout()
    timeout.observe("p", [4.0], 1.0)
    timeout.observe("p", [20.0], 0.0)
    assert timeout.case_timeouts_s("p") == (6.0,)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100), st.sampled_from([0.0, 1.0])), max_size=40))
def test_limits_stay_in_their_bounds_only_rise_and_survive_a_checkpoint(rows: list[tuple[str, float, float]]) -> None:
    timeout, copy = AdaptiveTimeout(), AdaptiveTimeout()
    last: dict[str, float] = {}
    for prompt_id, seconds, score in rows:
        timeout.observe(prompt_id, [seconds], score)
        for limit in timeout.case_timeouts_s(prompt_id):
            assert 2.0 <= limit <= 30.0 and limit >= last.get(prompt_id, 0.0)
            last[prompt_id] = limit
    copy.load_state_dict(json.loads(json.dumps(timeout.state_dict())))
    assert all(copy.case_timeouts_s(p) == timeout.case_timeouts_s(p) for p in "ab")


def test_a_test_case_that_one_response_did_not_reach_keeps_its_anchor() -> None:
    timeout = AdaptiveTimeout()
    timeout.observe("p", [4.0, 8.0], 1.0)
    timeout.observe("p", [6.0], 1.0)
    assert timeout.case_timeouts_s("p") == (9.0, 12.0)


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="min_s=5"):
        AdaptiveTimeout(min_s=5.0, max_s=2.0)


def test_the_controller_owns_the_anchors_and_hands_out_the_limits() -> None:
    """A response on one replica teaches the limit of the next one of its prompt on another."""
    from test_controller import make_controller

    controller = make_controller(1, n=2, adaptive_timeout=AdaptiveTimeout())
    controller.begin_step(1)
    (first,) = controller.on(RequestFinished(0.0, 0, 0, 3, "stop"))
    controller.on(RewardDone(0.0, 0, 0, 1.0, False, 4.1, (4.0, 0.1)))
    (second,) = controller.on(RequestFinished(1.0, 1, 1, 3, "stop"))
    assert first == ScoreResponse(controller.round.requests[0], 2.0)
    assert second == ScoreResponse(controller.round.requests[1], 2.0, (6.0, 2.0))
    controller.on(RewardDone(2.0, 1, 1, 0.0, False, 1.0))
    assert controller.finish_step().stats.reward_timeout_budget_s == (2.0 + 6.0) / 2
