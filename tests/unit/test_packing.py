"""Replicas and micro-batches: nothing lost, nothing twice, within the budget, and never far from the best balance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.data.packing import assign_to_replicas, split_micro_batches, split_mini_batches

lengths = st.lists(st.integers(1, 500), max_size=60)


@given(st.lists(st.integers(), max_size=40), st.one_of(st.none(), st.integers(1, 50)))
def test_mini_batches_are_as_few_and_as_equal_as_can_be(groups: list[int], max_groups: int | None) -> None:
    parts = split_mini_batches(groups, max_groups)
    assert [g for part in parts for g in part] == groups
    sizes = [len(part) for part in parts]
    assert len(parts) == -(-len(groups) // (max_groups or 40))
    assert not sizes or (max(sizes) - min(sizes) <= 1 and max(sizes) <= (max_groups or 40))


@given(lengths, st.integers(1, 8))
def test_every_sequence_goes_to_one_replica(lengths: list[int], num_replicas: int) -> None:
    assigned = assign_to_replicas(lengths, num_replicas)
    assert sorted(i for replica in assigned for i in replica) == list(range(len(lengths)))


@given(lengths, st.integers(1, 8))
def test_replicas_are_balanced_within_grahams_bound(lengths: list[int], num_replicas: int) -> None:
    loads = [sum(lengths[i] for i in replica) for replica in assign_to_replicas(lengths, num_replicas)]
    best = max(sum(lengths) / num_replicas, max(lengths, default=0))
    # The bound is on the optimum, which this lower bound underestimates; LPT is within 4/3 of the optimum and, with the
    # longest item added, of this.
    assert max(loads) <= best + max(lengths, default=0) * (1 - 1 / num_replicas)


@given(lengths, st.integers(1, 1000), st.one_of(st.none(), st.integers(1, 7)))
def test_micro_batches_keep_the_budget(lengths: list[int], max_tokens: int, max_sequences: int | None) -> None:
    batches = split_micro_batches(lengths, max_tokens=max_tokens, max_sequences=max_sequences)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
        assert max_sequences is None or len(batch) <= max_sequences
