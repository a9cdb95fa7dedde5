"""The controller in mode `off`: every prompt drawn is trained once, whatever the order in which things finish."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.loop import run
from rollpacker.messages import (
    Action,
    EndRound,
    EngineProgress,
    Event,
    RequestFinished,
    RequestStarted,
    RewardDone,
    RoundPlan,
    ScoreResponse,
    TrainGroup,
    UpdatePlan,
    event_from_row,
    event_to_row,
)
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.controller import StepController
from rollpacker.policy.launch import RoundLauncher, request_seed
from rollpacker.policy.plain import PlainRollout
from rollpacker.policy.planner import FixedPlanner
from rollpacker.types import Prompt


class ListSource:
    """Prompts from a list."""

    def __init__(self, num_prompts: int) -> None:
        self.left = [Prompt(f"p{i}", (1, 2)) for i in range(num_prompts)]

    def draw(self, n: int) -> list[Prompt]:
        drawn, self.left = self.left[:n], self.left[n:]
        return drawn


def make_controller(num_prompts: int, batch: int = 4, n: int = 3, replicas: int = 2, **options) -> StepController:
    launcher = RoundLauncher(FixedPlanner(1), num_gpus=replicas, max_tokens=10, seed=0)
    rollout = PlainRollout(ListSource(num_prompts), launcher, train_batch_size=batch, num_responses=n)
    return StepController(rollout, rollout, reward_timeout_s=2.0, **options)


class ShuffledBackend:
    """Finishes requests, and returns rewards, in a random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.updates: list[UpdatePlan] = []
        self.streamed: list[str] = []
        self.weight_version = 0

    def between_steps(self) -> None:
        """Nobody stops it."""

    def launch(self, plan: RoundPlan) -> None:
        self.is_open = True
        self.streamed = []
        self.pending: list[Event] = [
            RequestFinished(0.0, 0, r.index, self.random.randrange(1, 10), "stop") for r in plan.requests
        ]

    def events(self):
        yield EngineProgress(0.0, 0, 5, 1, 0.5)
        while self.is_open:
            yield self.pending.pop(self.random.randrange(len(self.pending)))
        assert not self.pending

    def apply(self, action: Action) -> None:
        if isinstance(action, ScoreResponse):
            self.pending.append(RewardDone(0.0, 0, action.request.index, 1.0, False, 0.1))
        elif isinstance(action, TrainGroup):
            self.streamed.append(action.group.prompt.prompt_id)
        elif isinstance(action, EndRound):
            self.is_open = False

    def apply_update(self, update: UpdatePlan) -> None:
        assert sorted(g.prompt.prompt_id for g in update.groups) == sorted(self.streamed)
        self.updates.append(update)

    def sync_weights(self) -> None:
        self.weight_version += 1


@given(st.integers(0, 25), st.integers(1, 6), st.integers(2, 4), st.integers(0, 1000))
def test_every_prompt_is_trained_exactly_once(num_prompts: int, batch: int, n: int, seed: int) -> None:
    backend = ShuffledBackend(seed)
    num_steps = run(None, make_controller(num_prompts, batch, n), backend)
    trained = [g.prompt.prompt_id for u in backend.updates for g in u.groups]
    assert trained == [f"p{i}" for i in range(num_prompts)]  # launch order, however they finished
    assert num_steps == backend.weight_version == -(-num_prompts // batch)
    for update in backend.updates:
        assert all(len(g.responses) == n for g in update.groups)
        assert update.num_sequences == n * len(update.groups)
        assert update.num_tokens == sum(r.num_tokens for g in update.groups for r in g.responses)


@given(st.integers(0, 1000))
def test_the_same_events_give_the_same_digest(seed: int) -> None:
    digests = []
    for _ in range(2):
        controller = make_controller(8)
        run(None, controller, ShuffledBackend(seed))
        digests.append(controller.digest)
    assert digests[0] == digests[1]


def test_a_different_event_changes_the_digest() -> None:
    controllers = [make_controller(1, n=2) for _ in range(2)]
    for controller, tokens in zip(controllers, (3, 4), strict=True):
        controller.begin_step(1)
        controller.on(RequestFinished(0.0, 0, 0, tokens, "stop"))
    assert controllers[0].digest != controllers[1].digest


def test_a_request_cannot_finish_or_be_scored_twice() -> None:
    controller = make_controller(1, n=2)
    controller.begin_step(1)
    controller.on(RequestFinished(0.0, 0, 0, 3, "stop"))
    with pytest.raises(RuntimeError, match="finished twice"):
        controller.on(RequestFinished(0.0, 0, 0, 3, "stop"))
    controller.on(RewardDone(0.0, 0, 0, 1.0, False, 0.0))
    with pytest.raises(RuntimeError, match="scored twice"):
        controller.on(RewardDone(0.0, 0, 0, 1.0, False, 0.0))


def test_without_a_race_every_group_is_audited() -> None:
    backend = ShuffledBackend(1)
    audit = SampleAudit(fraction=1.0, seed=0)
    run(None, make_controller(40, batch=20, audit=audit), backend)
    first, last = (u.stats.audit for u in backend.updates)
    assert first is not None and (first.num_groups, first.icc, first.coverage_p95) == (20, None, None)
    assert last is not None and last.num_groups == 40
    assert last.coverage_p95 == last.own_coverage_p95 == pytest.approx(1.0)


def test_a_late_end_and_a_start_change_no_result() -> None:
    """Only a race asks for them; the books count each response once."""
    controller = make_controller(1, n=2)
    controller.begin_step(1)
    assert controller.on(RequestStarted(0.0, 0, 0)) == []
    for index in (0, 1):
        controller.on(RequestFinished(0.0, 0, index, 3, "stop"))
        controller.on(RewardDone(0.0, 0, index, 1.0, False, 0.1))
    assert controller.on(RequestFinished(0.0, 0, 1, 3, "stop")) == []  # after the end of the round
    assert controller.finish_step().num_tokens == 6


@pytest.mark.parametrize(
    "event",
    [
        RequestStarted(0.5, 1, 2),
        RequestFinished(0.5, 1, 2, 30, "length"),
        RewardDone(0.5, 1, 2, 1.0, True, 2.5, (1.0, 1.5)),
        EngineProgress(0.5, 1, 100, 2, 0.25, 16),
    ],
)
def test_an_event_survives_a_log(event: Event) -> None:
    assert event_from_row(json.loads(json.dumps(event_to_row(event)))) == event


def test_responses_of_a_group_spread_over_replicas() -> None:
    plan = make_controller(4, batch=4, n=4, replicas=2).begin_step(1)
    assert plan is not None
    for prompt in {r.prompt.prompt_id for r in plan.requests}:
        assert sorted(r.replica for r in plan.requests if r.prompt.prompt_id == prompt) == [0, 0, 1, 1]
    assert [r.index for r in plan.requests] == list(range(16))


def test_seeds_differ_by_step_prompt_and_response() -> None:
    seeds = {
        request_seed(run, s, Prompt(p, epoch=e), i)
        for run in (0, 1)
        for s in range(3)
        for p in "ab"
        for e in (0, 1)
        for i in range(4)
    }
    assert len(seeds) == 2 * 3 * 2 * 2 * 4
    assert all(0 <= s < 2**52 for s in seeds)


def test_a_round_may_hold_the_same_prompt_of_two_epochs() -> None:
    """As when the data are fewer than the batch, or do not divide by it: two groups, two sets of seeds."""
    from rollpacker.data.prompts import PromptOrder

    order = PromptOrder(
        [("a", (1,), "default"), ("b", (2,), "default"), ("c", (3,), "default")], seed=0, shuffle=True, total_epochs=4
    )
    launcher = RoundLauncher(FixedPlanner(1), num_gpus=1, max_tokens=4, seed=0)
    rollout = PlainRollout(order, launcher, train_batch_size=5, num_responses=2)
    backend = ShuffledBackend(1)
    assert run(None, StepController(rollout, rollout, reward_timeout_s=1.0), backend) == 3
    trained = [g.prompt.key for u in backend.updates for g in u.groups]
    assert sorted(trained) == [(p, e) for p in "abc" for e in range(4)]
    seeds = {r.request.seed for u in backend.updates for g in u.groups for r in g.responses}
    assert len(seeds) == 3 * 4 * 2
