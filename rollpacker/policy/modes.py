"""From a config to the controller of its mode: the one place where policies are chosen, on clusters and in simulations."""

from __future__ import annotations

from collections.abc import Callable

from rollpacker.config import Config
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.controller import StepController
from rollpacker.policy.dynamic_sampling import DynamicSampling
from rollpacker.policy.filters import GroupFilter, ZeroVarianceFilter
from rollpacker.policy.plain import KeepEverything, PlainComposer, PromptSource, RequestFactory, ReturningSource
from rollpacker.policy.planner import FixedPlanner
from rollpacker.policy.routing import RequestRouter
from rollpacker.policy.tail_batching import TailBatchOptions, TailBatchScheduler
from rollpacker.types import Prompt


def build_plain_controller(config: Config, source: PromptSource, num_ranks: int) -> StepController:
    """Every prompt of `source`, every response trained: mode off without a filter, and replays of any mode."""
    composer = PlainComposer(source, _factory(config, num_ranks), **_sizes(config))
    # Without a race every group shows the law of the samples, so every group is audited.
    audit = SampleAudit(fraction=1.0, seed=config.trainer.seed)
    return StepController(composer, KeepEverything(), reward_timeout_s=config.reward.timeout_s, audit=audit)


def build_controller(
    config: Config, source: ReturningSource, num_ranks: int, prompt_of: Callable[[str, int], Prompt]
) -> StepController:
    """The controller of tail_batching.mode and filter.mode; `prompt_of(prompt_id, epoch)` finds a saved prompt again."""
    if config.tail_batching.mode == "paper":
        return _build_tail_batching(config, source, num_ranks, prompt_of)
    group_filter = _group_filter(config)
    if group_filter is None:
        return build_plain_controller(config, source, num_ranks)
    sampling = DynamicSampling(
        source,
        _factory(config, num_ranks),
        group_filter,
        max_launched_ratio=config.filter.max_launched_ratio,
        **_sizes(config),
    )
    audit = SampleAudit(fraction=1.0, seed=config.trainer.seed)
    return StepController(sampling, sampling, reward_timeout_s=config.reward.timeout_s, audit=audit)


def _build_tail_batching(
    config: Config, source: ReturningSource, num_ranks: int, prompt_of: Callable[[str, int], Prompt]
) -> StepController:
    tail = config.tail_batching
    audit = SampleAudit(fraction=tail.audit_fraction, seed=config.trainer.seed)
    scheduler = TailBatchScheduler(
        source,
        TailBatchOptions(
            train_batch_size=config.data.train_batch_size,
            num_responses=config.rollout.n,
            eta_prompts=tail.eta_prompts,
            eta_responses=tail.eta_responses,
            max_tokens=config.data.max_response_length,
            seed=config.trainer.seed,
            num_gpus=num_ranks,
            drain=tail.drain,
            total_steps=config.trainer.total_training_steps,
            max_launched_ratio=config.filter.max_launched_ratio,
            drop_failed_groups=config.reward.on_error == "drop_group",
        ),
        prompt_of=prompt_of,
        planner=FixedPlanner(config.rollout.tensor_model_parallel_size),
        audit=audit,
        group_filter=_group_filter(config),
    )
    return StepController(scheduler, scheduler, reward_timeout_s=config.reward.timeout_s, audit=audit)


def _group_filter(config: Config) -> GroupFilter | None:
    return ZeroVarianceFilter() if config.filter.mode == "zero_variance" else None


def _factory(config: Config, num_ranks: int) -> RequestFactory:
    return RequestFactory(
        RequestRouter(num_ranks // config.rollout.tensor_model_parallel_size),
        num_responses=config.rollout.n,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
    )


def _sizes(config: Config) -> dict[str, int]:
    return {
        "train_batch_size": config.data.train_batch_size,
        "tensor_model_parallel_size": config.rollout.tensor_model_parallel_size,
    }
