"""Which replica decodes a response: even promises, spread groups, and migrations that move what must move."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.routing import BalancedRouter, RequestRouter, RunningRequest, plan_migration
from rollpacker.types import Prompt


def prompt(i: int) -> Prompt:
    return Prompt(f"p{i}", (1,) * 3)


def predict_100(prompt: Prompt) -> float:
    return 100.0


def test_off_deals_the_responses_out_one_by_one() -> None:
    assert RequestRouter(3).assign([prompt(0)] * 7, first_index=2) == [2, 0, 1, 2, 0, 1, 2]


@given(st.integers(1, 9), st.integers(0, 60))
def test_with_equal_predictions_every_replica_gets_as_many(num_replicas: int, num_requests: int) -> None:
    replicas = BalancedRouter(num_replicas, predict_100).assign([prompt(0)] * num_requests)
    assert replicas == [i % num_replicas for i in range(num_requests)]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=80), st.integers(1, 8))
def test_longest_first_keeps_grahams_bound(lengths: list[int], num_replicas: int) -> None:
    """LPT: the fullest replica has at most 4/3 - 1/(3m) of the best possible, which is at least the mean and the longest."""
    lengths.sort(reverse=True)
    prompts = [Prompt(str(i)) for i in range(len(lengths))]
    replicas = BalancedRouter(num_replicas, lambda p: float(lengths[int(p.prompt_id)])).assign(prompts)
    loads = [sum(n for n, r in zip(lengths, replicas, strict=True) if r == k) for k in range(num_replicas)]
    second = lengths[num_replicas - 1] + lengths[num_replicas] if len(lengths) > num_replicas else 0
    best = max(sum(lengths) / num_replicas, lengths[0], second)
    assert max(loads) <= (4 / 3 - 1 / (3 * num_replicas)) * best * 1.2 + 1e-6  # `best` is a lower bound of the optimum


def test_each_response_goes_to_the_replica_with_the_fewest_promised_tokens() -> None:
    """Two long responses occupy two replicas; the next short ones go to the third, until it has as much."""
    lengths = {"p0": 50.0, "p1": 10.0}
    router = BalancedRouter(3, lambda p: lengths[p.prompt_id])
    assert router.assign([prompt(0), prompt(0), *[prompt(1)] * 6]) == [0, 1, 2, 2, 2, 2, 2, 0]


def test_a_finished_or_aborted_request_frees_its_replica() -> None:
    router = BalancedRouter(2, predict_100)
    router.assign([prompt(0)] * 4)
    router.release(0)
    router.release(2)
    assert router.assign([prompt(1)] * 2, first_index=4) == [0, 0]


def test_a_response_that_outlives_its_prediction_still_counts() -> None:
    """Replica 0 promised less, but its cache holds more: what is free decides."""
    router = BalancedRouter(2, predict_100, capacity_tokens=1000)
    router.assign([prompt(0)] * 3)  # 0, 1, 0
    router.release(0)
    router.release(2)
    router.observe({0: 0.9, 1: 0.1}, ())
    assert router.assign([prompt(1)], first_index=3) == [1]


def test_a_replica_that_trains_gets_no_more_requests() -> None:
    router = BalancedRouter(4, predict_100)
    router.assign([prompt(0)] * 4)
    router.observe({}, (2, 3))
    router.release(3)
    assert set(router.assign([prompt(1)] * 6, first_index=4)) == {0, 1}


requests = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 500), st.integers(1, 1000)), max_size=60).map(
    lambda rows: [RunningRequest(i, r, n, float(p)) for i, (r, n, p) in enumerate(rows)]
)


@given(requests, st.sets(st.integers(0, 7), min_size=1))
def test_migration_moves_what_must_move_and_nothing_else(running: list[RunningRequest], staying: set[int]) -> None:
    targets = plan_migration(running, staying)
    assert targets.keys() == {r.index for r in running if r.replica not in staying}
    assert set(targets.values()) <= staying


def test_migration_goes_longest_first_to_the_least_loaded() -> None:
    running = [RunningRequest(0, 0, 10, 300.0), RunningRequest(1, 2, 10, 200.0), RunningRequest(2, 3, 250, 100.0)]
    assert plan_migration(running, (0, 1)) == {2: 1, 1: 1}
