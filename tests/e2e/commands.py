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
