"""Random numbers that are functions of a request's seed: the same whatever happens around it, for whole rounds at once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Seeds = NDArray[np.uint64]

# Streams: numbers of one seed that do not depend on one another.
LENGTH, LENGTH_2, AT_CAP, SCORE, REWARD_TIME, REWARD_TIME_2 = range(6)


def uniform(seeds: Seeds, stream: int) -> Floats:
    """Numbers in (0, 1): splitmix64 of the seed and the number of the stream."""
    with np.errstate(over="ignore"):
        x = seeds * np.uint64(8) + np.uint64(stream)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(seeds: Seeds, stream: int) -> Floats:
    """Standard normal numbers from two streams (Box and Muller)."""
    radius = np.sqrt(-2.0 * np.log(uniform(seeds, stream)))
    found: Floats = radius * np.cos(2.0 * math.pi * uniform(seeds, stream + 1))
    return found
