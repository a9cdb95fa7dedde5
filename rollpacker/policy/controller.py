"""StepController: the one place where events meet policies. The loop drives it on a cluster and in the simulator alike.

It is a pure state machine, replicated on every rollout rank: the same events in the same order give the same actions, and
`digest`, over events and decisions, proves it. Three seams hold what a mode decides: a RoundComposer (what a step
launches, from history alone), a SelectionPolicy (what becomes of a response or a group when it finishes) and the
RequestRouter (who decodes what).

Invariants: a request finishes at most once and is scored at most once; a group is trained at most once and only when all
of its responses are in; every prompt that was drawn is trained, or reported. (paper sections 3 and 4)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
    RoundStats,
    ScaleDown,
    ScoreResponse,
    TrainGroup,
    UpdatePlan,
)
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.routing import RunningRequest
from rollpacker.policy.timeout import AdaptiveTimeout
from rollpacker.types import Group, Request, ScoredResponse


@dataclass
class RoundState:
    """What is known of the open round, by request index. Policies read it; only the controller writes it."""

    plan: RoundPlan
    started: dict[int, int] = field(default_factory=dict)  # decode steps of the replica when the first token came
    finished: dict[int, RequestFinished] = field(default_factory=dict)
    rewards: dict[int, RewardDone] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)  # ended by themselves while their abort was on its way
    rejected: dict[tuple[str, int], str] = field(default_factory=dict)  # prompt -> reason
    trained: dict[tuple[str, int], Group] = field(default_factory=dict)
    num_tokens_generated: int = 0
    num_preemptions: int = 0
    num_steps_of: dict[int, int] = field(default_factory=dict)  # replica -> decode steps so far
    kv_cache_usage_of: dict[int, float] = field(default_factory=dict)  # by replica, as last seen
    freed_replicas: tuple[int, ...] = ()
    sum_timeout_s: float = 0.0
    scale_down_progress: float | None = None
    is_open: bool = True
    requests: list[Request] = field(default_factory=list)
    requests_of: dict[tuple[str, int], list[Request]] = field(default_factory=dict)
    finished_of: dict[tuple[str, int], list[Request]] = field(default_factory=dict)  # in the order of generation end
    num_scored_of: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.launch(self.plan.requests)

    def launch(self, requests: Sequence[Request]) -> None:
        """Book the plan's requests, or more of them: the place in `requests` is the index that events carry."""
        for request in requests:
            if request.index != len(self.requests):
                raise RuntimeError(f"request {request.index} was launched as number {len(self.requests)}")
            self.requests.append(request)
            self.requests_of.setdefault(request.prompt.key, []).append(request)

    def running(self, expect: Callable[[int], float]) -> list[RunningRequest]:
        """The requests still in an engine; a running one has a token for each decode step since its first.

        `expect(n)` is the length of a response that has n tokens.
        """
        found = []
        for request in self.requests:
            if request.index in self.finished or request.index in self.aborted:
                continue
            done = 0
            if request.index in self.started:
                done = self.num_steps_of.get(request.replica, 0) - self.started[request.index] + 1
            length = len(request.prompt.token_ids)
            done = min(max(done, 0), request.max_tokens)
            predicted = length + expect(done)
            found.append(RunningRequest(request.index, request.replica, length + done, predicted))
        return found

    def migrate(self, index: int, replica: int) -> None:
        """Another replica goes on with the request."""
        request = self.requests[index]
        moved = replace(request, replica=replica)
        self.requests[index] = moved
        group = self.requests_of[request.prompt.key]
        group[group.index(request)] = moved
        if index in self.started:  # its tokens count on from the steps of the new replica
            done = self.num_steps_of.get(request.replica, 0) - self.started[index]
            self.started[index] = self.num_steps_of.get(replica, 0) - done


class RoundComposer(Protocol):
    """Decides at step start, from history alone, which kind of round runs and what it launches."""

    def compose(self, step: int) -> RoundPlan | None:
        """The plan of the step, or None when nothing is left to train."""

    def long_queue_len(self) -> int:
        """Prompts that wait for a LONG round."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next round depends on, as plain JSON values; between two rounds."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""


class SelectionPolicy(Protocol):
    """Decides what becomes of responses and groups as they finish."""

    def on_finished(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Called when the generation of `request` has ended."""

    def on_scored(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Called when the reward of `request` is in as well."""

    def on_round_end(self, state: RoundState) -> None:
        """Called once, with every event of the round in: settle what becomes of the prompts that are not trained."""


class MidRoundPolicy(Protocol):
    """Watches a round beside the selection (scale-down)."""

    def on_finished(self, state: RoundState) -> Sequence[Action]:
        """Called when a response has finished, after the selection."""


class StepController:
    """Routes events to the policies and keeps the books of the step."""

    def __init__(
        self,
        composer: RoundComposer,
        selection: SelectionPolicy,
        *,
        reward_timeout_s: float,
        audit: SampleAudit | None = None,
        adaptive_timeout: AdaptiveTimeout | None = None,
        scale_down: MidRoundPolicy | None = None,
    ) -> None:
        """`reward_timeout_s` bounds each reward as a whole; the last three are switched off by None."""
        self._composer = composer
        self._selection = selection
        self._reward_timeout_s = reward_timeout_s
        self._audit = audit
        self._adaptive_timeout = adaptive_timeout
        self._scale_down = scale_down
        self._round: RoundState | None = None
        self._is_in_round = False
        self._last_size: int | None = None
        self.digest = 0

    @property
    def round(self) -> RoundState:
        """The open round, or the one that ended last."""
        if self._round is None:
            raise RuntimeError("no round has begun")
        return self._round

    def begin_step(self, step: int) -> RoundPlan | None:
        """Phases 1 and 2: short or long round, which prompts, which rollout tensor-parallel size."""
        plan = self._composer.compose(step)
        if plan is not None:
            self._round = RoundState(plan)
            self._is_in_round = True
            self._fold((plan.step, plan.kind, plan.tensor_model_parallel_size))
            self._fold(_launched(plan.requests))
        return plan

    def on(self, event: Event) -> list[Action]:
        """Phases 3 to 5: fold one event in and say what follows from it."""
        self._fold(event)
        state = self.round
        if isinstance(event, EngineProgress):
            self._note_progress(state, event)
            return []
        index = event.request_index
        if isinstance(event, RequestStarted):
            state.started[index] = state.num_steps_of.get(state.requests[index].replica, 0)
            return []
        request = state.requests[index]
        if isinstance(event, RewardDone) and self._adaptive_timeout is not None:
            self._adaptive_timeout.observe(request.prompt.prompt_id, event.case_execution_s, event.score)
        if not state.is_open or index in state.aborted:  # it was on its way when the round, or the request, was ended
            if isinstance(event, RequestFinished):
                state.late.add(index)
            return []
        if isinstance(event, RequestFinished):
            actions = self._on_finished(state, request, event)
        else:
            if index in state.rewards:
                raise RuntimeError(f"request {index} of step {state.plan.step} was scored twice")
            state.rewards[index] = event
            state.num_scored_of[request.prompt.key] = state.num_scored_of.get(request.prompt.key, 0) + 1
            actions = list(self._selection.on_scored(state, request))
        self._book(state, actions)
        if self._scale_down is not None and isinstance(event, RequestFinished):
            more = self._scale_down.on_finished(state)  # it sees what the selection has just aborted
            self._book(state, more)
            actions += more
        return actions

    def _on_finished(self, state: RoundState, request: Request, event: RequestFinished) -> list[Action]:
        if request.index in state.finished:
            raise RuntimeError(f"request {request.index} of step {state.plan.step} finished twice")
        state.started.setdefault(request.index, 0)
        state.finished[request.index] = event
        state.finished_of.setdefault(request.prompt.key, []).append(request)
        case_timeouts_s: tuple[float, ...] = ()
        if self._adaptive_timeout is not None:
            case_timeouts_s = self._adaptive_timeout.case_timeouts_s(request.prompt.prompt_id)
        state.sum_timeout_s += max(case_timeouts_s, default=self._reward_timeout_s)
        actions: list[Action] = [ScoreResponse(request, self._reward_timeout_s, case_timeouts_s)]
        actions += self._selection.on_finished(state, request)
        return actions

    def _note_progress(self, state: RoundState, event: EngineProgress) -> None:
        replica = event.rank // state.plan.tensor_model_parallel_size
        state.num_steps_of[replica] = state.num_steps_of.get(replica, 0) + event.num_steps
        state.kv_cache_usage_of[replica] = event.kv_cache_usage
        state.num_tokens_generated += event.num_new_tokens
        state.num_preemptions += event.num_preemptions

    def _book(self, state: RoundState, actions: Sequence[Action]) -> None:
        for action in actions:
            self._note(state, action)
            self._fold(_gist(action))

    def _note(self, state: RoundState, action: Action) -> None:
        """Book an action that a policy has taken."""
        if isinstance(action, AbortRequest):
            state.aborted.add(action.request.index)
        elif isinstance(action, LaunchRequests):
            state.launch(action.requests)
        elif isinstance(action, RejectGroup):
            state.rejected[action.prompt.key] = action.reason
        elif isinstance(action, TrainGroup):
            key = action.group.prompt.key
            if key in state.trained:
                raise RuntimeError(f"prompt {key} would be trained twice in step {state.plan.step}")
            state.trained[key] = action.group
        elif isinstance(action, ScaleDown):
            state.freed_replicas = action.freed_replicas
            state.scale_down_progress = len(state.finished) / len(state.requests)
            for index, replica in action.migrations:
                state.migrate(index, replica)
        elif isinstance(action, EndRound):
            state.is_open = False

    def finish_step(self) -> UpdatePlan:
        """Phase 6: the groups of the step in launch order and the global counts of its loss."""
        state = self.round
        self._selection.on_round_end(state)
        self._is_in_round = False
        groups = tuple(state.trained[p] for p in state.requests_of if p in state.trained)
        if self._audit is not None:
            self._audit.add_trained(groups)
        lengths = [r.num_tokens for g in groups for r in g.responses]
        stats = self._stats(state, sum(lengths))
        self._last_size = state.plan.tensor_model_parallel_size
        epoch = max((g.prompt.epoch for g in groups), default=0)
        return UpdatePlan(state.plan.step, epoch, groups, sum(lengths), len(lengths), stats)

    def _stats(self, state: RoundState, num_trained_tokens: int) -> RoundStats:
        size = state.plan.tensor_model_parallel_size
        errors = [r for r in state.rewards.values() if r.is_error]
        reasons = list(state.rejected.values())
        return RoundStats(
            kind=state.plan.kind,
            num_launched=len(state.requests),
            num_aborted_prompts=len(state.requests_of) - len(state.trained.keys() | state.rejected.keys()),
            num_aborted_responses=len(state.aborted),
            num_rejected_groups=reasons.count("filter"),
            num_dropped_groups=reasons.count("reward_error"),
            num_tokens_generated=state.num_tokens_generated,
            num_tokens_wasted=max(state.num_tokens_generated - num_trained_tokens, 0),
            num_preemptions=state.num_preemptions,
            num_reward_errors=len(errors),
            num_reward_timeouts=sum(r.execution_s >= self._reward_timeout_s for r in errors),
            reward_timeout_budget_s=state.sum_timeout_s / len(state.finished) if state.finished else None,
            tensor_model_parallel_size=size,
            has_switched_tensor_parallel=self._last_size not in (None, size),
            scale_down_progress=state.scale_down_progress,
            long_queue_len=self._composer.long_queue_len(),
            audit=None if self._audit is None else self._audit.report(),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the policies have learnt and put aside, as plain JSON values; between two rounds.

        A round that was interrupted is restored from the state before it and `replay` of its events.
        """
        if self._is_in_round:
            raise RuntimeError("state_dict() inside a round: save before begin_step or after finish_step.")
        parts = {"audit": self._audit, "adaptive_timeout": self._adaptive_timeout}
        return {
            "digest": self.digest,
            "last_size": self._last_size,
            "composer": self._composer.state_dict(),
            **{name: part.state_dict() for name, part in parts.items() if part is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self.digest, self._last_size = state["digest"], state["last_size"]
        self._composer.load_state_dict(state["composer"])
        parts = {"audit": self._audit, "adaptive_timeout": self._adaptive_timeout}
        for name, part in parts.items():
            if part is not None and name in state:
                part.load_state_dict(state[name])

    def replay(self, step: int, events: Sequence[Event]) -> tuple[RoundPlan | None, list[Action]]:
        """Open a round again and bring it to where the `events` of its log end: its plan, and the actions taken."""
        plan = self.begin_step(step)
        return plan, [action for event in events for action in self.on(event)]

    def _fold(self, item: object) -> None:
        self.digest = zlib.crc32(repr(item).encode(), self.digest)


def _gist(action: Action) -> tuple[object, ...]:
    """What an action decides, without the tokens it carries."""
    name = type(action).__name__
    if isinstance(action, TrainGroup):
        return name, action.group.prompt.key, tuple(r.request.index for r in action.group.responses)
    if isinstance(action, ScoreResponse):
        return name, action.request.index, action.timeout_s, action.case_timeouts_s
    if isinstance(action, AbortRequest):
        return name, action.request.index
    if isinstance(action, LaunchRequests):
        return name, _launched(action.requests)
    if isinstance(action, RejectGroup):
        return name, action.prompt.key, action.reason
    if isinstance(action, ScaleDown):
        return name, action.freed_replicas, action.migrations
    return (name,)


def _launched(requests: Sequence[Request]) -> tuple[object, ...]:
    return tuple((r.prompt.key, r.response_index, r.replica, r.seed) for r in requests)


def build_group(state: RoundState, requests: Sequence[Request]) -> Group:
    """The group of finished and scored `requests` of one prompt, in response order."""
    responses = tuple(_scored(state, r) for r in sorted(requests, key=lambda r: r.response_index))
    return Group(requests[0].prompt, responses)


def _scored(state: RoundState, request: Request) -> ScoredResponse:
    finished, reward = state.finished[request.index], state.rewards[request.index]
    return ScoredResponse(
        request=request,
        num_tokens=finished.num_tokens,
        finish_reason=finished.finish_reason,
        reward=reward.score,
        is_reward_error=reward.is_error,
        finish_s=finished.time_s,
    )
