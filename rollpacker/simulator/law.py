"""What a race did to the law of the trained samples, against the truth that only a simulator knows.

The definitions are those of `policy/audit.py` (docs/spec.md, 1.1), with the workload's own law in place of audit groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollpacker.simulator.workload import Floats, Ints

_REFERENCE_SAMPLES = 400_000
_BINS = 256  # own-prompt deviations are compared in bins, as the audit does


class LawCheck:
    """Compares groups of trained lengths with the workload's law, which `reference(n)` samples without any race."""

    def __init__(self, reference: Ints, group_size: int) -> None:
        """`reference` is [prompts, responses]: whole groups of `group_size` responses of every prompt."""
        self._group_size = group_size
        self._lengths = np.sort(reference.ravel())
        groups = reference.reshape(-1, group_size)
        self._deviations = np.sort(_deviations(groups).ravel()) if group_size > 1 else None

    @staticmethod
    def num_responses(num_prompts: int, group_size: int) -> int:
        """Responses of each prompt to ask of the law: whole groups, about 400,000 responses in all."""
        return group_size * max(_REFERENCE_SAMPLES // (num_prompts * group_size), 1)

    def coverage(self, groups: Sequence[Sequence[int]], q: float) -> float | None:
        """c(q): trained share of the responses above the q-quantile of all lengths; 1 is unbiased."""
        if not groups:
            return None
        return _coverage(self._lengths, np.concatenate([np.asarray(g) for g in groups]), q)

    def own_coverage(self, groups: Sequence[Sequence[int]], q: float) -> float | None:
        """o(q): the same of the distance from the mean log length of the group's other responses."""
        full = [g for g in groups if len(g) == self._group_size]
        if self._deviations is None or not full:
            return None
        return _coverage(self._deviations, _deviations(np.asarray(full)).ravel(), q)


def _deviations(groups: Ints) -> Ints:
    logs: Floats = np.log(groups)
    size = groups.shape[1]
    found: Ints = np.rint((logs - logs.mean(1, keepdims=True)) * size / (size - 1) * _BINS).astype(np.int64)
    return found


def _coverage(law: NDArray[np.int64], trained: NDArray[np.int64], q: float) -> float:
    """Share of `trained` above the q-quantile of the sorted `law`, over 1 - q; ties count in part, so that the law's own
    coverage is 1.
    """
    tail = 1 - q
    threshold = law[min(int(q * len(law)), len(law) - 1)]
    above = len(law) - np.searchsorted(law, threshold, side="right")
    ties = len(law) - above - np.searchsorted(law, threshold, side="left")
    tie_share = (tail * len(law) - above) / ties
    return float(((trained > threshold).mean() + tie_share * (trained == threshold).mean()) / tail)
