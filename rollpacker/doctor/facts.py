"""What an examination finds out, as data: facts of each rank, measurements, Slurm's answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The GPU that this rank would take, as torch sees it; `near_cores` are those of its NUMA node, if known."""

    name: str
    total_bytes: int
    free_bytes: int
    num_devices: int
    near_cores: frozenset[int]


@dataclass(frozen=True)
class GpuSoftware:
    """Why torch sees a GPU or does not: its CUDA, NCCL's version, the driver (None: no driver), what initialising it says."""

    torch_cuda: str | None
    nccl: str | None
    driver: str | None
    error: str | None


@dataclass(frozen=True)
class Process:
    """A process of this user that looks like RollPacker's, and the processes that it descends from, nearest first."""

    pid: int
    command: str
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class RankFacts:
    """One rank's host. Limits are the soft ones, inf where there is none; `clock_s` is wall clock minus the job's clock."""

    rank: int
    local_rank: int
    hostname: str
    pid: int
    ancestors: tuple[int, ...]
    cores: frozenset[int]
    limits: dict[str, float]
    shm_bytes: int
    shm_free_bytes: int
    old_shm_bytes: int
    has_infiniband: bool
    clock_s: float
    python: str
    packages: dict[str, str]
    extension: str
    gpu: Gpu | None
    gpu_software: GpuSoftware
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class AllReduce:
    """One size: bytes of the tensor, seconds of the slowest rank, and whether every rank got the sum."""

    num_bytes: int
    seconds: float
    is_right: bool

    def bus_bandwidth(self, num_ranks: int) -> float:
        """Bytes a second over the busiest link of a ring: comparable between sizes of a job (as nccl-tests count)."""
        return 2 * (num_ranks - 1) / num_ranks * self.num_bytes / self.seconds


@dataclass(frozen=True)
class SharedFolder:
    """What became of files in a folder: ranks that did not see them (with the reason), delays, speed and space."""

    folder: str
    error: str | None
    blind: dict[int, str]
    delay_s: float
    write_bytes_per_s: float
    free_bytes: int


@dataclass(frozen=True)
class SlurmFacts:
    """`job_id` is None outside a job; `mpi_types` are those that srun can start ranks for."""

    version: str
    mpi_types: tuple[str, ...]
    job_id: str | None
    gives_gpus: bool
    time_left: str
    can_requeue: bool
