"""Buffers between ranks over MPI, started and finished apart so that copies can run in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TAG = 57


class BufferTransfers:
    """Point-to-point transfers of byte ranges. Messages of a pair arrive in the order in which they were started."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._requests: dict[int, list[Any]] = {}

    def start(
        self,
        number: int,
        sends: Sequence[tuple[int, NDArray[np.uint8]]],
        receives: Sequence[tuple[int, NDArray[np.uint8]]],
    ) -> None:
        """Begin a round's (rank, bytes) transfers; the arrays must stay as they are until `finish(number)`."""
        requests = [self._comm.Irecv(data, source=peer, tag=_TAG) for peer, data in receives]
        requests += [self._comm.Isend(data, dest=peer, tag=_TAG) for peer, data in sends]
        self._requests[number] = requests

    def finish(self, number: int) -> None:
        """Wait for a round."""
        for request in self._requests.pop(number):
            request.Wait()

    def end(self) -> None:
        """Wait until every rank has finished all its rounds. Collective.

        Open MPI may hold back the end of a message until its receiver calls MPI again. Without this, the receiver could go
        on to a collective of gloo that the sender, still waiting for that end, never joins.
        """
        self._comm.Barrier()
