"""Isolating the predicted tail: the best split of all, no worse than none, and blind to what is sampled."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.tail_isolation import TailIsolationRouter, best_split
from rollpacker.types import Prompt


def step_s(batch: float) -> float:
    """10 ms, and 1 ms a request."""
    return 0.010 + 0.001 * batch


def pool_s(tokens: list[float], num_responses: int, replicas: int) -> float:
    """Written out for the test: what a pool takes at its concurrency, bound by its work or by its longest response."""
    if not tokens:
        return 0.0
    per_replica = max(len(tokens) * num_responses / replicas, 1.0)
    throughput = per_replica / step_s(per_replica)
    return max(sum(tokens) * num_responses / replicas / throughput, max(tokens) * step_s(per_replica))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 8))
def test_no_split_is_predicted_to_be_faster(lengths: list[int], num_replicas: int, num_responses: int) -> None:
    tokens = sorted(map(float, lengths), reverse=True)
    split = best_split(tokens, num_replicas, num_responses, step_s)
    everything = [pool_s(tokens, num_responses, num_replicas)]
    for tail, replicas in itertools.product(range(1, len(tokens)), range(1, num_replicas)):
        tail_s = pool_s(tokens[:tail], num_responses, replicas)
        everything.append(max(tail_s, pool_s(tokens[tail:], num_responses, num_replicas - replicas)))
    assert split.seconds == pytest.approx(min(everything))


def prompts(lengths: list[int], num_responses: int) -> list[Prompt]:
    return [Prompt(f"{i} {n}") for i, n in enumerate(lengths) for _ in range(num_responses)]


def predict(prompt: Prompt) -> float:
    return float(prompt.prompt_id.split()[1])


def test_the_longest_prompts_decode_alone() -> None:
    """30 responses of 100 tokens and 2 of 10,000 on 4 replicas: the long ones get one of their own, one each or both."""
    router = TailIsolationRouter(4, predict, step_s=step_s)
    lengths = [100] * 10 + [10_000] + [100] * 5
    replicas = router.assign(prompts(lengths, 2))
    tail = {replicas[20], replicas[21]}
    assert tail.isdisjoint(replicas[:20] + replicas[22:])
    counts = [(replicas[:20] + replicas[22:]).count(replica) for replica in set(range(4)) - tail]
    assert max(counts) - min(counts) <= 1


def test_equal_predictions_are_spread_over_all_replicas() -> None:
    router = TailIsolationRouter(4, lambda prompt: 500.0, step_s=step_s)
    replicas = router.assign([Prompt(str(i)) for i in range(8) for _ in range(2)])
    assert [replicas.count(replica) for replica in range(4)] == [4, 4, 4, 4]


def test_what_is_launched_later_goes_to_the_replicas_that_stay() -> None:
    router = TailIsolationRouter(4, predict, step_s=step_s)
    router.observe({}, (0, 1))
    assert set(router.assign(prompts([10_000, 100, 100, 100], 2))) == {2, 3}
