"""`rollpacker paper`: the tables and figures of the RollPacker paper, simulated, beside what it reports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollpacker.cli.terminal import open_console
from rollpacker.config import ConfigError
from rollpacker.simulator.figures import WITHOUT_MATPLOTLIB, has_matplotlib
from rollpacker.simulator.paper.figures import draw_table
from rollpacker.simulator.paper.laboratory import Laboratory
from rollpacker.simulator.paper.tables import TABLES, Row

HELP = "Simulate the paper's tables and figures and compare (about four minutes on one core; no GPU, no MPI)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "tables", metavar="TABLE", nargs="*", help=f"which ones, quoted; all by default: {', '.join(TABLES)}"
    )
    parser.add_argument("--out", metavar="DIR", help="write paper.json there, and each table as SVG and PNG")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the simulated runs (default 0)")
    parser.add_argument("--debug", action="store_true", help="show a traceback for configuration errors too")


def run(arguments: argparse.Namespace) -> int:
    """Simulate the tables that were asked for, in the paper's order; the exit code."""
    names = [_find(word) for word in arguments.tables] or list(TABLES)
    folder = None if arguments.out is None else Path(arguments.out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    console = open_console()
    rows: list[Row] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(names))
        laboratory = Laboratory(arguments.seed, lambda what: progress.update(task, description=what[:60]))
        for name in [name for name in TABLES if name in names]:
            found = list(TABLES[name](laboratory))
            rows += found
            console.print(_table(name, found))
            _print_notes(found, console)
            progress.advance(task)
    console.print(
        "ours / the paper's, and the deviation. c = calibrated (docs/simulator.md), all others are predicted."
    )
    if folder is not None:
        _write(folder, names, rows, console)
    return 0


def _find(word: str) -> str:
    """The table that a word names: "Table 2", "table2", "fig11"."""
    plain = {_plain(name): name for name in TABLES}
    found = plain.get(_plain(word).replace("figure", "fig"))
    if found is None:
        raise ConfigError(f"{word!r} is none of the tables: {', '.join(TABLES)}. Quote a name with a space.")
    return found


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _progress() -> Progress:
    """On stderr, and only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _table(name: str, rows: Sequence[Row]) -> Table:
    """A line for each of the paper's rows."""
    columns = list(dict.fromkeys(row.column for row in rows))
    table = Table(
        title=f"{name}  {(TABLES[name].__doc__ or '').strip()}", title_justify="left", title_style="bold", box=SIMPLE
    )
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for title in dict.fromkeys(row.row for row in rows):
        cells = {row.column: row for row in rows if row.row == title}
        table.add_row(title, *(_cell(cells[c]) if c in cells else "" for c in columns))
    return table


def _print_notes(rows: Sequence[Row], console: Console) -> None:
    """Each note once, with the cells that it is about."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(f"{row.row}, {row.column}")
    for note, cells in notes.items():
        console.print(Padding(f"{'; '.join(cells)}: {note}", (0, 0, 0, 2)))
    console.print()


def _cell(row: Row) -> str:
    digits = 0 if abs(row.simulated) >= 1000 else 1 if abs(row.simulated) >= 10 else 2
    ours = f"{row.simulated:,.{digits}f}"
    mark = " c" if row.calibrated else ""
    if row.published is None or row.deviation is None:
        return ours + mark
    return f"{ours} / {row.published:,g}\n{row.deviation:+.0%}{mark}"


def _write(folder: Path, names: Sequence[str], rows: Sequence[Row], console: Console) -> None:
    text = json.dumps([row.to_json() for row in rows], indent=2) + "\n"
    (folder / "paper.json").write_text(text, encoding="utf-8")
    if not has_matplotlib():
        console.print(f"written to {folder}: paper.json; {WITHOUT_MATPLOTLIB}", soft_wrap=True)
        return
    for name in names:
        draw_table([row for row in rows if row.table == name], name, folder)
    console.print(f"written to {folder}: paper.json, and {len(names)} figures as SVG and PNG", soft_wrap=True)
