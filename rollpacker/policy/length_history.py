"""LengthHistory: what a prompt's past responses say about the length of its next ones; and LengthDistribution: what those
of all prompts say about how long a response that still runs will be.

A prompt's record is a running mean of log length over its groups. A prompt that lost a race is known in part only: its
finished responses count as they are, and each unfinished one as one standard deviation beyond the longest response that
the round has seen to its end. So the reason why a prompt was queued is evidence before it was ever trained.

Invariant: the record of a step is written after its round, from finished rounds alone; predicting changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
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

    @property
    def _sigma(self) -> float:
        """Standard deviation of log length within a group; 0 before the first."""
        return math.sqrt(self._sum_variance / self._num_groups) if self._num_groups else 0.0

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
        beyond = min(math.log(max(cutoff_tokens, 1)) + self._sigma, self._cap_log)
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


class LengthDistribution:
    """Response lengths of many prompts, counted in bins of equal width on a log scale up to the cap."""

    _NUM_BINS = 96

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` is the length cap."""
        step = math.log(max_tokens) / self._NUM_BINS
        self._edges = [math.exp(step * i) for i in range(1, self._NUM_BINS)]  # upper edges of all bins but the last
        self._max_tokens = max_tokens
        self._counts = [0] * self._NUM_BINS
        self._sums = [0] * self._NUM_BINS

    def add(self, lengths: Sequence[int]) -> None:
        """Responses that ran to their end: their tokens."""
        for tokens in lengths:
            i = bisect_right(self._edges, tokens)
            self._counts[i] += 1
            self._sums[i] += tokens

    def mean_beyond(self, num_tokens: int) -> float:
        """Mean length of those longer than `num_tokens` (to a bin); the cap where none was."""
        first = bisect_right(self._edges, num_tokens)
        count = sum(self._counts[first:])
        return max(sum(self._sums[first:]) / count, float(num_tokens)) if count else float(self._max_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"counts": list(self._counts), "sums": list(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to saved counts."""
        self._counts, self._sums = list(state["counts"]), list(state["sums"])
