"""When a run stops: the signals, the deadline, and what a step is expected to take."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import pytest

from rollpacker.loop import RunStopped
from rollpacker.runtime.stopping import StopSwitch


class OneRank:
    """A communicator of one."""

    def allgather(self, value: Any) -> list[Any]:
        return [value]


@dataclass
class OneRankWorld:
    comm: OneRank


WORLD: Any = OneRankWorld(OneRank())


def switch_at(now: list[float], deadline_s: float | None = None) -> StopSwitch:
    return StopSwitch(deadline_s, clock=lambda: now[0])


def test_nothing_stops_a_run_by_itself() -> None:
    switch = switch_at([0.0])
    switch.between_steps(WORLD)
    assert switch.reason is None and not switch.drops_round


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_term_and_interrupt_drop_the_round(number: int) -> None:
    switch = switch_at([0.0], deadline_s=1e6)
    switch._on_signal(number, None)
    assert switch.drops_round
    with pytest.raises(RunStopped, match=signal.Signals(number).name):
        switch.between_steps(WORLD)


def test_a_second_term_does_not_end_at_once_and_a_second_interrupt_does() -> None:
    switch = switch_at([0.0])
    switch._on_signal(signal.SIGTERM, None)
    switch._on_signal(signal.SIGTERM, None)
    switch._on_signal(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        switch._on_signal(signal.SIGINT, None)


def test_usr1_lets_the_step_end_where_the_jobs_end_is_known() -> None:
    now = [0.0]
    switch = switch_at(now, deadline_s=100.0)
    switch._on_signal(signal.SIGUSR1, None)
    assert not switch.drops_round and switch.reason == "SIGUSR1"
    now[0] = 100.0
    assert switch.drops_round
    unknown = switch_at(now)
    unknown._on_signal(signal.SIGUSR1, None)
    assert unknown.drops_round


def test_no_step_begins_that_would_not_end_before_the_deadline() -> None:
    """Steps take 10 s: with 25 s left another one begins, with 5 s none does; the deadline itself drops what is open."""
    now = [0.0]
    switch = switch_at(now, deadline_s=35.0)
    switch.between_steps(WORLD)
    now[0] = 10.0
    switch.between_steps(WORLD)
    now[0] = 20.0
    switch.between_steps(WORLD)
    assert not switch.drops_round
    now[0] = 30.0
    with pytest.raises(RunStopped, match=r"5 s are left before trainer.save_deadline, and a step takes 10 s"):
        switch.between_steps(WORLD)
    assert not switch.drops_round
    now[0] = 35.0
    assert switch.drops_round


def test_an_old_deadline_stops_before_the_first_step() -> None:
    switch = switch_at([50.0], deadline_s=40.0)
    with pytest.raises(RunStopped):
        switch.between_steps(WORLD)
