"""`rollpacker train`: under mpirun or srun, or alone with one rank."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.cli import dry_run, job
from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import job_size, missing_features
from rollpacker.config_file import load_config
from rollpacker.data.domains import first_exhausted
from rollpacker.model_shape import check_shapes

if TYPE_CHECKING:
    from rollpacker.comm.world import World
    from rollpacker.data.prompts import PromptDataset
    from rollpacker.runtime.checks import Checked
    from rollpacker.runtime.worker import Worker

EXIT_STOPPED = 3
_MAX_DOMAINS = 10  # named in the opening lines

HELP = "Train a model by GRPO and kin, one MPI rank per GPU (mpirun -n N rollpacker train CONFIG, srun, or alone)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    job.add_arguments(
        parser,
        dry_run="check config, model, data, shapes and GPU memory, say what would run, and stop; needs one rank and no GPU",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check everything on every rank, then train."""
    return job.run_on_ranks(arguments, lambda world: _run(arguments, world))


def _run(arguments: argparse.Namespace, world: World) -> int:
    # What costs nothing is checked before torch is imported, so that a typing error shows at once.
    config = world.agree(lambda: load_config(arguments.config, arguments.overrides))
    world_size = world.agree(lambda: job_size(config, world.size, is_dry_run=arguments.dry_run))
    world.agree(lambda: _check_before_shapes(config, is_dry_run=arguments.dry_run))
    shape = world.agree(lambda: check_shapes(config, world_size))
    from rollpacker.comm.launcher import job_end_s
    from rollpacker.runtime.checkpointing import find_resume_point
    from rollpacker.runtime.checks import check
    from rollpacker.runtime.stopping import StopSwitch
    from rollpacker.runtime.worker import Worker

    job_end = job_end_s()
    stop = StopSwitch(None if job_end is None else job_end - config.trainer.save_deadline)
    if not arguments.dry_run:
        stop.install()
    resume = find_resume_point(config, world, is_dry_run=arguments.dry_run)
    checked = world.agree(lambda: check(config, world, shape, resume, is_dry_run=arguments.dry_run))
    if arguments.dry_run:
        return _report_dry_run(config, checked, world, world_size)
    if world.rank == 0:
        sys.stdout.write(_describe(config, checked, world_size))
        for problem in dry_run.problems(config, dry_run.estimate_for(config, checked, world_size)):
            sys.stdout.write(f"Warning: {problem}\n")
        sys.stdout.write(
            "Building the Megatron model and the vLLM engine; the first step follows in about half a minute.\n"
        )
        sys.stdout.flush()
    return _train(Worker(config, world, checked, stop))


def _check_before_shapes(config: Config, *, is_dry_run: bool) -> None:
    """A real start refuses what this version cannot do; a dry run says it last, and looks for all inputs first."""
    if is_dry_run:
        dry_run.check_inputs_exist(config)
    elif missing := missing_features(config):
        raise ConfigError(missing[0])


def _report_dry_run(config: Config, checked: Checked, world: World, world_size: int) -> int:
    """Say what would run and what stands in the way; exit code 2 if something does."""
    if checked.rewards is not None:
        checked.rewards.close()
    world.agree(lambda: dry_run.check_weight_files(config))
    estimate = dry_run.estimate_for(config, checked, world_size)
    problems = dry_run.problems(config, estimate)
    if world.rank == 0:
        sys.stdout.write(_describe(config, checked, world_size) + dry_run.describe(config, checked, estimate))
        verdict = "The config is good" if not problems else "THIS CONFIG CANNOT RUN, see below"
        sys.stdout.write(f"{verdict}; nothing was started or written.\n")
        sys.stdout.flush()
        for problem in problems:
            sys.stderr.write(f"rollpacker train: {problem}\n")
        sys.stderr.flush()
    return 2 if problems else 0


def _train(worker: Worker) -> int:
    from rollpacker.loop import RunStopped
    from rollpacker.loop import run as run_loop

    config, display, backend = worker.config, worker.display, worker.backend
    start = time.monotonic()
    if display is not None:
        if worker.moved_aside is not None:
            display.note(f"an earlier run was moved to {worker.moved_aside}")
        if config.trainer.total_training_steps == backend.num_done:
            display.note(f"all {backend.num_done} steps are done; a larger trainer.total_training_steps goes on")
        display.start()
    exported, is_stopped = None, False
    try:
        backend.validate_if_due(backend.num_done)
        total_steps = config.trainer.total_training_steps
        num_steps = run_loop(total_steps, worker.controller, backend, num_done=backend.num_done)
        backend.validate_last(num_steps)
        if num_steps and config.trainer.save_freq:
            backend.save()
            exported = worker.export_model(num_steps)
    except RunStopped:
        is_stopped, num_steps = True, backend.num_done
        worker.save_stopped()
        worker.stop.ignore_signals()
    finally:
        worker.close()
    if display is not None:
        display.finish(_summary(worker, num_steps, time.monotonic() - start, exported))
        if is_stopped:
            display.note("stopped and saved; the same command goes on from here")
    return EXIT_STOPPED if is_stopped else 0


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


def _describe_domains(dataset: PromptDataset, weights: dict[str, float]) -> list[str]:
    """The prompts of each domain, where there is more than one; with weights their shares, and how long these last."""
    counts = dataset.num_by_domain
    lines = []
    if len(counts) > 1:
        total = sum(weights[name] for name in counts) if weights else 0
        shown = [f"{n} {c} ({weights[n] / total:.0%})" if weights else f"{n} {c}" for n, c in counts.items()]
        rest = [f"{len(shown) - _MAX_DOMAINS} more"] if len(shown) > _MAX_DOMAINS else []
        lines.append(f"domains   {', '.join(shown[:_MAX_DOMAINS] + rest)}")
        if weights:
            name, num_prompts = first_exhausted(counts, weights)
            lines.append(f"          {name} is used up after {num_prompts} prompts of an epoch")
    if dataset.num_unweighted:
        lines.append(f"          {dataset.num_unweighted} prompts of weight 0 in data.domains left out")
    return lines


def _describe(config: Config, checked: Checked, world_size: int) -> str:
    """What is about to run, or would."""
    training, rollout, shape, trainer = config.training, config.rollout, checked.shape, config.trainer
    cp = training.context_parallel_size
    nodes = (
        f", {trainer.nnodes} node(s) of {trainer.n_gpus_per_node}" if trainer.nnodes and trainer.n_gpus_per_node else ""
    )
    dataset = checked.dataset
    facts = [
        f"run       {trainer.project_name}/{trainer.experiment_name}",
        f"model     {config.model.path}: {shape.architecture}, {shape.num_parameters() / 1e6:,.1f} M parameters",
        f"prompts   {len(dataset.examples)} usable, {dataset.num_overlong} over data.max_prompt_length left out",
        *_describe_domains(dataset, config.data.domains),
        f"validate  {_describe_validation(config, checked)}",
        f"ranks     {world_size} on {checked.platform.name}{nodes}",
        f"training  TP {training.tensor_model_parallel_size} x PP {training.pipeline_model_parallel_size} x "
        f"{f'CP {cp} x ' if cp > 1 else ''}DP {world_size // training.replica_size}, {training.dtype}",
        f"rollout   TP {rollout.tensor_model_parallel_size} x "
        f"{world_size // rollout.tensor_model_parallel_size} replica(s)",
        f"steps     {_describe_steps(config, checked)} of {config.data.train_batch_size} prompts x {rollout.n} responses",
        f"output    {trainer.default_local_dir}",
        *_describe_resume(checked),
    ]
    return "\n".join(facts) + "\n"


def _describe_resume(checked: Checked) -> list[str]:
    """From which checkpoint the run goes on, what is wrong with newer ones, and what its config changes."""
    if checked.resume is None:
        return []
    lines = [f"resume    {checked.resume.folder}, {checked.resume.step} steps done"]
    return [*lines, *(f"          {text}" for text in (*checked.resume.rejected, *checked.changes))]


def _describe_steps(config: Config, checked: Checked) -> str:
    is_plain = config.filter.mode == "off" and config.tail_batching.mode == "off"
    is_exact = config.trainer.total_training_steps is not None or is_plain
    return f"{'' if is_exact else 'about '}{checked.total_steps}"


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
