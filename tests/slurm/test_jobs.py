"""The scripts of slurm/ on a real Slurm: the demo over two nodes, a job that is refused in time, what ranks find."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from jobs import REPOSITORY, Jobs, shim, stand_in

sys.path.insert(0, str(REPOSITORY / "tests"))

from nsys_exports import Export

DEMO = "slurm/train_demo.sh"
SHORT = [
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
]


def test_the_demo_trains_over_two_nodes(jobs: Jobs, tmp_path: Path) -> None:
    """`sbatch --wait`, as a user would, with its own exit code."""
    run = tmp_path / "run"
    log = tmp_path / "log"
    command = ["sbatch", "--wait", f"--output={log}", DEMO, *SHORT, f"trainer.default_local_dir={run}"]
    done = jobs.cluster.run(*command, cwd=REPOSITORY, env=jobs.environment, timeout_s=280)
    assert done.returncode == 0, log.read_text()[-5000:]
    text = log.read_text()
    assert "start 0 on 2 node(s), n[1-2], 2 rank(s) each" in text
    assert text.count("ranks     4 on cpu, 2 node(s) of 2") == 2  # the check and the run
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == [1, 2]
    assert max(row["training/rollout_logprobs_diff_max"] for row in rows) <= 1e-4


def test_a_wrong_config_ends_the_job_before_any_rank_starts(jobs: Jobs, tmp_path: Path) -> None:
    start = time.monotonic()
    ended = jobs.submit(DEMO, *SHORT, "rollout.n=1", f"trainer.default_local_dir={tmp_path}/run").wait(timeout_s=60)
    assert time.monotonic() - start < 60
    assert (ended.state, ended.code, ended.num_restarts) == ("FAILED", 2, 0)
    assert "rollout.n=1" in ended.log and "nothing was started" in ended.log
    assert "srun" not in ended.log and not (tmp_path / "run").exists()


def test_a_script_that_sbatch_did_not_start_says_so(cluster: Cluster) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "SLURM_SUBMIT_DIR"}
    done = cluster.run("bash", DEMO, cwd=REPOSITORY, env=environment)
    assert done.returncode != 0
    assert "start this with sbatch, from the root of the repository" in done.stderr


def facts(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def test_what_a_rank_finds(jobs: Jobs, tmp_path: Path) -> None:
    """All GPUs of its node, its share of the cores, the job's end, limits, and no core dumps."""
    size = ["--ntasks-per-node=4", "--gpus-per-node=8", "--cpus-per-task=2", "--time=10"]
    variables = {
        "VENV": stand_in(tmp_path),
        "PLAN": "0",
        "INTERFACE": "lo",
        "SRUN_OPTIONS": "--label --cpus-per-task=1",
    }
    before = time.time()
    ended = jobs.submit(*size, DEMO, **variables).wait(timeout_s=60)
    assert ended.code == 0, ended.log
    assert "3: rank 3 does 0" in ended.log  # --label of SRUN_OPTIONS
    check, rank = facts(tmp_path, "dry_run0.start0"), facts(tmp_path, "rank5.start0")
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    }.items():
        assert check["environment"][name] == rank["environment"][name] == value
    assert rank["environment"]["SLURM_CPUS_PER_TASK"] == "1"  # SRUN_OPTIONS won over an equal share, 2
    assert 550 < float(rank["environment"]["SLURM_JOB_END_TIME"]) - before < 660
    soft, hard = rank["limits"]["files"]
    assert soft == 65536 or soft == hard < 65536
    assert rank["limits"]["core"][0] == 0
    assert ("OMPI_MCA_mpi_yield_when_idle" in check["environment"]) == (len(os.sched_getaffinity(0)) < 4)


def played(folder: Path, path: str) -> dict[str, str]:
    """The variables of a job whose program is played, with a PATH that finds it even without VENV, and ends well."""
    venv = stand_in(folder)
    return {"VENV": venv, "PATH": f"{venv}/bin:{path}", "PLAN": "0"}


def test_apptainer(jobs: Jobs, tmp_path: Path) -> None:
    """The check and the ranks run in the image, with the GPUs, the working folder and further mounts."""
    path = shim(tmp_path, "apptainer", 'until [ "$1" = python3 ]; do shift; done; exec "$@"')
    variables = played(tmp_path, path) | {"APPTAINER_IMAGE": "image.sif", "CONTAINER_MOUNTS": "/data:/data"}
    ended = jobs.submit("--gpus-per-node=8", "--ntasks-per-node=1", DEMO, **variables).wait(timeout_s=60)
    assert ended.code == 0, ended.log
    lines = (tmp_path / "apptainer.log").read_text().splitlines()
    image = f"exec --nv --bind {REPOSITORY}:{REPOSITORY},/data:/data --pwd {REPOSITORY} image.sif python3 -m rollpacker train"
    assert len(lines) == 3 and all(line.startswith(image) for line in lines)
    environment = facts(tmp_path, "rank1.start0")["environment"]
    assert environment["OMPI_MCA_btl_vader_single_copy_mechanism"] == "none"


@pytest.mark.parametrize("mounts", ["", "/data:/data"])
def test_pyxis(jobs: Jobs, tmp_path: Path, mounts: str) -> None:
    """The options of pyxis on every srun, the check's too; Slurm's own --container must not see SLURM_CONTAINER."""
    strip = 'exec SRUN $(tr " " "\\n" <<<"$*" | grep -v ^--container)'.replace("SRUN", str(shutil.which("srun")))
    path = shim(tmp_path, "srun", f'[ -z "${{SLURM_CONTAINER:-}}" ] || exit 9\n{strip}')
    variables = played(tmp_path, path) | {"SLURM_CONTAINER": "image.sqsh", "CONTAINER_MOUNTS": mounts}
    ended = jobs.submit("--ntasks-per-node=1", DEMO, **variables).wait(timeout_s=60)
    assert ended.code == 0, ended.log
    check, ranks = (tmp_path / "srun.log").read_text().splitlines()
    wanted = f"--container-image=image.sqsh --container-mounts={REPOSITORY}:{REPOSITORY}{mounts and ',' + mounts} "
    assert wanted in check and wanted in ranks and f"--container-workdir={REPOSITORY} " in ranks
    assert check.startswith("--nodes=1 --ntasks=1 ") and check.endswith("--dry-run")
    assert facts(tmp_path, "rank1.start0")["arguments"][:3] == ["-m", "rollpacker", "train"]


def test_profile(jobs: Jobs, tmp_path: Path) -> None:
    """nsys around each rank, its reports converted, the table made of them; nsys's part is played."""
    export = Export(tmp_path / "export.sqlite")
    export.process(10, {0: 0})
    export.range(10, 0.0, 1.0, "rollpacker/gen")
    export.kernel(10, 0.0, 0.25)
    export.write()
    nsys = f"""
        if [ $1 = export ]; then exec cp {export.path} "$6"; fi
        until [ "$1" = python3 ]; do case $1 in --output=*) output=${{1#*=}};; esac; shift; done
        touch "${{output%%%*}}$SLURM_PROCID.nsys-rep"
        exec "$@" """
    folder = tmp_path / "profile"
    variables = played(tmp_path, shim(tmp_path, "nsys", nsys)) | {"PROFILE_DIR": str(folder)}
    size = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1"]
    ended = jobs.submit(*size, "slurm/profile.sh", "configs/demo_cpu.yaml", **variables).wait(timeout_s=60)
    assert ended.code == 0, ended.log
    assert "1 GPU was idle for" in ended.log
    assert {file.name for file in folder.iterdir()} >= {"bubbles.json", "bubbles.csv", "bubbles.svg", "bubbles.html"}
    arguments = facts(tmp_path, "rank0.start0")["arguments"]
    assert "profiler.steps=[2,3]" in arguments and f"trainer.default_local_dir={folder}/run" in arguments


def test_interactive(jobs: Jobs, tmp_path: Path) -> None:
    """What a user types at the prompt: a step on all ranks, with the terminal at rank 0; `exit` gives the nodes back."""
    folder = stand_in(tmp_path)
    size = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0"]
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**jobs.environment, "VENV": folder, "PLAN": "0", "HOME": str(tmp_path)}
        os.chdir(REPOSITORY)
        os.execve("slurm/interactive.sh", ["interactive.sh", *size, "configs/demo_cpu.yaml", "a.b=c"], environment)
    read_until(terminal, "Commands: step")
    os.write(terminal, b"step d.e='1 2'\n")
    read_until(terminal, "rank 0 does 0")
    read_until(terminal, " $ ")  # the next prompt
    os.write(terminal, b"exit\n")
    read_until(terminal, "Relinquishing job allocation")
    os.waitpid(pid, 0)
    arguments = facts(tmp_path, "rank1.start0")["arguments"]
    assert arguments[2:5] == ["train", "configs/demo_cpu.yaml", "trainer.nnodes=2"]
    assert "a.b=c" in arguments and "trainer.total_training_steps=1" in arguments
    assert arguments[-2:] == ["d.e=1 2", "--debug"]


def read_until(terminal: int, words: str, timeout_s: float = 60) -> None:
    text, deadline = "", time.monotonic() + timeout_s
    while words not in text:
        assert time.monotonic() < deadline, f"no {words!r} on the terminal:\n{text}"
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 4096).decode()
