"""What Slurm says of itself and of this job. Standard library only; asks Slurm's own commands, on one rank."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from rollpacker.doctor.facts import SlurmFacts


def ask_slurm() -> SlurmFacts | None:
    """None where there is no Slurm, or where it does not answer."""
    if shutil.which("srun") is None:
        return None
    version = _output("srun", "--version").rpartition(" ")[2]
    mpi_types = tuple(re.findall(r"^\s*(\w+)\s*$", _output("srun", "--mpi=list"), re.MULTILINE))
    if not version:
        return None
    job_id = os.environ.get("SLURM_JOB_ID")
    job = _output("scontrol", "-o", "show", "job", job_id) if job_id else ""
    gpus = [os.environ.get(name, "0") for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_STEP_GPUS")]
    return SlurmFacts(
        version=version,
        mpi_types=mpi_types,
        job_id=job_id,
        gives_gpus=any(number not in ("0", "") for number in gpus),
        time_left=_output("squeue", "--noheader", "--job", job_id, "--format=%L") if job_id else "",
        can_requeue="Requeue=1" in job,
    )


def lacks_pmi() -> bool:
    """Whether srun started this process and told it nothing of the other tasks: MPI would abort, at length, or be alone."""
    is_told = any(name.startswith(("PMIX_", "PMI_", "OMPI_COMM_WORLD_")) for name in os.environ)
    return "SLURM_STEP_NUM_TASKS" in os.environ and not is_told


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr).strip() if done.returncode == 0 else ""
