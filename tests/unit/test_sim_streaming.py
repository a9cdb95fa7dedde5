"""Training while the rest decodes, in virtual time: by hand, and against a run without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulated import setting, small

from rollpacker.simulator.cluster import Cluster
from rollpacker.simulator.record import Recorder
from rollpacker.simulator.run import Simulation
from rollpacker.simulator.streaming import StreamedTraining
from rollpacker.simulator.training import TrainingCost
from rollpacker.types import Group, Prompt, Request, ScoredResponse


def group(name: str, num_responses: int) -> Group:
    prompt = Prompt(name, (1,))
    requests = [Request(i, prompt, i, 0, 0, 9) for i in range(num_responses)]
    return Group(prompt, tuple(ScoredResponse(r, 9, "stop", 1.0, False, 0.0) for r in requests))


def training(*overrides: str) -> StreamedTraining:
    """4 GPUs, 2 training replicas of 2; a response trains for 1 GPU-second, half a second of a replica."""
    config = small("cluster.train_gpu_s_per_sample=1", *overrides)
    return StreamedTraining(config, TrainingCost(config, Cluster(config)))


def test_freed_gpus_train_one_group_after_another_and_the_rest_is_spread() -> None:
    """Replica 1 is ready at 10: a (2 s) to 12, b (1 s) waits for it to 13, c comes at 20. The rollout ends at 22 while c
    is half done (to 23); replica 0 is ready at 25 and takes d, 8 s, to 33.
    """
    stream = training()
    stream.on_group(group("a", 4), 5.0)
    assert not stream.has_begun
    stream.on_scale_down([2, 3], 10.0)
    stream.on_group(group("b", 2), 11.0)
    stream.on_group(group("c", 6), 20.0)
    times = stream.on_rollout_end(22.0, 25.0)
    assert times.num_groups_streamed == 3
    assert times.overlap_s == pytest.approx(2 + 1 + 2)
    assert times.update.update_actor_s == 0.0  # c was done at 23
    assert times.update.busy_s == (0.0, 0.0)

    late = training()
    late.on_scale_down([2, 3], 10.0)
    late.on_group(group("c", 6), 20.0)
    late.on_group(group("d", 16), 21.0)
    times = late.on_rollout_end(22.0, 25.0)
    assert times.update.busy_s == (0.0, pytest.approx(23 + 8 - 25))


def test_one_fetch_leaves_the_rest_for_the_end() -> None:
    stream = training("stream.fetch=once")
    stream.on_group(group("a", 4), 5.0)
    stream.on_scale_down([0, 1], 10.0)
    stream.on_group(group("b", 4), 11.0)
    times = stream.on_rollout_end(22.0, 25.0)
    assert (times.num_groups_streamed, times.overlap_s) == (1, pytest.approx(2))
    assert times.update.busy_s == (0.0, pytest.approx(2))  # the other replica had nothing to do before


def run(*overrides: str, name: str = "7b_8k") -> Recorder:
    return Simulation(setting(name, "trainer.total_training_steps=6", "tail_batching.mode=off", *overrides)).run()


def test_streaming_trains_the_same_samples_in_less_time() -> None:
    plain, streamed = run(), run("stream.enabled=on", "stream.rounds=all")
    assert sorted(plain.totals.trained) == sorted(streamed.totals.trained)
    assert streamed.totals.num_generated == plain.totals.num_generated  # migrated tokens are not generated twice
    assert streamed.totals.step_s < 0.97 * plain.totals.step_s
    assert streamed.totals.rollout_s > plain.totals.rollout_s  # half of the engines decode the tail


def test_short_rounds_stream_only_where_they_may() -> None:
    assert run("stream.enabled=on").totals.step_s == run().totals.step_s


def test_rewards_after_the_rollout_begin_when_the_last_response_is_complete() -> None:
    """A code verifier of seconds: what was hidden behind the decoding is now waited for, on the same samples."""
    options = ("workload.reward=code", "reward.timeout_s=30", "reward.num_workers=8")
    during, after = run(*options), run(*options, "cluster.rewards_after_rollout=true")
    assert sorted(during.totals.trained) == sorted(after.totals.trained)
    assert after.totals.rollout_s > during.totals.rollout_s + 6 * 5


def test_an_adaptive_limit_cuts_what_never_ends() -> None:
    options = ("workload.reward=code", "reward.timeout_s=30", "reward.num_workers=8")
    fixed, adaptive = run(*options), run(*options, "reward.adaptive_timeout=true")
    assert adaptive.totals.rollout_s < 0.97 * fixed.totals.rollout_s
