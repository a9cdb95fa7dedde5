"""The replicated event exchange: every rank learns every event, in the same order, without anybody in the middle.

At the end of a quantum (k engine steps) each rank posts one non-blocking Iallgather of a fixed-size record: a header and
64 fixed-layout event slots. What does not fit waits one quantum; a varying count would have to be known everywhere at
posting. The exchange of quantum q is completed at the end of quantum q + 1, so a rank runs at most one quantum ahead and
rarely waits. `progress()` between engine steps only drives MPI; ranks act only on completed exchanges, at quantum
boundaries, so that a tensor-parallel group cannot split. (docs/architecture.md, 2)

Invariants: events come out ordered by (time, rank, sequence) and identical on all ranks; each record carries a digest of
the controller that posted it, and a mismatch ends the job with the names of the ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from rollpacker.comm.world import wait_for
from rollpacker.messages import EngineProgress, Event, RequestFinished, RequestStarted, RewardDone

NUM_SLOTS = 64
_FINISH_REASONS = ("stop", "length")
_FINISHED, _REWARD, _STARTED = 1, 2, 3

SlotEvent = RequestStarted | RequestFinished | RewardDone
"""What travels in slots; an EngineProgress is part of each leader's record."""

_SLOT = np.dtype(
    [
        ("kind", "u1"),
        ("finish_reason", "u1"),
        ("is_error", "u1"),
        ("request_index", "i4"),
        ("num_tokens", "i4"),
        ("time_s", "f8"),
        ("score", "f8"),
        ("execution_s", "f8"),
    ]
)
_RECORD = np.dtype(
    [
        ("digest", "u4"),
        ("is_leader", "u1"),
        ("wants_to_stop", "u1"),
        ("next_num_steps", "i4"),
        ("num_new_tokens", "i8"),
        ("num_steps", "i4"),
        ("num_preemptions", "i8"),
        ("kv_cache_usage", "f8"),
        ("time_s", "f8"),
        ("num_slots", "i4"),
        ("slots", _SLOT, (NUM_SLOTS,)),
    ]
)


@dataclass(frozen=True)
class QuantumReport:
    """What a rank says of the quantum it has just run. `next_num_steps` is k for the ranks of its TP group;
    `wants_to_stop` drops the round everywhere.
    """

    digest: int
    is_leader: bool
    next_num_steps: int
    progress: EngineProgress
    wants_to_stop: bool = False


@dataclass(frozen=True)
class ExchangedQuantum:
    """One completed exchange: the events of all ranks in order, each rank's wish for the length of a quantum, and whether
    any rank wants to stop.
    """

    events: list[Event]
    next_num_steps: list[int]
    is_stopped: bool = False


class EventExchange:
    """Two alternating buffers over a communicator of rollout ranks."""

    def __init__(self, comm: MPI.Comm, *, timeout_s: float) -> None:
        self._comm = comm.Dup()
        self._timeout_s = timeout_s
        self._send = [np.zeros(1, _RECORD) for _ in range(2)]
        self._receive = [np.zeros(comm.size, _RECORD) for _ in range(2)]
        self._outstanding: deque[tuple[int, MPI.Request]] = deque()
        self._waiting: deque[SlotEvent] = deque()
        self._num_posted = 0

    @property
    def num_outstanding(self) -> int:
        """Exchanges posted and not completed yet (at most two)."""
        return len(self._outstanding)

    def discard_unsent(self) -> None:
        """Drop events that found no slot before the round ended: nobody has seen them, and nobody will."""
        self._waiting.clear()

    def add(self, event: SlotEvent) -> None:
        """Queue an event of this rank for the next record."""
        self._waiting.append(event)

    def post(self, report: QuantumReport) -> None:
        """Start the exchange of this quantum with as many queued events as there are slots."""
        if len(self._outstanding) == 2:
            raise RuntimeError("an exchange buffer is still in flight: complete() must follow every post()")
        buffer = self._num_posted % 2
        self._num_posted += 1
        record = self._send[buffer][0]
        events = [self._waiting.popleft() for _ in range(min(NUM_SLOTS, len(self._waiting)))]
        _fill_record(record, report, events)
        request = self._comm.Iallgather(
            [self._send[buffer].view(np.uint8), MPI.BYTE], [self._receive[buffer].view(np.uint8), MPI.BYTE]
        )
        self._outstanding.append((buffer, request))

    def progress(self) -> None:
        """Let MPI move the outstanding exchanges on; decides nothing."""
        for _, request in self._outstanding:
            request.Test()

    def is_ready(self) -> bool:
        """Whether the oldest outstanding exchange could be completed without waiting."""
        return bool(self._outstanding) and bool(self._outstanding[0][1].Test())

    def complete(self) -> ExchangedQuantum:
        """Finish the oldest outstanding exchange and return its events in their common order."""
        buffer, request = self._outstanding[0]
        wait_for(request.Test, timeout_s=self._timeout_s, what="the event exchange")
        self._outstanding.popleft()
        records = self._receive[buffer]
        _check_digests(records["digest"])
        events: list[tuple[float, int, int, Event]] = []
        for rank, record in enumerate(records):
            events.extend((e.time_s, rank, i, e) for i, e in enumerate(_read_record(record, rank)))
        events.sort(key=lambda item: item[:3])
        is_stopped = bool(records["wants_to_stop"].any())
        return ExchangedQuantum([item[3] for item in events], records["next_num_steps"].tolist(), is_stopped)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


def _fill_record(record: Any, report: QuantumReport, events: list[SlotEvent]) -> None:
    progress = report.progress
    record["digest"], record["is_leader"] = report.digest, report.is_leader
    record["next_num_steps"], record["wants_to_stop"] = report.next_num_steps, report.wants_to_stop
    record["num_new_tokens"], record["num_preemptions"] = progress.num_new_tokens, progress.num_preemptions
    record["kv_cache_usage"], record["num_steps"] = progress.kv_cache_usage, progress.num_steps
    record["time_s"] = progress.time_s
    record["num_slots"] = len(events)
    for slot, event in zip(record["slots"], events, strict=False):
        slot["request_index"], slot["time_s"] = event.request_index, event.time_s
        if isinstance(event, RequestFinished):
            slot["kind"], slot["num_tokens"] = _FINISHED, event.num_tokens
            slot["finish_reason"] = _FINISH_REASONS.index(event.finish_reason)
        elif isinstance(event, RequestStarted):
            slot["kind"] = _STARTED
        else:
            slot["kind"], slot["score"] = _REWARD, event.score
            slot["is_error"], slot["execution_s"] = event.is_error, event.execution_s


def _read_record(record: Any, rank: int) -> list[Event]:
    events: list[Event] = []
    for slot in record["slots"][: record["num_slots"]]:
        index, time_s = int(slot["request_index"]), float(slot["time_s"])
        if slot["kind"] == _FINISHED:
            reason = _FINISH_REASONS[slot["finish_reason"]]
            events.append(RequestFinished(time_s, rank, index, int(slot["num_tokens"]), reason))
        elif slot["kind"] == _STARTED:
            events.append(RequestStarted(time_s, rank, index))
        else:
            score, is_error = float(slot["score"]), bool(slot["is_error"])
            events.append(RewardDone(time_s, rank, index, score, is_error, float(slot["execution_s"])))
    if record["is_leader"]:
        events.append(
            EngineProgress(
                float(record["time_s"]),
                rank,
                int(record["num_new_tokens"]),
                int(record["num_preemptions"]),
                float(record["kv_cache_usage"]),
                int(record["num_steps"]),
            )
        )
    return events


def _check_digests(digests: np.ndarray) -> None:
    if (digests == digests[0]).all():
        return
    values, counts = np.unique(digests, return_counts=True)
    majority = values[counts.argmax()]
    strays = np.flatnonzero(digests != majority).tolist()
    raise RuntimeError(
        f"the controllers of ranks {strays} differ from the others (digests {digests.tolist()}): they saw different "
        "events or run different code or data. Check that all nodes have the same files and the same version."
    )
