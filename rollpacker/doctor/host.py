"""What one rank sees of its host: cores, limits, packages, GPU, leftovers. It asks no other rank and changes nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

from rollpacker.doctor.facts import Gpu, GpuSoftware, Process, RankFacts

_OLD_S = 3600.0
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}


def look_around(rank: int, local_rank: int, hostname: str, job_clock_s: float) -> RankFacts:
    """Gather this rank's facts; a second or two, of which most is torch's import."""
    shm = os.statvfs("/dev/shm")
    software, gpu = _gpu(local_rank)
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        hostname=hostname,
        pid=os.getpid(),
        ancestors=_ancestors(os.getpid()),
        cores=frozenset(os.sched_getaffinity(0)),
        limits={name: _soft_limit(number) for name, number in LIMITS.items()},
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        old_shm_bytes=_old_shm_bytes(),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        clock_s=job_clock_s,
        python=platform.python_version(),
        packages={d.metadata["Name"]: d.version for d in importlib.metadata.distributions()},
        extension=_extension(),
        gpu=gpu,
        gpu_software=software,
        processes=tuple(_processes()),
    )


def parse_core_list(text: str) -> frozenset[int]:
    """`0-3,8,10-11`, as Linux writes sets of cores."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _soft_limit(number: int) -> float:
    soft, _ = resource.getrlimit(number)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _old_shm_bytes() -> int:
    """Bytes of this user's files in /dev/shm that nobody has written for an hour: jobs that died leave some."""
    total = 0
    for file in Path("/dev/shm").glob("*"):
        try:
            status = file.stat()
        except OSError:  # it was removed meanwhile, or belongs to another user
            continue
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_S:
            total += status.st_size
    return total


def _extension() -> str:
    """How csrc/ was built: `cuda`, `cpu`, or why it cannot be imported."""
    try:
        from rollpacker.weights import _reshard
    except ImportError as error:
        return str(error)
    return "cuda" if _reshard.WITH_CUDA else "cpu"


def _gpu(local_rank: int) -> tuple[GpuSoftware, Gpu | None]:
    driver_file = Path("/proc/driver/nvidia/version")
    driver = driver_file.read_text().splitlines()[0] if driver_file.is_file() else None
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return GpuSoftware(None, None, driver, f"torch cannot be imported: {error}"), None
    if torch.version.cuda is None:
        return GpuSoftware(None, None, driver, None), None
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        torch.cuda.init()
        num_devices = torch.cuda.device_count()
        gpu = _describe_gpu(torch, local_rank, num_devices) if local_rank < num_devices else None
        error = None if gpu else f"local rank {local_rank} has no GPU of its own: torch sees {num_devices}"
    except RuntimeError as failure:  # no GPU, or a driver that is too old: torch says which
        return GpuSoftware(torch.version.cuda, nccl, driver, str(failure)), None
    return GpuSoftware(torch.version.cuda, nccl, driver, error), gpu


def _describe_gpu(torch: Any, device: int, num_devices: int) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    near: frozenset[int] = frozenset()
    if None not in numbers:
        cores = Path("/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0/local_cpulist".format(*numbers))
        near = parse_core_list(cores.read_text()) if cores.is_file() else near
    return Gpu(properties.name, total, free, num_devices, near)


def _ancestors(pid: int) -> tuple[int, ...]:
    found: list[int] = []
    while pid > 1:
        try:
            # "pid (name) state parent ...", where the name may hold anything
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            break
        found.append(pid)
    return tuple(found)


def _processes() -> list[Process]:
    """This user's Python processes that train or evaluate, and reward workers that nobody waits for any more."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            is_mine = folder.stat().st_uid == os.getuid()
        except OSError:  # it has ended
            continue
        if not is_mine or not Path(words[0]).name.startswith("python"):
            continue
        ancestors = _ancestors(int(folder.name))
        is_run = any("rollpacker" in word for word in words[1:4]) and {"train", "eval"} & set(words)
        is_orphan = any("multiprocessing.forkserver" in word for word in words) and ancestors[:1] == (1,)
        if is_run or is_orphan:
            found.append(Process(int(folder.name), " ".join(words).strip()[:80], ancestors))
    return found
