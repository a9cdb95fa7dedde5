"""`rollpacker`: one sub-command, one file. A user's mistake is one paragraph on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys

from rollpacker import __version__
from rollpacker.cli import convert, doctor, launch, paper, plan, simulate, suggest, train
from rollpacker.cli import eval as evaluate
from rollpacker.config import ConfigError
from rollpacker.config_file import is_overlay

_COMMANDS = {
    "train": train,
    "eval": evaluate,
    "simulate": simulate,
    "paper": paper,
    "suggest": suggest,
    "plan": plan,
    "launch": launch,
    "doctor": doctor,
    "convert": convert,
}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the command; the exit code."""
    parser = argparse.ArgumentParser(
        prog="rollpacker", description="Fast, exact, synchronous RL post-training of language models."
    )
    parser.add_argument("--version", action="version", version=f"rollpacker {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))
    arguments, rest = parser.parse_known_args(argv)
    has_overrides = "overrides" in arguments
    if unknown := [word for word in rest if not (has_overrides and _is_for_the_config(word))]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if has_overrides:
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        return int(_COMMANDS[arguments.command].run(arguments))
    except ConfigError as error:
        if arguments.debug:
            raise
        sys.stderr.write(f"rollpacker {arguments.command}: {error}\n")
        return 2


def _is_for_the_config(word: str) -> bool:
    """section.key=value, or a file to lay on the config: both may stand after an option, too."""
    return not word.startswith("-") and ("=" in word or is_overlay(word))
