"""What every rank did when, as a Chrome trace: the file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank, one thread per lane. Requests overlap, and a viewer draws overlapping bars of one thread as if
they were nested, so they are packed onto lanes "requests 0..k" of which each holds one request at a time.

Invariants: the file is a valid JSON document after every call; two requests on one lane never overlap; memory grows
with the number of lanes, not with the number of spans. (format: Chrome's "Trace Event Format", JSON object layout)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

REQUEST_LANE = "request"

_HEAD = b'{"traceEvents": ['
_TAIL = b'\n], "displayTimeUnit": "ms"}\n'
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # json.dumps would build one for each event
# A lane's index within its rank is its place from the top. The first lanes are fixed, lanes that are not known here
# follow in the order in which they appear, and the requests come last because nobody knows how many there will be.
_FIXED_LANES = {"stage": 1, "engine": 2, "reward": 3}
_FIRST_REQUEST_LANE = 1_000
# Perfetto knows a thread by its tid, whatever its process, and takes a tid that equals a pid for the process's main
# thread; so tids are unique over the ranks and above every rank.
_TIDS_PER_RANK = 10_000


@dataclass(frozen=True)
class Span:
    """One bar of the trace: what `rank` did on `lane` from `start_s` to `end_s`, in seconds from the run's start.

    `lane` is "stage", "engine", "reward", any other name for a lane of its own, or "request", whose spans may overlap.
    `args` is what the viewer shows for a selected bar.
    """

    name: str
    rank: int
    lane: str
    start_s: float
    end_s: float
    args: dict[str, Any] | None = None


class LanePacker:
    """Gives intervals of one rank to lanes, first fit: the lowest lane that is free when the interval starts.

    Only the end of the last interval of each lane is kept. An interval that comes late (it starts before the end of
    what its lanes hold) opens a new lane rather than overlap.
    """

    def __init__(self) -> None:
        self._free_from_us: list[int] = []

    def place(self, start_us: int, end_us: int) -> int:
        """The lane of the interval [start_us, end_us), which is occupied from now on."""
        for lane, free_from_us in enumerate(self._free_from_us):
            if free_from_us <= start_us:
                self._free_from_us[lane] = end_us
                return lane
        self._free_from_us.append(end_us)
        return len(self._free_from_us) - 1


class TraceWriter:
    """Appends spans and counters to a Chrome trace; times in the file are whole microseconds from the run's start.

    Each call is one write, over the closing brackets of the last call and with new ones at its end. So a run that is
    killed leaves a file that opens, unless the kill hits the write itself (well below a millisecond a step).
    `resume_at` goes on with a file as it was when it had that size. Raises OSError where the file cannot be written.
    """

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        self.path = path
        is_resumed = resume_at is not None and path.exists()
        # Unbuffered: a buffer would decide for us when half an event reaches the disk.
        self._file = path.open("r+b" if is_resumed else "wb", buffering=0)
        self._separator = b"\n"
        self._tids: dict[tuple[int, str], int] = {}
        self._num_other_lanes: dict[int, int] = {}
        self._packers: dict[int, LanePacker] = {}
        self._ranks: set[int] = set()
        if is_resumed and resume_at is not None:
            self._go_back_to(resume_at)
        else:
            self._write_all(_HEAD + _TAIL)

    def _go_back_to(self, size: int) -> None:
        """The closing brackets stood at the end then; later events have overwritten them."""
        self._file.truncate(max(size - len(_TAIL), len(_HEAD)))
        self._file.seek(0, 2)
        self._separator = b",\n" if self._file.tell() > len(_HEAD) else b"\n"
        self._write_all(_TAIL)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def add(self, spans: Iterable[Span]) -> None:
        """Append spans, in any order; those of later steps belong in later calls, or request lanes multiply.

        Raises ValueError for a span that ends before it starts or whose times are not finite.
        """
        timed = [(_to_us(span.start_s, span), _to_us(span.end_s, span), span) for span in spans]
        for start_us, end_us, span in timed:
            if end_us < start_us:
                raise ValueError(f"span ends before it starts: {span}")
        # First fit needs the order of starts. Of two bars with one start the viewer wants the outer one first.
        timed.sort(key=lambda item: (item[0], -item[1]))
        events: list[dict[str, Any]] = []
        for start_us, end_us, span in timed:
            if span.lane == REQUEST_LANE:
                place = self._packers.setdefault(span.rank, LanePacker()).place(start_us, end_us)
                tid = self._tid(span.rank, f"requests {place}", _FIRST_REQUEST_LANE + place, events)
            else:
                tid = self._tid(span.rank, span.lane, None, events)
            event = {"ph": "X", "pid": span.rank, "tid": tid, "name": span.name, "cat": span.lane}
            event |= {"ts": start_us, "dur": end_us - start_us}
            if span.args:
                event["args"] = _finite_args(span.args)
            events.append(event)
        self._append(events)

    def add_counter(self, rank: int, name: str, time_s: float, value: float) -> None:
        """Append one point of a curve of `rank`, such as tokens per second; the value holds until the next point.

        Raises ValueError when the time or the value is not finite.
        """
        if not (math.isfinite(time_s) and math.isfinite(value)):
            raise ValueError(f"counter {name!r} of rank {rank}: value {value} at {time_s} s must both be finite.")
        events: list[dict[str, Any]] = []
        self._name_rank(rank, events)
        events.append({"ph": "C", "pid": rank, "name": name, "ts": round(time_s * 1e6), "args": {"value": value}})
        self._append(events)

    def close(self) -> None:
        """Close the file, which is complete already; closing twice is allowed."""
        self._file.close()

    def _tid(self, rank: int, lane: str, index: int | None, events: list[dict[str, Any]]) -> int:
        """The thread id of a lane; the first time it is named, in `events`."""
        known = self._tids.get((rank, lane))
        if known is not None:
            return known
        self._name_rank(rank, events)
        if index is None:
            index = _FIXED_LANES.get(lane)
        if index is None:
            others = self._num_other_lanes.get(rank, 0) + 1
            self._num_other_lanes[rank] = others
            index = len(_FIXED_LANES) + others
        tid = (rank + 1) * _TIDS_PER_RANK + index
        self._tids[rank, lane] = tid
        events.append(_metadata("thread_name", rank, {"name": lane}, tid))
        events.append(_metadata("thread_sort_index", rank, {"sort_index": index}, tid))
        return tid

    def _name_rank(self, rank: int, events: list[dict[str, Any]]) -> None:
        if rank not in self._ranks:
            self._ranks.add(rank)
            events.append(_metadata("process_name", rank, {"name": f"rank {rank}"}))
            events.append(_metadata("process_sort_index", rank, {"sort_index": rank}))

    def _append(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        text = ",\n".join([_ENCODER.encode(event) for event in events])
        self._file.seek(-len(_TAIL), 2)
        self._write_all(self._separator + text.encode() + _TAIL)
        self._separator = b",\n"

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]  # an unbuffered write may stop short


def _metadata(name: str, rank: int, args: dict[str, Any], tid: int | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "pid": rank, "name": name, "args": args}
    if tid is not None:
        event["tid"] = tid
    return event


def _to_us(seconds: float, span: Span) -> int:
    if not math.isfinite(seconds):
        raise ValueError(f"span with a time that is not finite: {span}")
    return round(seconds * 1e6)


def _finite_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity; the viewer shows them as text instead."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in args.items()}
