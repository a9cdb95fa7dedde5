"""torch.profiler (Kineto) traces and RollPacker's own events.trace.json: Chrome's trace format, plain or gzipped.

Kineto: work is what has the categories kernel, gpu_memcpy, gpu_memset; times are microseconds after
`baseTimeNanoseconds` (older files: since 1970). Ours: one process per rank; work is what the rank says it did (the engine
decoding, training stages), since the file knows no kernels.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rollpacker.profiling.bubble_report.causes import judge
from rollpacker.profiling.bubble_report.intervals import Intervals
from rollpacker.profiling.bubble_report.model import COLLECTIVE_WORDS, BadTrace, Cause, GpuId, Range, Source, Work
from rollpacker.profiling.bubble_report.nsys_trust import MIN_COVERAGE, low_coverage
from rollpacker.profiling.bubble_report.stage_names import StageNamer

MAX_JSON_BYTES = 4 << 30
_COLLECTIVE = re.compile("|".join(COLLECTIVE_WORDS), re.IGNORECASE)
_LAUNCH = re.compile(r"^(cuda|hip|cu)(Ext)?(Module)?Launch(?!HostFunc)\w*Kernel|^(cuda|cu|hip)GraphLaunch")
_GRAPH_LAUNCH = re.compile(r"GraphLaunch")
_TENSORBOARD_NAME = re.compile(r"^(?P<host>.+)_\d+\.\d+\.pt\.trace\.json(\.gz)?$")
OUR_COMPUTE = {"update_actor", "old_log_prob", "ref"}
OUR_COMM = {"exchange", "update_weights"}
"""Which stages of our own trace count as which kind of work."""
_MAX_LOST_SHARE = 0.05

_Call = tuple[int, int, str, Any]
"""(start, end, name, correlation id)."""
_Operation = tuple[int, int, Any]
"""(start, end, correlation id of the call that launched it)."""


def read_chrome(path: Path, namer: StageNamer, host: str | None) -> Source:
    """The trace at `path`; `host` names its host where that is known. Raises BadTrace."""
    document = _load(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise BadTrace(
            f"{path}: JSON, but no trace: expected an object with a list `traceEvents` (torch.profiler's format)."
        )
    spans = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and _is_number(e.get("ts"))]
    try:
        if any(e.get("cat") == "stage" and not str(e.get("name")).startswith("nccl") for e in spans):
            return _own_source(path, spans, namer, host)
        return _kineto_source(path, document if isinstance(document, dict) else {}, spans, namer, host)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
        raise BadTrace(
            f"{path}: a trace with an event that makes no sense ({error}); record or copy it again."
        ) from error


def _load(path: Path) -> Any:
    too_large = BadTrace(
        f"{path}: more than {MAX_JSON_BYTES >> 30} GiB of JSON, too large to read at once. Profile fewer steps, or without "
        "stacks and shapes."
    )
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                data = file.read(MAX_JSON_BYTES + 1)
        else:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise too_large
            data = path.read_bytes()
        if len(data) > MAX_JSON_BYTES:
            raise too_large
        return json.loads(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadTrace(
            f"{path}: not a complete gzip file ({error}); it is cut short or damaged. Copy it again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadTrace(
            f"{path}: not valid JSON ({error}); it is cut short or no trace. Copy or record it again."
        ) from error


def _kineto_source(
    path: Path, document: dict[str, Any], spans: list[Any], namer: StageNamer, host: str | None
) -> Source:
    base_ns = document.get("baseTimeNanoseconds")
    rank = (document.get("distributedInfo") or {}).get("rank")
    if host is None:
        match = _TENSORBOARD_NAME.match(path.name)
        host = match["host"] if match else ""
    pieces: dict[tuple[int, GpuId], list[list[tuple[int, int]]]] = {}
    source = Source(
        str(path), "torch.profiler", host, {}, [], clock_ns=int(base_ns or 0), clock_group=f"{host or path}:utc"
    )
    calls: list[_Call] = []
    operations: list[_Operation] = []
    for event in spans:
        start = _nanoseconds(event["ts"])
        end = start + _nanoseconds(event.get("dur") or 0)
        category, name, args = event.get("cat"), str(event.get("name")), event.get("args") or {}
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            gpu = _kineto_gpu(path, host, rank, args.get("device", event.get("pid")))
            kind = 2 if category != "kernel" else int(bool(_COLLECTIVE.search(name)))
            pieces.setdefault((0, gpu), [[], [], []])[kind].append((start, end))
            operations.append((start, end, args.get("correlation")))
        elif category in ("cuda_runtime", "cuda_driver"):
            calls.append((start, end, name, args.get("correlation")))
        elif category == "user_annotation" and namer.meaning(name) is not None and end > start:
            source.ranges.append(Range(name, 0, start, end))
        elif category == "Trace":
            low, high = source.captured or (start, end)
            source.captured = min(low, start), max(high, end)
    source.work = {key: Work(*(Intervals.of(kind) for kind in kinds)) for key, kinds in pieces.items()}
    source.collective_ends = lambda: [sorted(end for _, end in kinds[1]) for kinds in pieces.values()]
    calls.sort(key=lambda call: call[0])
    launch_ids = {correlation for _, _, correlation in operations}
    source.distrust += _lost_launches(calls, launch_ids)
    if not source.work:
        source.notes.append("no GPU work in the file: nothing of it is counted")
    if calls and source.work:
        launched = {correlation for *_, correlation in calls}
        source.launch_coverage = sum(i in launched for i in launch_ids) / max(len(launch_ids), 1)
        launches = _Launches(calls, operations)
        source.drain, source.explain = launches.drained_at, launches.explain
        if source.launch_coverage < MIN_COVERAGE:
            source.distrust.append(low_coverage(source.launch_coverage))
    return source


def _kineto_gpu(path: Path, host: str, rank: Any, device: Any) -> GpuId:
    """Without a host two files must not share a GPU by its ordinal: every node has a device 0."""
    if host:
        return GpuId(host, f"device {device}", f"{device}")
    return GpuId("", f"{path}:{device}", f"rank {rank}" if rank is not None else f"{path.name} device {device}")


def _lost_launches(calls: Sequence[_Call], launch_ids: set[Any]) -> list[str]:
    launches = [call for call in calls if _LAUNCH.search(call[2])]
    lost = [call for call in launches if call[3] not in launch_ids]
    graphs = [call for call in launches if _GRAPH_LAUNCH.search(call[2])]
    lost_graphs = [call for call in lost if _GRAPH_LAUNCH.search(call[2])]
    reasons = []
    if graphs and len(lost_graphs) == len(graphs):
        reasons.append("incomplete trace: the CUDA graph launches left no GPU rows, so busy time looks idle")
    if len(lost) > 2 and len(lost) > _MAX_LOST_SHARE * len(launches):
        reasons.append(f"dropped events: {len(lost) / len(launches):.0%} of the launches left no GPU work in the file")
    return reasons


class _Launches:
    """The CUDA calls of one file, which is one process, in order, and the operations that they launched."""

    def __init__(self, calls: Sequence[_Call], operations: Sequence[_Operation]) -> None:
        self._calls = calls
        self._starts = array("q", [call[0] for call in calls])
        launched_at = {correlation: start for start, _, _, correlation in calls if correlation is not None}
        self._launch_of = {start: launched_at.get(correlation) for start, _, correlation in operations}
        pairs = sorted((launched_at[c], end) for _, end, c in operations if c in launched_at)
        self._launches = [at for at, _ in pairs]
        self._reach = list(accumulate((end for _, end in pairs), max))

    def drained_at(self, process: int, times: Sequence[int]) -> list[int]:
        """The latest end of what was launched before each time; never before the time itself."""
        del process
        counts = [bisect_left(self._launches, time) for time in times]
        return [max(time, self._reach[n - 1]) if n else time for time, n in zip(times, counts, strict=True)]

    def explain(self, process: int, start: int, end: int) -> Cause:
        """The cause of a gap."""
        del process
        low, high = max(bisect_left(self._starts, start) - 4_096, 0), bisect_left(self._starts, end)
        calls = [call[:3] for call in self._calls[low:high] if call[1] > start]
        return judge(start, end, calls, self._launch_of.get(end))


def _own_source(path: Path, spans: list[Any], namer: StageNamer, host: str | None) -> Source:
    """RollPacker's own trace: `stage` lanes give stages and steps, the `engine` lane when the engine decoded."""
    source = Source(str(path), "rollpacker", host or "", {}, [], has_wall_clock=False)
    pieces: dict[int, list[list[tuple[int, int]]]] = {}
    for event in spans:
        rank, lane, name = int(event["pid"]), event.get("cat"), str(event["name"])
        start = _nanoseconds(event["ts"])
        end = start + _nanoseconds(event.get("dur") or 0)
        kinds = pieces.setdefault(rank, [[], [], []])
        if lane == "engine" or (lane == "stage" and name in OUR_COMPUTE):
            kinds[0].append((start, end))
        elif lane == "stage" and name in OUR_COMM:
            kinds[1].append((start, end))
        if lane == "stage" and namer.meaning(name) is not None and end > start:
            source.ranges.append(Range(name, rank, start, end))
    for rank, kinds in pieces.items():
        gpu = GpuId(source.host, f"{path}:{rank}", f"rank {rank}")
        source.work[rank, gpu] = Work(*(Intervals.of(kind) for kind in kinds))
    source.notes.append(
        "RollPacker's own trace: busy is what each rank timed (the engine holding requests, whole training stages), not "
        "kernels; profile with nsys to see inside"
    )
    return source


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e16


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1_000)
