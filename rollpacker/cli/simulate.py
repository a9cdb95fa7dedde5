"""`rollpacker simulate`: a training run on a cluster that need not be there, in virtual time; no torch, no MPI."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from rollpacker.cli.terminal import add_config_arguments, columns, open_console
from rollpacker.config import Config, ConfigError
from rollpacker.config_file import load_config, to_yaml
from rollpacker.profiling.trace import TraceWriter
from rollpacker.runtime.metrics import TRACE, MetricsWriter, prepare_run_dir
from rollpacker.simulator.figures import WITHOUT_MATPLOTLIB, draw_sweep, has_matplotlib
from rollpacker.simulator.record import Recorder, Summary
from rollpacker.simulator.run import Simulation
from rollpacker.simulator.workload import MeasuredWorkload, Workload, intraclass_correlation

HELP = "Simulate a run on a cluster (seconds on one core; no GPU, no MPI): step times, idle shares, what a race drops."
_SAMPLED_RESPONSES = 16  # of each prompt, to describe the law


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser, example="configs/sim/7b_8k.yaml", override="tail_batching.mode=off")
    parser.add_argument(
        "--out", metavar="DIR", help="write a run directory there: metrics, samples, trace, summary.json"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="trainer.seed; the same seed gives the same bytes")
    parser.add_argument("--sweep", metavar="KEY=V1,V2,...", help="simulate once for each value and compare")


def run(arguments: argparse.Namespace) -> int:
    """Check everything, then simulate; the exit code."""
    overrides = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"trainer.seed={arguments.seed}")
    if arguments.sweep is not None:
        return _sweep(arguments, overrides)
    config = load_config(arguments.config, overrides, prompts=None)
    simulation = Simulation(config)
    console = open_console()
    console.print(_describe(config, simulation), end="", soft_wrap=True)
    recorder, moved_to = _simulate(simulation, arguments.out)
    summary = recorder.summary(simulation.workload)
    console.print(_summary_table(config, recorder, summary))
    if moved_to is not None:
        console.print(f"an earlier run was moved to {moved_to}", soft_wrap=True)
    if arguments.out is not None:
        _write_summary(Path(arguments.out), summary)
        console.print(f"written to {arguments.out}", soft_wrap=True)
    return 0


def _simulate(simulation: Simulation, out: str | None) -> tuple[Recorder, Path | None]:
    """Run, and write the run directory if one is named; where an earlier one has gone."""
    if out is None:
        return simulation.run(), None
    moved_to = prepare_run_dir(out, to_yaml(simulation.config), key="--out ")
    run_dir = Path(out)
    rows = MetricsWriter(run_dir)
    trace = TraceWriter(run_dir / TRACE) if simulation.config.profiler.trace else None
    try:
        return simulation.run(rows, trace), moved_to
    finally:
        rows.close()
        if trace is not None:
            trace.close()


def _write_summary(folder: Path, summary: Summary) -> None:
    (folder / "summary.json").write_text(summary.to_json(), encoding="utf-8")


def _sweep(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """One simulation for each value: a table, and with --out a run directory each and sweep.json."""
    key, equals, text = arguments.sweep.partition("=")
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not equals or "." not in key or not values:
        raise ConfigError(
            f"--sweep {arguments.sweep}: write key=v1,v2,... for example tail_batching.eta_prompts=1,1.125,1.25."
        )
    # Every value is checked before the first is simulated.
    runs = [Simulation(load_config(arguments.config, [*overrides, f"{key}={v}"], prompts=None)) for v in values]
    table = columns(key, "ms per sample", "rollout s", "step s", "bubble", "waste", "c(.95)", "o(.95)", "LONG share")
    rows = []
    for value, simulation in zip(values, runs, strict=True):
        out = None if arguments.out is None else Path(arguments.out) / f"{key}={value}"
        recorder, _ = _simulate(simulation, None if out is None else str(out))
        summary = recorder.summary(simulation.workload)
        if out is not None:
            _write_summary(out, summary)
        per_sample_ms = 1e3 * recorder.totals.step_s / recorder.totals.num_samples
        rows.append({key: value, "ms_per_sample": per_sample_ms, **vars(summary)})
        table.add_row(
            value,
            f"{per_sample_ms:,.1f}",
            f"{summary.rollout_s_per_step:,.1f}",
            f"{summary.step_s:,.1f}",
            f"{summary.bubble_ratio:.3f}",
            f"{summary.wasted_token_ratio:.3f}",
            f"{summary.coverage_p95:.2f}",
            f"{summary.own_coverage_p95:.2f}",
            f"{summary.long_round_share:.3f}",
        )
    console = open_console()
    console.print(_describe(runs[0].config, runs[0]), end="", soft_wrap=True)
    console.print(f"sweep     {key}: what is said above is of {values[0]}", soft_wrap=True)
    console.print(table)
    if arguments.out is not None:
        folder = Path(arguments.out)
        (folder / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        if has_matplotlib():
            draw_sweep(key, rows, folder)
        console.print(f"written to {folder}" + ("" if has_matplotlib() else f"; {WITHOUT_MATPLOTLIB}"), soft_wrap=True)
    return 0


def _describe(config: Config, simulation: Simulation) -> str:
    """What is simulated."""
    cluster, training, rollout = simulation.cluster, config.training, config.rollout
    size = rollout.tensor_model_parallel_size
    mode = config.tail_batching.mode
    race = config.tail_batching
    capacity = cluster.capacity_tokens(size)
    facts = [
        f"model     {config.model.path}, {cluster.shape.num_parameters() / 1e9:.1f} B parameters",
        f"cluster   {cluster.num_gpus} x {config.cluster.gpu}, {cluster.gpus_per_node} a node",
        f"rollout   TP {size} x {cluster.num_gpus // size} replicas, KV cache of {capacity:,} tokens each",
        f"training  TP {training.tensor_model_parallel_size} x PP {training.pipeline_model_parallel_size} x CP "
        f"{training.context_parallel_size} x DP {cluster.num_gpus // training.replica_size}",
        *describe_workload(config, simulation.workload),
        f"steps     {config.data.train_batch_size} prompts x {rollout.n} responses, tail batching {mode}"
        + (f" (eta {race.eta_prompts:g} prompts, {race.eta_responses:g} responses)" if mode != "off" else ""),
    ]
    return "\n".join(facts) + "\n"


def describe_workload(config: Config, workload: Workload) -> list[str]:
    """The law of the lengths, in one line; more where measured lengths were resampled or cut."""
    lengths = workload.reference(_SAMPLED_RESPONSES)
    cap = config.data.max_response_length
    source = f"preset {config.workload.preset}" if config.workload.preset else "a lognormal law"
    icc = intraclass_correlation(lengths.tolist())
    extra = []
    if isinstance(workload, MeasuredWorkload):
        source = config.workload.lengths_file or ""
        icc = intraclass_correlation([p.response_tokens for p in workload.measured])
        num_measured, num_prompts = len(workload.measured), len(workload.prompts)
        if num_prompts != num_measured:
            extra.append(f"          {num_measured} measured prompts, resampled to {num_prompts:,}")
        if workload.num_over_cap:
            extra.append(f"          {workload.num_over_cap} measured responses are longer than the cap, and cut")
    p50, p95 = np.percentile(lengths, (50, 95))
    at_cap = (lengths >= cap).mean()
    facts = (
        f"workload  {source}: {len(workload.prompts):,} prompts, ICC {'n/a' if icc is None else f'{icc:.2f}'}, mean "
        f"{lengths.mean():,.0f} tokens, median {p50:,.0f}, 95 % {p95:,.0f}, at the cap of {cap:,} {at_cap:.1%}"
    )
    return [facts, *extra]


def _summary_table(config: Config, recorder: Recorder, summary: Summary) -> Table:
    totals = recorder.totals
    table = columns("", "")
    table.show_header = False
    num_steps = totals.num_samples / (config.data.train_batch_size * config.rollout.n)
    rounds = f"{totals.num_rounds} ({totals.num_long_rounds} LONG)"
    rows = {
        "rounds": f"{rounds}, {totals.num_samples:,} samples = {num_steps:.4g} steps",
        "rollout": f"{summary.rollout_s_per_step:,.1f} s a step",
        "step": f"{summary.step_s:,.1f} s ({1e3 * totals.step_s / totals.num_samples:,.1f} ms per trained sample)",
        "rollout bubble": f"{summary.bubble_ratio:.1%} of the GPU time",
        "wasted tokens": f"{summary.wasted_token_ratio:.1%}",
        "preemptions": f"{totals.num_preemptions:,}",
        "coverage c(.95)": f"{summary.coverage_p95:.2f} of the longest 5 % of all responses are trained",
        "own coverage o(.95)": f"{summary.own_coverage_p95:.2f} of each prompt's own longest 5 %",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    queued = recorder.last_update.stats.long_queue_len if recorder.last_update else 0
    if queued:
        table.add_row("still queued", f"{queued} prompts, not trained")
    return table
