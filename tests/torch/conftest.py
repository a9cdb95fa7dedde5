"""One-process Megatron groups, for code that reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rollpacker.comm.groups import ParallelRanks
from rollpacker.config import TrainingConfig
from rollpacker.platform.device import select_platform

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="module")
def ranks() -> Iterator[ParallelRanks]:
    """Megatron's groups over this one process; the CPU stand-ins come first, before Megatron is imported."""
    platform = select_platform("cpu")
    platform.prepare(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from rollpacker.training.model import init_parallel_groups

    yield init_parallel_groups(TrainingConfig(), platform, seed=1)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
