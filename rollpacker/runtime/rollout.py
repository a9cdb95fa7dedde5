"""LiveRollout: one round on this rank's engine, its rewards, and the exchange that tells everybody.

A quantum is k engine steps. After it the rank posts what happened and folds in what happened everywhere one quantum ago;
the controller's actions are applied right there, between two engine steps, at the same step on every rank of a
tensor-parallel group. (docs/architecture.md, 2)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rollpacker.comm.exchange import EventExchange, QuantumReport
from rollpacker.comm.samples import Sample
from rollpacker.comm.world import World
from rollpacker.data.tasks import Example
from rollpacker.loop import RunStopped
from rollpacker.messages import (
    AbortRequest,
    Action,
    EndRound,
    EngineProgress,
    Event,
    LaunchRequests,
    RequestFinished,
    RequestStarted,
    RewardDone,
    RoundPlan,
    ScoreResponse,
)
from rollpacker.profiling.trace import Span
from rollpacker.reward.scheduler import RewardScheduler
from rollpacker.rollout.engine import RolloutEngine, SamplingLaw
from rollpacker.runtime.watchdog import Heartbeat
from rollpacker.types import Request, Response

# Deterministic mode: every quantum has this many engine steps, and a step lasts a virtual millisecond.
_FIXED_NUM_STEPS = 16
_VIRTUAL_STEP_S = 1e-3
_MAX_NUM_STEPS = 256
_MIN_PAUSE_S = 3e-3  # when all replicas are idle, exchanges follow one another no faster than this


class Rollout(Protocol):
    """What a backend needs of a rollout, be it decoded now or replayed from a dump."""

    def launch(self, plan: RoundPlan) -> None:
        """Open the round."""

    def events(self, digest: Callable[[], int]) -> Iterator[Event]:
        """The round's events in the common order, until EndRound has been applied."""

    def apply(self, action: Action) -> None:
        """Carry out an action that names this rank's replica."""

    def take_samples(self) -> dict[int, Sample]:
        """Tokens of the round's responses that this rank answers for, by request index."""

    def take_spans(self) -> tuple[list[Span], list[str]]:
        """Trace spans, and the messages of rewards that failed, since the last call."""

    @property
    def facts(self) -> RoundFacts:
        """Times of the round on this rank."""

    num_virtual_steps: int
    """The clock of deterministic runs."""


@dataclass
class RoundFacts:
    """Seconds on this rank: launch time (event clock), engine busy, CPU time of launch and engine steps (on the thread that
    makes them), CPU time of exchange and controller, wall.
    """

    launch_s: float = 0.0
    engine_busy_s: float = 0.0
    engine_cpu_s: float = 0.0
    control_cpu_s: float = 0.0
    wall_s: float = 0.0
    num_quanta: int = 0


@dataclass(frozen=True)
class Placement:
    """Which rollout replica this rank belongs to; the leader of a replica speaks for it."""

    replica: int
    leader_rank: int
    is_leader: bool


def place(rank: int, tensor_model_parallel_size: int) -> Placement:
    """Replicas are contiguous ranks, as vLLM's external launcher lays them out."""
    replica = rank // tensor_model_parallel_size
    leader = replica * tensor_model_parallel_size
    return Placement(replica, leader, rank == leader)


class LiveRollout:
    """Decodes a round with the vLLM engine of this rank.

    A validation has a LiveRollout of its own, with its law and its examples (their ids may be the training's) and its
    own clock and pace, so that the training's go on as if nothing had been between two rounds. It keeps the answers.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        exchange: EventExchange,
        rewards: RewardScheduler | None,
        world: World,
        placement: Placement,
        examples: Mapping[str, Example],
        tokenizer: Any,
        law: SamplingLaw,
        *,
        quantum_s: float,
        deterministic: bool,
        is_validation: bool = False,
        is_raced: bool = False,
        wants_to_stop: Callable[[], bool] = lambda: False,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """`is_raced`: the controller wants to know which requests have got a token. Once `wants_to_stop` holds on any rank,
        the round is dropped on all of them. `heartbeat` is told what happens.
        """
        self._heartbeat = heartbeat or Heartbeat()
        self._engine = engine
        self._exchange = exchange
        self._rewards = rewards
        self._world = world
        self._placement = placement
        self._examples = examples
        self._tokenizer = tokenizer
        self._law = law
        self._is_validation = is_validation
        self._is_raced = is_raced
        self._wants_to_stop = wants_to_stop
        self._quantum_s = quantum_s
        self._deterministic = deterministic
        self._num_steps = _FIXED_NUM_STEPS if deterministic else 1
        self._step_s = quantum_s
        self._steps_in_quantum = 0
        # Whole steps: the sum of their seconds would depend on its order, and so on the rank.
        self.num_virtual_steps = 0
        self._step = 0
        self._is_open = False
        self._responses: dict[int, Response] = {}
        self._answers: dict[int, str | None] = {}
        self.facts = RoundFacts()
        self._spans: list[Span] = []
        self._reward_messages: list[str] = []
        self._busy_since: float | None = None
        self._launch_wall_s = 0.0

    def launch(self, plan: RoundPlan) -> None:
        """Give this replica's requests to the engine, in launch order."""
        self._step, self._is_open = plan.step, True
        self._responses.clear()
        self.facts = RoundFacts(launch_s=self._now())
        self._launch_wall_s = self._world.now()
        start = time.thread_time()
        self._add(plan.requests)
        self.facts.engine_cpu_s = time.thread_time() - start

    def events(self, digest: Callable[[], int]) -> Iterator[Event]:
        """Run quanta and exchange until the round has ended; what is then on the way is folded in too.

        Raises RunStopped when a rank wants to stop and the round is open, at the same quantum on all ranks.
        """
        start = time.perf_counter()
        while self._is_open:
            self._run_quantum()
            self._post(digest())
            if self._exchange.num_outstanding == 2:
                yield from self._fold()
        while self._exchange.num_outstanding:
            yield from self._fold()
        self._mark_idle()
        self._exchange.discard_unsent()
        self.facts.wall_s = time.perf_counter() - start

    def apply(self, action: Action) -> None:
        """Score, launch, abort or end; actions for other replicas pass by."""
        if isinstance(action, ScoreResponse):
            if self._placement.is_leader and action.request.replica == self._placement.replica:
                self._score(action)
        elif isinstance(action, LaunchRequests):
            self._add(action.requests)
        elif isinstance(action, AbortRequest):
            if action.request.replica == self._placement.replica:
                self._engine.abort([action.request])
        elif isinstance(action, EndRound):
            self._is_open = False

    def take_samples(self) -> dict[int, Sample]:
        """The finished responses of this replica, on its leader."""
        if not self._placement.is_leader:
            return {}
        samples = {index: _to_sample(response) for index, response in self._responses.items()}
        self._responses.clear()
        return samples

    def take_answers(self) -> dict[int, str | None]:
        """What the responses of this replica answer, on its leader, by request index; of a validation only."""
        taken, self._answers = self._answers, {}
        return taken

    def take_spans(self) -> tuple[list[Span], list[str]]:
        """Bars of the requests and of the engine; failures of rewards."""
        taken = self._spans, self._reward_messages
        self._spans, self._reward_messages = [], []
        return taken

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.replica == self._placement.replica:
                self._engine.add(request, self._law)

    @property
    def _round_tag(self) -> int:
        """Tells the rewards of a step's rollout from those of the validation after it, and both from other steps'."""
        return self._step << 1 | self._is_validation

    def _now(self) -> float:
        return self.num_virtual_steps * _VIRTUAL_STEP_S if self._deterministic else self._world.now()

    def _run_quantum(self) -> None:
        start, start_cpu = time.perf_counter(), time.thread_time()
        num_steps = 0
        if self._engine.num_requests:
            self._mark_busy()
        while num_steps < self._num_steps and self._engine.num_requests:
            responses = self._engine.step()
            self._on_started(self._engine.take_started())
            for response in responses:
                self._on_response(response)
            num_steps += 1
            self.num_virtual_steps += 1
            self._exchange.progress()
            if not self._deterministic:
                self._collect_rewards(wait=False)
        busy_s = time.perf_counter() - start
        self._steps_in_quantum = num_steps
        if num_steps:
            self.facts.engine_busy_s += busy_s
            self.facts.engine_cpu_s += time.thread_time() - start_cpu
            self._step_s = busy_s / num_steps
        self.num_virtual_steps += self._num_steps - num_steps
        if not self._engine.num_requests:
            self._mark_idle()
            self._pause()
        self._collect_rewards(wait=self._deterministic)
        self.facts.num_quanta += 1
        self._heartbeat.quantum()

    def _pause(self) -> None:
        """An idle replica keeps joining the exchange, but sleeps until it has news or the others have."""
        start = time.perf_counter()
        while (idle_s := time.perf_counter() - start) < self._quantum_s:
            if not self._deterministic and self._collect_rewards(wait=False):
                return
            if idle_s > _MIN_PAUSE_S and self._exchange.is_ready():
                return
            time.sleep(0.5e-3)

    def _on_started(self, requests: Sequence[Request]) -> None:
        """A race has to know who has got a token; without one nobody asks."""
        if self._is_raced and self._placement.is_leader:
            for request in requests:
                self._exchange.add(RequestStarted(self._now(), self._world.rank, request.index))

    def _on_response(self, response: Response) -> None:
        if not self._placement.is_leader:
            return
        request = response.request
        self._responses[request.index] = response
        now = self._now()
        self._exchange.add(
            RequestFinished(now, self._world.rank, request.index, len(response.token_ids), response.finish_reason)
        )
        arguments = {"prompt_id": request.prompt.prompt_id, "tokens": len(response.token_ids), "step": self._step}
        name = f"{request.prompt.prompt_id}/{request.response_index}"
        self._spans.append(Span(name, self._world.rank, "request", self._launch_wall_s, self._world.now(), arguments))

    def _score(self, action: ScoreResponse) -> None:
        assert self._rewards is not None, "a leader has a reward scheduler"
        response = self._responses[action.request.index]
        example = self._examples[action.request.prompt.prompt_id]
        self._rewards.submit(
            (self._round_tag << 32) | action.request.index,
            response=self._tokenizer.decode(response.token_ids, skip_special_tokens=True),
            prompt=example.text,
            ground_truth=example.ground_truth,
            finish_reason=response.finish_reason,
            domain=example.domain,
            prompt_id=example.prompt_id,
            timeout_s=action.timeout_s,
            wants_answer=self._is_validation,
        )

    def _collect_rewards(self, *, wait: bool) -> bool:
        """Queue the events of rewards that are in; those of a round that is over are dropped."""
        if self._rewards is None:
            return False
        results = self._rewards.wait() if wait else self._rewards.poll()
        for result in sorted(results, key=lambda r: r.request_index):
            tag, index = result.request_index >> 32, result.request_index & 0xFFFFFFFF
            if tag != self._round_tag:
                continue
            if self._is_validation:
                self._answers[index] = result.answer
            if result.is_error:
                self._reward_messages.append(result.message)
            execution_s = result.execution_s if result.is_error or not self._deterministic else 0.0
            self._exchange.add(
                RewardDone(self._now(), self._world.rank, index, result.score, result.is_error, execution_s)
            )
        return bool(results)

    def _report(self, digest: int) -> QuantumReport:
        new_tokens, preemptions = self._engine.take_counts()
        progress = EngineProgress(
            self._now(),
            self._world.rank,
            new_tokens,
            preemptions,
            self._engine.kv_cache_usage,
            self._steps_in_quantum,
        )
        wanted = _FIXED_NUM_STEPS
        if not self._deterministic:
            wanted = min(max(round(self._quantum_s / max(self._step_s, 1e-6)), 1), _MAX_NUM_STEPS)
        return QuantumReport(digest, self._placement.is_leader, wanted, progress, self._wants_to_stop())

    def _post(self, digest: int) -> None:
        start = time.thread_time()
        self._exchange.post(self._report(digest))
        self.facts.control_cpu_s += time.thread_time() - start

    def _fold(self) -> Iterator[Event]:
        """Complete the oldest exchange. The controller and its actions run while an event is yielded, so they count too;
        waiting for other ranks sleeps, and does not.
        """
        start = time.thread_time()
        quantum = self._exchange.complete()
        self._num_steps = quantum.next_num_steps[self._placement.leader_rank]
        if quantum.is_stopped and self._is_open:
            self._drop()
        for event in quantum.events:
            self._heartbeat.event(event)
            yield event
        self.facts.control_cpu_s += time.thread_time() - start

    def _drop(self) -> None:
        """Complete what is outstanding, so that nothing of this round is left in the exchange or in the engine."""
        while self._exchange.num_outstanding:
            self._exchange.complete()
        self._exchange.discard_unsent()
        self._engine.abort_all()
        self._is_open = False
        self._mark_idle()
        raise RunStopped("the round was dropped")

    def _mark_busy(self) -> None:
        if self._busy_since is None:
            self._busy_since = self._world.now()

    def _mark_idle(self) -> None:
        """Contiguous busy quanta become one bar of the trace."""
        if self._busy_since is not None:
            self._spans.append(
                Span("decode", self._world.rank, "engine", self._busy_since, self._world.now(), {"step": self._step})
            )
            self._busy_since = None


def _to_sample(response: Response) -> Sample:
    return Sample(
        response.request.index,
        np.asarray(response.request.prompt.token_ids, np.int32),
        np.asarray(response.token_ids, np.int32),
        np.asarray(response.rollout_logprobs, np.float32),
    )
