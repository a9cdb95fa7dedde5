"""Who is named when a job stalls, and what counts as progress."""

from __future__ import annotations

from dataclasses import replace

from rollpacker.messages import EngineProgress, RequestFinished
from rollpacker.runtime.watchdog import Heartbeat, Standing, name_suspect

GOOD = Standing(rank=0, hostname="n1", pid=7, stage="step 3, gen", num_quanta=50, num_rewards_out=0, is_waiting=True)


def standings(*changes: dict[str, object]) -> dict[int, Standing]:
    return {rank: replace(GOOD, rank=rank, **change) for rank, change in enumerate(changes)}  # type: ignore[arg-type]


def test_a_rank_that_says_nothing_is_the_suspect() -> None:
    assert "rank(s) 2, which do not answer" in name_suspect(standings({}, {}), 3)


def test_a_rank_that_is_behind_in_the_rollout_is_the_suspect() -> None:
    assert "rank 1 on n2 (pid 7), behind" in name_suspect(
        standings({}, {"num_quanta": 49, "hostname": "n2"}, {"is_waiting": False}), 3
    )


def test_a_rank_that_works_while_the_others_wait_is_the_suspect() -> None:
    assert "rank 1 on n1 (pid 7), not waiting" in name_suspect(standings({}, {"is_waiting": False}, {}), 3)


def test_rewards_that_do_not_come_back_are_the_suspect() -> None:
    assert "the rewards of rank 1 on n1" in name_suspect(standings({}, {"num_rewards_out": 2}), 2)


def test_nobody_is_accused_without_reason() -> None:
    assert "No rank stands out" in name_suspect(standings({}, {}), 2)


def test_an_idle_engine_is_no_progress() -> None:
    now = [0.0]
    beat = Heartbeat(lambda: now[0])
    now[0] = 5.0
    beat.quantum()
    beat.event(EngineProgress(1.0, 0, 0, 0, 0.0, 0))
    assert beat.progress_s == 0.0
    beat.event(EngineProgress(1.0, 0, 3, 0, 0.0, 1))
    assert beat.progress_s == 5.0
    assert list(beat.events) == []
    now[0] = 6.0
    beat.event(RequestFinished(1.0, 0, 4, 9, "stop"))
    assert (beat.progress_s, len(beat.events)) == (6.0, 1)
    now[0] = 7.0
    beat.stage(3, "update_actor")
    assert (beat.progress_s, beat.stage_name) == (7.0, "step 3, update_actor")
