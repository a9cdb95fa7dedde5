from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from rollpacker.config import ConfigError
from rollpacker.profiling.rows import length_metrics, spread
from rollpacker.runtime.metrics import (
    METRIC_NAMES,
    SAMPLE_FIELDS,
    MetricsWriter,
    append_validation,
    file_sizes,
    prepare_run_dir,
    resume_run_dir,
)

# The "Metric names" paragraph of docs/metrics.md, without `val-core/*`.
SPEC_NAMES = """
training/{global_step,epoch} timing_s/{step,gen,reward,old_log_prob,ref,update_actor,update_weights,save_checkpoint,testing}
response_length/{mean,max,min,p50,p95,p99,clip_ratio} critic/{score,rewards,advantages}/{mean,max,min}
actor/{pg_loss,kl_loss,pg_clipfrac,ppo_kl,entropy,grad_norm,lr,num_updates} training/rollout_probs_diff_{mean,max}
training/rollout_logprobs_diff_{mean,max} mismatch/{kl,k3_kl,weight_mean,effective_sample_size,masked_ratio}
perf/{throughput,total_num_tokens,time_per_step}
rollout/{is_long_round,long_queue_len,aborted_prompts,aborted_responses,wasted_token_ratio,num_preemptions,tensor_model_parallel_size}
filter/{num_launched,num_rejected} bubble/{rollout,reward,train,sync}_ratio
stream/{num_groups_streamed,scale_down_progress,overlap_s} planner/{tp,switched}
reward/{timeout_count,error_count,timeout_budget_s}
audit/{icc,coverage_p50,coverage_p90,coverage_p95,coverage_p99,own_coverage_p95,num_groups}
exact/{num_copies,num_rejected,num_forced}
"""


def expand(pattern: str) -> list[str]:
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def rows_of(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in (run_dir / name).read_text().splitlines()]


def sample(**changes: object) -> dict:
    row = dict.fromkeys(SAMPLE_FIELDS, 1)
    return {**row, "prompt_id": "p-\u00e9", "round": "short", "domain": "maths", "finish_reason": "stop", **changes}


def test_metric_names_are_those_of_the_spec() -> None:
    assert list(METRIC_NAMES) == [name for pattern in SPEC_NAMES.split() for name in expand(pattern)]
    assert len(set(METRIC_NAMES)) == len(METRIC_NAMES)


def test_each_row_has_every_key_and_is_on_disk_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"training/global_step": 1, "actor/lr": 1e-6, "actor/pg_loss": float("nan"), "planner/tp": None})
    first = rows_of(tmp_path)  # before close
    writer.write({"training/global_step": np.int64(2), "actor/lr": np.float32(0.5), "perf/throughput": float("inf")})
    writer.close()
    writer.close()
    rows = rows_of(tmp_path)
    assert rows[:1] == first and len(rows) == 2
    assert all(tuple(row) == METRIC_NAMES for row in rows)
    assert rows[0]["actor/lr"] == 1e-6 and rows[0]["actor/pg_loss"] is None and rows[0]["planner/tp"] is None
    assert (rows[1]["training/global_step"], rows[1]["actor/lr"], rows[1]["perf/throughput"]) == (2, 0.5, None)


def test_booleans_become_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"training/global_step": 1, "rollout/is_long_round": True, "planner/switched": np.bool_(False)})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert '"rollout/is_long_round": 1' in line and '"planner/switched": 0' in line


def test_wrong_rows_are_refused_and_not_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=r"actor/grad_nrom.*Did you mean actor/grad_norm"):
        writer.write({"training/global_step": 1, "actor/grad_nrom": 1.0})
    with pytest.raises(TypeError, match="actor/lr='fast'"):
        writer.write({"training/global_step": 1, "actor/lr": "fast"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="global_step=None"):
        writer.write({"actor/lr": 1.0})
    writer.write({"training/global_step": 1})
    with pytest.raises(ValueError, match="global_step=1"):
        writer.write({"training/global_step": 1})
    assert len(rows_of(tmp_path)) == 1


def test_samples_have_the_fields_of_the_spec_in_order(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write_samples([sample(reward=0.5), dict(reversed(sample(reward=float("nan")).items()))])
    rows = rows_of(tmp_path, "samples.jsonl")
    assert [tuple(row) for row in rows] == [SAMPLE_FIELDS, SAMPLE_FIELDS]
    assert [row["reward"] for row in rows] == [0.5, None] and rows[0]["prompt_id"] == "p-\u00e9"
    incomplete = sample()
    del incomplete["epoch"]
    with pytest.raises(ValueError, match=r"missing \['epoch'\], unknown \['epoc'\]"):
        writer.write_samples([{**incomplete, "epoc": 0}])
    assert len(rows_of(tmp_path, "samples.jsonl")) == 2


def test_loggers_get_the_finite_values_of_steps_and_validations(tmp_path: Path) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[tuple[int, dict[str, float]]] = []
            self.num_closed = 0

        def write(self, step: int, values: Mapping[str, float]) -> None:
            self.seen.append((step, dict(values)))

        def close(self) -> None:
            self.num_closed += 1

    recorder = Recorder()
    writer = MetricsWriter(tmp_path, [recorder])
    writer.write_validation({"step": 0, "model_path": "m", "val-core/x/avg@1": 0.25, "num_prompts": 3})
    writer.write({"training/global_step": 1, "actor/lr": 0.5, "actor/pg_loss": float("nan")})
    writer.close()
    assert recorder.seen == [(0, {"val-core/x/avg@1": 0.25}), (1, {"training/global_step": 1, "actor/lr": 0.5})]
    assert recorder.num_closed == 1


def test_validation_rows_are_appended_and_on_disk_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    row = {"step": 0, "weight_version": np.int64(0), "model_path": "m-\u00e9", "val-core/x/avg@1": np.float32(0.25)}
    writer.write_validation(row)
    written = append_validation(tmp_path, {**row, "step": None, "timing_s/testing": float("nan")})
    assert written["timing_s/testing"] is None
    assert rows_of(tmp_path, "validation.jsonl") == [
        {"step": 0, "weight_version": 0, "model_path": "m-\u00e9", "val-core/x/avg@1": 0.25},
        written,
    ]
    assert append_validation(tmp_path / "new" / "run", row)["step"] == 0  # where nothing has run yet
    assert prepare_run_dir(tmp_path / "new" / "run", "") is None  # an evaluation alone is no run to move aside


def test_importing_metrics_needs_neither_tensorboard_nor_torch() -> None:
    code = (
        "import sys, rollpacker.runtime.metrics; sys.exit(bool({'tensorboard', 'torch', 'rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_run_dir_is_created_with_its_config(tmp_path: Path) -> None:
    assert prepare_run_dir(tmp_path / "a" / "run", "model: {}\n") is None
    assert (tmp_path / "a" / "run" / "config.yaml").read_text() == "model: {}\n"
    assert prepare_run_dir(str(tmp_path / "a" / "run"), "second\n") is None  # no metrics yet: not a run
    assert (tmp_path / "a" / "run" / "config.yaml").read_text() == "second\n"


def test_a_resumed_run_dir_has_what_its_checkpoint_knew(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("1\n")
    sizes = file_sizes(tmp_path)
    assert sizes == {"metrics.jsonl": 2, "samples.jsonl": 2}
    for name in ("metrics.jsonl", "samples.jsonl", "validation.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write("2\n")
    resume_run_dir(tmp_path, "new: {}\n", sizes)
    assert file_sizes(tmp_path) == {"metrics.jsonl": 2, "samples.jsonl": 2, "validation.jsonl": 0}
    assert (tmp_path / "config.yaml").read_text() == "new: {}\n"


def test_a_run_dir_that_lost_rows_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("1\n2\n")
    (tmp_path / "samples.jsonl").write_text("1\n")
    with pytest.raises(ConfigError, match=r"samples.jsonl has 2 bytes, but 4 when the checkpoint was written"):
        resume_run_dir(tmp_path, "new: {}\n", {"metrics.jsonl": 2, "samples.jsonl": 4})
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n"
    assert not (tmp_path / "config.yaml").exists()


def test_an_earlier_run_is_moved_aside_whole_to_the_first_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.2").mkdir()
    for number in (None, 1, 3, 4):  # 2 is taken
        moved = prepare_run_dir("run/", f"config {number}")
        assert moved == (None if number is None else tmp_path / f"run.{number}")
        MetricsWriter(Path("run")).close()
        (tmp_path / "run" / "mark").write_text(str(number))
    assert (tmp_path / "run.1" / "mark").read_text() == "None"
    assert (tmp_path / "run.1" / "config.yaml").read_text() == "config None"
    assert sorted(p.name for p in (tmp_path / "run.4").iterdir()) == [
        "config.yaml",
        "mark",
        "metrics.jsonl",
        "samples.jsonl",
    ]


@pytest.mark.parametrize("path", ["file", "file/run", "file/a/run"])
def test_a_file_in_the_way_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.*file is a file.*choose another"):
        prepare_run_dir(tmp_path / path, "")


def test_a_directory_that_cannot_be_written_is_a_config_error() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("needs a file system that refuses even root")
    with pytest.raises(ConfigError, match="cannot write there"):
        prepare_run_dir("/proc/rollpacker/run", "")


def test_length_metrics_on_known_lengths() -> None:
    got = length_metrics(list(range(1, 101)), cap=100)
    assert got == pytest.approx(
        {
            "response_length/mean": 50.5,
            "response_length/max": 100,
            "response_length/min": 1,
            "response_length/p50": 50.5,
            "response_length/p95": 95.05,
            "response_length/p99": 99.01,
            "response_length/clip_ratio": 0.01,
        }
    )
    assert got.keys() <= set(METRIC_NAMES)
    assert set(length_metrics([], cap=8).values()) == {None}


def test_spread_on_known_values() -> None:
    assert spread("critic/rewards", [0.0, 1.0, 0.5]) == {
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
    }
    assert set(spread("critic/advantages", []).values()) == {None}
