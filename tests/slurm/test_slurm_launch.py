"""`rollpacker launch` against a real Slurm: from a folder without a checkout to a job that has trained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import REPOSITORY, Job, Jobs, stand_in

DEMO = REPOSITORY / "assets" / "demo"
INPUTS = [
    f"model.path={DEMO / 'model'}",
    f"data.train_files={DEMO / 'train.jsonl'}",
    "data.val_files=[]",
    f"reward.function={REPOSITORY / 'tools' / 'demo_task.py'}:score",
    "trainer.total_training_steps=1",
    "trainer.save_freq=0",
]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder that holds no more than a config."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(REPOSITORY / "configs" / "demo_cpu.yaml", folder / "my config.yaml")
    return folder


def launch(jobs: Jobs, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "rollpacker", "launch", "my config.yaml", *INPUTS, *arguments]
    return jobs.cluster.run(*program, cwd=folder, env={**jobs.environment, "PYTHONPATH": str(REPOSITORY)})


def test_a_launched_job_trains(jobs: Jobs, elsewhere: Path) -> None:
    options = ["--nodes=2", "--gpus-per-node=1", "--time=10", "--job-name=tiny"]
    shown = launch(jobs, elsewhere, *options, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    submitted = launch(jobs, elsewhere, *options)
    assert submitted.returncode == 0, submitted.stderr
    number = re.search(r"^job +(\d+): 2 node\(s\) of 1 ranks$", submitted.stdout, re.MULTILINE)
    log = re.search(r"^log +(\S+),", submitted.stdout, re.MULTILINE)
    assert number and log
    script = jobs.cluster.run("scontrol", "write", "batch_script", number[1], "-")
    assert script.stdout.strip() == shown.stdout.strip()
    ended = Job(jobs.cluster, number[1], elsewhere / log[1]).wait(timeout_s=200)
    assert ended.code == 0, ended.log
    (row,) = map(json.loads, (elsewhere / "outputs" / "demo" / "metrics.jsonl").read_text().splitlines())
    assert row["training/global_step"] == 1
    assert "ranks     2 on cpu, 2 node(s) of 1" in ended.log


def test_the_script_is_clean(jobs: Jobs, elsewhere: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("not installed: shellcheck; make test-slurm installs it where it may")
    shown = launch(jobs, elsewhere, "--nodes=2", "--gpus-per-node=1", "--container=a b", "--dry-run")
    checked = subprocess.run(["shellcheck", "-"], input=shown.stdout, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--partition=nowhere"], "sbatch refused: "), (["rollout.n=1"], "a group of one has no advantage")],
)
def test_what_slurm_or_the_config_refuses(
    jobs: Jobs, cluster: Cluster, elsewhere: Path, arguments: list[str], words: str
) -> None:
    before = cluster.run("scontrol", "-o", "show", "job").stdout
    done = launch(jobs, elsewhere, "--nodes=1", "--gpus-per-node=1", *arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert cluster.run("scontrol", "-o", "show", "job").stdout.count("JobId=") == before.count("JobId=")


def test_how_to_stop_for_good(jobs: Jobs, elsewhere: Path, tmp_path: Path) -> None:
    """The two commands that launch prints: the ranks save, and the job does not come back."""
    shown = launch(jobs, elsewhere, "--nodes=2", "--gpus-per-node=1", "--dry-run").stdout
    script = elsewhere / "job.sh"
    script.write_text(re.sub(r"VENV=.*", f"VENV={stand_in(tmp_path)}", shown))
    job = jobs.submit(f"--chdir={elsewhere}", str(script), PLAN="until-term+ 0")
    job.wait_for("rank 1 does until-term", timeout_s=60)
    stop = f"scontrol update JobId={job.number} Requeue=0 && scancel --signal=TERM {job.number}"
    assert jobs.cluster.run("bash", "-c", stop).returncode == 0
    ended = job.wait(timeout_s=60)
    assert (ended.code, ended.num_restarts) == (3, 0), ended.log
    assert "could not be requeued" in ended.log and "it goes on" in ended.log
