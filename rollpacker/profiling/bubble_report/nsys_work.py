"""From the tables of GPU operations to busy intervals, one row at a time: the part that must be fast.

The rows leave SQLite as two integers, start and a packed (duration, GPU, kind), and are merged as they come: tables are
written in order of start, so most of them extend the interval that is open. Memory grows with the number of gaps.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rollpacker.profiling.bubble_report.intervals import Intervals, merge_with_numpy, numpy_or_none
from rollpacker.profiling.bubble_report.model import BadTrace, Work
from rollpacker.profiling.bubble_report.nsys_file import GRAPH_TRACE, KERNEL, MEMCPY, MEMSET, NsysFile, unreadable

COLLECTIVE_NAMES = ("%nccl%", "%rccl%", "%nvshmem%", "%cross_device_reduce%", "%multimem_all%", "%deep_ep%")
"""Kernels that only communicate (LIKE patterns, lower case): NCCL, RCCL, NVSHMEM, vLLM's all-reduce, multimem, DeepEP."""

_COMPUTE, _COMM, _COPY = 0, 1, 2
_KIND_BITS, _DEVICE_BITS, _PROCESS_BITS = 2, 8, 10
_SHIFT = _KIND_BITS + _DEVICE_BITS + _PROCESS_BITS
_UNKNOWN_PROCESS = (1 << _PROCESS_BITS) - 1
_MAX_DEVICE = (1 << _DEVICE_BITS) - 1
_PEEK = 20_000
_CHUNK = 1 << 16


def read_work(file: NsysFile) -> dict[tuple[int, int], Work]:
    """When each (globalPid, deviceId) was busy: computing, communicating (NCCL kernels), copying."""
    segments: dict[tuple[int, int, int], tuple[array[int], array[int]]] = {}
    collectives = file.string_ids(COLLECTIVE_NAMES)
    for table, kind in ((KERNEL, _COMPUTE), (GRAPH_TRACE, _COMPUTE), (MEMCPY, _COPY), (MEMSET, _COPY)):
        if not file.has(table):
            continue
        kind_sql = str(kind)
        if table == KERNEL and collectives:
            name = "shortName" if file.has(table, "shortName") else "demangledName"
            kind_sql = f"({name} IN ({','.join(map(str, collectives))}))" if file.has(table, name) else kind_sql
        _read_table(file, table, kind_sql, segments)
    work: dict[tuple[int, int], list[Intervals]] = {}
    for (process, device, kind), (starts, ends) in segments.items():
        kinds = work.setdefault((process, device), [Intervals.of(()) for _ in range(3)])
        kinds[kind] = Intervals.from_arrays(starts, ends)
    return {key: Work(*kinds) for key, kinds in work.items()}


def _read_table(
    file: NsysFile, table: str, kind_sql: str, segments: dict[tuple[int, int, int], tuple[array[int], array[int]]]
) -> None:
    processes = _processes_at_the_ends(file, table)
    while True:
        found = _merge(file, _query(table, kind_sql, processes))
        if not any(tag >> (_KIND_BITS + _DEVICE_BITS) == _UNKNOWN_PROCESS for tag in found):
            break
        # A process that shows up in the middle only: look for them all, and read again.
        processes = [int(row[0]) for row in file.rows(f"SELECT DISTINCT globalPid FROM {table}")]
        if len(processes) >= _UNKNOWN_PROCESS:
            raise BadTrace(f"{file.path}: {len(processes)} processes with GPU work in one report; at most 1022 are read.")
    for tag, (starts, ends) in found.items():
        process = processes[tag >> (_KIND_BITS + _DEVICE_BITS)]
        device = (tag >> _KIND_BITS) & _MAX_DEVICE
        kept = segments.setdefault((process, device, tag & 3), (array("q"), array("q")))
        kept[0].extend(starts)
        kept[1].extend(ends)


def _processes_at_the_ends(file: NsysFile, table: str) -> list[int]:
    sql = (
        f"SELECT DISTINCT globalPid FROM (SELECT globalPid FROM {table} LIMIT {_PEEK}) UNION "
        f"SELECT globalPid FROM {table} WHERE rowid > (SELECT max(rowid) FROM {table}) - {_PEEK}"
    )
    return [int(row[0]) for row in file.rows(sql) if row[0] is not None][: _UNKNOWN_PROCESS - 1]


def _query(table: str, kind_sql: str, processes: list[int]) -> str:
    """Rows of (start, (end - start) << _SHIFT | process << 10 | device << 2 | kind).

    CUPTI writes start = end = 0 for a graph without timestamps, and the largest int as the device of a graph that
    started on the host: neither is work of a GPU.
    """
    cases = " ".join(f"WHEN {process} THEN {index << (_KIND_BITS + _DEVICE_BITS)}" for index, process in enumerate(processes))
    unknown = _UNKNOWN_PROCESS << (_KIND_BITS + _DEVICE_BITS)
    process_sql = f"(CASE globalPid {cases} ELSE {unknown} END)" if processes else str(unknown)
    packed = f"((end - start) << {_SHIFT}) | {process_sql} | (deviceId << {_KIND_BITS}) | {kind_sql}"
    return (
        f"SELECT start, {packed} FROM {table} WHERE end > start AND globalPid IS NOT NULL "
        f"AND deviceId BETWEEN 0 AND {_MAX_DEVICE} AND end - start < {1 << (63 - _SHIFT)}"
    )


def _merge(file: NsysFile, sql: str) -> dict[int, tuple[array[int], array[int]]]:
    numpy = numpy_or_none()
    try:
        cursor = file.database.execute(sql)
        return _merge_chunks(cursor, numpy) if numpy is not None else _merge_rows(cursor)
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise unreadable(file.path, error) from error


def _merge_rows(rows: Iterator[tuple[int, int]]) -> dict[int, tuple[array[int], array[int]]]:
    """Merge as long as the rows come in order; what does not is left to `Intervals.from_arrays`."""
    mask = (1 << _SHIFT) - 1
    found: dict[int, tuple[array[int], array[int]]] = {}
    open_intervals: dict[int, tuple[int, int]] = {}
    for start, packed in rows:
        tag, end = packed & mask, start + (packed >> _SHIFT)
        if tag not in open_intervals:
            found[tag] = (array("q"), array("q"))
            open_intervals[tag] = start, end
            continue
        open_start, open_end = open_intervals[tag]
        if open_start <= start <= open_end:
            if end > open_end:
                open_intervals[tag] = open_start, end
        else:
            starts, ends = found[tag]
            starts.append(open_start)
            ends.append(open_end)
            open_intervals[tag] = start, end
    for tag, (open_start, open_end) in open_intervals.items():
        found[tag][0].append(open_start)
        found[tag][1].append(open_end)
    return found


def _merge_chunks(cursor: sqlite3.Cursor, numpy: Any) -> dict[int, tuple[array[int], array[int]]]:
    found: dict[int, tuple[array[int], array[int]]] = {}
    while rows := cursor.fetchmany(_CHUNK):
        flat = numpy.fromiter(chain.from_iterable(rows), "i8", 2 * len(rows))
        starts, packed = flat[0::2], flat[1::2]
        tags = packed & ((1 << _SHIFT) - 1)
        ends = starts + (packed >> _SHIFT)
        for tag in numpy.unique(tags).tolist():
            is_tag = tags == tag
            merged_starts, merged_ends = merge_with_numpy(numpy, starts[is_tag], ends[is_tag])
            kept = found.setdefault(tag, (array("q"), array("q")))
            kept[0].frombytes(merged_starts.tobytes())
            kept[1].frombytes(merged_ends.tobytes())
    return found
