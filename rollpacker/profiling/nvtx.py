"""The stages of a step: their names, and a timer that turns them into seconds, trace spans and NVTX ranges.

Ranges are called `rollpacker/<stage>` and `rollpacker/step_<n>`; tools/profile_bubbles.py and the readers of Nsight
Systems' exports find them by these names, so they do not change.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rollpacker.profiling.capture import StepCapture
from rollpacker.profiling.trace import Span

STEP = "step"
GEN = "gen"
REWARD = "reward"
OLD_LOG_PROB = "old_log_prob"
REF = "ref"
UPDATE_ACTOR = "update_actor"
UPDATE_WEIGHTS = "update_weights"
SAVE_CHECKPOINT = "save_checkpoint"
TESTING = "testing"
EXCHANGE = "exchange"
"""Moving samples between ranks."""

TIMING_STAGES = (STEP, GEN, REWARD, OLD_LOG_PROB, REF, UPDATE_ACTOR, UPDATE_WEIGHTS, SAVE_CHECKPOINT, TESTING)
"""The stages that metrics.jsonl reports as `timing_s/<stage>` (docs/metrics.md)."""
STAGES = (*TIMING_STAGES, EXCHANGE)


class _Ranges(Protocol):
    """The part of torch.cuda.nvtx that is used here."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


@dataclass(frozen=True)
class _OpenStage:
    name: str
    label: str
    start_s: float
    order: int
    args: dict[str, Any] | None


class StageTimer:
    """Times the stages of one rank: `begin_step(12)`, then `with timer.stage("gen"): ...`, and `take()` at the end.

    `clock` returns seconds since the run's start, the same origin on every rank. Stages nest, each counting its whole
    duration; a stage within itself would count twice and is refused. `nvtx` also marks NVTX ranges and needs CUDA;
    `capture` records the steps it was made for, with the ranges in them.
    """

    def __init__(
        self, rank: int, clock: Callable[[], float], *, nvtx: bool = False, capture: StepCapture | None = None
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._capture = capture
        self._ranges: _Ranges | None = capture if capture is not None else _nvtx_ranges() if nvtx else None
        self._open: list[_OpenStage] = []
        self._num_entered = 0
        self._seconds: dict[str, float] = {}
        self._spans: list[tuple[int, Span]] = []

    def begin_step(self, step: int) -> None:
        """Open the "step" stage of optimizer step `step`, which `take` ends; stages within it carry the number.

        No context manager, because a step spans several calls of the main loop. What was timed before it (a validation
        before the first step) is none of the step's seconds; its spans are kept. Raises ValueError within a stage.
        """
        self._end_step("begin_step()")
        self._seconds.clear()
        if self._capture is not None:
            self._capture.start(step)
        self._enter(STEP, f"step_{step}", {"step": step})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, one of STAGES but "step". Raises ValueError for another name and for an open one."""
        if name == STEP:
            raise ValueError("stage 'step' is not a block: begin_step(n) opens it, take() ends it.")
        if name not in STAGES:
            near = difflib.get_close_matches(name, STAGES, n=1, cutoff=0.0)
            raise ValueError(f"unknown stage {name!r}: did you mean {near[0]!r}? Stages are {', '.join(STAGES)}.")
        self._enter(name, name, self._open[0].args if self._open else None)
        try:
            yield
        finally:
            self._leave()

    def take(self) -> tuple[dict[str, float], list[Span]]:
        """End the step, then return and clear what ended since the last call: seconds by stage name, and the spans.

        Spans come in the order in which their stages began, outer before inner. Raises ValueError within a stage.
        """
        self._end_step("take()")
        seconds, spans = self._seconds, [span for _, span in sorted(self._spans, key=lambda item: item[0])]
        self._seconds, self._spans = {}, []
        return seconds, spans

    def _end_step(self, caller: str) -> None:
        if self._open and self._open[-1].name != STEP:
            raise ValueError(f"{caller} inside stage {self._open[-1].name!r}: leave the stage first.")
        if self._open:
            self._leave()
            if self._capture is not None:
                self._capture.stop()

    def _enter(self, name: str, label: str, args: dict[str, Any] | None) -> None:
        names = [stage.name for stage in self._open]
        if name in names:
            raise ValueError(f"stage {name!r} is open already ({' > '.join(names)}): its time would count twice.")
        if self._ranges is not None:
            self._ranges.range_push(f"rollpacker/{label}")
        self._open.append(_OpenStage(name, label, self._clock(), self._num_entered, args))
        self._num_entered += 1

    def _leave(self) -> None:
        stage, end_s = self._open.pop(), self._clock()
        if self._ranges is not None:
            self._ranges.range_pop()
        self._seconds[stage.name] = self._seconds.get(stage.name, 0.0) + end_s - stage.start_s
        span = Span(stage.label, self._rank, "stage", stage.start_s, end_s, stage.args)
        self._spans.append((stage.order, span))


def _nvtx_ranges() -> _Ranges:
    """torch.cuda.nvtx, imported only where it is asked for: the timer itself needs no torch."""
    import torch
    import torch.cuda.nvtx

    if not torch.cuda.is_available():
        raise ValueError("profiler.nvtx=true, but torch sees no CUDA device: NVTX ranges need one. Set it to false.")
    return torch.cuda.nvtx
