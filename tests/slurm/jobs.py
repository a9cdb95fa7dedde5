"""How the tests submit jobs and watch them, and the stand-in that plays rollpacker where only Slurm's side is at stake."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster

REPOSITORY = Path(__file__).parents[2]
ROOT_MAY_START_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Ended:
    """A job that has ended: Slurm's state (COMPLETED, FAILED, ...), the script's exit code, restarts, its log."""

    state: str
    code: int
    num_restarts: int
    log: str


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    cluster: Cluster
    number: str
    log_file: Path

    def facts(self) -> dict[str, str]:
        """What scontrol shows of it."""
        shown = self.cluster.run("scontrol", "-o", "show", "job", self.number)
        assert shown.returncode == 0, shown.stderr
        return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def wait(self, timeout_s: float) -> Ended:
        """Wait until it has ended for good; fail with its log if that takes too long."""
        deadline = time.monotonic() + timeout_s
        while (facts := self.facts())["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
            assert time.monotonic() < deadline, f"job {self.number} is still {facts['JobState']}:\n{self.log()[-5000:]}"
            time.sleep(0.5)
        code, signal = map(int, facts["ExitCode"].split(":"))
        return Ended(facts["JobState"], code or signal, int(facts["Restarts"]), self.log())

    def wait_for(self, words: str, timeout_s: float) -> None:
        """Wait until its log says `words`."""
        deadline = time.monotonic() + timeout_s
        while words not in self.log():
            state = self.facts()["JobState"]
            assert state in ("PENDING", "RUNNING", "CONFIGURING"), (
                f"job {self.number} is {state}:\n{self.log()[-5000:]}"
            )
            assert time.monotonic() < deadline, f"no {words!r} in the log of job {self.number}:\n{self.log()[-5000:]}"
            time.sleep(0.2)


class Jobs:
    """Submits scripts of this repository, from its root, with logs in `folder`."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.environment = {
            **cluster.environment,
            **ROOT_MAY_START_MPI,
            "OMP_NUM_THREADS": "1",
            "VENV": str(Path(sys.prefix)),
        }

    def submit(self, *arguments: str, **variables: str) -> Job:
        """`sbatch ARGUMENTS`: options, script, the script's arguments; `variables` are exported."""
        log_file = self.folder / "%j.out"
        command = ("sbatch", "--parsable", f"--output={log_file}", *arguments)
        done = self.cluster.run(*command, cwd=REPOSITORY, env={**self.environment, **variables})
        assert done.returncode == 0, done.stderr
        number = done.stdout.strip()
        return Job(self.cluster, number, Path(str(log_file).replace("%j", number)))


# Plays `python3 -m rollpacker`; other calls of python3 are real. Its start N (by SLURM_RESTART_COUNT) ends as word N of
# PLAN says: an exit code of all ranks, `kill` (of rank 1), `until-term` (all wait for SIGTERM and end with code 3) or `wait`;
# with a + after it rank 0 saves a checkpoint before. A dry run ends with the code DRY_RUN. Like the program's, ranks that end
# in order heed no further SIGTERM, which --kill-on-bad-exit sends to all as soon as the first has left.
_STAND_IN = """\
#!{python}
import json, os, pathlib, resource, signal, sys, time
if sys.argv[1:3] != ["-m", "rollpacker"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
folder = pathlib.Path({folder!r})
start, rank = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["SLURM_PROCID"]
name = "dry_run" if "--dry-run" in sys.argv else "rank"
limits = {{"files": resource.getrlimit(resource.RLIMIT_NOFILE), "core": resource.getrlimit(resource.RLIMIT_CORE)}}
facts = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "limits": limits}}
(folder / f"{{name}}{{rank}}.start{{start}}").write_text(json.dumps(facts))
if name == "dry_run":
    print(f"output    {{folder}}/run")
    sys.exit(int(os.environ.get("DRY_RUN", "0")))
word = os.environ["PLAN"].split()[int(start)]
if word.startswith("until-term"):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
if word.endswith("+") and rank == "0":
    (folder / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "run" / "checkpoints" / "latest").write_text(f"step_{{start}}")
print("rank", rank, "does", word, flush=True)
word = word.rstrip("+")
if word == "kill" and rank == "1":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
if word == "until-term":
    signal.sigwait([signal.SIGTERM])
    word = "3"
if word in ("kill", "wait"):
    time.sleep(300)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1)
sys.exit(int(word))
"""


def stand_in(folder: Path) -> str:
    """A folder for VENV whose python3 plays rollpacker. It notes each start in `folder`."""
    python = folder / "venv" / "bin" / "python3"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(_STAND_IN.format(python=sys.executable, folder=str(folder)))
    python.chmod(0o755)
    return str(folder / "venv")


def shim(folder: Path, name: str, script: str) -> str:
    """A PATH that finds a program before the real one: it notes its arguments in `folder`/NAME.log and runs `script`."""
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{folder}/{name}.log\n{script}\n')
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"
