"""The half of a rank that decodes and scores, which training and evaluation have in common: inputs, engine, rollouts.

No Megatron in here: `rollpacker eval` goes without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.comm.exchange import EventExchange
from rollpacker.comm.world import World
from rollpacker.config import Config, ConfigError
from rollpacker.data.prompts import PromptDataset, load_examples
from rollpacker.model_shape import ModelShape
from rollpacker.platform.device import Platform, select_platform
from rollpacker.reward.scheduler import RewardScheduler
from rollpacker.rollout.engine import EngineOptions, RolloutEngine, SamplingLaw
from rollpacker.runtime.rollout import LiveRollout, Placement, place
from rollpacker.runtime.val_core import ALL_DOMAINS
from rollpacker.runtime.validation import Validator
from rollpacker.runtime.watchdog import Heartbeat


@dataclass(frozen=True)
class InferenceInputs:
    """What decoding and scoring need, found good before anything expensive starts.

    `validation` holds the prompts of data.val_files, None where there are none; `rewards` is None on ranks that lead no
    replica.
    """

    shape: ModelShape
    platform: Platform
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    placement: Placement
    rewards: RewardScheduler | None
    validation: PromptDataset | None


def check_inference(config: Config, world: World, shape: ModelShape) -> InferenceInputs:
    """Read the tokenizer and the validation prompts; start the rewards, last of all. Raises ConfigError."""
    platform = select_platform(config.trainer.device)
    tokenizer, stop_token_ids = load_tokenizer(config.model.path)
    validation = load_validation(config, tokenizer)
    placement = place(world.rank, config.rollout.tensor_model_parallel_size)
    rewards = start_rewards(config) if placement.is_leader else None
    return InferenceInputs(shape, platform, tokenizer, stop_token_ids, placement, rewards, validation)


def load_tokenizer(model_path: str) -> tuple[Any, tuple[int, ...]]:
    """The model's tokenizer and the token ids that end a response. Raises ConfigError."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model_path}: its tokenizer cannot be loaded: {error}") from error
    stop = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if (Path(model_path) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
        stop |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    if not stop:
        raise ConfigError(
            f"model.path={model_path}: neither the tokenizer nor generation_config.json names an EOS token, so no "
            "response would ever end by itself."
        )
    return tokenizer, tuple(sorted(stop))


def load_validation(config: Config, tokenizer: Any) -> PromptDataset | None:
    """The prompts of data.val_files; None where none are named. Raises ConfigError."""
    data = config.data
    if not data.val_files:
        return None
    dataset = load_examples(data.val_files, tokenizer, max_prompt_length=data.max_prompt_length, key="data.val_files")
    domains = {example.domain for example in dataset.examples}
    if len(domains) > 1 and ALL_DOMAINS in domains:
        raise ConfigError(
            f"data.val_files: a row has the domain {ALL_DOMAINS!r}, which is what the metrics over all domains are called. "
            "Rename that domain."
        )
    return dataset


def start_rewards(config: Config) -> RewardScheduler:
    """The reward processes, with the reward function loaded in each. Raises ConfigError."""
    rewards = RewardScheduler(config.reward.verifier, config.reward.function, config.reward.num_workers)
    rewards.start()
    return rewards


def build_engine(config: Config, platform: Platform) -> RolloutEngine:
    """This rank's engine; it has no weights yet."""
    data, rollout = config.data, config.rollout
    options = EngineOptions(
        model_path=config.model.path,
        tensor_model_parallel_size=rollout.tensor_model_parallel_size,
        max_model_len=data.max_prompt_length + data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        dtype=config.rollout_dtype,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        kv_cache_gib=rollout.kv_cache_gib,
    )
    return RolloutEngine(options, platform, seed=config.trainer.seed)


def build_rollout(
    config: Config,
    world: World,
    inputs: InferenceInputs,
    engine: RolloutEngine,
    dataset: PromptDataset,
    *,
    is_validation: bool = False,
    wants_to_stop: Callable[[], bool] = lambda: False,
    heartbeat: Heartbeat | None = None,
) -> LiveRollout:
    """A rollout of `dataset` on the engine, with the sampling law of training or of validation."""
    law = config.rollout.val_kwargs if is_validation else config.rollout
    return LiveRollout(
        engine,
        EventExchange(world.comm, timeout_s=config.trainer.collective_timeout_s),
        inputs.rewards,
        world,
        inputs.placement,
        dataset.by_id,
        inputs.tokenizer,
        SamplingLaw(law.temperature, law.top_p, law.top_k, inputs.stop_token_ids),
        quantum_s=config.rollout.quantum_ms / 1e3,
        deterministic=config.trainer.deterministic,
        is_validation=is_validation,
        is_raced=config.tail_batching.mode != "off" and not is_validation,
        wants_to_stop=wants_to_stop,
        heartbeat=heartbeat,
    )


def build_validator(
    config: Config,
    world: World,
    inputs: InferenceInputs,
    engine: RolloutEngine,
    on_progress: Callable[[int, int, int], None],
    wants_to_stop: Callable[[], bool] = lambda: False,
    heartbeat: Heartbeat | None = None,
) -> Validator | None:
    """What validates on data.val_files; None where there are none. `on_progress`: see `Validator`."""
    if inputs.validation is None:
        return None
    rollout = build_rollout(
        config,
        world,
        inputs,
        engine,
        inputs.validation,
        is_validation=True,
        wants_to_stop=wants_to_stop,
        heartbeat=heartbeat,
    )
    return Validator(config, world, rollout, engine, inputs.validation, inputs.tokenizer, on_progress)
