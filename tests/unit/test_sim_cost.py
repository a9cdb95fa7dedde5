"""Step times: the published points, sums and inverses in closed form, measured tables, what does not fit, updates."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen import qwen_config, write_qwen_folder
from simulated import SETTINGS, setting, small

from rollpacker.config import ConfigError
from rollpacker.messages import RoundStats, UpdatePlan
from rollpacker.model_shape import read_model_shape
from rollpacker.policy.planner import DecodeTable
from rollpacker.simulator.cluster import Cluster, model_shape
from rollpacker.simulator.constants import GPUS, MODELS
from rollpacker.simulator.cost import MeasuredCost, Roofline, StepCurve, read_decode_table
from rollpacker.simulator.training import TrainingCost
from rollpacker.types import Group, Prompt, Request, RoundKind, ScoredResponse

CURVE = StepCurve([(100.5, 0.02, 0.0), (300.25, 0.01, 1e-4), (math.inf, 0.01, 1e-4)])


def at(curve: StepCurve, context: float) -> float:
    return next(base + slope * context for end, base, slope in curve.pieces if context < end)


@given(st.floats(0, 500), st.integers(0, 700))
def test_the_sum_of_steps_equals_the_loop(context: float, num_steps: int) -> None:
    loop = sum(at(CURVE, context + i) for i in range(num_steps))
    assert CURVE.total_s(context, num_steps) == pytest.approx(loop, rel=1e-12, abs=1e-12)


@given(st.floats(0, 500), st.floats(1e-6, 30))
def test_a_time_is_turned_into_the_fewest_steps_that_cover_it(context: float, seconds: float) -> None:
    num_steps = CURVE.steps_to_cover(context, seconds)
    assert CURVE.total_s(context, num_steps) >= seconds * (1 - 1e-9)
    assert CURVE.total_s(context, num_steps - 1) < seconds * (1 + 1e-9)


# ms a token at the middle of Fig. 11's longest response: its baseline seconds over the cap (arXiv 2509.21009).
@pytest.mark.parametrize(
    ("model", "tp", "batch", "milliseconds"),
    [("Qwen/Qwen2.5-7B", 1, 64, 10.0), ("Qwen/Qwen2.5-14B", 2, 64, 16.9), ("Qwen/Qwen2.5-32B", 2, 32, 20.5)],
)
def test_the_roofline_meets_the_papers_decode_speed(model: str, tp: int, batch: int, milliseconds: float) -> None:
    curve = Roofline(MODELS[model], GPUS["h800"], tp, 2e-3).curve(batch)
    assert at(curve, 2048) * 1e3 == pytest.approx(milliseconds, rel=0.13)


def test_the_roofline_by_hand() -> None:
    """7B, TP 2, 256 requests of 1,000 tokens on H800: every term."""
    shape, gpu = MODELS["Qwen/Qwen2.5-7B"], GPUS["h800"]
    parameters = 7.616e9
    weights_and_kv = (2 * parameters / 2 + 256 * 1000 * 2 * 28 * 2 * 128 * 2) / (0.8 * 3.35e12)
    flops = 2 * parameters * 256 / (2 * 0.65 * 989e12)
    all_reduce = 2 * 28 * (22e-6 + 256 * 2 * 3584 / 160e9)
    step = 2e-3 + max(weights_and_kv, flops) + all_reduce
    assert shape.num_parameters() == pytest.approx(parameters, rel=1e-4)
    assert at(Roofline(shape, gpu, 2, 2e-3).curve(256), 1000) == pytest.approx(step, rel=1e-4)


def test_a_large_short_batch_is_bound_by_flops() -> None:
    curve = Roofline(MODELS["Qwen/Qwen2.5-7B"], GPUS["h800"], 1, 0.0).curve(1024)
    assert at(curve, 1) == at(curve, 30) == pytest.approx(2 * 7.616e9 * 1024 / (0.65 * 989e12), rel=1e-4)
    assert at(curve, 2000) > at(curve, 1)


def test_presets_are_the_published_models(tmp_path: Path) -> None:
    for name in ("7B", "14B", "32B"):
        assert MODELS[f"Qwen/Qwen2.5-{name}"] == read_model_shape(str(write_qwen_folder(tmp_path / name, name)))
        assert model_shape(f"Qwen2.5-{name}") == MODELS[f"Qwen/Qwen2.5-{name}"]
        (tmp_path / name / "model.safetensors").unlink()  # a config.json is enough
        assert model_shape(str(tmp_path / name)) == MODELS[f"Qwen/Qwen2.5-{name}"]
    assert qwen_config("7B")["num_hidden_layers"] == 28
    with pytest.raises(ConfigError, match=r"one of Qwen/Qwen2\.5-7B, "):
        model_shape("Qwen/Qwen2.5-8B")


TABLE = "tensor_model_parallel_size,batch,context_tokens,decode_ms\n" + "".join(
    f"1,{batch},{context},{5 + batch / 10 + context / 1000}\n" for batch in (1, 8, 64) for context in (128, 1024, 4096)
)


@given(st.integers(1, 100), st.floats(1, 9000))
def test_a_measured_table_is_interpolated_as_the_planner_does(batch: int, context: float) -> None:
    cells = {(b, c): 5 + b / 10 + c / 1000 for b in (1, 8, 64) for c in (128, 1024, 4096)}
    table = DecodeTable({1: cells})
    seconds = at(MeasuredCost(table, 1, 1e4).curve(batch), context)
    assert seconds * 1e3 == pytest.approx(table.milliseconds(1, batch, context), rel=1e-9)


def test_a_table_of_one_context_is_flat() -> None:
    table = DecodeTable({2: {(1, 512): 4.0, (8, 512): 6.0}})
    assert MeasuredCost(table, 2, 1e4).curve(8).pieces == ((math.inf, 0.006, 0.0),)


def test_a_run_uses_the_table(tmp_path: Path) -> None:
    file = tmp_path / "decode.csv"
    file.write_text(TABLE, encoding="utf-8")
    cluster = Cluster(small(f"cluster.decode_table={file}"))
    assert at(cluster.engine_cost(1).curve(8), 1024) == pytest.approx((5 + 0.8 + 1.024) / 1e3)
    with pytest.raises(ConfigError, match="no rows of tensor_model_parallel_size=2; it has 1"):
        cluster.engine_cost(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp,batch\n", "line 1: the header lacks tensor_model_parallel_size"),
        (TABLE + "1,2,x,4\n", "line 11: expected three whole numbers"),
        (TABLE + "1,2,3\n", "line 11: expected three whole numbers"),
        (TABLE + "1,2,3,0\n", "line 11: expected three whole numbers"),
        (TABLE + "1,2,128,4\n", r"TP 1: the table lacks \(batch, context\)"),
    ],
)
def test_a_malformed_table_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "decode.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_decode_table(str(file))


def test_a_missing_table_is_said() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.decode_table=no\.csv: cannot read"):
        read_decode_table("no.csv")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.nnodes=null"], "set trainer.nnodes and trainer.n_gpus_per_node"),
        (["model.path=Qwen/Qwen2.5-32B"], "0.85 x 79.0 = 67.1 GiB, less 61.0 GiB of weights and .* needs 9,216"),
        (
            ["model.path=Qwen/Qwen2.5-32B", "training.dtype=fp32"],
            r"less 61.0 GiB of weights and .* leaves 2\.2 GiB = 9,005 tokens",  # the engine's are bf16
        ),
        (["rollout.tensor_model_parallel_size=3"], "does not divide the 16 rank"),
        (["rollout.tensor_model_parallel_size=8"], "does not divide num_attention_heads=28"),
        (["training.tensor_model_parallel_size=16"], "does not divide trainer.n_gpus_per_node=8"),
        (["cluster.offload_trainer=false"], "the rollout needs .* trainer weights .* engine KV cache"),
        (
            ["training.recompute_granularity=null", "training.max_tokens_per_gpu=131072"],
            "the training needs .* activations",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_arithmetic(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster(setting("7b_8k", *overrides))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_shipped_configs_fit_and_hold_long_sequences(name: str) -> None:
    config = setting(name)
    cluster = Cluster(config)
    size = config.rollout.tensor_model_parallel_size
    assert cluster.capacity_tokens(size) > 8 * config.data.max_response_length
    assert cluster.capacity_tokens(2 * size) > 2 * cluster.capacity_tokens(size)


def update(lengths: list[int], prompt_tokens: int = 0, num_groups: int = 1) -> UpdatePlan:
    prompt = Prompt("p", (0,) * prompt_tokens)
    responses = [
        ScoredResponse(Request(i, prompt, i, 0, i, 9999), n, "stop", 1.0, False, 0.0) for i, n in enumerate(lengths)
    ]
    groups = tuple(Group(prompt, tuple(responses[i::num_groups])) for i in range(num_groups))
    stats = RoundStats(RoundKind.SHORT, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, None, 1, False, None, 0, None)
    return UpdatePlan(1, 0, groups, sum(lengths), len(lengths), stats)


def test_training_counts_flops_of_the_slowest_replica() -> None:
    """4 GPUs, TP 2, so two replicas; 8 FLOP per parameter and token with recompute, and causal attention. Each of the three
    passes has two all-reduces a layer, in which a rank sends as much as it has (a ring of two).
    """
    overrides = ["cluster.train_gpu_s_per_sample=null"]
    cost = TrainingCost(small(*overrides), Cluster(small(*overrides)))
    times = cost.times(update([1000, 1000, 2000], prompt_tokens=100))
    parameters = MODELS["Qwen/Qwen2.5-7B"].num_parameters()
    tokens, squares = 2200, 2 * 1100**2  # longest first: 2,100 | 1,100 + 1,100
    flops = 4 * (2 * parameters * tokens + 2 * 28 * 3584 * squares)
    all_reduce_s = 3 * 2 * 28 * tokens * 2 * 3584 / 160e9
    assert max(times.busy_s) == pytest.approx(flops / (2 * 989e12 * 0.35) + all_reduce_s)
    assert times.update_actor_s > max(times.busy_s)
    assert (times.old_log_prob_s, times.ref_s) == (None, None)


def test_log_prob_passes_come_with_more_updates_and_a_reference() -> None:
    overrides = ["cluster.train_gpu_s_per_sample=null", "algorithm.ppo_mini_batch_size=4", "algorithm.use_kl_loss=true"]
    cost = TrainingCost(small(*overrides), Cluster(small(*overrides)))
    times = cost.times(update([1000] * 8, num_groups=8))
    assert times.old_log_prob_s == times.ref_s == pytest.approx(max(times.busy_s) / 4)
    # A round that came out short makes one update, however many the full batch would make.
    assert cost.times(update([1000] * 4, num_groups=4)).old_log_prob_s is None
    in_reward = small("cluster.train_gpu_s_per_sample=null", "algorithm.use_kl_in_reward=true")
    times = TrainingCost(in_reward, Cluster(in_reward)).times(update([1000] * 8, num_groups=8))
    assert times.old_log_prob_s == times.ref_s == pytest.approx(max(times.busy_s) / 4)


def test_each_mini_batch_waits_for_its_slowest_replica() -> None:
    """Two replicas, a long response in each of two mini-batches: one after another, though one replica has both."""
    lengths = [4000, 1000, 1000, 4000]
    overrides = ["cluster.train_gpu_s_per_sample=null", "data.train_batch_size=4"]
    one, two = (
        TrainingCost(small(*o), Cluster(small(*o))).times(update(lengths, num_groups=4))
        for o in (overrides, [*overrides, "algorithm.ppo_mini_batch_size=2"])
    )
    optimizer_step_s = one.update_actor_s - max(one.busy_s)
    assert max(two.busy_s) > 1.4 * max(one.busy_s)
    assert two.update_actor_s == pytest.approx(max(two.busy_s) + 2 * optimizer_step_s)


def test_pipeline_stages_wait_while_it_fills() -> None:
    large = ["trainer.gpu_memory_gib=139", "training.tensor_model_parallel_size=1"]
    flat = ["cluster.train_gpu_s_per_sample=null", *large]
    configs = small(*flat, "training.pipeline_model_parallel_size=2"), small(*flat)
    piped, plain = (TrainingCost(c, Cluster(c)).times(update([8000] * 8)) for c in configs)
    assert max(piped.busy_s) == pytest.approx(1.5 * max(plain.busy_s))  # 32,000 tokens a replica are two micro-batches


def test_a_calibrated_cost_per_sample_scales_with_the_gpus() -> None:
    config = small("cluster.train_gpu_s_per_sample=0.5")
    assert TrainingCost(config, Cluster(config)).times(update([10] * 8)).update_actor_s == 0.5 * 8 / 4
