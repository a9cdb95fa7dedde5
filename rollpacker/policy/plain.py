"""The plain synchronous rollout (`tail_batching.mode: off`): P0 fresh prompts, R0 responses each, all of them trained.

It is the baseline of every comparison and the oracle of every other mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollpacker.messages import Action, EndRound, RoundPlan, TrainGroup
from rollpacker.policy.controller import RoundState, build_group
from rollpacker.policy.launch import RoundLauncher
from rollpacker.types import Prompt, Request, RoundKind


class PromptSource(Protocol):
    """Where fresh prompts come from: dataset order, resumable."""

    def draw(self, n: int) -> list[Prompt]:
        """The next `n` prompts; fewer only when the data are used up."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved position."""


class ReturningSource(PromptSource, Protocol):
    """A source of fresh prompts that takes some back, and finds those again that a checkpoint names."""

    def prompt(self, prompt_id: str, epoch: int) -> Prompt:
        """A prompt that was drawn."""

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        """Put drawn prompts back, to be drawn first."""


class PlainRollout:
    """Both seams of the controller: launches the next `train_batch_size` prompts, and trains every group of them."""

    def __init__(
        self, source: PromptSource, launcher: RoundLauncher, *, train_batch_size: int, num_responses: int
    ) -> None:
        self._source = source
        self._launcher = launcher
        self._train_batch_size = train_batch_size
        self._num_responses = num_responses

    def compose(self, step: int) -> RoundPlan | None:
        """One round of fresh prompts; the last of a run may be smaller, since no prompt is lost."""
        prompts = self._source.draw(self._train_batch_size)
        if not prompts:
            return None
        return self._launcher.plan(
            step, RoundKind.SHORT, prompts, num_groups=len(prompts), num_responses=self._num_responses
        )

    def long_queue_len(self) -> int:
        """Nothing is ever deferred."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and what was learnt of lengths and memory."""
        return {"source": self._source.state_dict(), "launcher": self._launcher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self._source.load_state_dict(state["source"])
        self._launcher.load_state_dict(state["launcher"])

    def on_finished(self, state: RoundState, request: Request) -> Sequence[Action]:  # noqa: ARG002
        """A finished response only waits for its reward."""
        return ()

    def on_scored(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Complete the group, and the round with the last group."""
        requests = state.requests_of[request.prompt.key]
        if state.num_scored_of[request.prompt.key] < len(requests):
            return ()
        actions: list[Action] = [TrainGroup(build_group(state, requests))]
        if len(state.trained) + 1 == state.plan.num_groups:
            actions.append(EndRound())
        return actions

    def on_round_end(self, state: RoundState) -> None:
        """Nothing is left over."""
        self._launcher.end_round(state)
