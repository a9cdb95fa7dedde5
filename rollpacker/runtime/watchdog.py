"""The watchdog: a job that does nothing for `trainer.stall_timeout_s` says where it stands, and ends.

What counts as progress is what every rank sees: a stage begins, a token is generated, a response ends, a reward comes in.
Then each rank writes `stall/<start>/rank_R.txt` in the run directory (stage, last events, rewards that are out, the stacks of
all threads), waits a moment for the others, and the lowest rank that could ends the job with the name of the suspect: a rank
that wrote nothing, one that is behind in the event exchange, or one that does not wait for others where they do.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.messages import EngineProgress, Event

if TYPE_CHECKING:
    from rollpacker.comm.world import World

_GRACE_S = 5.0
"""For the other ranks to say where they stand."""
_NUM_EVENTS = 20
_NUM_FRAMES = 8
_WAITING = re.compile(
    r"\b(allgather|allreduce|all_reduce|all_gather\w*|bcast|broadcast|gather|reduce\w*|[Bb]arrier|recv\w*|[Tt]est|[Ww]ait\w*)\("
)


class Heartbeat:
    """What a rank has done lately. Written by the rank's main thread, read by its watchdog."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.progress_s = clock()
        self.stage_name = "start"
        self.num_quanta = 0
        self.events: deque[Event] = deque(maxlen=_NUM_EVENTS)
        self.num_rewards_out: Callable[[], int] = lambda: 0

    def stage(self, step: int, name: str) -> None:
        """A stage begins."""
        self.stage_name, self.progress_s = f"step {step}, {name}", self._clock()

    def quantum(self) -> None:
        """A quantum was run, with or without something done in it; the same number on all ranks, but for one that lags."""
        self.num_quanta += 1

    def event(self, event: Event) -> None:
        """Something that all ranks see has happened."""
        if isinstance(event, EngineProgress) and not event.num_new_tokens:
            return
        self.progress_s = self._clock()
        if not isinstance(event, EngineProgress):
            self.events.append(event)


@dataclass(frozen=True)
class Standing:
    """Where a rank stands when the job stalls."""

    rank: int
    hostname: str
    pid: int
    stage: str
    num_quanta: int
    num_rewards_out: int
    is_waiting: bool


class Watchdog:
    """Watches a Heartbeat from a thread of its own."""

    def __init__(self, heartbeat: Heartbeat, world: World, folder: Path, timeout_s: float) -> None:
        """`folder` takes the reports."""
        self._heartbeat = heartbeat
        self._world = world
        self._folder = folder
        self._timeout_s = timeout_s
        self._main_thread = threading.get_ident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """From now on."""
        self._heartbeat.progress_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """The run is over."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(1.0, self._timeout_s / 4)):
            if time.monotonic() - self._heartbeat.progress_s > self._timeout_s:
                self._end_job()
                return

    def _end_job(self) -> None:
        mine = self._standing()
        try:
            self._write(mine)
        except OSError as error:  # the disk may be what the run waits for
            sys.stderr.write(f"rollpacker: rank {mine.rank} could not write {self._folder}: {error.strerror}\n")
        time.sleep(_GRACE_S)
        standings = {mine.rank: mine, **self._read_others()}
        if mine.rank != min(standings):
            time.sleep(2 * _GRACE_S)  # the lowest one speaks; this ends the job where it cannot
        suspect = name_suspect(standings, self._world.size)
        sys.stderr.write(
            f"rollpacker: nothing has happened for {self._timeout_s:.0f} s (trainer.stall_timeout_s) in {mine.stage}. "
            f"{suspect} Each rank's stacks and last events: {self._folder}. The job ends; starting it again goes on from "
            "the newest checkpoint.\n"
        )
        sys.stderr.flush()
        self._world.comm.Abort(1)

    def _standing(self) -> Standing:
        beat = self._heartbeat
        stack = traceback.StackSummary.extract(
            traceback.walk_stack(sys._current_frames()[self._main_thread]), limit=_NUM_FRAMES
        )
        is_waiting = any(_WAITING.search(linecache.getline(f.filename, f.lineno or 0)) for f in stack)
        rewards = beat.num_rewards_out()
        return Standing(
            self._world.rank, self._world.hostname, os.getpid(), beat.stage_name, beat.num_quanta, rewards, is_waiting
        )

    def _write(self, mine: Standing) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{mine.rank}.txt"
        with path.with_suffix(".partial").open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(mine)) + "\n\nLast events:\n")
            file.writelines(f"  {event}\n" for event in self._heartbeat.events)
            file.write("\nStacks, the innermost call first:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        path.with_suffix(".partial").replace(path)

    def _read_others(self) -> dict[int, Standing]:
        found = {}
        for path in self._folder.glob("rank_*.txt"):
            standing = Standing(**json.loads(path.read_text(encoding="utf-8").partition("\n")[0]))
            found[standing.rank] = standing
        return found


def name_suspect(standings: Mapping[int, Standing], num_ranks: int) -> str:
    """Which rank the others wait for, as far as `standings` (of the ranks that still answer) show; a sentence."""
    silent = [rank for rank in range(num_ranks) if rank not in standings]
    if silent:
        return f"Suspect: rank(s) {_listed(silent)}, which do not answer at all (stopped, swapped out, or the node is gone)."
    ranks = sorted(standings.values(), key=lambda s: s.rank)
    fewest = min(s.num_quanta for s in ranks)
    behind = [s for s in ranks if s.num_quanta == fewest]
    if len(behind) < len(ranks):
        return f"Suspect: {_named(behind)}, behind the others in the rollout."
    busy = [s for s in ranks if not s.is_waiting]
    if busy and len(busy) < len(ranks):
        return f"Suspect: {_named(busy)}, not waiting for others where the others wait."
    scoring = [s for s in ranks if s.num_rewards_out]
    if scoring:
        return f"Suspect: the rewards of {_named(scoring)}, which have not come back."
    return "No rank stands out: compare their stacks."


def _named(standings: list[Standing]) -> str:
    return ", ".join(f"rank {s.rank} on {s.hostname} (pid {s.pid})" for s in standings[:4]) + (
        f" and {len(standings) - 4} more" if len(standings) > 4 else ""
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
