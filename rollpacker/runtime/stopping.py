"""What asks a run to end early: signals, and the end of the job's time.

SIGTERM and SIGINT (a preemption, scancel, Ctrl-C) stop it at once: the open round is dropped. SIGUSR1 (sbatch --signal) and a
deadline that draws near only keep the next step from beginning, until the deadline itself drops the round. A second SIGINT
raises KeyboardInterrupt where the program is; another SIGTERM changes nothing, since srun sends one to the slower ranks.
A rank that has been asked tells the others in the event exchange and between two steps; all stop at the same point.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from rollpacker.loop import RunStopped

if TYPE_CHECKING:
    from rollpacker.comm.world import World

_NUM_STEPS = 5  # whose seconds say what the next step takes


class StopSwitch:
    """This rank's reasons to stop."""

    def __init__(self, deadline_s: float | None, clock: Callable[[], float] = time.time) -> None:
        """`deadline_s`: when the run must have been stopped, in seconds of `clock`; None where nobody has said."""
        self._deadline_s = deadline_s
        self._clock = clock
        self._signal: str | None = None
        self._is_urgent = False
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._step_began_s: float | None = None

    def install(self) -> None:
        """Take over the signals; in the main thread."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @staticmethod
    def ignore_signals() -> None:
        """Everything is saved: only an exit code is still to come. srun --kill-on-bad-exit sends SIGTERM to all ranks as soon
        as the first has left, and while Python ends it would kill: handlers are reset then, what is ignored stays so.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._signal == name:
            raise KeyboardInterrupt
        self._signal = self._signal if number == signal.SIGUSR1 and self._signal else name
        self._is_urgent = self._is_urgent or number != signal.SIGUSR1 or self._deadline_s is None

    @property
    def drops_round(self) -> bool:
        """Whether an open round must not be finished."""
        return self._is_urgent or (self._deadline_s is not None and self._clock() >= self._deadline_s)

    @property
    def reason(self) -> str | None:
        """Why this rank would not begin another step; None if it would."""
        if self._signal is not None:
            return self._signal
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - self._clock()
        step_s = sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        if left_s > step_s:
            return None
        return f"{max(left_s, 0):.0f} s are left before trainer.save_deadline, and a step takes {step_s:.0f} s"

    def between_steps(self, world: World) -> None:
        """Note the seconds of the step that has ended, and raise RunStopped if any rank has a reason. Collective."""
        now_s = self._clock()
        if self._step_began_s is not None:
            self._seconds.append(now_s - self._step_began_s)
        reasons = [r for r in world.comm.allgather(self.reason) if r is not None]
        if reasons:
            raise RunStopped(reasons[0])
        self._step_began_s = now_s
