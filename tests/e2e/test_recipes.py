"""Each recipe runs on the demo model; an engine that samples from another law is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, read_jsonl, run, train

RECIPES = sorted((REPOSITORY / "configs" / "recipes").glob("*.yaml"))
SMALL = ["data.train_batch_size=16", "rollout.n=4", "trainer.total_training_steps=2", "trainer.save_freq=0"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_trains_by_itself(tmp_path: Path, recipe: Path) -> None:
    program = [sys.executable, "-m", "rollpacker", "train", str(recipe), *SMALL]
    result = run([*program, f"trainer.default_local_dir={tmp_path / 'run'}"])
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert second["actor/grad_norm"] > 0
    assert first["training/rollout_logprobs_diff_max"] <= 1e-4
    updates = {"dapo": 2, "gspo": 2}.get(recipe.stem, 1)
    assert first["actor/num_updates"] == second["actor/num_updates"] == updates
    assert (first["timing_s/old_log_prob"] is None) == (recipe.stem not in ("dapo", "gspo", "reinforce_plus_plus"))
    assert (first["timing_s/ref"] is None) == (recipe.stem != "reinforce_plus_plus")
    if recipe.stem == "dapo":  # every group that is trained has something to teach
        samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
        scores: dict[tuple[int, str], set[float]] = {}
        for s in samples:
            scores.setdefault((s["step"], s["prompt_id"]), set()).add(s["reward"])
        assert len(scores) == 32
        assert all(len(values) > 1 for values in scores.values())
        assert first["filter/num_rejected"] + second["filter/num_rejected"] > 0


def test_dynamic_sampling_on_two_ranks_repeats(tmp_path: Path) -> None:
    """Which groups are trained depends on scores alone: the same on one rank, on two, and with rollout TP 2."""
    trained = []
    for ranks, tp in ((1, 1), (2, 1), (2, 2)):
        folder = tmp_path / f"run_{ranks}_{tp}"
        arguments = [*SMALL, "filter.mode=zero_variance", f"rollout.tensor_model_parallel_size={tp}"]
        result = train(ranks, *arguments, f"trainer.default_local_dir={folder}")
        assert result.returncode == 0, result.stderr[-3000:]
        assert read_jsonl(folder / "metrics.jsonl")[0]["filter/num_rejected"] > 0
        trained.append(
            [(s["prompt_id"], s["num_response_tokens"], s["reward"]) for s in read_jsonl(folder / "samples.jsonl")]
        )
    first_step = len(trained[0]) // 2
    assert trained[0][:first_step] == trained[1][:first_step] == trained[2][:first_step]


def test_an_engine_with_noise_on_its_weights_is_seen(tmp_path: Path) -> None:
    result = train(1, *SMALL, "rollout.weight_noise=0.4", f"trainer.default_local_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Set algorithm.mismatch_correction=tis" in result.stdout
    for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert row["mismatch/k3_kl"] > 0.01
        assert row["mismatch/effective_sample_size"] < 0.99
        assert row["training/rollout_logprobs_diff_max"] > 0.1
