"""RowsByStart against brute force, on tables in one run, in a few runs, and in no order."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random

import pytest

from rollpacker.profiling.bubble_report import nsys_launches
from rollpacker.profiling.bubble_report.nsys_file import NsysFile
from rollpacker.profiling.bubble_report.nsys_launches import RowsByStart

NUMBER = 3_000


def write(path: Path, starts: list[int]) -> NsysFile:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE StringIds (id, value TEXT)")
    database.execute("CREATE TABLE calls (start, row)")
    database.executemany("INSERT INTO calls VALUES (?, ?)", [(start, i) for i, start in enumerate(starts)])
    database.commit()
    database.close()
    return NsysFile(path)


@pytest.mark.parametrize("layout", ["one run", "four runs", "no order"])
@pytest.mark.parametrize("probes", [200, 10_000])
def test_the_rows_around_a_time_are_found(
    layout: str, probes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys_launches, "_PROBES", probes)
    random = Random(layout)
    starts = sorted(random.sample(range(100_000), NUMBER))
    if layout == "no order":
        random.shuffle(starts)
    elif layout == "four runs":
        of_run = [random.randrange(4) for _ in starts]
        starts = [start for run in range(4) for start, owner in zip(starts, of_run, strict=True) if owner == run]
    rows = RowsByStart(write(tmp_path / "a.sqlite", starts), "calls", "start, row")
    assert len(rows.runs) == {"one run": 1, "four runs": 4, "no order": 1}[layout]
    for _ in range(50):
        low = random.randrange(100_000)
        high = low + random.randrange(5_000)
        found = rows.between(low, high, before=0, after=0)
        assert sorted(start for start, _ in found) == sorted(s for s in starts if low <= s < high)
        earlier = rows.between(low, low, before=40, after=0)
        expected = max((s for s in starts if s < low), default=None)
        assert max((start for start, _ in earlier), default=None) == expected
