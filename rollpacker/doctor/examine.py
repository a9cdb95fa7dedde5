"""The order of an examination: facts of each rank, then what ranks measure together, then the verdicts. Collective."""

from __future__ import annotations

import time

from rollpacker.comm.launcher import mpi_library, num_launched
from rollpacker.comm.world import World, init_torch_distributed
from rollpacker.doctor import verdict
from rollpacker.doctor.facts import AllReduce, RankFacts
from rollpacker.doctor.host import look_around
from rollpacker.doctor.measure import all_reduce, barrier_s, shared_folder, within
from rollpacker.doctor.slurm import ask_slurm
from rollpacker.doctor.verdict import Check

_STEP_S = 120.0
_MIB = 1 << 20
_SIZES = {"gloo": [64 << 10, _MIB, 16 * _MIB], "nccl": [64 << 10, 16 * _MIB, 512 * _MIB]}
_NETWORK = "Nodes may not reach each other over the interface that was guessed: INTERFACE=ib0 (slurm/common.sh)."


def examine(world: World, folder: str) -> list[Check]:
    """All checks, the same on every rank."""
    with within(world, _STEP_S, "MPI's messages between the ranks", _NETWORK):
        mine = look_around(world.rank, world.local_rank, world.hostname, time.time() - world.now())
        facts = world.comm.allgather(mine)
        slurm = world.comm.bcast(ask_slurm() if world.rank == 0 else None)
        waiting_s = world.comm.bcast(barrier_s(world))
    with within(world, _STEP_S, f"files in {folder}", "The file system hangs: try another folder, --folder DIR."):
        shared = shared_folder(world, folder)
    checks = [
        verdict.check_world(facts, num_launched(), mpi_library()),
        verdict.check_waiting(waiting_s, world.size),
        verdict.check_cores(facts),
        verdict.check_gpus(facts, gives_gpus=slurm is not None and slurm.gives_gpus),
        verdict.check_closeness(facts),
        verdict.check_packages(facts),
        verdict.check_extension(facts),
        _measure_all_reduce(world, facts),
        verdict.check_clocks(facts),
        verdict.check_folder(shared, world.size),
        verdict.check_shm(facts),
        verdict.check_limits(facts),
        verdict.check_slurm(slurm),
        verdict.check_leftovers(facts),
    ]
    return [check for check in checks if check is not None]


def _measure_all_reduce(world: World, facts: list[RankFacts]) -> Check:
    """NCCL where every rank has a GPU, else gloo; nothing where torch is missing on some rank."""
    backend = "nccl" if all(rank.gpu for rank in facts) else "gloo"
    results: list[AllReduce] = []
    if any("torch" not in rank.packages for rank in facts):
        return Check("all-reduce", "warn", "not measured: torch is missing")
    if world.size > 1:
        import torch

        if backend == "nccl":
            torch.cuda.set_device(world.local_rank)
        with within(world, _STEP_S, f"{backend}'s all-reduce", f"{_NETWORK} NCCL_DEBUG=INFO says more."):
            init_torch_distributed(world, backend, _STEP_S)
            results = all_reduce(world, "cuda" if backend == "nccl" else "cpu", _SIZES[backend])
            torch.distributed.destroy_process_group()
    num_nodes = sum(rank.local_rank == 0 for rank in facts)
    return verdict.check_all_reduce(results, backend, world.size, num_nodes)
