"""Parallel groups and models on them, for tests that walk through the shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rollpacker.comm.groups import ParallelRanks
from rollpacker.config import TrainingConfig
from rollpacker.model_shape import ModelShape, read_model_shape
from rollpacker.platform.device import Platform
from rollpacker.training.model import build_model, init_parallel_groups
from rollpacker.weights.refit import MegatronWeights


@dataclass
class Grid:
    """A model on one parallel shape. Groups are made once a shape and kept, and Megatron's globals swapped: making and
    ending some twenty gloo groups for each test is slow."""

    shape: ModelShape
    ranks: ParallelRanks
    model: Any
    weights: MegatronWeights

    _groups: ClassVar[dict[tuple[int, int], tuple[ParallelRanks, dict[str, Any]]]] = {}
    _models: ClassVar[dict[tuple[Any, ...], Grid]] = {}
    _untouched: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get(cls, folder: Path, platform: Platform, training: TrainingConfig) -> Grid:
        ranks = cls.activate(platform, training)
        key = (
            folder,
            training.tensor_model_parallel_size,
            training.pipeline_model_parallel_size,
            training.use_distributed_optimizer,
            training.recompute_granularity,
            training.dtype,
        )
        if key not in cls._models:
            shape = read_model_shape(str(folder))
            model = build_model(shape, training, platform, ranks)
            cls._models[key] = cls(shape, ranks, model, MegatronWeights(model, shape, ranks))
        return cls._models[key]

    @classmethod
    def activate(cls, platform: Platform, training: TrainingConfig) -> ParallelRanks:
        """Make the groups of this shape Megatron's current ones."""
        from megatron.core import parallel_state

        def read() -> dict[str, Any]:
            return {n: v for n, v in vars(parallel_state).items() if n.startswith("_") and n[1:].isupper()}

        cls._untouched = cls._untouched or read()
        key = (training.tensor_model_parallel_size, training.pipeline_model_parallel_size)
        vars(parallel_state).update(cls._groups[key][1] if key in cls._groups else cls._untouched)
        if key not in cls._groups:
            cls._groups[key] = (init_parallel_groups(training, platform, seed=1), read())
        return cls._groups[key][0]
