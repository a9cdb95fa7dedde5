"""The simulated machine: how many of which GPU, the model on it, what fits, and what moving weights costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import check_parallel_shape
from rollpacker.memory_estimate import GIB, MemoryEstimate, Phase, estimate_memory
from rollpacker.model_shape import ModelShape, check_model_shape, read_model_config
from rollpacker.policy.assembly import Machine
from rollpacker.policy.planner import DecodeTable, allowed_sizes
from rollpacker.simulator import constants as k
from rollpacker.simulator.cost import EngineCost, MeasuredCost, Roofline, read_decode_table


class Cluster:
    """Facts of the machine, the same in every step. Raises ConfigError where the config cannot run on it."""

    def __init__(self, config: Config) -> None:
        self.num_gpus, self.gpus_per_node = cluster_size(config)
        self.gpu = k.GPUS[config.cluster.gpu]
        self.shape = model_shape(config.model.path)
        self._config = config
        table = config.cluster.decode_table
        self._table = None if table is None else read_decode_table(table)
        check_parallel_shape(config, self.num_gpus)
        check_model_shape(config, self.shape)
        self._check_fits(config.rollout.tensor_model_parallel_size)
        self.engine_cost(config.rollout.tensor_model_parallel_size)
        sizes = self._rollout_sizes()
        self.machine = Machine(self.num_gpus, sizes, self.capacity_tokens, self._decode_table(sizes))

    @functools.cache  # noqa: B019 (one cluster a run)
    def estimate(self, tensor_model_parallel_size: int) -> MemoryEstimate:
        """GPU memory with a rollout of this size (memory_estimate.py)."""
        rollout = dataclasses.replace(
            self._config.rollout, tensor_model_parallel_size=tensor_model_parallel_size, dtype="bf16"
        )
        gpu_memory_gib = self._config.trainer.gpu_memory_gib or self.gpu.memory_gib
        return estimate_memory(
            dataclasses.replace(self._config, rollout=rollout), self.shape, self.num_gpus, gpu_memory_gib
        )

    def capacity_tokens(self, tensor_model_parallel_size: int) -> int:
        """What the KV cache of one replica of this size holds."""
        return self.estimate(tensor_model_parallel_size).kv_cache.num_tokens

    @functools.cache  # noqa: B019 (one cluster a run)
    def engine_cost(self, tensor_model_parallel_size: int) -> EngineCost:
        """The speed of a replica of this size. Raises ConfigError where a measured table lacks it."""
        overhead_s = self._config.cluster.step_overhead_ms / 1e3
        roofline = Roofline(self.shape, self.gpu, tensor_model_parallel_size, overhead_s)
        if self._table is None:
            return roofline
        if tensor_model_parallel_size not in self._table.tpot_ms:
            raise ConfigError(
                f"cluster.decode_table={self._config.cluster.decode_table} has no rows of tensor_model_parallel_size="
                f"{tensor_model_parallel_size}; it has {', '.join(map(str, sorted(self._table.tpot_ms)))}."
            )
        return MeasuredCost(self._table, tensor_model_parallel_size, roofline.prefill_tokens_per_s)

    def _rollout_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes at which the engine holds at least one sequence, and whose speed is known."""
        heads, kv_heads = self.shape.num_attention_heads, self.shape.num_kv_heads
        sizes = allowed_sizes(self.num_gpus, self.gpus_per_node, heads, kv_heads)
        known = sizes if self._table is None else tuple(s for s in sizes if s in self._table.tpot_ms)
        return tuple(s for s in known if self.capacity_tokens(s) >= self.estimate(s).kv_cache.longest)

    def _decode_table(self, sizes: Sequence[int]) -> DecodeTable:
        """What was measured, or what would be on this machine: the engines' own cost on a grid."""
        if self._table is not None:
            return DecodeTable({size: self._table.tpot_ms[size] for size in sizes})
        most, longest = self._config.rollout.max_num_seqs, self.shape.max_position_embeddings
        batches = [2**i for i in range(most.bit_length())]
        contexts = [2**i for i in range(8, longest.bit_length())]
        return DecodeTable(
            {
                size: {
                    (batch, context): 1e3 * self.engine_cost(size).curve(batch).total_s(context, 1)
                    for batch in batches
                    for context in contexts
                }
                for size in sizes
            }
        )

    @property
    def engine_start_s(self) -> float:
        """Building an engine of a size that has not run before."""
        return k.ENGINE_START_S + (0.0 if self._config.rollout.enforce_eager else k.CUDA_GRAPHS_S)

    def refit_s(self, tensor_model_parallel_size: int) -> float:
        """Trained weights into every engine, on all GPUs at once: each takes its share of a replica's weights."""
        return k.REFIT_FIXED_S + 2 * self.shape.num_parameters() / tensor_model_parallel_size / k.REFIT_BANDWIDTH

    @property
    def phase_switch_s(self) -> float:
        """From rollout to training and back, in all: engines sleep and wake, an offloaded trainer comes and goes."""
        if not self._config.cluster.offload_trainer:
            return k.PHASE_SWITCH_S
        estimate = self.estimate(self._config.rollout.tensor_model_parallel_size)
        trainer_bytes = estimate.rollout.num_bytes - self._rollout_phase(estimate).num_bytes
        return k.PHASE_SWITCH_S + 2 * trainer_bytes / k.OFFLOAD_BANDWIDTH

    def free_bytes(self, tensor_model_parallel_size: int) -> int:
        """Memory of a GPU that neither engine nor trainer takes during the rollout."""
        estimate = self.estimate(tensor_model_parallel_size)
        return max(int(estimate.gpu_bytes - self._rollout_phase(estimate).num_bytes), 0)

    def _rollout_phase(self, estimate: MemoryEstimate) -> Phase:
        """What is in GPU memory while the engine decodes: all of the estimate but an offloaded trainer."""
        phase = estimate.rollout
        if not self._config.cluster.offload_trainer:
            return phase
        return Phase(tuple(part for part in phase.parts if not part.name.startswith("trainer")), phase.stage)

    def _check_fits(self, tensor_model_parallel_size: int) -> None:
        """Refuse what does not fit, with the arithmetic."""
        config = self._config
        estimate = self.estimate(tensor_model_parallel_size)
        total, share = estimate.gpu_bytes / GIB, config.rollout.gpu_memory_utilization
        weights = estimate.rollout.bytes_of("engine weights") / GIB
        work = estimate.rollout.bytes_of("engine work space, CUDA graphs") / GIB
        left = estimate.rollout.bytes_of("engine KV cache") / GIB
        longest = estimate.kv_cache.longest
        if estimate.kv_cache.num_tokens < longest:
            raise ConfigError(
                f"rollout.tensor_model_parallel_size={tensor_model_parallel_size}: rollout.gpu_memory_utilization x GPU = "
                f"{share:g} x {total:.1f} = {share * total:.1f} GiB, less {weights:.1f} GiB of weights and {work:.1f} GiB of "
                f"work space, leaves {left:.1f} GiB = {estimate.kv_cache.num_tokens:,} tokens of KV cache; "
                f"one sequence of data.max_prompt_length + data.max_response_length needs {longest:,}. Raise the "
                "tensor-parallel size or the share, or shorten the responses."
            )
        for name, phase in (("the rollout", self._rollout_phase(estimate)), ("the training", estimate.training)):
            if phase.num_bytes > estimate.gpu_bytes:
                raise ConfigError(
                    f"{name} needs {phase.num_bytes / GIB:.1f} GiB of a GPU of {total:.1f}: {phase.terms}. More GPUs or "
                    "larger training sizes hold less each; a lower rollout.gpu_memory_utilization, or "
                    "cluster.offload_trainer=true, leaves the trainer more (docs/memory.md)."
                )


def cluster_size(config: Config) -> tuple[int, int]:
    """GPUs in all and on a node. Raises ConfigError where the config does not say."""
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes is None or per_node is None:
        raise ConfigError(
            "the cluster's size must be known: set trainer.nnodes and trainer.n_gpus_per_node (2 and 8 are 16 GPUs)."
        )
    return nodes * per_node, per_node


def model_shape(model_path: str) -> ModelShape:
    """The shape of a folder with a config.json (weights are not needed), or of a published model by the folder's name."""
    if not Path(model_path).is_dir():
        for name, shape in k.MODELS.items():
            if Path(model_path).name == Path(name).name:
                return shape
        raise ConfigError(
            f"model.path={model_path}: no such folder. Give a Hugging Face folder (its config.json is enough here), or one "
            f"of {', '.join(k.MODELS)}."
        )
    return read_model_config(Path(model_path), "model.path=")
