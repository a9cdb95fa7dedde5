"""Rewards in virtual time: workers, time limits, the sandboxes that hang, and the judge."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulated import small

from rollpacker.config import ConfigError
from rollpacker.messages import ScoreResponse
from rollpacker.simulator.cluster import Cluster
from rollpacker.simulator.cost import StepCurve
from rollpacker.simulator.engine import Replica
from rollpacker.simulator.reward import RewardQueues
from rollpacker.simulator.run import Simulation
from rollpacker.types import Prompt, Request


def requests(n: int, prompt_tokens: int = 0) -> list[Request]:
    return [Request(i, Prompt(f"p{i // 4}", (0,) * prompt_tokens), i % 4, 0, 1000 + i, 8192) for i in range(n)]


def queues(scores: list[float], *overrides: str, lengths: int = 100, prompt_tokens: int = 0) -> RewardQueues:
    config = small(*overrides)
    made = RewardQueues(config, Cluster(config), 4, 1)
    made.launch(requests(len(scores), prompt_tokens), [lengths] * len(scores), np.array(scores))
    return made


def test_workers_are_served_first_come_first_served() -> None:
    for workers in (1, 3):
        made = queues([1.0] * 6, f"reward.num_workers={workers}")
        outcomes = [made.submit(ScoreResponse(r, 9.0), now_s=5.0, shares_gpu=False) for r in requests(6)]
        ends = [5.0] * workers
        for outcome in outcomes:
            ends.sort()
            ends[0] += outcome.execution_s
            assert outcome.done_s == pytest.approx(ends[0])
            assert (outcome.score, outcome.is_error) == (1.0, False)


def test_a_limit_costs_the_sample() -> None:
    outcome = queues([1.0]).submit(ScoreResponse(requests(1)[0], 1e-6), now_s=0.0, shares_gpu=False)
    assert (outcome.score, outcome.is_error, outcome.execution_s, outcome.done_s) == (0.0, True, 1e-6, 1e-6)


def test_5_percent_of_the_code_prompts_hang_where_the_response_is_wrong() -> None:
    n = 12_000
    made = queues([float(i % 2) for i in range(n)], "workload.reward=code")
    outcomes = [made.submit(ScoreResponse(r, 30.0), now_s=0.0, shares_gpu=False) for r in requests(n)]
    late = np.array([o.execution_s == 30.0 for o in outcomes])
    assert late[0::2].mean() == pytest.approx(0.05, abs=0.012)
    assert late[1::2].mean() < 0.001  # a right response ends
    assert all(o.is_error and o.score == 0 for o in np.array(outcomes, dtype=object)[late])
    median = np.median([o.execution_s for o in outcomes])
    assert median == pytest.approx(1.5, rel=0.1)


def test_a_limit_of_the_test_case_counts_if_it_is_tighter() -> None:
    made = queues([1.0], "workload.reward=code")
    outcome = made.submit(ScoreResponse(requests(1)[0], 30.0, (1e-3,)), now_s=0.0, shares_gpu=False)
    assert outcome.execution_s == 1e-3 and outcome.is_error
    assert outcome.case_execution_s == (1e-3,)


def test_a_judge_reads_all_and_answers_one_at_a_time() -> None:
    short, long = (queues([1.0] * 2, "workload.reward=judge", "reward.num_workers=8", lengths=n) for n in (100, 8100))
    first, second = (short.submit(ScoreResponse(r, 1e9), now_s=1.0, shares_gpu=False) for r in requests(2))
    assert second.done_s == pytest.approx(1.0 + first.execution_s + second.execution_s)
    difference = (
        long.submit(ScoreResponse(requests(1)[0], 1e9), now_s=1.0, shares_gpu=False).execution_s - first.execution_s
    )
    assert difference == pytest.approx(8000 * 2 * 7.6e9 / (0.4 * 989e12))


@pytest.mark.parametrize(("mps", "decode", "judge"), [("true", 1.15, 1.25), ("false", 2.0, 2.0)])
def test_a_judge_and_an_engine_on_one_gpu_slow_each_other(mps: str, decode: float, judge: float) -> None:
    alone, shared = (
        queues([1.0], "workload.reward=judge", f"cluster.judge_mps={mps}").submit(
            ScoreResponse(requests(1)[0], 1e9), now_s=3.0, shares_gpu=shares
        )
        for shares in (False, True)
    )
    assert (alone.slowdown, shared.slowdown) == (1.0, decode)
    assert shared.done_s - shared.begin_s == pytest.approx(judge * (alone.done_s - alone.begin_s))
    assert alone.begin_s == shared.begin_s == 3.0


def test_a_slowed_engine_takes_that_much_longer_and_no_step_twice() -> None:
    """100 steps of 10 ms; from 0.3 s to the next step boundaries at half the speed for 20 of them."""

    class Flat:
        prefill_tokens_per_s = float("inf")

        def curve(self, batch: int) -> StepCurve:  # noqa: ARG002
            return StepCurve([(float("inf"), 0.01, 0.0)])

    engine = Replica(Flat(), capacity_tokens=10**6, max_num_seqs=4)
    engine.add(0, prompt_tokens=16, target_tokens=100, group=0)
    engine.schedule(0.0)
    for time_s, factor in ((0.3, 2.0), (0.7, 1.0)):
        engine.advance(time_s)
        engine.slowdown = factor
        engine.schedule(time_s)
    assert engine.step == 50 and engine.time_s == pytest.approx(0.7)
    assert engine.pop_finished() == [0]
    assert engine.time_s == pytest.approx(1.2) == engine.busy_s


def test_a_judge_whose_layers_cannot_stream_is_refused_before_the_run() -> None:
    overrides = ("workload.reward=judge", "cluster.judge_offload=pipelined")
    Simulation(small(*overrides))
    with pytest.raises(ConfigError, match=r"judge_offload=pipelined: the judge does not fit: .* bytes are free"):
        Simulation(small(*overrides, "rollout.gpu_memory_utilization=0.96"))
    Simulation(small("cluster.judge_offload=pipelined", "rollout.gpu_memory_utilization=0.96"))  # nobody judges
