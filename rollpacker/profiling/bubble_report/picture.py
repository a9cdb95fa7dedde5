"""The report as one SVG: what it says, a lane per GPU over time, and stacked bars per stage.

Colours are Okabe and Ito's, told apart with any colour vision; idle is the pale ground that shows through, so a bubble is
a hole. A lane's height at a moment is the busy share of that moment. Time without any capture is cut out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from rollpacker.profiling.bubble_report.conclusions import conclusions
from rollpacker.profiling.bubble_report.intervals import Intervals
from rollpacker.profiling.bubble_report.names import duration, percent, step_name
from rollpacker.profiling.bubble_report.report import Report, Times
from rollpacker.profiling.bubble_report.timeline import UNATTRIBUTED, GpuTimeline, Label

COLOURS = {"compute": "#0072B2", "comm": "#E69F00", "copy": "#009E73", "idle": "#E4E4E4"}
NAMES = {"compute": "compute", "comm": "communication only", "copy": "copies only", "idle": "idle (bubble)"}
_TINTS = ("#DCD5EE", "#F7F5FC", "#D3E8EF", "#F3D9E4", "#E9E9C9", "#CFE3D4", "#E3DAD0")  # of steps and stages
_WIDTH, _RIGHT = 1200, 90
_BINS = 900
_LEVELS = 12  # heights within a lane are rounded to these, so that equal neighbours are one step of the path
_LINE = 17
_TEXT_COLUMNS = 165


class _Axis:
    """From wall clock to x; stretches without capture take no room."""

    def __init__(self, timelines: Sequence[GpuTimeline], left: int) -> None:
        first = timelines[0].window
        self.shown = first.union(*(timeline.window for timeline in timelines[1:]))
        self.left, self.width = left, _WIDTH - left - _RIGHT
        self.start, self.total = self.shown.starts[0], max(self.shown.total, 1)

    def x(self, time: int) -> float:
        """Where a moment is drawn."""
        return self.left + self.width * self.shown.measure(self.start, time) / self.total

    def bins(self) -> Iterator[tuple[int, int]]:
        """The shown time in equal steps; one that spans a cut is split there."""
        step = max(self.total // _BINS, 1)
        for low, high in self.shown:
            for start in range(low, high, step):
                yield start, min(start + step, high)

    def ticks(self) -> list[tuple[float, str]]:
        """About eight round marks: (x, label)."""
        seconds = self.total / 1e9
        step = next(
            (base * 10.0**power for power in range(-9, 9) for base in (1, 2, 5) if base * 10.0**power >= seconds / 8),
            1e9,
        )
        unit, size = ("s", 1.0) if step >= 0.1 else ("ms", 1e-3) if step >= 1e-4 else ("us", 1e-6)
        count = int(seconds / step) + 1
        return [(self.left + self.width * i * step / seconds, f"{i * step / size:g} {unit}") for i in range(count)]


def svg_picture(report: Report) -> str:
    """A complete SVG document; readable in a browser without anything else."""
    lines = _title_lines(report)
    top = 14 + _LINE * len(lines)
    body: list[str] = []
    if report.timelines:
        left = min(max(90, 16 + 7 * max(map(len, [*report.names.values(), *report.by_stage()]))), 260)
        axis = _Axis(report.timelines, left)
        body, top = _timeline(report, axis, top + 8)
        bars, top = _bars(report, axis, top + 34)
        body += bars
    text = [
        f'<text x="14" y="{20 + _LINE * i}" font-size="13"{style}>{escape(line)}</text>'
        for i, (line, style) in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 16}" width="{_WIDTH}" height="{top + 16}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            "<title>Where the GPU time went</title>",
            '<defs><pattern id="missing" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="6" height="6" fill="#fff"/><rect width="1.5" height="6" fill="#bbb"/></pattern></defs>',
            f'<rect width="{_WIDTH}" height="{top + 16}" fill="#fff"/>',
            *text,
            *body,
            "</svg>\n",
        ]
    )


def _title_lines(report: Report) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    if not report.is_trusted:
        warning = f"UNTRUSTED: {report.distrust[0]}"
        if len(report.distrust) > 1:
            warning += f" (and {len(report.distrust) - 1} more reasons)"
        lines += [(line, ' fill="#B00020" font-weight="bold"') for line in textwrap.wrap(warning, _TEXT_COLUMNS - 10)]
    for number, sentence in enumerate(conclusions(report), 1):
        unbroken = sentence.replace(" %", "\N{NO-BREAK SPACE}%")
        lines += [(line, "") for line in textwrap.wrap(f"{number}. {unbroken}", _TEXT_COLUMNS)]
    return lines


def _timeline(report: Report, axis: _Axis, top: int) -> tuple[list[str], int]:
    """Legend, bands of steps and stages, lanes, axis; and where they end."""
    out, x = [], float(axis.left)
    for kind, colour in COLOURS.items():
        out.append(
            f'<rect x="{x:.0f}" y="{top}" width="12" height="12" fill="{colour}" stroke="#888" stroke-width=".4"/>'
        )
        out.append(f'<text x="{x + 17:.0f}" y="{top + 10}" font-size="12">{NAMES[kind]}</text>')
        x += 34 + 7 * len(NAMES[kind])
    out.append(
        f'<rect x="{x:.0f}" y="{top}" width="12" height="12" fill="url(#missing)" stroke="#888" stroke-width=".4"/>'
    )
    out.append(f'<text x="{x + 17:.0f}" y="{top + 10}" font-size="12">not captured</text>')
    top += 24
    bands, top = _bands(report, axis, top)
    out += bands
    height = 22 if len(report.timelines) <= 16 else 15 if len(report.timelines) <= 32 else 12
    first_lane = top
    for timeline, (_, times) in zip(report.timelines, report.gpus, strict=True):
        out += _lane(timeline, times, axis, report.names[timeline.gpu], top, height)
        top += height + 3
    for low, _ in list(axis.shown)[1:]:
        x = axis.x(low)
        out.append(
            f'<path d="M{x:.1f} {first_lane - 2}V{top}" stroke="#000" stroke-dasharray="3 3"><title>time without any '
            "capture is cut out here</title></path>"
        )
    for x, label in axis.ticks():
        out.append(f'<path d="M{x:.1f} {top}v5" stroke="#444"/>')
        out.append(f'<text x="{x:.1f}" y="{top + 17}" font-size="11" text-anchor="middle">{label}</text>')
    return out, top + 22


def _bands(report: Report, axis: _Axis, top: int) -> tuple[list[str], int]:
    """A row of steps and a row of stages, as the GPU with the widest window lives through them."""
    out = []
    widest = max(report.timelines, key=lambda timeline: timeline.window.total)
    for row in ("step", "stage"):
        runs: list[tuple[int, int, Label | None]] = []
        for piece in widest.pieces:
            label: Label | None = piece.step if row == "step" else None if piece.stage == UNATTRIBUTED else piece.stage
            if runs and runs[-1][1] == piece.start and runs[-1][2] == label:
                runs[-1] = (runs[-1][0], piece.end, label)
            else:
                runs.append((piece.start, piece.end, label))
        if all(label is None for _, _, label in runs):
            continue
        tints: dict[str, str] = {}
        out.append(
            f'<text x="{axis.left - 6}" y="{top + 12}" font-size="11" text-anchor="end" fill="#444">{row}</text>'
        )
        for index, (start, end, label) in enumerate(run for run in runs if run[2] is not None):
            x, width = axis.x(start), axis.x(end) - axis.x(start)
            if width < 0.3:
                continue
            name = step_name(label)
            fill = tints.setdefault(name if row == "stage" else str(index % 2), _TINTS[len(tints) % len(_TINTS)])
            out.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="16" fill="{fill}" stroke="#8A7FB0" '
                f'stroke-width=".5"><title>{escape(name)}: {duration(end - start)}</title></rect>'
            )
            shown = name if width >= 6.5 * len(name) + 4 else ""
            if shown:
                middle = x + width / 2
                out.append(
                    f'<text x="{middle:.1f}" y="{top + 12}" font-size="11" text-anchor="middle">{escape(shown)}</text>'
                )
        top += 19
    return out, top + 3


def _lane(timeline: GpuTimeline, times: Times, axis: _Axis, name: str, top: int, height: int) -> list[str]:
    size = min(12, height)
    baseline = top + height / 2 + size * 0.36
    out = [
        f'<text x="{axis.left - 6}" y="{baseline:.1f}" font-size="{size}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{axis.left}" y="{top}" width="{axis.width}" height="{height}" fill="url(#missing)"/>',
    ]
    for low, high in timeline.window:
        x, width = axis.x(low), axis.x(high) - axis.x(low)
        out.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{COLOURS["idle"]}"/>')
    work = timeline.work
    compute_or_comm = work.compute.union(work.comm)
    stacks = (("copy", compute_or_comm.union(work.copy)), ("comm", compute_or_comm), ("compute", work.compute))
    for kind, busy in stacks:  # the widest first, the others over it
        path = _area(busy, axis, top, height)
        if path:
            out.append(f'<path d="{path}" fill="{COLOURS[kind]}"/>')
    label = f"{percent(times.bubble_ratio)} idle"
    out.append(f'<text x="{_WIDTH - _RIGHT + 6}" y="{baseline:.1f}" font-size="{size}">{label}</text>')
    return out


def _area(busy: Intervals, axis: _Axis, top: int, height: int) -> str:
    """The outline of the busy share over time; neighbours of one height are one step."""
    parts: list[str] = []
    last_level = 0
    bottom = top + height
    for start, end in axis.bins():
        share = busy.measure(start, end) / (end - start)
        level = max(round(_LEVELS * share), 1) if share else 0
        if level != last_level:
            x = axis.x(start)
            y = bottom - height * level / _LEVELS
            parts.append(f"H{x:.1f}V{y:.1f}" if last_level else f"M{x:.1f} {bottom}V{y:.1f}")
            if not level:
                parts.append("z")
            last_level = level
    if last_level:
        parts.append(f"H{axis.left + axis.width:.1f}V{bottom}z")
    return "".join(parts)


def _bars(report: Report, axis: _Axis, top: int) -> tuple[list[str], int]:
    """Per stage, all GPUs and steps: how its GPU time splits; the bar's length is the stage's share of all GPU time."""
    stages = report.by_stage()
    lines = [("all", report.total)] + (list(stages.items()) if set(stages) != {UNATTRIBUTED} else [])
    out = [f'<text x="14" y="{top}" font-size="13" font-weight="bold">GPU time by stage, all GPUs</text>']
    top += 10
    whole = max(report.total.window, 1)
    for name, times in lines:
        out.append(f'<text x="{axis.left - 6}" y="{top + 13}" font-size="12" text-anchor="end">{escape(name)}</text>')
        x = float(axis.left)
        for kind, colour in COLOURS.items():
            value = getattr(times, kind)
            width = axis.width * value / whole
            if width <= 0:
                continue
            out.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="18" fill="{colour}" stroke="#fff" '
                f'stroke-width=".5"><title>{escape(name)}, {NAMES[kind]}: {duration(value)}</title></rect>'
            )
            label = percent(value / times.window)
            if width > 6.5 * len(label):
                ink = "#000" if kind in ("idle", "comm") else "#fff"
                place = f'x="{x + width / 2:.1f}" y="{top + 13}" text-anchor="middle"'
                out.append(f'<text {place} font-size="11" fill="{ink}">{label}</text>')
            x += width
        total = f"{percent(times.bubble_ratio)} idle"
        if x + 6 + 6 * len(total) + 60 < _WIDTH:
            total = f"{duration(times.window)}, {total}"
        out.append(f'<text x="{x + 6:.1f}" y="{top + 13}" font-size="11">{total}</text>')
        top += 22
    return out, top
