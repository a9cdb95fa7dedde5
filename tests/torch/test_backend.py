"""The backend's order of things: what no round starts on, and what a stopped run saves."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from rollpacker.config import Config, TrainerConfig
from rollpacker.loop import RunStopped
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


class RecordingCheckpointer:
    """What was begun, and with which state it was committed."""

    def __init__(self) -> None:
        self.newest_step: int | None = None
        self.committed: dict[int, Any] = {}

    def check(self) -> None:
        """No disk fails here."""

    def begin(self, step: int) -> None:
        self.newest_step = step

    def commit(self, state: Any) -> None:
        if self.newest_step is not None:
            self.committed.setdefault(self.newest_step, state)

    def wait(self) -> None:
        """Everything is written at once."""


class StoppedValidator:
    """Validates until it is stopped."""

    is_stopped = False

    def run(self, *_: Any) -> None:
        if self.is_stopped:
            raise RunStopped("SIGTERM")


def stage(_: str) -> Any:
    return contextlib.nullcontext()


@pytest.mark.parametrize("save_freq", [-1, 1])
@pytest.mark.parametrize("stopped_in", ["round", "last validation"])
def test_a_stopped_run_saves_the_state_after_its_last_whole_step(save_freq: int, stopped_in: str) -> None:
    """The data's position, which a round moves at once, goes with the weights that are saved."""
    position, checkpointer, validator = {"draws": 0}, RecordingCheckpointer(), StoppedValidator()
    reporter = SimpleNamespace(on_stage=lambda _: None, end_step=lambda *_: None, begin_step=lambda _: None)
    parts: Any = SimpleNamespace(
        engine=None,
        rollout=SimpleNamespace(launch=lambda _: None, num_virtual_steps=0),
        reporter=reporter,
        timer=SimpleNamespace(begin_step=lambda _: None, stage=stage),
        checkpointer=checkpointer,
        stop=SimpleNamespace(between_steps=lambda _: None),
        validator=validator,
        total_steps=9,
    )
    config = Config(trainer=TrainerConfig(save_freq=save_freq, test_freq=5))
    world: Any = SimpleNamespace(now=lambda: 0.0, rank=0)
    backend = ClusterBackend(parts, config, world, digest=lambda: 0, run_state=lambda: dict(position))
    backend.start(None)
    for step in (1, 2):
        backend.between_steps()
        position["draws"] += 1
        backend.launch(PLAN)
        backend._update = SimpleNamespace(step=step)  # type: ignore[assignment]
        backend.sync_weights()
    if stopped_in == "round":
        backend.between_steps()
        position["draws"] += 1
        backend.launch(PLAN)
    else:
        validator.is_stopped = True
        with pytest.raises(RunStopped):
            backend.validate_last(2)
    backend.save_stopped()
    assert checkpointer.newest_step == backend.num_done == 2
    saved = checkpointer.committed[2]
    assert (saved["step"], saved["draws"]) == (2, 2)
