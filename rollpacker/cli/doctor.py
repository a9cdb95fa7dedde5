"""`rollpacker doctor`: what would keep a run from working on this node, or on all nodes of a job, and how to mend it."""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING

from rollpacker.cli.job import check_pmi, prepare_process
from rollpacker.cli.terminal import columns, open_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollpacker.doctor.verdict import Check

HELP = "Check this node, or under mpirun or srun all of a job's nodes: MPI, GPUs, network, files, versions (half a minute)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--folder", metavar="DIR", default=".", help="where run directories will lie; default: here")
    parser.add_argument("--debug", action="store_true", help="show a traceback for errors that are expected, too")


def run(arguments: argparse.Namespace) -> int:
    """Examine, print the table on rank 0; exit code 1 if anything fails."""
    check_pmi()
    prepare_process()
    try:
        from rollpacker.comm.launcher import launched_as
        from rollpacker.comm.world import join_world
        from rollpacker.doctor.examine import examine
    except (ImportError, RuntimeError) as error:  # mpi4py is missing, or the MPI library behind it
        sys.stderr.write(
            f"rollpacker doctor: FAIL: {error}. Install mpi4py and an MPI: module load openmpi, make env.\n"
        )
        return 1
    world = join_world()
    checks = examine(world, arguments.folder)
    if world.rank == 0 and launched_as() == 0:  # tasks that do not know each other are all rank 0
        _report(checks)
    return int(any(check.status == "FAIL" for check in checks))


def _report(checks: Sequence[Check]) -> None:
    """The table, then what to do about each problem. Plain text: under mpirun even a file looks like a terminal."""
    stream = io.StringIO()
    table = columns("check", "", "found")
    table.columns[2].justify = "left"
    for check in checks:
        table.add_row(check.name, check.status, check.found)
    open_console(stream).print(table)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    problems = [check for check in checks if check.status != "ok"]
    lines += [f"{check.status:<4}  {check.name}: {check.fix}" for check in problems]
    num_failed = sum(check.status == "FAIL" for check in checks)
    verdict = f"{num_failed} of {len(checks)} checks failed" if num_failed else "A run can start here"
    num_warnings = len(problems) - num_failed
    lines.append(f"{verdict}{f'; {num_warnings} warning(s)' if num_warnings else ''}.")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
