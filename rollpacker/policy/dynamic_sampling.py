"""Dynamic sampling for the plain rollout: groups that a filter rejects are replaced by fresh prompts in the same round.

A round trains the first P0 accepted groups *in launch order*. So what is trained depends on scores alone and never on
who finished first: without a race there is no bias towards short responses. More than P0 are launched where the filter
is known to reject (P0 over the running acceptance rate), and more again when too few are left; a rejected prompt leaves
the epoch and is counted. What lies behind the last trained group goes back to the front of the fresh prompts, whatever
became of it.

Invariants: no prompt is lost; a round launches at most max_launched_ratio x P0 prompts, and always ends: short where the
bound or the data give no more, and with the rejected groups (whose advantages are 0) where nothing was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from rollpacker.messages import AbortRequest, Action, EndRound, LaunchRequests, RejectGroup, RoundPlan, TrainGroup
from rollpacker.policy.controller import RoundState, build_group
from rollpacker.policy.filters import AcceptanceRate, GroupFilter
from rollpacker.policy.plain import PromptSource, RequestFactory
from rollpacker.types import Prompt, Request, RoundKind

_Key = tuple[str, int]


class ReturningSource(PromptSource, Protocol):
    """A source of fresh prompts that takes some back."""

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        """Put drawn prompts back, to be drawn first."""


class DynamicSampling:
    """Both seams of the controller, RoundComposer and SelectionPolicy, since replacement belongs to both."""

    def __init__(
        self,
        source: ReturningSource,
        factory: RequestFactory,
        group_filter: GroupFilter,
        *,
        train_batch_size: int,
        max_launched_ratio: float,
        tensor_model_parallel_size: int,
    ) -> None:
        self._source = source
        self._factory = factory
        self._filter = group_filter
        self._train_batch_size = train_batch_size
        self._max_launched = max(math.floor(max_launched_ratio * train_batch_size), train_batch_size)
        self._tensor_model_parallel_size = tensor_model_parallel_size
        self.acceptance = AcceptanceRate()
        self._accepted: dict[_Key, bool] = {}

    def compose(self, step: int) -> RoundPlan | None:
        """Launch as many prompts as should leave `train_batch_size` after the filter."""
        prompts = self._source.draw(self._num_to_launch(self._train_batch_size, launched=0))
        self._accepted = {}
        if not prompts:
            return None
        return RoundPlan(
            step=step,
            kind=RoundKind.SHORT,
            tensor_model_parallel_size=self._tensor_model_parallel_size,
            num_groups=self._train_batch_size,
            responses_per_group=self._factory.num_responses,
            requests=self._factory.requests(step, prompts),
        )

    def long_queue_len(self) -> int:
        """Nothing is ever deferred."""
        return 0

    def on_finished(self, state: RoundState, request: Request) -> Sequence[Action]:  # noqa: ARG002
        """A finished response only waits for its reward."""
        return ()

    def on_scored(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Judge a complete group; train what is certain to be among the first P0, replace, or end."""
        key = request.prompt.key
        requests = state.requests_of[key]
        if not all(state.is_scored(r) for r in requests):
            return ()
        self._accepted[key] = self._filter.accepts([state.rewards[r.index].score for r in requests])
        candidates = [k for k in state.requests_of if self._accepted.get(k, True)]
        first = candidates[: self._train_batch_size]
        certain = [k for k in first if k in self._accepted]
        actions = [_train(state, k) for k in certain if k not in state.trained]
        if len(candidates) < self._train_batch_size:
            launched = self._replace(state, self._train_batch_size - len(candidates))
            if launched:
                return [*actions, LaunchRequests(launched)]
        return actions + self._end(state, first) if len(certain) == len(first) else actions

    def _num_to_launch(self, num_missing: int, *, launched: int) -> int:
        """Prompts to launch so that `num_missing` should pass the filter, within the round's bound."""
        return min(math.ceil(num_missing / self.acceptance.mean), self._max_launched - launched)

    def _replace(self, state: RoundState, num_missing: int) -> tuple[Request, ...]:
        prompts = self._source.draw(self._num_to_launch(num_missing, launched=len(state.requests_of)))
        return self._factory.requests(state.plan.step, prompts, first_index=len(state.requests))

    def _end(self, state: RoundState, trained: Sequence[_Key]) -> list[Action]:
        """Every candidate is decided: put back what lies behind the last of them, abort it, end the round."""
        keys = list(state.requests_of)
        prompts = {k: requests[0].prompt for k, requests in state.requests_of.items()}
        is_full = len(trained) == self._train_batch_size
        surplus = keys[keys.index(trained[-1]) + 1 :] if is_full else []
        self._source.push_front([prompts[k] for k in surplus])
        self.acceptance.add_round(sum(self._accepted.values()), len(self._accepted))
        # Where the filter let nothing pass, train what there is rather than nothing.
        actions = [] if trained else [_train(state, k) for k in keys[: self._train_batch_size]]
        actions += [AbortRequest(r) for k in surplus for r in state.requests_of[k]]
        actions += [RejectGroup(prompts[k]) for k in keys if not self._accepted.get(k, True) and k not in surplus]
        return [*actions, EndRound()]


def _train(state: RoundState, key: _Key) -> Action:
    return TrainGroup(build_group(state, state.requests_of[key]))
