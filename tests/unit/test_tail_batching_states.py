"""The controller with tail batching under any order of events: nothing lost, nothing twice, nothing stale, nothing stuck.

A hypothesis state machine plays the engines and the verifiers; at any moment it may throw the controller away and go on
with one that is restored from the saved state and the events since.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from virtual_rollout import Reward, Setting, VirtualRollout, Workload, hashed_random

from rollpacker.messages import (
    AbortRequest,
    Action,
    EndRound,
    EngineProgress,
    Event,
    LaunchRequests,
    RejectGroup,
    RequestFinished,
    RequestStarted,
    RewardDone,
    RoundPlan,
    ScaleDown,
    ScoreResponse,
    TrainGroup,
    UpdatePlan,
    event_from_row,
    event_to_row,
)
from rollpacker.types import Request, RoundKind

settings_of_a_run = st.builds(
    Setting,
    num_prompts=st.integers(1, 24),
    num_domains=st.integers(1, 3),
    total_epochs=st.integers(1, 3),
    batch=st.integers(1, 5),
    n=st.integers(1, 4),
    eta_prompts=st.sampled_from([1.0, 1.25, 2.0]),
    eta_responses=st.sampled_from([1.0, 1.25, 2.0]),
    drain=st.sampled_from(["training", "epoch", "none"]),
    audit_fraction=st.sampled_from([0.0, 0.2, 1.0]),
    has_filter=st.booleans(),
    max_launched_ratio=st.sampled_from([1.0, 2.0, 4.0]),
    drops_failed=st.booleans(),
    num_gpus=st.integers(1, 4),
    kv_capacity_tokens=st.sampled_from([None, 200, 10**6]),
    seed=st.integers(0, 10),
)


class Books:
    """What must add up, kept from what can be seen outside the controller: plans, actions, updates and its saved state."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trained: Counter[tuple[str, int]] = Counter()
        self.gone: Counter[tuple[str, int]] = Counter()  # rejected or dropped
        self.queue: list[tuple[str, int]] = []

    def round_begins(self, plan: RoundPlan, queue: list[list]) -> None:
        """`queue` is what the plan has left of it."""
        keys = list(dict.fromkeys(r.prompt.key for r in plan.requests))
        old, self.queue = self.queue, [(p, e) for p, e, _ in queue]
        if plan.kind is RoundKind.LONG:
            taken = set(old[: len(keys)])  # first in, first out; what a boundary has just added stands behind
            assert taken <= set(keys)
            assert self.queue[: len(old) - len(taken)] == old[len(taken) :]
            assert len(plan.requests) == len(keys) * self.setting.n, "no race: R0 requests each"
            assert len(keys) <= self.setting.batch
        else:
            assert self.queue[: len(old)] == old
            assert len(keys) >= self.setting.batch == plan.num_groups

    def round_ends(
        self, plan: RoundPlan, events: list[Event], actions: list[Action], update: UpdatePlan, state
    ) -> None:
        setting = self.setting
        rejected = [a.prompt.key for a in actions if isinstance(a, RejectGroup)]
        dropped = [a for a in actions if isinstance(a, RejectGroup) and a.reason == "reward_error"]
        trained = [g.prompt.key for g in update.groups]
        self.trained.update(trained)
        self.gone.update(set(rejected) - set(trained))
        assert max(self.trained.values()) == 1, "trained at most once in the epoch of its draw"
        assert len(set(rejected)) == len(rejected)
        assert not dropped or setting.drops_failed
        if not setting.has_filter and not dropped:
            assert len(trained) == plan.num_groups, "exactly P0 groups"
        assert 1 <= len(trained) <= setting.batch
        assert all(len(g.responses) == setting.n for g in update.groups), "exactly R0 responses"
        assert update.num_sequences == len(trained) * setting.n
        ended = {e.request_index: e for e in events if isinstance(e, RequestFinished)}
        for response in (r for g in update.groups for r in g.responses):
            assert response.request.seed in {r.seed for r in self.launched(plan, actions)}, "of this round"
            assert ended[response.request.index].num_tokens == response.num_tokens
        queue = [(p, e) for p, e, _ in state["composer"]["queue"]]
        assert queue[: len(self.queue)] == self.queue, "newcomers join the tail"
        if plan.kind is RoundKind.LONG:
            assert queue == self.queue, "a LONG round leaves nothing over"
        self.queue = queue
        assert update.stats.long_queue_len == len(queue)

    @staticmethod
    def launched(plan: RoundPlan, actions: list[Action]) -> list[Request]:
        return [*plan.requests, *(r for a in actions if isinstance(a, LaunchRequests) for r in a.requests)]

    def run_ends(self, left: list[tuple[str, int]]) -> None:
        setting = self.setting
        everything = Counter((f"p{i}", e) for i in range(setting.num_prompts) for e in range(setting.total_epochs or 0))
        found = self.trained + self.gone + Counter(self.queue) + Counter(left)
        assert found == everything, "no prompt is lost, none is twice in the system"
        if setting.drain != "none":
            assert not self.queue and not left


class TailBatchMachine(RuleBasedStateMachine):
    """Engines that start and finish what they like, verifiers that answer when they like."""

    @initialize(setting=settings_of_a_run)
    def begin(self, setting: Setting) -> None:
        self.setting = setting
        self.controller, _, self.order = setting.build()
        self.books = Books(setting)
        self.step = 0
        self.plan: RoundPlan | None = None
        self._next_round()

    def _next_round(self) -> None:
        self.step += 1
        self.saved = json.dumps(self.controller.state_dict())
        self.plan = self.controller.begin_step(self.step)
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.idle: list[Request] = []
        self.running: list[Request] = []
        self.unscored: list[Request] = []
        self.leaving: list[Request] = []  # aborted, but their end may be on its way
        if self.plan is None:
            return
        self.books.round_begins(self.plan, self.controller._composer._queue.state_dict())
        self.idle = list(self.plan.requests)

    def _happen(self, event: Event) -> None:
        self.events.append(event)
        actions = self.controller.on(event)
        self.actions += actions
        for action in actions:
            if isinstance(action, ScoreResponse):
                self.unscored.append(action.request)
            elif isinstance(action, LaunchRequests):
                self.idle += action.requests
                assert not any(r.replica in self.controller.round.freed_replicas for r in action.requests)
            elif isinstance(action, AbortRequest):
                pool = self.idle if action.request in self.idle else self.running
                pool.remove(action.request)
                if pool is self.running:
                    self.leaving.append(action.request)
            elif isinstance(action, ScaleDown):
                self._migrate(action)
        if any(isinstance(a, EndRound) for a in actions):
            assert not self.idle and not self.running, "what ends a round leaves no request in an engine"
            for request in self.leaving[::2]:
                self._happen(RequestFinished(0.0, 0, request.index, 7, "stop"))
            update = self.controller.finish_step()
            assert self.plan is not None
            self.books.round_ends(self.plan, self.events, self.actions, update, self.controller.state_dict())
            self._next_round()

    def _migrate(self, action: ScaleDown) -> None:
        assert sum(isinstance(a, ScaleDown) for a in self.actions) == 1, "once a round"
        targets = dict(action.migrations)
        alive = [*self.idle, *self.running]
        assert targets.keys() == {r.index for r in alive if r.replica in action.freed_replicas}
        for pool in (self.idle, self.running):
            pool[:] = [replace(r, replica=targets.get(r.index, r.replica)) for r in pool]
            assert not any(r.replica in action.freed_replicas for r in pool)

    @precondition(lambda self: self.plan is not None and self.idle)
    @rule(i=st.integers(0, 10**6))
    def start(self, i: int) -> None:
        request = self.idle.pop(i % len(self.idle))
        self.running.append(request)
        self._happen(RequestStarted(0.0, 0, request.index))
        self._happen(EngineProgress(0.0, request.replica, 5, 0, 0.1, 5))

    @precondition(lambda self: self.plan is not None and self.running)
    @rule(i=st.integers(0, 10**6), tokens=st.integers(1, 1000))
    def finish(self, i: int, tokens: int) -> None:
        request = self.running.pop(i % len(self.running))
        self._happen(RequestFinished(0.0, 0, request.index, tokens, "stop"))

    @precondition(lambda self: self.plan is not None and self.unscored)
    @rule(i=st.integers(0, 10**6), score=st.sampled_from([0.0, 1.0]), is_error=st.sampled_from([False, False, True]))
    def score(self, i: int, score: float, is_error: bool) -> None:
        request = self.unscored.pop(i % len(self.unscored))
        self._happen(RewardDone(0.0, 0, request.index, 0.0 if is_error else score, is_error, 0.1))

    @precondition(lambda self: self.plan is not None and self.leaving)
    @rule(i=st.integers(0, 10**6))
    def finish_late(self, i: int) -> None:
        request = self.leaving.pop(i % len(self.leaving))
        self._happen(RequestFinished(0.0, 0, request.index, 9, "stop"))

    @precondition(lambda self: self.plan is not None)
    @rule()
    def crash_and_restore(self) -> None:
        """Another controller, the saved state and the log of the open round: the same actions, then the same continuation."""
        log = json.loads(json.dumps([event_to_row(e) for e in self.events]))
        controller, _, order = self.setting.build()
        controller.load_state_dict(json.loads(self.saved))
        plan, actions = controller.replay(self.step, [event_from_row(row) for row in log])
        assert (plan, actions, controller.digest) == (self.plan, self.actions, self.controller.digest)
        self.controller, self.order = controller, order

    @precondition(lambda self: self.plan is None)
    @rule()
    def rest(self) -> None:
        assert self.controller.begin_step(self.step) is None, "a run that has ended stays ended"

    def teardown(self) -> None:
        """Whatever has happened, the run can be brought to its end."""
        if not hasattr(self, "setting"):
            return
        for i in range(200_000):
            if self.plan is None:
                break
            if self.unscored and (i % 3 == 0 or not self.running):
                self.score(i * 7, score=float(i % 2), is_error=i % 11 == 0)
            elif self.idle and (i % 2 == 0 or not self.running):
                self.start(0)
            else:
                assert self.running, "the round is stuck"
                self.finish(i * 5, tokens=1 + i % 300)
        assert self.plan is None
        left = [p.key for p in self.order.draw(10**6)]
        self.books.queue = [(p, e) for p, e, _ in self.controller._composer._queue.state_dict()]
        self.books.run_ends(left)


TestTailBatchMachine = TailBatchMachine.TestCase
TestTailBatchMachine.settings = settings(max_examples=60, stateful_step_count=120, deadline=None)


def random_workload(seed: int, num_slots: int, quantum: int) -> Workload:
    def length(step: int, request: Request) -> int:
        noise = hashed_random(seed, "length", step, request.seed)
        return 1000 if noise.random() < 0.05 else 1 + int(noise.expovariate(1 / 60)) % 999

    def reward(step: int, request: Request) -> Reward:
        noise = hashed_random(seed, "reward", step, request.seed)
        return Reward(float(noise.random() < 0.5), noise.random() < 0.05, 1 + int(noise.expovariate(1 / 20)))

    return Workload(length, reward, num_slots, quantum)


@given(settings_of_a_run, st.integers(0, 1000), st.integers(1, 20), st.sampled_from([1, 10, 100]))
@settings(max_examples=60, deadline=None)
def test_whole_runs_in_virtual_time_add_up(setting: Setting, seed: int, num_slots: int, quantum: int) -> None:
    controller, scheduler, order = setting.build()
    rollout = VirtualRollout(random_workload(seed, num_slots, quantum))
    books = Books(setting)
    step = 1
    while (plan := controller.begin_step(step)) is not None:
        books.round_begins(plan, scheduler.state_dict()["queue"])
        rollout.launch(plan)
        for event in rollout.events():
            for action in controller.on(event):
                rollout.apply(action)
        update = controller.finish_step()
        log = rollout.rounds[-1]
        books.round_ends(plan, log.events, log.actions, update, controller.state_dict())
        stats = update.stats
        assert stats.num_tokens_generated == update.num_tokens + stats.num_tokens_wasted
        step += 1
    books.queue = [(p, e) for p, e, _ in scheduler.state_dict()["queue"]]
    books.run_ends([p.key for p in order.draw(10**6)])


def test_a_run_of_100_000_events_restored_every_10_rounds_equals_one_that_was_not() -> None:
    setting = Setting(
        num_prompts=600,
        total_epochs=6,
        batch=16,
        n=8,
        eta_prompts=1.25,
        eta_responses=1.25,
        audit_fraction=0.05,
        has_filter=True,
        drops_failed=True,
        num_domains=3,
    )
    rollouts, digests = [], []
    for restores in (False, True):
        controller, _, _ = setting.build()
        rollout = VirtualRollout(random_workload(1, 40, 20))
        step = 1
        while (plan := controller.begin_step(step)) is not None:
            rollout.launch(plan)
            for event in rollout.events():
                for action in controller.on(event):
                    rollout.apply(action)
            rollout.apply_update(controller.finish_step())
            if restores and step % 10 == 0:
                state = json.loads(json.dumps(controller.state_dict()))
                controller, _, _ = setting.build()
                controller.load_state_dict(state)
            step += 1
        rollouts.append(rollout)
        digests.append(controller.digest)
    assert sum(len(log.events) for log in rollouts[0].rounds) > 100_000
    assert digests[0] == digests[1]
    assert rollouts[0].updates == rollouts[1].updates


def test_the_state_is_saved_between_rounds_only() -> None:
    controller, _, _ = Setting().build()
    controller.begin_step(1)
    with pytest.raises(RuntimeError, match="inside a round"):
        controller.state_dict()


def test_a_group_is_streamed_once_and_is_the_one_that_is_trained() -> None:
    rollout = Setting(has_filter=True).run(random_workload(3, 10, 10))
    for log in rollout.rounds:
        streamed = [a.group for a in log.actions if isinstance(a, TrainGroup)]
        assert sorted(g.prompt.key for g in streamed) == sorted(g.prompt.key for g in log.update.groups)
