"""Measured response lengths by prompt: CSV files, and the samples.jsonl of a run directory.

CSV: a header that names the columns in any order, one prompt a row. `response_tokens` is required (its responses, separated
by spaces); `prompt`, `prompt_tokens` and `correct` (0 or 1 for each response) are optional; others are ignored.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import ConfigError

_KEY = "workload.lengths_file"


@dataclass(frozen=True)
class MeasuredPrompt:
    """The responses of one prompt; `correct` is None where the file does not say, `prompt_tokens` likewise."""

    name: str
    response_tokens: tuple[int, ...]
    prompt_tokens: int | None
    correct: tuple[bool, ...] | None


def read_lengths(path: str) -> list[MeasuredPrompt]:
    """The prompts of a CSV or samples.jsonl file, in its order, with distinct names.

    Raises ConfigError that names the file and the line of whatever is malformed.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "samples.jsonl"
    try:
        prompts = _read_samples(file) if file.suffix == ".jsonl" else _read_csv(file)
    except OSError as error:
        raise ConfigError(f"{_KEY}={path}: cannot read {file} ({error.strerror}).") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{_KEY}={path}: not a text file of prompts: {error}.") from error
    if not prompts:
        raise ConfigError(f"{_KEY}={path}: there is no prompt in it; expected one a line.")
    return _with_distinct_names(prompts)


def _read_csv(file: Path) -> list[MeasuredPrompt]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        if "response_tokens" not in (reader.fieldnames or ()):
            raise ConfigError(
                f"{_KEY}={file}, line 1: the header {','.join(reader.fieldnames or ['(empty)'])} has no column "
                "response_tokens (token counts of a prompt's responses, separated by spaces)."
            )
        return [_csv_prompt(row, f"{_KEY}={file}, line {reader.line_num}", reader.line_num) for row in reader]


def _csv_prompt(row: dict[str | Any, Any], where: str, line: int) -> MeasuredPrompt:
    if None in row:
        raise ConfigError(
            f"{where}: more cells than the header has columns; is a list separated by commas, not spaces?"
        )
    lengths = _whole_numbers(row["response_tokens"], where, "response_tokens", at_least=1)
    correct = None
    if row.get("correct") is not None:
        correct = _whole_numbers(row["correct"], where, "correct", at_least=0)
        if len(correct) != len(lengths) or max(correct) > 1:
            raise ConfigError(
                f"{where}: correct={row['correct']!r} must hold 0 or 1 for each of the {len(lengths)} responses."
            )
    prompt_tokens = None
    if row.get("prompt_tokens"):
        prompt_tokens, *more = _whole_numbers(row["prompt_tokens"], where, "prompt_tokens", at_least=1)
        if more:
            raise ConfigError(f"{where}: prompt_tokens={row['prompt_tokens']!r}: a prompt has one length.")
    name = row.get("prompt") or f"line {line}"
    return MeasuredPrompt(name, lengths, prompt_tokens, None if correct is None else tuple(map(bool, correct)))


def _whole_numbers(text: str | None, where: str, column: str, *, at_least: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in (text or "").split())
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < at_least:
        raise ConfigError(
            f"{where}: {column}={text!r}: expected whole numbers from {at_least} on, separated by spaces."
        )
    return numbers


def _read_samples(file: Path) -> list[MeasuredPrompt]:
    """Group the rows of a run's samples by prompt and step: what was sampled by one policy."""
    groups: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
                sample = int(row["num_response_tokens"]), int(row["num_prompt_tokens"]), float(row["reward"])
                if sample[0] < 1:
                    raise ValueError("num_response_tokens below 1")
                groups.setdefault((str(row["prompt_id"]), int(row["step"])), []).append(sample)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{_KEY}={file}, line {number}: not a row of samples.jsonl ({type(error).__name__}: {error})."
                ) from None
    return [
        MeasuredPrompt(
            name,
            tuple(n for n, _, _ in samples),
            samples[0][1] or None,
            tuple(reward >= 1 for _, _, reward in samples),
        )
        for (name, _), samples in groups.items()
    ]


def _with_distinct_names(prompts: Sequence[MeasuredPrompt]) -> list[MeasuredPrompt]:
    """A prompt that was measured more than once stands for as many prompts."""
    counts: dict[str, int] = {}
    named = []
    for prompt in prompts:
        counts[prompt.name] = count = counts.get(prompt.name, 0) + 1
        name = prompt.name if count == 1 else f"{prompt.name}~{count}"
        named.append(MeasuredPrompt(name, prompt.response_tokens, prompt.prompt_tokens, prompt.correct))
    return named
