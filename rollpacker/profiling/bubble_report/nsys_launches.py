"""What the host's CUDA calls tell about an export: which launches left no operation, when a queue was drained, why a gap.

Calls and operations belong together by (process, correlationId): the id alone repeats between processes. Ids grow with
the time of the call, so everything with at most the id of the last call before a time was launched before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from rollpacker.profiling.bubble_report.causes import judge
from rollpacker.profiling.bubble_report.model import MILLISECOND, Cause
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
_LOCAL_DISORDER_NS = 10 * MILLISECOND
_LOOK_BACK = 4_096
_MAX_CALLS = 20_000


class RowsByStart:
    """Rows of a table in order of `start`, without reading it all: exports are written in that order.

    A position is a row id where the table is in order (probed at up to 2,048 places), else an index into the sorted rows.
    """

    def __init__(self, file: NsysFile, table: str, columns: str) -> None:
        self._file = file
        self._select = f"SELECT {columns} FROM {table}"
        self._table = table
        bounds = file.one(f"SELECT (SELECT min(rowid) FROM {table}), (SELECT max(rowid) FROM {table})")
        self._low: int = 0 if bounds[0] is None else bounds[0]
        self._high: int = 0 if bounds[0] is None else bounds[1] + 1
        self._sorted: list[tuple[Any, ...]] | None = None
        if not self._is_in_order():
            self._sorted = sorted(file.rows(f"{self._select} WHERE start IS NOT NULL"))
            self._low, self._high = 0, len(self._sorted)

    def position(self, time: int) -> int:
        """The position of the first row that starts at or after `time`."""
        if self._sorted is not None:
            return int(bisect_left(self._sorted, (time,)))
        low, high = self._low, self._high
        while low < high:
            middle = (low + high) // 2
            row = self._row_at(middle)
            if row is not None and row[0] < time:
                low = middle + 1
            else:
                high = middle
        return low

    def between(self, low: int, high: int) -> list[Any]:
        """The rows at positions [low, high)."""
        if self._sorted is not None:
            return self._sorted[max(low, 0) : max(high, 0)]
        return list(self._file.rows(f"{self._select} WHERE rowid >= ? AND rowid < ?", (low, high)))

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self._high

    def _row_at(self, rowid: int) -> Any:
        return self._file.one(f"SELECT start FROM {self._table} WHERE rowid >= ? ORDER BY rowid LIMIT 1", (rowid,))

    def _is_in_order(self) -> bool:
        step = max((self._high - self._low) // _PROBES, 1)
        allowed = _LOCAL_DISORDER_NS if step > 1 else 0  # a few calls of a large table are a few rows out of place
        last: int | None = None
        for rowid in range(self._low, self._high, step):
            row = self._row_at(rowid)
            if row is None or row[0] is None or (last is not None and row[0] < last - allowed):
                return False
            last = row[0]
        return True


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
            tables = [table for table in _OPERATIONS if self._file.has(table)]
            columns = "start, end, correlationId, globalPid"
            self._operations = [RowsByStart(self._file, table, columns) for table in tables]
        return self._operations

    def drained_at(self, process: int, times: Sequence[int]) -> list[int]:
        """When everything that `process` launched before each time had run; never before the time itself."""
        return [self._drained_at(process, time) for time in times]

    def explain(self, gaps: Sequence[tuple[int, int, int]]) -> list[Cause]:
        """The cause of each gap (process, start, end)."""
        return [self._explain(*gap) for gap in gaps]

    def _drained_at(self, process: int, time: int) -> int:
        last_id = self._last_id_before(process, time)
        if last_id is None:
            return time
        return max([time, *(end for rows in self.operations for end in _ends_of(rows, process, time, last_id))])

    def _last_id_before(self, process: int, time: int) -> int | None:
        """The correlationId of the process's last call before a time; a few rows may be out of order."""
        position = self.calls.position(time)
        window = _WINDOW
        while True:
            rows = self.calls.between(position - window, position + 64)
            found = [row[2] for row in rows if row[3] == process and row[0] < time and row[2] is not None]
            if found:
                return int(max(found))
            if window >= 64 * _WINDOW or position - window <= 0:
                return None
            window *= 4

    def _explain(self, process: int, start: int, end: int) -> Cause:
        low = self.calls.position(start) - _LOOK_BACK
        high = min(self.calls.position(end) + 64, low + _LOOK_BACK + _MAX_CALLS)
        rows = [row for row in self.calls.between(low, high) if row[3] == process and row[0] < end]
        calls = [(row[0], row[1], self._name(row[4])) for row in rows if row[1] is not None and row[1] > start]
        ids = {op[2] for op in self._operations_at(process, end)}
        launch = next((row[0] for row in rows if row[2] in ids), None)
        if launch is None and ids and rows and min(ids) < min(row[2] or 0 for row in rows):
            launch = start - 1  # launched before everything we looked at
        return judge(start, end, calls, launch)

    def _operations_at(self, process: int, start: int) -> Iterator[Any]:
        for rows in self.operations:
            position = rows.position(start)
            yield from (r for r in rows.between(position, position + 64) if r[0] == start and r[3] == process)

    def _name(self, name_id: int) -> str:
        if self._names is None:
            sql = f"SELECT id, value FROM StringIds WHERE id IN (SELECT DISTINCT nameId FROM {RUNTIME})"
            self._names = {r[0]: str(r[1]) for r in self._file.rows(sql)} if self._file.has("StringIds") else {}
        return self._names.get(name_id, "a CUDA call")


def _ends_of(rows: RowsByStart, process: int, time: int, last_id: int) -> Iterator[int]:
    """Ends of the operations with an id up to `last_id` that run at `time` or later, as far as the queue reaches."""
    position = rows.position(time)
    yield from (
        row[1]
        for row in rows.between(position - 4 * _WINDOW, position)
        if row[3] == process and row[1] is not None and row[1] > time and row[2] is not None and row[2] <= last_id
    )
    while position < rows.end:
        chunk = rows.between(position, position + _WINDOW)
        ends = [r[1] for r in chunk if r[3] == process and r[1] is not None and r[2] is not None and r[2] <= last_id]
        if not ends:
            return
        yield from ends
        position += _WINDOW
