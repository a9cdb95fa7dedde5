"""What a user may have got wrong, looked for on every rank before anything expensive starts or anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rollpacker.comm.world import World
from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import value_of
from rollpacker.data.prompts import PromptDataset, load_examples
from rollpacker.model_shape import ModelShape, read_model_shape
from rollpacker.platform.device import Platform, select_platform
from rollpacker.runtime.checkpointing import ResumePoint, check_resumable
from rollpacker.runtime.dump import ReplayRollout, check_validation_dump
from rollpacker.runtime.inference import InferenceInputs, load_tokenizer, load_validation, start_rewards
from rollpacker.runtime.loggers import check_loggers
from rollpacker.runtime.rollout import place
from rollpacker.training.loss import load_policy_loss
from rollpacker.weights.reshard import load_kernels


@dataclass(frozen=True)
class Checked(InferenceInputs):
    """What was read and found good before anything expensive starts or anything is written."""

    dataset: PromptDataset
    replay: ReplayRollout | None
    total_steps: int
    resume: ResumePoint | None = None
    changes: tuple[str, ...] = ()
    """Keys that the run to go on with had otherwise."""


def check(
    config: Config, world: World, shape: ModelShape, resume: ResumePoint | None = None, *, is_dry_run: bool = False
) -> Checked:
    """Everything else that a user may have got wrong, on every rank. Raises ConfigError."""
    platform = select_platform(config.trainer.device, is_plan=is_dry_run)
    _check_device_features(config, platform)
    _check_refit(config, platform)
    changes = [] if resume is None else check_resumable(config, shape, resume)
    _check_folders(config, is_resumed=resume is not None and resume.is_in_place)
    load_policy_loss(config.algorithm)
    _check_reference(config, shape)
    if world.rank == 0:
        check_loggers(config)
    tokenizer, stop_token_ids = load_tokenizer(config.model.path)
    dataset = load_examples(
        config.data.train_files,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        domains=config.data.domains,
    )
    placement = place(world.rank, config.rollout.tensor_model_parallel_size)
    replay, rewards, validation = None, None, None
    if config.rollout.replay is not None:
        replay = ReplayRollout(
            config.rollout.replay, rank=world.rank, world_size=world.size, num_responses=config.rollout.n
        )
    else:
        validation = load_validation(config, tokenizer)
        rewards = start_rewards(config) if placement.is_leader else None
    total_steps = _total_steps(config, len(dataset.examples), replay)
    if config.training.lr_warmup_steps >= total_steps and config.training.lr_warmup_steps > 0:
        raise ConfigError(
            f"training.lr_warmup_steps={config.training.lr_warmup_steps} does not leave a step of the {total_steps} in "
            "this run at the full learning rate; lower it."
        )
    inputs = (shape, platform, tokenizer, stop_token_ids, placement, rewards, validation)
    return Checked(*inputs, dataset, replay, total_steps, resume, tuple(changes))


def _check_device_features(config: Config, platform: Platform) -> None:
    """Refuse what this device or this installation does not have."""
    if config.profiler.nvtx and platform.name != "cuda":
        raise ConfigError(
            f"profiler.nvtx=true marks CUDA ranges, but the ranks run on {platform.name}; set it to false."
        )
    if config.profiler.tool == "nsys" and platform.name != "cuda":
        raise ConfigError(
            f"profiler.tool=nsys records CUDA work, but the ranks run on {platform.name}; use profiler.tool=torch."
        )


def _check_refit(config: Config, platform: Platform) -> None:
    """The extension must be there, built for this device, and cannot do what the golden path does on the way."""
    if config.weights.refit == "golden" or config.rollout.replay is not None:  # a replay has no engine to refit
        return
    if config.rollout.weight_noise:
        raise ConfigError(
            f"rollout.weight_noise={config.rollout.weight_noise:g} is put on whole tensors: set weights.refit=golden."
        )
    if not load_kernels().WITH_CUDA and platform.name == "cuda":
        raise ConfigError(
            "weights.refit=csrc: the extension rollpacker.weights._reshard was built without CUDA (no nvcc was found). Build "
            "it where there is one, with ROLLPACKER_CUDA=ON (docs/refit.md), or set weights.refit=golden."
        )


def _check_folders(config: Config, *, is_resumed: bool) -> None:
    """An earlier run is moved aside, so nothing that this run reads may lie in it; and dumps of two runs never mix."""
    if is_resumed:
        return
    run_dir = Path(config.trainer.default_local_dir).absolute()
    keys = ("model.path", "model.reference_path", "rollout.replay", "trainer.resume_from_path")
    inputs = [(key, value_of(config, key)) for key in keys]
    inputs += [("data.train_files", file) for file in config.data.train_files]
    inputs += [("data.val_files", file) for file in config.data.val_files]
    for dotted, path in inputs:
        if path is not None and Path(path).absolute().is_relative_to(run_dir):
            raise ConfigError(
                f"{dotted}={path} lies in trainer.default_local_dir={config.trainer.default_local_dir}, which is moved "
                "aside when the run starts. Choose another run directory."
            )
    dump = config.trainer.rollout_data_dir
    if dump is not None and not _goes_with(run_dir, dump) and any(Path(dump).glob("step_*")):
        raise ConfigError(
            f"trainer.rollout_data_dir={dump} holds the steps of an earlier run. Remove them, or choose another folder."
        )
    dump = config.trainer.validation_data_dir
    if dump is not None and not _goes_with(run_dir, dump):
        check_validation_dump(dump, "[0-9]*.jsonl")


def _goes_with(run_dir: Path, folder: str) -> bool:
    """Whether a folder lies in an earlier run's directory, and so is moved aside with it."""
    return (run_dir / "metrics.jsonl").exists() and Path(folder).absolute().is_relative_to(run_dir)


def _check_reference(config: Config, shape: ModelShape) -> None:
    path = config.model.reference_path
    if path is not None and read_model_shape(path, "model.reference_path=") != shape:
        raise ConfigError(
            f"model.reference_path={path} has another shape than model.path={config.model.path}: a reference is swapped "
            "into the model in training, so both must be alike."
        )


def _total_steps(config: Config, num_prompts: int, replay: ReplayRollout | None) -> int:
    """Steps that the learning rate and the display reckon with: the cap, else until the prompts (or the dump) are used up.

    A filter uses prompts up faster; a dump of a run that was cut short ends before the run's cap.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    if replay is not None:
        return replay.num_steps
    return math.ceil(num_prompts * config.trainer.total_epochs / config.data.train_batch_size)
