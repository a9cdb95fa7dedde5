"""What slurm/common.sh makes of each end of a job, on a real Slurm; a stand-in plays the program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import Ended, Job, Jobs, stand_in

DEMO = "slurm/train_demo.sh"
JOBS = {
    "trained to the end": ("0", {}),
    "wrong config": ("0", {"DRY_RUN": "2"}),
    "broken set-up": ("0", {"DRY_RUN": "1"}),
    "time limit, killed rank, end": ("3+ kill+ 0", {"MAX_RESTARTS": "1"}),
    "crash without a checkpoint": ("1 0", {}),
    "a crash after each checkpoint": ("1+ 1+ 1+ 0", {"MAX_RESTARTS": "1"}),
    "stopped before any checkpoint": ("3 3 0", {"MAX_RESTARTS": "1"}),
    "refused by the ranks": ("2+ 0", {}),
}


@pytest.fixture(scope="module")
def ended(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Path]]:
    """All jobs above, run at the same time."""
    running: dict[str, tuple[Job, Path]] = {}
    for name, (plan, variables) in JOBS.items():
        folder = tmp_path_factory.mktemp("job")
        chdir = f"--chdir={folder}"  # where the list of restarts goes
        job = Jobs(cluster, folder).submit(chdir, DEMO, "a.b=c", VENV=stand_in(folder), PLAN=plan, **variables)
        running[name] = job, folder
    return {name: (job.wait(timeout_s=120), folder) for name, (job, folder) in running.items()}


@pytest.mark.parametrize(
    ("name", "code", "num_restarts", "words"),
    [
        ("trained to the end", 0, 0, "does 0"),
        ("wrong config", 2, 0, "the check failed (exit code 2): nothing was started"),
        ("broken set-up", 1, 0, "the check failed (exit code 1): nothing was started"),
        ("time limit, killed rank, end", 0, 2, "after saving: requeueing; the job goes on from step_0"),
        ("crash without a checkpoint", 1, 0, "no checkpoint newer than at its start (none): not restarted"),
        ("a crash after each checkpoint", 1, 1, "restarted 1 times already"),
        ("stopped before any checkpoint", 3, 1, "restarted 1 times already"),
        ("refused by the ranks", 2, 0, "does 2+"),
    ],
)
def test_how_jobs_end(
    ended: dict[str, tuple[Ended, Path]], name: str, code: int, num_restarts: int, words: str
) -> None:
    job, folder = ended[name]
    assert (job.code, job.num_restarts) == (code, num_restarts), job.log
    assert job.state == ("FAILED" if code else "COMPLETED")
    assert words in job.log
    starts = {file.suffix for file in folder.glob("rank*.start*")}
    assert len(starts) == (0 if "nothing was started" in words else num_restarts + 1)


def test_every_rank_starts_each_time_and_a_restart_resumes(ended: dict[str, tuple[Ended, Path]]) -> None:
    _, folder = ended["time limit, killed rank, end"]
    ranks = sorted(file.name for file in folder.glob("rank*.start*"))
    assert ranks == [f"rank{rank}.start{start}" for rank in range(4) for start in range(3)]
    size = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2"]
    job = ["-m", "rollpacker", "train", "configs/demo_cpu.yaml", *size, "trainer.resume_mode=auto", "a.b=c"]

    def arguments(start: str) -> list[str]:
        return json.loads((folder / start).read_text())["arguments"]

    assert arguments("rank3.start0") == job
    assert arguments("dry_run0.start1") == [*job, "trainer.resume_mode=auto", "--dry-run"]
    assert arguments("rank3.start2") == [*job, "trainer.resume_mode=auto"]


def test_only_crashes_are_counted(ended: dict[str, tuple[Ended, Path]]) -> None:
    """The time limit, whose checkpoint is newer, leaves no line; the killed rank does. srun gives 137 or 143 for it."""
    _, folder = ended["time limit, killed rank, end"]
    (line,) = next(folder.glob("*.restarts")).read_text().splitlines()
    assert line.endswith("checkpoint step_1") and ("exit code 137" in line or "exit code 143" in line)


def test_a_cancelled_job_stays_cancelled(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.submit(DEMO, VENV=stand_in(tmp_path), PLAN="wait 0")
    job.wait_for("rank 3 does wait", timeout_s=60)
    jobs.cluster.run("scancel", job.number)
    ended = job.wait(timeout_s=60)
    assert (ended.state, ended.num_restarts) == ("CANCELLED", 0)
    assert "requeueing" not in ended.log
