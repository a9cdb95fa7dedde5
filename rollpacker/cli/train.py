"""`rollpacker train`: under mpirun or srun, or alone with one rank."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.cli import job
from rollpacker.config import Config
from rollpacker.config_file import load_config, to_yaml
from rollpacker.model_shape import check_shapes

if TYPE_CHECKING:
    from rollpacker.comm.world import World
    from rollpacker.runtime.worker import Checked, Worker

HELP = "Train a model by GRPO, one MPI rank per GPU (mpirun -n N rollpacker train CONFIG, srun, or alone)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    job.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check everything on every rank, then train."""
    return job.run_on_ranks(arguments, lambda world: _run(arguments, world))


def _run(arguments: argparse.Namespace, world: World) -> int:
    # What costs nothing is checked before torch is imported, so that a typing error shows at once.
    config = world.agree(lambda: load_config(arguments.config, arguments.overrides))
    shape = world.agree(lambda: check_shapes(config, world.size))
    from rollpacker.runtime.worker import Worker, check

    checked = world.agree(lambda: check(config, world, shape))
    if world.rank == 0:
        sys.stdout.write(_describe(config, checked, world, is_dry_run=arguments.dry_run))
        sys.stdout.flush()
    if arguments.dry_run:
        if checked.rewards is not None:
            checked.rewards.close()
        return 0
    return _train(Worker(config, world, checked))


def _train(worker: Worker) -> int:
    from rollpacker.loop import run as run_loop

    config, display = worker.config, worker.display
    start = time.monotonic()
    if display is not None:
        if worker.moved_aside is not None:
            display.note(f"an earlier run was moved to {worker.moved_aside}")
        display.start()
    try:
        if config.trainer.val_before_train:
            worker.backend.validate(0)
        num_steps = run_loop(worker.checked.total_steps, worker.controller, worker.backend)
        is_exported = config.trainer.save_freq > 0 and num_steps % config.trainer.save_freq == 0
        exported = worker.model_folder(num_steps) if num_steps and config.trainer.save_freq else None
        if exported is not None and not is_exported:
            worker.export_model(num_steps)
    finally:
        worker.close()
    if display is not None:
        display.finish(_summary(worker, num_steps, time.monotonic() - start, exported))
    return 0


def _summary(worker: Worker, num_steps: int, seconds: float, exported: Path | None) -> dict[str, str]:
    run_dir = worker.run_dir
    rows = {
        "steps": f"{num_steps} in {seconds:.0f} s",
        "metrics": str(run_dir / "metrics.jsonl"),
        "samples": str(run_dir / "samples.jsonl"),
    }
    if (run_dir / "validation.jsonl").exists():
        rows["validation"] = str(run_dir / "validation.jsonl")
    if worker.config.profiler.trace:
        rows["trace"] = f"{run_dir / 'events.trace.json'} (open in ui.perfetto.dev)"
    if "tensorboard" in worker.config.trainer.logger:
        rows["tensorboard"] = f"tensorboard --logdir {run_dir / 'tensorboard'}"
    if worker.config.trainer.rollout_data_dir:
        rows["rollouts"] = worker.config.trainer.rollout_data_dir
    if exported is not None:
        rows["model"] = str(exported)
    return rows


def _describe(config: Config, checked: Checked, world: World, *, is_dry_run: bool) -> str:
    """What is about to run; a dry run shows the whole resolved config before it."""
    training, rollout, shape = config.training, config.rollout, checked.shape
    model_ranks = training.tensor_model_parallel_size * training.pipeline_model_parallel_size
    trainer = config.trainer
    facts = [
        f"run       {trainer.project_name}/{trainer.experiment_name}",
        f"model     {config.model.path}: {shape.architecture}, {shape.num_parameters() / 1e6:.1f} M parameters",
        f"prompts   {len(checked.dataset.examples)} usable, {checked.dataset.num_overlong} over "
        f"data.max_prompt_length left out",
        f"validate  {_describe_validation(config, checked)}",
        f"ranks     {world.size} on {checked.platform.name}",
        f"training  TP {training.tensor_model_parallel_size} x PP {training.pipeline_model_parallel_size} x "
        f"DP {world.size // model_ranks}, {training.dtype}",
        f"rollout   TP {rollout.tensor_model_parallel_size} x "
        f"{world.size // rollout.tensor_model_parallel_size} replica(s)",
        f"steps     {checked.total_steps} of {config.data.train_batch_size} prompts x {rollout.n} responses",
        f"output    {trainer.default_local_dir}",
    ]
    text = "\n".join(facts) + "\n"
    if is_dry_run:
        return to_yaml(config) + "\n" + text + "The config is good; nothing was started or written.\n"
    return text + "Building the Megatron model and the vLLM engine; the first step follows in about half a minute.\n"


def _describe_validation(config: Config, checked: Checked) -> str:
    if config.rollout.replay is not None:
        return "never: rollout.replay has no engine"
    if checked.validation is None:
        return "never: data.val_files is empty"
    test_freq = config.trainer.test_freq
    when = ["before step 1"] if config.trainer.val_before_train else []
    when += [f"every {test_freq} steps and at the end"] if test_freq > 0 else []
    prompts = f"{len(checked.validation.examples)} prompts x {config.rollout.val_kwargs.n} responses"
    return f"{prompts}, {' and '.join(when) or 'never: trainer.test_freq and val_before_train are off'}"
