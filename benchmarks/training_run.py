"""A `rollpacker train` that a benchmark starts and reads back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def train(arguments: Sequence[str], folder: Path, ranks: int) -> None:
    """Train into `folder` (an earlier run there is moved aside), without export. Ends the benchmark where it fails."""
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), sys.executable, "-m", "rollpacker"]
    command += ["train", *arguments, "trainer.save_freq=0", f"trainer.default_local_dir={folder}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_counters(trace: Path) -> dict[str, list[list[float]]]:
    """The counters of events.trace.json: name -> values by rank, one a step."""
    counters: dict[str, dict[int, list[float]]] = {}
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "C":
            of_ranks = counters.setdefault(event["name"], {})
            of_ranks.setdefault(event["pid"], []).append(next(iter(event["args"].values())))
    return {name: [of_ranks[rank] for rank in sorted(of_ranks)] for name, of_ranks in counters.items()}
