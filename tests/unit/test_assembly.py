"""What a config makes of the policies, and what it is refused for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulated import small

from rollpacker.config import ConfigError
from rollpacker.data.prompts import PromptOrder
from rollpacker.messages import RoundPlan
from rollpacker.policy.assembly import Machine, build_controller, stream_training
from rollpacker.policy.planner import DecodeTable

TABLE = DecodeTable({1: {(1, 100): 10.0, (64, 100): 20.0}, 2: {(1, 100): 6.0, (64, 100): 16.0}})
MACHINE = Machine(4, rollout_sizes=(1, 2), capacity_tokens=lambda tp: 10**6, decode_table=TABLE)


def first_round(*overrides: str, machine: Machine = MACHINE) -> RoundPlan:
    config = small(*overrides)
    order = PromptOrder([(f"p{i}", (1,) * 9, "default") for i in range(64)], seed=0, shuffle=False, total_epochs=1)
    plan = build_controller(config, order, machine).begin_step(1)
    assert plan is not None
    return plan


@pytest.mark.parametrize("mode", ["off", "paper"])
@pytest.mark.parametrize(
    ("planner", "size"),
    [
        (["planner.policy=fixed"], 1),
        (["planner.policy=preemption"], 1),
        (["planner.policy=schedule", "planner.schedule=[2,1]"], 2),
        (["planner.policy=profile"], 2),
    ],
)
@pytest.mark.parametrize("filters", ["off", "zero_variance"])
def test_every_planner_drives_every_mode(mode: str, planner: list[str], size: int, filters: str) -> None:
    plan = first_round(f"tail_batching.mode={mode}", *planner, f"filter.mode={filters}")
    assert plan.tensor_model_parallel_size == size
    assert {r.replica for r in plan.requests} == set(range(4 // size))


@pytest.mark.parametrize(
    ("overrides", "machine", "message"),
    [
        (
            ["planner.policy=schedule", "planner.schedule=[1,4]"],
            MACHINE,
            r"planner.policy=schedule would use the rollout tensor-parallel size\(s\) 4, but .* can use 1, 2 ",
        ),
        (["planner.policy=preemption", "rollout.tensor_model_parallel_size=4"], MACHINE, r"size\(s\) 4"),
        (["planner.policy=profile"], Machine(4, (1, 2)), "profile needs measured decode times"),
        (
            ["rollout.routing=isolate_tail", "tail_batching.mode=off"],
            Machine(4, (1, 2)),
            "isolate_tail needs measured decode times",
        ),
        (
            ["stream.enabled=on", "algorithm.adv_estimator=reinforce_plus_plus"],
            MACHINE,
            "stream.enabled=on: .*reinforce_plus_plus normalises over the whole batch",
        ),
        (["stream.enabled=on", "algorithm.ppo_epochs=2"], MACHINE, "stream.enabled=on: 2 optimizer steps"),
        (["stream.enabled=on", "algorithm.ppo_mini_batch_size=4"], MACHINE, "stream.enabled=on: 2 optimizer steps"),
        (["stream.enabled=on", "rollout.tensor_model_parallel_size=4"], MACHINE, "no half of the GPUs"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(overrides: list[str], machine: Machine, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        first_round(*overrides, machine=machine)


def test_auto_streams_where_it_can() -> None:
    assert stream_training(small("stream.enabled=auto"), MACHINE)
    assert not stream_training(small("stream.enabled=auto", "algorithm.ppo_epochs=2"), MACHINE)
    assert not stream_training(small("stream.enabled=off"), MACHINE)
    # A planner may choose 4, one replica on 4 GPUs, which has no half; rounds of 1 and 2 still stream.
    assert stream_training(small("stream.enabled=on", "planner.policy=preemption"), Machine(4, (1, 2, 4)))
