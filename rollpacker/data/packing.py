"""Which sequences go where: over the training replicas, and into micro-batches. Pure and deterministic on every rank.

Invariant: every sequence is in exactly one replica and exactly one micro-batch; the gradient does not depend on which.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
