"""What the commands that run on all ranks share: their arguments, the start of the process, and how errors end the job."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollpacker.cli.terminal import add_config_arguments
from rollpacker.config import ConfigError
from rollpacker.doctor.slurm import lacks_pmi

if TYPE_CHECKING:
    from rollpacker.comm.world import World


def add_arguments(parser: argparse.ArgumentParser, *, dry_run: str) -> None:
    """Declare the command line; `dry_run` says what --dry-run does."""
    add_config_arguments(parser, example="configs/demo_cpu.yaml", override="rollout.n=4")
    parser.add_argument("--dry-run", action="store_true", help=dry_run)


def run_on_ranks(arguments: argparse.Namespace, body: Callable[[World], int]) -> int:
    """Join the other ranks and run `body`; the exit code.

    A ConfigError that all ranks agree on is told once, by rank 0; one that only this rank has seen ends the job.
    """
    check_pmi()
    prepare_process()
    from rollpacker.reward.scheduler import start_forkserver

    start_forkserver()  # before MPI_Init: forking afterwards is unsafe on InfiniBand
    from rollpacker.comm.world import AgreedError, join_world

    world = join_world()
    try:
        return body(world)
    except AgreedError:
        if world.rank == 0 or arguments.debug:
            raise
        return 2
    except ConfigError as error:  # the other ranks may not have seen it: they would wait for this one
        sys.stderr.write(f"rollpacker {arguments.command}: {error} (seen by rank {world.rank})\n")
        sys.stderr.flush()
        world.comm.Abort(2)
        return 2


def check_pmi() -> None:
    """Refuse a start by srun in which MPI would abort before any check; call it before mpi4py is imported."""
    if lacks_pmi():
        raise ConfigError(
            "srun started this without --mpi=pmix, so that ranks cannot find each other. Add it (srun --mpi=list shows what "
            "this Slurm has; without pmix use mpirun inside the job)."
        )


def prepare_process() -> None:
    """One OpenMP thread per rank, and silence from libraries that talk to users about themselves; before torch loads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of long prompts, which are left out
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import logging
    import warnings

    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
