"""Whole simulated runs: what adds up, what repeats, what the race does to the samples, and how fast it is."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulated import ROOT, SMALL, setting, small

from rollpacker.cli.main import main
from rollpacker.config import Config, ConfigError
from rollpacker.messages import UpdatePlan
from rollpacker.policy.assembly import build_controller
from rollpacker.policy.controller import StepController
from rollpacker.policy.plain import PlainRollout
from rollpacker.policy.tail_batching import TailBatchScheduler
from rollpacker.runtime.metrics import METRIC_NAMES, SAMPLE_FIELDS
from rollpacker.simulator import run as simulator_run
from rollpacker.simulator.core import SimulatedBackend
from rollpacker.simulator.record import Recorder, StepFacts, Summary
from rollpacker.simulator.run import Simulation
from rollpacker.types import RoundKind


class Steps:
    """Keeps every step."""

    def __init__(self) -> None:
        self.all: list[tuple[UpdatePlan, StepFacts]] = []

    def end_step(self, update: UpdatePlan, facts: StepFacts) -> None:
        self.all.append((update, facts))


def steps_of(config: Config) -> tuple[list[tuple[UpdatePlan, StepFacts]], Simulation]:
    simulation, sink = Simulation(config), Steps()
    backend = SimulatedBackend(config, simulation.cluster, simulation.workload, sink)
    simulator_run.run(config.trainer.total_training_steps, simulation.controller, backend)
    return sink.all, simulation


CONFIGS = st.fixed_dictionaries(
    {
        "tail_batching.mode": st.sampled_from(["off", "paper"]),
        "filter.mode": st.sampled_from(["off", "zero_variance"]),
        "tail_batching.eta_prompts": st.sampled_from([1, 1.25, 1.5]),
        "tail_batching.eta_responses": st.sampled_from([1, 1.25, 1.5]),
        "tail_batching.audit_fraction": st.sampled_from([0, 0.1]),
        "workload.reward": st.sampled_from(["math", "code", "judge"]),
        "reward.timeout_s": st.sampled_from([0.02, 2, 30]),
        "rollout.max_num_seqs": st.sampled_from([2, 5, 256]),
        "rollout.tensor_model_parallel_size": st.sampled_from([1, 2, 4]),
        "rollout.gpu_memory_utilization": st.sampled_from([0.23, 0.85]),
        "planner.policy": st.sampled_from(["fixed", "preemption", "profile"]),
        "stream.enabled": st.sampled_from(["off", "auto"]),
        "stream.rounds": st.sampled_from(["long", "all"]),
        "stream.fetch": st.sampled_from(["stream", "once"]),
        "reward.adaptive_timeout": st.sampled_from(["true", "false"]),
        "reward.min_timeout_s": st.just(0.01),
        "cluster.rewards_after_rollout": st.sampled_from(["true", "false"]),
        "trainer.seed": st.integers(0, 1000),
    }
)


@settings(max_examples=25, deadline=None)
@given(CONFIGS)
def test_tokens_samples_and_gpu_seconds_are_conserved(values: dict[str, Any]) -> None:
    config = small(*(f"{key}={value}" for key, value in values.items()), "data.max_response_length=2048")
    steps, simulation = steps_of(config)
    now_s = simulation.cluster.engine_start_s
    for update, facts in steps:
        done, stats = facts.round, update.stats
        for busy_s, idle_s, freed_s, periods in zip(
            done.busy_s, done.idle_s, done.freed_s, done.busy_periods, strict=True
        ):
            assert busy_s + idle_s + freed_s == pytest.approx(done.wall_s, abs=1e-6)
            assert sum(end - start for start, end in periods) == pytest.approx(busy_s, abs=1e-6)
            assert all(done.launch_s - 1e-9 <= start <= end <= done.end_s + 1e-9 for start, end in periods)
        gpu_s = done.tensor_model_parallel_size * math.fsum((*done.busy_s, *done.idle_s, *done.freed_s))
        assert gpu_s == pytest.approx(simulation.cluster.num_gpus * done.wall_s)
        assert stats.num_tokens_generated == sum(n for _, n, _ in done.finished) + done.num_aborted_tokens
        assert update.num_tokens + stats.num_tokens_wasted == stats.num_tokens_generated
        assert update.num_sequences == sum(len(g.responses) for g in update.groups)
        assert all(done.launch_s <= r.finish_s <= done.end_s for g in update.groups for r in g.responses)
        assert facts.start_s == pytest.approx(now_s)
        now_s = facts.end_s
    trained = Counter(g.prompt.key for update, _ in steps for g in update.groups)
    assert set(trained.values()) == {1}
    if config.filter.mode == "off":
        assert len(trained) == 64


def test_both_worlds_have_the_same_policies() -> None:
    """The simulator's controller is built by the function that a real rank calls (tests/torch/test_same_policies.py)."""
    assert simulator_run.build_controller is build_controller
    plain, paper = (Simulation(small(f"tail_batching.mode={m}")).controller for m in ("off", "paper"))
    assert type(plain) is type(paper) is StepController
    assert (type(plain._composer), type(plain._selection)) == (PlainRollout, PlainRollout)
    assert type(paper._composer) is TailBatchScheduler and paper._composer is paper._selection


def test_the_plain_rollout_trains_what_it_samples() -> None:
    steps, _ = steps_of(small("tail_batching.mode=off"))
    assert len(steps) == 8
    for update, _ in steps:
        assert update.stats.num_tokens_wasted == update.stats.num_aborted_responses == 0
        assert update.num_sequences == 32


def test_a_race_queues_and_long_rounds_serve_the_queue() -> None:
    steps, _ = steps_of(small("tail_batching.mode=paper", "tail_batching.audit_fraction=0"))
    kinds = [update.stats.kind for update, _ in steps]
    assert kinds[:5] == [RoundKind.SHORT] * 4 + [RoundKind.LONG]  # each SHORT round leaves 2 of 10 behind
    assert [len({r.request.replica for g in u.groups for r in g.responses}) for u, _ in steps] == [4] * len(steps)
    assert sum(len(update.groups) for update, _ in steps) == 64


def test_a_late_response_returns_its_prompt_to_the_front() -> None:
    """Lengths that are all equal: every group ends in the step that ends the race, so nothing is long."""
    law = ["workload.preset=null", "workload.median_tokens=64", "workload.sigma_within=0", "workload.sigma_between=0"]
    config = small("tail_batching.mode=paper", "tail_batching.audit_fraction=0", "tail_batching.eta_responses=1", *law)
    steps, _ = steps_of(config)
    first = steps[0][0]
    assert first.stats.long_queue_len == 0 and first.stats.num_aborted_prompts == 2


def test_a_new_tensor_parallel_size_builds_an_engine_once() -> None:
    config = small("tail_batching.mode=off")
    simulation, sink = Simulation(config), Steps()
    backend = SimulatedBackend(config, simulation.cluster, simulation.workload, sink)
    for step, size in enumerate([1, 2, 1, 2], start=1):
        plan = simulation.controller.begin_step(step)
        assert plan is not None
        requests = tuple(dataclasses.replace(r, replica=r.replica // size) for r in plan.requests)
        backend.launch(dataclasses.replace(plan, tensor_model_parallel_size=size, requests=requests))
        for event in backend.events():
            for action in simulation.controller.on(event):
                if hasattr(action, "request"):
                    action = dataclasses.replace(action, request=requests[action.request.index])
                backend.apply(action)
        backend.apply_update(simulation.controller.finish_step())
        backend.sync_weights()
    built = [facts.round.launch_s - facts.start_s for _, facts in sink.all]
    assert built == pytest.approx([0, simulation.cluster.engine_start_s, 0, 0])


# Rollout seconds of arXiv 2509.21009, Fig. 11: the baseline (calibrated by cluster.step_overhead_ms).
@pytest.mark.parametrize(("name", "seconds"), [("7b_8k", 82), ("14b_16k", 277), ("32b_32k", 673)])
def test_the_calibrated_baselines(name: str, seconds: float) -> None:
    config = setting(name, "tail_batching.mode=off", "trainer.total_training_steps=12")
    simulation = Simulation(config)
    recorder = simulation.run()
    assert recorder.totals.rollout_s / recorder.totals.num_rounds == pytest.approx(seconds, rel=0.05)


def test_the_race_selects_as_its_law_says() -> None:
    """Lengths alike in all prompts (ICC 0) and only responses race: a response at quantile F of its prompt is trained in a
    SHORT round with P(Bin(9, F) <= 7), so of the longest 5 % 3 % are left."""
    law = [
        "workload.preset=null",
        "workload.median_tokens=400",
        "workload.sigma_within=0.8",
        "workload.sigma_between=0",
    ]
    config = setting(
        "7b_8k",
        "tail_batching.eta_prompts=1",
        "tail_batching.audit_fraction=0",
        "trainer.total_training_steps=20",
        "rollout.max_num_seqs=1024",
        *law,
    )
    simulation = Simulation(config)
    found = simulation.run().summary(simulation.workload)

    def kept(share: float) -> float:
        return sum(math.comb(9, k) * share**k * (1 - share) ** (9 - k) for k in range(8))

    grid = [0.95 + 0.05 * (i + 0.5) / 1000 for i in range(1000)]
    expected = sum(map(kept, grid)) / 1000 / 0.8
    assert found.own_coverage_p95 == pytest.approx(expected, abs=0.015)
    assert found.coverage_p95 == pytest.approx(expected, abs=0.015)


def test_without_a_race_coverage_is_one() -> None:
    simulation = Simulation(setting("7b_8k", "tail_batching.mode=off", "workload.num_prompts=1920"))
    found = simulation.run().summary(simulation.workload)
    assert found.coverage_p95 == pytest.approx(1, abs=0.12)  # 768 responses are due: a standard error of .036
    assert found.own_coverage_p95 == pytest.approx(1, abs=0.12)
    assert (found.wasted_token_ratio, found.long_round_share) == (0, 0)


def test_128_gpus_are_fast_enough() -> None:
    """100 steps of 512 x 8 may take 60 s on a core; 4 of them, with tail batching, take 1.3 s here."""
    config = setting("7b_8k", "trainer.nnodes=16", "data.train_batch_size=512", "trainer.total_training_steps=4")
    simulation = Simulation(config)
    start = time.process_time()
    simulation.run()
    assert time.process_time() - start < 60 * 4 / 100 * 1.5


def run_cli(*arguments: str) -> int:
    return main(["simulate", str(ROOT / "configs" / "sim" / "7b_8k.yaml"), *SMALL, *arguments])


def test_a_run_directory_is_complete_and_repeats_byte_for_byte(tmp_path: Path, capsys: Any) -> None:
    assert run_cli("--out", str(tmp_path / "a"), "--seed", "7") == 0
    assert run_cli("--out", str(tmp_path / "b"), "trainer.seed=7") == 0
    assert run_cli("--out", str(tmp_path / "c"), "--seed", "8") == 0
    a, b, c = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc")
    assert set(a) == {"config.yaml", "metrics.jsonl", "samples.jsonl", "events.trace.json", "summary.json"}
    assert a == b and all(a[name] != c[name] for name in a)
    rows = [json.loads(line) for line in a["metrics.jsonl"].splitlines()]
    assert all(tuple(row) == METRIC_NAMES for row in rows)
    assert rows[0]["timing_s/step"] > rows[0]["timing_s/gen"] > 0
    samples = [json.loads(line) for line in a["samples.jsonl"].splitlines()]
    assert all(tuple(sample) == SAMPLE_FIELDS for sample in samples) and len(samples) == 64 * 4
    summary = json.loads(a["summary.json"])
    assert list(summary) == [field.name for field in dataclasses.fields(Summary)]
    assert sum(row["timing_s/gen"] for row in rows) / 8 == pytest.approx(summary["rollout_s_per_step"])
    assert sum(row["rollout/is_long_round"] for row in rows) / len(rows) == summary["long_round_share"]
    out = capsys.readouterr().out
    assert "rollout bubble" in out and "coverage c(.95)" in out and "ICC" in out


def test_the_trace_has_the_lanes_of_a_real_run(tmp_path: Path, capsys: Any) -> None:
    run_cli("--out", str(tmp_path / "a"), "tail_batching.mode=off")
    events = json.loads((tmp_path / "a" / "events.trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert {"stage", "engine", "requests 0"} <= lanes
    names = Counter(e["name"] for e in events if e["ph"] == "X" and e["cat"] == "stage" and e["pid"] == 3)
    assert names == {**{f"step_{i}": 1 for i in range(1, 9)}, "gen": 8, "update_actor": 8, "update_weights": 8}
    assert sum(e["ph"] == "X" and e["cat"] == "request" for e in events) == 64 * 4
    capsys.readouterr()


def test_an_earlier_run_is_moved_aside(tmp_path: Path, capsys: Any) -> None:
    for _ in range(2):
        assert run_cli("--out", str(tmp_path / "a"), "trainer.total_training_steps=1") == 0
    assert (tmp_path / "a.1" / "summary.json").exists()
    assert "an earlier run was moved to" in capsys.readouterr().out


def test_a_sweep_is_one_table(tmp_path: Path, capsys: Any) -> None:
    assert run_cli("--sweep", "tail_batching.eta_prompts=1,1.25,1.5", "--out", str(tmp_path / "s")) == 0
    out = capsys.readouterr().out
    assert all(title in out for title in ("ms per sample", "bubble", "waste", "c(.95)", "LONG share"))
    rows = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [row["tail_batching.eta_prompts"] for row in rows] == ["1", "1.25", "1.5"]
    assert rows[0]["wasted_token_ratio"] < rows[1]["wasted_token_ratio"] < rows[2]["wasted_token_ratio"]
    single = json.loads((tmp_path / "s" / "tail_batching.eta_prompts=1.25" / "summary.json").read_text())
    assert {k: rows[1][k] for k in single} == single
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert all((tmp_path / "s" / f"sweep.{kind}").stat().st_size > 5_000 for kind in ("svg", "png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.tensor_model_parallel_size=3"], "does not divide"),
        (["--sweep", "tail_batching.eta_prompts"], "write key=v1,v2"),
        (["--sweep", "tail_batching.eta_prompts=1.25,0.5"], "eta_prompts=0.5: must be at least 1"),
        (["tail_batching.audit_fraction=2"], "must be a share"),
        (["rollout.replay=dump"], "rollout.replay has no engines"),
        (["workload.preset=70b"], "expected one of null, 7b_8k"),
        (["workload.lengths_file=none.csv"], "cannot read none.csv"),
    ],
)
def test_bad_input_is_a_paragraph_and_writes_nothing(
    tmp_path: Path, capsys: Any, arguments: list[str], message: str
) -> None:
    assert run_cli("--out", str(tmp_path / "a"), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("rollpacker simulate: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert run_cli("--out", str(tmp_path / "file")) == 2
    assert f"--out {tmp_path / 'file'}" in capsys.readouterr().err


def test_rolls_names_of_the_race_are_understood() -> None:
    config = small("tail_batching.max_prompts_ratio=1.5", "tail_batching.max_num_return_sequences=6", "rollout.n=4")
    assert (config.tail_batching.eta_prompts, config.tail_batching.eta_responses) == (1.5, 1.5)
    later = small("tail_batching.max_prompts_ratio=1.5", "tail_batching.eta_prompts=1.1")
    assert later.tail_batching.eta_prompts == 1.1  # what comes last counts, under whatever name
    with pytest.raises(ConfigError, match=r"max_num_return_sequences=3: must be at least rollout\.n=4"):
        small("tail_batching.max_num_return_sequences=3")


def test_nothing_trained_has_no_summary() -> None:
    config = small()
    with pytest.raises(ValueError, match="nothing was trained"):
        Recorder(config, 4).summary(Simulation(config).workload)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes"):
        Simulation(small("trainer.nnodes=null"))


def test_neither_torch_nor_mpi_is_loaded() -> None:
    code = (
        "import sys; from rollpacker.cli.main import main; "
        "main(['simulate', 'configs/sim/7b_8k.yaml', 'trainer.total_training_steps=1']); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'mpi4py', 'vllm', 'megatron', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
