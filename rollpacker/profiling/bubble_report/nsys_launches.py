"""What the host's CUDA calls tell about an export: which launches left no operation, when a queue was drained, why a gap.

Calls and operations belong together by (process, correlationId): the id alone repeats between processes. Ids grow with
the time of the call, so everything with at most the id of the last call before a time was launched before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.profiling.bubble_report.causes import judge
from rollpacker.profiling.bubble_report.model import Cause
from rollpacker.profiling.bubble_report.nsys_file import (
    GRAPH_TRACE,
    KERNEL,
    MEMCPY,
    MEMSET,
    PROCESS_MASK,
    RUNTIME,
    NsysFile,
)

_OPERATIONS = (KERNEL, GRAPH_TRACE, MEMCPY, MEMSET)
_PROBES = 2_048
_WINDOW = 256
_PROBES_PER_RUN = 32
_LOOK_BACK = 4_096
_MAX_CALLS = 20_000
_MAX_DRAINED = 4_000  # a time costs about 1.5 ms in a file of 3 million kernels


@dataclass(frozen=True)
class _Run:
    """Positions [low, high) whose rows are in order of start."""

    low: int
    high: int


class RowsByStart:
    """Rows of a table by their start, without reading it all.

    Exports are written in order of start, calls in a few such runs (per process and kind of call). The runs are found
    by probing up to 2,048 rows; a table in another order is read whole and sorted. A position is a row id, or then an
    index.
    """

    def __init__(self, file: NsysFile, table: str, columns: str) -> None:
        self._file = file
        self._select = f"SELECT {columns} FROM {table}"
        self._table = table
        self._sorted: list[tuple[Any, ...]] | None = None
        bounds = file.one(f"SELECT (SELECT min(rowid) FROM {table}), (SELECT max(rowid) FROM {table})")
        runs = [] if bounds[0] is None else self._find_runs(bounds[0], bounds[1] + 1)
        if runs is None:
            self._sorted = sorted(file.rows(f"{self._select} WHERE start IS NOT NULL"))
            runs = [_Run(0, len(self._sorted))]
        self.runs = runs

    def position(self, run: _Run, time: int) -> int:
        """The position of the first row of a run that starts at or after `time`."""
        if self._sorted is not None:
            return int(bisect_left(self._sorted, (time,)))
        low, high = run.low, run.high
        while low < high:
            middle = (low + high) // 2
            start = self._start_at(middle)
            if start is not None and start < time:
                low = middle + 1
            else:
                high = middle
        return low

    def slice(self, run: _Run, low: int, high: int) -> list[Any]:
        """The rows of a run at positions [low, high)."""
        low, high = max(low, run.low), min(high, run.high)
        if self._sorted is not None:
            return self._sorted[low:high]
        return list(self._file.rows(f"{self._select} WHERE rowid >= ? AND rowid < ?", (low, high)))

    def between(self, start: int, end: int, *, before: int, after: int, at_most: int = 1 << 62) -> list[Any]:
        """In each run the rows that start in [start, end), and so many before and after them."""
        rows: list[Any] = []
        for run in self.runs:
            low = self.position(run, start) - before
            high = (self.position(run, end) if end > start else low + before) + after
            rows += self.slice(run, low, min(high, low + at_most))
        return rows

    def _start_at(self, rowid: int) -> int | None:
        row = self._file.one(f"SELECT start FROM {self._table} WHERE rowid >= ? ORDER BY rowid LIMIT 1", (rowid,))
        return None if row is None else row[0]

    def _find_runs(self, low: int, high: int) -> list[_Run] | None:
        """The runs of the table, or None when there are too many (or a start is missing)."""
        step = max((high - low) // _PROBES, 1)
        runs: list[_Run] = []
        last, last_start, run_low = low, self._start_at(low), low
        for rowid in range(low, high, step):
            start = self._start_at(rowid)
            if start is None or last_start is None or len(runs) >= _PROBES // _PROBES_PER_RUN:
                return None
            if start < last_start:
                edge = self._edge(last, rowid, last_start)
                runs.append(_Run(run_low, edge))
                run_low = edge
            last, last_start = rowid, start
        return [*runs, _Run(run_low, high)]

    def _edge(self, low: int, high: int, start_at_low: int) -> int:
        """Between two probes: the first row of the run that `high` is in."""
        while high - low > 1:
            middle = (low + high) // 2
            start = self._start_at(middle)
            if start is not None and start < start_at_low:
                high = middle
            else:
                low = middle
        return high


class Launches:
    """The calls of an export and the operations that they launched. Needs the table of calls."""

    def __init__(self, file: NsysFile) -> None:
        self._file = file
        self._calls: RowsByStart | None = None
        self._operations: list[RowsByStart] | None = None
        self._names: dict[int, str] | None = None

    @property
    def calls(self) -> RowsByStart:
        """(start, end, correlationId, globalPid, nameId) of the calls."""
        if self._calls is None:
            columns = f"start, end, correlationId, globalTid & {PROCESS_MASK}, nameId"
            self._calls = RowsByStart(self._file, RUNTIME, columns)
        return self._calls

    @property
    def operations(self) -> list[RowsByStart]:
        """(start, end, correlationId, globalPid) of the operations, table by table."""
        if self._operations is None:
            tables = [table for table in _OPERATIONS if self._file.has(table, "correlationId")]
            columns = "start, end, correlationId, globalPid"
            self._operations = [RowsByStart(self._file, table, columns) for table in tables]
        return self._operations

    def drained_at(self, process: int, times: Sequence[int]) -> list[int]:
        """When everything that `process` launched before each of the first times had run; never before the time itself."""
        return [self._drained_at(process, time) for time in times[:_MAX_DRAINED]]

    def explain(self, process: int, start: int, end: int) -> Cause:
        """The cause of a gap of the process's GPU."""
        around = self.calls.between(start, end, before=_LOOK_BACK, after=64, at_most=_LOOK_BACK + _MAX_CALLS)
        rows = [row for row in around if row[3] == process and row[0] < end]
        calls = [(row[0], row[1], self._name(row[4])) for row in rows if row[1] is not None and row[1] > start]
        ids = {op[2] for op in self._operations_at(process, end)}
        launch = next((row[0] for row in rows if row[2] in ids), None)
        if launch is None and ids and rows and min(ids) < min(row[2] or 0 for row in rows):
            launch = start - 1  # launched before everything we looked at
        return judge(start, end, calls, launch)

    def _drained_at(self, process: int, time: int) -> int:
        last_id = self._last_id_before(process, time)
        if last_id is None:
            return time
        return max([time, *(end for rows in self.operations for end in _ends_of(rows, process, time, last_id))])

    def _last_id_before(self, process: int, time: int) -> int | None:
        """The correlationId of the process's last call before a time."""
        window = _WINDOW
        while window <= 64 * _WINDOW:
            rows = self.calls.between(time, time, before=window, after=0)
            found = [row[2] for row in rows if row[3] == process and row[0] < time and row[2] is not None]
            if found:
                return int(max(found))
            window *= 8
        return None

    def _operations_at(self, process: int, start: int) -> Iterator[Any]:
        for rows in self.operations:
            near = rows.between(start, start, before=0, after=64)
            yield from (r for r in near if r[0] == start and r[3] == process and r[2] is not None)

    def _name(self, name_id: int) -> str:
        if self._names is None:
            sql = f"SELECT id, value FROM StringIds WHERE id IN (SELECT DISTINCT nameId FROM {RUNTIME})"
            self._names = {r[0]: str(r[1]) for r in self._file.rows(sql)} if self._file.has("StringIds") else {}
        return self._names.get(name_id, "a CUDA call")


def _ends_of(rows: RowsByStart, process: int, time: int, last_id: int) -> Iterator[int]:
    """Ends of the operations with an id up to `last_id` that run at `time` or later, as far as the queue reaches."""

    def ends(chunk: list[Any]) -> list[int]:
        return [r[1] for r in chunk if r[3] == process and r[1] is not None and r[2] is not None and r[2] <= last_id]

    for run in rows.runs:
        position = rows.position(run, time)
        yield from (end for end in ends(rows.slice(run, position - 4 * _WINDOW, position)) if end > time)
        while position < run.high:
            found = ends(rows.slice(run, position, position + _WINDOW))
            if not found:
                break
            yield from found
            position += _WINDOW
