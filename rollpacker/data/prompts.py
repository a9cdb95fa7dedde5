"""Prompt files -> examples, and the order in which their prompts are drawn.

`load_examples` reads and tokenizes once, at start; each mistake of the data is a ConfigError with file and line.
`PromptOrder` gives the fresh prompts of each step. It is pure: the same seed gives the same order on every machine and
in every process, however the draws are split, so all ranks draw for themselves and agree.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import random
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollpacker.config import ConfigError
from rollpacker.data.tasks import Example, Tokenizer, encode_row, parse_row
from rollpacker.types import Prompt


@dataclass(frozen=True)
class PromptDataset:
    """The examples that fit, in file order, the same by prompt id, and how many were left out as too long."""

    examples: list[Example]
    by_id: dict[str, Example]
    num_overlong: int


def load_examples(
    files: Sequence[str | Path], tokenizer: Tokenizer, *, max_prompt_length: int, key: str = "data.train_files"
) -> PromptDataset:
    """Read .jsonl files, one JSON object a line, and leave out prompts of more than `max_prompt_length` tokens.

    `key` is the config key that lists the files. A row without an id is called `<file stem>:<line>`. Raises ConfigError for
    whatever is wrong with a file or a row, for an id that stands twice, and where no prompt is short enough.
    """
    examples: list[Example] = []
    seen: dict[str, str] = {}
    shortest: int | None = None
    paths = [Path(file) for file in files]
    for path, label in zip(paths, _labels(paths, key), strict=True):
        for number, raw in _rows(path, key):
            where = f"{path}:{number}"
            row = parse_row(raw, where)
            prompt_id = row.prompt_id or f"{label}:{number}"
            if prompt_id in seen:
                raise ConfigError(
                    f"{where}: id={prompt_id!r} already names the row at {seen[prompt_id]}: expected an id that stands "
                    "once in all files. Rename one, or leave 'id' out and rows are named by file and line."
                )
            seen[prompt_id] = where
            example = encode_row(row, tokenizer, prompt_id=prompt_id, where=where)
            shortest = min(len(example.token_ids), shortest or len(example.token_ids))
            if len(example.token_ids) <= max_prompt_length:
                examples.append(example)
    if not examples:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: all {len(seen)} prompts are longer than data.max_prompt_length="
            f"{max_prompt_length} tokens; the shortest has {shortest}. Raise data.max_prompt_length."
        )
    return PromptDataset(examples, {e.prompt_id: e for e in examples}, num_overlong=len(seen) - len(examples))


def _labels(paths: Sequence[Path], key: str) -> list[str]:
    """Name each file in default prompt ids: by its stem, or by as much of the path's end as tells all files apart."""
    resolved: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in resolved:
            raise ConfigError(f"{key}: {path} is the same file as {resolved[path.resolve()]}: list each file once.")
        resolved[path.resolve()] = path
    labels = [path.stem for path in paths]
    num_parts = 1
    while len(set(labels)) < len(paths):
        labels = ["/".join(path.absolute().parts[-num_parts:]) for path in paths]
        num_parts += 1
    return labels


def _rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the JSON object of each line that is not blank."""
    num_rows = 0
    try:
        with path.open("rb") as stream:
            # Binary lines end at \n alone; text lines would also end at the line separators a JSON string may hold.
            for number, line in enumerate(stream, start=1):
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if content.strip():
                    num_rows += 1
                    yield number, _parse_line(content, f"{path}:{number}")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key}: {path}: no such file. Relative paths start at the working directory, {Path.cwd()}."
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{key}: {path} is a directory: expected a .jsonl file; list the files in it.") from error
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}.") from error
    if num_rows == 0:
        raise ConfigError(f"{key}: {path} is empty: expected one JSON object per line.")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start} of the line, 0x{line[error.start]:02x}, is not UTF-8: expected a .jsonl text "
            "file. Convert it to UTF-8 (or to .jsonl, if it is a compressed or binary file)."
        ) from error
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not valid JSON, {error.msg} at column {error.colno} of {_shortened(text)}: expected one JSON "
            "object per line, on one line."
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, or brackets as deep
        raise ConfigError(f"{where}: JSON that Python cannot hold: {error}. Simplify or delete the row.") from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: found {_shortened(text)}: expected one JSON object per line, {{...}}. "
            "A file that is one JSON list must be rewritten with one element per line."
        )
    return row


def _shortened(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


class PromptOrder:
    """The resumable, seeded order of fresh prompts.

    Invariants: each epoch gives every prompt once; the order depends on (seed, epoch) alone and not on how draws were
    split; prompts that were put back come first, in the order in which they were put.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[str, tuple[int, ...], str]] | Sequence[Example],
        *,
        seed: int,
        shuffle: bool,
        total_epochs: int | None,
    ) -> None:
        """Take the prompts as examples or as (prompt_id, token_ids, domain); `total_epochs=None` never ends."""
        self._rows = [(p.prompt_id, p.token_ids, p.domain) if isinstance(p, Example) else p for p in prompts]
        self._index = {prompt_id: i for i, (prompt_id, _, _) in enumerate(self._rows)}
        if not self._rows:
            raise ValueError("PromptOrder needs at least one prompt.")
        if len(self._index) < len(self._rows):
            raise ValueError("PromptOrder needs prompts with distinct ids.")
        if total_epochs is not None and total_epochs < 1:
            raise ValueError(f"total_epochs={total_epochs}: must be at least 1, or None for an endless order.")
        self._seed = seed
        self._shuffle = shuffle
        self._total_epochs = total_epochs
        self._front: deque[Prompt] = deque()
        self._epoch = 0
        self._position = 0  # of the next prompt in the epoch's order; below the number of prompts
        self._epoch_order: tuple[int, list[int]] | None = None

    def draw(self, n: int) -> list[Prompt]:
        """Give the next `n` prompts; fewer, down to none, only when `total_epochs` are used up."""
        if n < 0:
            raise ValueError(f"draw({n}): the number of prompts cannot be negative.")
        drawn = [self._front.popleft() for _ in range(min(n, len(self._front)))]
        while len(drawn) < n and (self._total_epochs is None or self._epoch < self._total_epochs):
            taken = self._order()[self._position : self._position + n - len(drawn)]
            drawn += [self._prompt(index, self._epoch) for index in taken]
            self._position += len(taken)
            if self._position == len(self._rows):
                self._epoch, self._position = self._epoch + 1, 0
        return drawn

    def num_left(self) -> int | None:
        """Count the prompts that can still be drawn; None where the order is endless."""
        if self._total_epochs is None:
            return None
        fresh = (self._total_epochs - self._epoch) * len(self._rows) - self._position
        return len(self._front) + max(fresh, 0)  # a resumed run may allow fewer epochs than it has behind it

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        """Put drawn prompts back: the next draws give them first, `prompts[0]` foremost, with their first epoch."""
        for prompt in prompts:
            if prompt.prompt_id not in self._index:
                raise ValueError(f"prompt {prompt.prompt_id!r} was not drawn from this order.")
        self._front.extendleft(reversed(prompts))

    def state_dict(self) -> dict[str, Any]:
        """Give the position in the order as plain JSON values; prompts are named by id, not copied."""
        return {
            "fingerprint": self._fingerprint,
            "num_prompts": len(self._rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "front": [[prompt.prompt_id, prompt.epoch] for prompt in self._front],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError where it belongs to other prompts or another order of them.

        `total_epochs` may differ from the run that saved; training on is the reason to raise it.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                f"the prompts changed since the checkpoint: it was saved with {state['num_prompts']} prompts of "
                f"fingerprint {state['fingerprint'][:12]}, now {len(self._rows)} of {self._fingerprint[:12]}. "
                "Restore data.train_files, data.max_prompt_length and the tokenizer of model.path, or start anew."
            )
        for name, now in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != now:
                raise ConfigError(
                    f"data.{name}={now}, but the checkpoint was saved with {state[name]}: another order would repeat "
                    f"some prompts of the epoch and skip others. Set data.{name}={state[name]}, or start anew."
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._front = deque(self._prompt(self._index[prompt_id], epoch) for prompt_id, epoch in state["front"])

    @cached_property
    def _fingerprint(self) -> str:
        """Digest of ids, tokens and domains, the same on machines of any byte order."""
        digest = hashlib.sha256()
        for prompt_id, token_ids, domain in self._rows:
            names = f"{prompt_id}\n{domain}".encode(errors="surrogatepass")
            digest.update(struct.pack(f"<2q{len(token_ids)}q", len(names), len(token_ids), *token_ids))
            digest.update(names)
        return digest.hexdigest()

    def _order(self) -> list[int]:
        """Give the current epoch's permutation of the prompts."""
        if self._epoch_order is None or self._epoch_order[0] != self._epoch:
            order = list(range(len(self._rows)))
            if self._shuffle:
                # A text seed goes through SHA-512, not through hash(), so every process draws the same.
                random.Random(f"rollpacker prompts, seed {self._seed}, epoch {self._epoch}").shuffle(order)
            self._epoch_order = (self._epoch, order)
        return self._epoch_order[1]

    def _prompt(self, index: int, epoch: int) -> Prompt:
        prompt_id, token_ids, domain = self._rows[index]
        return Prompt(prompt_id, token_ids, domain, epoch)
