"""The MPI world: who am I, where do I run, how do I reach the others, and what happens when one of us dies.

Ranks come from MPI.COMM_WORLD, never from launcher variables (srun sets none of mpirun's). This is the only module that
reads facts about the launcher.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from mpi4py import MPI

from rollpacker.config import ConfigError

T = TypeVar("T")
_ABORT_DELAY_S = 2.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


class JobError(RuntimeError):
    """Something outside the program ended the run, such as a disk: told in a paragraph, without a traceback."""


class AgreedError(ConfigError):
    """A user's mistake that every rank knows of, so that the job can end in order."""


@dataclass(frozen=True)
class World:
    """This rank's place in the job. `clock_offset_s` is added to MPI_Wtime to read rank 0's clock.

    `ranks_per_node` is the same on all ranks: the greatest common divisor, where nodes have different numbers.
    """

    comm: MPI.Comm
    rank: int
    size: int
    local_rank: int
    ranks_per_node: int
    hostname: str
    clock_offset_s: float
    start_s: float

    def now(self) -> float:
        """Seconds since the start of the job, on rank 0's clock."""
        return MPI.Wtime() + self.clock_offset_s - self.start_s

    def continued(self, elapsed_s: float) -> World:
        """The same ranks, on a clock that goes on from `elapsed_s`. Collective: all must reckon from one start."""
        start_s = self.comm.bcast(MPI.Wtime() + self.clock_offset_s - elapsed_s)
        return dataclasses.replace(self, start_s=start_s)

    def wait_for_all(self) -> None:
        """A barrier for ranks that may come minutes apart: those that wait sleep.

        MPI's own waits by asking again and again, and where ranks share cores it keeps the late ones from coming: with two
        waiting ranks on two cores Linux 6.18 left 2 % of the time to the others, although MPI yields.
        """
        wait_for(self.comm.Ibarrier().Test, timeout_s=math.inf, what="the other ranks")

    def agree(self, check: Callable[[], T]) -> T:
        """Run `check` on every rank; if it raises ConfigError anywhere, raise the first of them on all as AgreedError.

        So a mistake that only some ranks can see (a file that is absent on one node) ends the job in order.
        """
        result, message = None, None
        try:
            result = check()
        except ConfigError as error:
            message = str(error)
        self.wait_for_all()
        messages = self.comm.allgather(message)
        for rank, text in enumerate(messages):
            if text is not None:
                where = "" if all(m == text for m in messages) else f" (seen by rank {rank})"
                raise AgreedError(text + where)
        return result  # type: ignore[return-value]


def join_world() -> World:
    """Initialise MPI, find this rank's node, measure the clock offset, and make sure that a dying rank ends the job."""
    comm = MPI.COMM_WORLD
    hostname = socket.gethostname()
    _abort_job_on_exception(comm, hostname)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    offset = _clock_offset_s(comm)
    start = comm.bcast(MPI.Wtime() if comm.rank == 0 else None)
    ranks_per_node = math.gcd(*comm.allgather(node.size))
    return World(comm, comm.rank, comm.size, node.rank, ranks_per_node, hostname, offset, start)


def _abort_job_on_exception(comm: MPI.Comm, hostname: str) -> None:
    """Without this, the other ranks wait in a collective for ever (and Python hangs in MPI_Finalize)."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        why = "was interrupted" if issubclass(kind, KeyboardInterrupt) else "died"
        is_disk = isinstance(error, OSError) and error.errno in _DISK_ERRORS
        what = str(error) if isinstance(error, JobError) else f"{kind.__name__}: {error}"
        if is_disk:
            what += ". Mend or empty that disk; the same command then goes on from the newest checkpoint."
        sys.stderr.write(f"rollpacker: rank {comm.rank} on {hostname} {why}: {what}\n")
        if not is_disk and not issubclass(kind, KeyboardInterrupt | JobError):
            traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        # Another rank's death may be what raised here; this leaves the launcher the time to notice and name that one.
        time.sleep(_ABORT_DELAY_S)
        comm.Abort(1)

    sys.excepthook = hook


def _clock_offset_s(comm: MPI.Comm, num_rounds: int = 16) -> float:
    """Offset of rank 0's clock to mine: the midpoint of the fastest of `num_rounds` ping-pongs (Cristian's method)."""
    offset = 0.0
    for other in range(1, comm.size):
        if comm.rank == 0:
            for _ in range(num_rounds):
                comm.recv(source=other)
                comm.send(MPI.Wtime(), dest=other)
        elif comm.rank == other:
            fastest = float("inf")
            for _ in range(num_rounds):
                sent = MPI.Wtime()
                comm.send(None, dest=0)
                theirs = comm.recv(source=0)
                received = MPI.Wtime()
                if received - sent < fastest:
                    fastest, offset = received - sent, theirs - (sent + received) / 2
    return offset


def init_torch_distributed(world: World, backend: str, timeout_s: float) -> None:
    """Start torch.distributed over the same ranks: rank 0's address and a free port travel by MPI.

    The environment variables are those that vLLM's external launcher reads.
    """
    import torch.distributed as dist

    address = world.comm.bcast(_reachable_address() if world.rank == 0 and world.size > 1 else "127.0.0.1")
    port = world.comm.bcast(_free_port() if world.rank == 0 else None)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    hook = sys.excepthook
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_s))
    sys.excepthook = hook  # torch wraps it in one that would swallow our message: it buffers stderr around the call


def _reachable_address() -> str:
    """This host's name if it resolves (compute nodes know each other by name), else loopback."""
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
    except OSError:
        return "127.0.0.1"
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_user_terminal() -> tuple[bool, int | None]:
    """Does the user see this rank's standard output on a terminal, and how wide is it?

    Open MPI gives every rank a pseudo terminal even when its own output goes to a file, so under mpirun the launcher's
    standard output decides; a rank on another node has none to look at and counts as not a terminal.
    """
    if not sys.stdout.isatty():
        return False, None
    stdout = Path("/proc/self/fd/1")
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        stdout = Path(f"/proc/{os.getppid()}/fd/1")
    try:
        target = stdout.readlink()
        if not str(target).startswith(("/dev/pts/", "/dev/tty")):
            return False, None
        with target.open("rb") as terminal:
            return True, os.get_terminal_size(terminal.fileno()).columns
    except OSError:
        return False, None


def wait_for(test: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    """Poll until `test()` holds, sleeping a little longer each time (up to 1 ms), so that no core is burnt.

    Raises RuntimeError with `what` after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 20e-6
    while not test():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {timeout_s:.0f} s for {what}; another rank is stuck or gone.")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 1e-3)
