"""The whole of `rollpacker paper`: how near it comes to the paper, what it says where it does not, and how long it takes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cli.main import main
from rollpacker.simulator.paper.causes import cause_of
from rollpacker.simulator.paper.published import PUBLISHED
from rollpacker.simulator.paper.tables import NOTED_DEVIATION, TABLES

pytestmark = pytest.mark.timeout(2400)  # minutes of one core, and cores may be busy


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a whole run, and the CPU seconds that it took."""
    folder = tmp_path_factory.mktemp("paper")
    start_s = time.process_time()
    assert main(["paper", "--out", str(folder)]) == 0
    return folder, time.process_time() - start_s


@pytest.fixture(scope="module")
def rows(written: tuple[Path, float]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((written[0] / "paper.json").read_text())
    return found


def value(rows: list[dict[str, Any]], table: str, row: str, column: str) -> float:
    (found,) = [r for r in rows if (r["table"], r["row"], r["column"]) == (table, row, column)]
    return float(found["simulated"])


def test_it_takes_less_than_five_minutes_of_one_core(written: tuple[Path, float]) -> None:
    print(f"rollpacker paper: {written[1]:.0f} s of CPU")
    assert written[1] < 300


def test_every_published_number_has_its_row(rows: list[dict[str, Any]]) -> None:
    assert {tuple(row) for row in rows} == {("table", "row", "column", "published", "simulated", "calibrated", "note")}
    keys = [(r["table"], r["row"], r["column"]) for r in rows]
    assert len(set(keys)) == len(keys)
    expected = {(table, row, column): v for (table, row), cells in PUBLISHED.items() for column, v in cells.items()}
    shown = {key: r["published"] for key, r in zip(keys, rows, strict=True) if r["published"] is not None}
    assert shown == expected


def test_a_row_that_deviates_by_more_than_10_percent_says_why(rows: list[dict[str, Any]]) -> None:
    silent = []
    for r in rows:
        if r["published"] and abs(r["simulated"] / r["published"] - 1) > NOTED_DEVIATION:
            cause = cause_of(r["table"], r["row"], r["column"])
            if not cause or cause not in r["note"]:
                silent.append((r["table"], r["row"], r["column"], r["simulated"] / r["published"]))
    assert silent == []


def test_what_is_predicted_is_near(rows: list[dict[str, Any]]) -> None:
    """Fig. 11's "both" within 15 % at 14B and 32B; Table 2's row of 32B within 10 %; Tables 3 and 4 within 5 % in ratio.

    Outside, with their causes in the notes: 7B's "both" (-23 %), Table 2's last column at 7B and 14B.
    """
    for r in rows:
        deviation = r["simulated"] / r["published"] - 1 if r["published"] else 0.0
        if r["table"] == "Fig. 11" and r["column"] == "both 1.25" and r["row"] != "7B/8k":
            assert not r["calibrated"] and abs(deviation) < 0.15, r
        if (r["table"], r["row"]) == ("Table 2", "32B/32k"):
            assert not r["calibrated"] and abs(deviation) < 0.10, r
        for table, reference in (("Table 3", "no scaling"), ("Table 4", "streaming")):
            if r["table"] == table:
                published = PUBLISHED[table, "LONG round"]
                ours = r["simulated"] / value(rows, table, "LONG round", reference)
                assert ours == pytest.approx(r["published"] / published[reference], rel=0.05), r


def test_the_parts_add_up_in_the_papers_order(rows: list[dict[str, Any]]) -> None:
    """RollPacker beats the baselines, an RLHFuse-like one lies between, and one fetch is worse than streaming."""
    for name in ("7B/8k", "14B/16k", "32B/32k"):
        assert value(rows, "Fig. 9", name, "over veRL") > value(rows, "Fig. 9", name, "over RLHFuse") > 1.1
        assert value(rows, "Table 2", name, "+ reward") > value(rows, "Table 2", name, "tail batching") > 1.2
    for share in (20, 30, 40, 50):
        fetch_s = value(rows, "Table 4", "LONG round", f"one fetch {share} %")
        assert fetch_s > value(rows, "Table 4", "LONG round", "streaming")


def test_every_table_is_drawn(written: tuple[Path, float]) -> None:
    files = {path.name for path in written[0].iterdir()}
    assert len(files) == 2 * len(TABLES) + 1
    assert all((written[0] / name).stat().st_size > 5_000 for name in files)
