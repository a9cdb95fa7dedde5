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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    ScoreResponse,
    TrainGroup,
    UpdatePlan,
)
from rollpacker.types import Group, Request, ScoredResponse


@dataclass
class RoundState:
    """What is known of the open round, by request index. Policies read it; only the controller writes it."""

    plan: RoundPlan
    started: set[int] = field(default_factory=set)
    finished: dict[int, RequestFinished] = field(default_factory=dict)
    rewards: dict[int, RewardDone] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)  # ended by themselves while their abort was on its way
    rejected: dict[tuple[str, int], str] = field(default_factory=dict)  # prompt -> reason
    trained: dict[tuple[str, int], Group] = field(default_factory=dict)
    num_tokens_generated: int = 0
    num_preemptions: int = 0
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


class RoundComposer(Protocol):
    """Decides at step start, from history alone, which kind of round runs and what it launches."""

    def compose(self, step: int) -> RoundPlan | None:
        """The plan of the step, or None when nothing is left to train."""

    def long_queue_len(self) -> int:
        """Prompts that wait for a LONG round."""


class SelectionPolicy(Protocol):
    """Decides what becomes of responses and groups as they finish."""

    def on_finished(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Called when the generation of `request` has ended."""

    def on_scored(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Called when the reward of `request` is in as well."""

    def on_round_end(self, state: RoundState) -> None:
        """Called once, with every event of the round in: settle what becomes of the prompts that are not trained."""


class StepController:
    """Routes events to the policies and keeps the books of the step."""

    def __init__(self, composer: RoundComposer, selection: SelectionPolicy, *, reward_timeout_s: float) -> None:
        self._composer = composer
        self._selection = selection
        self._reward_timeout_s = reward_timeout_s
        self._round: RoundState | None = None
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
            self._fold((plan.step, plan.kind, plan.tensor_model_parallel_size))
            self._fold(_launched(plan.requests))
        return plan

    def on(self, event: Event) -> list[Action]:
        """Phases 3 to 5: fold one event in and say what follows from it."""
        self._fold(event)
        state = self.round
        if isinstance(event, EngineProgress):
            state.num_tokens_generated += event.num_new_tokens
            state.num_preemptions += event.num_preemptions
            return []
        index = event.request_index
        if isinstance(event, RequestStarted):
            state.started.add(index)
            return []
        if not state.is_open or index in state.aborted:  # it was on its way when the round, or the request, was ended
            if isinstance(event, RequestFinished):
                state.late.add(index)
            return []
        request = state.requests[index]
        key = request.prompt.key
        if isinstance(event, RequestFinished):
            if index in state.finished:
                raise RuntimeError(f"request {index} of step {state.plan.step} finished twice")
            state.started.add(index)
            state.finished[index] = event
            state.finished_of.setdefault(key, []).append(request)
            actions: list[Action] = [ScoreResponse(request, self._reward_timeout_s)]
            actions += self._selection.on_finished(state, request)
        else:
            if index in state.rewards:
                raise RuntimeError(f"request {index} of step {state.plan.step} was scored twice")
            state.rewards[index] = event
            state.num_scored_of[key] = state.num_scored_of.get(key, 0) + 1
            actions = list(self._selection.on_scored(state, request))
        for action in actions:
            self._note(state, action)
            self._fold(_gist(action))
        return actions

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
        elif isinstance(action, EndRound):
            state.is_open = False

    def finish_step(self) -> UpdatePlan:
        """Phase 6: the groups of the step in launch order and the global counts of its loss."""
        state = self.round
        self._selection.on_round_end(state)
        groups = tuple(state.trained[p] for p in state.requests_of if p in state.trained)
        lengths = [r.num_tokens for g in groups for r in g.responses]
        trained_tokens = sum(lengths)
        stats = RoundStats(
            kind=state.plan.kind,
            num_launched=len(state.requests),
            num_aborted_prompts=len(state.requests_of) - len(groups) - len(state.rejected - state.trained.keys()),
            num_aborted_responses=len(state.aborted),
            num_rejected_groups=len(state.rejected),
            num_tokens_generated=state.num_tokens_generated,
            num_tokens_wasted=max(state.num_tokens_generated - trained_tokens, 0),
            num_preemptions=state.num_preemptions,
            num_reward_errors=sum(r.is_error for r in state.rewards.values()),
            num_reward_timeouts=sum(
                r.is_error and r.execution_s >= self._reward_timeout_s for r in state.rewards.values()
            ),
            tensor_model_parallel_size=state.plan.tensor_model_parallel_size,
            long_queue_len=self._composer.long_queue_len(),
        )
        epoch = max((g.prompt.epoch for g in groups), default=0)
        return UpdatePlan(state.plan.step, epoch, groups, trained_tokens, len(lengths), stats)

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
