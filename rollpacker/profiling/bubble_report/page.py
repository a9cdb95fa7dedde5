"""The report as one HTML page that needs nothing else: conclusions, picture, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rollpacker.profiling.bubble_report.conclusions import conclusions
from rollpacker.profiling.bubble_report.names import duration, seconds, step_name
from rollpacker.profiling.bubble_report.picture import svg_picture
from rollpacker.profiling.bubble_report.report import Report
from rollpacker.profiling.bubble_report.tables import TIMES_HEADER, times_cells

_MAX_ROWS = 2_000
_STYLE = """
body { font: 14px/1.5 Helvetica, Arial, sans-serif; margin: 24px auto; max-width: 1240px; padding: 0 16px; color: #111; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin-top: 28px; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 3px 10px; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #888; position: sticky; top: 0; background: #fff; }
tr:nth-child(even) td { background: #F6F6F8; }
td.word, th.word { text-align: left; } .warning { border: 2px solid #B00020; padding: 8px 14px; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: bold; } pre { overflow-x: auto; }
"""


def html_page(report: Report, comparison: str | None = None) -> str:
    """The whole page; `comparison` is the text of --compare."""
    names = report.names
    parts = ["<h1>Where the GPU time went</h1>"]
    if not report.is_trusted:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in report.distrust)
        parts.append(
            f'<div class="warning"><b>Untrusted:</b> the numbers below may be wrong, because<ul>{reasons}</ul></div>'
        )
    parts.append("<ol>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in conclusions(report)) + "</ol>")
    if comparison:
        parts += ["<h2>Compared</h2>", f"<pre>{escape(comparison)}</pre>"]
    parts += [svg_picture(report)]
    if report.gpus:
        rows = [[names[gpu], *times_cells(times)] for gpu, times in report.gpus]
        parts += ["<h2>By GPU</h2>", _table(["GPU", *TIMES_HEADER], rows, words=1)]
        parts += [
            "<h2>By stage</h2>",
            _table(["stage", *TIMES_HEADER], [[s, *times_cells(t)] for s, t in report.by_stage().items()], words=1),
        ]
        gaps = [
            [
                *(names[g.gpu], step_name(g.step), g.stage, g.cause.kind, g.cause.detail),
                *(duration(g.end - g.start), f"{seconds(g.start - report.origin):.6f} s"),
            ]
            for g in report.gaps
        ]
        parts += [
            "<h2>Largest gaps</h2>",
            _table(["GPU", "step", "stage", "cause", "what the host did", "length", "at"], gaps, 5),
        ]
        waits = [[step_name(w.step), w.stage, names[w.last], duration(w.waited)] for w in report.waits if w.waited > 0]
        if waits:
            parts += ["<h2>Who was last</h2>", _table(["step", "stage", "last GPU", "others waited"], waits[:50], 3)]
        ranked = report.rows
        if len(ranked) > _MAX_ROWS:
            ranked = sorted(ranked, key=lambda row: -row.times.idle)[:_MAX_ROWS]
        full = [[step_name(r.step), r.stage, names[r.gpu], *times_cells(r.times)] for r in ranked]
        title = f"Step x stage x GPU ({len(full)} of {len(report.rows)} rows)"
        parts.append(
            f"<details><summary>{title}</summary>{_table(['step', 'stage', 'GPU', *TIMES_HEADER], full, 3)}</details>"
        )
    if report.notes:
        parts += ["<h2>Notes</h2>", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report.notes) + "</ul>"]
    head = f'<meta charset="utf-8"><title>Where the GPU time went</title><style>{_STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *parts, "</body></html>\n"])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A table whose first `words` columns are text."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = (' class="word"' if index < words else "" for index in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{k}>{escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"

    return f"<table>{line('th', header)}{''.join(line('td', row) for row in rows)}</table>"
