"""Two reports side by side: the same table with deltas, and one sentence."""

from __future__ import annotations

from typing import Any

from rollpacker.profiling.bubble_report.names import duration, percent
from rollpacker.profiling.bubble_report.report import Report, Times
from rollpacker.profiling.bubble_report.tables import grid


def compare_text(before: Report, after: Report) -> str:
    """`after` (the traces) against `before` (--compare): all GPUs, then every stage that either has."""
    rows = [_line(name, a, b) for name, a, b in _pairs(before, after)]
    header = ["", "bubble before", "now", "change", "window before", "now", "change", "idle before", "now", "change"]
    return grid(header, rows, _sentence(before, after)) + "\n"


def compare_json(before: Report, after: Report) -> list[dict[str, Any]]:
    """One object per line of the table; seconds of GPU time."""
    return [
        {
            "name": name,
            "bubble_ratio": [a.bubble_ratio, b.bubble_ratio, b.bubble_ratio - a.bubble_ratio],
            **{
                f"{kind}_s": [
                    getattr(a, kind) / 1e9,
                    getattr(b, kind) / 1e9,
                    (getattr(b, kind) - getattr(a, kind)) / 1e9,
                ]
                for kind in ("window", "compute", "comm", "copy", "idle")
            },
        }
        for name, a, b in _pairs(before, after)
    ]


def _pairs(before: Report, after: Report) -> list[tuple[str, Times, Times]]:
    old, new = before.by_stage(), after.by_stage()
    stages = list(dict.fromkeys([*new, *old]))
    return [("all", before.total, after.total), *((s, old.get(s, Times()), new.get(s, Times())) for s in stages)]


def _line(name: str, a: Times, b: Times) -> list[str]:
    points = 100 * (b.bubble_ratio - a.bubble_ratio)
    return [
        name,
        percent(a.bubble_ratio),
        percent(b.bubble_ratio),
        f"{points:+.1f} points",
        duration(a.window),
        duration(b.window),
        _change(a.window, b.window),
        duration(a.idle),
        duration(b.idle),
        _change(a.idle, b.idle),
    ]


def _change(a: int, b: int) -> str:
    return f"{100 * (b - a) / a:+.1f} %" if a else ("new" if b else "0")


def _sentence(before: Report, after: Report) -> str:
    a, b = before.total, after.total
    points = 100 * (b.bubble_ratio - a.bubble_ratio)
    change = f"{'fell' if points < 0 else 'rose'} by {abs(points):.1f} points, from {percent(a.bubble_ratio)} to"
    if abs(points) < 0.05:
        change = "did not change, it is"
    text = f"Compared: the bubble {change} {percent(b.bubble_ratio)}."
    if not (before.is_trusted and after.is_trusted):
        text += " One of the two is untrusted, so read this with care."
    if before.by_step() and after.by_step():
        counts = [sum(step is not None for step in report.by_step()) for report in (before, after)]
        if counts[0] != counts[1]:
            text += f" The traces hold {counts[0]} and {counts[1]} steps: compare shares, not seconds."
    return text
