"""What tail batching gains and costs on real engines: `off` against `paper`, in turns, on the same seeds.

    python benchmarks/bench_tail_batching.py [demo smollm2 ...] [--seeds 3] [--steps 40]

Each run is a `rollpacker train`, read back from its run directory; its first step is a warm-up and not counted. Seconds of a
shared machine say little, so a seed's two runs follow one another and what is compared is the ratio of the two. A
fifth of the prompts is audited, so that coverages are known after few steps.

A round takes decode steps x seconds per decode step. Tail batching cuts the first, the longest response that is waited for,
and makes the second larger, since more requests decode at a time. Both are printed: how much the second grows is a matter of
the machine, the first is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODES = ("off", "paper")
COVERAGES = ("coverage_p50", "coverage_p90", "coverage_p95", "coverage_p99", "own_coverage_p95")
LAST = 10  # steps whose rewards are "at the end"


@dataclass(frozen=True)
class Workload:
    """A config and what the benchmark sets in it."""

    config: str
    arguments: tuple[str, ...]


WORKLOADS = {
    # Rounds of half a second: an exchange every 50 ms would be a fifth of one, since what ends a round takes two of them.
    "demo": Workload(
        "configs/demo_cpu.yaml", ("rollout.quantum_ms=20", "trainer.test_freq=10", "rollout.val_kwargs.n=8")
    ),
    "demo-small": Workload(
        "configs/demo_cpu.yaml",
        ("rollout.n=4", "rollout.quantum_ms=20", "trainer.test_freq=10", "rollout.val_kwargs.n=8"),
    ),
    "smollm2": Workload("configs/smollm2_cpu.yaml", ("data.max_response_length=512", "data.shuffle=true")),
}


@dataclass(frozen=True)
class Round:
    """One step of a run; seconds are those of the rollout, tokens those of responses."""

    is_long: bool
    seconds: float
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


def train(workload: Workload, mode: str, seed: int, steps: int, ranks: int, folder: Path) -> Run:
    """Run it, unless the folder holds the run already, and read it."""
    if not _is_complete(folder, steps):
        command = [
            "mpirun",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            str(ranks),
            sys.executable,
            "-m",
            "rollpacker",
        ]
        command += ["train", workload.config, *workload.arguments, f"tail_batching.mode={mode}", f"trainer.seed={seed}"]
        command += ["tail_batching.audit_fraction=0.2", f"trainer.total_training_steps={steps}", "trainer.save_freq=0"]
        command += [f"trainer.default_local_dir={folder}", "trainer.logger=[]"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
    rows = _read(folder / "metrics.jsonl")
    counts: dict[int, list[int]] = {}
    for sample in _read(folder / "samples.jsonl"):
        counts.setdefault(sample["step"], []).append(sample["num_response_tokens"])
    return Run(
        mode,
        seed,
        [_round(row, counts[row["training/global_step"]]) for row in rows[1:]],
        {row["step"]: _accuracy(row) for row in _read(folder / "validation.jsonl")},
        {name: rows[-1][f"audit/{name}"] for name in ("num_groups", "icc", *COVERAGES)},
    )


def _is_complete(folder: Path, steps: int) -> bool:
    return len(_read(folder / "metrics.jsonl")) == steps


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _round(row: dict[str, Any], lengths: Sequence[int]) -> Round:
    return Round(
        is_long=bool(row["rollout/is_long_round"]),
        seconds=row["timing_s/gen"],
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
    return next(float(row[key]) for key in sorted(row) if key.startswith("val-core/") and "/avg@" in key)


def seconds_per_sample(rounds: Sequence[Round]) -> float:
    """Rollout seconds per trained sample."""
    return sum(r.seconds for r in rounds) / sum(r.num_samples for r in rounds)


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
        "rollout s a round": (".3f", lambda rs: fmean(r.seconds for r in rs)),
        "rollout ms per trained sample": (".2f", lambda rs: 1e3 * seconds_per_sample(rs)),
        "decode steps a round (longest trained response)": (".0f", lambda rs: steps(rs) / len(rs)),
        "ms per decode step": (".1f", lambda rs: 1e3 * sum(r.seconds for r in rs) / steps(rs)),
        "requests per decode step and rank": (
            ".1f",
            lambda rs: sum(r.num_generated for r in rs) / steps(rs) / num_ranks,
        ),
        "bubble ratio": (".2f", lambda rs: sum(r.bubble * r.seconds for r in rs) / sum(r.seconds for r in rs)),
        "wasted token ratio": (".2f", lambda rs: 1 - sum(r.num_tokens for r in rs) / sum(r.num_generated for r in rs)),
        "trained tokens/s": (".0f", lambda rs: sum(r.num_tokens for r in rs) / sum(r.seconds for r in rs)),
        "reward of trained samples": (".3f", lambda rs: fmean(r.reward for r in rs)),
    }


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Off over paper, a number a seed: rollout time per trained sample, of SHORT rounds and of all; decode steps a round."""
    pairs = [tuple(next(r for r in runs if (r.seed, r.mode) == (seed, mode)) for mode in MODES) for seed in seeds(runs)]
    shorts = [[r for r in paper.rounds if not r.is_long] for _, paper in pairs]
    off_steps = [fmean(r.longest for r in off.rounds) for off, _ in pairs]
    return {
        "SHORT rounds, rollout time per trained sample, off / paper": [
            seconds_per_sample(off.rounds) / seconds_per_sample(short)
            for (off, _), short in zip(pairs, shorts, strict=True)
        ],
        "SHORT rounds, decode steps a round, off / paper": [
            steps / fmean(r.longest for r in short) for steps, short in zip(off_steps, shorts, strict=True)
        ],
        "all rounds, rollout time per trained sample, off / paper": [
            seconds_per_sample(off.rounds) / seconds_per_sample(paper.rounds) for off, paper in pairs
        ],
        "all rounds, decode steps a round, off / paper": [
            steps / fmean(r.longest for r in paper.rounds)
            for steps, (_, paper) in zip(off_steps, pairs, strict=True)
        ],
    }  # fmt: skip


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
            runs.append(train(WORKLOADS[name], mode, seed, arguments.steps, arguments.ranks, folder))
    rows = measures(arguments.ranks)
    return {
        "workload": asdict(WORKLOADS[name]),
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
    parser.add_argument("--steps", type=int, default=40, help="steps of each run; the first is not counted")
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
