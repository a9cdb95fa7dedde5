"""A rank that trains and the simulator build their controller with one function: there are no other policies."""

from __future__ import annotations

from rollpacker import loop
from rollpacker.cli import train
from rollpacker.policy import assembly
from rollpacker.runtime import worker
from rollpacker.simulator import run as simulator_run


def test_the_worker_and_the_simulator_build_the_same_controller() -> None:
    assert worker.build_controller is simulator_run.build_controller is assembly.build_controller
    assert worker.StepController is simulator_run.StepController is assembly.StepController


def test_both_are_driven_by_the_one_loop() -> None:
    assert simulator_run.run is loop.run
    assert "run_loop" in train._train.__code__.co_varnames
