"""The suggestion against brute force, its memory, the truth of every refusal, and what it says where nothing fits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from suggested import job

from rollpacker.cli.suggest import why_not
from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import check_parallel_shape, validate
from rollpacker.memory_estimate import MemoryEstimate, estimate_memory
from rollpacker.model_shape import check_model_shape
from rollpacker.simulator.constants import MODELS
from rollpacker.simulator.record import Summary
from rollpacker.simulator.run import Simulation
from rollpacker.simulator.shapes import RESERVE, Candidate, enumerate_shapes, num_gpus, with_keys
from rollpacker.simulator.suggest import ETAS, Prediction, Suggestion, choose_race, race_of, suggest, with_race

MODEL = MODELS["Qwen/Qwen2.5-7B"]


def estimate(config: Config) -> MemoryEstimate:
    return estimate_memory(config, MODEL, num_gpus(config), config.trainer.gpu_memory_gib or 0)


def fits(config: Config) -> bool:
    found = estimate(config)
    usable = (1 - RESERVE) * found.gpu_bytes
    peak = max(found.training.num_bytes, found.rollout.num_bytes)
    return peak <= usable + 1 and found.kv_cache.num_tokens >= found.kv_cache.longest


def sizes(config: Config) -> tuple[int, int, int]:
    training = config.training
    return (
        training.tensor_model_parallel_size,
        training.pipeline_model_parallel_size,
        config.rollout.tensor_model_parallel_size,
    )


def step_s(config: Config) -> float:
    """As `rollpacker simulate` would say."""
    simulation = Simulation(config)
    return simulation.run().summary(simulation.workload).step_s


def every_config(base: Config) -> Iterator[Config]:
    """Each setting there is, with the largest share of the GPU for the engine that fits, found by trying."""
    counts = range(1, num_gpus(base) + 1)
    most = 1.0 if base.tail_batching.mode == "off" else max(ETAS) ** 2
    for tp, pp, size, recompute, budget in itertools.product(
        counts, counts, counts, (None, "full"), (4096, 8192, 16384)
    ):
        requests = base.data.train_batch_size * base.rollout.n * most * size / num_gpus(base)
        rollout = {"tensor_model_parallel_size": size, "max_num_seqs": 64 * math.ceil(requests / 64)}
        training = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        config = with_keys(base, "rollout", **rollout)
        config = with_keys(config, "training", recompute_granularity=recompute, max_tokens_per_gpu=budget, **training)
        try:
            check_parallel_shape(config, num_gpus(config))
            check_model_shape(config, MODEL)
        except ConfigError:
            continue
        shares = (with_keys(config, "rollout", gpu_memory_utilization=percent / 100) for percent in range(90, 0, -1))
        if (best := next(filter(fits, shares), None)) is not None:
            yield best


@functools.cache
def brute_force(mode: str, gib: float) -> dict[tuple[int, int, int], float]:
    """The best step time of each training TP x PP and rollout TP, over everything else, simulated one by one."""
    base = with_race(job(mode=mode, gib=gib), None if mode == "off" else 1.25)
    best: dict[tuple[int, int, int], float] = {}
    for config in every_config(base):
        best[sizes(config)] = min(step_s(config), best.get(sizes(config), math.inf))
    return best


@functools.cache
def suggestion(mode: str, gib: float) -> Suggestion:
    return suggest(job(mode=mode, gib=gib), MODEL)


@pytest.mark.parametrize(("mode", "gib"), [("off", 50.0), ("off", 139.0), ("paper", 79.0)])
def test_no_setting_is_faster(mode: str, gib: float) -> None:
    """The best of all, of all that train otherwise, of all that roll out otherwise."""
    found, truth = suggestion(mode, gib), brute_force(mode, gib)
    eta = None if mode == "off" else 1.25
    times = {sizes(p.config): step_s(with_race(p.config, eta)) for p in found.best}
    best = min(truth, key=lambda s: truth[s])
    others = [
        min(seconds for s, seconds in truth.items() if s[:2] != best[:2]),
        min(seconds for s, seconds in truth.items() if s[2] != best[2]),
    ]
    assert min(times.values()) == pytest.approx(truth[best])
    assert sorted({*times.values()}) == pytest.approx(sorted({truth[best], *others}))


@pytest.mark.parametrize("mode", ["off", "paper"])
def test_what_is_printed_is_what_a_simulation_of_the_config_says(mode: str) -> None:
    found = suggestion(mode, 139.0)
    for prediction in {id(p): p for p in (*found.best, *found.races)}.values():
        simulation = Simulation(prediction.config)
        summary = vars(simulation.run().summary(simulation.workload))
        assert vars(prediction.summary) == pytest.approx(summary)
    assert [p.step_s for p in found.best] == sorted(p.step_s for p in found.best)


def test_every_race_is_tried_and_the_choice_is_used_for_all_shapes() -> None:
    found = suggestion("paper", 139.0)
    assert [race_of(p.config) for p in found.races] == [None, *ETAS]
    assert {sizes(p.config) for p in found.races} == {sizes(found.best[0].config)}
    assert {race_of(p.config) for p in found.best} == {race_of(choose_race(found.races).config)}
    assert [race_of(p.config) for p in suggestion("off", 139.0).races] == [None]


def test_only_races_that_the_config_admits_are_tried() -> None:
    """Without a race no group can be dropped (config_checks), so the suggestion has one."""
    found = suggest(job(mode="paper", reward={"on_error": "drop_group"}), MODEL)
    assert [race_of(p.config) for p in found.races] == list(ETAS)
    validate(found.best[0].config, prompts=None)


def test_a_race_must_be_worth_its_bias() -> None:
    base = suggestion("off", 139.0).best[0]

    def race(eta: float | None, seconds: float, coverage: float, own: float) -> Prediction:
        values = vars(base.summary) | {"step_s": seconds, "coverage_p95": coverage, "own_coverage_p95": own}
        return Prediction(Candidate(with_race(base.config, eta), base.candidate.estimate), Summary(**values), 1.0, 0)

    off, mild, fast = race(None, 104, 0.98, 1.02), race(1.125, 102, 0.6, 0.3), race(1.5, 100, 0.5, 0.3)
    assert choose_race([off, mild, fast]) is off
    assert choose_race([race(None, 106, 1, 1), mild, fast]) is mild
    assert choose_race([race(None, 106, 1, 1), race(1.125, 105.1, 0.9, 0.9), fast]) is fast


@pytest.mark.parametrize(("gib", "cap"), [(79.0, 2048), (79.0, 8192), (139.0, 30000), (60.0, 1024)])
def test_all_that_fits_leaves_a_reserve_and_runs(gib: float, cap: int) -> None:
    base = job(gib=gib, cap=cap)
    candidates, _ = enumerate_shapes(base, MODEL)
    for candidate in candidates:
        validate(candidate.config, prompts=None)
        Simulation(candidate.config)  # the simulator's own check of the memory
        assert fits(candidate.config)
        assert candidate.estimate == estimate(candidate.config)
        more = candidate.config.rollout.gpu_memory_utilization + 0.01
        assert more > 0.9 or not fits(with_keys(candidate.config, "rollout", gpu_memory_utilization=more))
        without = with_keys(candidate.config, "training", recompute_granularity=None)
        assert without == candidate.config or estimate(without).training.num_bytes > 0.95 * estimate(without).gpu_bytes
    assert candidates


@pytest.mark.parametrize(("gib", "cap"), [(79.0, 8192), (40.0, 2048), (60.0, 30000)])
def test_every_refusal_is_true(gib: float, cap: int) -> None:
    base = job(gib=gib, cap=cap)
    candidates, rejected = enumerate_shapes(base, MODEL)
    for refusal in rejected:
        config = refusal.config
        if refusal.lacks_bytes is None:
            with pytest.raises(ConfigError, match=re.escape(refusal.reason[:60])):
                check_parallel_shape(config, num_gpus(config))
                check_model_shape(config, MODEL)
        else:
            assert refusal.lacks_bytes > 0
            for percent in range(1, 91):
                assert not fits(with_keys(config, "rollout", gpu_memory_utilization=percent / 100))
    shapes = {sizes(c.config) for c in candidates}
    trained = {sizes(r.config)[:2] for r in rejected} | {s[:2] for s in shapes}
    assert trained == {(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4}
    assert len(shapes) == len(candidates)


def test_what_is_lacking_is_what_would_do() -> None:
    """With a GPU larger by what a refusal lacks, over 1 - RESERVE, its shape fits."""
    for cap, gib in ((8192, 40.0), (30000, 60.0)):
        _, rejected = enumerate_shapes(job(gib=gib, cap=cap), MODEL)
        for refusal in (r for r in rejected if r.lacks_bytes is not None):
            larger = gib + (refusal.lacks_bytes / (1 << 30) + 1) / (1 - RESERVE) / 0.9
            found, _ = enumerate_shapes(job(gib=larger, cap=cap), MODEL)
            assert sizes(refusal.config)[:2] in {sizes(c.config)[:2] for c in found}


def test_more_memory_is_never_slower() -> None:
    times = [suggest(job(gib=gib), MODEL).best[0].step_s for gib in (46.0, 48.0, 50.0, 55.0, 79.0, 139.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]  # the memory matters here


def test_where_nothing_fits_the_least_that_would_is_named() -> None:
    base = job(2, gib=79.0)
    with pytest.raises(ConfigError) as error:
        suggest(base, MODEL)
    text = str(error.value)
    match = re.search(r"at least (\d+) GPUs \((\d+) nodes of 2\)", text)
    assert match, text
    nodes = int(match[2])
    assert int(match[1]) == 2 * nodes
    assert enumerate_shapes(with_keys(base, "trainer", nnodes=nodes), MODEL)[0]
    assert not any(enumerate_shapes(with_keys(base, "trainer", nnodes=n), MODEL)[0] for n in range(1, nodes))
    lacks = [r.lacks_bytes for r in enumerate_shapes(base, MODEL)[1] if r.lacks_bytes is not None]
    assert f"lacks {min(lacks) / (1 << 30):.1f} GiB" in text
    assert "trainer optimizer state" in text and "\n" not in text


def test_a_model_that_cannot_be_cut_so_is_said() -> None:
    odd = dataclasses.replace(MODEL, num_attention_heads=7, num_kv_heads=7)
    candidates, rejected = enumerate_shapes(job(gib=139.0), odd)
    assert {c.config.training.tensor_model_parallel_size for c in candidates} == {1}
    assert any("does not divide num_attention_heads=7" in r.reason for r in rejected)
    with pytest.raises(ConfigError, match="exceeds max_position_embeddings"):
        suggest(job(cap=200000), MODEL)


def test_why_not_adds_up() -> None:
    """The seconds in the sentence are those of the predictions, and the phase is the one that is slower."""
    found = suggestion("off", 79.0)
    best = found.best[0]
    for other in found.best[1:]:
        text = why_not(other, best)
        pattern = (
            r"([\d.,]+) s a step instead of ([\d.,]+) \(\+[\d.]+%\); (\w+) ([\d.,]+) s instead of ([\d.,]+): (.*)\."
        )
        match = re.search(pattern, text)
        assert match, text
        assert float(match[1]) == pytest.approx(other.step_s, abs=0.06)
        assert float(match[2]) == pytest.approx(best.step_s, abs=0.06)
        if match[3] == "rollout":
            assert float(match[4]) == pytest.approx(other.summary.rollout_s_per_step, abs=0.006)
        elif match[3] == "training":
            assert float(match[4]) == pytest.approx(other.training_s, abs=0.006)
        assert float(match[4]) >= float(match[5])


def test_a_longer_refit_is_told_as_a_difference() -> None:
    best = suggestion("off", 79.0).best[0]
    summary = dataclasses.replace(best.summary, step_s=best.step_s + 0.44)
    slower = dataclasses.replace(best, summary=summary)
    assert why_not(slower, best).endswith("; refit 0.44 s longer: each GPU takes more weights.")


def test_context_parallelism_is_the_last_resort() -> None:
    base = job(8, gib=79.0, cap=130048)
    assert not enumerate_shapes(base, MODEL)[0]
    found = suggest(base, MODEL)
    assert found.best[0].config.training.context_parallel_size > 1
    assert all(fits(p.config) for p in found.best)
