"""Is the export complete? What would make its idle time a lie: lost events, graph launches that left no rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollpacker.profiling.bubble_report.nsys_file import (
    GRAPH_TRACE,
    KERNEL,
    MEMCPY,
    MEMSET,
    PROCESS_MASK,
    RUNTIME,
    NsysFile,
)

_SAMPLE = 5_000
_LAUNCH = ("culaunch%", "cudalaunch%")
_NOT_A_KERNEL = ("%launchhostfunc%",)
_GRAPH_LAUNCH = ("cudagraphlaunch%", "cugraphlaunch%")
_CAPTURE_BEGIN = ("cudastreambegincapture%", "custreambegincapture%")
_CAPTURE_END = ("cudastreamendcapture%", "custreamendcapture%")
_MAX_LOST_SHARE = 0.01
_MAX_LOST_GRAPHS = 0.05
MIN_COVERAGE = 0.8
"""Below this share of operations with a known launch, stages by launch are guesses."""

_LOSS = re.compile(
    r"might (not )?(have been|be) (collected|missing)|dropp|lost|overflow|incomplete|truncat|not all", re.I
)
_OF_GPU = re.compile(r"cuda|cupti|nvtx|gpu", re.I)
_OF_OTHERS = re.compile(
    r"opengl|os runtime|vulkan|ip samples|sampling|scheduling|debuginfod|etw|directx|openacc|mpi|ucx", re.I
)
_WARNING, _ERROR = 2, 3


def diagnostics(file: NsysFile, *, has_ranges: bool) -> tuple[list[str], list[str]]:
    """(reasons not to trust the numbers, notes) from what the profiler itself reported.

    Lost NVTX events only matter where stages come from NVTX. Losses of other kinds of events (OpenGL, samples) do not.
    """
    if not file.has("DIAGNOSTIC_EVENT", "severity", "text"):
        return [], []
    distrust, notes = [], []
    for severity, raw in file.rows("SELECT DISTINCT severity, text FROM DIAGNOSTIC_EVENT"):
        text = " ".join(str(raw).split())
        is_loss = bool(_LOSS.search(text)) and (bool(_OF_GPU.search(text)) or not _OF_OTHERS.search(text))
        if not has_ranges and "nvtx" in text.lower() and not re.search(r"cuda|cupti", text, re.I):
            is_loss = False
        if (severity is not None and severity >= _ERROR) or (is_loss and (severity or 0) >= 1):
            distrust.append(f"the profiler warned: {text}")
        elif severity == _WARNING and not _OF_OTHERS.search(text):
            notes.append(f"the profiler warned: {text}")
    return distrust, notes


def launch_checks(file: NsysFile) -> tuple[list[str], list[str], float | None]:
    """(reasons not to trust, notes, share of operations whose launch is in the file or None without any)."""
    if not file.has(RUNTIME, "correlationId", "globalTid", "nameId", "start"):
        return [], ["no CUDA calls in the file: stages by time alone, gaps without a cause, lost events not seen"], None
    distrust = [*_lost_graphs(file), *_lost_kernels(file)]
    coverage = _coverage(file)
    if coverage is not None and coverage < MIN_COVERAGE:
        distrust.append(low_coverage(coverage))
    return distrust, [], coverage


def low_coverage(coverage: float) -> str:
    """The reason not to trust stages when few operations have their launch in the file."""
    return (
        f"only {coverage:.0%} of the GPU operations have their launch in the file (at least {MIN_COVERAGE:.0%} needed): "
        "which stage launched the others is a guess"
    )


def _lost_graphs(file: NsysFile) -> list[str]:
    launched = _launches(file, _GRAPH_LAUNCH)
    if not launched:
        return []
    found = _with_operation(file, launched, (GRAPH_TRACE, KERNEL, MEMCPY, MEMSET))
    lost = len(launched - found)
    if lost == len(launched) or (lost > 2 and lost > _MAX_LOST_GRAPHS * len(launched)):
        return [
            f"incomplete trace: {lost / len(launched):.0%} of the CUDA graph launches left no GPU rows, so busy time looks "
            "idle; capture again with --cuda-graph-trace=node (or a newer nsys for graph rows)"
        ]
    return []


def _lost_kernels(file: NsysFile) -> list[str]:
    if not file.has(KERNEL):
        launched = _launches(file, _LAUNCH)
        if launched:
            return ["dropped events: kernels were launched, but the file has no table of kernels"]
        return []
    if not file.has(KERNEL, "correlationId"):
        return []
    launched = _launches(file, _LAUNCH)
    sql = f"SELECT min(correlationId), max(correlationId) FROM {KERNEL} WHERE globalPid = ?"
    bounds = {process: file.one(sql, (process,)) for process in {process for process, _ in launched}}
    # Before the first and after the last recorded operation a launch may belong to one outside the capture.
    launched = {(p, i) for p, i in launched if bounds[p][0] is not None and bounds[p][0] <= i <= bounds[p][1]}
    if not launched:
        return []
    lost = len(launched - _with_operation(file, launched, (KERNEL, GRAPH_TRACE)))
    if lost > 2 and lost > _MAX_LOST_SHARE * len(launched):
        return [f"dropped events: {lost / len(launched):.1%} of the kernel launches left no kernel in the file"]
    return []


def _launches(file: NsysFile, names: Sequence[str]) -> set[tuple[int, int]]:
    """(globalPid, correlationId) of a sample of the launches that succeeded, those into a stream capture left out."""
    ids = sorted(set(file.string_ids(names)) - set(file.string_ids(_NOT_A_KERNEL)))
    if not ids:
        return set()
    where = f"nameId IN ({','.join(map(str, ids))})"
    if file.has(RUNTIME, "returnValue"):
        where += " AND (returnValue = 0 OR returnValue IS NULL)"
    total = file.one(f"SELECT count(*) FROM {RUNTIME} WHERE {where}")[0]
    step = max(total // _SAMPLE, 1)
    if step > 1:
        where += f" AND rowid % {step} = 0"
    captures = _captures(file)
    return {
        (thread & PROCESS_MASK, correlation)
        for start, thread, correlation in file.rows(
            f"SELECT start, globalTid, correlationId FROM {RUNTIME} WHERE {where}"
        )
        if thread is not None
        and correlation is not None
        and not any(low <= start <= high for low, high in captures.get(thread, ()))
    }


def _captures(file: NsysFile) -> dict[int, list[tuple[int, int]]]:
    """When each thread recorded a CUDA graph: what it launched then runs later, as part of the graph."""
    begin, end = set(file.string_ids(_CAPTURE_BEGIN)), set(file.string_ids(_CAPTURE_END))
    if not begin or not end:
        return {}
    sql = (
        f"SELECT start, globalTid, nameId FROM {RUNTIME} WHERE nameId IN ({','.join(map(str, begin | end))}) "
        "AND globalTid IS NOT NULL ORDER BY start"
    )
    captures: dict[int, list[tuple[int, int]]] = {}
    open_since: dict[int, int] = {}
    for start, thread, name in file.rows(sql):
        if name in begin:
            open_since[thread] = start
        elif thread in open_since:
            captures.setdefault(thread, []).append((open_since.pop(thread), start))
    return captures


def _with_operation(file: NsysFile, launched: set[tuple[int, int]], tables: Sequence[str]) -> set[tuple[int, int]]:
    wanted = ",".join(str(correlation) for _, correlation in launched)
    found: set[tuple[int, int]] = set()
    for table in tables:
        if file.has(table, "correlationId"):
            # A graph without timestamps (start = end = 0) has a row, but is as good as lost.
            sql = f"SELECT globalPid, correlationId FROM {table} WHERE end > start AND correlationId IN ({wanted})"
            found.update((row[0], row[1]) for row in file.rows(sql))
    return found


def _coverage(file: NsysFile) -> float | None:
    """Share of kernels and copies whose call is in the file, by a sample."""
    operations: set[tuple[int, int]] = set()
    for table in (KERNEL, GRAPH_TRACE, MEMCPY, MEMSET):
        if not file.has(table, "correlationId"):
            continue
        total = file.one(f"SELECT max(rowid) FROM {table}")[0] or 0
        where = f" AND rowid % {total // _SAMPLE} = 0" if total >= 2 * _SAMPLE else ""
        sql = f"SELECT globalPid, correlationId FROM {table} WHERE correlationId IS NOT NULL{where}"
        operations.update((row[0], row[1]) for row in file.rows(sql))
    if not operations:
        return None
    wanted = ",".join(str(correlation) for _, correlation in operations)
    sql = f"SELECT globalTid, correlationId FROM {RUNTIME} WHERE correlationId IN ({wanted}) AND globalTid IS NOT NULL"
    launched = {(row[0] & PROCESS_MASK, row[1]) for row in file.rows(sql)}
    return len(operations & launched) / len(operations)
