"""`make bench`: how fast the demo runs, what bounds it, and TRL's GRPO trainer on the same task in the same run.

Prints a table and writes bench.json, a list of {"name", "value", "unit", "bound", "ratio"}. The first step of every run
is a warm-up and not counted. Machines are noisy: ratios within one run mean more than seconds. Ours and TRL's runs take
turns; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from training_run import ROOT, read_counters, read_jsonl, train

CONFIG = "configs/demo_cpu.yaml"
MODEL = "assets/demo/model"
DATA = "assets/demo/train.jsonl"
NUM_RANKS = 2
PROMPTS, GROUP, CAP = 16, 8, 160


def run_ours(steps: int, folder: Path) -> dict[str, Any]:
    """One run of the demo with a constant learning rate; its rows of metrics and the counters of its trace."""
    settings = [CONFIG, f"trainer.total_training_steps={steps}", "training.lr_decay_style=constant"]
    train([*settings, "trainer.test_freq=-1", "trainer.val_before_train=false"], folder, NUM_RANKS)
    rows = read_jsonl(folder / "metrics.jsonl")[1:]
    counters = read_counters(folder / "events.trace.json")
    return {"rows": rows, "counters": {name: [r[1:] for r in ranks] for name, ranks in counters.items()}}


def run_trl(steps: int, out: Path) -> dict[str, Any]:
    """TRL on the same model, prompts, group size, cap and number of processes, with the generator that is faster for it
    here (transformers; see benchmarks/trl/grpo.py).
    """
    venv = ROOT / ".venv-trl"
    subprocess.run(["bash", "benchmarks/trl/setup.sh", str(venv)], cwd=ROOT, check=True)
    command = [str(venv / "bin" / "python"), "benchmarks/trl/grpo.py", "--model", MODEL, "--data", DATA]
    sizes = ["--prompts", PROMPTS, "--group", GROUP, "--max-response-length", CAP, "--nproc", NUM_RANKS, "--no-vllm"]
    subprocess.run(
        [*command, *map(str, sizes), "--steps", str(steps), "--out", str(out)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def total(rows: list[dict[str, Any]], name: str) -> float:
    """Sum of a metric over the counted steps."""
    return float(sum(row[name] or 0.0 for row in rows))


def response_tokens(rows: list[dict[str, Any]]) -> float:
    """Trained response tokens of the counted steps."""
    return sum(row["response_length/mean"] * PROMPTS * GROUP for row in rows)


def entry(name: str, value: float, unit: str, bound: str, ratio: float | None) -> dict[str, Any]:
    """One row of bench.json."""
    return {"name": name, "value": value, "unit": unit, "bound": bound, "ratio": ratio}


def summarize_ours(run: dict[str, Any], num_parameters: int) -> list[dict[str, Any]]:
    """Throughputs and overheads of one run."""
    rows, counters = run["rows"], run["counters"]
    step_s, gen_s = total(rows, "timing_s/step"), total(rows, "timing_s/gen")
    train_s, refit_s = total(rows, "timing_s/update_actor"), total(rows, "timing_s/update_weights")
    busy_s = max(sum(rank) for rank in counters["engine_busy_s"])
    control_s = max(sum(rank) for rank in counters["control_cpu_s"])
    quanta = max(sum(rank) for rank in counters["quanta"])
    train_tokens = total(rows, "perf/total_num_tokens")
    gemm, copy = gemm_flops(), copy_bytes_per_s()
    weight_bytes = 4 * num_parameters
    per_quantum_ms, refit_mean_s = 1e3 * control_s / quanta, refit_s / len(rows)
    outside = 1 - (gen_s + train_s) / step_s
    return [
        entry(
            "rollout", response_tokens(rows) / gen_s, "tokens/s",
            "engine steps of the busiest rank (ratio: its busy time over the round)", busy_s / gen_s,
        ),
        entry(
            "train", train_tokens / train_s, "tokens/s",
            f"fp32 GEMM of one core x {NUM_RANKS}, {gemm / 1e9:.0f} GFLOP/s each (ratio: 6 x parameters x tokens/s)",
            6 * num_parameters * train_tokens / train_s / (NUM_RANKS * gemm),
        ),
        entry(
            "refit", refit_mean_s, "s",
            f"copying {weight_bytes / 1e6:.1f} MB once at {copy / 1e9:.1f} GB/s (ratio: that time over ours)",
            weight_bytes / copy / refit_mean_s,
        ),
        entry(
            "exchange and controller, per quantum", per_quantum_ms, "ms CPU",
            "50 ms, the length of a quantum (ratio: share of it)", per_quantum_ms / 50,
        ),
        entry("exchange and controller, share of step", control_s / step_s, "", "0.02 (target)", control_s / step_s / 0.02),
        entry("share of the step outside gen and train", outside, "", "refit, sample exchange, reporting", None),
        entry("rollout bubble", total(rows, "bubble/rollout_ratio") / len(rows), "", "the longest response", None),
    ]  # fmt: skip


def gemm_flops() -> float:
    """Floating-point operations per second of one thread on a product of the demo's size."""
    a, b = torch.randn(2048, 128), torch.randn(128, 352)
    return 2 * 2048 * 128 * 352 / best_seconds(lambda: a @ b)


def copy_bytes_per_s() -> float:
    """Bytes per second of one thread copying 3 MB."""
    a, b = torch.empty(750_000), torch.empty(750_000)
    return 4 * 750_000 / best_seconds(lambda: b.copy_(a))


def best_seconds(work: Any, repeats: int = 30) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(ours: list[dict[str, Any]], trl: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds per trained token of both, and how many times faster we are."""
    mine = [total(r["rows"], "timing_s/step") / response_tokens(r["rows"]) for r in ours]
    theirs = [r["totals"]["seconds_per_trained_token"] for r in trl]
    ratio = statistics.median(theirs) / statistics.median(mine)
    generator = "vLLM" if trl[0]["settings"]["vllm"] else "transformers"
    versions = f"trl {trl[0]['versions']['trl']} with {generator}, {NUM_RANKS} processes"
    runs = f"runs: {', '.join(f'{1e6 * x:.0f}' for x in mine)} against {', '.join(f'{1e6 * x:.0f}' for x in theirs)}"
    return [
        entry("seconds per trained token, ours", statistics.median(mine), "s", runs + " us", None),
        entry("seconds per trained token, TRL", statistics.median(theirs), "s", versions, None),
        entry("speed-up over TRL", ratio, "x", "at least 1 (target)", ratio),
    ]


def show(entries: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("", "value", "unit", "ratio", "bound", title="RollPacker on the demo")
    for e in entries:
        ratio = "" if e["ratio"] is None else f"{e['ratio']:.2f}"
        table.add_row(e["name"], f"{e['value']:.4g}", e["unit"], ratio, e["bound"])
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def main() -> int:
    """Run both in turns and write bench.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run; the first is not counted")
    parser.add_argument("--pairs", type=int, default=3, help="runs of ours and of TRL, in turns")
    parser.add_argument("--no-trl", action="store_true", help="only our own numbers")
    parser.add_argument("--out", type=Path, default=ROOT / "bench.json")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    num_parameters = json.loads((ROOT / "assets/demo/demo_model.json").read_text())["num_parameters"]
    ours, trl = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(args.pairs):
            print(f"run {pair + 1} of {args.pairs} ...", file=sys.stderr)
            ours.append(run_ours(args.steps, Path(scratch) / f"ours_{pair}"))
            if not args.no_trl:
                trl.append(run_trl(args.steps, Path(scratch) / f"trl_{pair}.json"))
    entries = summarize_ours(ours[-1], num_parameters) + (compare(ours, trl) if trl else [])
    args.out.write_text(json.dumps(entries, indent=2) + "\n")
    show(entries)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
