"""The rollout's tensor-parallel size: the paper's rule, its bounds, and the measured table."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.planner import (
    DecodeTable,
    FixedPlanner,
    PreemptionPlanner,
    ProfilePlanner,
    RoundForecast,
    SchedulePlanner,
    allowed_sizes,
)
from rollpacker.types import RoundKind

SHORT, LONG = RoundKind.SHORT, RoundKind.LONG


def forecast(
    kind: RoundKind = SHORT, step: int = 1, num_requests: int = 64, mean: float = 500.0, longest: float = 500.0
):
    return RoundForecast(step, kind, num_requests, mean, longest)


def play(planner: PreemptionPlanner, preemptions: list[int], kind: RoundKind = SHORT) -> list[int]:
    sizes = []
    for n in preemptions:
        sizes.append(planner.choose(forecast(kind)))
        planner.observe(kind, n)
    return [*sizes, planner.choose(forecast(kind))]


def test_fixed_never_changes() -> None:
    planner = FixedPlanner(2)
    planner.observe(SHORT, 10**6)
    assert planner.choose(forecast()) == 2


def test_schedule_plays_a_list_and_stays_at_its_last() -> None:
    planner = SchedulePlanner([1, 2, 1])
    assert [planner.choose(forecast(step=s)) for s in range(1, 6)] == [1, 2, 1, 1, 1]
    with pytest.raises(ValueError, match=r"planner.schedule is empty"):
        SchedulePlanner([])


def test_preemptions_that_grow_by_more_than_5_percent_double_the_size() -> None:
    assert play(PreemptionPlanner((1, 2, 4, 8), 1), [100, 105, 111, 111]) == [1, 1, 1, 2, 2]


def test_from_zero_any_preemption_is_growth() -> None:
    assert play(PreemptionPlanner((1, 2), 1), [0, 1]) == [1, 1, 2]


def test_the_first_round_has_nothing_to_grow_from() -> None:
    assert play(PreemptionPlanner((1, 2), 1), [1000]) == [1, 1]


def test_four_rounds_without_preemption_halve_the_size() -> None:
    assert play(PreemptionPlanner((1, 2, 4), 4), [0] * 8) == [4, 4, 4, 4, 2, 2, 2, 2, 1]


def test_after_a_halving_that_is_followed_by_growth_the_window_doubles() -> None:
    growth = [0, 0, 0, 0, 5]  # quiet, halved, then growth doubles again
    sizes = play(PreemptionPlanner((1, 2), 2), [*growth, *[0] * 7, 0, 5, *[0] * 16])
    assert sizes[4:6] == [1, 2]
    assert sizes[5:14] == [2] * 8 + [1]  # 8 quiet rounds this time
    assert sizes[14:31] == [2] * 16 + [1]  # then 16


def test_the_window_grows_to_32_and_no_further() -> None:
    planner = PreemptionPlanner((1, 2), 2)
    for _ in range(8):
        play(planner, [0] * 32 + [5])
    assert planner.state_dict()["short"]["window"] == 32


def test_literal_keeps_the_papers_rule() -> None:
    sizes = play(PreemptionPlanner((1, 2), 2, literal=True), [0, 0, 0, 0, 5, 0, 0, 0, 0, 5])
    assert sizes == [2, 2, 2, 2, 1, 2, 2, 2, 2, 1, 2]


def test_short_and_long_rounds_are_counted_apart() -> None:
    planner = PreemptionPlanner((1, 2, 4), 1)
    planner.observe(SHORT, 0)
    planner.observe(LONG, 50)
    planner.observe(SHORT, 0)
    assert (planner.choose(forecast(SHORT)), planner.choose(forecast(LONG))) == (1, 1)
    planner.observe(LONG, 60)
    assert (planner.choose(forecast(SHORT)), planner.choose(forecast(LONG))) == (1, 2)


@given(st.lists(st.tuples(st.sampled_from([SHORT, LONG]), st.integers(0, 20)), max_size=80), st.booleans())
def test_a_size_is_always_allowed_and_a_saved_planner_goes_on(
    rounds: list[tuple[RoundKind, int]], literal: bool
) -> None:
    sizes = allowed_sizes(16, 8, 12, 2)
    planner, copy = (PreemptionPlanner(sizes, 2, literal=literal) for _ in range(2))
    for kind, n in rounds:
        planner.observe(kind, n)
        copy.load_state_dict(json.loads(json.dumps(planner.state_dict())))
        for k in (SHORT, LONG):
            assert planner.choose(forecast(k)) == copy.choose(forecast(k)) in sizes
        planner, copy = copy, planner


@pytest.mark.parametrize(
    ("gpus", "per_node", "heads", "kv_heads", "sizes"),
    [
        (16, 8, 28, 4, (1, 2, 4)),  # Qwen2.5-7B: 28 heads do not divide by 8
        (16, 8, 40, 8, (1, 2, 4, 8)),  # 14B; never 16, a TP group does not cross a node
        (4, 8, 64, 8, (1, 2, 4)),
        (16, 8, 64, 2, (1, 2, 4, 8)),  # KV heads replicated at 4 and 8
        (6, 6, 12, 4, (1, 2)),  # 3 and 4 KV heads divide neither way; 6 neither
    ],
)
def test_bounds(gpus: int, per_node: int, heads: int, kv_heads: int, sizes: tuple[int, ...]) -> None:
    assert allowed_sizes(gpus, per_node, heads, kv_heads) == sizes


def test_a_start_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3"):
        PreemptionPlanner((1, 2), 3)


# milliseconds per token of the 32B model in research: batch 1 and 64, TP 2, 4, 8
TABLE = DecodeTable(
    tpot_ms={
        tp: {(b, c): ms + c / 32768 for b, ms in ((1, one), (64, many)) for c in (0, 32768)}
        for tp, one, many in ((2, 17.1, 24.0), (4, 11.0, 14.9), (8, 7.9, 10.4))
    },
)
CAPACITY_TOKENS = {2: 245_000, 4: 741_000, 8: 1_700_000}


def test_profile_interpolates_its_table_and_goes_on_past_its_end() -> None:
    assert TABLE.milliseconds(2, 1, 0) == pytest.approx(17.1)
    assert TABLE.milliseconds(2, 32.5, 16384) == pytest.approx((17.1 + 24.0) / 2 + 0.5)
    assert TABLE.milliseconds(2, 127, 0) == pytest.approx(24.0 + 6.9)
    assert TABLE.milliseconds(2, 1, 65536) == pytest.approx(17.1 + 2)


def test_profile_raises_tp_for_the_tail_and_not_for_the_bulk() -> None:
    """A few very long responses are bound by latency, which more TP lowers; many short ones by throughput."""
    cells = {1: (8.0, 19.0), 2: (5.0, 21.0)}
    table = DecodeTable({tp: {(1, 0): one, (256 * tp, 0): full} for tp, (one, full) in cells.items()})
    planner = ProfilePlanner(table, num_gpus=16, capacity_tokens=lambda tp: 10**6)
    assert planner.choose(forecast(LONG, num_requests=64, mean=8000.0, longest=32768.0)) == 2
    assert planner.choose(forecast(SHORT, num_requests=16 * 256, mean=500.0, longest=600.0)) == 1


def test_profile_counts_turns_where_the_cache_is_too_small() -> None:
    planner = ProfilePlanner(TABLE, num_gpus=8, capacity_tokens=CAPACITY_TOKENS.__getitem__)
    fits = planner.round_ms(2, forecast(num_requests=4 * 24, mean=10_000.0, longest=10_000.0))
    twice = planner.round_ms(2, forecast(num_requests=4 * 48, mean=10_000.0, longest=10_000.0))
    assert twice == pytest.approx(2 * fits, rel=0.1)


def test_profile_refuses_a_table_with_holes() -> None:
    with pytest.raises(ValueError, match=r"TP 2: the table lacks .*\(4, 8\)"):
        DecodeTable({2: {(1, 8): 1.0, (4, 16): 1.0, (1, 16): 1.0}})
