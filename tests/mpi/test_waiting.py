"""Who waits - for another rank, for a replica to decode, for a reward - holds no core and keeps nobody from going on."""

from __future__ import annotations

import time
from pathlib import Path

from test_tail_batching import LoggedRound, Tokens

from rollpacker.comm.exchange import EventExchange
from rollpacker.comm.world import World
from rollpacker.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from rollpacker.data.prompts import PromptOrder
from rollpacker.data.tasks import Example
from rollpacker.loop import run_round
from rollpacker.policy.assembly import Machine, build_controller
from rollpacker.reward.scheduler import RewardScheduler
from rollpacker.rollout.engine import SamplingLaw
from rollpacker.runtime.rollout import LiveRollout, place
from rollpacker.types import Request, Response

LATE_S = 2.0
DECODE_S = 1.0
REWARD_S = 1.0
EXAMPLE = Example("p", "prompt", (1, 2), "", "default")


def test_waiting_for_a_late_rank_holds_no_core(world: World) -> None:
    """Such as one that compiles its engine while the others found theirs compiled."""
    world.comm.Barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    assert world.agree(lambda: time.sleep(LATE_S if world.rank == 0 else 0.0)) is None
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert wall >= 0.9 * LATE_S
    assert cpu <= 0.25 * wall


class SleepingEngine:
    """Decodes one request at a time, 10 ms a step, without using the CPU: what is left is what waiting costs."""

    kv_cache_usage = 0.0

    def __init__(self) -> None:
        self._request: Request | None = None
        self._num_steps = 0

    @property
    def num_requests(self) -> int:
        return int(self._request is not None)

    def add(self, request: Request, _: SamplingLaw) -> None:
        self._request = request

    def step(self) -> list[Response]:
        time.sleep(0.01)
        self._num_steps += 1
        if self._num_steps < DECODE_S / 0.01:
            return []
        request, self._request = self._request, None
        assert request is not None
        return [Response(request, (1,), (0.0,), "stop", 0)]

    def take_started(self) -> list[Request]:
        return []

    def take_counts(self) -> tuple[int, int]:
        return 0, 0


def test_waiting_holds_no_core(world: World, shared_tmp: Path) -> None:
    """Replica 0 decodes for a second, then its reward takes another; the others have nothing to do at all."""
    reward = shared_tmp / "slow.py"
    if world.rank == 0:
        reward.write_text(f"import time\ndef score(response, **facts):\n    time.sleep({REWARD_S})\n    return 1.0\n")
    world.comm.Barrier()
    rewards = RewardScheduler("exact", f"{reward}:score", 1)
    config = Config(
        model=ModelConfig("m"),
        data=DataConfig(train_batch_size=1),
        rollout=RolloutConfig(n=1),
        reward=RewardConfig(timeout_s=30.0),
    )
    controller = build_controller(
        config, PromptOrder([EXAMPLE], seed=0, shuffle=False, total_epochs=1), Machine(world.size)
    )
    exchange = EventExchange(world.comm, timeout_s=60)
    rollout = LiveRollout(
        SleepingEngine(), exchange, rewards, world, place(world.rank, 1), {"p": EXAMPLE}, Tokens(),
        SamplingLaw(1.0, 1.0, -1, ()), quantum_s=0.05, deterministic=False,
    )  # fmt: skip
    world.comm.Barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    assert run_round(1, controller, LoggedRound(rollout, controller))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    exchange.close()
    rewards.close()
    assert [g.responses[0].reward for g in controller.finish_step().groups] == [1.0]
    assert wall >= DECODE_S + REWARD_S
    assert cpu <= 0.25 * wall
    assert rollout.facts.engine_cpu_s <= 0.1  # it slept
    print(f"rank {world.rank}: {cpu:.3f} s of CPU in {wall:.3f} s")
