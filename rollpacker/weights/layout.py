"""Where every parameter lives: Hugging Face names, Megatron's tensor- and pipeline-parallel shards, and vLLM's shards.

A sharded tensor is described by its *segments*: reading along `dim`, the local tensor of tensor-parallel rank r is the
concatenation of slices of Hugging Face tensors. Importing cuts and concatenates them, exporting writes them back, and a
transfer plan intersects the segments of two layouts, so the arithmetic of grouped QKV and gate/up halves stands here once.

Invariant: over the ranks of a tensor-parallel group the segments of a parameter cover each row (or column) of its
Hugging Face tensors exactly once; only vLLM's keys and values are repeated, where it has more ranks than KV heads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rollpacker.model_shape import ModelShape

_CHECKPOINT_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
TIED_HEAD = "output_layer.weight"
"""The copy of a tied embedding on a last pipeline stage that is not the first; Megatron keeps both equal."""
_ENGINE_VOCAB_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE (model_executor/layers/vocab_parallel_embedding.py)."""


@dataclass(frozen=True)
class Segment:
    """Rows (columns if the parameter's `dim` is 1) `start:stop` of the Hugging Face tensor `hf_name`."""

    hf_name: str
    start: int
    stop: int


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter of Megatron's model or of vLLM's.

    `name` is its name in the whole model (layers counted over all pipeline stages). `dim` is the dimension that tensor
    parallelism cuts, None if every rank holds it all. `shards[r]` are the segments of rank r along `dim` (or along
    dimension 0 if `dim` is None). `num_padding_rows[r]` zero rows follow them (vocabulary padding). `layer` is the
    decoder layer, or None for embedding, final norm and head. `is_on_first_stage`/`is_on_last_stage` place those.
    `width` is the number of elements in one row (or column): the size of the other dimension, 1 for a vector.
    """

    name: str
    dim: int | None
    shards: tuple[tuple[Segment, ...], ...]
    layer: int | None = None
    is_on_first_stage: bool = False
    is_on_last_stage: bool = False
    num_padding_rows: tuple[int, ...] = ()
    width: int = 1

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The Hugging Face tensors that make up this parameter, each once, in order."""
        return tuple(dict.fromkeys(s.hf_name for shard in self.shards for s in shard))

    @property
    def checkpoint_key(self) -> str:
        """Its name in Megatron's distributed checkpoints, where a parameter's layers are stacked along a new first axis and
        the two norms of a layer carry the names that transformer-engine's fused layers give them.
        """
        if self.layer is None:
            return self.name
        prefix, _, rest = self.name.partition(f".layers.{self.layer}.")
        return f"{prefix}.layers.{_CHECKPOINT_NAMES.get(rest, rest)}"

    def padding_rows(self, rank: int) -> int:
        """Zero rows at the end of the shard of `rank`."""
        return self.num_padding_rows[rank] if self.num_padding_rows else 0

    def num_rows(self, rank: int) -> int:
        """Size of the shard of `rank` along `dim`, padding included."""
        return sum(s.stop - s.start for s in self.shards[rank]) + self.padding_rows(rank)

    def size_of(self, rank: int) -> tuple[int, ...]:
        """Of the local tensor of `rank`, padding included; a vector where `width` is 1."""
        rows = self.num_rows(rank)
        if self.width == 1:
            return (rows,)
        return (self.width, rows) if self.dim == 1 else (rows, self.width)


def stage_of(
    parameter: ParameterLayout, num_layers: int, pipeline_model_parallel_size: int, num_chunks: int = 1
) -> int:
    """The pipeline stage that owns the parameter (the first one for a tied embedding).

    A stage holds `num_chunks` runs of consecutive layers (Megatron's virtual pipeline), dealt out round robin.
    """
    if parameter.layer is not None:
        return (
            parameter.layer
            // (num_layers // (pipeline_model_parallel_size * num_chunks))
            % pipeline_model_parallel_size
        )
    return 0 if parameter.is_on_first_stage else pipeline_model_parallel_size - 1


def megatron_layout(shape: ModelShape, tensor_model_parallel_size: int) -> list[ParameterLayout]:
    """The parameters of the Megatron model for `shape`, in the order in which Hugging Face files list them."""
    tp = tensor_model_parallel_size
    rows = shape.padded_vocab_size(tp) // tp
    embedding = _vocab_parallel("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape, tp, rows)
    table = [dataclasses.replace(embedding, is_on_first_stage=True)]
    for layer in range(shape.num_layers):
        table.extend(_layer_layout(shape, tp, layer))
    final_norm = _replicated("decoder.final_layernorm.weight", "model.norm.weight", shape.hidden_size, tp)
    table.append(dataclasses.replace(final_norm, is_on_last_stage=True))
    if not shape.tie_word_embeddings:
        head = _vocab_parallel("output_layer.weight", "lm_head.weight", shape, tp, rows)
        table.append(dataclasses.replace(head, is_on_last_stage=True))
    return table


def engine_layout(shape: ModelShape, tensor_model_parallel_size: int) -> list[ParameterLayout]:
    """The parameters of vLLM's model for `shape`; a tied head is the embedding itself there.

    Raises ValueError where vLLM could not cut the vocabulary, which it pads to a multiple of 64.
    """
    tp = tensor_model_parallel_size
    padded = -(-shape.vocab_size // _ENGINE_VOCAB_MULTIPLE) * _ENGINE_VOCAB_MULTIPLE
    if padded % tp:
        raise ValueError(
            f"vLLM pads the vocabulary of {shape.vocab_size} to {padded} rows, which TP {tp} does not divide"
        )
    embedding = "model.embed_tokens.weight"
    table = [_vocab_parallel(embedding, embedding, shape, tp, padded // tp)]
    for layer in range(shape.num_layers):
        table.extend(_engine_layer_layout(shape, tp, layer))
    table.append(_replicated("model.norm.weight", "model.norm.weight", shape.hidden_size, tp))
    if not shape.tie_word_embeddings:
        table.append(_vocab_parallel("lm_head.weight", "lm_head.weight", shape, tp, padded // tp))
    return table


def _layer_layout(shape: ModelShape, tp: int, layer: int) -> list[ParameterLayout]:
    hf, mg = f"model.layers.{layer}", f"decoder.layers.{layer}"
    hidden, head_dim = shape.hidden_size, shape.head_dim
    attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
    rows = [
        _replicated(f"{mg}.input_layernorm.weight", f"{hf}.input_layernorm.weight", hidden, tp, layer),
        _grouped_qkv(f"{mg}.self_attention.linear_qkv.weight", attention, "weight", shape, tp, layer),
    ]
    if shape.has_qkv_bias:
        rows.append(_grouped_qkv(f"{mg}.self_attention.linear_qkv.bias", attention, "bias", shape, tp, layer))
    if shape.has_qk_norm:
        rows += [
            _replicated(
                f"{mg}.self_attention.{x}_layernorm.weight", f"{attention}.{x}_norm.weight", head_dim, tp, layer
            )
            for x in ("q", "k")
        ]
    projection = f"{mg}.self_attention.linear_proj.weight"
    norm = f"{mg}.pre_mlp_layernorm.weight"
    return [
        *rows,
        _row_parallel(projection, f"{attention}.o_proj.weight", _query_rows(shape), shape, tp, layer),
        _replicated(norm, f"{hf}.post_attention_layernorm.weight", hidden, tp, layer),
        _gate_up(f"{mg}.mlp.linear_fc1.weight", mlp, shape, tp, layer),
        _row_parallel(
            f"{mg}.mlp.linear_fc2.weight", f"{mlp}.down_proj.weight", shape.ffn_hidden_size, shape, tp, layer
        ),
    ]


def _engine_layer_layout(shape: ModelShape, tp: int, layer: int) -> list[ParameterLayout]:
    """Names of Hugging Face, but for the projections that vLLM merges."""
    hf = f"model.layers.{layer}"
    attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
    kinds = ("weight", "bias") if shape.has_qkv_bias else ("weight",)
    vectors = {f"{hf}.{x}_layernorm.weight": shape.hidden_size for x in ("input", "post_attention")}
    if shape.has_qk_norm:
        vectors |= {f"{attention}.{x}_norm.weight": shape.head_dim for x in ("q", "k")}
    projection, down = f"{attention}.o_proj.weight", f"{mlp}.down_proj.weight"
    return [
        *(_merged_qkv(f"{attention}.qkv_proj.{kind}", attention, kind, shape, tp, layer) for kind in kinds),
        _row_parallel(projection, projection, _query_rows(shape), shape, tp, layer),
        _gate_up(f"{mlp}.gate_up_proj.weight", mlp, shape, tp, layer),
        _row_parallel(down, down, shape.ffn_hidden_size, shape, tp, layer),
        *(_replicated(name, name, size, tp, layer) for name, size in vectors.items()),
    ]


def _query_rows(shape: ModelShape) -> int:
    return shape.num_attention_heads * shape.head_dim


def _replicated(name: str, hf_name: str, size: int, tp: int, layer: int | None = None) -> ParameterLayout:
    return ParameterLayout(name, None, ((Segment(hf_name, 0, size),),) * tp, layer)


def _row_parallel(name: str, hf_name: str, columns: int, shape: ModelShape, tp: int, layer: int) -> ParameterLayout:
    """A RowParallelLinear: the input dimension (1) is cut evenly."""
    cut = columns // tp
    shards = tuple((Segment(hf_name, r * cut, (r + 1) * cut),) for r in range(tp))
    return ParameterLayout(name, 1, shards, layer, width=shape.hidden_size)


def _vocab_parallel(name: str, hf_name: str, shape: ModelShape, tp: int, rows: int) -> ParameterLayout:
    """`rows` of the padded vocabulary on each rank; those beyond its end are zero and belong to no Hugging Face row."""
    bounds = [(min(r * rows, shape.vocab_size), min((r + 1) * rows, shape.vocab_size)) for r in range(tp)]
    shards = tuple((Segment(hf_name, start, stop),) for start, stop in bounds)
    padding = tuple(rows - (stop - start) for start, stop in bounds)
    return ParameterLayout(name, 0, shards, num_padding_rows=padding, width=shape.hidden_size)


def _grouped_qkv(name: str, attention: str, kind: str, shape: ModelShape, tp: int, layer: int) -> ParameterLayout:
    """Megatron keeps, per KV head, its query heads, then its key, then its value; KV heads are cut evenly over ranks."""
    query_rows = shape.num_attention_heads // shape.num_kv_heads * shape.head_dim
    heads_per_rank = shape.num_kv_heads // tp

    def kv_head(h: int) -> tuple[Segment, ...]:
        return (
            Segment(f"{attention}.q_proj.{kind}", h * query_rows, (h + 1) * query_rows),
            Segment(f"{attention}.k_proj.{kind}", h * shape.head_dim, (h + 1) * shape.head_dim),
            Segment(f"{attention}.v_proj.{kind}", h * shape.head_dim, (h + 1) * shape.head_dim),
        )

    shards = tuple(
        tuple(s for h in range(r * heads_per_rank, (r + 1) * heads_per_rank) for s in kv_head(h)) for r in range(tp)
    )
    return ParameterLayout(name, 0, shards, layer, width=_width_of(kind, shape))


def _merged_qkv(name: str, attention: str, kind: str, shape: ModelShape, tp: int, layer: int) -> ParameterLayout:
    """A rank of vLLM keeps its query heads, then its keys, then its values; ranks beyond the KV heads share one."""
    query_rows = _query_rows(shape) // tp
    kv_rows, ranks_per_head = max(shape.num_kv_heads // tp, 1) * shape.head_dim, max(tp // shape.num_kv_heads, 1)

    def shard(rank: int) -> tuple[Segment, ...]:
        kv = rank // ranks_per_head
        return (
            Segment(f"{attention}.q_proj.{kind}", rank * query_rows, (rank + 1) * query_rows),
            Segment(f"{attention}.k_proj.{kind}", kv * kv_rows, (kv + 1) * kv_rows),
            Segment(f"{attention}.v_proj.{kind}", kv * kv_rows, (kv + 1) * kv_rows),
        )

    return ParameterLayout(name, 0, tuple(shard(r) for r in range(tp)), layer, width=_width_of(kind, shape))


def _width_of(kind: str, shape: ModelShape) -> int:
    return 1 if kind == "bias" else shape.hidden_size


def _gate_up(name: str, mlp: str, shape: ModelShape, tp: int, layer: int) -> ParameterLayout:
    """Each rank holds its share of the gate rows, then the same share of the up rows."""
    rows = shape.ffn_hidden_size // tp
    shards = tuple(
        tuple(Segment(f"{mlp}.{half}_proj.weight", r * rows, (r + 1) * rows) for half in ("gate", "up"))
        for r in range(tp)
    )
    return ParameterLayout(name, 0, shards, layer, width=shape.hidden_size)
