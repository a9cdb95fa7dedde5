"""One Nsight Systems export as a `Source`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollpacker.profiling.bubble_report.model import GpuId, Range, Source, Work
from rollpacker.profiling.bubble_report.nsys_file import KERNEL, PROCESS_MASK, RUNTIME, NsysFile
from rollpacker.profiling.bubble_report.nsys_launches import Launches
from rollpacker.profiling.bubble_report.nsys_trust import diagnostics, launch_checks
from rollpacker.profiling.bubble_report.nsys_work import collectives, read_work
from rollpacker.profiling.bubble_report.stage_names import StageName, StageNamer

# Push/pop and start/end ranges: of the NVTX library, and read from nvtxt files.
_RANGE_TYPES = (59, 60, 70, 71)
_MAX_COLLECTIVES = 20_000  # of all processes together


def read_nsys(path: Path, namer: StageNamer, host: str | None) -> Source:
    """The export at `path`; `host` overrides the host name in it. Raises BadTrace."""
    file = NsysFile(path)
    host = file.host if host is None else host
    work, identity_notes = _by_gpu(file, host, read_work(file))
    source = Source(str(path), f"nsys {file.version}", host, work, [])
    source.notes += identity_notes
    _set_clock(source, file)
    source.ranges, num_open = _read_ranges(file, namer, partial(_trace_end, file, source))
    if num_open:
        source.notes.append(f"{num_open} range(s) were still open when the capture stopped: they end there")
    has_stages = any(isinstance(namer.meaning(r.name), StageName) for r in source.ranges)
    distrust, notes = diagnostics(file, has_ranges=has_stages)
    source.distrust += distrust
    source.notes += notes
    distrust, notes, source.launch_coverage = launch_checks(file)
    source.distrust += distrust
    source.notes += notes if work else []
    if not work:
        source.notes.append("no GPU work in it: a controller, or workers whose work was not captured")
    seen = {gpu for _, gpu in work}
    source.not_captured = [gpu for gpu in file.gpus_of_host(host) if gpu not in seen]
    if source.launch_coverage is not None:
        launches = Launches(file)
        source.drain, source.explain = launches.drained_at, launches.explain
    source.collective_ends = partial(_collective_ends, file)
    return source


def _by_gpu(
    file: NsysFile, host: str, found: dict[tuple[int, int], Work]
) -> tuple[dict[tuple[int, GpuId], Work], list[str]]:
    users = Counter(device for _, device in found)
    work: dict[tuple[int, GpuId], Work] = {}
    notes: list[str] = []
    for (process, device), done in sorted(found.items(), key=lambda item: item[0]):
        gpu, note = file.gpu_of(host, process, device, users[device])
        notes += [note] if note else []
        key = (process, gpu)
        work[key] = work[key].merged(done) if key in work else done
    return work, notes


def _set_clock(source: Source, file: NsysFile) -> None:
    """The capture's window and UTC at time 0. From 2026 on the monotonic clock puts reports of one host on one clock."""
    shifted = [
        name
        for name, neutral in (
            ("EXPORT_PARAM_TIME_NORMALIZE", ("false", "0")),
            ("EXPORT_PARAM_TIME_SHIFT", ("0", "false")),
        )
        if file.metadata.get(name, neutral[0]).lower() not in neutral
    ]
    if shifted:
        source.notes.append(
            f"exported with {' and '.join(shifted)} set: its times are shifted; give --offset if they differ"
        )
    duration = file.duration_ns()
    source.captured = (0, duration) if duration else None
    clock = file.wall_clock()
    if clock is None:
        source.has_wall_clock = False
        return
    source.clock_ns, system_ns = clock
    source.clock_group = f"{source.host or source.path}:{'monotonic' if system_ns is not None else 'utc'}"
    source.monotonic_ns = system_ns


def _trace_end(file: NsysFile, source: Source) -> int:
    """The time at which what is still open is cut: the last event of any kind."""
    ends = [hull[1] for work in source.work.values() if (hull := work.hull())]
    for table in ("NVTX_EVENTS", RUNTIME):
        if file.has(table, "start", "end"):
            row = file.one(f"SELECT max(max(coalesce(end, start)), max(start)) FROM {table}")
            ends += [row[0]] if row and isinstance(row[0], int) else []
    if not ends and source.captured:
        ends.append(source.captured[1])
    return max(ends, default=0)


def _read_ranges(file: NsysFile, namer: StageNamer, trace_end: Callable[[], int]) -> tuple[list[Range], int]:
    """The ranges whose names mean a stage or a step, and how many of them never ended.

    A registered string is in StringIds and leaves `text` NULL; another one is in `text`.
    """
    if not file.has("NVTX_EVENTS", "start", "end", "eventType", "globalTid"):
        return [], 0
    text, join = "n.text", ""
    if file.has("NVTX_EVENTS", "textId") and file.has("StringIds", "id", "value"):
        text, join = "coalesce(n.text, s.value)", "LEFT JOIN StringIds s ON s.id = n.textId"
    # torch.autograd.profiler.emit_nvtx marks every operator, millions of them, each with a number of its own behind it.
    tail = ", ".join(f"nullif(instr({text}, ', {word} = '), 0)" for word in ("seq", "op_id"))
    short = f"substr({text}, 1, coalesce({tail}, 999) - 1)"
    operators = "" if namer.has_rules else f"AND {text} NOT GLOB 'aten::*'"
    sql = (
        f"SELECT n.start, n.end, {short}, n.globalTid FROM NVTX_EVENTS n {join} "
        f"WHERE n.eventType IN {_RANGE_TYPES} AND n.start IS NOT NULL AND {text} IS NOT NULL {operators}"
    )
    ranges: list[Range] = []
    open_ranges: list[tuple[str, int, int]] = []
    names: dict[bytes, str | None] = {}  # what the namer knows nothing about is None
    for start, end, raw, thread in file.rows_with_bytes(sql):
        if raw not in names:
            name = raw.decode("utf-8", "replace")
            names[raw] = name if namer.meaning(name) is not None else None
        named = names[raw]
        if named is None:
            continue
        process = (thread or 0) & PROCESS_MASK
        if end is None:
            open_ranges.append((named, process, start))
        elif end > start:
            ranges.append(Range(named, process, start, end))
    if open_ranges:
        end = trace_end()
        ranges += [Range(name, process, start, end) for name, process, start in open_ranges if end > start]
    return ranges, len(open_ranges)


def _collective_ends(file: NsysFile) -> list[list[int]]:
    """When the collectives of each process and device ended, in order: what --align nccl compares."""
    name, ids = collectives(file)
    if not ids:
        return []
    sql = (
        f"SELECT end, globalPid, deviceId FROM {KERNEL} WHERE {name} IN ({','.join(map(str, ids))}) "
        f"AND end IS NOT NULL LIMIT {_MAX_COLLECTIVES}"
    )
    ends: dict[tuple[int, int], list[int]] = {}
    for end, process, device in file.rows(sql):
        ends.setdefault((process, device), []).append(end)
    return [sorted(times) for times in ends.values()]
