"""From prompts to a round: sizes, seeds and what is expected of the lengths follow from the past alone."""

from __future__ import annotations

import json

import pytest

from rollpacker.messages import RequestFinished
from rollpacker.policy.controller import RoundState
from rollpacker.policy.launch import RoundLauncher, request_seed
from rollpacker.policy.planner import PreemptionPlanner, RoundForecast, SchedulePlanner
from rollpacker.policy.routing import BalancedRouter
from rollpacker.types import Group, Prompt, RoundKind, ScoredResponse

CAP = 1000


def launcher(planner=None) -> RoundLauncher:
    return RoundLauncher(planner or SchedulePlanner([1, 2]), num_gpus=4, max_tokens=CAP, seed=7)


def prompts(*names: str) -> list[Prompt]:
    return [Prompt(name, (1, 2, 3)) for name in names]


def finish(made: RoundLauncher, step: int, kind: RoundKind, lengths: list[int], num_preemptions: int = 0) -> None:
    """A round of one group with these lengths."""
    plan = made.plan(step, kind, prompts(f"p{step}"), num_groups=1, num_responses=len(lengths))
    state = RoundState(plan)
    state.num_preemptions = num_preemptions
    responses = []
    for request, n in zip(plan.requests, lengths, strict=True):
        state.finished[request.index] = RequestFinished(0.0, 0, request.index, n, "stop")
        responses.append(ScoredResponse(request, n, "stop", 1.0, False, 0.0))
    state.trained[plan.requests[0].prompt.key] = Group(plan.requests[0].prompt, tuple(responses))
    made.end_round(state)


def test_the_planner_sets_the_size_and_with_it_the_replicas() -> None:
    made = launcher()
    first = made.plan(1, RoundKind.SHORT, prompts("a", "b"), num_groups=2, num_responses=4)
    second = made.plan(2, RoundKind.SHORT, prompts("a", "b"), num_groups=2, num_responses=4)
    assert (first.tensor_model_parallel_size, {r.replica for r in first.requests}) == (1, {0, 1, 2, 3})
    assert (second.tensor_model_parallel_size, {r.replica for r in second.requests}) == (2, {0, 1})


def test_a_seed_depends_on_neither_size_nor_routing() -> None:
    dealt, balanced = (
        RoundLauncher(SchedulePlanner([size]), num_gpus=4, max_tokens=CAP, seed=7, make_router=router)
        for size, router in ((1, None), (2, lambda size, predict: BalancedRouter(4 // size, predict)))
    )
    plans = [
        made.plan(3, RoundKind.SHORT, prompts("a", "b"), num_groups=2, num_responses=3) for made in (dealt, balanced)
    ]
    seeds = [[r.seed for r in plan.requests] for plan in plans]
    assert seeds[0] == seeds[1] == [request_seed(7, 3, p, i) for p in prompts("a", "b") for i in range(3)]


class Listening(SchedulePlanner):
    """Keeps the forecasts."""

    def __init__(self) -> None:
        super().__init__([1])
        self.forecasts: list[RoundForecast] = []

    def choose(self, forecast: RoundForecast) -> int:
        self.forecasts.append(forecast)
        return super().choose(forecast)


def test_unless_it_races_a_round_is_expected_to_run_to_the_cap() -> None:
    planner = Listening()
    made = launcher(planner)
    finish(made, 1, RoundKind.SHORT, [10, 10])
    made.plan(2, RoundKind.SHORT, prompts("new"), num_groups=1, num_responses=2, is_raced=True)
    made.plan(3, RoundKind.LONG, prompts("new"), num_groups=1, num_responses=2)
    raced, unraced = planner.forecasts[1:]
    assert (raced.mean_tokens, raced.max_tokens) == pytest.approx((10, 10))
    assert (unraced.mean_tokens, unraced.max_tokens) == pytest.approx((10, CAP))
    assert (unraced.num_requests, unraced.prompt_tokens) == (2, 3)


def test_a_running_response_is_expected_to_end_as_those_of_its_kind_of_round_did() -> None:
    made = launcher()
    finish(made, 1, RoundKind.SHORT, [10, 20])
    finish(made, 2, RoundKind.LONG, [100, 900])
    made.plan(3, RoundKind.LONG, prompts("x"), num_groups=1, num_responses=1)
    assert made.expect(1) == 500
    assert made.expect(300) == 900  # only one of them was longer
    assert made.expect(950) == CAP  # none was
    made.plan(4, RoundKind.SHORT, prompts("x"), num_groups=1, num_responses=1)
    assert made.expect(1) == 15


def test_a_saved_launcher_goes_on_as_it_would_have() -> None:
    made, copy = (launcher(PreemptionPlanner((1, 2, 4), 1)) for _ in range(2))
    for step in range(1, 9):
        finish(made, step, RoundKind.LONG if step % 3 == 0 else RoundKind.SHORT, [step, 40 * step], 3**step)
    copy.load_state_dict(json.loads(json.dumps(made.state_dict())))
    plans = [m.plan(9, RoundKind.SHORT, prompts("p1", "new"), num_groups=2, num_responses=4) for m in (made, copy)]
    assert plans[0] == plans[1] and plans[0].tensor_model_parallel_size > 1
    assert [made.expect(n) for n in (1, 30, 100)] == [copy.expect(n) for n in (1, 30, 100)]
    assert made.predict(Prompt("p1")) == copy.predict(Prompt("p1"))
