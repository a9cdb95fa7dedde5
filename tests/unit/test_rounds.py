"""The rounds of a refit, carried out for all ranks of a world with two buffers each: everything arrives, in buckets."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from resharding import Array, engine_shards, full_model, megatron_shards, models, shape_of

from rollpacker.weights.plan import TrainingGrid, reshard_plan
from rollpacker.weights.rounds import ALIGNMENT, Piece, Round, cut_into_rounds


def indices(piece: Piece, offset: int, pitch: int) -> Array:
    """Where the elements of a piece lie in a parameter."""
    i = np.arange(piece.begin, piece.end)
    return offset + i // piece.op.block.row_elements * pitch + i % piece.op.block.row_elements


def pack(part: Round, held: dict[str, Array]) -> Array:
    buffer = np.full(part.buffer_elements(is_send=True), -1)
    for piece in part.packed:
        values = held[piece.op.source_name].ravel()[
            indices(piece, piece.op.block.source_offset, piece.op.block.source_pitch)
        ]
        assert (buffer[piece.offset : piece.offset + len(values)] == -1).all()
        buffer[piece.offset : piece.offset + len(values)] = values
    return buffer


def write(piece: Piece, values: Array, written: dict[str, Array]) -> None:
    block, target = piece.op.block, written[piece.op.destination_name].ravel()
    at = indices(piece, block.destination_offset, block.destination_pitch)
    assert (target[at] == 0).all(), "written twice"
    target[at] = values


def carry_out(rounds: list[list[Round]], held: list[dict[str, Array]], written: list[dict[str, Array]]) -> None:
    """Round by round over all ranks, message by message."""
    for k in range(len(rounds[0])):
        sent = [pack(mine[k], shards) for mine, shards in zip(rounds, held, strict=True)]
        for rank, mine in enumerate(rounds):
            part = mine[k]
            received = np.full(part.buffer_elements(is_send=False), -1)
            for m in (m for m in part.messages if not m.is_send):
                (twin,) = [s for s in rounds[m.peer][k].messages if s.is_send and s.peer == rank]
                assert twin.size == m.size
                received[m.offset : m.offset + m.size] = sent[m.peer][twin.offset : twin.offset + twin.size]
            for piece in part.unpacked:
                write(piece, received[piece.offset : piece.offset + piece.end - piece.begin], written[rank])
            for piece in part.local:
                at = indices(piece, piece.op.block.source_offset, piece.op.block.source_pitch)
                write(piece, held[rank][piece.op.source_name].ravel()[at], written[rank])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_element_arrives_in_some_round(data: st.DataObject) -> None:
    tp, pp, rollout = (data.draw(st.sampled_from([1, 2, 4]), name) for name in ("TP", "PP", "rollout TP"))
    shape, grid = data.draw(models(tp, pp, rollout)), TrainingGrid(tp, pp)
    world = math.lcm(grid.replica_size, rollout) * data.draw(st.integers(1, 2), "replicas")
    plan = reshard_plan(shape, grid, rollout, world)
    busiest = max(max(t.sent, t.received) for t in plan.traffic())
    bucket = data.draw(st.integers(max(busiest // 5, 1), max(2 * busiest, 1)), "bucket")
    rounds = [cut_into_rounds(plan, rank, bucket) for rank in range(world)]
    assert {len(mine) for mine in rounds} == {max(1, math.ceil(busiest / bucket))}
    for mine in rounds:
        num_streams = 1 + max(len(part.messages) for part in mine)
        slack = ALIGNMENT * (num_streams + len(plan.ops))  # gaps, and what rounding leaves in a part
        assert all(part.buffer_elements(is_send=way) <= bucket + slack for part in mine for way in (True, False))
        for piece in (p for part in mine for p in (*part.packed, *part.unpacked)):
            assert piece.offset % ALIGNMENT == piece.begin % ALIGNMENT == 0
    full = full_model(shape)
    wanted = [engine_shards(full, shape, rollout, rank % rollout) for rank in range(world)]
    written = [{name: np.zeros_like(x) for name, x in shards.items()} for shards in wanted]
    carry_out(rounds, [megatron_shards(full, shape, grid, rank) for rank in range(world)], written)
    for rank, shards in enumerate(wanted):
        for name, tensor in shards.items():
            assert np.array_equal(written[rank][name], tensor), (rank, name)


@pytest.mark.parametrize("num_rounds", [1, 7, 50])
def test_streams_end_together_and_rounds_are_even(num_rounds: int) -> None:
    """TP 2 -> 1 on two ranks: each sends the other half the model, the same share in every round."""
    plan = reshard_plan(shape_of(), TrainingGrid(2), 1, 2)
    sent = plan.traffic()[0].sent
    rounds = cut_into_rounds(plan, 0, math.ceil(sent / num_rounds))
    sizes = [part.buffer_elements(is_send=True) for part in rounds]
    assert len(sizes) == num_rounds
    assert max(sizes) - min(sizes) <= ALIGNMENT
    assert sent <= sum(sizes) <= sent + ALIGNMENT * len(plan.ops)


def test_what_stays_is_spread_over_the_rounds() -> None:
    """So that local copies run while rounds travel; one round where nothing does."""
    plan = reshard_plan(shape_of(), TrainingGrid(2), 1, 2)
    rounds = cut_into_rounds(plan, 0, plan.traffic()[0].sent // 4)
    shares = [sum(p.end - p.begin for p in part.local) for part in rounds]
    assert max(shares) <= min(shares) + ALIGNMENT * (1 + len(plan.ops))
    (alone,) = cut_into_rounds(reshard_plan(shape_of(), TrainingGrid(1), 1, 1), 0, 10)
    assert not alone.messages
    assert sum(p.end - p.begin for p in alone.local) == sum(op.block.num_elements for op in plan.ops) // 2
