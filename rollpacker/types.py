"""The nouns of a rollout: Prompt, Request, Response, Group, RoundKind. Frozen, hashable, free of any framework."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RoundKind(Enum):
    """Kind of a step's rollout (paper section 4.1): a SHORT round may race, a LONG round never does."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True)
class Prompt:
    """One row of the data, ready to be launched.

    `epoch` is the epoch in which the prompt was drawn; `token_ids` are empty where only lengths matter.
    """

    prompt_id: str
    token_ids: tuple[int, ...] = ()
    domain: str = "default"
    epoch: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What tells prompts of a round apart: a round that straddles two epochs may hold one of each."""
        return self.prompt_id, self.epoch


@dataclass(frozen=True)
class Request:
    """One response that is asked of an engine.

    `index` is the launch order within the round (prompt-major) and names the request in every event; vLLM gets it as
    the priority. `replica` is the rollout replica that decodes it. `seed` makes the sampled noise a function of the
    run seed, the step, the prompt and the response index alone, whatever engine decodes it.
    """

    index: int
    prompt: Prompt
    response_index: int
    replica: int
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Response:
    """What an engine made of a request.

    `rollout_logprobs[t]` is the log-probability of `token_ids[t]` under the law it was sampled from (temperature and
    truncation applied). `finish_reason` is vLLM's: "stop" (EOS or a stop token) or "length" (the cap).
    """

    request: Request
    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: str
    weight_version: int


@dataclass(frozen=True)
class ScoredResponse:
    """The facts of a finished response that every rank knows from the events; its tokens stay on its replica."""

    request: Request
    num_tokens: int
    finish_reason: str
    reward: float
    is_reward_error: bool
    finish_s: float


@dataclass(frozen=True)
class Group:
    """The responses of one prompt that are trained together; advantages compare them with one another."""

    prompt: Prompt
    responses: tuple[ScoredResponse, ...]
