"""The doctor's verdicts on made-up facts: what it says of each ailment, and that health passes."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollpacker.doctor import verdict
from rollpacker.doctor.facts import AllReduce, Gpu, GpuSoftware, Process, RankFacts, SharedFolder, SlurmFacts
from rollpacker.doctor.host import parse_core_list
from rollpacker.doctor.measure import within
from rollpacker.doctor.slurm import lacks_pmi

GIB = 1 << 30
NEAR = frozenset(range(32))
GPU = Gpu("H800", 80 * GIB, 79 * GIB, 2, NEAR)
CUDA = GpuSoftware("12.8", "2.27.3", "NVRM version: 570", None)
CPU_TORCH = GpuSoftware(None, None, None, None)
PACKAGES = {"torch": "2.8", "vllm": "0.11", "megatron-core": "0.16", "mpi4py": "4.1", "safetensors": "0.5"} | {
    "rich": "14",
    "PyYAML": "6",
}


def rank(number: int, *, has_gpu: bool = True) -> RankFacts:
    """Two ranks a node, on nodes n0, n1, ..."""
    return RankFacts(
        rank=number,
        local_rank=number % 2,
        hostname=f"n{number // 2}",
        pid=100 + number,
        ancestors=(50, 1),
        cores=frozenset(range(8 * (number % 2), 8 * (number % 2) + 8)),
        limits={"nofile": 65536, "memlock": float("inf"), "nproc": 1e5},
        shm_bytes=100 * GIB,
        shm_free_bytes=90 * GIB,
        old_shm_bytes=0,
        has_infiniband=True,
        clock_s=1e9 + 1e-4 * number,
        python="3.11.7",
        packages=PACKAGES,
        extension="cuda" if has_gpu else "cpu",
        gpu=GPU if has_gpu else None,
        gpu_software=CUDA if has_gpu else CPU_TORCH,
        processes=(Process(100 + number, "python -m rollpacker train a.yaml", (50, 1)),),
    )


HEALTHY = [rank(number) for number in range(4)]
ON_CPU = [rank(number, has_gpu=False) for number in range(4)]
SHARED = SharedFolder("/scratch", None, {}, 0.1, 1e9, 1000 * GIB)
SLURM = SlurmFacts("24.05", ("pmix", "pmi2"), "7", gives_gpus=True, time_left="1:00:00", can_requeue=True)
FAST = [AllReduce(64 << 10, 5e-5, is_right=True), AllReduce(512 << 20, 5e-3, is_right=True)]


def changed(number: int, **facts: object) -> list[RankFacts]:
    """The healthy job with one rank changed."""
    return [replace(r, **facts) if r.rank == number else r for r in HEALTHY]  # type: ignore[arg-type]


def every_check(facts: list[RankFacts], slurm: SlurmFacts | None, backend: str) -> list[verdict.Check | None]:
    return [
        verdict.check_world(facts, 4, "Open MPI v5.0.7"),
        verdict.check_waiting(1e-4, 4),
        verdict.check_cores(facts),
        verdict.check_gpus(facts, gives_gpus=slurm is not None and slurm.gives_gpus),
        verdict.check_closeness(facts),
        verdict.check_packages(facts),
        verdict.check_extension(facts),
        verdict.check_all_reduce(FAST, backend, 4, 2),
        verdict.check_clocks(facts),
        verdict.check_folder(SHARED, 4),
        verdict.check_shm(facts),
        verdict.check_limits(facts),
        verdict.check_slurm(slurm),
        verdict.check_leftovers(facts),
    ]


@pytest.mark.parametrize(("facts", "slurm", "backend"), [(HEALTHY, SLURM, "nccl"), (ON_CPU, None, "gloo")])
def test_health_passes(facts: list[RankFacts], slurm: SlurmFacts | None, backend: str) -> None:
    checks = [check for check in every_check(facts, slurm, backend) if check is not None]
    assert [check for check in checks if check.status != "ok" or check.fix] == []
    assert len(checks) == (14 if facts is HEALTHY else 13)  # where there is no GPU none is near


AILMENTS = {
    "strangers": (lambda: verdict.check_world([rank(0)], 4, "MPICH"), "FAIL", "4 tasks were started", "--mpi=pmix"),
    "uneven": (lambda: verdict.check_world(HEALTHY[:3], 3, "x"), "warn", "3 rank(s) on 2 node(s)", "--ntasks-per-node"),
    "no yield": (lambda: verdict.check_waiting(0.02, 4), "warn", "20.00 ms", "OMPI_MCA_mpi_yield_when_idle=1"),
    "one core for all": (
        lambda: verdict.check_cores([replace(r, cores=frozenset({0})) for r in HEALTHY]),
        "warn",
        "2 ranks of n0 on 1 core(s)",
        "--cpus-per-task",
    ),
    "one core each": (
        lambda: verdict.check_cores([replace(r, cores=frozenset({r.local_rank})) for r in HEALTHY]),
        "warn",
        "one core, for itself and its reward workers",
        "--cpus-per-task",
    ),
    "torch without CUDA": (
        lambda: verdict.check_gpus(ON_CPU, gives_gpus=True),
        "FAIL",
        "Slurm gave this job GPUs, but this torch was built without CUDA",
        "CUDA builds",
    ),
    "old driver": (
        lambda: verdict.check_gpus(
            [replace(r, gpu=None, gpu_software=replace(CUDA, error="driver too old")) for r in HEALTHY],
            gives_gpus=False,
        ),
        "FAIL",
        "torch (CUDA 12.8) says: driver too old",
        "nvidia-smi",
    ),
    "a rank without GPU": (
        lambda: verdict.check_gpus(changed(3, gpu=None), gives_gpus=True),
        "FAIL",
        "rank 3 on n1 has no GPU",
        "One rank a GPU",
    ),
    "a taken GPU": (
        lambda: verdict.check_gpus(changed(2, gpu=replace(GPU, free_bytes=60 * GIB)), gives_gpus=True),
        "FAIL",
        "rank 2 on n1: 20.0 GiB of the GPU are taken",
        "--exclusive",
    ),
    "different GPUs": (
        lambda: verdict.check_gpus(changed(2, gpu=replace(GPU, name="A100")), gives_gpus=True),
        "warn",
        "different GPUs: A100, 80 GiB; H800, 80 GiB",
        "--constraint",
    ),
    "far from its GPU": (
        lambda: verdict.check_closeness(changed(1, cores=frozenset({40, 41}))),
        "warn",
        "rank 1 on n0 runs on cores far from its GPU",
        "nvidia-smi topo",
    ),
    "no vllm": (
        lambda: verdict.check_packages([replace(r, packages={"torch": "2"}) for r in HEALTHY]),
        "FAIL",
        "not installed: megatron-core, mpi4py, safetensors, rich, pyyaml, vllm (Python 3.11.7)",
        "VENV=DIR",
    ),
    "two environments": (
        lambda: verdict.check_packages(changed(2, packages=PACKAGES | {"torch": "2.7"})),
        "FAIL",
        "rank 0 on n0 / rank 2 on n1: torch 2.8 / 2.7",
        "shared file system",
    ),
    "two Pythons": (
        lambda: verdict.check_packages(changed(2, python="3.12.1")),
        "FAIL",
        "Python 3.11.7 / 3.12.1",
        "shared file system",
    ),
    "extension without CUDA": (
        lambda: verdict.check_extension([replace(r, extension="cpu") for r in HEALTHY]),
        "warn",
        "ranks 0, 1, 2... on n0, n1: built without CUDA",
        "ROLLPACKER_CUDA=ON",
    ),
    "no extension": (
        lambda: verdict.check_extension(changed(1, extension="No module named x")),
        "warn",
        "rank 1 on n0: No module named x",
        "weights.refit=golden",
    ),
    "wrong sums": (
        lambda: verdict.check_all_reduce([AllReduce(1 << 20, 1e-3, is_right=False)], "nccl", 4, 2),
        "FAIL",
        "wrong sums at 1 MiB",
        "NCCL_P2P_DISABLE",
    ),
    "sockets instead of InfiniBand": (
        lambda: verdict.check_all_reduce([AllReduce(512 << 20, 0.5, is_right=True)], "nccl", 16, 2),
        "warn",
        "512 MiB 2.01 GB/s",
        "INTERFACE=",
    ),
    "clocks": (
        lambda: verdict.check_clocks(changed(3, clock_s=1e9 - 90.0)),
        "warn",
        "rank 3 on n1 is -90.0 s off rank 0",
        "chrony",
    ),
    "no such folder": (
        lambda: verdict.check_folder(replace(SHARED, error="Read-only file system"), 4),
        "FAIL",
        "/scratch: Read-only file system",
        "--folder DIR",
    ),
    "a local disk": (
        lambda: verdict.check_folder(replace(SHARED, blind={2: "a file of rank 0 was not seen", 3: "the same"}), 4),
        "FAIL",
        "rank 2 (and 1 more): a file of rank 0 was not seen",
        "all nodes share",
    ),
    "a full disk": (
        lambda: verdict.check_folder(replace(SHARED, free_bytes=GIB), 4),
        "warn",
        "1 GiB free",
        "make room",
    ),
    "a slow disk": (
        lambda: verdict.check_folder(replace(SHARED, write_bytes_per_s=1e6), 4),
        "warn",
        "1 MB/s",
        "parallel file system",
    ),
    "small /dev/shm": (
        lambda: verdict.check_shm(changed(1, shm_free_bytes=64 << 20, shm_bytes=64 << 20)),
        "FAIL",
        "rank 1 on n0: 0.1 of 0.1 GiB",
        "--shm-size",
    ),
    "limits": (
        lambda: verdict.check_limits(changed(1, limits={"nofile": 1024, "memlock": 65536, "nproc": 100})),
        "warn",
        "memlock 64 KiB, and InfiniBand locks the memory that it sends; nofile 1024; nproc 100",
        "ulimit -n 65536",
    ),
    "a left process": (
        lambda: verdict.check_leftovers(changed(2, processes=(Process(9, "python -m rollpacker train", (1,)),))),
        "warn",
        "process 9 on n1: python -m rollpacker train",
        "kill 9",
    ),
    "left shared memory": (
        lambda: verdict.check_leftovers(changed(2, old_shm_bytes=GIB)),
        "warn",
        "1.0 GiB of old files in /dev/shm of n1",
        "-delete",
    ),
    "Slurm without pmix": (
        lambda: verdict.check_slurm(replace(SLURM, mpi_types=("none", "pmi2"))),
        "FAIL",
        "has no pmix (none, pmi2)",
        "mpirun inside the job",
    ),
}


@pytest.mark.parametrize("name", AILMENTS)
def test_each_ailment_is_named_with_its_cure(name: str) -> None:
    examine, status, found, fix = AILMENTS[name]
    check = examine()
    assert check is not None
    assert (check.status, found in check.found, fix in check.fix) == (status, True, True), check


def test_what_belongs_to_the_job_is_no_leftover() -> None:
    """The launcher, the ranks, and what a rank has started."""
    processes = (
        Process(50, "python mpirun-like rollpacker train", (1,)),
        Process(101, "python -m rollpacker train", (50, 1)),
        Process(200, "python reward worker of rollpacker train", (102, 50, 1)),
    )
    assert verdict.check_leftovers(changed(0, processes=processes)).status == "ok"


def test_bus_bandwidth_is_that_of_a_ring() -> None:
    """Four ranks: each sends and receives 3/2 of the tensor."""
    assert AllReduce(1000, 0.5, is_right=True).bus_bandwidth(4) == pytest.approx(1.5 * 1000 / 0.5)


def test_core_lists() -> None:
    assert parse_core_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_core_list("") == frozenset()


def test_a_hang_ends_with_what_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Within its time nothing happens; after it the job is aborted with a message."""
    aborted = threading.Event()
    world = SimpleNamespace(rank=3, hostname="n1", comm=SimpleNamespace(Abort=lambda code: aborted.set()))
    with within(world, 30, "nothing", "None."):  # type: ignore[arg-type]
        pass
    with within(world, 0.05, "NCCL's all-reduce", "Name the interface."):  # type: ignore[arg-type]
        assert aborted.wait(10)
    message = capsys.readouterr().err
    assert "rank 3 on n1 has waited 0 s in: NCCL's all-reduce. Name the interface." in message
    assert "nothing" not in message


@pytest.mark.parametrize(
    ("environment", "lacks"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_FD": "5"}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "2"}, False),
    ],
)
def test_a_start_by_srun_without_pmix(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], lacks: bool
) -> None:
    for name in [n for n in os.environ if n.startswith(("SLURM_", "PMI", "OMPI_COMM"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert lacks_pmi() == lacks
