"""Dynamic sampling for the plain rollout: groups that a filter rejects are replaced by fresh prompts in the same round.

A round trains the first P0 accepted groups *in launch order*. So what is trained depends on scores alone and never on
who finished first: without a race there is no bias towards short responses. More than P0 are launched where the filter
is known to reject (P0 over the running acceptance rate), and more again when too few are left; a rejected prompt leaves
the epoch and is counted. What lies behind the last trained group goes back to the front of the fresh prompts, whatever
became of it.

Invariants: no prompt is lost; a round launches at most max_launched_ratio x P0 prompts, and always ends: short where the
bound or the data give no more, and with the rejected groups where nothing was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.messages import AbortRequest, Action, EndRound, LaunchRequests, RejectGroup, RoundPlan, TrainGroup
from rollpacker.policy.controller import RoundState, build_group
from rollpacker.policy.filters import AcceptanceRate, GroupFilter
from rollpacker.policy.launch import RoundLauncher
from rollpacker.policy.plain import ReturningSource
from rollpacker.types import Request, RoundKind

_Key = tuple[str, int]


class DynamicSampling:
    """Both seams of the controller, RoundComposer and SelectionPolicy, since replacement belongs to both."""

    def __init__(
        self,
        source: ReturningSource,
        launcher: RoundLauncher,
        group_filter: GroupFilter,
        *,
        train_batch_size: int,
        num_responses: int,
        max_launched_ratio: float,
    ) -> None:
        self._source = source
        self._launcher = launcher
        self._num_responses = num_responses
        self._filter = group_filter
        self._train_batch_size = train_batch_size
        self._max_launched = max(math.floor(max_launched_ratio * train_batch_size), train_batch_size)
        self.acceptance = AcceptanceRate()
        self._window = _Window(train_batch_size)

    def compose(self, step: int) -> RoundPlan | None:
        """Launch as many prompts as should leave `train_batch_size` after the filter."""
        prompts = self._source.draw(self._num_to_launch(self._train_batch_size, launched=0))
        self._window = _Window(self._train_batch_size)
        self._window.launch([p.key for p in prompts])
        if not prompts:
            return None
        return self._launcher.plan(
            step,
            RoundKind.SHORT,
            prompts,
            num_groups=self._train_batch_size,
            num_responses=self._num_responses,
        )

    def long_queue_len(self) -> int:
        """Nothing is ever deferred."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, what the filter lets pass, and what was learnt of lengths and memory."""
        return {
            "source": self._source.state_dict(),
            "acceptance": self.acceptance.state_dict(),
            "launcher": self._launcher.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self._source.load_state_dict(state["source"])
        self.acceptance.load_state_dict(state["acceptance"])
        self._launcher.load_state_dict(state["launcher"])

    def on_finished(self, state: RoundState, request: Request) -> Sequence[Action]:  # noqa: ARG002
        """A finished response only waits for its reward."""
        return ()

    def on_scored(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Judge a complete group; train what is certain to be among the first P0, replace, or end."""
        key, window = request.prompt.key, self._window
        requests = state.requests_of[key]
        if state.num_scored_of[key] < len(requests):
            return ()
        is_accepted = self._filter.accepts([state.rewards[r.index].score for r in requests])
        actions = [_train(state, k) for k in window.judge(key, is_accepted)]
        if window.num_missing:
            launched = self._replace(state, window.num_missing)
            if launched:
                return [*actions, LaunchRequests(launched)]
        return actions + self._end(state) if window.is_decided else actions

    def on_round_end(self, state: RoundState) -> None:
        """What was left over went back when the round ended."""
        self._launcher.end_round(state)

    def _num_to_launch(self, num_missing: int, *, launched: int) -> int:
        """Prompts to launch so that `num_missing` should pass the filter, within the round's bound."""
        return min(self.acceptance.num_to_launch(num_missing), self._max_launched - launched)

    def _replace(self, state: RoundState, num_missing: int) -> tuple[Request, ...]:
        prompts = self._source.draw(self._num_to_launch(num_missing, launched=len(state.requests_of)))
        self._window.launch([p.key for p in prompts])
        return self._launcher.add(state, prompts, self._num_responses)

    def _end(self, state: RoundState) -> list[Action]:
        """Every candidate is decided: put back what lies behind the last of them, abort it, end the round."""
        window = self._window
        keys, surplus = window.inside(), window.behind()
        prompts = {k: requests[0].prompt for k, requests in state.requests_of.items()}
        self._source.push_front([prompts[k] for k in surplus])
        # Only what the window holds: behind it, those that finished early are not a fair sample.
        self.acceptance.add_round(sum(window.verdicts[k] for k in keys), len(keys))
        # Where the filter let nothing pass, train what there is rather than nothing.
        nothing = not any(window.verdicts[k] for k in keys)
        actions = [_train(state, k) for k in keys[: self._train_batch_size]] if nothing else []
        actions += [AbortRequest(r) for k in surplus for r in state.requests_of[k]]
        actions += [RejectGroup(prompts[k]) for k in keys if not window.verdicts[k]]
        return [*actions, EndRound()]


class _Window:
    """The first `size` prompts, in launch order, that the filter has not rejected: those that are to be trained.

    A rejection moves its end by one prompt, so a verdict costs the same however many prompts there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: list[_Key] = []
        self._place: dict[_Key, int] = {}
        self._end = 0  # prompts launched before this place are inside
        self._num_kept = 0  # of those inside, the ones that are not rejected
        self._num_undecided = 0
        self.verdicts: dict[_Key, bool] = {}

    @property
    def num_missing(self) -> int:
        """How many prompts the window lacks to be full."""
        return self._size - self._num_kept

    @property
    def is_decided(self) -> bool:
        """Whether every prompt inside has its verdict."""
        return self._num_undecided == 0

    def launch(self, keys: Sequence[_Key]) -> None:
        """Let more prompts in, behind the others."""
        for key in keys:
            self._place[key] = len(self._keys)
            self._keys.append(key)
        self._extend()

    def judge(self, key: _Key, is_accepted: bool) -> list[_Key]:
        """Note a verdict and return the prompts that are now certain to be trained."""
        self.verdicts[key] = is_accepted
        if self._place[key] >= self._end:
            return []
        self._num_undecided -= 1
        if is_accepted:
            return [key]
        self._num_kept -= 1
        return self._extend()

    def inside(self) -> list[_Key]:
        """The prompts up to the last of the window, the rejected ones between them included."""
        return self._keys[: self._end]

    def behind(self) -> list[_Key]:
        """The prompts after the window."""
        return self._keys[self._end :]

    def _extend(self) -> list[_Key]:
        """Let prompts in until the window is full; those already accepted are certain."""
        certain = []
        while self._num_kept < self._size and self._end < len(self._keys):
            key = self._keys[self._end]
            self._end += 1
            verdict = self.verdicts.get(key)
            if verdict is not False:
                self._num_kept += 1
                self._num_undecided += verdict is None
            if verdict:
                certain.append(key)
        return certain


def _train(state: RoundState, key: _Key) -> Action:
    return TrainGroup(build_group(state, state.requests_of[key]))
