"""`rollpacker eval`: avg@k, maj@k and pass@k of a model on data.val_files, under mpirun or srun, or alone."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.cli import job
from rollpacker.config import Config
from rollpacker.config_file import load_config, to_yaml
from rollpacker.model_shape import ModelShape, check_shapes

if TYPE_CHECKING:
    from rollpacker.comm.world import World
    from rollpacker.runtime.evaluation import InferenceInputs
    from rollpacker.runtime.validation import Row

HELP = "Score a model on data.val_files: avg@k, maj@k, pass@k (mpirun -n N rollpacker eval CONFIG, srun, or alone)."
_PROGRESS_EVERY_S = 0.25
_WIDTH = 240  # where the output is no terminal: nothing is cut off


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    job.add_arguments(parser, dry_run="check config, model and prompts, say what would run, and stop")


def run(arguments: argparse.Namespace) -> int:
    """Check everything on every rank, then decode, score, and append a row to validation.jsonl."""
    return job.run_on_ranks(arguments, lambda world: _run(arguments, world))


def _run(arguments: argparse.Namespace, world: World) -> int:
    config = world.agree(lambda: load_config(arguments.config, arguments.overrides, prompts="data.val_files"))
    shape = world.agree(lambda: _check_rollout_shape(config, world.size))
    from rollpacker.runtime.evaluation import check, evaluate

    inputs = world.agree(lambda: check(config, world, shape))
    if world.rank == 0:
        sys.stdout.write(_describe(config, inputs, world, is_dry_run=arguments.dry_run))
        sys.stdout.flush()
    try:
        if arguments.dry_run:
            return 0
        progress = _Progress(world)
        row = evaluate(config, world, inputs, progress)
    finally:
        if inputs.rewards is not None:
            inputs.rewards.close()
    if row is not None:
        progress.clear()
        _print_table(config, row)
    return 0


def _check_rollout_shape(config: Config, world_size: int) -> ModelShape:
    """The training sizes need not fit an evaluation: nothing is trained."""
    training = dataclasses.replace(
        config.training, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1
    )
    return check_shapes(dataclasses.replace(config, training=training), world_size)


def _describe(config: Config, inputs: InferenceInputs, world: World, *, is_dry_run: bool) -> str:
    law, validation = config.rollout.val_kwargs, inputs.validation
    assert validation is not None, "load_config has seen to data.val_files"
    tp_size = config.rollout.tensor_model_parallel_size
    facts = [
        f"model     {config.model.path}: {inputs.shape.architecture}, {inputs.shape.num_parameters() / 1e6:.1f} M parameters",
        f"prompts   {len(validation.examples)} usable, {validation.num_overlong} over data.max_prompt_length left out",
        f"sampling  {law.n} responses per prompt, temperature {law.temperature:g}, top_p {law.top_p:g}, top_k {law.top_k}",
        f"ranks     {world.size} on {inputs.platform.name}, TP {tp_size} x {world.size // tp_size} replica(s)",
        f"output    {Path(config.trainer.default_local_dir) / 'validation.jsonl'}",
    ]
    text = "\n".join(facts) + "\n"
    if is_dry_run:
        return to_yaml(config) + "\n" + text + "The config is good; nothing was started or written.\n"
    return text + "Building the vLLM engine and loading the weights.\n"


class _Progress:
    """One line on a terminal, rewritten in place; nothing elsewhere."""

    def __init__(self, world: World) -> None:
        from rollpacker.comm.world import is_user_terminal

        self._is_shown = world.rank == 0 and is_user_terminal()[0]
        self._began_s = self._shown_s = time.monotonic()

    def __call__(self, num_finished: int, num_requests: int, num_tokens: int) -> None:
        now_s = time.monotonic()
        if self._is_shown and now_s - self._shown_s > _PROGRESS_EVERY_S:
            self._shown_s = now_s
            pace = num_tokens / max(now_s - self._began_s, 1e-3)
            sys.stdout.write(f"\r{num_finished:,}/{num_requests:,} responses  {pace:,.0f} tok/s \x1b[K")
            sys.stdout.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            sys.stdout.write("\r\x1b[K")


def _print_table(config: Config, row: Row) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from rollpacker.comm.world import is_user_terminal

    core = {tuple(name.split("/", 1)[1].rsplit("/", 1)): v for name, v in row.items() if name.startswith("val-core/")}
    domains = list(dict.fromkeys(domain for domain, _ in core))
    metrics = list(dict.fromkeys(metric for _, metric in core))
    table = Table(box=SIMPLE)
    for title in ("domain", "prompts", *metrics):
        table.add_column(title, justify="left" if title == "domain" else "right")
    for domain in domains:
        count = row.get(f"val-aux/{domain}/num_prompts", row["num_prompts"])
        table.add_row(domain, f"{count:,}", *(f"{core[domain, metric]:.4f}" for metric in metrics))
    is_terminal, width = is_user_terminal()
    console = Console(
        file=sys.stdout, force_terminal=is_terminal, width=width or _WIDTH, highlight=False, emoji=False, markup=False
    )
    console.print(table)
    console.print(
        f"{row['num_responses']:,} responses of {row['response_length/mean']:.0f} tokens on average, "
        f"{row['reward/error_count']} failed rewards, {row['timing_s/testing']:.1f} s; one row appended to "
        f"{Path(config.trainer.default_local_dir) / 'validation.jsonl'}",
        soft_wrap=True,
    )
