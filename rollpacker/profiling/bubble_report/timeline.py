"""Which stage and which step every GPU is in at every moment.

A range counts for a GPU directly where the range's process used that GPU: its ends are moved to when the GPU had drained
what was launched before. Elsewhere, and where a GPU has no range of its own, the common window decides: the union of the
stage's ranges over all processes. So a GPU that finished its part of a stage early is still in that stage while others
work, and a controller without a GPU names the stages of all.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rollpacker.profiling.bubble_report.intervals import Intervals
from rollpacker.profiling.bubble_report.model import MILLISECOND, SECOND, GpuId, Range, Source, Work
from rollpacker.profiling.bubble_report.stage_names import RL_LEVEL, StageName, StageNamer, StepName

UNATTRIBUTED = "unattributed"
Label = int | str
# Decoding is thousands of ranges with a little scheduling between them: one stage, not thousands.
_BRIDGE_NS = 50 * MILLISECOND
_SESSION_GAP_NS = 60 * SECOND


@dataclass(frozen=True)
class Piece:
    """A GPU is in this stage of this step from start to end; None outside all steps."""

    start: int
    end: int
    stage: str
    step: Label | None


@dataclass
class GpuTimeline:
    """One GPU on the wall clock: its work, the windows in which it is counted, and the pieces that fill them exactly."""

    gpu: GpuId
    work: Work
    window: Intervals
    processes: list[tuple[int, int]]
    pieces: list[Piece] = field(default_factory=list)


_Owner = tuple[int, int]
"""(index of the source, process)."""
_Mark = tuple[_Owner, int, int, Label]


@dataclass(frozen=True)
class _Marks:
    """Ranges on the wall clock: by owner those of a GPU's own processes, and by label the common window over all."""

    own: dict[_Owner, list[tuple[int, int, Label]]]
    common: dict[Label, Intervals]

    @classmethod
    def of(cls, found: Iterable[_Mark], bridge_ns: int = 0) -> _Marks:
        own: dict[_Owner, list[tuple[int, int, Label]]] = defaultdict(list)
        pairs: dict[Label, list[tuple[int, int]]] = defaultdict(list)
        for owner, start, end, label in found:
            own[owner].append((start, end, label))
            pairs[label].append((start, end))
        return cls(own, {label: Intervals.of(of_label).bridge(bridge_ns) for label, of_label in pairs.items()})


def build_timelines(sources: Sequence[Source], namer: StageNamer, *, is_span: bool) -> list[GpuTimeline]:
    """Every GPU that did any work, in order of host and name, cut into pieces.

    `is_span` counts each GPU from its own first to its own last operation; otherwise all GPUs are counted over the common
    window, from the first operation, stage or step of any to the last, as far as their files could have recorded work.
    """
    by_level, steps = _marks(sources, namer)
    gpus = _gpus(sources)
    sessions = _sessions(sources)
    bounds = [_session_bounds(low, high, gpus, [*by_level, steps]) for low, high in sessions]
    for timeline in gpus:
        timeline.window = _window(timeline, sources, sessions, bounds, is_span=is_span)
        stage_parts = _assign(timeline, by_level)
        step_parts = _assign(timeline, [steps])
        timeline.pieces = _cut(stage_parts, step_parts)
    return [timeline for timeline in gpus if timeline.window.total]


def _gpus(sources: Sequence[Source]) -> list[GpuTimeline]:
    found: dict[GpuId, GpuTimeline] = {}
    for index, source in enumerate(sources):
        for (process, gpu), work in source.work.items():
            done = work.shift(source.clock_ns)
            if gpu in found:
                found[gpu].work = found[gpu].work.merged(done)
                found[gpu].processes.append((index, process))
            elif done.hull():
                found[gpu] = GpuTimeline(gpu, done, Intervals.of(()), [(index, process)])
    return sorted(found.values(), key=lambda t: (t.gpu.host, _natural(t.gpu.name), t.gpu.key))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which GPU 10 comes after GPU 9."""
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.split())


def _marks(sources: Sequence[Source], namer: StageNamer) -> tuple[list[_Marks], _Marks]:
    """Stage marks by level (RL loop, framework), and step marks; only the best kind of step name counts."""
    levels: tuple[list[_Mark], list[_Mark]] = [], []
    steps: dict[int, list[tuple[_Owner, int, int, Label | None]]] = defaultdict(list)
    for index, source in enumerate(sources):
        with_gpu = {process for process, _ in source.work}
        for process, ranges in _by_process(source.ranges).items():
            moved = (
                _drained(source, process, ranges, namer) if process in with_gpu else [(r.start, r.end) for r in ranges]
            )
            for named, (start, end) in zip(ranges, moved, strict=True):
                meaning = namer.meaning(named.name)
                at = (start + source.clock_ns, end + source.clock_ns)
                if isinstance(meaning, StageName):
                    levels[meaning.level].append(((index, process), *at, meaning.stage))
                elif isinstance(meaning, StepName):
                    steps[meaning.kind].append(((index, process), *at, meaning.number))
    numbered = _number_steps(steps[min(steps)] if steps else [])
    return [_Marks.of(levels[0]), _Marks.of(_bridged(levels[1]), _BRIDGE_NS)], _Marks.of(numbered)


def _by_process(ranges: Iterable[Range]) -> dict[int, list[Range]]:
    found: dict[int, list[Range]] = defaultdict(list)
    for named in sorted(ranges, key=lambda r: (r.start, -r.end, r.name)):
        found[named.process].append(named)
    return found


def _drained(source: Source, process: int, ranges: list[Range], namer: StageNamer) -> list[tuple[int, int]]:
    """The ranges with both ends moved to when the GPU had drained what was launched before them."""
    if source.drain is None:
        return [(r.start, r.end) for r in ranges]

    def is_rl(named: Range) -> bool:
        meaning = namer.meaning(named.name)
        return not isinstance(meaning, StageName) or meaning.level == RL_LEVEL

    # What the RL loop marked comes first: the stages of a framework only count where it says nothing.
    times = list(dict.fromkeys(t for r in sorted(ranges, key=is_rl, reverse=True) for t in (r.start, r.end)))
    at = dict(zip(times, source.drain(process, times), strict=False))
    if len(at) < len(times):
        source.notes.append(
            f"{len(times) - len(at)} of {len(times)} range ends of a process are where the host set them: too many to "
            "follow the GPU's queue with all"
        )
    return [(at.get(r.start, r.start), max(at.get(r.end, r.end), at.get(r.start, r.start))) for r in ranges]


def _bridged(found: Iterable[_Mark]) -> Iterator[_Mark]:
    """What one owner marked with one label, without the short breaks in between."""
    pairs: dict[tuple[_Owner, Label], list[tuple[int, int]]] = defaultdict(list)
    for owner, start, end, label in found:
        pairs[owner, label].append((start, end))
    for (owner, label), marked in pairs.items():
        yield from ((owner, start, end, label) for start, end in Intervals.of(marked).bridge(_BRIDGE_NS))


def _number_steps(found: list[tuple[_Owner, int, int, Label | None]]) -> Iterator[_Mark]:
    """Steps without a number are counted from 1, in each process by itself."""
    counted: Counter[_Owner] = Counter()
    for owner, start, end, number in sorted(found, key=lambda item: (item[1], item[2])):
        counted[owner] += 1
        yield owner, start, end, number if number is not None else counted[owner]


def _sessions(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Stretches of time with traces; hours between two captures are nobody's idle time."""
    hulls = Intervals.of([(low, high + 1) for source in sources if (hull := source.hull()) for low, high in [hull]])
    return list(hulls.bridge(_SESSION_GAP_NS))


def _session_bounds(low: int, high: int, gpus: list[GpuTimeline], marks: list[_Marks]) -> tuple[int, int] | None:
    """First and last moment of any work, stage or step within a session."""
    spans = [hull for timeline in gpus if (hull := timeline.work.hull(low, high))]
    if not spans:
        return None
    spans += [hull for mark in marks for c in mark.common.values() if (hull := c.clip(low, high).hull())]
    return min(s for s, _ in spans), max(e for _, e in spans)


def _window(
    timeline: GpuTimeline,
    sources: Sequence[Source],
    sessions: list[tuple[int, int]],
    bounds: list[tuple[int, int] | None],
    *,
    is_span: bool,
) -> Intervals:
    captured: list[tuple[int, int]] = []
    for index, _ in timeline.processes:
        source = sources[index]
        hull = source.hull()
        assert hull is not None, "a source with GPU work has a hull"
        if source.captured is None:  # unknown: the whole stretch of time in which the file has anything
            captured += [(low, high) for low, high in sessions if low <= hull[0] < high]
        else:
            low, high = (t + source.clock_ns for t in source.captured)
            captured.append((min(low, hull[0]), max(high, hull[1])))
    union = Intervals.of(captured)
    if is_span:
        spans = [hull for low, high in sessions if (hull := timeline.work.hull(low, high))]
        return Intervals.of(spans).intersect(union)
    return Intervals.of([bound for bound in bounds if bound]).intersect(union)


def _assign(timeline: GpuTimeline, levels: Sequence[_Marks]) -> list[tuple[int, int, Label | None]]:
    """The window, cut into (start, end, label): per level the GPU's own ranges first, then the common windows."""
    candidates: list[tuple[int, int, int, Label]] = []
    for level, marks in enumerate(levels):
        for owner in timeline.processes:
            candidates += [(2 * level, start, end, label) for start, end, label in marks.own.get(owner, ())]
        for label, common in marks.common.items():
            candidates += [(2 * level + 1, start, end, label) for start, end in common]
    parts: list[tuple[int, int, Label | None]] = []
    for low, high in timeline.window:
        inside = [
            (rank, max(s, low), min(e, high), s, label) for rank, s, e, label in candidates if s < high and e > low
        ]
        parts += _sweep(low, high, inside)
    return parts


def _sweep(
    low: int, high: int, candidates: list[tuple[int, int, int, int, Label]]
) -> list[tuple[int, int, Label | None]]:
    """At each moment the candidate (rank, start, end, true start, label) of lowest rank; of those the latest to start."""
    ordered = sorted(candidates, key=lambda c: c[1])
    cuts = sorted({low, high, *(c[1] for c in ordered), *(c[2] for c in ordered)})
    parts: list[tuple[int, int, Label | None]] = []
    active: list[tuple[int, int, str, int, Label]] = []
    following = 0
    for start, end in pairwise(cuts):
        while following < len(ordered) and ordered[following][1] <= start:
            rank, _, until, true_start, label = ordered[following]
            heapq.heappush(active, (rank, -true_start, str(label), until, label))
            following += 1
        while active and active[0][3] <= start:
            heapq.heappop(active)
        winner: Label | None = active[0][4] if active else None
        if parts and parts[-1][1] == start and parts[-1][2] == winner:
            parts[-1] = (parts[-1][0], end, winner)
        else:
            parts.append((start, end, winner))
    return parts


def _cut(stages: list[tuple[int, int, Label | None]], steps: list[tuple[int, int, Label | None]]) -> list[Piece]:
    """Both cover the same windows: their common refinement."""
    pieces: list[Piece] = []
    i = j = 0
    while i < len(stages) and j < len(steps):
        start, end = max(stages[i][0], steps[j][0]), min(stages[i][1], steps[j][1])
        if start < end:
            stage = stages[i][2]
            pieces.append(Piece(start, end, UNATTRIBUTED if stage is None else str(stage), steps[j][2]))
        if stages[i][1] <= steps[j][1]:
            i += 1
        else:
            j += 1
    return pieces
