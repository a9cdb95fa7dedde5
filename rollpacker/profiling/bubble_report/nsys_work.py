"""From the tables of GPU operations to busy intervals, one row at a time: the part that must be fast.

The rows leave SQLite as two integers, start and a packed (duration, GPU, kind), and are merged as they come: tables are
written in order of start, so most of them extend the interval that is open. Memory grows with the number of gaps.
"""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rollpacker.profiling.bubble_report.intervals import Intervals, merge_with_numpy, numpy_or_none
from rollpacker.profiling.bubble_report.model import COLLECTIVE_WORDS, BadTrace, Work
from rollpacker.profiling.bubble_report.nsys_file import (
    GRAPH_TRACE,
    KERNEL,
    MEMCPY,
    MEMSET,
    NsysFile,
    open_database,
    unreadable,
)

_COMPUTE, _COMM, _COPY = 0, 1, 2
_KIND_BITS, _DEVICE_BITS, _PROCESS_BITS = 2, 8, 10
_SHIFT = _KIND_BITS + _DEVICE_BITS + _PROCESS_BITS
_UNKNOWN_PROCESS = (1 << _PROCESS_BITS) - 1
_NO_DEVICE = (1 << _DEVICE_BITS) - 1
_PEEK = 20_000
_CHUNK = 1 << 18
_ROWS_PER_WORKER = 500_000
_MAX_WORKERS = 8

Segments = dict[int, tuple["array[int]", "array[int]"]]
"""Starts and ends by tag: process index << 10 | device << 2 | kind."""


def read_work(file: NsysFile) -> dict[tuple[int, int], Work]:
    """When each (globalPid, deviceId) was busy: computing, communicating (NCCL kernels), copying."""
    segments: dict[tuple[int, int, int], tuple[array[int], array[int]]] = {}
    for table, kind in ((KERNEL, _COMPUTE), (GRAPH_TRACE, _COMPUTE), (MEMCPY, _COPY), (MEMSET, _COPY)):
        if file.has(table):
            _read_table(file, table, _kernel_kind(file) if table == KERNEL else str(kind), segments)
    work: dict[tuple[int, int], list[Intervals]] = {}
    for (process, device, kind), (starts, ends) in segments.items():
        kinds = work.setdefault((process, device), [Intervals.of(()) for _ in range(3)])
        kinds[kind] = Intervals.from_arrays(starts, ends)
    return {key: Work(*kinds) for key, kinds in work.items()}


def collectives(file: NsysFile) -> tuple[str, list[int]]:
    """The column that names kernels, and the ids in it that may be collectives: none where there is no such column."""
    name = next((column for column in ("shortName", "demangledName") if file.has(KERNEL, column)), "")
    return name, file.string_ids([f"%{word}%" for word in COLLECTIVE_WORDS]) if name else []


def _kernel_kind(file: NsysFile) -> str:
    """SQL for the kind of a kernel, by its name. Ids of similar names lie close, so most rows need one comparison."""
    name, ids = collectives(file)
    if not ids:
        return str(_COMPUTE)
    listed = ",".join(map(str, ids))
    return f"(CASE WHEN {name} BETWEEN {min(ids)} AND {max(ids)} THEN {name} IN ({listed}) ELSE 0 END)"


def _read_table(
    file: NsysFile, table: str, kind_sql: str, segments: dict[tuple[int, int, int], tuple[array[int], array[int]]]
) -> None:
    processes = _processes_at_the_ends(file, table)
    found = _merge_table(file, table, _query(table, kind_sql, processes))
    if any(tag >> (_KIND_BITS + _DEVICE_BITS) == _UNKNOWN_PROCESS for tag in found):
        # A process that shows up in the middle only: look for them all, and read again.
        sql = f"SELECT DISTINCT globalPid FROM {table} WHERE globalPid IS NOT NULL"
        processes = [int(row[0]) for row in file.rows(sql)]
        if len(processes) >= _UNKNOWN_PROCESS:
            raise BadTrace(
                f"{file.path}: {len(processes)} processes with GPU work in one report; at most 1022 are read."
            )
        found = _merge_table(file, table, _query(table, kind_sql, processes))
    for tag, (starts, ends) in found.items():
        process, device = tag >> (_KIND_BITS + _DEVICE_BITS), (tag >> _KIND_BITS) & _NO_DEVICE
        if process == _UNKNOWN_PROCESS or device == _NO_DEVICE:
            continue
        kept = segments.setdefault((processes[process], device, tag & 3), (array("q"), array("q")))
        kept[0].extend(starts)
        kept[1].extend(ends)


def _processes_at_the_ends(file: NsysFile, table: str) -> list[int]:
    sql = (
        f"SELECT DISTINCT globalPid FROM (SELECT globalPid FROM {table} LIMIT {_PEEK}) UNION "
        f"SELECT globalPid FROM {table} WHERE rowid > (SELECT max(rowid) FROM {table}) - {_PEEK}"
    )
    return [int(row[0]) for row in file.rows(sql) if row[0] is not None][: _UNKNOWN_PROCESS - 1]


def _query(table: str, kind_sql: str, processes: list[int]) -> str:
    """Rows of (start, duration << 20 | process << 10 | device << 2 | kind), longer than nothing and shorter than an hour.

    CUPTI writes start = end = 0 for a graph without timestamps, and the largest int as the device of a graph that
    started on the host: neither is work of a GPU. What no Python integer array takes (NULL) never gets here.
    """
    cases = " ".join(
        f"WHEN {process} THEN {index << (_KIND_BITS + _DEVICE_BITS)}" for index, process in enumerate(processes)
    )
    unknown = _UNKNOWN_PROCESS << (_KIND_BITS + _DEVICE_BITS)
    process_sql = f"(CASE globalPid {cases} ELSE {unknown} END)" if processes else str(unknown)
    device_sql = f"((coalesce(deviceId, {_NO_DEVICE}) & {_NO_DEVICE}) << {_KIND_BITS})"
    packed = f"((end - start) << {_SHIFT}) | {process_sql} | {device_sql} | {kind_sql}"
    return f"SELECT start, {packed} FROM {table} WHERE end - start BETWEEN 1 AND {(1 << (62 - _SHIFT)) - 1}"


def _merge_table(file: NsysFile, table: str, sql: str) -> Segments:
    """The merged rows of a table; a large one is read by several processes, each a stretch of its rows."""
    low, high = file.one(f"SELECT (SELECT min(rowid) FROM {table}), (SELECT max(rowid) FROM {table})")
    if low is None:
        return {}
    num_workers = min(_num_cpus(), _MAX_WORKERS, (high - low) // _ROWS_PER_WORKER)
    if num_workers < 2:
        return _merge_rows_of(file.path, file.database, sql)
    bounds = [low + (high + 1 - low) * index // num_workers for index in range(num_workers + 1)]
    # fork: nothing is imported again. Where numpy is loaded by now, its threads are for linear algebra: no worker's need.
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("fork")) as pool:
        parts = list(pool.map(_merge_stretch, [file.path] * num_workers, [sql] * num_workers, bounds, bounds[1:]))
    found: Segments = {}
    for part in parts:
        for tag, (starts, ends) in part.items():
            kept = found.setdefault(tag, (array("q"), array("q")))
            kept[0].extend(starts)
            kept[1].extend(ends)
    return found


def _num_cpus() -> int:
    """The cores that this process may use; 1 where forking is not safe (elsewhere than on Linux)."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _merge_stretch(path: Path, sql: str, low: int, high: int) -> Segments:
    """In a process of its own: the rows [low, high)."""
    with closing(open_database(path)) as database:
        return _merge_rows_of(path, database, f"{sql} AND rowid >= {low} AND rowid < {high}")


def _merge_rows_of(path: Path, database: sqlite3.Connection, sql: str) -> Segments:
    numpy = numpy_or_none()
    try:
        cursor = database.execute(sql)
        return _merge_chunks(cursor, numpy) if numpy is not None else _merge_rows(cursor)
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise unreadable(path, error) from error


def _merge_rows(rows: Iterator[tuple[int, int]]) -> Segments:
    """Merge as long as the rows come in order; what does not is left to `Intervals.from_arrays`."""
    mask = (1 << _SHIFT) - 1
    found: Segments = {}
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


def _merge_chunks(cursor: sqlite3.Cursor, numpy: Any) -> Segments:
    found: Segments = {}
    while True:
        flat = numpy.fromiter(chain.from_iterable(islice(cursor, _CHUNK)), "i8")
        if not len(flat):
            return found
        starts, packed = flat[0::2], flat[1::2]
        tags = packed & ((1 << _SHIFT) - 1)
        ends = starts + (packed >> _SHIFT)
        while len(tags):  # a chunk holds few tags
            is_tag = tags == tags[0]
            merged_starts, merged_ends = merge_with_numpy(numpy, starts[is_tag], ends[is_tag])
            kept = found.setdefault(int(tags[0]), (array("q"), array("q")))
            kept[0].frombytes(merged_starts.tobytes())
            kept[1].frombytes(merged_ends.tobytes())
            starts, ends, tags = (values[~is_tag] for values in (starts, ends, tags))
