"""Validation during training and `rollpacker eval`, on two ranks: what they say, and that training does not notice.

Two deterministic runs of the same seed in the same folder, rollout TP 2: the first one without validation, the second
one with it before step 1 and after each step. Then the second run's model is evaluated by itself.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import DEMO, evaluate, read_jsonl, train

from rollpacker.runtime.val_core import Attempt, val_core

sys.path.insert(0, str(Path(__file__).parents[1]))

from logger_files import tensorboard_steps, wandb_steps

# What depends on the clock and not on the samples.
TIMES = ("timing_s/", "perf/", "bubble/")
STEPS = 3
NUM_TRAIN, NUM_VAL = 64, 12
REWARD = """
def score(response, *, prompt_id, domain, **_):
    if prompt_id == "train:2" and domain == "odd": raise ValueError("this one fails in validation alone")
    return len(response) % 4 / 3
def extract_answer(response):
    return response[-1:] or None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompt files whose ids collide, and a reward."""
    folder = tmp_path_factory.mktemp("validation")
    rows = read_jsonl(DEMO / "train.jsonl")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:NUM_TRAIN]))
    val = [
        {**row, "id": f"train:{n}", "domain": ("even", "odd")[n % 3 == 2]}
        for n, row in enumerate(rows[100 : 100 + NUM_VAL])
    ]
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in val))
    (folder / "reward.py").write_text(REWARD)
    return folder


def settings(folder: Path) -> list[str]:
    return [
        f"data.train_files={folder / 'train.jsonl'}",
        "data.train_batch_size=8",
        "data.max_response_length=60",
        f"reward.function={folder / 'reward.py'}:score",
        "rollout.n=4",
        "training.lr=1e-3",  # so that a step or two show in what is decoded
        "rollout.val_kwargs={n: 3, temperature: 0.8, top_k: 12}",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    """The run with validation; `<run_dir>.1` is the one without."""
    arguments = [
        *settings(folder),
        "trainer.deterministic=true",
        f"trainer.total_training_steps={STEPS}",
        "rollout.tensor_model_parallel_size=2",
    ]
    without = train(2, *arguments, "data.val_files=[]", "trainer.save_freq=0")
    assert without.returncode == 0, without.stderr[-3000:]
    assert "never: data.val_files is empty" in without.stdout and "\nval " not in without.stdout
    assert not (folder / "run" / "validation.jsonl").exists()
    validated = train(
        2,
        *arguments,
        f"data.val_files={folder / 'val.jsonl'}",
        "trainer.test_freq=2",
        "trainer.val_before_train=true",
        f"trainer.validation_data_dir={folder / 'dump'}",
        "trainer.logger=[console, tensorboard, wandb]",
        "trainer.wandb_mode=offline",
    )
    assert validated.returncode == 0, validated.stderr[-3000:]
    assert "12 prompts x 3 responses, before step 1 and every 2 steps and at the end" in validated.stdout
    assert validated.stdout.count("\nval  ") == 3 and "val    2/3  avg@3 " in validated.stdout
    assert "this one fails in validation alone" in validated.stdout
    assert "earlier run" in validated.stdout
    return folder / "run"


@pytest.fixture(scope="module")
def evaluated(folder: Path, run_dir: Path) -> dict[str, Any]:
    """The row of an evaluation of the exported model; rollout TP 1 on two replicas this time."""
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    result = evaluate(
        2,
        *settings(folder),
        f"data.val_files={folder / 'val.jsonl'}",
        f"model.path={run_dir / 'checkpoints' / f'step_{STEPS}' / 'huggingface'}",
        "training.tensor_model_parallel_size=8",  # nothing is trained
        f"trainer.validation_data_dir={folder / 'dump'}",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "TP 1 x 2 replica(s)" in result.stdout and "2 failed rewards" not in result.stdout
    for text in ("domain", "avg@3", "maj@3", "pass@1", "pass@2", "pass@3", "even", "odd", "all", "3 failed rewards"):
        assert text in result.stdout, text
    log = run_dir / "validation.jsonl"
    assert log.read_bytes().startswith(before.pop(log))  # appended; everything else is as it was
    assert {p: p.read_bytes() for p in before} == before
    row: dict[str, Any] = read_jsonl(log)[-1]
    return row


def core(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("val-core/")}


def test_training_is_the_same_with_and_without_validation(run_dir: Path) -> None:
    """Every metric but times, every sample with its virtual times: the deterministic runs also repeat."""
    without, validated = (read_jsonl(Path(f"{run_dir}{end}") / "metrics.jsonl") for end in (".1", ""))
    assert len(without) == len(validated) == STEPS
    for a, b in zip(without, validated, strict=True):
        assert not {k for k in a if a[k] != b[k] and not k.startswith(TIMES)}
    assert (Path(f"{run_dir}.1") / "samples.jsonl").read_bytes() == (run_dir / "samples.jsonl").read_bytes()
    assert max(row["training/rollout_logprobs_diff_max"] for row in validated) <= 1e-4
    assert all(row["reward/error_count"] == 0 for row in validated)  # the validation's failures are not the step's


def test_each_validation_has_a_row(run_dir: Path) -> None:
    rows = read_jsonl(run_dir / "validation.jsonl")[:3]
    assert [(row["step"], row["weight_version"]) for row in rows] == [(0, 0), (2, 2), (3, 3)]
    assert rows[0].keys() == rows[1].keys() == rows[2].keys()
    for row in rows:
        assert row["model_path"] == "assets/demo/model"
        assert (row["num_prompts"], row["num_responses"], row["num_overlong_prompts"]) == (NUM_VAL, 3 * NUM_VAL, 0)
        assert (row["val-aux/even/num_prompts"], row["val-aux/odd/num_prompts"]) == (8, 4)
        assert row["reward/error_count"] == 3  # one prompt, all of its responses
        assert row["response_length/max"] <= 60 and row["timing_s/testing"] > 0
        assert {name.split("/")[1] for name in core(row)} == {"even", "odd", "all"}
    assert rows[0]["response_length/mean"] != rows[2]["response_length/mean"]  # other weights, other responses
    timings = [row["timing_s/testing"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert timings[0] is None and timings[1] == pytest.approx(rows[1]["timing_s/testing"], abs=0.5) and timings[2] > 0


def test_the_metrics_are_those_of_the_dumped_responses(folder: Path, run_dir: Path) -> None:
    for row in read_jsonl(run_dir / "validation.jsonl")[:3]:
        responses = read_jsonl(folder / "dump" / f"{row['step']}.jsonl")
        assert Counter(r["prompt_id"] for r in responses) == {f"train:{n}": 3 for n in range(NUM_VAL)}
        groups: dict[str, list[dict[str, Any]]] = {}
        for r in responses:
            groups.setdefault(r["prompt_id"], []).append(r)
            failed = r["prompt_id"] == "train:2"
            assert r["score"] == (0.0 if failed else len(r["response"]) % 4 / 3)
            assert r["answer"] == (None if failed else r["response"][-1:] or None)
            assert r["num_response_tokens"] == len(r["response"]) + (r["finish_reason"] == "stop")
        expected = val_core(
            [(g[0]["domain"], [Attempt(r["score"], r["answer"]) for r in g]) for g in groups.values()], 3
        )
        assert core(row) == expected
        assert sum(r["num_response_tokens"] for r in responses) / 36 == pytest.approx(row["response_length/mean"])


def test_an_evaluation_of_the_export_repeats_the_last_validation(
    folder: Path, run_dir: Path, evaluated: dict[str, Any]
) -> None:
    """Same weights, same noise, token for token, in another process on another rollout shape."""
    last = read_jsonl(run_dir / "validation.jsonl")[2]
    assert core(evaluated) == core(last)
    assert (evaluated["step"], evaluated["weight_version"]) == (None, None)
    assert evaluated["model_path"].endswith(f"step_{STEPS}/huggingface")
    trained, again = (read_jsonl(folder / "dump" / name) for name in (f"{STEPS}.jsonl", "eval.jsonl"))
    assert [{**r, "step": None} for r in trained] == again


def test_loggers_get_the_validations(run_dir: Path) -> None:
    rows = read_jsonl(run_dir / "validation.jsonl")[:3]
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    for seen in (wandb_steps(run_dir), tensorboard_steps(run_dir)):
        assert sorted(seen) == [0, 1, 2, 3]
        for row in rows:
            assert core(seen[row["step"]]) == pytest.approx(core(row))
        assert core(seen[1]) == {}
        assert seen[3]["actor/grad_norm"] == pytest.approx(metrics[2]["actor/grad_norm"])


def test_the_trace_shows_the_validations(run_dir: Path) -> None:
    events = json.loads((run_dir / "events.trace.json").read_text())["traceEvents"]
    names = Counter(e["name"] for e in events if e["ph"] == "X")
    assert names["testing"] == 3 * 2  # on both ranks
    assert sum(count for name, count in names.items() if "/" in name) == STEPS * 32 + 3 * 36


def test_dry_run_of_an_evaluation_writes_nothing(folder: Path) -> None:
    out = folder / "nothing"
    result = evaluate(1, "--dry-run", f"trainer.default_local_dir={out}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "nothing was started or written" in result.stdout and "64 usable" in result.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "message"),
    [
        (1, ["data.val_files=[]"], "data.val_files is empty: name at least one .jsonl or .parquet file"),
        (2, ["data.val_files=absent.jsonl"], "data.val_files: absent.jsonl: no such file"),
        (1, ["rollout.val_kwargs.k=3"], "unknown key rollout.val_kwargs.k"),
        (1, ["rollout.tensor_model_parallel_size=2"], "does not divide the 1 rank(s)"),
        (1, ["trainer.default_local_dir={tmp}/file/run"], "is a file"),
        (1, ["trainer.validation_data_dir={tmp}"], "holds the responses of an earlier validation"),
    ],
)
def test_bad_input_of_an_evaluation_is_one_paragraph_and_exit_2(
    tmp_path: Path, num_ranks: int, overrides: list[str], message: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "eval.jsonl").write_text("")
    run_dir = tmp_path / "run"
    overrides = [o.replace("{tmp}", str(tmp_path)) for o in overrides]
    result = evaluate(num_ranks, f"trainer.default_local_dir={run_dir}", *overrides)
    assert result.returncode == 2, result.stderr[-3000:]
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("rollpacker eval:") == 1
    assert not run_dir.exists()
