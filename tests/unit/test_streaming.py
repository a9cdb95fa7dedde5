"""Groups to training replicas while the rollout goes on: each sent once, evenly, and only where that is exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.streaming import StreamBatcher, streaming_refusal
from rollpacker.types import Group, Prompt, Request, ScoredResponse


def group(i: int, num_tokens: int) -> Group:
    prompt = Prompt(f"p{i}")
    return Group(prompt, (ScoredResponse(Request(i, prompt, 0, 0, 0, 9), num_tokens, "stop", 1.0, False, 0.0),))


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(0, 60), st.integers(1, 4))
def test_every_group_is_sent_once_wherever_the_scale_down_falls(lengths: list[int], at: int, half: int) -> None:
    batcher = StreamBatcher(2 * half, adv_estimator="grpo")
    groups = [group(i, n) for i, n in enumerate(lengths)]
    sent = []
    for i, g in enumerate(groups):
        if i == at:
            sent += batcher.on_scale_down(range(half, 2 * half))
        sent += batcher.on_group(g)
    if at < len(groups):
        assert batcher.num_streamed == len(groups) == len(sent)
        assert all(replica >= half for replica, _ in sent)
    sent += batcher.on_rollout_end()
    assert sorted(g.prompt.prompt_id for _, g in sent) == sorted(g.prompt.prompt_id for g in groups)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 6))
def test_each_group_goes_to_the_least_loaded_replica(lengths: list[int], num_replicas: int) -> None:
    batcher = StreamBatcher(num_replicas, adv_estimator="rloo")
    batcher.on_scale_down(range(num_replicas))
    loads = [0] * num_replicas
    for i, n in enumerate(lengths):
        ((replica, _),) = batcher.on_group(group(i, n))
        assert loads[replica] == min(loads)
        loads[replica] += n


def test_when_the_rollout_ends_the_rest_is_spread_over_all_replicas() -> None:
    """Replica 1 has trained 30 tokens already, so replica 0 takes the next; those are not streamed any more."""
    batcher = StreamBatcher(2, adv_estimator="dr_grpo")
    batcher.on_scale_down([1])
    assert [replica for replica, _ in batcher.on_group(group(0, 30))] == [1]
    assert batcher.on_rollout_end() == []
    sent = [batcher.on_group(group(i, n))[0][0] for i, n in enumerate((20, 15, 30), 1)]
    assert sent == [0, 0, 1]
    assert batcher.num_streamed == 1


def test_without_a_scale_down_all_groups_are_balanced_at_the_end() -> None:
    batcher = StreamBatcher(2, adv_estimator="dr_grpo")
    for i, n in enumerate((10, 20, 30, 40)):
        assert batcher.on_group(group(i, n)) == []
    sent = batcher.on_rollout_end()
    assert [sum(g.responses[0].num_tokens for r, g in sent if r == k) for k in (0, 1)] == [50, 50]


def test_batch_whitened_estimators_wait_for_the_end_of_the_round() -> None:
    batcher = StreamBatcher(4, adv_estimator="reinforce_plus_plus")
    assert batcher.refusal is not None and "normalises over the whole batch" in batcher.refusal
    assert batcher.on_scale_down([2, 3]) == [] == batcher.on_group(group(0, 5))
    assert [g.prompt.prompt_id for _, g in batcher.on_rollout_end()] == ["p0"]
    assert batcher.num_streamed == 0


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_group_local_estimators_stream(estimator: str) -> None:
    assert streaming_refusal(estimator, 1) is None


def test_more_than_one_optimizer_step_per_rollout_refuses_to_stream() -> None:
    reason = streaming_refusal("grpo", 2)
    assert reason is not None and reason.startswith("2 optimizer steps per rollout")


def test_a_batcher_without_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="num_replicas=0"):
        StreamBatcher(0, adv_estimator="grpo")


def test_one_fetch_takes_what_is_complete_and_leaves_the_rest_for_the_end() -> None:
    batcher = StreamBatcher(2, adv_estimator="grpo", fetches_once=True)
    early, late = group(0, 10), group(1, 10)
    assert batcher.on_group(early) == []
    assert batcher.on_scale_down([1]) == [(1, early)]
    assert batcher.on_group(late) == []
    assert batcher.on_rollout_end() == [(0, late)]
    assert batcher.num_streamed == 1
