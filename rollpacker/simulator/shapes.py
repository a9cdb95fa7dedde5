"""Which parallel shapes of a job fit its GPUs, each as a complete config; and what the others lack.

Two phases share a GPU (memory_estimate.py), so a shape has a training side (TP, PP, CP, recompute, micro-batch budget) and
a rollout side (TP, the engine's share of the GPU, requests at a time). What the model of the trainer's speed decides by
itself is not enumerated: of the recompute and budget settings of one TP x PP the first that fits is the fastest.

Invariant: a `Candidate` leaves `RESERVE` of the GPU free in both phases and holds at least one full sequence in each
engine; every other shape has a `Rejection` that is true.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rollpacker.config import Config, ConfigError, TrainingConfig
from rollpacker.config_checks import check_parallel_shape, validate
from rollpacker.memory_estimate import GIB, MemoryEstimate, Phase, estimate_memory
from rollpacker.model_shape import ModelShape, check_model_shape
from rollpacker.policy.planner import allowed_sizes

RESERVE = 0.05
"""Share of the GPU that stays free: the estimate has allowances that no GPU run has confirmed (docs/memory.md)."""
MAX_ENGINE_SHARE = 0.9
"""vLLM's own default of `gpu_memory_utilization`; more leaves nothing for what it does not count."""
MAX_NODES = 64
"""So many are tried where nothing fits."""
_SMALL_BUDGET = 4096
"""Tokens of a micro-batch below which kernels are too small; a pipeline fills faster with small micro-batches."""
_SEQS_STEP, _MAX_SEQS = 64, 512
"""`rollout.max_num_seqs` is a multiple of the first, up to the second, the largest batch of vLLM's CUDA graphs."""


@dataclass(frozen=True)
class Candidate:
    """A config that fits, and its memory."""

    config: Config
    estimate: MemoryEstimate


@dataclass(frozen=True)
class Rejection:
    """A config that does not fit, and why; `lacks_bytes` is what the GPU is short of, None where memory is not the cause."""

    config: Config
    reason: str
    lacks_bytes: int | None = None


def num_gpus(config: Config) -> int:
    """GPUs of the job; both keys are set."""
    return (config.trainer.nnodes or 1) * (config.trainer.n_gpus_per_node or 1)


def enumerate_shapes(
    base: Config, model: ModelShape, *, use_cp: bool = False
) -> tuple[list[Candidate], list[Rejection]]:
    """Every training TP x PP (with `use_cp` x CP from 2 on) and rollout TP of `base`: those that fit, and the others."""
    fitting: list[Candidate] = []
    rejected: list[Rejection] = []
    per_node = base.trainer.n_gpus_per_node or 1
    sizes = allowed_sizes(num_gpus(base), per_node, model.num_attention_heads, model.num_kv_heads)
    for shape in _training_shapes(base, model, use_cp=use_cp):
        trained = _fit_training(shape, model)
        if isinstance(trained, Rejection):
            rejected.append(trained)
            continue
        for size in sizes:
            found = _fit_rollout(trained, model, size)
            (fitting if isinstance(found, Candidate) else rejected).append(found)  # type: ignore[arg-type]
    return fitting, rejected


def fewest_nodes(base: Config, model: ModelShape) -> int | None:
    """The fewest nodes, up to `MAX_NODES`, on which some shape without context parallelism fits."""
    for nodes in range((base.trainer.nnodes or 1) + 1, MAX_NODES + 1):
        if enumerate_shapes(with_keys(base, "trainer", nnodes=nodes), model)[0]:
            return nodes
    return None


def _training_shapes(base: Config, model: ModelShape, *, use_cp: bool) -> Iterator[Config]:
    per_node, world = base.trainer.n_gpus_per_node or 1, num_gpus(base)
    for tp in _divisors(per_node):
        for pp in _divisors(model.num_layers):
            for cp in _divisors(world)[1:] if use_cp else [1]:
                if world % (tp * pp * cp) == 0:
                    yield with_keys(
                        base,
                        "training",
                        tensor_model_parallel_size=tp,
                        pipeline_model_parallel_size=pp,
                        context_parallel_size=cp,
                    )


def _fit_training(shape: Config, model: ModelShape) -> Config | Rejection:
    """The fastest setting of recompute and micro-batch budget that fits, or why none does.

    Without a pipeline the budget costs no time, and a large one keeps kernels large; with one, small micro-batches fill it
    sooner. Recompute costs a third more, whatever the budget.
    """
    longest = shape.data.max_prompt_length + shape.data.max_response_length
    usual = TrainingConfig().max_tokens_per_gpu if shape.training.pipeline_model_parallel_size == 1 else _SMALL_BUDGET
    closest: Rejection | None = None
    for recompute in (None, "full"):
        for budget in dict.fromkeys((max(longest, usual), longest)):
            config = with_keys(shape, "training", recompute_granularity=recompute, max_tokens_per_gpu=budget)
            try:
                validate(config, prompts=None)
                check_parallel_shape(config, num_gpus(config))
                check_model_shape(config, model)
            except ConfigError as error:
                return Rejection(config, str(error))
            estimate = _estimate(config, model)
            lacks = estimate.training.num_bytes - usable_bytes(estimate)
            if lacks <= 0:
                return config
            if closest is None or lacks < (closest.lacks_bytes or 0):
                closest = Rejection(config, _phase_reason("training", estimate.training, estimate), lacks)
    assert closest is not None, "at least one setting was tried"
    return closest


def _fit_rollout(trained: Config, model: ModelShape, size: int) -> Candidate | Rejection:
    """The engine's share is what the trainer and the reserve leave, in whole percents."""
    config = with_keys(trained, "rollout", tensor_model_parallel_size=size)
    config = with_keys(config, "rollout", max_num_seqs=_requests_at_a_time(config))
    try:
        check_model_shape(config, model)
    except ConfigError as error:
        return Rejection(config, str(error))
    left = _estimate(config, model).largest_gpu_memory_utilization - RESERVE
    share = min(math.floor(100 * left + 1e-9) / 100, MAX_ENGINE_SHARE)
    config = with_keys(config, "rollout", gpu_memory_utilization=max(share, 0.01))
    estimate = _estimate(config, model)
    engine = estimate.rollout.bytes_of("engine weights") + estimate.rollout.bytes_of("engine work space, CUDA graphs")
    cache = estimate.kv_cache
    lacks = engine + cache.longest * cache.bytes_per_token - math.floor(share * estimate.gpu_bytes)
    if lacks <= 0:
        return Candidate(config, estimate)
    trainer = sum(part.num_bytes for part in estimate.rollout.parts if not part.name.startswith("engine"))
    reason = (
        f"beside the trainer and CUDA ({trainer / GIB:.1f} GiB) and the reserve ({RESERVE * estimate.gpu_bytes / GIB:.1f}) "
        f"the engine may take {max(share, 0):.0%} of {estimate.gpu_bytes / GIB:.1f} GiB, but its weights and work space "
        f"({engine / GIB:.1f}) and one sequence of {cache.longest:,} tokens "
        f"({cache.longest * cache.bytes_per_token / GIB:.1f}) need {lacks / GIB:.1f} GiB more"
    )
    return Rejection(config, reason, lacks)


def _requests_at_a_time(config: Config) -> int:
    """What a replica gets of the round with the most requests, up to what CUDA graphs are made for."""
    race = config.tail_batching
    factor = 1.0 if race.mode == "off" else race.eta_prompts * race.eta_responses
    replicas = num_gpus(config) // config.rollout.tensor_model_parallel_size
    requests = config.data.train_batch_size * config.rollout.n * factor / replicas
    return min(_SEQS_STEP * math.ceil(requests / _SEQS_STEP), _MAX_SEQS)


def usable_bytes(estimate: MemoryEstimate) -> int:
    """What a phase may take of a GPU."""
    return int((1 - RESERVE) * estimate.gpu_bytes)


def _phase_reason(name: str, phase: Phase, estimate: MemoryEstimate) -> str:
    usable = usable_bytes(estimate)
    return (
        f"the {name} needs {phase.num_bytes / GIB:.1f} GiB ({phase.terms}), {(phase.num_bytes - usable) / GIB:.1f} more than "
        f"the {usable / GIB:.1f} that a reserve of {RESERVE:.0%} leaves of {estimate.gpu_bytes / GIB:.1f}"
    )


def _estimate(config: Config, model: ModelShape) -> MemoryEstimate:
    assert config.trainer.gpu_memory_gib is not None, "a suggestion is for a GPU of known memory"
    return estimate_memory(config, model, num_gpus(config), config.trainer.gpu_memory_gib)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def with_keys(config: Config, section: str, **values: object) -> Config:
    """The config with some keys of a section changed."""
    changed = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: changed})
