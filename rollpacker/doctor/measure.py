"""What ranks can only find out together: how fast they talk, whether they see the same files. All is collective."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rollpacker.comm.world import World
from rollpacker.doctor.facts import AllReduce, SharedFolder

_MIB = 1 << 20
_VISIBLE_WITHIN_S = 15.0
_WRITE_BYTES = 64 * _MIB


@contextlib.contextmanager
def within(world: World, seconds: float, what: str, fix: str) -> Iterator[None]:
    """End the job with `what` and `fix` if the body takes longer: a broken network hangs rather than fails."""

    def give_up() -> None:
        sys.stderr.write(
            f"rollpacker doctor: FAIL: rank {world.rank} on {world.hostname} has waited {seconds:.0f} s in: {what}. {fix}\n"
        )
        sys.stderr.flush()
        world.comm.Abort(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def barrier_s(world: World, num_rounds: int = 50) -> float:
    """Seconds of an MPI barrier, the mean of some; large where ranks share cores and do not yield."""
    world.comm.Barrier()
    start = time.perf_counter()
    for _ in range(num_rounds):
        world.comm.Barrier()
    return (time.perf_counter() - start) / num_rounds


def all_reduce(world: World, device: str, sizes: list[int], budget_s: float = 0.5) -> list[AllReduce]:
    """Time torch's all-reduce, whose process group must exist, of fp32 tensors; about `budget_s` seconds a size."""
    import torch
    import torch.distributed as dist

    results = []
    for num_bytes in sizes:
        tensor = torch.full((num_bytes // 4,), float(world.rank + 1), device=device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        expected = world.size * (world.size + 1) / 2
        is_right = bool((tensor == expected).all())  # waits for the device, too
        first_s = max(world.comm.allgather(time.perf_counter() - start))
        num_rounds = int(min(max(budget_s / first_s, 1), 50))
        tensor.zero_()
        seconds = _time(lambda tensor=tensor: dist.all_reduce(tensor), num_rounds, device)
        results.append(AllReduce(num_bytes, max(world.comm.allgather(seconds)), all(world.comm.allgather(is_right))))
    return results


def _time(call: Callable[[], object], num_rounds: int, device: str) -> float:
    import torch

    call()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_rounds):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_rounds


def shared_folder(world: World, parent: str) -> SharedFolder:
    """Rank 0 writes, all read; all write, rank 0 reads; rank 0 renames over a file that all have read. Nothing is left."""
    folder = Path(parent).absolute() / f".rollpacker-doctor-{world.comm.bcast(os.getpid())}"
    error, speed, free = None, 0.0, 0
    if world.rank == 0:
        try:
            speed = _write(folder)
            free = shutil.disk_usage(folder).free
        except OSError as failure:
            error = failure.strerror or str(failure)
    error = world.comm.bcast(error)
    blind, delay_s = ({}, 0.0) if error else _exchange_files(world, folder)
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return SharedFolder(str(folder.parent), error, blind, delay_s, *world.comm.bcast((speed, free)))


def _write(folder: Path) -> float:
    """A folder with `latest`, and bytes a second of a larger file, to the disk and not only to memory."""
    folder.mkdir()
    (folder / "latest").write_text("first")
    start = time.perf_counter()
    with (folder / "large").open("wb") as file:
        file.write(os.urandom(_MIB) * (_WRITE_BYTES // _MIB))
        file.flush()
        os.fsync(file.fileno())
    return _WRITE_BYTES / (time.perf_counter() - start)


def _exchange_files(world: World, folder: Path) -> tuple[dict[int, str], float]:
    """Ranks that missed something, with what; and the longest that a rank waited to see a change."""
    problems, delay_s = [], 0.0

    def expect(what: str, is_seen: Callable[[], bool]) -> None:
        nonlocal delay_s
        start = time.perf_counter()
        while not _holds(is_seen):
            if time.perf_counter() - start > _VISIBLE_WITHIN_S:
                problems.append(f"{what} was not seen within {_VISIBLE_WITHIN_S:.0f} s")
                return
            time.sleep(0.01)
        delay_s = max(delay_s, time.perf_counter() - start)

    expect("a file of rank 0", lambda: (folder / "latest").read_text() == "first")
    if not problems:
        try:
            (folder / f"rank{world.rank}").write_text("here")
        except OSError as failure:
            problems.append(failure.strerror or str(failure))
    if any(world.comm.allgather(bool(problems))):
        return _join(world, problems), 0.0
    names = {f"rank{rank}" for rank in range(world.size)}
    if world.rank == 0:
        expect("a file of another rank", lambda: names <= {file.name for file in folder.iterdir()})
        (folder / "latest.new").write_text("second")
        (folder / "latest.new").replace(folder / "latest")
    world.comm.Barrier()
    expect("a file renamed by rank 0", lambda: (folder / "latest").read_text() == "second")
    return _join(world, problems), max(world.comm.allgather(delay_s))


def _holds(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except OSError:
        return False


def _join(world: World, problems: list[str]) -> dict[int, str]:
    return {rank: "; ".join(found) for rank, found in enumerate(world.comm.allgather(problems)) if found}
