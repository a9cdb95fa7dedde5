"""tail_batching.mode=paper as a user starts it: it repeats, it defers, it says what it does to the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import read_jsonl, train

STEPS = 12
PAPER = [
    "tail_batching.mode=paper",
    "tail_batching.audit_fraction=0.2",
    "data.train_batch_size=8",
    "rollout.n=4",
    f"trainer.total_training_steps={STEPS}",
    "trainer.deterministic=true",
    "trainer.save_freq=0",
]
TIMES = ("timing_s/", "perf/", "bubble/")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same run twice, the second without any log: what is written down must not change what is done."""
    folders = [tmp_path_factory.mktemp("paper") / name for name in ("first", "second")]
    for folder, quiet in zip(folders, ([], ["trainer.logger=[]", "profiler.trace=false"]), strict=True):
        result = train(2, *PAPER, *quiet, f"trainer.default_local_dir={folder}")
        assert result.returncode == 0, result.stderr[-3000:]
    return folders


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "metrics.jsonl")


def test_deterministic_tail_batching_repeats_exactly(runs: list[Path]) -> None:
    """Sample ids, rewards, losses: everything but the clock."""
    first, second = ([{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in rows(f)] for f in runs)
    assert first == second
    assert read_jsonl(runs[0] / "samples.jsonl") == read_jsonl(runs[1] / "samples.jsonl")
    assert [(f / "events.trace.json").exists() for f in runs] == [True, False]


def test_rounds_are_short_and_long(runs: list[Path]) -> None:
    samples = read_jsonl(runs[0] / "samples.jsonl")
    lengths: dict[str, list[int]] = {"short": [], "long": []}
    for row in rows(runs[0]):
        mine = [s for s in samples if s["step"] == row["training/global_step"]]
        kind = "long" if row["rollout/is_long_round"] else "short"
        assert {s["round"] for s in mine} == {kind}
        assert all(s["launch_s"] < s["finish_s"] for s in mine)
        lengths[kind] += [s["num_response_tokens"] for s in mine]
        if kind == "short":
            assert len(mine) == 8 * 4
            assert row["filter/num_launched"] == 10 * 5
            assert row["rollout/aborted_responses"] > 0
            assert row["rollout/wasted_token_ratio"] > 0
        else:
            assert row["rollout/aborted_responses"] == row["rollout/wasted_token_ratio"] == 0
        assert row["training/rollout_logprobs_diff_max"] <= 1e-4
    assert lengths["long"]
    assert sum(lengths["long"]) / len(lengths["long"]) > sum(lengths["short"]) / len(lengths["short"])


def test_no_prompt_is_trained_twice_in_its_epoch(runs: list[Path]) -> None:
    """The cap includes the drain: at the end the queue is empty, or what is left of it has been reported."""
    seen: dict[tuple[str, int], set[int]] = {}
    for s in read_jsonl(runs[0] / "samples.jsonl"):
        seen.setdefault((s["prompt_id"], s["epoch"]), set()).add(s["step"])
    assert all(len(steps) == 1 for steps in seen.values())
    last = rows(runs[0])[-1]
    assert last["training/global_step"] == STEPS
    assert last["rollout/long_queue_len"] == 0
