"""A rollout in virtual time, for the policies' tests: replicas with slots decode a token a tick; rewards take ticks.

Events are handed out by quanta, as the exchange does: what the controller decides in the middle of one does not unmake
the events behind it, so late finishes occur.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollpacker.data.prompts import PromptOrder
from rollpacker.loop import run
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
)
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.controller import StepController
from rollpacker.policy.filters import ZeroVarianceFilter
from rollpacker.policy.launch import RoundLauncher
from rollpacker.policy.planner import SchedulePlanner
from rollpacker.policy.routing import BalancedRouter
from rollpacker.policy.scale_down import ScaleDownPolicy
from rollpacker.policy.tail_batching import TailBatchOptions, TailBatchScheduler
from rollpacker.types import Request


@dataclass(frozen=True)
class Reward:
    """What the verifier says, and after how many ticks."""

    score: float
    is_error: bool = False
    ticks: int = 1


@dataclass
class Workload:
    """Lengths and rewards, functions of (step, request)."""

    length: Callable[[int, Request], int]
    reward: Callable[[int, Request], Reward] = lambda step, request: Reward(1.0)
    num_slots: int = 10**9  # per replica
    quantum: int = 1


@dataclass
class RoundLog:
    """One round as it was seen from outside."""

    plan: RoundPlan
    events: list[Event] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    update: UpdatePlan | None = None

    def keys(self, kind: type) -> list[tuple[str, int]]:
        return [a.prompt.key for a in self.actions if isinstance(a, kind)]


class VirtualRollout:
    """A Backend of the main loop."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.rounds: list[RoundLog] = []

    def between_steps(self) -> None:
        """Nobody stops it."""

    def launch(self, plan: RoundPlan) -> None:
        self.rounds.append(RoundLog(plan))
        self.step, self.now, self.is_open = plan.step, 0, True
        self.size = plan.tensor_model_parallel_size
        self.waiting: dict[int, list[tuple[int, Request]]] = {}
        # index -> ticks of its start and of its end, and the replica that began it: a migration is not played here
        self.running: dict[int, tuple[int, int, int]] = {}
        self.num_running: dict[int, int] = {}
        self.gone: set[int] = set()
        self.freed: tuple[int, ...] = ()
        self.heap: list[tuple[int, int, int, str, object]] = []  # tick, rank, order, kind, what
        self.order = 0
        self.new_tokens = 0
        self._add(plan.requests)

    def events(self):
        log = self.rounds[-1]
        while self.is_open:
            assert self.heap, "the round hangs: nothing will ever happen again"
            end = self.heap[0][0] + self.workload.quantum
            batch: list[Event] = []
            while self.heap and self.heap[0][0] < end:
                tick, rank, _, kind, what = heapq.heappop(self.heap)
                self.now = tick
                batch += self._happen(tick, rank, kind, what)
            batch.append(EngineProgress(float(end), 0, self.new_tokens, 0, 0.0, 1))
            self.new_tokens = 0
            for event in batch:
                log.events.append(event)
                yield event

    def _happen(self, tick: int, rank: int, kind: str, what: object) -> list[Event]:
        if kind == "reward":
            assert isinstance(what, tuple)
            index, reward = what
            return [RewardDone(float(tick), rank, index, reward.score, reward.is_error, float(reward.ticks))]
        request = what
        assert isinstance(request, Request)
        if request.index in self.gone:
            return []
        if kind == "start":
            return [RequestStarted(float(tick), rank, request.index)]
        start, end, replica = self.running.pop(request.index)
        length = end - start
        self.new_tokens += length
        self._leave(replica, tick)
        reason = "length" if length >= request.max_tokens else "stop"
        return [RequestFinished(float(tick), rank, request.index, length, reason)]

    def apply(self, action: Action) -> None:
        self.rounds[-1].actions.append(action)
        if isinstance(action, ScoreResponse):
            reward = self.workload.reward(self.step, action.request)
            self._push(self.now + reward.ticks, action.request.replica, "reward", (action.request.index, reward))
        elif isinstance(action, LaunchRequests):
            assert not any(r.replica in self.freed for r in action.requests), (
                "a replica that trains decodes nothing new"
            )
            self._add(action.requests)
        elif isinstance(action, AbortRequest):
            self.gone.add(action.request.index)
            if action.request.index in self.running:
                start, _, replica = self.running.pop(action.request.index)
                self.new_tokens += max(self.now - start, 0)
                self._leave(replica, self.now)
        elif isinstance(action, EndRound):
            self.is_open = False
        elif isinstance(action, ScaleDown):
            moved = [index for index, _ in action.migrations]
            assert not self.gone.intersection(moved), "an aborted request has nothing to migrate"
            self.freed = action.freed_replicas
        else:
            assert isinstance(action, TrainGroup | RejectGroup)

    def apply_update(self, update: UpdatePlan) -> None:
        self.rounds[-1].update = update

    def sync_weights(self) -> None:
        pass

    @property
    def updates(self) -> list[UpdatePlan]:
        return [r.update for r in self.rounds if r.update is not None]

    def _push(self, tick: int, rank: int, kind: str, what: object) -> None:
        self.order += 1
        heapq.heappush(self.heap, (tick, rank, self.order, kind, what))

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            heapq.heappush(self.waiting.setdefault(request.replica, []), (request.index, request))
        for replica in sorted({r.replica for r in requests}):
            self._fill(replica, self.now)

    def _leave(self, replica: int, tick: int) -> None:
        self.num_running[replica] -= 1
        self._fill(replica, tick)

    def _fill(self, replica: int, tick: int) -> None:
        """Admit waiting requests in launch order (vLLM's priority)."""
        waiting = self.waiting.get(replica, [])
        while waiting and self.num_running.get(replica, 0) < self.workload.num_slots:
            _, request = heapq.heappop(waiting)
            if request.index in self.gone:
                continue
            end = tick + self.workload.length(self.step, request)
            self.running[request.index] = tick, end, replica
            self.num_running[replica] = self.num_running.get(replica, 0) + 1
            self._push(tick + 1, replica * self.size, "start", request)
            self._push(end, replica * self.size, "finish", request)


def hashed_random(*what: object) -> random.Random:
    """Noise that is a function of its name, so that a run and its continuation see the same."""
    return random.Random("/".join(map(str, what)))


def numbered_prompts(n: int, num_domains: int = 1) -> list[tuple[str, tuple[int, ...], str]]:
    return [(f"p{i}", (1, 2), f"d{i % num_domains}") for i in range(n)]


@dataclass
class Setting:
    """Everything that a tail-batching run is made of, small by default."""

    num_prompts: int = 40
    num_domains: int = 1
    total_epochs: int | None = 1
    batch: int = 4
    n: int = 2
    eta_prompts: float = 1.5
    eta_responses: float = 1.5
    max_tokens: int = 1000
    drain: str = "training"
    total_steps: int | None = None
    audit_fraction: float = 0.0
    has_filter: bool = False
    max_launched_ratio: float = 4.0
    drops_failed: bool = False
    num_gpus: int = 4
    schedule: tuple[int, ...] = (1,)
    kv_capacity_tokens: int | None = None  # scale-down in all rounds, where it is given
    seed: int = 0

    def build(self) -> tuple[StepController, TailBatchScheduler, PromptOrder]:
        """A controller, and its scheduler and source to look into."""
        order = PromptOrder(
            numbered_prompts(self.num_prompts, self.num_domains),
            seed=self.seed,
            shuffle=False,
            total_epochs=self.total_epochs,
        )
        audit = SampleAudit(fraction=self.audit_fraction, seed=self.seed)
        launcher = RoundLauncher(
            SchedulePlanner(self.schedule),
            num_gpus=self.num_gpus,
            max_tokens=self.max_tokens,
            seed=self.seed,
            make_router=lambda size, predict: BalancedRouter(self.num_gpus // size, predict),
        )
        scheduler = TailBatchScheduler(
            order,
            launcher,
            TailBatchOptions(
                train_batch_size=self.batch,
                num_responses=self.n,
                eta_prompts=self.eta_prompts,
                eta_responses=self.eta_responses,
                drain=self.drain,
                total_steps=self.total_steps,
                max_launched_ratio=self.max_launched_ratio,
                drop_failed_groups=self.drops_failed,
            ),
            audit=audit,
            group_filter=ZeroVarianceFilter() if self.has_filter else None,
        )
        scale_down = None
        if self.kv_capacity_tokens is not None:
            scale_down = ScaleDownPolicy(
                num_gpus=self.num_gpus,
                training_replica_size=1,
                capacity_tokens=lambda tp: self.kv_capacity_tokens,
                expect=lambda n: 50.0,
                all_rounds=True,
            )
        controller = StepController(scheduler, scheduler, reward_timeout_s=9.0, audit=audit, scale_down=scale_down)
        return controller, scheduler, order

    def run(self, workload: Workload) -> VirtualRollout:
        """The whole run."""
        controller, _, _ = self.build()
        rollout = VirtualRollout(workload)
        run(self.total_steps, controller, rollout)
        return rollout
