"""Profilers around chosen steps of chosen ranks: capture ranges for Nsight Systems, or a torch.profiler trace a step.

`StageTimer` opens and closes the capture with the step, so that a capture holds whole steps and their stage ranges.
tools/profile_bubbles.py reads what comes out of it (docs/profiling.md).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class StepCapture(Protocol):
    """What records the steps: `start` and `stop` around each, and the stage ranges within."""

    def start(self, step: int) -> None:
        """Record step `step` if it is one of the chosen ones."""

    def stop(self) -> None:
        """End the recording that `start` began, if any."""

    def range_push(self, msg: str) -> Any:
        """Open a named range."""

    def range_pop(self) -> Any:
        """Close the range that was opened last."""


class NsysCapture:
    """cudaProfilerStart and cudaProfilerStop around the steps, which `nsys profile --capture-range=cudaProfilerApi
    --capture-range-end=repeat` turns into one report each. The ranges are NVTX ranges.

    `profiler` is torch.cuda.profiler, `ranges` torch.cuda.nvtx.
    """

    def __init__(self, steps: Sequence[int], profiler: Any, ranges: Any) -> None:
        self._steps = frozenset(steps)
        self._profiler = profiler
        self._is_open = False
        self.range_push = ranges.range_push
        self.range_pop = ranges.range_pop

    def start(self, step: int) -> None:
        """Open the capture range of a chosen step."""
        if step in self._steps:
            self._profiler.start()
            self._is_open = True

    def stop(self) -> None:
        """Close it. nsys reads the buffers then, so work that is still queued belongs to no capture."""
        if self._is_open:
            self._profiler.stop()
            self._is_open = False


class TorchCapture:
    """torch.profiler around the steps: one file `<host>_<pid>.<step>.pt.trace.json.gz` each, in `folder`."""

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        import torch.profiler

        self._steps = frozenset(steps)
        self._folder = folder
        self._torch_profiler = torch.profiler
        self._profile: Any = None
        self._step = 0
        self._ranges: list[Any] = []

    def start(self, step: int) -> None:
        """Begin to record a chosen step."""
        if step in self._steps:
            activities = self._torch_profiler.supported_activities()
            self._profile = self._torch_profiler.profile(activities=activities)
            self._profile.start()
            self._step = step

    def stop(self) -> None:
        """End the recording and write the file."""
        if self._profile is None:
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{socket.gethostname()}_{os.getpid()}.{self._step}.pt.trace.json.gz"
        self._profile.export_chrome_trace(str(self._folder / name))
        self._profile = None

    def range_push(self, msg: str) -> None:
        """A `user_annotation` of the trace."""
        opened = self._torch_profiler.record_function(msg)
        opened.__enter__()
        self._ranges.append(opened)

    def range_pop(self) -> None:
        """Close it."""
        self._ranges.pop().__exit__(None, None, None)


def build_capture(tool: str, steps: Sequence[int], ranks: Sequence[int], rank: int, folder: Path) -> StepCapture | None:
    """The capture of this rank, by `tool` nsys or torch; None without steps and for a rank not chosen (empty = all are)."""
    if not steps or (ranks and rank not in ranks):
        return None
    if tool == "torch":
        return TorchCapture(steps, folder)
    import torch.cuda

    return NsysCapture(steps, torch.cuda.profiler, torch.cuda.nvtx)
