"""One wall clock for all files, and how far it can be off.

Files of one host that carry its monotonic clock (nsys 2026 and later) agree exactly. Others agree as well as their
hosts' UTC clocks do; `--align nccl` replaces that by the ends of collectives, which all their ranks leave together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rollpacker.profiling.bubble_report.inputs import match_files
from rollpacker.profiling.bubble_report.model import MILLISECOND, SECOND, BadTrace, Source

_MAX_LAG = 50
_MIN_COLLECTIVES = 3
_MAX_COMPARED = 2_000  # of a process on a GPU; ten times as many cost 0.7 s for each and were no more exact
_TOLERANCE_NS = 50_000


@dataclass(frozen=True)
class Alignment:
    """What was done to the clocks: the error that is left in ns (None: unknown), and a sentence for the reader."""

    error_ns: int | None
    note: str | None
    distrust: str | None = None


@dataclass(frozen=True)
class _Skew:
    """Add `offset_ns` to one clock to make its collectives end with the other's; `error_ns` is the typical rest."""

    offset_ns: int
    error_ns: int
    num_matched: int

    @property
    def is_useful(self) -> bool:
        """Whether the correction is larger than its own error: else the collectives do not end together."""
        return self.error_ns < abs(self.offset_ns)


def align_clocks(sources: Sequence[Source], offsets: Sequence[str], *, by_nccl: bool) -> Alignment:
    """Set `clock_ns` of every source. `offsets` are FILE=SECONDS. Raises BadTrace for one that does not fit."""
    _join_monotonic(sources)
    files = [Path(source.path) for source in sources]
    given = match_files(files, offsets, "--offset")
    for source, file in zip(sources, files, strict=True):
        if file in given:
            try:
                source.clock_ns += round(float(given[file]) * SECOND)
            except (ValueError, OverflowError):
                raise BadTrace(f"--offset {file.name}={given[file]}: expected seconds, such as 0.25 or -3.") from None
            source.clock_group += f" shifted {given[file]}"
            source.has_wall_clock = True
    clockless = [s for s in sources if not s.has_wall_clock]
    if clockless and len(sources) > 1:
        name = Path(clockless[0].path).name
        return Alignment(
            None, None, f"{name} carries no wall clock and is read with other files: give --offset {name}=SEC"
        )
    groups: dict[str, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.clock_group, []).append(source)
    if len(groups) < 2:
        return _one_clock(sources)
    return _several_clocks(list(groups.values()), by_nccl=by_nccl)


def _join_monotonic(sources: Sequence[Source]) -> None:
    """Two reports of one host may have read UTC at slightly different moments; their monotonic clock is one."""
    first: dict[str, Source] = {}
    for source in sources:
        if source.monotonic_ns is not None and source.host:
            reference = first.setdefault(source.host, source)
            if reference.monotonic_ns is not None:
                joined = reference.clock_ns + source.monotonic_ns - reference.monotonic_ns
                # A clock that starts anew (reboot, another machine of that name) is another clock.
                if abs(joined - source.clock_ns) < 60 * SECOND:
                    source.clock_ns = joined
                else:
                    source.clock_group += f" {source.path}"


def _one_clock(sources: Sequence[Source]) -> Alignment:
    if len(sources) == 1 or not any(s.kind.startswith("nsys") and s.monotonic_ns is None for s in sources):
        return Alignment(0, None)
    return Alignment(
        None,
        "all files are of one host, each with its own UTC start time; before nsys 2026 that may be the start of the session "
        "instead of the capture, so check that the stages line up, else give --offset FILE=SEC or --align nccl",
    )


def _several_clocks(groups: list[list[Source]], *, by_nccl: bool) -> Alignment:
    ends = [max((e for s in group for e in _wall_ends(s)), key=len, default=[]) for group in groups]
    reference = max(range(len(groups)), key=lambda index: len(ends[index]))
    skews = {i: _skew(ends[reference], ends[i]) for i in range(len(groups)) if i != reference}
    found = [skew for skew in skews.values() if skew is not None]
    if len(found) < len(skews):
        if by_nccl:
            missing = len(skews) - len(found)
            reason = f"--align nccl found no matching collectives for {missing} of {len(groups)} clocks"
            return Alignment(None, None, reason)
        return Alignment(
            None,
            f"{len(groups)} clocks taken as they are, error unknown (their synchronisation, typically 0.1 to 10 ms); "
            "no order of events below it is meant",
        )
    if not by_nccl or not any(skew.is_useful for skew in found):
        worst = max(abs(skew.offset_ns) + skew.error_ns for skew in found)
        advice = (
            "; --align nccl corrects it"
            if any(s.is_useful and abs(s.offset_ns) > MILLISECOND // 10 for s in found)
            else ""
        )
        apart = f"{len(groups)} clocks taken as they are: their collectives end up to {_ms(worst)} apart{advice}"
        return Alignment(worst, apart)
    for index, skew in skews.items():
        for source in groups[index]:
            source.clock_ns += skew.offset_ns if skew is not None and skew.is_useful else 0
    error = max(skew.error_ns if skew.is_useful else skew.error_ns + abs(skew.offset_ns) for skew in found)
    largest = max((skew.offset_ns for skew in found if skew.is_useful), key=abs)
    matched = min(skew.num_matched for skew in found)
    return Alignment(
        error,
        f"{len(groups)} clocks aligned by {matched} collectives: largest correction {_ms(largest)}, residual error "
        f"{_ms(error)}; no order of events below that is meant",
    )


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / MILLISECOND:.3f} ms"


def _wall_ends(source: Source) -> list[list[int]]:
    return [[end + source.clock_ns for end in ends[:_MAX_COMPARED]] for ends in source.collective_ends()]


def _skew(reference: list[int], other: list[int]) -> _Skew | None:
    """Compare ends in order. A few collectives at either end may be missing in one file, so try some lags.

    A job repeats itself, so several lags may fit: of those that do the clocks need the smallest correction.
    """
    fits: list[_Skew] = []
    for lag in range(-_MAX_LAG, _MAX_LAG + 1):
        a, b = (reference[lag:], other) if lag >= 0 else (reference, other[-lag:])
        num_matched = min(len(a), len(b))
        if num_matched < max(_MIN_COLLECTIVES, min(len(reference), len(other)) // 2):
            continue
        differences = [x - y for x, y in zip(a, b, strict=False)]
        offset = int(median(differences))
        fits.append(_Skew(offset, int(median(abs(d - offset) for d in differences)), num_matched))
    if not fits:
        return None
    good_enough = 3 * min(fit.error_ns for fit in fits) + _TOLERANCE_NS
    return min((fit for fit in fits if fit.error_ns <= good_enough), key=lambda fit: abs(fit.offset_ns))
