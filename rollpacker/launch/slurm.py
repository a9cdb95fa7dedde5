"""A training job as a batch script, and its submission. Standard library only: it runs on a login node.

The script asks Slurm for the nodes and leaves everything else to slurm/common.sh, which is installed with the package (a link
in this folder): the job needs no checkout, only that its nodes see this package and this Python under the same paths.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rollpacker.config import ConfigError
from rollpacker.launch.topology import Topology

COMMON = Path(__file__).with_name("common.sh").resolve()
_SAVE_SIGNAL_S = 300
"""So long before the time limit Slurm signals: time to drop a round and write a checkpoint; a quarter of a short job."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


@dataclass(frozen=True)
class Request:
    """What Slurm is asked for beside the nodes; None leaves it to the site's defaults."""

    job_name: str
    has_gpus: bool
    shares_nodes: bool = False
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    time: str | None = None
    more: tuple[str, ...] = ()

    def options(self, topology: Topology) -> list[str]:
        """Options of sbatch. The site's own (`more`) come last, where they win."""
        named = {"account": self.account, "partition": self.partition, "qos": self.qos, "time": self.time}
        options = [f"--job-name={self.job_name}", f"--nodes={topology.num_nodes}"]
        options += [f"--ntasks-per-node={topology.ranks_per_node}"]
        options += [f"--gpus-per-node={topology.ranks_per_node}"] if self.has_gpus else []
        options += ["--exclusive", "--mem=0"] if self.has_gpus and not self.shares_nodes else []
        options += [f"--{name}={value}" for name, value in named.items() if value is not None]
        options += [
            f"--signal=USR1@{save_signal_s(self.time)}",
            "--requeue",
            "--open-mode=append",
            "--output=%x-%j.out",
        ]
        return [*options, *self.more]


def save_signal_s(time: str | None) -> int:
    """Seconds before the time limit at which Slurm asks the ranks to save; ConfigError for what is no time of Slurm's."""
    if time is None:
        return _SAVE_SIGNAL_S
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"--time={time}: not a time limit of Slurm's. Write minutes (90), hours:minutes:seconds (12:00:00) or "
            "days-hours (2-0)."
        )
    numbers = [int(number) for number in match["rest"].split(":")]
    if match["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        limit_s = ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    elif len(numbers) < 3:  # minutes[:seconds]
        limit_s = numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)
    else:
        limit_s = (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    if not limit_s:
        raise ConfigError(f"--time={time}: a job of no length. Leave it out for the partition's default.")
    return min(_SAVE_SIGNAL_S, limit_s // 4)


def batch_script(topology: Topology, request: Request, arguments: list[str], variables: dict[str, str]) -> str:
    """The script that sbatch takes: `arguments` of `rollpacker train`, `variables` of slurm/common.sh."""
    options = request.options(topology)
    if broken := [option for option in options if not option.startswith("-") or "\n" in option]:
        raise ConfigError(f"{broken[0]!r} is no option of sbatch: write --name=value.")
    lines = [
        "#!/bin/bash",
        f"# {topology.num_nodes} node(s) of {topology.ranks_per_node} ranks, by rollpacker launch; see docs/slurm.md.",
        *(f"#SBATCH {option}" for option in options),
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        "# shellcheck source=/dev/null",
        f"source {shlex.quote(str(COMMON))}",
        "",
        f"run_job {shlex.join(arguments)}",
    ]
    return "\n".join(lines) + "\n"


def submit(script: str) -> str:
    """Hand the script to sbatch; the job's id. Raises ConfigError with sbatch's words if it refuses."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch here: run this on a login node of a Slurm cluster, or see the script with --dry-run. "
            "Nothing was submitted."
        )
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        reasons = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise ConfigError(f"sbatch refused: {'; '.join(reasons)}. Nothing was submitted.")
    return done.stdout.strip().split(";")[0]  # with the cluster's name behind it, where there are several
