"""What tail batching gains and costs on real engines: `off` against `paper`, in turns, on the same seeds.

    python benchmarks/bench_tail_batching.py [demo demo-small] [--seeds 3] [--steps 30]

Each run is a `rollpacker train`, read back from its run directory; its first step is a warm-up and not counted. Seconds of a
machine that others use say little. So what is compared is the ratio of a seed's two runs, one after the other, and beside
the wall the CPU time of engine, exchange and controller on the busiest rank, which the load of others hardly touches. A
fifth of the prompts is audited, so that coverages are known after few steps.

A round takes decode steps x seconds per decode step. Tail batching cuts the first, the longest response that is waited for,
and makes the second larger, since more requests decode at a time. Both are printed: how much the second grows is a matter of
the machine, the first is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from training_run import ROOT, read_counters, read_jsonl, train

from rollpacker.runtime.val_core import ALL_DOMAINS

MODES = ("off", "paper")
COVERAGES = ("coverage_p50", "coverage_p90", "coverage_p95", "coverage_p99", "own_coverage_p95")
LAST = 10  # steps whose rewards are "at the end"


CONFIG = "configs/demo_cpu.yaml"
# Rounds of half a second: an exchange every 50 ms would be a fifth of one, since what ends a round takes two of them.
SETTINGS = (
    "rollout.quantum_ms=20",
    "trainer.test_freq=10",
    "rollout.val_kwargs.n=8",
    "tail_batching.audit_fraction=0.2",
)
WORKLOADS: dict[str, tuple[str, ...]] = {"demo": (), "demo-small": ("rollout.n=4",)}


@dataclass(frozen=True)
class Round:
    """One step of a run; seconds are those of the rollout, CPU seconds those of its busiest rank, tokens of responses."""

    is_long: bool
    seconds: float
    cpu_s: float
    num_samples: int
    num_tokens: int
    num_generated: float
    longest: int
    median: float
    bubble: float
    reward: float


@dataclass(frozen=True)
class Run:
    """A training: its rounds from the second on, its validations by step, its audit at the end."""

    mode: str
    seed: int
    rounds: list[Round]
    validation: dict[int, float]
    audit: dict[str, float | None]


def measure(overrides: Sequence[str], mode: str, seed: int, steps: int, ranks: int, folder: Path) -> Run:
    """Train, and read the run back."""
    settings = [
        "trainer.logger=[]",
        f"tail_batching.mode={mode}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
    ]
    train([CONFIG, *SETTINGS, *overrides, *settings], folder, ranks)
    rows = read_jsonl(folder / "metrics.jsonl")
    lengths: dict[int, list[int]] = {}
    for sample in read_jsonl(folder / "samples.jsonl"):
        lengths.setdefault(sample["step"], []).append(sample["num_response_tokens"])
    cpu_s = _cpu_seconds(folder / "events.trace.json")
    return Run(
        mode,
        seed,
        [_round(row, lengths[step], cpu_s[step]) for row in rows[1:] for step in [row["training/global_step"]]],
        {row["step"]: _accuracy(row) for row in read_jsonl(folder / "validation.jsonl")},
        {name: rows[-1][f"audit/{name}"] for name in ("num_groups", "icc", *COVERAGES)},
    )


def _cpu_seconds(trace: Path) -> dict[int, float]:
    """CPU time of the rollout on the busiest rank, by step: engine, exchange and controller."""
    counters = read_counters(trace)
    of_ranks = [
        [engine + control for engine, control in zip(*of_rank, strict=True)]
        for of_rank in zip(counters["engine_cpu_s"], counters["control_cpu_s"], strict=True)
    ]
    return {step: max(ranks) for step, ranks in enumerate(zip(*of_ranks, strict=True), start=1)}


def _round(row: dict[str, Any], lengths: Sequence[int], cpu_s: float) -> Round:
    return Round(
        is_long=bool(row["rollout/is_long_round"]),
        seconds=row["timing_s/gen"],
        cpu_s=cpu_s,
        num_samples=len(lengths),
        num_tokens=sum(lengths),
        num_generated=sum(lengths) / (1.0 - row["rollout/wasted_token_ratio"]),
        longest=max(lengths),
        median=median(lengths),
        bubble=row["bubble/rollout_ratio"],
        reward=row["critic/score/mean"],
    )


def _accuracy(row: dict[str, Any]) -> float:
    """avg@n over all prompts of a validation."""
    return next(float(row[key]) for key in row if key.startswith(f"val-core/{ALL_DOMAINS}/avg@"))


def per_sample(rounds: Sequence[Round], seconds: Callable[[Round], float]) -> float:
    """Seconds per trained sample."""
    return sum(map(seconds, rounds)) / sum(r.num_samples for r in rounds)


def wall(r: Round) -> float:
    """Seconds of the rollout on the slowest rank."""
    return r.seconds


def cpu(r: Round) -> float:
    """CPU seconds of the rollout on the busiest rank."""
    return r.cpu_s


def columns(runs: Sequence[Run]) -> dict[str, list[Round]]:
    """The rounds of all seeds, by what is compared."""
    off, paper = ([r for run in runs if run.mode == mode for r in run.rounds] for mode in MODES)
    long, short = ([r for r in paper if r.is_long is kind] for kind in (True, False))
    return {"off": off, "paper, SHORT": short, "paper, LONG": long, "paper, all": paper}


def measures(num_ranks: int) -> dict[str, tuple[str, Callable[[Sequence[Round]], float]]]:
    """The rows of the table: a format, and a number of some rounds."""

    def steps(rounds: Sequence[Round]) -> float:
        return sum(r.longest for r in rounds)

    return {
        "rounds": (".0f", len),
        "longest / median response": (".1f", lambda rs: fmean(r.longest / r.median for r in rs)),
        "rollout s a round": (".3f", lambda rs: fmean(map(wall, rs))),
        "rollout ms per trained sample": (".2f", lambda rs: 1e3 * per_sample(rs, wall)),
        "rollout CPU ms per trained sample, busiest rank": (".2f", lambda rs: 1e3 * per_sample(rs, cpu)),
        "decode steps a round (longest trained response)": (".0f", lambda rs: steps(rs) / len(rs)),
        "CPU ms per decode step": (".1f", lambda rs: 1e3 * sum(map(cpu, rs)) / steps(rs)),
        "requests per decode step and rank": (
            ".1f",
            lambda rs: sum(r.num_generated for r in rs) / steps(rs) / num_ranks,
        ),
        "bubble ratio": (".2f", lambda rs: sum(r.bubble * r.seconds for r in rs) / sum(map(wall, rs))),
        "wasted token ratio": (".2f", lambda rs: 1 - sum(r.num_tokens for r in rs) / sum(r.num_generated for r in rs)),
        "trained tokens/s": (".0f", lambda rs: sum(r.num_tokens for r in rs) / sum(map(wall, rs))),
        "reward of trained samples": (".3f", lambda rs: fmean(r.reward for r in rs)),
    }


def compare(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Off over paper, a number a seed: rollout time per trained sample and decode steps a round."""
    ratios: dict[str, list[float]] = {}
    for seed in seeds(runs):
        off, paper = (next(r.rounds for r in runs if (r.seed, r.mode) == (seed, mode)) for mode in MODES)
        for name, rounds in (("SHORT rounds", [r for r in paper if not r.is_long]), ("all rounds", paper)):
            found = {
                "rollout time per trained sample": per_sample(off, wall) / per_sample(rounds, wall),
                "rollout CPU time per trained sample": per_sample(off, cpu) / per_sample(rounds, cpu),
                "decode steps a round": fmean(r.longest for r in off) / fmean(r.longest for r in rounds),
            }
            for what, ratio in found.items():
                ratios.setdefault(f"{name}, {what}, off / paper", []).append(ratio)
    return ratios


def seeds(runs: Sequence[Run]) -> list[int]:
    """The seeds that were run, in order."""
    return sorted({run.seed for run in runs})


def learning(runs: Sequence[Run]) -> dict[str, Any]:
    """Rewards at the end, and the validations: is paper's curve inside the noise of off's?

    The noise is two standard errors of the difference of two means over the seeds, with off's spread (the root mean square
    of it over the validations after the first, which is before any training and the same for both).
    """
    ends = {m: [fmean(x.reward for x in r.rounds[-LAST:]) for r in runs if r.mode == m] for m in MODES}
    curves = {m: [r.validation for r in runs if r.mode == m] for m in MODES}
    found: dict[str, Any] = {"reward of trained samples, last steps": ends}
    steps = sorted(curves["off"][0])[1:]
    if not steps:
        return found
    means = {m: [fmean(c[s] for c in curves[m]) for s in steps] for m in MODES}
    found["validation"] = {"steps": steps, **means, "at the end": {m: [c[steps[-1]] for c in curves[m]] for m in MODES}}
    if len(seeds(runs)) > 1:
        spread = sqrt(fmean(stdev(c[s] for c in curves["off"]) ** 2 for s in steps))
        found["noise"] = 2 * spread * sqrt(2 / len(seeds(runs)))
        found["largest difference"] = max(abs(a - b) for a, b in zip(means["off"], means["paper"], strict=True))
    return found


def show(name: str, results: dict[str, Any], console: Console) -> None:
    """Print what main() has found of a workload."""
    groups = results["columns"]
    table = Table("", *groups, title=f"Tail batching on {name}, {len(results['seeds'])} seeds pooled")
    for measure, (form, _) in measures(1).items():
        table.add_row(measure, *(format(groups[g][measure], form) if groups[g] else "" for g in groups))
    console.print(table)
    for title, values in results["ratios"].items():
        console.print(f"{title}: {median(values):.2f} ({', '.join(f'{v:.2f}' for v in values)})")
    for audit in results["audits"]:
        shown = ", ".join(f"{k} {audit[k]:.2f}" for k in ("icc", *COVERAGES) if audit[k] is not None)
        console.print(f"audit of paper, {audit['num_groups']} groups: {shown or 'too few groups'}")
    learned = results["learning"]
    for mode, values in learned["reward of trained samples, last steps"].items():
        console.print(f"reward of trained samples, last {LAST} steps, {mode}: {_spread(values)}")
    if "validation" in learned:
        for mode in MODES:
            curve = " ".join(f"{v:.3f}" for v in learned["validation"][mode])
            console.print(f"validation, {mode}: {_spread(learned['validation']['at the end'][mode])}; curve {curve}")
    if "noise" in learned:
        verdict = "inside" if learned["largest difference"] <= learned["noise"] else "OUTSIDE"
        console.print(
            f"largest difference of the curves {learned['largest difference']:.3f}, {verdict} the noise of off "
            f"({learned['noise']:.3f})"
        )


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def bench(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs of a workload, and what they say."""
    runs = []
    for seed in range(arguments.seeds):
        for mode in MODES if seed % 2 == 0 else MODES[::-1]:
            print(f"{name}: {mode}, seed {seed} ...", file=sys.stderr)
            folder = arguments.runs / name / f"{mode}_{seed}"
            runs.append(measure(WORKLOADS[name], mode, seed, arguments.steps, arguments.ranks, folder))
    rows = measures(arguments.ranks)
    return {
        "overrides": [*SETTINGS, *WORKLOADS[name]],
        "ranks": arguments.ranks,
        "steps": arguments.steps,
        "seeds": seeds(runs),
        "columns": {
            group: {measure: number(rounds) for measure, (_, number) in rows.items()} if rounds else {}
            for group, rounds in columns(runs).items()
        },
        "ratios": compare(runs),
        "audits": [run.audit for run in runs if run.mode == "paper"],
        "learning": learning(runs),
    }


def main() -> None:
    """Run the workloads, print their tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["demo"], metavar="|".join(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run; the first is not counted")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "bench_tail_batching", help="run directories")
    parser.add_argument("--out", type=Path, default=ROOT / "bench_tail_batching.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - WORKLOADS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not a workload; there are {', '.join(WORKLOADS)}")
    results = {name: bench(name, arguments) for name in arguments.workloads}
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 130)
    for name, found in results.items():
        show(name, found, console)


if __name__ == "__main__":
    main()
