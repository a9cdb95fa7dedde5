"""RoundLauncher: prompts to requests. What a round is predicted to be, at which tensor-parallel size it runs, which replica
decodes which response, and with which seed; the same for every mode.

Invariants: all of it follows from history, before the first token; a seed belongs to (run, step, prompt, response), so that
neither the routing nor the size changes what is sampled. (paper sections 4.1 and 4.2)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollpacker.messages import RoundPlan
from rollpacker.policy.controller import RoundState
from rollpacker.policy.length_history import LengthDistribution, LengthHistory
from rollpacker.policy.planner import ParallelismPlanner, RoundForecast
from rollpacker.policy.routing import Predict, RequestRouter, Router
from rollpacker.types import Prompt, Request, RoundKind

MakeRouter = Callable[[int, Predict], Router]
"""A router of a round: from its tensor-parallel size and the predicted tokens of a prompt's response."""


def request_seed(run_seed: int, step: int, prompt: Prompt, response_index: int) -> int:
    """Seed of a response's sampling noise, in [0, 2**52): a hash, so that no two responses share their noise."""
    text = f"{run_seed}/{step}/{prompt.prompt_id}/{prompt.epoch}/{response_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12


class RoundLauncher:
    """Plans the rounds of a run, one after another, and learns from each."""

    def __init__(
        self,
        planner: ParallelismPlanner,
        *,
        num_gpus: int,
        max_tokens: int,
        seed: int,
        make_router: MakeRouter | None = None,
    ) -> None:
        """`max_tokens` caps a response. Without `make_router` responses are dealt out in turn."""
        self._planner = planner
        self._max_tokens = max_tokens
        self._seed = seed
        self._make_router = make_router or (lambda size, _: RequestRouter(num_gpus // size))
        self._router: Router | None = None
        self.history = LengthHistory(max_tokens)
        self._lengths = {kind: LengthDistribution(max_tokens) for kind in RoundKind}
        self._kind = RoundKind.SHORT

    def predict(self, prompt: Prompt) -> float:
        """Expected tokens of a response."""
        return self.history.predict(prompt.prompt_id)

    def expect(self, num_tokens: int) -> float:
        """Expected tokens of a response of the open round that has so many already, by the past rounds of its kind."""
        return self._lengths[self._kind].mean_beyond(num_tokens)

    def plan(
        self,
        step: int,
        kind: RoundKind,
        prompts: Sequence[Prompt],
        *,
        num_groups: int,
        num_responses: int,
        is_raced: bool = False,
    ) -> RoundPlan:
        """Open a round of `num_responses` requests for each prompt; unless it is raced, one may run to the cap."""
        predicted = [self.predict(p) for p in prompts]
        forecast = RoundForecast(
            step=step,
            kind=kind,
            num_requests=len(prompts) * num_responses,
            mean_tokens=sum(predicted) / len(predicted),
            max_tokens=max(predicted) if is_raced else float(self._max_tokens),
            prompt_tokens=sum(len(p.token_ids) for p in prompts) / len(prompts),
        )
        size = self._planner.choose(forecast)
        self._kind = kind
        self._router = self._make_router(size, self.predict)
        return RoundPlan(step, kind, size, num_groups, self._requests(step, prompts, num_responses, 0))

    def add(self, state: RoundState, prompts: Sequence[Prompt], num_responses: int) -> tuple[Request, ...]:
        """More requests for the open round."""
        self._open_router.observe(state.kv_cache_usage_of, state.freed_replicas)
        return self._requests(state.plan.step, prompts, num_responses, len(state.requests))

    def release(self, index: int) -> None:
        """A request of the open round has finished or was aborted."""
        self._open_router.release(index)

    def end_round(self, state: RoundState) -> None:
        """Write down what the round has shown of what it trained."""
        for group in state.trained.values():
            lengths = [r.num_tokens for r in group.responses]
            self.history.add_trained(group.prompt.prompt_id, lengths)
            self._lengths[state.plan.kind].add(lengths)
        self._planner.observe(state.plan.kind, state.num_preemptions)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; between two rounds."""
        return {
            "history": self.history.state_dict(),
            "lengths": {kind.value: lengths.state_dict() for kind, lengths in self._lengths.items()},
            "planner": self._planner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self.history.load_state_dict(state["history"])
        for kind, lengths in self._lengths.items():
            lengths.load_state_dict(state["lengths"][kind.value])
        self._planner.load_state_dict(state["planner"])

    @property
    def _open_router(self) -> Router:
        assert self._router is not None, "plan() opens a round"
        return self._router

    def _requests(
        self, step: int, prompts: Sequence[Prompt], num_responses: int, first_index: int
    ) -> tuple[Request, ...]:
        """Prompt-major, numbered from `first_index` on."""
        asked = [(prompt, i) for prompt in prompts for i in range(num_responses)]
        replicas = self._open_router.assign([prompt for prompt, _ in asked], first_index)
        return tuple(
            Request(
                index=index,
                prompt=prompt,
                response_index=response_index,
                replica=replica,
                seed=request_seed(self._seed, step, prompt, response_index),
                max_tokens=self._max_tokens,
            )
            for index, ((prompt, response_index), replica) in enumerate(zip(asked, replicas, strict=True), first_index)
        )
