"""How a config key is declared; the sections are in config.py and config_simulator.py."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    """Declare a config key: its default, one sentence of help with the unit, and the values it admits."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)
