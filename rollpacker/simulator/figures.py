"""Figures as SVG and PNG: the frame of each, and that of a sweep.

matplotlib is imported here alone and only when a figure is drawn: the simulator runs without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")
BLUE, PALE, RED = "#3b6ea5", "#b9c7d6", "#c0392b"
WITHOUT_MATPLOTLIB = "figures need matplotlib: pip install 'rollpacker[plots]'"


def has_matplotlib() -> bool:
    """Whether figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_sweep(key: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """A sweep: time per trained sample, idle share, waste and coverages over the values of a key."""
    panels = {
        "ms per trained sample": {"": "ms_per_sample"},
        "rollout bubble": {"": "bubble_ratio"},
        "wasted tokens": {"": "wasted_token_ratio"},
        "coverage of the longest 5 %": {"of all": "coverage_p95", "of each prompt": "own_coverage_p95"},
    }
    figure, axes = open_figure(len(panels))
    values = [str(row[key]) for row in rows]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for (label, column), colour in zip(lines.items(), (BLUE, RED), strict=False):
            axis.plot(values, [row[column] for row in rows], marker="o", color=colour, label=label)
        if len(lines) > 1:
            axis.legend(fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(key, fontsize=8)
        axis.set_ylim(bottom=0)
    save_figure(figure, folder / "sweep")


def open_figure(num_axes: int) -> tuple[Figure, list[Axes]]:
    """Axes side by side."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "rollpacker"  # the same bytes for the same numbers
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, num_axes, figsize=(3.2 * num_axes, 3.2), squeeze=False, layout="constrained")
    for axis in grid[0]:
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    return figure, list(grid[0])


def save_figure(figure: Figure, path: Path) -> None:
    """Write it in every format, beside one another."""
    from matplotlib import pyplot

    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=150)
    pyplot.close(figure)
