"""Advantage estimators: how much better a response did than it could be expected to.

Pure arithmetic on rewards, which every rank knows from the events. grpo, dr_grpo and rloo compare the responses of one
group and may stream; reinforce_plus_plus whitens over the whole step (docs/algorithms.md has formula, source and test).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

GROUP_STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def group_advantages(rewards: Sequence[float], *, adv_estimator: str, divide_by_std: bool) -> list[float]:
    """Advantage of each response of one group.

    grpo: A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with n - 1 (DeepSeekMath, arXiv 2402.03300, eq. 3; as verl computes
    it); without the division if `divide_by_std` is false. dr_grpo: A_i = r_i - mean(r) (arXiv 2503.20783).
    rloo: A_i = r_i - mean of the other responses' rewards (arXiv 2402.14740); a group of one keeps its reward.
    """
    if adv_estimator not in GROUP_ESTIMATORS:
        raise ValueError(f"unknown group estimator {adv_estimator!r}")
    if adv_estimator == "rloo" and len(rewards) == 1:
        return list(rewards)
    offsets = [r - rewards[0] for r in rewards]  # so that equal rewards, whatever they are, give exactly 0
    mean = math.fsum(offsets) / len(offsets)
    centred = [o - mean for o in offsets]
    if adv_estimator == "rloo":  # r_i - (n mean - r_i) / (n - 1) = n / (n - 1) (r_i - mean)
        return [c * len(rewards) / (len(rewards) - 1) for c in centred]
    if adv_estimator == "dr_grpo" or not divide_by_std or len(rewards) == 1:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + GROUP_STD_EPSILON) for c in centred]


def returns_to_go(reward: float, token_penalties: np.ndarray) -> np.ndarray:
    """Undiscounted return from each token on, [T] float64: the reward at the end less the penalties still to come."""
    return reward - np.cumsum(token_penalties[::-1], dtype=np.float64)[::-1]


def whiten(returns: np.ndarray, *, mean: float, variance: float) -> np.ndarray:
    """REINFORCE++ (arXiv 2501.03262, eq. 6): (R_t - mean) / sqrt(var + 1e-8), over all response tokens of the step."""
    return ((returns - mean) / math.sqrt(variance + WHITEN_EPSILON)).astype(np.float32)


def overlong_penalty(num_tokens: int, *, max_response_length: int, buffer_len: int, factor: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), between -factor and 0: nothing up to
    max_response_length - buffer_len tokens, then falling linearly to -factor at the cap.
    """
    excess = num_tokens - (max_response_length - buffer_len)
    return -min(max(excess / buffer_len, 0.0), 1.0) * factor
