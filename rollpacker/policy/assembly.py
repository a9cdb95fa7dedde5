"""From a config to a StepController: the same classes, wired in the same way, on a cluster and in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rollpacker.config import Config
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.controller import StepController
from rollpacker.policy.dynamic_sampling import DynamicSampling
from rollpacker.policy.filters import ZeroVarianceFilter
from rollpacker.policy.plain import KeepEverything, PlainComposer, PromptSource, RequestFactory, ReturningSource
from rollpacker.policy.planner import FixedPlanner
from rollpacker.policy.routing import RequestRouter
from rollpacker.policy.tail_batching import TailBatchOptions, TailBatchScheduler


def build_controller(
    config: Config,
    source: PromptSource,
    *,
    num_gpus: int,
    capacity_tokens: Callable[[int], int] = lambda tensor_model_parallel_size: 0,  # noqa: ARG005
) -> StepController:
    """The controller of a run on `num_gpus` ranks.

    `source` takes prompts back wherever there is a filter or a race. `capacity_tokens(tp)` is the KV cache of a rollout
    replica, 0 where its use is not reported.
    """
    if config.tail_batching.mode == "paper":
        return _tail_batching(config, cast(ReturningSource, source), num_gpus, capacity_tokens)
    # Without a race every group shows the law of the samples, so every group is audited.
    audit = SampleAudit(fraction=1.0, seed=config.trainer.seed)
    factory = RequestFactory(
        RequestRouter(num_gpus // config.rollout.tensor_model_parallel_size),
        num_responses=config.rollout.n,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
    )
    size, batch = config.rollout.tensor_model_parallel_size, config.data.train_batch_size
    if config.filter.mode == "off":
        composer = PlainComposer(source, factory, train_batch_size=batch, tensor_model_parallel_size=size)
        return StepController(composer, KeepEverything(), reward_timeout_s=config.reward.timeout_s, audit=audit)
    sampling = DynamicSampling(
        cast(ReturningSource, source),
        factory,
        ZeroVarianceFilter(),
        max_launched_ratio=config.filter.max_launched_ratio,
        train_batch_size=batch,
        tensor_model_parallel_size=size,
    )
    return StepController(sampling, sampling, reward_timeout_s=config.reward.timeout_s, audit=audit)


def _tail_batching(
    config: Config, source: ReturningSource, num_gpus: int, capacity_tokens: Callable[[int], int]
) -> StepController:
    audit = SampleAudit(fraction=config.tail_batching.audit_fraction, seed=config.trainer.seed)
    options = TailBatchOptions(
        train_batch_size=config.data.train_batch_size,
        num_responses=config.rollout.n,
        eta_prompts=config.tail_batching.eta_prompts,
        eta_responses=config.tail_batching.eta_responses,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
        num_gpus=num_gpus,
        drain=config.tail_batching.drain,
        total_steps=config.trainer.total_training_steps,
        max_launched_ratio=config.filter.max_launched_ratio,
        drop_failed_groups=config.reward.on_error == "drop_group",
    )
    scheduler = TailBatchScheduler(
        source,
        options,
        planner=FixedPlanner(config.rollout.tensor_model_parallel_size),
        audit=audit,
        group_filter=None if config.filter.mode == "off" else ZeroVarianceFilter(),
        capacity_tokens=capacity_tokens,
    )
    return StepController(scheduler, scheduler, reward_timeout_s=config.reward.timeout_s, audit=audit)
