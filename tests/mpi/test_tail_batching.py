"""Tail batching on real engines: nothing of an aborted response is left, all ranks decide alike, a log can be replayed.

`--rounds N` runs longer than the test suite does, `--rollout-tp N` on replicas of another size (`make soak`): one size a
process, since vLLM's process groups are made once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_rollout import LAW, VOCAB, build_engine, load_from_megatron
from tiny_models import write_model

from rollpacker.comm.exchange import EventExchange
from rollpacker.comm.world import World
from rollpacker.config import Config, DataConfig, ModelConfig, RolloutConfig, TailBatchingConfig
from rollpacker.data.prompts import PromptOrder
from rollpacker.data.tasks import Example
from rollpacker.loop import run_round
from rollpacker.messages import Action, Event, RoundPlan
from rollpacker.platform.device import Platform
from rollpacker.policy.assembly import Machine, build_controller
from rollpacker.policy.controller import StepController
from rollpacker.reward.scheduler import RewardScheduler
from rollpacker.rollout.engine import RolloutEngine
from rollpacker.runtime.rollout import LiveRollout, place
from rollpacker.types import Prompt, Request, Response, RoundKind

P0, R0, MAX_TOKENS = 4, 4, 40
EXAMPLES = [
    Example(f"p{i}", f"prompt {i}", tuple(3 + (i * k) % 50 for k in range(1, 3 + i % 4)), "", "default")
    for i in range(23)
]
PROBE = Request(10_000, Prompt("probe", (5, 6, 7)), 0, 0, seed=77, max_tokens=6)


class Tokens:
    """Decodes token ids to text that no answer equals."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return " ".join(map(str, token_ids))


class LoggedRound:
    """A round on this rank's engine that writes down what happened and what was decided."""

    def __init__(self, rollout: LiveRollout, controller: StepController) -> None:
        self._rollout, self._controller = rollout, controller
        self.events_of_round: list[Event] = []
        self.actions: list[Action] = []

    def launch(self, plan: RoundPlan) -> None:
        self.plan = plan
        self.events_of_round, self.actions = [], []
        self._rollout.launch(plan)

    def events(self) -> Iterator[Event]:
        for event in self._rollout.events(lambda: self._controller.digest):
            self.events_of_round.append(event)
            yield event

    def apply(self, action: Action) -> None:
        self.actions.append(action)
        self._rollout.apply(action)


@pytest.fixture(scope="module")
def tp(world: World, request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--rollout-tp") or min(world.size, 2)


@pytest.fixture(scope="module")
def engine(world: World, platform: Platform, shared_tmp: Path, tp: int) -> RolloutEngine:
    folder = shared_tmp / "tail_model"
    if world.rank == 0:
        write_model(folder, tied=True, vocab_size=VOCAB, hidden_size=128, seed=11)
    world.comm.Barrier()
    engine = build_engine(platform, folder, tp)
    load_from_megatron(engine, platform, folder, tp, 0)
    return engine


def controller_of(world: World, tp: int) -> StepController:
    config = Config(
        model=ModelConfig("m"),
        data=DataConfig(train_batch_size=P0, max_response_length=MAX_TOKENS),
        rollout=RolloutConfig(n=R0, tensor_model_parallel_size=tp),
        tail_batching=TailBatchingConfig(mode="paper", audit_fraction=0.1),
    )
    order = PromptOrder(EXAMPLES, seed=3, shuffle=True, total_epochs=None)
    return build_controller(config, order, Machine(world.size))


def restored(saved: StepController, world: World, tp: int) -> StepController:
    controller = controller_of(world, tp)
    controller.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    return controller


@pytest.mark.parametrize("deterministic", [False, True])
def test_rounds_on_the_engine(
    world: World, engine: RolloutEngine, tp: int, deterministic: bool, request: pytest.FixtureRequest
) -> None:
    placement = place(world.rank, tp)
    rewards = RewardScheduler("exact", None, 1) if placement.is_leader else None
    exchange = EventExchange(world.comm, timeout_s=60)
    rollout = LiveRollout(
        engine, exchange, rewards, world, placement, {e.prompt_id: e for e in EXAMPLES}, Tokens(), LAW,
        quantum_s=0.01, deterministic=deterministic, is_raced=True,
    )  # fmt: skip
    controller, again = controller_of(world, tp), controller_of(world, tp)
    backend = LoggedRound(rollout, controller)
    kinds = []
    expected = probe(engine)
    for step in range(1, request.config.getoption("--rounds") + 1):
        assert run_round(step, controller, backend)
        samples = rollout.take_samples()
        update = controller.finish_step()
        kinds.append(update.stats.kind)
        check_engine_is_clean(engine)
        assert rollout.facts.engine_cpu_s > 0
        assert probe(engine) == expected
        trained = {r.request.index for g in update.groups for r in g.responses}
        if update.stats.kind is RoundKind.SHORT:
            assert len(trained) == P0 * R0 == update.num_sequences
            assert update.stats.num_launched == 5 * 5
        mine = {i for i in trained if backend.plan.requests[i].replica == placement.replica}
        if placement.is_leader:
            assert mine <= samples.keys()
            assert all(len(samples[r.request.index].response_ids) == r.num_tokens for g in update.groups
                       for r in g.responses if r.request.index in mine)  # fmt: skip
        assert len(set(world.comm.allgather(controller.digest))) == 1
        # A controller that knows no more than the file that the last one was saved to and the log of the real round
        # takes the same actions.
        again = restored(again, world, tp)
        _, actions = again.replay(step, backend.events_of_round)
        again.finish_step()
        assert actions == backend.actions
        assert json.dumps(again.state_dict()) == json.dumps(controller.state_dict())  # the digest is part of it
    assert kinds.count(RoundKind.LONG) >= 1
    assert kinds.count(RoundKind.SHORT) > kinds.count(RoundKind.LONG)
    exchange.close()
    if rewards is not None:
        rewards.close()


def check_engine_is_clean(engine: RolloutEngine) -> None:
    """No request, no KV block; the runner keeps no state but that which the scheduler tells it to drop in its next step."""
    assert engine.num_requests == 0
    assert not engine._scheduler.requests
    assert not engine._scheduler.running
    assert not engine._scheduler.waiting
    assert engine.kv_cache_usage == 0.0
    assert set(engine._model_runner.requests) <= set(engine._scheduler.finished_req_ids)
    assert not engine._unstarted


def probe(engine: RolloutEngine) -> Response:
    """What the engine answers to one request by itself; from its first step on the sampler knows of no other."""
    runner = engine._model_runner
    engine.add(PROBE, LAW)
    responses = engine.step()
    (request_id,) = runner.requests  # ours and a suffix of vLLM's
    assert request_id.split("-")[0] == str(PROBE.index)
    assert set(runner.input_batch.req_id_to_index) == {request_id}
    assert set(runner.input_batch.generators) == {0}
    while not responses:
        responses = engine.step()
    engine.take_started()
    engine.take_counts()
    return responses[0]
