"""Captures of chosen steps: what is called when, with the timer that drives them."""

from __future__ import annotations

from pathlib import Path

from rollpacker.profiling.capture import NsysCapture, build_capture
from rollpacker.profiling.nvtx import StageTimer


class Recorder:
    """Stands for torch.cuda.profiler and torch.cuda.nvtx."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def range_push(self, msg: str) -> None:
        self.calls.append(msg)

    def range_pop(self) -> None:
        self.calls.append("pop")


def test_nsys_captures_whole_steps_with_their_ranges() -> None:
    recorder = Recorder()
    timer = StageTimer(0, lambda: 0.0, capture=NsysCapture([2], recorder, recorder))
    for step in (1, 2, 3):
        timer.begin_step(step)
        with timer.stage("gen"):
            pass
        timer.take()
    step_ranges = [[f"rollpacker/step_{step}", "rollpacker/gen", "pop", "pop"] for step in (1, 2, 3)]
    assert recorder.calls == [*step_ranges[0], "start", *step_ranges[1], "stop", *step_ranges[2]]


def test_only_chosen_ranks_capture() -> None:
    assert build_capture("none", [], [], 0, Path()) is None
    assert build_capture("torch", [1], [1, 2], 0, Path()) is None
