"""`rollpacker doctor` over the nodes of a real Slurm: healthy, and with what can be broken here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jobs import REPOSITORY, Jobs


def doctor(jobs: Jobs, *options: str, folder: str = ".", cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "rollpacker", "doctor", "--folder", folder]
    environment = {**jobs.environment, "PYTHONPATH": str(REPOSITORY)}
    return jobs.cluster.run("srun", "--nodes=2", "--quit-on-interrupt", *options, *program, cwd=cwd, env=environment)


def row(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
    return line


def test_two_healthy_nodes(jobs: Jobs, tmp_path: Path) -> None:
    done = doctor(jobs, "--mpi=pmix", "--ntasks-per-node=2", folder=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 rank(s) on 2 node(s), Open MPI" in row(done.stdout, "MPI world")
    assert "bus bandwidth 64 KiB" in row(done.stdout, "gloo all-reduce")
    assert f"{tmp_path}: seen and renamed by all" in done.stdout
    assert ", job " in row(done.stdout, "Slurm") and "can be requeued" in row(done.stdout, "Slurm")
    assert "FAIL" not in done.stdout and "A run can start here" in done.stdout
    assert done.stdout.count("MPI world") == 1
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_torch_cannot_use_and_a_missing_folder(jobs: Jobs, tmp_path: Path) -> None:
    """Slurm's fake GPUs, and torch's build for the CPU."""
    done = doctor(jobs, "--mpi=pmix", "--ntasks-per-node=1", "--gpus-per-node=8", folder=str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "Slurm gave this job GPUs, but this torch was built without CUDA" in done.stdout
    text = " ".join(done.stdout.split())  # long rows are broken
    assert "FAIL" in row(done.stdout, "shared folder") and "absent: No such file or directory" in text
    assert "2 of 13 checks failed" in done.stdout and "FAIL  GPUs: Install the CUDA builds" in done.stdout


def test_ranks_that_do_not_know_each_other(jobs: Jobs) -> None:
    done = doctor(jobs, "--mpi=none", "--ntasks-per-node=1")
    assert done.returncode == 2
    assert "srun started this without --mpi=pmix" in done.stderr and "MPI_ERRORS_ARE_FATAL" not in done.stderr
