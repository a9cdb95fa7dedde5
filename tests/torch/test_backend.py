"""The backend's order of things: no round starts on weights that are not the trainer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollpacker.config import Config
from rollpacker.messages import RoundPlan
from rollpacker.runtime.backend import ClusterBackend
from rollpacker.types import RoundKind

PLAN = RoundPlan(step=1, kind=RoundKind.SHORT, tensor_model_parallel_size=1, num_groups=0, requests=())


def test_a_round_on_stale_weights_is_refused() -> None:
    """A backend that has seen no update yet is at version 0."""
    launched: list[Any] = []
    ignore = SimpleNamespace(begin_step=lambda _: None)
    engine = SimpleNamespace(weight_version=1)
    parts: Any = SimpleNamespace(
        engine=engine, rollout=SimpleNamespace(launch=launched.append), reporter=ignore, timer=ignore
    )
    world: Any = SimpleNamespace(now=lambda: 0.0)
    backend = ClusterBackend(parts, Config(), world, digest=lambda: 0, run_state=dict)
    with pytest.raises(RuntimeError, match="the engine has version 1 of the weights, the trainer 0"):
        backend.launch(PLAN)
    assert launched == []
    engine.weight_version = 0
    backend.launch(PLAN)
    assert launched == [PLAN]
