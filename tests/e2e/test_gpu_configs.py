"""The configs for GPUs, as far as a machine without one can tell: `--dry-run` on one rank, planning 16 to 64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import DEMO, run

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen import write_qwen_folder

CONFIGS = {
    "7B": "configs/qwen2.5_7b_8k.yaml",
    "14B": "configs/qwen2.5_14b_16k.yaml",
    "32B": "configs/qwen2.5_32b_32k.yaml",
}
NO_CP = ["training.context_parallel_size=1"]
# The override that the head of the 32B config names.
SHAPE_32B = ["training.tensor_model_parallel_size=8", "training.pipeline_model_parallel_size=2", *NO_CP]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in CONFIGS:
        write_qwen_folder(root / name, name, tokenizer_of=DEMO / "model")
    return root


def start(name: str, *arguments: str, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "rollpacker", "train", CONFIGS[name], *arguments]
    if num_ranks > 1:
        program = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks), *program]
    return run(program, timeout_s=60)


def dry_run(models: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    files = [f"model.path={models / name}", f"data.train_files={DEMO / 'train.jsonl'}"]
    return start(name, "--dry-run", *files, *overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "facts"),
    [
        ("7B", [], ["ranks     16 on cuda, 2 node(s) of 8", "TP 2 x PP 1 x DP 8, bf16", "TP 1 x 16 replica(s)"]),
        ("14B", NO_CP, ["ranks     32 on cuda", "TP 2 x PP 2 x DP 8, bf16", "TP 2 x 16 replica(s)"]),
        ("32B", SHAPE_32B, ["ranks     64 on cuda", "TP 8 x PP 2 x DP 4, bf16", "TP 2 x 32 replica(s)"]),
    ],
)
def test_what_fits_today(models: Path, name: str, overrides: list[str], facts: list[str]) -> None:
    result = dry_run(models, name, *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    for fact in [*facts, "trainer weights", "engine KV cache", "16 of 128 prompts x 8 responses"]:
        assert fact in result.stdout
    assert result.stdout.count("fits, ") == 2
    assert result.stdout.endswith("The config is good; nothing was started or written.\n")
    lines = result.stdout.splitlines()
    assert len(lines) <= 40  # one screen
    assert all(len(line) <= 120 for line in lines if str(models) not in line)
    assert not Path("outputs", f"qwen2.5_{name.lower()}").exists()


@pytest.mark.parametrize(
    ("name", "shape", "num_problems"),
    [("14B", "TP 2 x PP 2 x CP 2 x DP 4", 1), ("32B", "TP 4 x PP 1 x CP 4 x DP 4", 2)],
)
def test_the_papers_context_parallelism_is_checked_and_refused(
    models: Path, name: str, shape: str, num_problems: int
) -> None:
    """Everything is printed, then what stands in the way; for 32B the memory as well."""
    result = dry_run(models, name)
    assert result.returncode == 2
    assert shape in result.stdout and "engine KV cache" in result.stdout
    assert result.stdout.endswith("THIS CONFIG CANNOT RUN, see below; nothing was started or written.\n")
    problems = [line for line in result.stderr.splitlines() if line.startswith("rollpacker train: ")]
    assert len(problems) == num_problems
    assert "this version trains with 1" in problems[-1]
    assert ("rollout phase does not fit by" in problems[0]) == (name == "32B")


def test_a_real_start_refuses_before_it_reads_anything() -> None:
    result = start("14B", "trainer.nnodes=null")
    assert result.returncode == 2
    assert "training.context_parallel_size=2: this version trains with 1" in result.stderr


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_job_of_another_size_than_planned(num_ranks: int) -> None:
    """Both numbers, and for lone ranks the usual cause."""
    result = start("7B", num_ranks=num_ranks)
    assert result.returncode == 2
    assert f"2 x 8 = 16, but this MPI world has {num_ranks} rank(s)" in result.stderr
    assert ("srun without --mpi=pmix" in result.stderr) == (num_ranks == 1)
    assert result.stderr.count("rollpacker train: ") == 1


def test_missing_inputs_are_named_at_once() -> None:
    result = start("7B", "--dry-run")
    assert result.returncode == 2
    assert "model.path=models/Qwen2.5-7B (a folder" in result.stderr
    assert "data.train_files=data/train.jsonl" in result.stderr


def test_an_incomplete_download_is_found(models: Path, tmp_path: Path) -> None:
    folder = write_qwen_folder(tmp_path / "cut", "7B", tokenizer_of=DEMO / "model")
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    result = start("7B", "--dry-run", f"model.path={folder}", f"data.train_files={DEMO / 'train.jsonl'}")
    assert result.returncode == 2
    assert "cannot be read as safetensors" in result.stderr


def test_a_suggested_config_is_good(models: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "suggested.yaml")
    program = [sys.executable, "-m", "rollpacker"]
    job = ["--model", str(models / "7B"), "--gpus", "16", "--train-batch-size", "16", "--n", "4"]
    suggested = run([*program, "suggest", *job, "--out", out, "workload.num_prompts=64"], timeout_s=60)
    assert suggested.returncode == 0, suggested.stderr
    result = run([*program, "train", out, "--dry-run", f"data.train_files={DEMO / 'train.jsonl'}"], timeout_s=60)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "ranks     16 on cuda, 2 node(s) of 8" in result.stdout and result.stdout.count("fits, ") == 2
    assert result.stdout.endswith("The config is good; nothing was started or written.\n")
