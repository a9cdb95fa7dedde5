"""Models of unique numbers, cut into Megatron's and vLLM's shards by reshape and split: the oracle of the refit's plan."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollpacker.model_shape import ModelShape
from rollpacker.weights.layout import TIED_HEAD
from rollpacker.weights.plan import TrainingGrid

Array = np.ndarray[Any, np.dtype[Any]]


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
    return np.concatenate([tensor, np.zeros((-len(tensor) % multiple, *tensor.shape[1:]), tensor.dtype)])


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
