"""OpenRound: the engines, requests and rewards of a round in virtual time, and the heap of what is to come."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from rollpacker.messages import EngineProgress, RoundPlan, ScoreResponse
from rollpacker.simulator.engine import Replica
from rollpacker.simulator.record import RoundFacts
from rollpacker.simulator.reward import Outcome, RewardQueues
from rollpacker.simulator.streaming import StreamedTraining
from rollpacker.types import Request


@dataclass(frozen=True)
class NextEvent:
    """A replica comes to where a request ends, or where it must decide anew."""

    replica: int


@dataclass(frozen=True)
class Started:
    """Requests get their first token."""

    indices: list[int]


@dataclass(frozen=True)
class Scored:
    """A reward is in."""

    index: int
    outcome: Outcome


@dataclass(frozen=True)
class Slowed:
    """Another process on the replica's GPUs begins or ends."""

    replica: int
    factor: float


Happening = NextEvent | Started | Scored | Slowed


@dataclass
class OpenRound:
    """Requests by index, lists by replica."""

    plan: RoundPlan
    replicas: list[Replica]
    rewards: RewardQueues
    training: StreamedTraining | None
    launch_s: float
    requests: list[Request] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    heap: list[tuple[float, int, int, Happening]] = field(default_factory=list)  # (time, rank, sequence, what)
    versions: list[int] = field(default_factory=list)  # the sequence of each replica's valid event
    dirty: set[int] = field(default_factory=set)  # replicas whose running set changed since they were scheduled
    sequence: int = 0
    is_open: bool = True
    num_live: int = 0  # requests in an engine
    unscored: list[ScoreResponse] = field(default_factory=list)
    freed_s: dict[int, float] = field(default_factory=dict)  # replica -> when it left the rollout
    told: list[tuple[int, int, int]] = field(default_factory=list)  # tokens, preemptions, steps that were reported
    last_finish_s: float = 0.0
    last_reward_s: float = 0.0
    num_aborted_tokens: int = 0
    finished: list[tuple[int, float]] = field(default_factory=list)  # (request index, time), for the trace

    def __post_init__(self) -> None:
        self.versions = [0] * len(self.replicas)
        self.told = [(0, 0, 0)] * len(self.replicas)

    def push(self, time_s: float, rank: int, what: Happening) -> None:
        """Note what will happen."""
        self.sequence += 1
        heapq.heappush(self.heap, (time_s, rank, self.sequence, what))

    def add(self, request: Request, target_tokens: int, now_s: float) -> None:
        """Queue a new request."""
        self.requests.append(request)
        self.lengths.append(target_tokens)
        self.move(request, 0, now_s)

    def move(self, request: Request, generated_tokens: int, now_s: float) -> None:
        """Queue a request in its replica, with the tokens that it has already."""
        self.requests[request.index] = request
        self.advance(request.replica, now_s)
        self.dirty.add(request.replica)
        self.replicas[request.replica].add(
            request.index,
            prompt_tokens=len(request.prompt.token_ids),
            target_tokens=self.lengths[request.index],
            group=request.prompt.key,
            generated_tokens=generated_tokens,
        )
        self.num_live += 1

    def withdraw(self, index: int, replica: int, now_s: float) -> int | None:
        """Take a request out; its tokens. None where it is not there, or ends with the step that is being completed."""
        self.advance(replica, now_s)
        tokens = self.replicas[replica].abort(index)
        if tokens is not None:
            self.dirty.add(replica)
            self.num_live -= 1
        return tokens

    def pop_finished(self, replica: int) -> list[int]:
        """The requests that end at the replica's next event, which is now."""
        ended = self.replicas[replica].pop_finished()
        self.dirty.add(replica)
        self.num_live -= len(ended)
        return ended

    def advance(self, replica: int, now_s: float) -> None:
        """Bring a replica to the step boundary at or after now, unless it has left the rollout."""
        if replica not in self.freed_s:
            self.replicas[replica].advance(now_s)

    def settle(self, now_s: float, *, tells_starts: bool) -> None:
        """Schedule the replicas that have changed, at the step boundary where they stand."""
        size = self.plan.tensor_model_parallel_size
        for replica in sorted(self.dirty):
            started, first_token_s = self.replicas[replica].schedule(now_s)
            if started and tells_starts:
                self.push(first_token_s, replica * size, Started(started))
            next_s = self.replicas[replica].next_event_s
            self.versions[replica] = -1
            if next_s < math.inf:
                self.push(next_s, replica * size, NextEvent(replica))
                self.versions[replica] = self.sequence
        self.dirty.clear()

    def progress(self, replica: int, now_s: float) -> EngineProgress:
        """What the replica has done since it last reported."""
        engine = self.replicas[replica]
        before, now = self.told[replica], (engine.num_tokens, engine.num_preemptions, engine.step)
        self.told[replica] = now
        tokens, preemptions, steps = (b - a for a, b in zip(before, now, strict=True))
        rank = replica * self.plan.tensor_model_parallel_size
        return EngineProgress(now_s, rank, tokens, preemptions, engine.kv_cache_usage, steps)

    def facts(self, end_s: float) -> RoundFacts:
        """The round in retrospect."""
        return RoundFacts(
            launch_s=self.launch_s,
            end_s=end_s,
            tensor_model_parallel_size=self.plan.tensor_model_parallel_size,
            busy_s=tuple(r.busy_s for r in self.replicas),
            idle_s=tuple(r.idle_s for r in self.replicas),
            freed_s=tuple(end_s - self.freed_s.get(i, end_s) for i in range(len(self.replicas))),
            busy_periods=tuple(tuple(r.periods) for r in self.replicas),
            reward_wait_s=max(self.last_reward_s - self.last_finish_s, 0.0),
            num_aborted_tokens=self.num_aborted_tokens,
            finished=tuple((self.requests[i], self.lengths[i], t) for i, t in self.finished),
        )
