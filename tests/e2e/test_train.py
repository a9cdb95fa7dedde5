"""The whole program as a user starts it: mpirun, two ranks, the demo's model. `make env` has made that model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import DEMO, REPOSITORY, read_jsonl, run, train

STEPS = 24
# A larger learning rate than the demo's, so that a few steps are enough to see the reward rise.
LEARN = [f"trainer.total_training_steps={STEPS}", "training.lr=3e-4", "training.min_lr=1e-4"]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the demo on two ranks, its samples dumped; the run directory."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    result = train(2, *LEARN, f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}.dump")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "step  24/24" in result.stdout and "metrics.jsonl" in result.stdout
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "metrics.jsonl")


def test_reward_rises(demo_run: Path) -> None:
    rewards = [row["critic/rewards/mean"] for row in metrics(demo_run)]
    first, last = sum(rewards[:6]) / 6, sum(rewards[-6:]) / 6
    assert last > first + 0.05, rewards


def test_rollout_and_training_agree_on_every_token(demo_run: Path) -> None:
    rows = metrics(demo_run)
    assert [row["training/global_step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["training/rollout_logprobs_diff_max"] for row in rows) <= 1e-4
    assert all(row["training/rollout_logprobs_diff_max"] > 0 for row in rows)  # two programs did compute them
    assert all(row["actor/pg_clipfrac"] == 0 for row in rows)  # one optimizer step per rollout: the ratio is 1


def test_every_row_has_every_key(demo_run: Path) -> None:
    from rollpacker.runtime.metrics import METRIC_NAMES

    assert all(set(row) == set(METRIC_NAMES) for row in metrics(demo_run))


def test_samples_account_for_every_response(demo_run: Path) -> None:
    samples = read_jsonl(demo_run / "samples.jsonl")
    assert len(samples) == STEPS * 16 * 8
    for row in metrics(demo_run):
        mine = [s for s in samples if s["step"] == row["training/global_step"]]
        assert len({(s["prompt_id"], s["response_index"]) for s in mine}) == 128
        tokens = sum(s["num_response_tokens"] + s["num_prompt_tokens"] for s in mine)
        assert tokens == row["perf/total_num_tokens"]
        assert sum(s["reward"] for s in mine) / 128 == pytest.approx(row["critic/rewards/mean"])
        assert all(s["weight_version"] == s["step"] - 1 and s["finish_s"] >= s["launch_s"] for s in mine)
        assert {s["finish_reason"] for s in mine} <= {"stop", "length"}


def test_the_trace_shows_every_request_on_its_rank(demo_run: Path) -> None:
    events = json.loads((demo_run / "events.trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    requests = [e for e in bars if names[e["pid"], e["tid"]].startswith("request")]
    assert len(requests) == STEPS * 128
    assert {e["pid"] for e in requests} == {0, 1}
    stages = {e["name"] for e in bars if names[e["pid"], e["tid"]].startswith("stage")}
    assert {"gen", "update_actor", "update_weights"} <= stages


def test_the_export_is_a_model_that_transformers_runs(demo_run: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_run / "checkpoints" / f"step_{STEPS}" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("47%6=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    before = load_file(DEMO / "model" / "model.safetensors")
    after = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[k], after[k]) for k in before)  # it did learn


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (1, []),
        (2, ["training.tensor_model_parallel_size=2"]),
        (2, ["training.pipeline_model_parallel_size=2"]),
        (2, ["training.max_tokens_per_gpu=600", "training.use_distributed_optimizer=false"]),
    ],
    ids=["one-rank", "tp2", "pp2", "small-micro-batches"],
)
def test_a_replay_gives_the_same_losses_on_any_shape(
    demo_run: Path, tmp_path: Path, num_ranks: int, overrides: list[str]
) -> None:
    """The same samples, three optimizer steps: loss, gradient norm and entropy as in the run that decoded them."""
    result = train(
        num_ranks,
        *LEARN,
        "trainer.total_training_steps=3",
        "training.lr_decay_style=constant",
        f"rollout.replay={demo_run}.dump",
        f"trainer.default_local_dir={tmp_path / 'replay'}",
        *overrides,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    live, replay = metrics(demo_run)[0], metrics(tmp_path / "replay")
    assert len(replay) == 3
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert replay[0][name] == pytest.approx(live[name], rel=1e-5, abs=1e-7), name
    assert replay[0]["critic/rewards/mean"] == live["critic/rewards/mean"]
    assert replay[0]["training/rollout_logprobs_diff_max"] <= 1e-4


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = train(1, "--dry-run", f"trainer.default_local_dir={folder}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "nothing was started or written" in result.stdout
    assert "0.7 M parameters" in result.stdout
    assert not folder.exists()


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "message"),
    [
        (1, ["rollout.temprature=1"], "Did you mean rollout.temperature?"),
        (1, ["training.tensor_model_parallel_size=2"], "2 x 1 = 2 does not divide the 1 rank(s)"),
        (2, ["training.tensor_model_parallel_size=4"], "4 x 1 = 4 does not divide the 2 rank(s)"),
        (1, ["trainer.device=cuda"], "torch sees no GPU"),
        (1, ["model.path=nowhere"], "there is no such folder"),
        (1, ["model.path=configs"], "it has no config.json"),
        (1, ["data.train_files=nowhere.jsonl"], "nowhere.jsonl"),
        (2, ["data.train_files={tmp}/bad.jsonl"], "bad.jsonl:2"),
        (1, ["data.val_files=absent.jsonl"], "data.val_files: absent.jsonl: no such file"),
        (1, ["reward.function={tmp}/reward.py:absent"], "absent"),
        (1, ["rollout.replay={tmp}"], "no step_* folder"),
        (1, ["trainer.default_local_dir={tmp}/bad.jsonl/run"], "is a file"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_2(
    tmp_path: Path, num_ranks: int, overrides: list[str], message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1%2=", "answer": "0#1"}\n{"prompt": \n')
    (tmp_path / "reward.py").write_text("def score(response, **_):\n    return 0.0\n")
    folder = tmp_path / "run"
    overrides = [o.replace("{tmp}", str(tmp_path)) for o in overrides]
    result = train(num_ranks, f"trainer.default_local_dir={folder}", *overrides)
    ours = [line for line in result.stderr.splitlines() if line.startswith("rollpacker")]
    assert result.returncode == 2, result.stderr[-3000:]
    assert len(ours) == 1 and message in ours[0], result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    assert not folder.exists()


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = train(1, f"model.path={tmp_path / 'model'}")
    assert result.returncode == 2
    assert "GPT2LMHeadModel is not supported. Supported: Qwen2ForCausalLM" in result.stderr


def test_help_needs_nothing() -> None:
    result = run([str(REPOSITORY / ".venv/bin/rollpacker"), "--help"])
    assert result.returncode == 0 and "train" in result.stdout
