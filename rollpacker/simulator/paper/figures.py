"""The figures of `rollpacker paper` and of a sweep, in the paper's form: bars, the paper's number as a line across its bar.

matplotlib is imported here alone and only when a figure is drawn: the simulator runs without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.simulator.paper.tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")
_PREDICTED, _CALIBRATED, _PAPER = "#3b6ea5", "#b9c7d6", "#c0392b"


def has_matplotlib() -> bool:
    """Whether figures can be drawn."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def draw_table(rows: Sequence[Row], title: str, folder: Path) -> list[Path]:
    """One table or figure of the paper: an axis for each of its rows, a bar for each column; the files."""
    names = list(dict.fromkeys(row.row for row in rows))
    figure, axes = _axes(len(names))
    for axis, name in zip(axes, names, strict=True):
        _bars(axis, [row for row in rows if row.row == name])
        axis.set_title(name, fontsize=9)
    figure.suptitle(f"{title}: simulated (bars) and published (red)", fontsize=10)
    return _save(figure, folder, title.lower().replace(".", "").replace(" ", "_"))


def draw_sweep(key: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """A sweep: time per trained sample, idle share, waste and coverage over the values of a key; the files."""
    columns = {
        "ms_per_sample": "ms per trained sample",
        "bubble_ratio": "rollout bubble",
        "wasted_token_ratio": "wasted tokens",
        "coverage_p95": "coverage c(.95)",
    }
    figure, axes = _axes(len(columns))
    values = [str(row[key]) for row in rows]
    for axis, (column, title) in zip(axes, columns.items(), strict=True):
        axis.plot(values, [row[column] for row in rows], marker="o", color=_PREDICTED)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(key, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", alpha=0.3)
    return _save(figure, folder, "sweep")


def _bars(axis: Axes, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    colours = [_CALIBRATED if row.calibrated else _PREDICTED for row in rows]
    axis.bar(places, [row.simulated for row in rows], color=colours, width=0.7)
    for place, row in zip(places, rows, strict=True):
        if row.published is not None:
            axis.hlines(row.published, place - 0.4, place + 0.4, color=_PAPER, linewidth=2)
    axis.set_xticks(list(places), [row.column for row in rows], rotation=45, ha="right", fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _axes(count: int) -> tuple[Figure, list[Axes]]:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "rollpacker"  # the same bytes for the same numbers
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, count, figsize=(3.2 * count, 3.2), squeeze=False, layout="constrained")
    return figure, list(grid[0])


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    from matplotlib import pyplot

    paths = [folder / f"{name}.{kind}" for kind in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths
