"""Dynamic sampling: what is trained depends on scores alone, nothing is lost, and a round always ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.loop import run
from rollpacker.messages import (
    AbortRequest,
    Action,
    EndRound,
    Event,
    LaunchRequests,
    RejectGroup,
    RequestFinished,
    RewardDone,
    RoundPlan,
    ScoreResponse,
    UpdatePlan,
)
from rollpacker.policy.controller import StepController
from rollpacker.policy.dynamic_sampling import DynamicSampling
from rollpacker.policy.filters import AcceptanceRate, ZeroVarianceFilter
from rollpacker.policy.launch import RoundLauncher
from rollpacker.policy.planner import FixedPlanner
from rollpacker.types import Prompt, Request

R0 = 2


class ListSource:
    """Prompts from a list, with what was put back first."""

    def __init__(self, num_prompts: int) -> None:
        self.left = [Prompt(f"p{i}", (1, 2)) for i in range(num_prompts)]

    def draw(self, n: int) -> list[Prompt]:
        drawn, self.left = self.left[:n], self.left[n:]
        return drawn

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        self.left = [*prompts, *self.left]


class ScriptedBackend:
    """A prompt is worth training or not by its number; things finish in a random order."""

    def __init__(self, good: Sequence[bool], seed: int) -> None:
        self.good = good
        self.random = random.Random(seed)
        self.updates: list[UpdatePlan] = []
        self.rejected: list[str] = []
        self.num_launched: list[int] = []

    def between_steps(self) -> None:
        """Nobody stops it."""

    def launch(self, plan: RoundPlan) -> None:
        self.is_open, self.pending = True, []
        self.num_launched.append(0)
        self._add(plan.requests)

    def _add(self, requests: Sequence[Request]) -> None:
        self.num_launched[-1] += len(requests) // R0
        self.pending += [RequestFinished(0.0, 0, r.index, 3, "stop") for r in requests]

    def events(self):
        while self.is_open:
            event: Event = self.pending.pop(self.random.randrange(len(self.pending)))
            yield event

    def apply(self, action: Action) -> None:
        if isinstance(action, ScoreResponse):
            request = action.request
            score = float(request.response_index == 1 and self.good[int(request.prompt.prompt_id[1:])])
            self.pending.append(RewardDone(0.0, 0, request.index, score, False, 0.1))
        elif isinstance(action, LaunchRequests):
            self._add(action.requests)
        elif isinstance(action, RejectGroup):
            self.rejected.append(action.prompt.prompt_id)
        elif isinstance(action, AbortRequest):
            self.pending = [e for e in self.pending if e.request_index != action.request.index]
        elif isinstance(action, EndRound):
            self.is_open = False

    def apply_update(self, update: UpdatePlan) -> None:
        self.updates.append(update)

    def sync_weights(self) -> None:
        pass


def sample(good: Sequence[bool], batch: int, ratio: float, seed: int) -> ScriptedBackend:
    sampling = DynamicSampling(
        ListSource(len(good)),
        RoundLauncher(FixedPlanner(1), num_gpus=2, max_tokens=10, seed=0),
        ZeroVarianceFilter(),
        train_batch_size=batch,
        num_responses=R0,
        max_launched_ratio=ratio,
    )
    backend = ScriptedBackend(good, seed)
    run(None, StepController(sampling, sampling, reward_timeout_s=2.0), backend)
    return backend


cases = st.lists(st.booleans(), max_size=40)


@given(cases, st.integers(1, 5), st.sampled_from([1.0, 1.5, 4.0]), st.integers(0, 1000))
def test_no_prompt_is_lost_and_none_is_trained_twice(good: list[bool], batch: int, ratio: float, seed: int) -> None:
    backend = sample(good, batch, ratio, seed)
    trained = [g.prompt.prompt_id for u in backend.updates for g in u.groups]
    everything = [f"p{i}" for i in range(len(good))]
    assert len(set(trained)) == len(trained)
    assert sorted({*trained, *backend.rejected}) == sorted(everything)
    assert {p for p in everything if good[int(p[1:])]} <= set(trained)


@given(cases, st.integers(1, 5), st.integers(0, 1000), st.integers(0, 1000))
def test_what_is_trained_does_not_depend_on_who_finished_first(
    good: list[bool], batch: int, seed: int, other: int
) -> None:
    steps = [
        [[g.prompt.prompt_id for g in u.groups] for u in sample(good, batch, 4.0, s).updates] for s in (seed, other)
    ]
    assert steps[0] == steps[1]


@given(cases, st.integers(1, 5), st.sampled_from([1.0, 2.0, 4.0]), st.integers(0, 1000))
def test_every_round_is_full_within_its_bound_and_ends(good: list[bool], batch: int, ratio: float, seed: int) -> None:
    """A round is short only where its launches are used up, or the data are."""
    backend = sample(good, batch, ratio, seed)
    left = len(good)
    for update, launched in zip(backend.updates, backend.num_launched, strict=True):
        bound = max(int(ratio * batch), batch)
        assert 1 <= len(update.groups) <= batch
        assert launched <= bound
        if len(update.groups) < batch:
            assert launched == bound or left <= launched
        left -= launched - update.stats.num_aborted_prompts


def test_without_an_accepted_group_the_rejected_ones_are_trained() -> None:
    """So that a step is a step; their advantages are 0."""
    backend = sample([False] * 6, batch=2, ratio=2.0, seed=0)
    assert [len(u.groups) for u in backend.updates] == [2, 2]
    assert [u.stats.num_rejected_groups for u in backend.updates] == [4, 2]


def test_launches_follow_the_acceptance_rate() -> None:
    """With every other prompt rejected, later rounds launch about twice the batch at once."""
    backend = sample([i % 2 == 0 for i in range(400)], batch=8, ratio=4.0, seed=1)
    assert backend.num_launched[0] >= 15
    assert all(14 <= n <= 18 for n in backend.num_launched[2:20])


def test_the_acceptance_rate_is_a_running_mean() -> None:
    rate = AcceptanceRate()
    assert rate.mean == 1.0
    rate.add_round(2, 8)
    assert rate.mean == 0.25
    rate.add_round(8, 8)
    assert rate.mean == (0.7 * 2 + 8) / (0.7 * 8 + 8)
    copy = AcceptanceRate()
    copy.load_state_dict(rate.state_dict())
    assert copy.mean == rate.mean
    for _ in range(50):
        rate.add_round(0, 8)
    assert 0 < rate.mean < 0.05
