"""SimulatedBackend: carries the controller's decisions out in virtual time, for the one main loop (`loop.py`).

An event heap holds what is known to come: the next event of each replica, first tokens, rewards. The backend hands events
to the controller in the order (time, rank, sequence) and applies its actions at the time of the event; a replica that has
begun a step completes it, so a response that ends with this step still ends ("late").

Invariants: virtual time never goes back; of every replica busy + idle seconds are the time that it belongs to the round;
tokens generated are tokens of finished responses plus those of aborted ones.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from rollpacker.config import Config
from rollpacker.messages import (
    AbortRequest,
    Action,
    EndRound,
    Event,
    LaunchRequests,
    RequestFinished,
    RequestStarted,
    RewardDone,
    RoundPlan,
    ScaleDown,
    ScoreResponse,
    TrainGroup,
    UpdatePlan,
)
from rollpacker.policy.assembly import stream_training
from rollpacker.simulator.cluster import Cluster
from rollpacker.simulator.engine import Replica
from rollpacker.simulator.open_round import Happening, NextEvent, OpenRound, Scored, Slowed, Started
from rollpacker.simulator.record import StepFacts, StepSink
from rollpacker.simulator.reward import RewardQueues
from rollpacker.simulator.streaming import StreamedTraining
from rollpacker.simulator.training import TrainingCost
from rollpacker.simulator.workload import Workload
from rollpacker.types import Request

_NUM_REPORTS = 40  # of all engines in a round, where a policy watches its progress


class SimulatedBackend:
    """A Backend of the main loop, for all ranks at once."""

    def __init__(self, config: Config, cluster: Cluster, workload: Workload, sink: StepSink) -> None:
        self._config, self._cluster, self._workload, self._sink = config, cluster, workload, sink
        self._training = TrainingCost(config, cluster)
        self._streams = stream_training(config, cluster.machine)
        self._tells_starts = self._streams or config.tail_batching.mode != "off"  # only then somebody needs to know
        self._built_sizes = {config.rollout.tensor_model_parallel_size}
        self._round: OpenRound | None = None
        self._step_start_s = 0.0
        self._update: UpdatePlan | None = None
        self._facts: StepFacts | None = None
        self.now_s = cluster.engine_start_s

    @property
    def _open(self) -> OpenRound:
        assert self._round is not None, "launch() opens a round"
        return self._round

    # --- the rollout ---

    def between_steps(self) -> None:
        """A simulated run is not stopped."""

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
        self._round = OpenRound(
            plan=plan,
            replicas=replicas,
            rewards=RewardQueues(self._config, self._cluster, num_replicas, size),
            training=StreamedTraining(self._config, self._training) if self._streams else None,
            launch_s=self.now_s,
        )
        self._add(plan.requests)

    def events(self) -> Iterator[Event]:
        """What happens, in order, until EndRound has been applied; then what is still on the way."""
        this = self._open
        while this.is_open:
            this.settle(self.now_s, tells_starts=self._tells_starts)
            if not this.num_live:
                self._score(this)
            if not this.heap:
                raise RuntimeError(f"step {this.plan.step}: nothing is left to happen, but the round has not ended")
            yield from self._happen(this, *heapq.heappop(this.heap))
        end_s = max([self.now_s, *(r.time_s for r in this.replicas)])
        while this.heap and this.heap[0][0] <= end_s:
            pending = heapq.heappop(this.heap)
            if not isinstance(pending[3], Scored):
                yield from self._happen(this, *pending)
        self.now_s = end_s
        for replica, engine in enumerate(this.replicas):
            usage = engine.kv_cache_usage
            this.num_aborted_tokens += engine.stop(this.freed_s.get(replica, end_s))
            yield dataclasses.replace(this.progress(replica, end_s), kv_cache_usage=usage)

    def apply(self, action: Action) -> None:
        """Carry out one action, at the time of the event that caused it."""
        this = self._open
        if isinstance(action, ScoreResponse):
            this.unscored.append(action)
            if not self._config.cluster.rewards_after_rollout:
                self._score(this)
        elif isinstance(action, AbortRequest):
            tokens = this.withdraw(action.request.index, action.request.replica, self.now_s)
            this.num_aborted_tokens += tokens or 0
        elif isinstance(action, LaunchRequests):
            self._add(action.requests)
        elif isinstance(action, ScaleDown):
            self._scale_down(this, action)
        elif isinstance(action, TrainGroup):
            if this.training is not None:
                this.training.on_group(action.group, self.now_s)
        elif isinstance(action, EndRound):
            this.is_open = False
            for replica in range(len(this.replicas)):
                this.advance(replica, self.now_s)

    # --- the update ---

    def apply_update(self, update: UpdatePlan) -> None:
        """Train on the step's groups, or on those that the stream has left."""
        this = self._open
        end_s, switch_s = self.now_s, self._cluster.phase_switch_s
        ready_s = end_s + switch_s / 2
        stream = None
        if this.training is not None and this.training.has_begun:
            stream = this.training.on_rollout_end(end_s, ready_s)
        times = self._training.times(update) if stream is None else stream.update
        self.now_s = ready_s + times.total_s + switch_s / 2
        self._update = update
        self._facts = StepFacts(self._step_start_s, this.facts(end_s), times, switch_s, 0.0, stream)

    def sync_weights(self) -> None:
        """Refit; then the step is written down."""
        assert self._facts is not None and self._update is not None, "apply_update() comes before sync_weights()"
        self._facts.refit_s = self._cluster.refit_s(self._facts.round.tensor_model_parallel_size)
        self.now_s += self._facts.refit_s
        self._sink.end_step(self._update, self._facts)

    # --- how ---

    def _add(self, requests: Sequence[Request]) -> None:
        this = self._open
        lengths = self._workload.lengths(requests)
        this.rewards.launch(requests, lengths.tolist(), self._workload.scores(requests, lengths))
        for request, length in zip(requests, lengths.tolist(), strict=True):
            this.add(request, min(length, request.max_tokens), self.now_s)

    def _score(self, this: OpenRound) -> None:
        """Hand the responses that are complete to the reward workers of their replicas."""
        size = this.plan.tensor_model_parallel_size
        for action in this.unscored:
            replica = action.request.replica
            is_shared = this.replicas[replica].num_running > 0
            outcome = this.rewards.submit(action, self.now_s, shares_gpu=is_shared)
            this.push(outcome.done_s, replica * size, Scored(action.request.index, outcome))
            if outcome.slowdown > 1:
                this.push(outcome.begin_s, replica * size, Slowed(replica, outcome.slowdown))
                this.push(outcome.done_s, replica * size, Slowed(replica, 1.0))
        this.unscored.clear()

    def _scale_down(self, this: OpenRound, action: ScaleDown) -> None:
        """Move what the freed replicas decode, by recomputation, and give their GPUs to the trainer."""
        assert this.training is not None, "scale-down is decided only where streaming is on"
        for index, target in action.migrations:
            request = this.requests[index]
            tokens = this.withdraw(index, request.replica, self.now_s)
            if tokens is not None:  # else it ends with the step that is being completed
                this.move(dataclasses.replace(request, replica=target), tokens, self.now_s)
        ready_s = self.now_s
        for replica in action.freed_replicas:
            this.advance(replica, self.now_s)
            this.dirty.add(replica)
            this.freed_s[replica] = this.replicas[replica].time_s
            ready_s = max(ready_s, this.freed_s[replica])
        size = this.plan.tensor_model_parallel_size
        first, last = min(action.freed_replicas), max(action.freed_replicas)
        this.training.on_scale_down(range(first * size, (last + 1) * size), ready_s + self._cluster.phase_switch_s / 2)

    def _happen(self, this: OpenRound, time_s: float, rank: int, sequence: int, what: Happening) -> Iterator[Event]:
        if isinstance(what, NextEvent) and this.versions[what.replica] != sequence:
            return  # the replica has changed since
        self.now_s = max(self.now_s, time_s)
        if isinstance(what, NextEvent):
            for index in this.pop_finished(what.replica):
                if self._streams and len(this.finished) % max(len(this.requests) // _NUM_REPORTS, 1) == 0:
                    for replica in range(len(this.replicas)):
                        yield this.progress(replica, self.now_s)
                yield self._finished(this, rank, index)
        elif isinstance(what, Started):
            if self._streams:  # tokens are counted from the steps that were told
                yield this.progress(rank // this.plan.tensor_model_parallel_size, self.now_s)
            for index in what.indices:
                yield RequestStarted(self.now_s, rank, index)
        elif isinstance(what, Slowed):
            this.advance(what.replica, self.now_s)
            this.replicas[what.replica].slowdown = what.factor
            this.dirty.add(what.replica)
        else:
            outcome = what.outcome
            this.last_reward_s = self.now_s
            yield RewardDone(
                self.now_s,
                rank,
                what.index,
                outcome.score,
                outcome.is_error,
                outcome.execution_s,
                outcome.case_execution_s,
            )

    def _finished(self, this: OpenRound, rank: int, index: int) -> Event:
        tokens = this.lengths[index]
        this.last_finish_s = self.now_s
        this.finished.append((index, self.now_s))
        reason = "length" if tokens >= this.requests[index].max_tokens else "stop"
        return RequestFinished(self.now_s, rank, index, tokens, reason)
