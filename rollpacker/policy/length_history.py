"""LengthHistory: what a prompt's past responses say about the length of its next ones.

A prompt's record is a running mean of log length over its groups. A prompt that lost a race is known in part only: its
finished responses count as they are, and each unfinished one as one standard deviation beyond the longest response that
the round has seen to its end. So the reason why a prompt was queued is evidence before it was ever trained.

Invariant: the record of a step is written after its round, from finished rounds alone; predicting changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class LengthHistory:
    """Predicts response tokens by prompt id."""

    def __init__(self, max_tokens: int, *, decay: float = 0.5) -> None:
        """`max_tokens` is the length cap; a new group weighs 1 - `decay` of its prompt's record."""
        if max_tokens < 1 or not 0 <= decay < 1:
            raise ValueError(f"max_tokens={max_tokens}, decay={decay}: expected at least 1, and within [0, 1).")
        self._cap_log = math.log(max_tokens)
        self._decay = decay
        self._mean_of: dict[str, float] = {}
        self._num_groups = 0
        self._sum_mean = 0.0
        self._sum_variance = 0.0

    def predict(self, prompt_id: str) -> float:
        """Expected tokens of a response: of this prompt, else of all prompts, else the cap."""
        everything = self._sum_mean / self._num_groups if self._num_groups else self._cap_log
        return math.exp(self._mean_of.get(prompt_id, everything))

    def add_trained(self, prompt_id: str, lengths: Sequence[int]) -> None:
        """A group that ran to its end: tokens of each response."""
        logs = [math.log(max(n, 1)) for n in lengths]
        mean = sum(logs) / len(logs)
        self._num_groups += 1
        self._sum_mean += mean
        self._sum_variance += sum((x - mean) ** 2 for x in logs) / max(len(logs) - 1, 1)
        self._add(prompt_id, mean)

    def add_censored(self, prompt_id: str, lengths: Sequence[int], num_unfinished: int, cutoff_tokens: int) -> None:
        """A group that lost a race: what finished, and how many outlived `cutoff_tokens`, the longest that did finish."""
        sigma = math.sqrt(self._sum_variance / self._num_groups) if self._num_groups else 0.0
        beyond = min(math.log(max(cutoff_tokens, 1)) + sigma, self._cap_log)
        logs = [math.log(max(n, 1)) for n in lengths] + [beyond] * num_unfinished
        self._add(prompt_id, sum(logs) / len(logs))

    def _add(self, prompt_id: str, mean: float) -> None:
        old = self._mean_of.get(prompt_id, mean)
        self._mean_of[prompt_id] = self._decay * old + (1 - self._decay) * mean

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "mean_of": dict(self._mean_of),
            "num_groups": self._num_groups,
            "sum_mean": self._sum_mean,
            "sum_variance": self._sum_variance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved record."""
        self._mean_of = dict(state["mean_of"])
        self._num_groups = state["num_groups"]
        self._sum_mean, self._sum_variance = state["sum_mean"], state["sum_variance"]
