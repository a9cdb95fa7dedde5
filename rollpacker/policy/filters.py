"""Which groups are worth training (dynamic sampling; DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol


class GroupFilter(Protocol):
    """Judges a finished group by its scores."""

    def accepts(self, scores: Sequence[float]) -> bool:
        """Whether the group is to be trained."""


class ZeroVarianceFilter:
    """Rejects a group whose scores are all equal: compared with one another they teach nothing.

    It judges scores, before an overlong penalty or a KL changes the rewards.
    """

    def accepts(self, scores: Sequence[float]) -> bool:
        """Whether any two scores differ."""
        return any(score != scores[0] for score in scores)


class AcceptanceRate:
    """A running mean of the share of groups that pass a filter: what a round must launch to end with enough of them.

    Rounds are weighted by 0.7 ** age: the share moves as the policy learns. Before the first round it is 1.
    """

    _DECAY = 0.7

    def __init__(self) -> None:
        self._accepted = 0.0
        self._judged = 0.0

    @property
    def mean(self) -> float:
        """The share, in (0, 1]; never 0, so that a launch count can be divided by it."""
        return max(self._accepted, 0.5) / self._judged if self._judged > 0.5 else 1.0

    def num_to_launch(self, wanted: int) -> int:
        """Groups to launch so that `wanted` should pass."""
        return math.ceil(wanted / self.mean - 1e-9)  # 15 / (3 / 11) is 55.00000000000001

    def add_round(self, num_accepted: int, num_judged: int) -> None:
        """Fold a round in."""
        self._accepted = self._DECAY * self._accepted + num_accepted
        self._judged = self._DECAY * self._judged + num_judged

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"accepted": self._accepted, "judged": self._judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved mean."""
        self._accepted, self._judged = state["accepted"], state["judged"]
