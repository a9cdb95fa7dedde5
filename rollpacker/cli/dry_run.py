"""What `rollpacker train --dry-run` says: missing files first, then what would run, its memory, and what stands in the way.

The config may plan a job of many GPUs (trainer.nnodes, trainer.n_gpus_per_node); one rank without a GPU checks it.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import missing_features
from rollpacker.memory_estimate import DEFAULT_GPU_MEMORY_GIB, GIB, KvCache, MemoryEstimate, estimate_memory

if TYPE_CHECKING:
    from rollpacker.runtime.checks import Checked

_WIDTH = 100
_WEIGHT_BYTES = 2
"""Bytes a parameter has in the files of nearly every published model (bf16)."""


def check_inputs_exist(config: Config) -> None:
    """Name every missing input at once, where a run would stop at the first."""
    models = [("model.path", config.model.path), ("model.reference_path", config.model.reference_path)]
    files = [("data.train_files", f) for f in config.data.train_files] + [
        ("data.val_files", f) for f in config.data.val_files
    ]
    missing = [
        f"{key}={path} (a folder: config.json, *.safetensors, tokenizer files)"
        for key, path in models
        if path is not None and not Path(path).is_dir()
    ]
    missing += [f"{key}={path}" for key, path in files if not Path(path).is_file()]
    if missing:
        raise ConfigError(
            f"not there, seen from {Path.cwd()}: {'; '.join(missing)}. Put them there, or name your own: "
            "rollpacker train CONFIG --dry-run model.path=... data.train_files=[...]."
        )


def check_weight_files(config: Config) -> None:
    """Open every safetensors file: an index that names an absent file and a file cut short are found here."""
    from rollpacker.weights.hf import SafetensorsFolder

    for path in filter(None, (config.model.path, config.model.reference_path)):
        with SafetensorsFolder(path):
            pass


def estimate_for(config: Config, checked: Checked, world_size: int) -> MemoryEstimate | None:
    """The memory estimate of a GPU job; None for CPU ranks, whose memory is the host's."""
    if checked.platform.name != "cuda":
        return None
    gib = config.trainer.gpu_memory_gib or checked.platform.gpu_memory_gib() or DEFAULT_GPU_MEMORY_GIB
    return estimate_memory(config, checked.shape, world_size, gib)


def describe(config: Config, checked: Checked, estimate: MemoryEstimate | None) -> str:
    """The files that were read and, for GPUs, the memory table, the KV cache and the host memory."""
    weights = list(Path(config.model.path).glob("*.safetensors"))
    num_bytes, expected = sum(file.stat().st_size for file in weights), checked.shape.num_parameters() * _WEIGHT_BYTES
    lines = [
        f"files     {config.model.path}: config.json, tokenizer, {len(weights)} safetensors file(s) of "
        f"{num_bytes / GIB:.1f} GiB (in bf16 the model has {expected / GIB:.1f})",
        f"          {', '.join(config.data.train_files)}",
    ]
    if estimate is None:
        return "\n".join(lines) + "\n"
    cache, per_node = estimate.kv_cache, config.trainer.n_gpus_per_node
    node = f", {estimate.host_bytes * per_node / GIB:.1f} GiB a node" if per_node else ""
    lines += [
        memory_table(estimate),
        f"KV cache  {cache.bytes_per_token:,} bytes a token on each rank; a replica holds {cache.num_tokens:,} tokens,",
        f"          {cache.num_full_sequences} sequences of full length ({cache.longest:,}), and decodes "
        f"{cache.num_requests} at a time: {_pressure(cache)}",
        f"host      {estimate.host_bytes / GIB:.1f} GiB a rank for the sleeping engine's weights{node}",
    ]
    return "\n".join(lines) + "\n"


def problems(config: Config, estimate: MemoryEstimate | None) -> list[str]:
    """What would keep this job from running, a paragraph each; empty if nothing is known."""
    memory = [] if estimate is None else memory_problems(config, estimate)
    return [*memory, *missing_features(config)]


def memory_problems(config: Config, estimate: MemoryEstimate) -> list[str]:
    """For each phase that does not fit: by how much, and what to change. For the engine: whether it can start at all."""
    found = []
    if (over := estimate.training.num_bytes - estimate.gpu_bytes) > 0:
        found.append(f"{_does_not_fit('training', over, estimate)} {_advice_for_training(config)}")
    if config.rollout.replay is not None:  # no engine
        return found
    if (over := estimate.rollout.num_bytes - estimate.gpu_bytes) > 0:
        found.append(f"{_does_not_fit('rollout', over, estimate)} {_advice_for_rollout(estimate)}")
    elif estimate.kv_cache.num_full_sequences < 1:
        found.append(
            f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization:g} leaves the engine a KV cache of "
            f"{estimate.kv_cache.num_tokens:,} tokens, less than one sequence of {estimate.kv_cache.longest:,}: vLLM would "
            f"not start. {_advice_for_rollout(estimate)}"
        )
    return found


def _does_not_fit(phase: str, over: int, estimate: MemoryEstimate) -> str:
    return f"the {phase} phase does not fit by {over / GIB:.1f} GiB of {estimate.gpu_bytes / GIB:.1f} (an estimate)."


def _advice_for_training(config: Config) -> str:
    training = config.training
    longest = config.data.max_prompt_length + config.data.max_response_length
    advice = []
    if not training.recompute_granularity:
        advice.append("set training.recompute_granularity=full")
    if training.max_tokens_per_gpu > longest:
        advice.append(f"lower training.max_tokens_per_gpu={training.max_tokens_per_gpu} (at least {longest})")
    if not training.use_distributed_optimizer:
        advice.append("set training.use_distributed_optimizer=true")
    advice.append("raise training.tensor_model_parallel_size or training.pipeline_model_parallel_size")
    return f"What helps: {'; '.join(advice)}."


def _advice_for_rollout(estimate: MemoryEstimate) -> str:
    """The trainer stays on the GPU while the engine decodes, so the engine may have what the trainer leaves."""
    utilization = math.floor(100 * estimate.largest_gpu_memory_utilization) / 100
    engine = estimate.rollout.bytes_of("engine weights") + estimate.rollout.bytes_of("engine work space, CUDA graphs")
    one_sequence = estimate.kv_cache.longest * estimate.kv_cache.bytes_per_token
    if utilization * estimate.gpu_bytes >= engine + one_sequence:
        return f"What helps: rollout.gpu_memory_utilization={utilization:g}, the most that the trainer leaves."
    return (
        f"The trainer leaves the engine {max(utilization, 0):.0%} of the GPU, and its weights, work space and one sequence "
        f"of full length need {(engine + one_sequence) / estimate.gpu_bytes:.0%}. What helps: raise "
        "training.tensor_model_parallel_size or training.pipeline_model_parallel_size (less trainer on each GPU), or "
        "rollout.tensor_model_parallel_size (less engine)."
    )


def _pressure(cache: KvCache) -> str:
    if cache.num_full_sequences >= cache.num_requests:
        return "never preempts"
    return f"preempts when they average over {cache.num_tokens // cache.num_requests:,} tokens"


def memory_table(estimate: MemoryEstimate) -> str:
    """Both phases, part by part, against the GPU."""
    phases = (estimate.training, estimate.rollout)
    table = Table(box=None, padding=(0, 2, 0, 0), title="memory of the fullest rank, GiB", title_justify="left")
    table.add_column("  part")
    for name, phase in zip(("training", "rollout"), phases, strict=True):
        stage = f" (stage {phase.stage})" if phase.stage else ""
        table.add_column(f"{name}{stage}", justify="right")
    for name in dict.fromkeys(part.name for phase in phases for part in phase.parts):
        table.add_row(f"  {name}", *(_gib(phase.bytes_of(name)) for phase in phases))
    table.add_row("  total (estimate)", *(_gib(phase.num_bytes) for phase in phases))
    table.add_row("  GPU", *(_gib(estimate.gpu_bytes) for _ in phases))
    spare = [estimate.gpu_bytes - phase.num_bytes for phase in phases]
    table.add_row("  verdict", *(f"fits, {_gib(s)} free" if s >= 0 else f"lacks {_gib(-s)}" for s in spare))
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes else "-"
