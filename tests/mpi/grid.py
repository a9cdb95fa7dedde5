"""Parallel groups and a model on them, for tests that walk through the shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from rollpacker.comm.groups import ParallelRanks
from rollpacker.config import TrainingConfig
from rollpacker.model_shape import ModelShape, read_model_shape
from rollpacker.platform.device import Platform
from rollpacker.training.model import build_model, init_parallel_groups
from rollpacker.weights.refit import MegatronWeights


@dataclass
class Grid:
    """Only the last one made is kept: every process group costs gloo threads."""

    shape: ModelShape
    ranks: ParallelRanks
    model: Any
    weights: MegatronWeights

    _key: ClassVar[tuple[Any, ...] | None] = None
    _current: ClassVar[Grid | None] = None
    _groups: ClassVar[list[Any]] = []

    @classmethod
    def get(cls, folder: Path, platform: Platform, training: TrainingConfig) -> Grid:
        key = (
            folder,
            training.tensor_model_parallel_size,
            training.pipeline_model_parallel_size,
            training.use_distributed_optimizer,
            training.recompute_granularity,
        )
        if cls._key != key or cls._current is None:
            cls.clear()
            shape = read_model_shape(str(folder))
            before = set(dist.distributed_c10d._world.pg_map)
            ranks = init_parallel_groups(training, platform, seed=1)
            cls._groups = [g for g in dist.distributed_c10d._world.pg_map if g not in before]
            model = build_model(shape, training, platform, ranks)
            cls._key, cls._current = key, cls(shape, ranks, model, MegatronWeights(model, shape, ranks))
        return cls._current

    @classmethod
    def clear(cls) -> None:
        from megatron.core import parallel_state

        if cls._current is not None:
            parallel_state.destroy_model_parallel()
            for group in cls._groups:
                dist.destroy_process_group(group)
        cls._key = cls._current = None
