"""SimulatedBackend: carries the controller's decisions out in virtual time, for the one main loop (`loop.py`).

An event heap holds what is known to come: the next event of each replica, first tokens, rewards. The backend hands events
to the controller in the order (time, rank, sequence) and applies its actions at the time of the event; a replica that has
begun a step completes it, so a response that ends with this step still ends ("late").

Invariants: virtual time never goes back; of every replica busy + idle seconds are the round's wall time; tokens generated
are tokens of finished responses plus those of aborted ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollpacker.config import Config
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
    UpdatePlan,
)
from rollpacker.simulator.cluster import Cluster
from rollpacker.simulator.engine import Replica
from rollpacker.simulator.record import RoundFacts, StepFacts, StepSink
from rollpacker.simulator.reward import Outcome, RewardQueues
from rollpacker.simulator.training import TrainingCost
from rollpacker.simulator.workload import Workload
from rollpacker.types import Request

_Pending = tuple[float, int, int, "int | list[int] | tuple[int, Outcome]"]


@dataclass
class _Round:
    """The open round: its engines, its requests by index, and what is to come."""

    plan: RoundPlan
    replicas: list[Replica]
    rewards: RewardQueues
    launch_s: float
    requests: list[Request] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    heap: list[_Pending] = field(default_factory=list)  # (time, rank, sequence, replica | first tokens | reward)
    versions: list[int] = field(default_factory=list)  # by replica: the sequence of its valid event
    dirty: set[int] = field(default_factory=set)  # replicas whose running set changed since they were scheduled
    sequence: int = 0
    is_open: bool = True
    last_finish_s: float = 0.0
    last_reward_s: float = 0.0
    num_aborted_tokens: int = 0
    finished: list[tuple[int, float]] = field(default_factory=list)  # (request index, time), for the trace


class SimulatedBackend:
    """A Backend of the main loop, for all ranks at once."""

    def __init__(self, config: Config, cluster: Cluster, workload: Workload, sink: StepSink) -> None:
        self._config, self._cluster, self._workload, self._sink = config, cluster, workload, sink
        self._training = TrainingCost(config, cluster)
        self._tells_starts = config.tail_batching.mode != "off"  # only a race needs to know
        self._built_sizes = {config.rollout.tensor_model_parallel_size}
        self._round: _Round | None = None
        self._step_start_s = 0.0
        self._update: UpdatePlan | None = None
        self._facts: StepFacts | None = None
        self.now_s = cluster.engine_start_s

    @property
    def _open(self) -> _Round:
        assert self._round is not None, "launch() opens a round"
        return self._round

    def launch(self, plan: RoundPlan) -> None:
        """Hand the round's requests to the replicas; an engine of a new size is built first, once."""
        size = plan.tensor_model_parallel_size
        self._step_start_s = self.now_s
        if size not in self._built_sizes:
            self._built_sizes.add(size)
            self.now_s += self._cluster.engine_start_s
        cost, capacity = self._cluster.engine_cost(size), self._cluster.capacity_tokens(size)
        num_replicas = self._cluster.num_gpus // size
        replicas = [
            Replica(cost, capacity_tokens=capacity, max_num_seqs=self._config.rollout.max_num_seqs, time_s=self.now_s)
            for _ in range(num_replicas)
        ]
        rewards = RewardQueues(self._config, self._cluster, num_replicas, size)
        self._round = _Round(plan, replicas, rewards, self.now_s, versions=[0] * num_replicas)
        self._add(plan.requests)

    def events(self) -> Iterator[Event]:
        """What happens, in order, until EndRound has been applied; then what is still on the way."""
        this = self._open
        while this.is_open:
            self._settle(this)
            if not this.heap:
                raise RuntimeError(f"step {this.plan.step}: nothing is left to happen, but the round has not ended")
            yield from self._happen(this, heapq.heappop(this.heap))
        end_s = max([self.now_s, *(r.time_s for r in this.replicas)])
        while this.heap and this.heap[0][0] <= end_s:
            pending = heapq.heappop(this.heap)
            if not isinstance(pending[3], tuple):
                yield from self._happen(this, pending)
        self.now_s = end_s
        for replica, engine in enumerate(this.replicas):
            usage = engine.kv_cache_usage
            this.num_aborted_tokens += engine.stop(end_s)
            rank = replica * this.plan.tensor_model_parallel_size
            yield EngineProgress(end_s, rank, engine.num_tokens, engine.num_preemptions, usage, engine.step)

    def apply(self, action: Action) -> None:
        """Carry out one action, at the time of the event that caused it."""
        this = self._open
        if isinstance(action, ScoreResponse):
            outcome = this.rewards.submit(action, self.now_s)
            size = this.plan.tensor_model_parallel_size
            self._push(this, outcome.done_s, action.request.replica * size, (action.request.index, outcome))
        elif isinstance(action, AbortRequest):
            replica = action.request.replica
            engine = this.replicas[replica]
            engine.advance(self.now_s)
            tokens = engine.abort(action.request.index)
            if tokens is not None:
                this.num_aborted_tokens += tokens
                this.dirty.add(replica)
        elif isinstance(action, LaunchRequests):
            self._add(action.requests)
        elif isinstance(action, EndRound):
            this.is_open = False
            for engine in this.replicas:
                engine.advance(self.now_s)

    def apply_update(self, update: UpdatePlan) -> None:
        """Train on the step's groups."""
        this = self._open
        times = self._training.times(update)
        self._update = update
        end_s = self.now_s
        size = this.plan.tensor_model_parallel_size
        round_facts = RoundFacts(
            launch_s=this.launch_s,
            end_s=end_s,
            tensor_model_parallel_size=size,
            busy_s=tuple(r.busy_s for r in this.replicas),
            idle_s=tuple(r.idle_s for r in this.replicas),
            busy_periods=tuple(tuple(r.periods) for r in this.replicas),
            reward_wait_s=max(this.last_reward_s - this.last_finish_s, 0.0),
            num_aborted_tokens=this.num_aborted_tokens,
            finished=tuple((this.requests[i], this.lengths[i], t) for i, t in this.finished),
        )
        switch_s = self._cluster.phase_switch_s
        self.now_s = end_s + switch_s / 2 + times.total_s + switch_s / 2
        self._facts = StepFacts(self._step_start_s, round_facts, times, switch_s, 0.0)

    def sync_weights(self) -> None:
        """Refit; then the step is written down."""
        assert self._facts is not None and self._update is not None, "apply_update() comes before sync_weights()"
        self._facts.refit_s = self._cluster.refit_s(self._facts.round.tensor_model_parallel_size)
        self.now_s += self._facts.refit_s
        self._sink.end_step(self._update, self._facts)

    def _add(self, requests: Sequence[Request]) -> None:
        this = self._open
        lengths = self._workload.lengths(requests)
        this.rewards.launch(requests, lengths.tolist(), self._workload.scores(requests, lengths))
        this.requests += requests
        for request, length in zip(requests, lengths.tolist(), strict=True):
            target = min(length, request.max_tokens)
            this.lengths.append(target)
            engine = this.replicas[request.replica]
            if request.replica not in this.dirty:
                engine.advance(self.now_s)
                this.dirty.add(request.replica)
            engine.add(
                request.index,
                prompt_tokens=len(request.prompt.token_ids),
                target_tokens=target,
                group=request.prompt.key,
            )

    def _settle(self, this: _Round) -> None:
        """Schedule the replicas that have changed, at the step boundary where they stand."""
        if not this.dirty:
            return
        size = this.plan.tensor_model_parallel_size
        for replica in sorted(this.dirty):
            started, first_token_s = this.replicas[replica].schedule(self.now_s)
            if started and self._tells_starts:
                self._push(this, first_token_s, replica * size, started)
            next_s = this.replicas[replica].next_event_s
            this.versions[replica] = -1
            if next_s < math.inf:
                self._push(this, next_s, replica * size, replica)
                this.versions[replica] = this.sequence
        this.dirty.clear()

    def _push(self, this: _Round, time_s: float, rank: int, what: int | list[int] | tuple[int, Outcome]) -> None:
        this.sequence += 1
        heapq.heappush(this.heap, (time_s, rank, this.sequence, what))

    def _happen(self, this: _Round, pending: _Pending) -> Iterator[Event]:
        time_s, rank, sequence, what = pending
        if isinstance(what, int) and this.versions[what] != sequence:
            return  # the replica has changed since
        self.now_s = max(self.now_s, time_s)
        if isinstance(what, int):
            ended = this.replicas[what].pop_finished()
            this.dirty.add(what)
            for index in ended:
                yield self._finished(this, rank, index)
        elif isinstance(what, list):
            for index in what:
                yield RequestStarted(self.now_s, rank, index)
        else:
            index, outcome = what
            this.last_reward_s = self.now_s
            yield RewardDone(
                self.now_s,
                rank,
                index,
                outcome.score,
                outcome.is_error,
                outcome.execution_s,
                outcome.case_execution_s,
            )

    def _finished(self, this: _Round, rank: int, index: int) -> Event:
        tokens = this.lengths[index]
        this.last_finish_s = self.now_s
        this.finished.append((index, self.now_s))
        reason = "length" if tokens >= this.requests[index].max_tokens else "stop"
        return RequestFinished(self.now_s, rank, index, tokens, reason)
