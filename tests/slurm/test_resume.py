"""Real training on a real Slurm, stopped in the ways in which clusters stop jobs: it goes on by itself to the same end.

Deterministic runs in `paper` mode, compared with one that nobody disturbed: metrics (times apart), samples, and the state of
the controller with its queue. One rank a node: the nodes share few cores.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from jobs import REPOSITORY, Job, Jobs

sys.path.insert(0, str(REPOSITORY / "tests" / "e2e"))

from commands import outcome, rank_pids

DEMO = "slurm/train_demo.sh"
NUM_STEPS = 80
ARGUMENTS = [
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.deterministic=true",
    "tail_batching.mode=paper",
    "data.train_batch_size=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.logger=[console]",
    "profiler.trace=false",
]
ONE_RANK_A_NODE = "--ntasks-per-node=1"


def submit(jobs: Jobs, run: Path, *arguments: str, options: tuple[str, ...] = ()) -> Job:
    """On a slow machine a start may take all the time before the signal: such restarts make no progress, and are counted."""
    run_dir = f"trainer.default_local_dir={run}"
    return jobs.submit(ONE_RANK_A_NODE, *options, DEMO, *ARGUMENTS, run_dir, *arguments, MAX_RESTARTS="20")


def wait_for_rows(run: Path, number: int, job: Job, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    path = run / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert time.monotonic() < deadline, job.log()[-5000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = submit(Jobs(cluster, folder), folder / "run").wait(timeout_s=280)
    assert (ended.code, ended.num_restarts) == (0, 0), ended.log[-5000:]
    return outcome(folder / "run")


def test_a_job_that_meets_its_time_limit_goes_on(jobs: Jobs, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """`sbatch --time=2 --signal=USR1@40`: saved before the limit, requeued, resumed.

    Slurm's limits are whole minutes, and its signal comes up to 20 s early, so rewards that take their time stretch the run
    to that; they are no part of a deterministic one.
    """
    run = tmp_path / "run"
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import runpy, time\n"
        f"score_of = runpy.run_path({str(REPOSITORY / 'tools' / 'demo_task.py')!r})['score']\n"
        "def score(*arguments, **named):\n"
        "    time.sleep(0.05)\n"
        "    return score_of(*arguments, **named)\n"
    )
    limits = ("--time=2", "--signal=USR1@40")
    job = submit(jobs, run, "trainer.save_deadline=20", f"reward.function={slow}:score", options=limits)
    ended = job.wait(timeout_s=400)
    assert ended.code == 0, ended.log[-5000:]
    assert ended.num_restarts >= 1, ended.log[-5000:]
    assert "stopped by a signal after saving: requeueing" in ended.log
    assert outcome(run) == undisturbed


def test_a_preempted_job_goes_on(jobs: Jobs, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """SIGTERM at the ranks, as a preemption with a grace time sends it."""
    run = tmp_path / "run"
    job = submit(jobs, run)
    wait_for_rows(run, 5, job)
    assert jobs.cluster.run("scancel", "--signal=TERM", job.number).returncode == 0
    ended = job.wait(timeout_s=200)
    assert (ended.code, ended.num_restarts) == (0, 1), ended.log[-5000:]
    assert "stopping (SIGTERM)" in ended.log
    assert outcome(run) == undisturbed


def test_a_killed_rank_goes_on(jobs: Jobs, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """A node that dies takes a rank with it; the newest checkpoint is a step old at most."""
    run = tmp_path / "run"
    job = submit(jobs, run, "trainer.save_freq=1", "trainer.keep_last=2")
    wait_for_rows(run, 5, job)
    os.kill(rank_pids(run)[-1], signal.SIGKILL)
    ended = job.wait(timeout_s=280)
    assert (ended.code, ended.num_restarts) == (0, 1), ended.log[-5000:]
    assert outcome(run) == undisturbed
