"""`rollpacker launch` without a Slurm: the script it writes, what it refuses before it submits, where groups lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen import write_qwen_folder

from rollpacker.cli.main import main
from rollpacker.config import ConfigError
from rollpacker.config_file import load_config
from rollpacker.launch.slurm import COMMON, save_signal_s
from rollpacker.launch.topology import Topology, describe_groups

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CONFIG and inputs that are there; an sbatch that fails the test if it is ever called."""
    model = write_qwen_folder(tmp_path / "model", "7B")
    (tmp_path / "train.jsonl").touch()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    config = str(ROOT / "configs" / "qwen2.5_7b_8k.yaml")
    return [config, f"model.path={model}", f"data.train_files={tmp_path}/train.jsonl"]


def test_the_script(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--account=me",
        "--partition=gpu",
        "--qos=long",
        "--time=12:00:00",
        "--sbatch=--constraint=h100 --mem=500G",
    ]
    options += ["--modules=openmpi cuda"]
    assert main(["launch", *job, "--nodes", "2", *options, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=qwen2.5_7b_8k",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--account=me",
        "--partition=gpu",
        "--qos=long",
        "--time=12:00:00",
        "--signal=USR1@300",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
        "--constraint=h100",
        "--mem=500G",
    ]
    assert "export MODULES='openmpi cuda'" in lines and f"export VENV={sys.prefix}" in lines
    assert f"source {ROOT}/slurm/common.sh" in lines
    assert lines[-1] == f"run_job {' '.join(job)}"
    assert not (tmp_path / "submitted").exists()


def test_a_container_takes_the_place_of_this_python(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its model may be seen only inside: then the job checks it."""
    config, _, files = job
    inside = ["model.path=/models/Qwen2.5-7B", files, "--container=nvcr.io#a/b:1", "--mounts=/a:/models"]
    assert main(["launch", config, "--nodes", "2", *inside, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert (
        "export SLURM_CONTAINER='nvcr.io#a/b:1'" in out and "CONTAINER_MOUNTS=/a:/models" in out and "VENV" not in out
    )
    assert "is not seen from here" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout.n=1"], "a group of one has no advantage"),
        (["rollout.m=1"], "rollout"),
        (["training.tensor_model_parallel_size=3"], "does not divide"),
        (["--gpus-per-node=6", "training.tensor_model_parallel_size=4"], "tensor-parallel group would cross nodes"),
        (["training.context_parallel_size=2"], "this version trains with 1"),
        (["model.path=nowhere"], "model.path=nowhere (a folder"),
        (["rollout.gpu_memory_utilization=0.9"], "rollout phase does not fit by"),
        (["trainer.nnodes=4"], "4 x 8 = 32"),
        (["--time=tomorrow"], "--time=tomorrow: not a time limit of Slurm's"),
        (["--sbatch=exclusive"], "'exclusive' is no option of sbatch"),
        (["--container=a", "--apptainer=b"], "a job runs in one of them"),
    ],
)
def test_what_is_wrong_is_not_submitted(
    job: list[str], arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *job, "--nodes", "2", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("rollpacker launch: ") and words in err and not out
    assert not (tmp_path / "submitted").exists()


def test_nodes_must_be_named_and_positive(job: list[str]) -> None:
    for nodes in ([], ["--nodes=0"], ["--nodes=2.5"]):
        with pytest.raises(SystemExit) as stop:
            main(["launch", *job, *nodes])
        assert stop.value.code == 2


def test_what_is_good_is_submitted(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *job, "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "submitted").exists()
    for line in (
        "job       7: 2 node(s) of 8 GPUs",
        "training  TP 2 within a node, DP 8 over 2 nodes",
        "rollout   TP 1, 16 replica(s)",
        "log       qwen2.5_7b_8k-7.out, from its start on: tail -F qwen2.5_7b_8k-7.out",
    ):
        assert line in out


def test_without_sbatch(job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", *job, "--nodes", "2"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (None, 300),
        ("8", 120),
        ("4:00", 60),
        ("12:00:00", 300),
        ("2-0", 300),
        ("0-0:10", 150),
        ("0-0:0:100", 25),
    ],
)
def test_the_signal_before_the_end(time: str | None, seconds: int) -> None:
    """Five minutes, a quarter of a job shorter than twenty."""
    assert save_signal_s(time) == seconds


@pytest.mark.parametrize("time", ["", "1:2:3:4", "a", "-5", "2-", "0", "0-0:0"])
def test_what_is_no_time(time: str) -> None:
    with pytest.raises(ConfigError, match="--time="):
        save_signal_s(time)


@pytest.mark.parametrize(
    ("size", "stride", "num_nodes"), [(8, 1, 1), (2, 8, 2), (2, 4, 1), (4, 4, 2), (16, 1, 2), (1, 1, 1), (6, 1, 2)]
)
def test_nodes_of_a_group(size: int, stride: int, num_nodes: int) -> None:
    """Two nodes of eight: ranks 0 4 8 12 lie on both, 0 4 on one, 6 to 11 on both."""
    assert Topology(2, 8).num_nodes_of_group(size, stride) == num_nodes


def test_groups_of_the_papers_largest_job() -> None:
    shape = ["training.tensor_model_parallel_size=8", "training.pipeline_model_parallel_size=2"]
    config = load_config(str(ROOT / "configs/qwen2.5_32b_32k.yaml"), [*shape, "training.context_parallel_size=1"])
    assert describe_groups(config, Topology(8, 8)) == {
        "training": "TP 8 within a node, PP 2 over 2 nodes, DP 4 over 4 nodes",
        "rollout": "TP 2 within a node, 32 replica(s)",
    }


def test_common_sh_is_there() -> None:
    assert COMMON == ROOT / "slurm" / "common.sh" and COMMON.is_file()
