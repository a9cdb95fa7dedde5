"""A run that is stopped, killed or damaged goes on as if nothing had been.

Every run here is deterministic and in `paper` mode, so that its metrics (times apart), samples and controller digest can be
compared with those of a run that nobody disturbed, to the last bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import outcome, rank_pids, read_jsonl, train
from test_endings import Job

NUM_STEPS = 8
ARGUMENTS = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.deterministic=true",
    "trainer.save_freq=1",
    "tail_batching.mode=paper",
    "data.train_batch_size=8",
)


def resumed(folder: Path, *arguments: str, num_ranks: int = 2) -> Any:
    result = train(num_ranks, *ARGUMENTS, "trainer.resume_mode=auto", f"trainer.default_local_dir={folder}", *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "undisturbed"
    resumed(folder)
    return folder


def model_bytes(folder: Path) -> bytes:
    (file,) = (folder / "checkpoints" / f"step_{NUM_STEPS}" / "huggingface").glob("*.safetensors")
    return file.read_bytes()


def assert_equal(folder: Path, undisturbed: Path) -> None:
    ours, theirs = outcome(folder), outcome(undisturbed)
    assert [row["training/global_step"] for row in ours["metrics"]] == list(range(1, NUM_STEPS + 1))
    assert ours == theirs
    assert model_bytes(folder) == model_bytes(undisturbed)
    json.loads((folder / "events.trace.json").read_text())  # one trace of both parts, and it opens


def test_a_stopped_run_goes_on_to_the_same_end(tmp_path: Path, undisturbed: Path) -> None:
    """SIGUSR1, which mpirun passes on: no step is lost, the exit code is 3, and the same command goes on."""
    folder = tmp_path / "run"
    job = Job(folder, *ARGUMENTS, "trainer.resume_mode=auto", "trainer.save_freq=-1")
    job.process.send_signal(signal.SIGUSR1)
    code, _, seconds = job.end(timeout_s=60)
    assert (code, seconds < 30) == (3, True)
    job.assert_nothing_is_left()
    stopped_at = outcome(folder)["latest"]
    assert len(read_jsonl(folder / "metrics.jsonl")) == int(stopped_at.removeprefix("step_"))
    result = resumed(folder, "trainer.save_freq=1")
    assert f"{stopped_at}, " in result.stdout
    assert_equal(folder, undisturbed)


def test_a_killed_rank_costs_a_step_at_most(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    job = Job(folder, *ARGUMENTS, "trainer.resume_mode=auto")
    os.kill(rank_pids(folder)[1], signal.SIGKILL)
    code, _, _ = job.end(timeout_s=60)
    assert code not in (0, 2, 3)
    num_rows = len(read_jsonl(folder / "metrics.jsonl"))
    result = resumed(folder)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("resume ")]
    assert int(line.split("step_")[1].split(",")[0]) >= num_rows - 1
    assert_equal(folder, undisturbed)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, undisturbed: Path) -> None:
    """Cut short, and with one byte turned; with no whole one left the run does not start, and says so."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    checkpoints = folder / "checkpoints"
    cut = checkpoints / f"step_{NUM_STEPS}" / "megatron" / "__0_0.distcp"
    os.truncate(cut, cut.stat().st_size - 1)
    turned = checkpoints / f"step_{NUM_STEPS - 1}" / "megatron" / "__1_0.distcp"
    content = bytearray(turned.read_bytes())
    content[len(content) // 2] ^= 1
    turned.write_bytes(content)
    result = resumed(folder)
    assert f"step_{NUM_STEPS - 2}, {NUM_STEPS - 2} steps done" in result.stdout
    assert f"step_{NUM_STEPS} is damaged (megatron/__0_0.distcp: " in result.stdout
    assert f"step_{NUM_STEPS - 1} is damaged (megatron/__1_0.distcp: its checksum differs" in result.stdout
    assert_equal(folder, undisturbed)
    for manifest in checkpoints.glob("step_*/manifest.json"):
        manifest.write_text("{")
    before = sorted(p.stat().st_mtime_ns for p in folder.rglob("*"))
    refused = train(2, *ARGUMENTS, "trainer.resume_mode=auto", f"trainer.default_local_dir={folder}")
    assert refused.returncode == 2
    assert "none is whole" in refused.stderr and "manifest.json cannot be read" in refused.stderr
    assert sorted(p.stat().st_mtime_ns for p in folder.rglob("*")) == before


def test_another_parallel_shape_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    """Saved at DP 2, gone on with at TP 2, in a new run directory; a longer run, and the config's change is told."""
    folder = tmp_path / "run"
    start = undisturbed / "checkpoints" / "step_4"
    result = train(
        2,
        *ARGUMENTS,
        "training.tensor_model_parallel_size=2",
        "trainer.total_training_steps=6",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={start}",
        f"trainer.default_local_dir={folder}",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "training.tensor_model_parallel_size: 1 -> 2" in result.stdout
    rows, theirs = read_jsonl(folder / "metrics.jsonl"), read_jsonl(undisturbed / "metrics.jsonl")
    assert [row["training/global_step"] for row in rows] == [5, 6]
    # The first step's samples come from the same weights on the same noise.
    assert rows[0]["critic/score/mean"] == theirs[4]["critic/score/mean"]
    assert rows[0]["actor/grad_norm"] == pytest.approx(theirs[4]["actor/grad_norm"], rel=1e-5)


def test_what_must_not_change_is_refused(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    result = train(
        1, *ARGUMENTS, "tail_batching.mode=off", "trainer.resume_mode=auto", f"trainer.default_local_dir={folder}"
    )
    assert result.returncode == 2
    assert "tail_batching.mode=off, but the checkpoint" in result.stderr
    result = train(
        1, *ARGUMENTS, "data.shuffle=false", "trainer.resume_mode=auto", f"trainer.default_local_dir={folder}"
    )
    assert result.returncode == 2
    assert "data.shuffle=False, but the checkpoint was saved with True" in result.stderr


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    resumed(folder, "trainer.keep_last=2", "trainer.total_training_steps=4", num_ranks=1)
    found = {path.name for path in (folder / "checkpoints").iterdir()}
    assert found == {"latest", "step_3", "step_4"}
