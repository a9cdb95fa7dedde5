"""Which sequences go where: over the optimizer steps, the training replicas, and into micro-batches.

Pure and deterministic on every rank. Invariant: every sequence is in exactly one mini-batch, one replica and one
micro-batch; within an update the gradient does not depend on which of the last two.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def split_mini_batches(groups: Sequence[_T], max_groups: int | None) -> list[Sequence[_T]]:
    """The groups of each optimizer step, in order: as few parts of at most `max_groups` as there can be, of equal size.

    None is one part; no groups, no part.
    """
    if not groups:
        return []
    count = math.ceil(len(groups) / (max_groups or len(groups)))
    ends = [len(groups) * (i + 1) // count for i in range(count)]
    return [groups[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def assign_to_replicas(lengths: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Indices of the sequences of each replica, longest first to the replica with the fewest tokens so far.

    (Graham's LPT rule: at most 4/3 of the best possible makespan.) A replica may get none.
    """
    totals = [(0, replica) for replica in range(num_replicas)]  # a heap; ties go to the lowest replica
    assigned: list[list[int]] = [[] for _ in range(num_replicas)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, replica = totals[0]
        heapq.heapreplace(totals, (total + lengths[index], replica))
        assigned[replica].append(index)
    return [sorted(indices) for indices in assigned]


def split_micro_batches(lengths: Sequence[int], *, max_tokens: int, max_sequences: int | None) -> list[list[int]]:
    """Indices in micro-batches of similar lengths whose padded size, rows x longest, stays within `max_tokens`.

    A single sequence longer than `max_tokens` gets a micro-batch of its own.
    """
    batches: list[list[int]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        is_full = len(current) == max_sequences or lengths[index] * (len(current) + 1) > max_tokens
        if current and is_full:
            batches.append(current)
            current = []
        current.append(index)
    if current:
        batches.append(current)
    return batches
