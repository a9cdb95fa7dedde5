"""Where the GPU time of an RL job went: how much was idle, in which stage of which step, and who caused it.

    python tools/profile_bubbles.py TRACE... [--compare OTHER] [--json F] [--csv F] [--svg F] [--html F]
           [--window common|span] [--node NAME] [--offset FILE=SEC] [--align nccl] [--stages REGEX=NAME]

Reads nsys exports (.sqlite), nsys reports (.nsys-rep, with the nsys command), torch.profiler traces (.json, .json.gz) and
RollPacker's events.trace.json, any number of files and folders at once. Needs the standard library only.
Exit codes: 0; 2 for a usage error or a file that cannot be read; 4 when the trace is not to be trusted, output still written.
See docs/profiling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The script runs from a checkout, with any Python 3.11 and without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rollpacker.profiling.bubble_report.clocks import align_clocks
from rollpacker.profiling.bubble_report.compare import compare_json, compare_text
from rollpacker.profiling.bubble_report.inputs import read_sources
from rollpacker.profiling.bubble_report.model import BadTrace
from rollpacker.profiling.bubble_report.page import html_page
from rollpacker.profiling.bubble_report.picture import svg_picture
from rollpacker.profiling.bubble_report.report import Report, build_report
from rollpacker.profiling.bubble_report.stage_names import StageNamer
from rollpacker.profiling.bubble_report.tables import csv_report, json_report, text_report
from rollpacker.profiling.bubble_report.timeline import build_timelines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        report = _report(options.traces, options)
        before = _report(options.compare, options, is_other=True) if options.compare else None
        comparison = compare_text(before, report) if before else None
        _write_files(options, report, before, comparison)
    except (BadTrace, ValueError) as error:
        print(f"profile_bubbles: {_one_line(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"profile_bubbles: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        if "-" not in (options.json, options.csv, options.svg, options.html):
            print(text_report(report), end="")
            if comparison:
                print("\n" + comparison, end="")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough; nothing may be flushed into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    is_trusted = report.is_trusted and (before is None or before.is_trusted)
    if not is_trusted:
        print(f"profile_bubbles: untrusted trace: {(report.distrust or before.distrust)[0]}", file=sys.stderr)
    return 0 if is_trusted else 4


def _one_line(error: Exception) -> str:
    """What a damaged file makes SQLite say may hold anything."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))


def _report(paths: Sequence[str], options: argparse.Namespace, *, is_other: bool = False) -> Report:
    namer = StageNamer(options.stages)
    nodes, offsets = options.node, options.offset
    if is_other:  # settings for single files name the traces, not what they are compared with
        nodes, offsets = [node for node in nodes if "=" not in node], []
    sources = read_sources(paths, namer, nodes)
    alignment = align_clocks(sources, offsets, by_nccl=options.align == "nccl")
    timelines = build_timelines(sources, namer, is_span=options.window == "span")
    return build_report(sources, timelines, alignment, options.window)


def _write_files(options: argparse.Namespace, report: Report, before: Report | None, comparison: str | None) -> None:
    """All outputs are made before the first is written, so that an error leaves none half done."""
    outputs: list[tuple[str, str]] = []
    if options.json:
        document = json_report(report)
        if before is not None:
            document["compare"] = compare_json(before, report)
        outputs.append((options.json, json.dumps(document, indent=1) + "\n"))
    if options.csv:
        outputs.append((options.csv, csv_report(report)))
    if options.svg:
        outputs.append((options.svg, svg_picture(report)))
    if options.html:
        outputs.append((options.html, html_page(report, comparison)))
    reports = [report] if before is None else [report, before]
    inputs = {Path(source.path).resolve() for read in reports for source in read.sources}
    for path, _ in outputs:
        if path != "-" and Path(path).resolve() in inputs:
            raise BadTrace(f"{path}: is one of the traces and would be overwritten; name another output file.")
    for path, text in outputs:
        if path == "-":
            print(text, end="")
        else:
            Path(path).write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profile_bubbles", description="Where the GPU time of an RL job went.", allow_abbrev=False
    )
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help=".sqlite, .nsys-rep, .json, .json.gz, or a folder of them")
    add("--compare", action="append", metavar="OTHER", help="a trace or folder to compare with (before); may repeat")
    add("--json", metavar="F", help="write everything as JSON")
    add("--csv", metavar="F", help="write stage x step x GPU as CSV")
    add("--svg", metavar="F", help="draw timeline lanes and stacked bars")
    add("--html", metavar="F", help="write one self-contained page")
    add(
        "--window", choices=("common", "span"), default="common", help="one window for all GPUs, or each GPU's own span"
    )
    add("--node", action="append", default=[], metavar="NAME", help="name of the host: NAME, or FILE=NAME; may repeat")
    add("--offset", action="append", default=[], metavar="FILE=SEC", help="add seconds to a file's clock; may repeat")
    add("--align", choices=("nccl",), help="align the hosts' clocks by the ends of collectives")
    add("--stages", action="append", default=[], metavar="REGEX=NAME", help="ranges that are a stage; may repeat")
    return parser


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a name shows the rest
    sys.exit(main())
