"""What travels between the controller and a backend: a plan opens a round, events go in, actions come out, an update
closes the step. Frozen data; the time is carried inside the event, in seconds since the start of the job (virtual in
deterministic mode).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from rollpacker.types import Group, Prompt, Request, RoundKind


@dataclass(frozen=True)
class RoundPlan:
    """What a step launches (phases 1 and 2 of the paper's Figure 5); `num_groups` is how many it wants to train."""

    step: int
    kind: RoundKind
    tensor_model_parallel_size: int
    num_groups: int
    requests: tuple[Request, ...]


# Events. `rank` is the rank that saw it; (time_s, rank, sequence) orders the events of one exchange.


@dataclass(frozen=True)
class RequestStarted:
    """The request got its first token: it waits for a slot no longer. Only a race needs to know."""

    time_s: float
    rank: int
    request_index: int


@dataclass(frozen=True)
class RequestFinished:
    """Generation ended by itself: EOS, a stop token or the length cap."""

    time_s: float
    rank: int
    request_index: int
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class RewardDone:
    """The verifier returned; `is_error` marks a score that stands for a crash, a time-out or a NaN.

    `case_execution_s` holds the seconds of each test case of a code task, in the order of the cases.
    """

    time_s: float
    rank: int
    request_index: int
    score: float
    is_error: bool
    execution_s: float
    case_execution_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class EngineProgress:
    """What a replica's engine did during one quantum; `num_steps` counts its decode steps."""

    time_s: float
    rank: int
    num_new_tokens: int
    num_preemptions: int
    kv_cache_usage: float
    num_steps: int = 0


Event = RequestStarted | RequestFinished | RewardDone | EngineProgress
_EVENTS: dict[str, Any] = {k.__name__: k for k in (RequestStarted, RequestFinished, RewardDone, EngineProgress)}


def event_to_row(event: Event) -> list[Any]:
    """An event as plain JSON values, for logs that are replayed."""
    return [type(event).__name__, *astuple(event)]


def event_from_row(row: Sequence[Any]) -> Event:
    """The event that `event_to_row` wrote."""
    name, *values = row
    event: Event = _EVENTS[name](*(tuple(v) if isinstance(v, list) else v for v in values))
    return event


# Actions. Every rank sees all of them and carries out those that name its own replica.


@dataclass(frozen=True)
class ScoreResponse:
    """Start the reward of a finished response on the leader of the replica that decoded it.

    `timeout_s` bounds the whole of it; `case_timeouts_s`, where not empty, each test case in turn.
    """

    request: Request
    timeout_s: float
    case_timeouts_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class AbortRequest:
    """Delete the request from its engine at once; an aborted request yields no output."""

    request: Request


@dataclass(frozen=True)
class LaunchRequests:
    """More requests for the open round, numbered on from those that it has."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class RejectGroup:
    """The prompt's group is not trained and the prompt leaves the epoch.

    `reason` is "filter" (not worth training) or "reward_error" (a reward failed, `reward.on_error: drop_group`).
    """

    prompt: Prompt
    reason: str = "filter"


@dataclass(frozen=True)
class TrainGroup:
    """The group is complete: every response finished and scored. A stream trainer may start on it now."""

    group: Group


@dataclass(frozen=True)
class ScaleDown:
    """The ranks of `freed_replicas` leave the rollout to train; their requests go where `migrations` says.

    `migrations` pairs a request index with the replica that goes on with it, from its prompt and its tokens so far.
    """

    freed_replicas: tuple[int, ...]
    migrations: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class EndRound:
    """The rollout of the step is over; fold in what is still on the way, then stop."""


Action = ScoreResponse | AbortRequest | LaunchRequests | RejectGroup | TrainGroup | ScaleDown | EndRound


@dataclass(frozen=True)
class AuditReport:
    """What the race has done to the law of the trained samples (policy/audit.py); None = too few audit groups yet."""

    num_groups: int
    icc: float | None
    coverage_p50: float | None
    coverage_p90: float | None
    coverage_p95: float | None
    coverage_p99: float | None
    own_coverage_p95: float | None
    warning: str | None


@dataclass(frozen=True)
class RoundStats:
    """Counts of one round, for the metrics; `audit` is that of the run so far."""

    kind: RoundKind
    num_launched: int
    num_aborted_prompts: int
    num_aborted_responses: int
    num_rejected_groups: int
    num_dropped_groups: int
    num_tokens_generated: int
    num_tokens_wasted: int
    num_preemptions: int
    num_reward_errors: int
    num_reward_timeouts: int
    reward_timeout_budget_s: float | None  # mean of the limits handed out
    tensor_model_parallel_size: int
    has_switched_tensor_parallel: bool
    scale_down_progress: float | None  # share of the requests that had finished
    long_queue_len: int
    audit: AuditReport | None


@dataclass(frozen=True)
class UpdatePlan:
    """The step's trained groups, in launch order, with the counts of their tokens and responses."""

    step: int
    epoch: int
    groups: tuple[Group, ...]
    num_tokens: int
    num_sequences: int
    stats: RoundStats
