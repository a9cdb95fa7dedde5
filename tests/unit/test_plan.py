"""The refit's plan, carried out on arrays of unique numbers that were cut both ways by other means (reshape and split)."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.model_shape import ModelShape
from rollpacker.weights.layout import TIED_HEAD
from rollpacker.weights.plan import Block, ReshardPlan, TrainingGrid, TransferOp, reshard_plan

Array = np.ndarray[Any, np.dtype[np.int64]]
SIZES = (1, 2, 4)
GRIDS = [(tp, pp, rollout) for tp in SIZES for pp in SIZES for rollout in SIZES]


def full_model(shape: ModelShape) -> dict[str, Array]:
    """Hugging Face's tensors, every element another number from 1 on."""
    hidden, q, kv = shape.hidden_size, shape.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for x, rows in (("q", q), ("k", kv), ("v", kv)):
            sizes[f"{prefix}.self_attn.{x}_proj.weight"] = (rows, hidden)
            if shape.has_qkv_bias:
                sizes[f"{prefix}.self_attn.{x}_proj.bias"] = (rows,)
            if shape.has_qk_norm and x != "v":
                sizes[f"{prefix}.self_attn.{x}_norm.weight"] = (shape.head_dim,)
        sizes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q)
        for x in ("gate", "up"):
            sizes[f"{prefix}.mlp.{x}_proj.weight"] = (shape.ffn_hidden_size, hidden)
        sizes[f"{prefix}.mlp.down_proj.weight"] = (hidden, shape.ffn_hidden_size)
        for x in ("input", "post_attention"):
            sizes[f"{prefix}.{x}_layernorm.weight"] = (hidden,)
    sizes["model.norm.weight"] = (hidden,)
    if not shape.tie_word_embeddings:
        sizes["lm_head.weight"] = (shape.vocab_size, hidden)
    tensors, first = {}, 1
    for name, size in sizes.items():
        tensors[name] = np.arange(first, first + math.prod(size)).reshape(size)
        first += math.prod(size)
    return tensors


def padded(tensor: Array, multiple: int) -> Array:
    """Zero rows at the end."""
    return np.concatenate([tensor, np.zeros((-len(tensor) % multiple, *tensor.shape[1:]), np.int64)])


def megatron_layer(full: dict[str, Array], shape: ModelShape, layer: int, tp: int, t: int) -> dict[str, Array]:
    """What Megatron's rank `t` holds of a layer: KV heads first, then everything that belongs to each."""
    hf, mg = f"model.layers.{layer}", f"decoder.layers.{layer}"
    held = {
        f"{mg}.input_layernorm.weight": full[f"{hf}.input_layernorm.weight"],
        f"{mg}.pre_mlp_layernorm.weight": full[f"{hf}.post_attention_layernorm.weight"],
        f"{mg}.self_attention.linear_proj.weight": np.split(full[f"{hf}.self_attn.o_proj.weight"], tp, axis=1)[t],
        f"{mg}.mlp.linear_fc2.weight": np.split(full[f"{hf}.mlp.down_proj.weight"], tp, axis=1)[t],
        f"{mg}.mlp.linear_fc1.weight": np.concatenate(
            [np.split(full[f"{hf}.mlp.{x}_proj.weight"], tp)[t] for x in ("gate", "up")]
        ),
    }
    for kind in ("weight", "bias") if shape.has_qkv_bias else ("weight",):
        q, k, v = (full[f"{hf}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        rest = q.shape[1:]
        grouped = [x.reshape(shape.num_kv_heads, -1, *rest) for x in (q, k, v)]
        mine = np.split(np.concatenate(grouped, axis=1), tp)[t]
        held[f"{mg}.self_attention.linear_qkv.{kind}"] = mine.reshape(-1, *rest)
    if shape.has_qk_norm:
        for x in "qk":
            held[f"{mg}.self_attention.{x}_layernorm.weight"] = full[f"{hf}.self_attn.{x}_norm.weight"]
    return held


def megatron_shards(full: dict[str, Array], shape: ModelShape, grid: TrainingGrid, rank: int) -> dict[str, Array]:
    """What a rank of the training holds."""
    tp, pp = grid.tensor_model_parallel_size, grid.pipeline_model_parallel_size
    t, stage = rank % tp, rank // (tp * grid.context_parallel_size) % pp
    embedding = np.split(padded(full["model.embed_tokens.weight"], tp), tp)[t]
    held = {}
    chunks = np.split(np.arange(shape.num_layers), pp * grid.virtual_pipeline_model_parallel_size)
    for layer in np.concatenate(chunks[stage::pp]).tolist():
        held |= megatron_layer(full, shape, layer, tp, t)
    if stage == 0:
        held["embedding.word_embeddings.weight"] = embedding
    if stage == pp - 1:
        held["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not shape.tie_word_embeddings:
            held[TIED_HEAD] = np.split(padded(full["lm_head.weight"], tp), tp)[t]
        elif pp > 1:
            held[TIED_HEAD] = embedding
    return held


def engine_shards(full: dict[str, Array], shape: ModelShape, tp: int, t: int) -> dict[str, Array]:
    """What rank `t` of a vLLM engine shall hold; vLLM pads the vocabulary to a multiple of 64."""
    held = {}
    for name, tensor in full.items():
        if name.startswith(("model.embed_tokens", "lm_head")):
            held[name] = np.split(padded(tensor, 64), tp)[t]
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            held[name] = np.split(tensor, tp, axis=1)[t]
        elif ".gate_proj." in name:
            both = [tensor, full[name.replace("gate", "up")]]
            held[name.replace("gate", "gate_up")] = np.concatenate([np.split(x, tp)[t] for x in both])
        elif ".q_proj." in name:
            q, k, v = (full[name.replace("q_proj", f"{x}_proj")] for x in "qkv")
            heads = [np.split(x, shape.num_kv_heads) for x in (k, v)]  # repeated until each rank has one
            kv = [np.concatenate(np.array_split(np.repeat(h, max(tp // len(h), 1), axis=0), tp)[t]) for h in heads]
            held[name.replace("q_proj", "qkv_proj")] = np.concatenate([np.split(q, tp)[t], *kv])
        elif "norm" in name:
            held[name] = tensor
    return held


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


@st.composite
def models(draw: st.DrawFn, tp: int, layers: int, rollout: int) -> ModelShape:
    """Shapes that these sizes fit: KV heads above and below the rollout's TP, odd vocabularies, ragged MLPs."""
    kv_heads = tp * draw(st.sampled_from([1, 2, 4]))
    heads = math.lcm(kv_heads * draw(st.integers(1, 3)), rollout)
    head_dim = draw(st.sampled_from([1, 3]))
    return ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=layers * draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 5)),
        ffn_hidden_size=math.lcm(tp, rollout) * draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 70)),
        max_position_embeddings=64,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=draw(st.booleans()),
        has_qkv_bias=draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
    )


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


def shape_of(**changes: Any) -> ModelShape:
    """Two layers, 8 heads of 4, hidden size 16."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    return ModelShape(
        architecture="Qwen2ForCausalLM",
        max_position_embeddings=64,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        has_qkv_bias=True,
        **(sizes | changes),
    )


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
