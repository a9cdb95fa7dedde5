"""Group-relative advantages: how much better a response did than the others of its prompt.

Pure arithmetic on rewards, which every rank knows from the events; no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

GROUP_STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], *, adv_estimator: str, divide_by_std: bool) -> list[float]:
    """Advantage of each response of one group.

    grpo: A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with n - 1 (DeepSeekMath, arXiv 2402.03300, eq. 3; as verl computes
    it); without the division if `divide_by_std` is false. dr_grpo: A_i = r_i - mean(r) (arXiv 2503.20783).
    """
    if adv_estimator not in ("grpo", "dr_grpo"):
        raise ValueError(f"unknown advantage estimator {adv_estimator!r}")
    offsets = [r - rewards[0] for r in rewards]  # so that equal rewards, whatever they are, give exactly 0
    mean = math.fsum(offsets) / len(offsets)
    centred = [o - mean for o in offsets]
    if adv_estimator == "dr_grpo" or not divide_by_std or len(rewards) == 1:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + GROUP_STD_EPSILON) for c in centred]
