"""weights.refit as a user sets it: csrc trains exactly what golden trains, and never falls back."""

from __future__ import annotations

import os
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


def test_a_missing_extension_ends_the_job(tmp_path: Path) -> None:
    """A module of that name which cannot be imported, found before the real one."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['rollpacker.weights._reshard'] = None\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    command = ["env", f"PYTHONPATH={path}", *train_command(1, "weights.refit=csrc", "--dry-run")]
    result = run(command)
    assert result.returncode == 2
    assert "weights.refit=csrc needs the extension rollpacker.weights._reshard" in result.stderr
