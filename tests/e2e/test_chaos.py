"""A run that is killed again and again ends as the one that nobody disturbed (`make chaos`: twenty kills).

Every other kill waits for a checkpoint to be on its way to the disk; the others come at any time after the start of the
ranks. SIGKILL hits one rank, all ranks at once, or mpirun itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from commands import ENVIRONMENT, REPOSITORY, outcome, rank_pids, read_jsonl, train_command

from rollpacker.runtime.checkpoint_folder import CheckpointFolder, damage

ARGUMENTS = (
    "trainer.deterministic=true",
    "trainer.save_freq=1",
    "trainer.keep_last=3",
    "trainer.resume_mode=auto",
    "tail_batching.mode=paper",
    "data.train_batch_size=8",
)
STEPS_PER_KILL = 4


class Chaos:
    """Starts the run over and over in one folder."""

    def __init__(self, folder: Path, num_steps: int, seed: int) -> None:
        self.folder = folder
        self.arguments = (
            *ARGUMENTS,
            f"trainer.total_training_steps={num_steps}",
            f"trainer.default_local_dir={folder}",
        )
        self.random = random.Random(seed)
        self.began_s = 0.0
        self.log = folder.with_suffix(".log")

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                train_command(2, *self.arguments), cwd=REPOSITORY, env=ENVIRONMENT, stdout=log, stderr=log
            )

    def kill_once(self, *, while_saving: bool) -> str | None:
        """Start, kill; where the kill hit. None if the run was done before."""
        before, self.began_s = len(self.rows()), time.time()
        job = self.start()
        while job.poll() is None and len(self.rows()) == before and not self.is_saving():
            time.sleep(0.02)
        moment = time.monotonic() + (self.random.uniform(0, 0.02) if while_saving else self.random.uniform(0, 3))
        while job.poll() is None and (not self.is_saving() if while_saving else time.monotonic() < moment):
            time.sleep(0.001)
        where = "saving" if self.is_saving() else "elsewhere"
        pids = rank_pids(self.folder)
        victims = self.random.choice(([job.pid], pids, [self.random.choice(pids)])) if pids else [job.pid]
        for pid in victims:
            kill(pid)
        was_done = job.wait(timeout=60) == 0
        for pid in rank_pids(self.folder):
            kill(pid)
        return None if was_done else where

    def rows(self) -> list[str]:
        path = self.folder / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def is_saving(self) -> bool:
        """Whether this start (a kill leaves such folders behind) is writing a checkpoint."""
        for folder in (self.folder / "checkpoints").glob("step_*.partial"):
            with contextlib.suppress(FileNotFoundError):
                if folder.stat().st_mtime > self.began_s:
                    return True
        return False


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def check_nothing_is_lost(folder: Path) -> None:
    """What `latest` names is whole; no prompt of an epoch was trained twice."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    if steps := checkpoints.steps():
        assert damage(checkpoints.path(steps[0])) is None
    trained = Counter((s["epoch"], s["prompt_id"], s["response_index"]) for s in read_jsonl(folder / "samples.jsonl"))
    assert all(count == 1 for count in trained.values())


def test_kills_at_random_moments_change_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    num_kills, seed = request.config.getoption("--kills"), request.config.getoption("--chaos-seed")
    num_steps = num_kills * STEPS_PER_KILL
    undisturbed = Chaos(tmp_path / "undisturbed", num_steps, seed)
    assert undisturbed.start().wait(timeout=60 + 5 * num_steps) == 0, undisturbed.log.read_text()[-3000:]
    chaos = Chaos(tmp_path / "run", num_steps, seed)
    hits: Counter[str] = Counter()
    for number in range(num_kills):
        where = chaos.kill_once(while_saving=number % 2 == 0)
        if where is None:
            break
        hits[where] += 1
        if (chaos.folder / "samples.jsonl").exists():
            check_nothing_is_lost(chaos.folder)
    assert hits["saving"] >= 1 and sum(hits.values()) >= 2, hits
    assert chaos.start().wait(timeout=60 + 5 * num_steps) == 0, chaos.log.read_text()[-3000:]
    print(f"kills: {dict(hits)} of {num_kills}, {num_steps} steps")
    ours, theirs = outcome(chaos.folder), outcome(undisturbed.folder)
    assert ours == theirs, json.dumps(ours["controller"])[:500]
    check_nothing_is_lost(chaos.folder)
