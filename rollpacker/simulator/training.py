"""How long an update takes: forward, backward and log-prob passes by FLOPs, then reduction and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollpacker.config import Config
from rollpacker.data.packing import assign_to_replicas
from rollpacker.messages import UpdatePlan
from rollpacker.simulator import constants as k
from rollpacker.simulator.cluster import Cluster


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of the stages; `busy_s` is what each training replica computes of `update_actor_s`."""

    old_log_prob_s: float | None
    ref_s: float | None
    update_actor_s: float
    busy_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """All stages, one after another."""
        return (self.old_log_prob_s or 0.0) + (self.ref_s or 0.0) + self.update_actor_s


class TrainingCost:
    """Sequences are spread over the training replicas as the trainer does it (data/packing.py); the slowest one counts."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        training, algorithm = config.training, config.algorithm
        self._config, self._shape = config, cluster.shape
        model_ranks = training.tensor_model_parallel_size * training.pipeline_model_parallel_size
        self._replica_gpus = model_ranks * training.context_parallel_size
        self._num_replicas = cluster.num_gpus // self._replica_gpus
        self._flops = self._replica_gpus * cluster.gpu.flops * config.cluster.train_mfu
        mini_batch = algorithm.ppo_mini_batch_size or config.data.train_batch_size
        self._passes = algorithm.ppo_epochs
        self._num_updates = math.ceil(config.data.train_batch_size / mini_batch) * algorithm.ppo_epochs
        self._needs_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
        parameters = cluster.shape.num_parameters() / model_ranks
        shards = cluster.num_gpus // model_ranks
        # gradients are reduce-scattered in fp32, weights gathered in bf16; the optimizer state streams through memory once
        moved_bytes = (4 + 2) * parameters * (shards - 1) / shards
        self._reduce_s = moved_bytes / k.NETWORK_BANDWIDTH
        optimizer_bytes = k.OPTIMIZER_BYTES_PER_PARAMETER * parameters
        optimizer_bytes /= shards if training.use_distributed_optimizer else 1
        self._optimizer_s = optimizer_bytes / (k.MEMORY_EFFICIENCY * cluster.gpu.memory_bandwidth)

    def times(self, update: UpdatePlan) -> UpdateTimes:
        """The stages of one update."""
        lengths = [len(r.request.prompt.token_ids) + r.num_tokens for g in update.groups for r in g.responses]
        per_sample = self._config.cluster.train_gpu_s_per_sample
        if per_sample is not None:
            seconds = per_sample * len(lengths) / (self._num_replicas * self._replica_gpus)
            return UpdateTimes(None, None, seconds, (seconds,) * self._num_replicas)
        forward = self._forward_s(lengths)
        recompute = self._config.training.recompute_granularity is not None
        factor = 1 + k.BACKWARD_FLOPS_PER_PARAMETER / k.FORWARD_FLOPS_PER_PARAMETER + recompute
        busy = tuple(factor * self._passes * seconds for seconds in forward)
        update_s = max(busy) + self._num_updates * (self._reduce_s + self._optimizer_s)
        return UpdateTimes(
            old_log_prob_s=max(forward) if self._num_updates > 1 else None,
            ref_s=max(forward) if self._needs_reference else None,
            update_actor_s=update_s,
            busy_s=busy,
        )

    def _forward_s(self, lengths: list[int]) -> list[float]:
        """Seconds of one forward pass over each replica's sequences, pipeline fill and drain included."""
        shape, training = self._shape, self._config.training
        dense = k.FORWARD_FLOPS_PER_PARAMETER * shape.num_parameters()
        # scores and values of causal attention: 2 x 2 x hidden x length^2 / 2 a layer
        attention = 2 * shape.num_layers * shape.num_attention_heads * shape.head_dim
        pipeline = training.pipeline_model_parallel_size
        seconds = []
        for replica in assign_to_replicas(lengths, self._num_replicas):
            tokens = sum(lengths[i] for i in replica)
            flops = dense * tokens + attention * sum(lengths[i] ** 2 for i in replica)
            num_batches = max(math.ceil(tokens / training.max_tokens_per_gpu), 1)
            seconds.append(flops / self._flops * (num_batches + pipeline - 1) / num_batches)
        return seconds
