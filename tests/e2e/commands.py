"""How the end-to-end tests start the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "assets" / "demo"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def command_line(command: str, num_ranks: int, *arguments: str, config: str = "configs/demo_cpu.yaml") -> list[str]:
    """`mpirun -n N rollpacker COMMAND CONFIG ...`; without mpirun on one rank."""
    program = [sys.executable, "-m", "rollpacker", command, config, *arguments]
    if num_ranks == 1:
        return program
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks), *program]


def train_command(num_ranks: int, *arguments: str) -> list[str]:
    """A training without the demo's validations, unless `arguments` say otherwise."""
    return command_line("train", num_ranks, "trainer.test_freq=-1", "trainer.val_before_train=false", *arguments)


def train(num_ranks: int, *arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return run(train_command(num_ranks, *arguments), timeout_s)


def evaluate(num_ranks: int, *arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return run(command_line("eval", num_ranks, *arguments), timeout_s)


def run(command: list[str], timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that a run has reached, times apart: equal for two deterministic runs, however they were stopped."""
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    return {
        "metrics": [
            {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/", "bubble/"))} for row in metrics
        ],
        "samples": read_jsonl(run_dir / "samples.jsonl"),
        "latest": latest,
        "controller": json.loads((run_dir / "checkpoints" / latest / "run.json").read_text())["controller"],
    }


def rank_pids(run_dir: Path) -> list[int]:
    """The ranks that train in `run_dir`, whoever started them."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        is_rank = Path(words[0]).name.startswith("python") and words[1:4] == ["-m", "rollpacker", "train"]
        if is_rank and f"trainer.default_local_dir={run_dir}" in words:
            found.append(int(proc.name))
    return sorted(found)
