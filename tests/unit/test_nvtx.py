"""StageTimer: whose seconds are whose."""

from __future__ import annotations

from itertools import count

from rollpacker.profiling.nvtx import StageTimer


def test_what_is_timed_before_a_step_is_not_the_steps() -> None:
    """As a validation before the first step: its bar stays in the trace, its seconds are not step 1's."""
    clock = count()  # one second a reading
    timer = StageTimer(0, lambda: float(next(clock)))
    with timer.stage("testing"):
        pass
    timer.begin_step(1)
    with timer.stage("gen"):
        pass
    with timer.stage("testing"):
        pass
    seconds, spans = timer.take()
    assert seconds == {"gen": 1.0, "testing": 1.0, "step": 5.0}
    assert [span.name for span in spans] == ["testing", "step_1", "gen", "testing"]
