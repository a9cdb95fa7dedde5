"""Process groups as arguments: where a rank stands in the training grid, handed to whoever needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelRanks:
    """This rank's place in the training grid (rank order tp-cp-ep-pp-dp: a replica's ranks are contiguous)."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_group: Any
    pp_group: Any
    dp_group: Any

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_metrics(self) -> bool:
        """One rank of each training replica speaks for it."""
        return self.is_last_stage and self.tp_rank == 0
