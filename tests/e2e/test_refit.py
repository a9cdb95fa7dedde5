"""weights.refit as a user sets it: csrc trains exactly what golden trains, and never falls back."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, read_jsonl, run, train, train_command

STEPS = 3
TIMES = ("timing_s/", "perf/", "bubble/")
SETTINGS = [
    "data.train_batch_size=8",
    "rollout.n=4",
    "rollout.tensor_model_parallel_size=2",
    "training.pipeline_model_parallel_size=2",
    "training.lr=1e-3",  # so that stale weights would show
    f"trainer.total_training_steps={STEPS}",
    "trainer.deterministic=true",
    "trainer.save_freq=0",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Training PP 2, rollout TP 2: all of a layer's weights come from one rank, each half of them goes to the other."""
    folders = {refit: tmp_path_factory.mktemp("refit") / refit for refit in ("golden", "csrc")}
    for refit, folder in folders.items():
        options = [f"weights.refit={refit}", "weights.check_freq=1", f"trainer.default_local_dir={folder}"]
        result = train(2, *SETTINGS, *options)
        assert result.returncode == 0, result.stderr[-3000:]
    return folders


def test_both_refits_train_the_same(runs: dict[str, Path]) -> None:
    def rows(refit: str) -> list[dict[str, Any]]:
        found = read_jsonl(runs[refit] / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in found]

    assert rows("csrc") == rows("golden")
    assert len(rows("csrc")) == STEPS
    assert read_jsonl(runs["csrc"] / "samples.jsonl") == read_jsonl(runs["golden"] / "samples.jsonl")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.refit=csrc", "rollout.weight_noise=0.1"], "set weights.refit=golden"),
        (["weights.refit=csrc", "weights.bucket_mib=0"], "weights.bucket_mib=0: must be at least 1"),
    ],
)
def test_mistakes_are_one_paragraph(overrides: list[str], message: str) -> None:
    result = train(1, *overrides, "--dry-run")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def train_after(folder: Path, statements: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`rollpacker train` with csrc in a Python that has run these statements first."""
    (folder / "sitecustomize.py").write_text(statements)
    path = os.pathsep.join([str(folder), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    return run(["env", f"PYTHONPATH={path}", *train_command(1, "weights.refit=csrc", *arguments)])


MODULE = "sys.modules['rollpacker.weights._reshard']"


@pytest.mark.parametrize(
    ("statements", "device", "message"),
    [
        (f"import sys; {MODULE} = None", "cpu", "needs the extension rollpacker.weights._reshard"),
        (
            f"import sys, types; {MODULE} = types.SimpleNamespace(WITH_CUDA=False)",
            "cuda",
            "the extension rollpacker.weights._reshard was built without CUDA",
        ),
    ],
    ids=["missing", "without CUDA"],
)
def test_a_dry_run_refuses_an_extension_that_cannot_run(
    tmp_path: Path, statements: str, device: str, message: str
) -> None:
    """A module of that name, found before the real one."""
    result = train_after(tmp_path, statements, f"trainer.device={device}", "--dry-run")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_replay_needs_no_extension(tmp_path: Path) -> None:
    """It has no engine to refit: what stops this one is its dump, which is empty."""
    result = train_after(tmp_path, f"import sys; {MODULE} = None", f"rollout.replay={tmp_path}", "--dry-run")
    assert result.returncode == 2
    assert "no step_* folder" in result.stderr


def test_an_engine_of_another_layout_leaves_the_earlier_run_in_place(tmp_path: Path) -> None:
    """As if this vLLM padded the vocabulary otherwise than the layout table says."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    statements = "from rollpacker.weights import layout; layout._ENGINE_VOCAB_MULTIPLE = 1 << 12"
    result = train_after(tmp_path, statements, f"trainer.default_local_dir={folder}")
    assert result.returncode != 0
    assert re.search(r"vLLM's model\.embed_tokens\.weight has \d+ elements on rank 0, the layout table", result.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "sitecustomize.py"]
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
