"""How long an update takes: forward, backward and log-prob passes by FLOPs and all-reduces, then reduction and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.config import Config
from rollpacker.data.packing import assign_to_replicas, split_micro_batches, split_mini_batches
from rollpacker.memory_estimate import ELEMENT_BYTES, optimizer_shards
from rollpacker.messages import UpdatePlan
from rollpacker.simulator import constants as k
from rollpacker.simulator.cluster import Cluster
from rollpacker.types import Group


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
    """The update as the trainer makes it (training/policy_update.py): mini-batches, each spread over the training replicas
    and cut into micro-batches by data/packing.py; the slowest replica counts.
    """

    def __init__(self, config: Config, cluster: Cluster) -> None:
        training = config.training
        self._config, self._shape = config, cluster.shape
        self.replica_size = training.replica_size
        self.num_replicas = cluster.num_gpus // training.replica_size
        self._flops = training.replica_size * cluster.gpu.flops * config.cluster.train_mfu
        self._all_reduce_s = _all_reduce_s(config, cluster)
        model_ranks = training.tensor_model_parallel_size * training.pipeline_model_parallel_size
        parameters, num_copies = cluster.shape.num_parameters() / model_ranks, cluster.num_gpus // model_ranks
        # gradients are reduce-scattered in fp32, weights gathered in bf16; the optimizer state streams through memory once
        moved_bytes = (4 + 2) * parameters * (num_copies - 1) / num_copies
        optimizer_bytes = k.OPTIMIZER_BYTES_PER_PARAMETER * parameters / optimizer_shards(training, cluster.num_gpus)
        optimizer_s = optimizer_bytes / (k.MEMORY_EFFICIENCY * cluster.gpu.memory_bandwidth)
        is_measured = config.cluster.train_gpu_s_per_sample is not None  # then it is all in there
        self.optimizer_step_s = 0.0 if is_measured else moved_bytes / k.NETWORK_BANDWIDTH + optimizer_s

    @property
    def _actor_factor(self) -> float:
        """Forward and backward of the actor, in forward passes."""
        recompute = self._config.training.recompute_granularity is not None
        return 1 + k.BACKWARD_FLOPS_PER_PARAMETER / k.FORWARD_FLOPS_PER_PARAMETER + recompute

    def group_s(self, group: Group) -> float:
        """One replica trains one group, in micro-batches of its own; the reference's pass included."""
        per_sample = self._config.cluster.train_gpu_s_per_sample
        if per_sample is not None:
            return per_sample * len(group.responses) / self.replica_size
        lengths = [len(group.prompt.token_ids) + r.num_tokens for r in group.responses]
        return (self._actor_factor + self._config.algorithm.needs_reference) * self._replica_s(lengths)

    def times(self, update: UpdatePlan) -> UpdateTimes:
        """The stages of one update."""
        config, algorithm = self._config, self._config.algorithm
        mini_batches = split_mini_batches(update.groups, algorithm.ppo_mini_batch_size)
        per_sample = config.cluster.train_gpu_s_per_sample
        if per_sample is not None:
            seconds = per_sample * update.num_sequences / (self.num_replicas * self.replica_size)
            return UpdateTimes(None, None, seconds, (seconds,) * self.num_replicas)
        forward = [self._forward_s(groups) for groups in mini_batches]  # by mini-batch and replica
        whole_s = [sum(seconds[i] for seconds in forward) for i in range(self.num_replicas)]
        factor = self._actor_factor
        epoch_s = sum(factor * max(seconds) + self.optimizer_step_s for seconds in forward)
        return UpdateTimes(
            old_log_prob_s=max(whole_s) if algorithm.needs_old_logprobs(len(mini_batches)) else None,
            ref_s=max(whole_s) if algorithm.needs_reference else None,
            update_actor_s=algorithm.ppo_epochs * epoch_s,
            busy_s=tuple(algorithm.ppo_epochs * factor * seconds for seconds in whole_s),
        )

    def _forward_s(self, groups: Sequence[Group]) -> list[float]:
        """Seconds of one forward pass over each replica's sequences, pipeline fill and drain included."""
        lengths = [len(r.request.prompt.token_ids) + r.num_tokens for g in groups for r in g.responses]
        return [
            self._replica_s([lengths[i] for i in indices]) for indices in assign_to_replicas(lengths, self.num_replicas)
        ]

    def _replica_s(self, lengths: Sequence[int]) -> float:
        shape, training = self._shape, self._config.training
        if not lengths:
            return 0.0
        # scores and values of causal attention: 2 x 2 x hidden x length^2 / 2 a layer
        attention = 2 * shape.num_layers * shape.num_attention_heads * shape.head_dim
        dense = k.FORWARD_FLOPS_PER_PARAMETER * shape.num_parameters()
        flops = dense * sum(lengths) + attention * sum(n**2 for n in lengths)
        num_batches = len(
            split_micro_batches(
                lengths, max_tokens=training.max_tokens_per_gpu, max_sequences=training.micro_batch_size
            )
        )
        seconds = flops / self._flops + self._all_reduce_s * sum(lengths)
        return seconds * (num_batches + training.pipeline_model_parallel_size - 1) / num_batches


def _all_reduce_s(config: Config, cluster: Cluster) -> float:
    """Tensor parallelism's all-reduces of one token, for each forward pass's worth of FLOPs; nothing overlaps with them.

    Forward, backward and recompute have two in each layer, as in cost.py; the backward pass has the FLOPs of two passes.
    """
    training, tp = config.training, config.training.tensor_model_parallel_size
    num_passes = 2 + (training.recompute_granularity is not None)
    moved = 2 * (tp - 1) / tp * ELEMENT_BYTES[training.dtype] * cluster.shape.hidden_size
    bandwidth = cluster.gpu.nvlink_bandwidth * training.replica_size / tp  # stages and CP ranks share the work out
    return 2 * cluster.shape.num_layers * moved / bandwidth * num_passes / (num_passes + 1)
