"""What MPI and the program that started the ranks say of themselves. Ranks and sizes do not come from here (`world.py`)."""

from __future__ import annotations

import os

from mpi4py import MPI

_NUM_TASKS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE", "MPI_LOCALNRANKS")
_TASK = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")


def mpi_library() -> str:
    """Name and version of the MPI that mpi4py was built for or has found."""
    return MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")


def num_launched() -> int:
    """Tasks that mpirun or srun started; 1 where neither did. The MPI world should be as large."""
    return int(next((os.environ[name] for name in _NUM_TASKS if name in os.environ), "1"))


def launched_as() -> int:
    """This task's number among them."""
    return int(next((os.environ[name] for name in _TASK if name in os.environ), "0"))


def job_end_s() -> float | None:
    """When the job's time ends, in seconds since 1970; None where the launcher does not say."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() else None
