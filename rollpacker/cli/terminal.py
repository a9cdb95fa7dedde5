"""What the commands share of the terminal: a config on the command line, a console, a table."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

_WIDTH = 120


def add_config_arguments(parser: argparse.ArgumentParser, *, example: str, override: str) -> None:
    """Declare CONFIG, its overrides and --debug; `example` and `override` are shown in the help."""
    parser.add_argument("config", metavar="CONFIG", help=f"YAML file, for example {example}")
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        help=f"override a key ({override}), or lay another file on top (configs/recipes/dapo.yaml)",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback for configuration errors too")


def columns(*titles: str) -> Table:
    """An empty table: the first column to the left, titled ones to the right."""
    table = Table(box=SIMPLE)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number and title else "left")
    return table


def open_console(stream: TextIO | None = None) -> Console:
    """Plain text on `stream` (standard output), as wide as the terminal, or of a fixed width where there is none."""
    stream = stream or sys.stdout
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if is_terminal else _WIDTH,
        highlight=False,
        emoji=False,
        markup=False,
        soft_wrap=False,
    )
