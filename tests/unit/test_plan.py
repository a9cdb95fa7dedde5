"""The refit's plan, carried out on arrays of unique numbers that were cut both ways by other means (reshape and split)."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.model_shape import ModelShape
from rollpacker.weights.layout import TIED_HEAD
from rollpacker.weights.plan import Block, ReshardPlan, TrainingGrid, TransferOp, reshard_plan

sys.path.insert(0, str(Path(__file__).parents[1]))

from resharding import engine_shards, full_model, megatron_shards, models, shape_of

SIZES = (1, 2, 4)
GRIDS = [(tp, pp, rollout) for tp in SIZES for pp in SIZES for rollout in SIZES]


class Execution:
    """The plan carried out for all ranks of a world, element by element."""

    def __init__(self, shape: ModelShape, grid: TrainingGrid, rollout: int, ranks_per_node: int, world: int) -> None:
        full = full_model(shape)
        self.plan = reshard_plan(shape, grid, rollout, ranks_per_node)
        self.held = [megatron_shards(full, shape, grid, rank) for rank in range(world)]
        self.wanted = [engine_shards(full, shape, rollout, rank % rollout) for rank in range(world)]
        self.written = [{name: np.zeros_like(x) for name, x in shards.items()} for shards in self.wanted]
        self.num_writes = [{name: np.zeros_like(x) for name, x in shards.items()} for shards in self.wanted]
        for rank in range(world):
            for op in self.plan.involving(rank):
                if op.destination == rank:
                    self.copy(op)

    def copy(self, op: TransferOp) -> None:
        block, source = op.block, self.held[op.source][op.source_name].ravel()
        target = self.written[op.destination][op.destination_name].ravel()
        writes = self.num_writes[op.destination][op.destination_name].ravel()
        assert min(block.source_pitch, block.destination_pitch) >= block.row_elements > 0
        for row in range(block.rows):
            a = block.source_offset + row * block.source_pitch
            b = block.destination_offset + row * block.destination_pitch
            assert 0 <= a <= len(source) - block.row_elements
            assert 0 <= b <= len(target) - block.row_elements
            target[b : b + block.row_elements] = source[a : a + block.row_elements]
            writes[b : b + block.row_elements] += 1

    def check(self) -> None:
        for rank, wanted in enumerate(self.wanted):
            for name, tensor in wanted.items():
                assert np.array_equal(self.written[rank][name], tensor), (rank, name)
                assert np.array_equal(self.num_writes[rank][name], tensor != 0), (rank, name)  # padding is 0

    def elements_not_at_home(self, rank: int) -> int:
        """What a rank wants and does not hold: it has to arrive, and no more than that."""
        held = np.unique(np.concatenate([x.ravel() for x in self.held[rank].values()]))
        wanted = np.concatenate([x.ravel() for x in self.wanted[rank].values()])
        return int((~np.isin(wanted[wanted > 0], held)).sum())


def check_balance(plan: ReshardPlan, grid: TrainingGrid) -> None:
    """Ranks with the same shard send the same, but for one transfer: those on a node within it, all of them between nodes."""
    transfers: dict[tuple[int, int, str], int] = defaultdict(int)
    for op in plan.ops:
        transfers[op.source, op.destination, op.destination_name] += op.block.num_elements
    largest = max(transfers.values())
    per_stage = grid.tensor_model_parallel_size * grid.context_parallel_size
    in_node, between = defaultdict(list), defaultdict(list)
    for rank, traffic in enumerate(plan.traffic()):
        shard = rank % grid.tensor_model_parallel_size, rank // per_stage % grid.pipeline_model_parallel_size
        in_node[shard, rank // plan.ranks_per_node].append(traffic.sent_in_node)
        between[shard].append(traffic.sent_between_nodes)
    for sent in (*in_node.values(), *between.values()):
        assert max(sent) - min(sent) <= largest


@pytest.mark.parametrize(("tp", "pp", "rollout"), GRIDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_element_is_written_once_and_from_the_right_place(
    tp: int, pp: int, rollout: int, data: st.DataObject
) -> None:
    """Also: what travels is exactly what the receiver does not hold, and every rank sees the same plan."""
    chunks = data.draw(st.sampled_from([1, 2] if pp > 1 else [1]), "virtual stages")
    context = data.draw(st.sampled_from([1, 2]), "context parallel")
    shape = data.draw(models(tp, pp * chunks, rollout))
    grid = TrainingGrid(tp, pp, context, chunks)
    world = math.lcm(grid.replica_size, rollout) * data.draw(st.integers(1, 2), "replicas")
    ranks_per_node = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]), "node")
    run = Execution(shape, grid, rollout, ranks_per_node, world)
    run.check()
    traffic = run.plan.traffic()
    for rank in range(run.plan.period):
        assert traffic[rank].received == run.elements_not_at_home(rank)
    assert sum(t.sent for t in traffic) == sum(t.received for t in traffic)
    check_balance(run.plan, grid)
    again = reshard_plan.__wrapped__(shape, grid, rollout, ranks_per_node)
    assert again == run.plan
    assert again is not run.plan


def blocks_to(plan: ReshardPlan, rank: int, suffix: str) -> list[tuple[int, Block]]:
    return [(op.source, op.block) for op in plan.ops if op.destination == rank and op.destination_name.endswith(suffix)]


def test_a_grouped_qkv_is_three_strided_blocks() -> None:
    """Two KV heads with four query heads each, rows of 16: [q q q q k v] twice becomes all q, all k, all v."""
    plan = reshard_plan(shape_of(), TrainingGrid(1), 1, 1)
    head = 4 * 16
    assert blocks_to(plan, 0, "0.self_attn.qkv_proj.weight") == [
        (0, Block(0, 0, 2, 4 * head, 6 * head, 4 * head)),
        (0, Block(4 * head, 8 * head, 2, head, 6 * head, head)),
        (0, Block(5 * head, 10 * head, 2, head, 6 * head, head)),
    ]


def test_columns_are_strided_and_equal_cuts_are_whole() -> None:
    """Down-projections of 16 x 24: at TP 2 -> 1 the halves interleave row by row; at TP 2 -> 2 a shard is one run."""
    down = "0.mlp.down_proj.weight"
    plan = reshard_plan(shape_of(), TrainingGrid(2), 1, 2)
    assert blocks_to(plan, 0, down) == [(0, Block(0, 0, 16, 12, 12, 24)), (1, Block(0, 12, 16, 12, 12, 24))]
    plan = reshard_plan(shape_of(), TrainingGrid(2), 2, 2)
    assert blocks_to(plan, 1, down) == [(1, Block(0, 0, 1, 192, 192, 192))]


def test_equal_grids_send_nothing() -> None:
    plan = reshard_plan(shape_of(vocab_size=128), TrainingGrid(2), 2, 4)  # vLLM pads 100 rows, and cuts elsewhere
    assert all(op.source == op.destination for op in plan.ops)


def test_ranks_beyond_the_kv_heads_get_the_same_head() -> None:
    """Rollout TP 4 on two KV heads (q q q q k v of 4 elements each): two ranks a head.

    Ranks 0 and 2 have a gap between queries and keys, so two runs of eight; for ranks 1 and 3 all of it touches.
    """
    plan = reshard_plan(shape_of(), TrainingGrid(1), 4, 4)
    found = [blocks_to(plan, rank, "0.self_attn.qkv_proj.bias") for rank in range(4)]
    assert found[0] == [(0, Block(0, 0, 2, 8, 16, 8))]
    assert found[1] == [(1, Block(8, 0, 1, 16, 16, 16))]
    assert found[2] == [(2, Block(24, 0, 2, 8, 16, 8))]
    assert found[3] == [(3, Block(32, 0, 1, 16, 16, 16))]


def test_a_tied_embedding_comes_from_either_end_of_the_pipeline() -> None:
    """On one node both ends hold it, so neither sends it to itself; on two nodes each end serves its own."""
    plan = reshard_plan(shape_of(tie_word_embeddings=True), TrainingGrid(1, 2), 1, 2)
    embedding = [op for op in plan.ops if op.destination_name == "model.embed_tokens.weight"]
    assert [(op.source, op.destination, op.source_name) for op in embedding] == [
        (0, 0, "embedding.word_embeddings.weight"),
        (1, 1, TIED_HEAD),
    ]
    assert not [op for op in plan.ops if op.destination_name == "lm_head.weight"]


def test_a_copy_on_the_node_is_preferred() -> None:
    """TP 2 x DP 2 on nodes of two ranks: each node has both halves."""
    plan = reshard_plan(shape_of(), TrainingGrid(2), 1, 2)
    assert plan.period == 2
    assert all(t.received_between_nodes == 0 for t in plan.traffic())
    far = reshard_plan(shape_of(), TrainingGrid(2), 1, 1)
    assert all(t.received_in_node == 0 and t.received_between_nodes > 0 for t in far.traffic())


def test_a_period_repeats_over_the_world() -> None:
    plan = reshard_plan(shape_of(), TrainingGrid(2), 1, 2)
    first, third = plan.involving(1), plan.involving(5)
    assert [(op.source + 4, op.destination + 4, op.block) for op in first] == [
        (op.source, op.destination, op.block) for op in third
    ]


def test_a_vocabulary_that_vllm_cannot_cut_is_named() -> None:
    with pytest.raises(ValueError, match="vocabulary of 100 to 128 rows, which TP 3 does not divide"):
        reshard_plan(shape_of(num_attention_heads=6, num_kv_heads=3), TrainingGrid(1), 3, 3)
