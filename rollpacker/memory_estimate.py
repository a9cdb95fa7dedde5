"""How much GPU memory a rank of this config needs, part by part, without a GPU: docs/memory.md is the page for users.

Trainer and engine share a GPU. While the model trains, the engine sleeps (its weights and KV cache are released); while
it decodes, the trainer's weights, gradients and optimizer state stay where they are. So there are two peaks, one for
each phase, and both must fit. What depends on the trainer's code is counted from that code and measured against it in
tests/mpi/test_memory.py; what belongs to CUDA, NCCL and vLLM is an allowance, named as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollpacker.config import Config, TrainingConfig
from rollpacker.model_shape import ModelShape

GIB = 1 << 30
DEFAULT_GPU_MEMORY_GIB = 79.0
"""What torch reports of a GPU sold with 80 GB (A100, H100, H800), rounded down."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
_FP32_BYTES = 4
ENTROPY_CHUNK_BYTES = 128 << 20
"""One of the two buffers in which `training/logprobs.py` works off the entropy."""
# Allowances: nobody can compute these, and a GPU run has yet to measure them (docs/status.md).
RUNTIME_BYTES = 2 * GIB
"""CUDA context, NCCL buffers, cuBLAS work space and what the caching allocator loses to fragmentation."""
CUDA_GRAPHS_BYTES = GIB // 2
"""vLLM's captured graphs; users report 0.3 to 0.5 GiB. They stay while the engine sleeps."""


@dataclass(frozen=True)
class Part:
    """One use of memory on a rank."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Phase:
    """A peak and what it is made of, on the rank that needs most: one of pipeline stage `stage`."""

    parts: tuple[Part, ...]
    stage: int

    @property
    def num_bytes(self) -> int:
        """The peak."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def terms(self) -> str:
        """The sum in GiB, part by part."""
        return " + ".join(f"{part.name} {part.num_bytes / GIB:.1f}" for part in self.parts if part.num_bytes)

    def bytes_of(self, name: str) -> int:
        """One part of it; 0 if it has no such part."""
        return sum(part.num_bytes for part in self.parts if part.name == name)


@dataclass(frozen=True)
class TrainerState:
    """What the trainer holds all the time."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    def parts(self) -> tuple[Part, ...]:
        """The same as rows of a table."""
        return (
            Part("trainer weights", self.weights_bytes),
            Part("trainer gradients (fp32)", self.gradients_bytes),
            Part("trainer optimizer state", self.optimizer_bytes),
        )


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one replica: `num_tokens` fit in it; `num_requests` of up to `longest` tokens want to be in it."""

    bytes_per_token: int
    num_tokens: int
    longest: int
    num_requests: int

    @property
    def num_full_sequences(self) -> int:
        """Sequences of the greatest length that fit at once; the engine preempts when more are that long."""
        return self.num_tokens // self.longest


@dataclass(frozen=True)
class MemoryEstimate:
    """Both peaks of the fullest rank, the KV cache, and the host memory that a rank's sleeping engine takes."""

    gpu_bytes: int
    training: Phase
    rollout: Phase
    kv_cache: KvCache
    host_bytes: int

    @property
    def largest_gpu_memory_utilization(self) -> float:
        """The engine's share that fills the GPU beside what the trainer and the runtime hold."""
        engine = sum(part.num_bytes for part in self.rollout.parts if part.name.startswith("engine"))
        return (self.gpu_bytes - (self.rollout.num_bytes - engine)) / self.gpu_bytes


def estimate_memory(config: Config, shape: ModelShape, world_size: int, gpu_memory_gib: float) -> MemoryEstimate:
    """Estimate for a job of `world_size` ranks whose parallel sizes have been found to fit (check_shapes)."""
    gpu_bytes = int(gpu_memory_gib * GIB)
    stages = range(config.training.pipeline_model_parallel_size)
    kv_cache_bytes, engine = _engine_parts(config, shape, gpu_bytes)
    training = [_training_phase(config, shape, world_size, stage) for stage in stages]
    rollout = [
        Phase((*trainer_state(shape, config.training, world_size, s).parts(), *engine, _runtime()), s) for s in stages
    ]
    return MemoryEstimate(
        gpu_bytes=gpu_bytes,
        training=max(training, key=lambda phase: phase.num_bytes),
        rollout=max(rollout, key=lambda phase: phase.num_bytes),
        kv_cache=_kv_cache(config, shape, world_size, kv_cache_bytes),
        host_bytes=engine_weights_bytes(config, shape),
    )


def parameter_sizes(shape: ModelShape, training: TrainingConfig, stage: int) -> list[int]:
    """Elements of each parameter on a rank of pipeline stage `stage`; the embedding or head, if any, comes last.

    Tensor parallelism cuts matrices and the QKV bias; norms are whole on every rank. The embedding is on the first
    stage, final norm and head on the last; a tied head is a second copy of the embedding unless there is one stage.
    """
    tp, pp = training.tensor_model_parallel_size, training.pipeline_model_parallel_size
    cut, whole = _layer_parameters(shape)
    sizes = [*(size // tp for size in cut), *whole] * (shape.num_layers // pp)
    embedding = shape.padded_vocab_size(tp) // tp * shape.hidden_size
    if stage == pp - 1:
        sizes.append(shape.hidden_size)
        if pp > 1 or not shape.tie_word_embeddings:
            sizes.append(embedding)
    if stage == 0:
        sizes.append(embedding)
    return sizes


def _layer_parameters(shape: ModelShape) -> tuple[list[int], list[int]]:
    """Elements of a layer's parameters: those that tensor parallelism cuts, and those that are whole on every rank."""
    hidden, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    qkv_rows = query + 2 * shape.num_kv_heads * shape.head_dim
    cut = [qkv_rows * hidden, query * hidden, 2 * shape.ffn_hidden_size * hidden, shape.ffn_hidden_size * hidden]
    if shape.has_qkv_bias:
        cut.append(qkv_rows)
    embeddings = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    layer = (shape.num_parameters() - embeddings - hidden) // shape.num_layers
    other = layer - sum(cut) - 2 * hidden  # what a family has beside the two norms
    return cut, [hidden, hidden] + [other] * (other > 0)


def trainer_state(shape: ModelShape, training: TrainingConfig, world_size: int, stage: int) -> TrainerState:
    """Weights, gradient buffer and optimizer state of a rank of `stage`, as Megatron-core 0.16 allocates them.

    Gradients are fp32 (`grad_reduce_in_fp32`). Adam keeps two fp32 moments and, for bf16 weights, an fp32 copy of them.
    The DistributedOptimizer gives each data-parallel rank (context-parallel ranks included) an equal share. Its buffers
    start every parameter at a multiple of 64 elements and end at a multiple of 128 and of the ranks that share them
    (`_ParamAndGradBuffer`); a tied embedding on two stages has a bucket, and thus padding, of its own.
    """
    sizes = parameter_sizes(shape, training, stage)
    num_elements, num_shards = sum(sizes), optimizer_shards(training, world_size)
    if training.use_distributed_optimizer:
        last = training.pipeline_model_parallel_size - 1
        has_own_bucket = shape.tie_word_embeddings and last > 0 and stage in (0, last)
        buckets = [sizes[:-1], sizes[-1:]] if has_own_bucket else [sizes]
        alignment = math.lcm(num_shards, 128)
        num_elements = sum(_round_up(sum(_round_up(size, 64) for size in bucket), alignment) for bucket in buckets)
    per_element = 2 * _FP32_BYTES + (_FP32_BYTES if training.dtype == "bf16" else 0)
    return TrainerState(
        weights_bytes=num_elements * ELEMENT_BYTES[training.dtype],
        gradients_bytes=num_elements * _FP32_BYTES,
        optimizer_bytes=num_elements // num_shards * per_element,
    )


def optimizer_shards(training: TrainingConfig, world_size: int) -> int:
    """Ranks that share the optimizer state: those that hold the same weights, if the optimizer is distributed."""
    if not training.use_distributed_optimizer:
        return 1
    return world_size // (training.tensor_model_parallel_size * training.pipeline_model_parallel_size)


def layer_bytes(shape: ModelShape, training: TrainingConfig, num_tokens: int) -> int:
    """What the forward pass of one layer keeps for its backward pass, for `num_tokens` tokens.

    In elements per token, t = tensor-parallel ranks, without sequence parallelism: both norms' inputs and outputs 4h;
    the QKV projection (q + 2kv)/t, q and k after RoPE (q + kv)/t, their cosines and sines 4d, attention's output q/t;
    the MLP 5f/t: gate and up, silu(gate), up again (Megatron adds an offset of 0 to it), their product. Attention keeps
    one fp32 number per head and token instead of its score matrix (FlashAttention, arXiv 2205.14135).
    """
    tp, head_dim = training.tensor_model_parallel_size, shape.head_dim
    query, key = shape.num_attention_heads * head_dim, shape.num_kv_heads * head_dim
    elements = 4 * shape.hidden_size + 4 * head_dim + (3 * query + 3 * key + 5 * shape.ffn_hidden_size) // tp
    return num_tokens * (ELEMENT_BYTES[training.dtype] * elements + _FP32_BYTES * shape.num_attention_heads // tp)


def layer_backward_bytes(shape: ModelShape, training: TrainingConfig, num_tokens: int) -> int:
    """What the backward pass of one layer needs beside that: at its peak, in the MLP, 2f/t + 2h elements per token."""
    elements = 2 * shape.ffn_hidden_size // training.tensor_model_parallel_size + 2 * shape.hidden_size
    return num_tokens * ELEMENT_BYTES[training.dtype] * elements


def loss_bytes(shape: ModelShape, training: TrainingConfig, num_tokens: int) -> int:
    """Final norm (input and output), logits and their copies at the peak of the loss (`Objective.loss`), for `num_tokens`
    tokens on the last stage.

    The head's logits in the training dtype, and in fp32 the scaled ones (`scale_logits`), in which cross entropy works in
    place; on top of them either the chunks of `token_entropy` (forward) or the gradient by the head's logits (backward). An
    entropy bonus keeps one fp32 copy more; it is not counted.
    """
    tp = training.tensor_model_parallel_size
    columns, size = shape.padded_vocab_size(tp) // tp, ELEMENT_BYTES[training.dtype]
    chunks = min(2 * num_tokens * columns * _FP32_BYTES, 2 * ENTROPY_CHUNK_BYTES)
    gradient = num_tokens * columns * _FP32_BYTES
    logits = num_tokens * columns * (size + _FP32_BYTES)
    return logits + max(chunks, gradient) + 2 * num_tokens * shape.hidden_size * size


def micro_batch_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch on one rank; context parallelism cuts each sequence evenly."""
    training = config.training
    tokens = training.max_tokens_per_gpu
    if training.micro_batch_size is not None:
        tokens = min(tokens, training.micro_batch_size * _longest(config))
    return -(-tokens // training.context_parallel_size)


def activation_bytes(config: Config, shape: ModelShape, stage: int) -> int:
    """What forward passes keep on `stage` for the backward passes to come.

    Under the 1F1B schedule stage s of p holds p - s micro-batches (arXiv 2104.04473), each with the output it sent on.
    With full recompute a layer keeps its input alone.
    """
    training, tokens = config.training, micro_batch_tokens(config)
    pp = training.pipeline_model_parallel_size
    hidden_bytes = tokens * shape.hidden_size * ELEMENT_BYTES[training.dtype]
    per_layer = hidden_bytes if training.recompute_granularity else layer_bytes(shape, training, tokens)
    return (pp - stage) * (shape.num_layers // pp * per_layer + (hidden_bytes if stage < pp - 1 else 0))


def _training_phase(config: Config, shape: ModelShape, world_size: int, stage: int) -> Phase:
    """The peak while the engine sleeps: activations kept, and the loss (last stage) or a layer's backward pass on top.

    Later, without activations, Adam's step: torch's multi-tensor AdamW needs one fp32 number per element of the shard.
    """
    training, tokens = config.training, micro_batch_tokens(config)
    state = trainer_state(shape, training, world_size, stage)
    backward = layer_backward_bytes(shape, training, tokens)
    backward += layer_bytes(shape, training, tokens) if training.recompute_granularity else 0
    is_last = stage == training.pipeline_model_parallel_size - 1
    on_top = max(
        Part("logits and loss", loss_bytes(shape, training, tokens) if is_last else 0),
        Part("a layer's backward pass", backward),
        key=lambda part: part.num_bytes,
    )
    moments = [Part("activations kept", activation_bytes(config, shape, stage)), on_top]
    adam = Part("Adam's step", state.gradients_bytes // optimizer_shards(training, world_size))
    if adam.num_bytes > sum(part.num_bytes for part in moments):
        moments = [adam]
    asleep = Part("engine's CUDA graphs (asleep)", 0 if config.rollout.enforce_eager else CUDA_GRAPHS_BYTES)
    return Phase((*state.parts(), *moments, asleep, _runtime()), stage)


def engine_weights_bytes(config: Config, shape: ModelShape) -> int:
    """Weights of one rank of the engine: vLLM pads the vocabulary to 64 rows and copies KV heads where TP exceeds them."""
    tp, hidden = config.rollout.tensor_model_parallel_size, shape.hidden_size
    cut, whole = _layer_parameters(shape)
    copied_heads = max(tp - shape.num_kv_heads, 0)
    copies = 2 * copied_heads * shape.head_dim * (hidden + shape.has_qkv_bias)
    layer = (sum(cut) + copies) // tp + sum(whole)
    embeddings = (1 if shape.tie_word_embeddings else 2) * _round_up(shape.vocab_size, 64) // tp * hidden
    return (shape.num_layers * layer + embeddings + hidden) * ELEMENT_BYTES[config.rollout_dtype]


def _engine_parts(config: Config, shape: ModelShape, gpu_bytes: int) -> tuple[int, tuple[Part, ...]]:
    """Bytes of the KV cache, and the engine's share of the GPU in parts.

    `gpu_memory_utilization` is a share of the whole GPU, and the engine takes exactly that, whatever the trainer holds:
    vLLM measures its own use against the free memory at its start (`request_memory`, `determine_available_memory`) and
    gives the rest of its share to the KV cache. Adam's moments come after that measurement, so an engine that starts may
    still fail when it wakes in the second step; counting them here is the point of this estimate.
    """
    rollout, tp = config.rollout, config.rollout.tensor_model_parallel_size
    weights = engine_weights_bytes(config, shape)
    # vLLM's profiling run: a batch in the MLP (3f/t + 2h elements a token), then logits of all requests, gathered
    # and in fp32, about four times (scaled, log-probs, noise, sorted).
    num_tokens = rollout.max_num_batched_tokens or (16384 if gpu_bytes >= 70 * GIB else 8192)
    batch = num_tokens * (3 * shape.ffn_hidden_size // tp + 2 * shape.hidden_size) * ELEMENT_BYTES[config.rollout_dtype]
    work = batch + 4 * rollout.max_num_seqs * shape.vocab_size * _FP32_BYTES
    work += 0 if rollout.enforce_eager else CUDA_GRAPHS_BYTES
    share = int(rollout.gpu_memory_utilization * gpu_bytes)
    kv_cache = max(share - weights - work, 0)
    return kv_cache, (
        Part("engine weights", weights),
        Part("engine work space, CUDA graphs", work),
        Part("engine KV cache", kv_cache),
    )


def _kv_cache(config: Config, shape: ModelShape, world_size: int, num_bytes: int) -> KvCache:
    replicas = world_size // config.rollout.tensor_model_parallel_size
    per_token = shape.kv_bytes_per_token(config.rollout.tensor_model_parallel_size, ELEMENT_BYTES[config.rollout_dtype])
    requests = math.ceil(config.data.train_batch_size * config.rollout.n / replicas)
    return KvCache(per_token, num_bytes // per_token, _longest(config), min(requests, config.rollout.max_num_seqs))


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _runtime() -> Part:
    return Part("CUDA, NCCL (allowance)", RUNTIME_BYTES)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
