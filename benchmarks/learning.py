"""What the algorithms learn on the demo: reward at the end and steps to 0.7, over several seeds, as a table.

    python benchmarks/learning.py recipes     each of configs/recipes/
    python benchmarks/learning.py mismatch    an engine with noise on its weights: none, tis and mis against a clean engine

Runs `rollpacker train` (`--ranks` each, `--jobs` at a time) and reads metrics.jsonl. The end of a run is the mean of its
last ten steps; steps to 0.7 is the first step whose mean of ten reaches it. Rewards are those of trained groups, so
dynamic sampling, which leaves out what is solved, looks worse than it is; the validation (avg@4, seen problems) compares.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from training_run import ROOT, read_jsonl, train

RECIPES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "dapo", "gspo")
WINDOW, TARGET = 10, 0.7


@dataclass(frozen=True)
class Variant:
    """One row of the table: what is started."""

    name: str
    arguments: tuple[str, ...]


def variants_of(suite: str) -> list[Variant]:
    """The rows of a suite."""
    if suite == "recipes":
        return [Variant(name, (f"configs/recipes/{name}.yaml",)) for name in RECIPES]
    demo = "configs/demo_cpu.yaml"
    noisy = (demo, "rollout.weight_noise=0.3")
    rows = [Variant("clean engine", (demo,)), Variant("noise, none", noisy)]
    for correction in ("tis", "mis"):
        for level in ("token", "sequence"):
            options = (f"algorithm.mismatch_correction={correction}", f"algorithm.mismatch_level={level}")
            rows.append(Variant(f"noise, {correction} ({level})", (*noisy, *options)))
    return rows


Rows = list[dict[str, float]]


def run(variant: Variant, seed: int, out: Path, ranks: int, overrides: list[str]) -> tuple[Rows, Rows]:
    """Train once (unless the metrics are there already); the rows of metrics.jsonl and of validation.jsonl."""
    folder = out / f"{variant.name.replace(' ', '_').replace(',', '')}_{seed}"
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        train([*variant.arguments, *overrides, f"trainer.seed={seed}", "trainer.logger=[]"], folder, ranks)
    return read_jsonl(metrics), read_jsonl(folder / "validation.jsonl")


def steps_to_target(rewards: list[float]) -> int | None:
    """The first step whose mean of the last ten rewards reaches the target."""
    for end in range(WINDOW, len(rewards) + 1):
        if fmean(rewards[end - WINDOW : end]) >= TARGET:
            return end
    return None


def report(name: str, results: list[tuple[Rows, Rows]]) -> str:
    """One row: start, end (mean and spread over seeds), steps to the target, and what the mismatch metrics say."""
    runs = [rows for rows, _ in results]
    validation = [[row["val-core/seen/avg@4"] for row in rows] for _, rows in results]
    rewards = [[row["critic/score/mean"] for row in rows] for rows in runs]
    ends = [fmean(r[-WINDOW:]) for r in rewards]
    steps = [steps_to_target(r) for r in rewards]
    kl = fmean(row["mismatch/k3_kl"] for rows in runs for row in rows)
    size = fmean(row["mismatch/effective_sample_size"] for rows in runs for row in rows)
    cells = (
        name,
        f"{fmean(fmean(r[:WINDOW]) for r in rewards):.2f}",
        f"{fmean(ends):.3f} ± {pstdev(ends):.3f}",
        f"{min(ends):.2f}",
        f"{fmean(v[0] for v in validation):.2f} -> {fmean(v[-1] for v in validation):.2f}",
        ", ".join("-" if s is None else str(s) for s in steps),
        f"{max(row['actor/grad_norm'] for rows in runs for row in rows):.2f}",
        f"{kl:.1e}",
        f"{size:.3f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run a suite and print its table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=("recipes", "mismatch"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "learning")
    arguments = parser.parse_args()
    rows = [v for v in variants_of(arguments.suite) if not arguments.only or v.name in arguments.only]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {
            v.name: [
                pool.submit(run, v, seed, arguments.out / arguments.suite, arguments.ranks, arguments.overrides)
                for seed in range(arguments.seeds)
            ]
            for v in rows
        }
        print(
            "| run | reward, first 10 steps | last 10 | worst seed | validation | steps to 0.7 | grad norm, max | KL | ESS |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for name, runs in futures.items():
            print(report(name, [f.result() for f in runs]), flush=True)


if __name__ == "__main__":
    main()
