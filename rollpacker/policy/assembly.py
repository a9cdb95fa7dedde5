"""From a config to a StepController: the same classes, wired in the same way, on a cluster and in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from rollpacker.config import Config, ConfigError
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.controller import StepController
from rollpacker.policy.dynamic_sampling import DynamicSampling
from rollpacker.policy.filters import GroupFilter, ZeroVarianceFilter
from rollpacker.policy.launch import MakeRouter, RoundLauncher
from rollpacker.policy.plain import PlainRollout, PromptSource, ReturningSource
from rollpacker.policy.planner import (
    DecodeTable,
    FixedPlanner,
    ParallelismPlanner,
    PreemptionPlanner,
    ProfilePlanner,
    SchedulePlanner,
)
from rollpacker.policy.routing import BalancedRouter
from rollpacker.policy.scale_down import MILESTONES, ScaleDownPolicy, scale_down_refusal
from rollpacker.policy.streaming import streaming_refusal
from rollpacker.policy.tail_batching import TailBatchOptions, TailBatchScheduler
from rollpacker.policy.tail_isolation import TailIsolationRouter
from rollpacker.policy.timeout import AdaptiveTimeout


@dataclass(frozen=True)
class Machine:
    """What the policies must know of the machine; `rollout_sizes` are the tensor-parallel sizes that fit, rising.

    `capacity_tokens(tp)` is the KV cache of a rollout replica, 0 where its use is not reported; `decode_table` covers
    `rollout_sizes` where decoding was measured.
    """

    num_gpus: int
    rollout_sizes: tuple[int, ...] = ()
    capacity_tokens: Callable[[int], int] = lambda tensor_model_parallel_size: 0  # noqa: ARG005
    decode_table: DecodeTable | None = None


def build_controller(config: Config, source: PromptSource, machine: Machine) -> StepController:
    """The controller of a run. Raises ConfigError where the machine cannot do what the config asks.

    `source` takes prompts back wherever there is a filter or a race.
    """
    launcher = RoundLauncher(
        _planner(config, machine),
        num_gpus=machine.num_gpus,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
        make_router=_router(config, machine),
    )
    is_raced = config.tail_batching.mode != "off"
    # Without a race every group shows the law of the samples, so every group is audited.
    audit = SampleAudit(fraction=config.tail_batching.audit_fraction if is_raced else 1.0, seed=config.trainer.seed)
    rollout = _rollout(config, source, launcher, audit)
    return StepController(
        rollout,
        rollout,
        reward_timeout_s=config.reward.timeout_s,
        audit=audit,
        adaptive_timeout=_adaptive_timeout(config),
        scale_down=_scale_down(config, machine, launcher),
    )


def _rollout(
    config: Config, source: PromptSource, launcher: RoundLauncher, audit: SampleAudit
) -> PlainRollout | DynamicSampling | TailBatchScheduler:
    """What a step launches, and what becomes of it."""
    batch, num_responses = config.data.train_batch_size, config.rollout.n
    group_filter: GroupFilter | None = None if config.filter.mode == "off" else ZeroVarianceFilter()
    if config.tail_batching.mode == "paper":
        options = TailBatchOptions(
            train_batch_size=batch,
            num_responses=num_responses,
            eta_prompts=config.tail_batching.eta_prompts,
            eta_responses=config.tail_batching.eta_responses,
            drain=config.tail_batching.drain,
            total_steps=config.trainer.total_training_steps,
            max_launched_ratio=config.filter.max_launched_ratio,
            drop_failed_groups=config.reward.on_error == "drop_group",
        )
        returning = cast(ReturningSource, source)
        return TailBatchScheduler(returning, launcher, options, audit=audit, group_filter=group_filter)
    if group_filter is None:
        return PlainRollout(source, launcher, train_batch_size=batch, num_responses=num_responses)
    return DynamicSampling(
        cast(ReturningSource, source),
        launcher,
        group_filter,
        max_launched_ratio=config.filter.max_launched_ratio,
        train_batch_size=batch,
        num_responses=num_responses,
    )


def rollout_sizes(config: Config, machine: Machine) -> set[int]:
    """Tensor-parallel sizes that a rollout of this config may have."""
    policy, start = config.planner.policy, config.rollout.tensor_model_parallel_size
    if policy == "fixed":
        return {start}
    return {start, *(config.planner.schedule if policy == "schedule" else machine.rollout_sizes)}


def _planner(config: Config, machine: Machine) -> ParallelismPlanner:
    planner, start, sizes = config.planner, config.rollout.tensor_model_parallel_size, machine.rollout_sizes
    if planner.policy == "fixed":
        return FixedPlanner(start)
    unfit = rollout_sizes(config, machine) - set(sizes)
    if unfit:
        raise ConfigError(
            f"planner.policy={planner.policy} would use the rollout tensor-parallel size(s) "
            f"{', '.join(map(str, sorted(unfit)))}, but this model on these GPUs can use {', '.join(map(str, sizes))} "
            "(a size divides the GPUs of a node and the attention heads, and its KV cache holds a sequence). Change "
            "planner.schedule or rollout.tensor_model_parallel_size."
        )
    if planner.policy == "schedule":
        return SchedulePlanner(planner.schedule)
    if planner.policy == "preemption":
        return PreemptionPlanner(sizes, start, literal=planner.literal)
    if machine.decode_table is None:
        raise ConfigError("planner.policy=profile needs measured decode times, and there are none.")
    return ProfilePlanner(machine.decode_table, machine.num_gpus, machine.capacity_tokens)


def _router(config: Config, machine: Machine) -> MakeRouter | None:
    """None deals the responses out in turn: without a race that is even, and needs no prediction."""
    num_gpus, table = machine.num_gpus, machine.decode_table
    if config.rollout.routing == "isolate_tail":
        if table is None:
            raise ConfigError("rollout.routing=isolate_tail needs measured decode times, and there are none.")
        context = config.data.max_response_length / 2
        return lambda size, predict: TailIsolationRouter(
            num_gpus // size, predict, step_s=lambda batch: table.milliseconds(size, batch, context) / 1e3
        )
    if config.tail_batching.mode == "off":
        return None
    return lambda size, predict: BalancedRouter(
        num_gpus // size, predict, capacity_tokens=machine.capacity_tokens(size)
    )


def _adaptive_timeout(config: Config) -> AdaptiveTimeout | None:
    reward = config.reward
    if not reward.adaptive_timeout:
        return None
    return AdaptiveTimeout(min_s=reward.min_timeout_s, max_s=reward.timeout_s, factor=reward.timeout_factor)


def stream_training(config: Config, machine: Machine) -> bool:
    """Whether finished groups train while the rollout goes on. Raises ConfigError where `stream.enabled=on` cannot be."""
    if config.stream.enabled == "off":
        return False
    algorithm = config.algorithm
    num_mini_batches = config.data.train_batch_size // (algorithm.ppo_mini_batch_size or config.data.train_batch_size)
    reason = streaming_refusal(algorithm.adv_estimator, num_mini_batches * algorithm.ppo_epochs)
    sizes = sorted(rollout_sizes(config, machine))
    by_size = [scale_down_refusal(machine.num_gpus, size, config.training.replica_size) for size in sizes]
    if None not in by_size:  # rounds of a size that cannot scale down just do not
        reason = reason or by_size[0]
    if reason is not None and config.stream.enabled == "on":
        raise ConfigError(f"stream.enabled=on: {reason} Or set stream.enabled=auto (then nothing streams) or off.")
    return reason is None


def _scale_down(config: Config, machine: Machine, launcher: RoundLauncher) -> ScaleDownPolicy | None:
    if not stream_training(config, machine):
        return None
    fixed = config.stream.scale_down_at
    return ScaleDownPolicy(
        num_gpus=machine.num_gpus,
        training_replica_size=config.training.replica_size,
        capacity_tokens=machine.capacity_tokens,
        expect=launcher.expect,
        all_rounds=config.stream.rounds == "all",
        milestones=MILESTONES if fixed is None else (fixed,),
        must_fit=fixed is None,
    )
