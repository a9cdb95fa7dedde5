"""The plain synchronous rollout (`tail_batching.mode: off`): P0 fresh prompts, R0 responses each, all of them trained.

It is the baseline of every comparison and the oracle of every other mode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollpacker.messages import Action, EndRound, RoundPlan, TrainGroup
from rollpacker.policy.controller import RoundState, build_group
from rollpacker.policy.routing import Router
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


def request_seed(run_seed: int, step: int, prompt: Prompt, response_index: int) -> int:
    """Seed of a response's sampling noise, in [0, 2**52): a hash, so that no two responses share their noise."""
    text = f"{run_seed}/{step}/{prompt.prompt_id}/{prompt.epoch}/{response_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12


@dataclass(frozen=True)
class RequestFactory:
    """Prompts to requests, prompt-major: what they all have in common, and the replica and seed of each."""

    router: Router
    num_responses: int
    max_tokens: int
    seed: int

    def requests(self, step: int, prompts: Sequence[Prompt], first_index: int = 0) -> tuple[Request, ...]:
        """`num_responses` requests for each prompt, numbered from `first_index` on."""
        asked = [(prompt, i) for prompt in prompts for i in range(self.num_responses)]
        replicas = self.router.assign([prompt for prompt, _ in asked], first_index)
        return tuple(
            Request(
                index=index,
                prompt=prompt,
                response_index=response_index,
                replica=replica,
                seed=request_seed(self.seed, step, prompt, response_index),
                max_tokens=self.max_tokens,
            )
            for index, ((prompt, response_index), replica) in enumerate(zip(asked, replicas, strict=True), first_index)
        )


class PlainComposer:
    """Launches the next `train_batch_size` prompts."""

    def __init__(
        self,
        source: PromptSource,
        factory: RequestFactory,
        *,
        train_batch_size: int,
        tensor_model_parallel_size: int,
    ) -> None:
        self._source = source
        self._factory = factory
        self._train_batch_size = train_batch_size
        self._tensor_model_parallel_size = tensor_model_parallel_size

    def compose(self, step: int) -> RoundPlan | None:
        """One round of fresh prompts; the last of a run may be smaller, since no prompt is lost."""
        prompts = self._source.draw(self._train_batch_size)
        if not prompts:
            return None
        return RoundPlan(
            step=step,
            kind=RoundKind.SHORT,
            tensor_model_parallel_size=self._tensor_model_parallel_size,
            num_groups=len(prompts),
            requests=self._factory.requests(step, prompts),
        )

    def long_queue_len(self) -> int:
        """Nothing is ever deferred."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return {"source": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved position."""
        self._source.load_state_dict(state["source"])


class KeepEverything:
    """Trains every group once its last reward is in; the round ends with the last group."""

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
