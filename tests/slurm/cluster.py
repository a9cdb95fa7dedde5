"""A throw-away Slurm cluster on this machine: munged, slurmctld and a slurmd for each fake node; up in a second or two.

No systemd, no cgroups, no accounting. The nodes share this machine's cores, name and /dev/shm; each has fake GPUs, links to
/dev/null, which Slurm hands out like real ones. Everything lives in one folder. By hand:

    python tests/slurm/cluster.py     # a shell in which sbatch, srun and squeue talk to it; exit ends the cluster
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_ENVIRONMENT = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

_SLURM_CONF = """\
ClusterName=fake
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until its credential has expired: 120 s by default.
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state/ctld
SlurmdSpoolDir={root}/state/slurmd.%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
# PMIx makes a folder there for each step; the fake nodes must not share it.
TmpFS={root}/tmp/%n
TaskProlog={root}/etc/task_prolog
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
EnforcePartLimits=ALL
ReturnToService=2
InactiveLimit=0
KillWait=5
MinJobAge=600
UnkillableStepTimeout=30
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""
_NODE = (
    "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN\n"
)
# What a site sets for its own network. Fake nodes share a name and /dev/shm, and Open MPI's shared memory between two of
# them crashes, since it takes each other's files for its own: TCP over loopback then. More ranks than cores must yield. What
# torch compiled for this machine is as good on any of them; with a TMPDIR of its own each would compile vLLM's model anew.
_TASK_PROLOG = """\
#!/bin/sh
mkdir -p {root}/tmp/$SLURMD_NODENAME
echo export TMPDIR={root}/tmp/$SLURMD_NODENAME
echo export TORCHINDUCTOR_CACHE_DIR={compiled}
if [ "${{SLURM_JOB_NUM_NODES:-1}}" -gt 1 ]; then echo export OMPI_MCA_btl=self,tcp; fi
echo export OMPI_MCA_btl_tcp_if_include=lo
echo export OMPI_MCA_oob_tcp_if_include=lo
echo export OMPI_MCA_mpi_yield_when_idle=1
echo export GLOO_SOCKET_IFNAME=lo
"""


class Cluster:
    """`num_nodes` fake nodes, n1 on; a context manager. `environment` is what Slurm's commands need to find it."""

    def __init__(self, num_nodes: int = 8, cpus: int = 16, gpus: int = 8) -> None:
        # Not pytest's tmp_path: munged refuses a socket below a folder that only its owner may enter.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.num_nodes, self._cpus, self._gpus = num_nodes, cpus, gpus
        self.environment = {**_ENVIRONMENT, "SLURM_CONF": str(self.root / "etc" / "slurm.conf")}

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            self._write_files()
            self._start()
            on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(
        self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands against this cluster."""
        env = env or self.environment
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)

    def stop(self) -> None:
        """Cancel all jobs, end exactly the daemons that were started, by their pid files, and remove the folder."""
        if self.run("squeue", "-h").stdout:
            self.run("scancel", "-u", getpass.getuser())
            _wait_until(lambda: not self.run("squeue", "-h").stdout, timeout_s=20)
        run = self.root / "run"
        _end([*run.glob("slurmd.*.pid"), run / "slurmctld.pid"])
        _end([run / "munged.pid"])
        shutil.rmtree(self.root, ignore_errors=True)

    def _write_files(self) -> None:
        root, host = self.root, socket.gethostname().split(".")[0]
        root.chmod(0o755)
        for name in ("etc", "run", "log", "state/ctld", "tmp", "dev"):
            (root / name).mkdir(parents=True)
        for number in range(1, self.num_nodes + 1):
            (root / "state" / f"slurmd.n{number}").mkdir()
            (root / "tmp" / f"n{number}").mkdir()
        key = root / "etc" / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        port, *ports = _free_ports(1 + self.num_nodes)
        text = _SLURM_CONF.format(root=root, host=host, port=port, user=getpass.getuser())
        for number, node_port in enumerate(ports, 1):
            text += _NODE.format(number=number, host=host, port=node_port, cpus=self._cpus, gpus=self._gpus)
        (root / "etc" / "slurm.conf").write_text(text)
        # Slurm 22.05 always loads a cgroup plugin; version 1 with a mount point that is not there does nothing.
        (root / "etc" / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={root}/nocgroup\n")
        for number in range(self._gpus):  # each GPU needs a character device of its own name
            (root / "dev" / f"nvidia{number}").symlink_to("/dev/null")
        gpus = f"NodeName=n[1-{self.num_nodes}] Name=gpu File={root}/dev/nvidia[0-{self._gpus - 1}]"
        (root / "etc" / "gres.conf").write_text(f"AutoDetect=off\n{gpus}\n")
        prolog = root / "etc" / "task_prolog"
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # torch's own default
        prolog.write_text(_TASK_PROLOG.format(root=root, compiled=compiled))
        prolog.chmod(0o755)

    def _start(self) -> None:
        root = self.root
        self._daemon(
            "munged",
            f"--socket={root}/run/munge.socket",
            f"--key-file={root}/etc/munge.key",
            f"--pid-file={root}/run/munged.pid",
            f"--log-file={root}/log/munged.log",
            f"--seed-file={root}/run/munged.seed",
        )
        is_answering = ("munge", "-n", "-S", f"{root}/run/munge.socket")
        _wait_until(lambda: self.run(*is_answering).returncode == 0, timeout_s=10)
        self._daemon("slurmctld")
        for number in range(1, self.num_nodes + 1):
            self._daemon("slurmd", "-N", f"n{number}")
        if not _wait_until(lambda: self._num_idle() == self.num_nodes, timeout_s=30):
            logs = "".join(f"{log.name}: {log.read_text()[-1500:]}\n" for log in (root / "log").iterdir())
            raise RuntimeError(f"the fake cluster did not come up:\n{logs}")

    def _daemon(self, *command: str) -> None:
        done = self.run(*command)
        if done.returncode:
            raise RuntimeError(f"{command[0]} did not start: {done.stderr}")

    def _num_idle(self) -> int:
        """Nodes that are idle and whose slurmd has registered."""
        nodes = self.run("scontrol", "-o", "show", "nodes").stdout.splitlines()
        return sum(" State=IDLE " in node and "SlurmdStartTime=None" not in node for node in nodes)


def missing_programs() -> list[str]:
    """What a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_ENVIRONMENT["PATH"]) is None]


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _end(pid_files: list[Path]) -> None:
    """TERM, and after ten seconds KILL, for the daemons of these pid files."""
    pids = [int(file.read_text()) for file in pid_files if file.exists()]
    pids = [pid for pid in pids if _name_of(pid) in PROGRAMS]
    for number, timeout_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        for pid in pids:
            if _name_of(pid) in PROGRAMS:
                os.kill(pid, number)
        if _wait_until(lambda: not any(_name_of(pid) in PROGRAMS for pid in pids), timeout_s=timeout_s):
            return


def _name_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return None


def _wait_until(test: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (is_true := test()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true


if __name__ == "__main__":
    if missing := missing_programs():
        sys.exit(f"not installed: {', '.join(missing)} (Debian, Ubuntu: apt-get install slurm-wlm munge)")
    with Cluster() as cluster:
        subprocess.run([os.environ.get("SHELL", "bash"), *sys.argv[1:]], env=cluster.environment, check=False)
