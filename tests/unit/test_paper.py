"""The machinery of `rollpacker paper` on runs of a few steps; the real tables are in tests/paper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cli import paper
from rollpacker.cli.main import main
from rollpacker.simulator.paper import causes, tables
from rollpacker.simulator.paper.laboratory import Laboratory, Measured, Round
from rollpacker.simulator.paper.published import PUBLISHED
from rollpacker.simulator.paper.tables import TABLES, Row
from rollpacker.types import RoundKind

FEW_STEPS = ("trainer.total_training_steps=3", "data.train_batch_size=16")


def test_a_run_is_made_once_and_its_means_are_per_step() -> None:
    heard: list[str] = []
    lab = Laboratory(0, heard.append)
    first, again = (lab.run("7B/8k", *FEW_STEPS, "tail_batching.mode=off") for _ in range(2))
    assert first is again and len(heard) == 1
    assert len(first.rounds) == 3 and {r.num_samples for r in first.rounds} == {128}
    assert first.rollout_s == pytest.approx(sum(r.rollout_s for r in first.rounds) / 3)
    for r in first.rounds:
        assert r.rollout_s + r.reward_s + r.training_s < r.step_s


def test_a_short_last_round_counts_by_its_samples() -> None:
    def round_of(num_samples: int, seconds: float) -> Round:
        return Round(RoundKind.LONG, num_samples, 0, seconds, 0.0, 0.0, seconds)

    measured = Measured(100, [round_of(100, 10.0), round_of(50, 8.0)])
    assert measured.step_s == pytest.approx(18 * 100 / 150)
    assert measured.mean(lambda r: r.num_samples, RoundKind.LONG) == pytest.approx(100)
    with pytest.raises(ValueError, match="no short round"):
        measured.mean(lambda r: r.step_s, RoundKind.SHORT)


def test_another_seed_is_another_run() -> None:
    seconds = {Laboratory(seed).run("7B/8k", *FEW_STEPS, "tail_batching.mode=off").step_s for seed in (0, 1)}
    assert len(seconds) == 2


@pytest.fixture
def two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def table_3(lab: Laboratory) -> Iterator[Row]:
        """Two cells of a table."""
        yield tables._row("Table 3", "LONG round", "no scaling", 120.0, calibrated=True)
        yield tables._row("Table 3", "LONG round", "adaptive", 230.4)

    monkeypatch.setitem(TABLES, "Table 3", table_3)


@pytest.mark.usefixtures("two_rows")
def test_the_command_prints_the_deviation_and_writes_json_and_figures(tmp_path: Path, capsys: Any) -> None:
    for name in ("a", "b"):
        assert main(["paper", "table 3", "--out", str(tmp_path / name)]) == 0
    out = capsys.readouterr().out
    assert "120.0 / 124.2" in out and "-3% c" in out and "230.4 / 115.2" in out and "+100%" in out
    assert "Two cells of a table." in out
    rows = json.loads((tmp_path / "a" / "paper.json").read_text())
    assert rows[1] == {
        "table": "Table 3",
        "row": "LONG round",
        "column": "adaptive",
        "published": 115.2,
        "simulated": 230.4,
        "calibrated": False,
        "note": "",
    }
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for name in ("paper.json", "table_3.svg", "table_3.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_cell_far_from_the_papers_carries_the_most_exact_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {("Table 2",): "table", ("Table 2", "7B/8k"): "row", ("Table 2", "7B/8k", "+ reward"): "cell"}
    monkeypatch.setattr(causes, "CAUSES", found)

    def note(row: str, column: str, factor: float, **options: Any) -> str:
        return tables._row("Table 2", row, column, factor * PUBLISHED["Table 2", row][column], **options).note

    assert note("7B/8k", "+ reward", 1.2) == "cell"
    assert note("7B/8k", "+ trainer", 0.8) == "row"
    assert note("32B/32k", "+ trainer", 0.8, note="Said before.") == "Said before. table"
    assert note("32B/32k", "+ trainer", 0.95) == ""


@pytest.mark.parametrize("word", ["Table 2", "table2", "TABLE_2"])
def test_a_table_is_found_however_it_is_written(word: str) -> None:
    assert paper._find(word) == "Table 2"


@pytest.mark.parametrize("word", ["Fig. 11", "fig11", "Figure 11"])
def test_a_figure_is_found_however_it_is_written(word: str) -> None:
    assert paper._find(word) == "Fig. 11"


def test_an_unknown_table_is_named_with_those_there_are(capsys: Any) -> None:
    assert main(["paper", "Table 9"]) == 2
    assert "'Table 9' is none of the tables: Table 1, Table 2" in capsys.readouterr().err


def test_every_cause_is_about_a_published_cell() -> None:
    cells = {(table, row, column) for (table, row), found in PUBLISHED.items() for column in found}
    for key in causes.CAUSES:
        assert any(cell[: len(key)] == key for cell in cells), key
