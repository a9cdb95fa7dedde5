"""AdaptiveTimeout: how long a test case of a code task may run (paper section 4.3).

A test case that a correct response has passed in t seconds need not wait 30 s for the next: its limit is
min(max(T_min, factor * anchor), T_max), where the anchor is the longest execution by a correct response so far in the
run. Responses of a group run on different replicas, so their times travel in the reward events, and the controller of
every rank keeps the same anchors.

Invariants: a limit never falls below `min_s` nor rises above `max_s`; only correct responses move an anchor, and only up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any


class AdaptiveTimeout:
    """Anchors by prompt and test case."""

    def __init__(
        self, *, min_s: float = 2.0, max_s: float = 30.0, factor: float = 1.5, correct_score: float = 1.0
    ) -> None:
        """A response is correct where its score reaches `correct_score`."""
        if not 0 < min_s <= max_s or factor < 1:
            raise ValueError(
                f"min_s={min_s}, max_s={max_s}, factor={factor}: expected 0 < min_s <= max_s, factor >= 1."
            )
        self._min_s, self._max_s, self._factor = min_s, max_s, factor
        self._correct_score = correct_score
        self._anchors: dict[str, list[float]] = {}

    @property
    def max_s(self) -> float:
        """The limit of a test case that no correct response has passed yet."""
        return self._max_s

    def case_timeouts_s(self, prompt_id: str) -> tuple[float, ...]:
        """Limit of each test case, in their order; empty, which means `max_s` each, before any correct response."""
        anchors = self._anchors.get(prompt_id, ())
        return tuple(min(max(self._min_s, self._factor * anchor), self._max_s) for anchor in anchors)

    def observe(self, prompt_id: str, case_execution_s: Sequence[float], score: float) -> None:
        """A response was scored; one that is not correct teaches nothing."""
        if score < self._correct_score or not case_execution_s:
            return
        pairs = zip_longest(self._anchors.get(prompt_id, ()), case_execution_s, fillvalue=0.0)
        self._anchors[prompt_id] = [max(pair) for pair in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"anchors": {prompt_id: list(anchors) for prompt_id, anchors in self._anchors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to saved anchors."""
        self._anchors = {prompt_id: list(anchors) for prompt_id, anchors in state["anchors"].items()}
