"""A table of `rollpacker paper` in the paper's form: bars, and the paper's number as a line across its bar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollpacker.simulator.figures import BLUE, PALE, RED, open_figure, save_figure
from rollpacker.simulator.paper.tables import Row


def draw_table(rows: Sequence[Row], title: str, folder: Path) -> None:
    """An axis for each of the table's rows, a bar for each column; calibrated ones are pale."""
    names = list(dict.fromkeys(row.row for row in rows))
    figure, axes = open_figure(len(names))
    for axis, name in zip(axes, names, strict=True):
        bars = [row for row in rows if row.row == name]
        places = list(range(len(bars)))
        axis.bar(places, [b.simulated for b in bars], color=[PALE if b.calibrated else BLUE for b in bars], width=0.7)
        for place, bar in zip(places, bars, strict=True):
            if bar.published is not None:
                axis.hlines(bar.published, place - 0.4, place + 0.4, color=RED, linewidth=2)
        axis.set_xticks(places, [b.column for b in bars], rotation=45, ha="right", fontsize=7)
        axis.set_title(name, fontsize=9)
    figure.suptitle(f"{title}: simulated (bars; pale = calibrated) and published (red)", fontsize=9)
    save_figure(figure, folder / title.lower().replace(". ", "_").replace(" ", "_"))
