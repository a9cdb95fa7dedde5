"""Idle GPU time ("bubbles") as shares between 0 and 1, from seconds that the ranks measured.

A share is never clamped: where the busy time exceeds the wall time the measurement is wrong, and the error says which.
Give as wall time the longest of the ranks' own measurements of the stage, not the clock of one rank, so that no rank
can have been busy for longer. (docs/metrics.md)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# MPI_Wtime counts from 1970, where two neighbouring doubles are 0.24 us apart: a thousandth of a promille of a stage of
# a quarter of a second. Anything larger is not rounding.
_ROUNDING = 1e-6


def rollout_bubble_ratio(busy_s: Sequence[float], wall_s: float) -> float:
    """Idle share of the rollout: 1 - sum(busy_s) / (len(busy_s) x wall_s).

    `busy_s[rank]` is the time in which the rank's engine had a request to decode, `wall_s` the time from the round's
    start to its end, both in seconds; a rank without a request still counts. Raises ValueError, see `idle_ratio`.
    """
    return idle_ratio("rollout", busy_s, wall_s)


def reward_bubble_ratio(last_generation_s: float, last_reward_s: float, step_wall_s: float) -> float:
    """Share of the step's rank-seconds spent on waiting for rewards alone.

    (last_reward_s - last_generation_s) / step_wall_s: between the end of the round's last generation and the return of
    its last reward no rank has anything else to do, so the number of ranks cancels. All in seconds, the two times from
    one origin. Raises ValueError when the last reward precedes the last generation (a response is scored after it has
    ended) or when the wait exceeds the step.
    """
    _check_wall("reward", step_wall_s)
    ratio = (last_reward_s - last_generation_s) / step_wall_s
    if not -_ROUNDING <= ratio <= 1 + _ROUNDING:
        raise ValueError(
            f"reward bubble ratio {ratio:.9g} is outside 0..1: the last generation ended at {last_generation_s:.9g} s, "
            f"the last reward returned at {last_reward_s:.9g} s, the step took {step_wall_s:.9g} s. Were the times "
            "read from one clock?"
        )
    return _without_rounding(ratio)


def idle_ratio(stage: str, busy_s: Sequence[float], wall_s: float) -> float:
    """1 - sum(busy_s) / (len(busy_s) x wall_s), where `busy_s` holds one number of seconds for each rank.

    Raises ValueError when there is no rank, when the wall time is not positive, or when a rank was busy for less than
    nothing or for longer than the stage lasted; `stage` names it in the message.
    """
    if not busy_s:
        raise ValueError(f"{stage} bubble ratio: no rank was measured; give one number of seconds for each rank.")
    _check_wall(stage, wall_s)
    for rank, seconds in enumerate(busy_s):
        if not -_ROUNDING * wall_s <= seconds <= wall_s * (1 + _ROUNDING):
            raise ValueError(
                f"{stage} bubble ratio: rank {rank} was busy for {seconds:.9g} s of {wall_s:.9g} s, expected 0 to the "
                "whole. An interval is counted twice, or the wall time is not that of the slowest rank."
            )
    return _without_rounding(1.0 - math.fsum(busy_s) / (len(busy_s) * wall_s))


def _check_wall(stage: str, wall_s: float) -> None:
    if not (wall_s > 0 and math.isfinite(wall_s)):
        raise ValueError(f"{stage} bubble ratio: wall time {wall_s} s, expected a positive number of seconds.")


def _without_rounding(ratio: float) -> float:
    """Rounding alone may leave the ratio outside 0..1; anything larger has been refused before."""
    return min(max(ratio, 0.0), 1.0)
