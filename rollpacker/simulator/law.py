"""What a race did to the law of the trained samples, against the truth that only a simulator knows.

c(q), pooled, is defined in `policy/audit.py`, which must estimate the law from audit groups; here it is the workload's own.
o(q) asks each response for its place in the law of its own prompt, which the audit's deviations from the group mean stand
in for. A quantile that falls on a probability mass, such as that at the cap, takes the part of it that makes the law's own
coverage exactly 1.
"""

from __future__ import annotations

import numpy as np

from rollpacker.simulator.noise import Floats
from rollpacker.simulator.workload import Ints, Workload


def coverage(workload: Workload, lengths: Ints, q: float) -> float:
    """c(q): how much of their due share the trained `lengths` above the q-quantile of all responses have."""
    everybody = np.arange(len(workload.prompts))

    def above(length: int) -> float:
        return float(workload.survival(everybody, np.full(len(everybody), length)).mean())

    tail, low, high = 1 - q, 0, int(max(lengths.max(), 1))
    while above(high) > tail:
        high *= 2
    while high - low > 1:  # the shortest length that at most the share `tail` exceeds
        middle = (low + high) // 2
        low, high = (low, middle) if above(middle) <= tail else (middle, high)
    tie_share = (tail - above(high)) / (above(high - 1) - above(high))
    return float(((lengths > high).mean() + tie_share * (lengths == high).mean()) / tail)


def own_coverage(workload: Workload, which: Ints, lengths: Ints, q: float) -> float:
    """o(q): the same above the q-quantile of each response's own prompt; `which` are positions in workload.prompts."""
    tail = 1 - q
    above, at_least = workload.survival(which, lengths), workload.survival(which, lengths - 1)
    mass: Floats = np.maximum(at_least - above, 1e-300)
    return float(np.clip((tail - above) / mass, 0.0, 1.0).mean() / tail)
