"""The controller and its policies run on every rank between engine steps: they must cost next to nothing.

1,024 prompts of 32 responses make 10^5 events; all policies together get 2 s of CPU for them. An event
of a round four times as large must not cost 2.5 times as much: a scan of the round per event would make it four times.
"""

from __future__ import annotations

import random
import time

import pytest
from virtual_rollout import numbered_prompts

from rollpacker.data.prompts import PromptOrder
from rollpacker.messages import (
    AbortRequest,
    EngineProgress,
    RequestFinished,
    RequestStarted,
    RewardDone,
    ScoreResponse,
    TrainGroup,
)
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.controller import StepController
from rollpacker.policy.dynamic_sampling import DynamicSampling
from rollpacker.policy.filters import ZeroVarianceFilter
from rollpacker.policy.launch import RoundLauncher
from rollpacker.policy.planner import FixedPlanner, PreemptionPlanner
from rollpacker.policy.routing import BalancedRouter
from rollpacker.policy.scale_down import ScaleDownPolicy
from rollpacker.policy.streaming import StreamBatcher
from rollpacker.policy.tail_batching import TailBatchOptions, TailBatchScheduler
from rollpacker.policy.timeout import AdaptiveTimeout

R0 = 32


def tail_batching(num_prompts: int) -> StepController:
    order = PromptOrder(numbered_prompts(2 * num_prompts), seed=0, shuffle=True, total_epochs=None)
    options = TailBatchOptions(
        train_batch_size=num_prompts * 4 // 5,
        num_responses=R0 - 4,
        eta_prompts=1.25,
        eta_responses=R0 / (R0 - 4),
    )
    launcher = RoundLauncher(
        PreemptionPlanner((1, 2), 1),
        num_gpus=128,
        max_tokens=32_768,
        seed=0,
        make_router=lambda size, predict: BalancedRouter(128 // size, predict),
    )
    audit = SampleAudit(fraction=0.02, seed=0)
    scheduler = TailBatchScheduler(
        order,
        launcher,
        options,
        audit=audit,
        group_filter=ZeroVarianceFilter(),
    )
    scale_down = ScaleDownPolicy(
        num_gpus=128,
        training_replica_size=4,
        capacity_tokens=lambda tp: 10**6,
        expect=lambda n: 1000.0,
        all_rounds=True,
    )
    return StepController(
        scheduler,
        scheduler,
        reward_timeout_s=30.0,
        audit=audit,
        adaptive_timeout=AdaptiveTimeout(),
        scale_down=scale_down,
    )


def dynamic_sampling(num_prompts: int) -> StepController:
    order = PromptOrder(numbered_prompts(4 * num_prompts), seed=0, shuffle=True, total_epochs=None)
    sampling = DynamicSampling(
        order,
        RoundLauncher(FixedPlanner(1), num_gpus=128, max_tokens=32_768, seed=0),
        ZeroVarianceFilter(),
        train_batch_size=num_prompts,
        num_responses=R0,
        max_launched_ratio=4.0,
    )
    return StepController(sampling, sampling, reward_timeout_s=30.0)


def cpu_per_event(controller: StepController) -> tuple[float, int]:
    """CPU seconds and number of events of one round with a hundred rewards out; every quarter request a progress."""
    noise = random.Random(1)
    start = time.process_time()
    plan = controller.begin_step(1)
    batcher = StreamBatcher(32, adv_estimator="grpo")
    batcher.on_scale_down(range(16, 32))
    running = [r.index for r in plan.requests]
    num_events = len(running)
    for index in running:
        controller.on(RequestStarted(0.0, 0, index))
    noise.shuffle(running)
    gone: set[int] = set()
    unscored: list[int] = []
    for index in running:
        actions = []
        if controller.round.is_open and index not in gone:
            actions += controller.on(RequestFinished(1.0, 0, index, 1 + index % 977, "stop"))
            num_events += 1
        unscored += [a.request.index for a in actions if isinstance(a, ScoreResponse)]
        while len(unscored) > 100:
            scored = unscored.pop(noise.randrange(100))
            actions += controller.on(RewardDone(2.0, 0, scored, float(scored % 2), False, 1.0, (1.0, 2.0)))
            num_events += 1
        if index % 4 == 0:
            controller.on(EngineProgress(1.0, index % 128, 100, 0, 0.5, 16))
            num_events += 1
        gone.update(a.request.index for a in actions if isinstance(a, AbortRequest))
        for action in actions:
            if isinstance(action, TrainGroup):
                batcher.on_group(action.group)
    for scored in unscored:
        controller.on(RewardDone(2.0, 0, scored, float(scored % 2), False, 1.0, (1.0, 2.0)))
    batcher.on_rollout_end()
    assert len(controller.finish_step().groups) > 100
    return time.process_time() - start, num_events + len(unscored)


@pytest.mark.parametrize("make", [tail_batching, dynamic_sampling])
def test_100_000_events_take_under_2_s_and_no_event_scans_the_round(make) -> None:
    small_s, num_small = cpu_per_event(make(256))
    large_s, num_large = min(cpu_per_event(make(1024)) for _ in range(3))  # a busy machine only ever adds
    print(f"{make.__name__}: {num_large} events in {large_s:.2f} s, {1e6 * large_s / num_large:.1f} us each")
    assert num_large > 90_000
    assert large_s < 2.0
    assert large_s / num_large < 2.5 * small_s / num_small
