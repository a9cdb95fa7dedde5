"""Byte ranges between ranks over MPI, beside gloo."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from rollpacker.comm.transfers import BufferTransfers
from rollpacker.comm.world import World
from rollpacker.platform.device import Platform

NUM_MESSAGES, MESSAGE_BYTES = 300, 100_000
"""As many that Open MPI's buffers do not hold the ends of all: without `end()` two ranks wait for each other for ever."""


def test_gloo_may_follow_many_messages(world: World, platform: Platform) -> None:
    """A ring: all arrives, and no rank waits in gloo for one that still waits for a message."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for number in range(3):
        sent = np.full((NUM_MESSAGES, MESSAGE_BYTES), world.rank + number, dtype=np.uint8)
        received = np.full_like(sent, 255)
        transfers = BufferTransfers(world.comm)
        transfers.start(number, [(after, row) for row in sent], [(before, row) for row in received])
        transfers.finish(number)
        transfers.end()
        dist.barrier()
        assert (received == before + number).all()
