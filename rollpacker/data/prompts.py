"""Prompt files -> examples, and the order in which their prompts are drawn.

`load_examples` reads and tokenizes once, at start; each mistake of the data is a ConfigError with file and row.
`PromptOrder` gives the fresh prompts of each step. It is pure: the same seed gives the same order on every machine and
in every process, however the draws are split, so all ranks draw for themselves and agree.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollpacker.config import Config, ConfigError
from rollpacker.data.domains import check_domains, interleave
from rollpacker.data.files import read_rows
from rollpacker.data.tasks import COLUMNS, Example, Tokenizer, encode_row, parse_row
from rollpacker.types import Prompt


@dataclass(frozen=True)
class PromptDataset:
    """The examples to draw from, in file order, and the same by prompt id.

    `num_overlong` prompts were left out as too long, `num_unweighted` because their domain has weight 0.
    """

    examples: list[Example]
    by_id: dict[str, Example]
    num_overlong: int
    num_unweighted: int = 0

    @cached_property
    def num_by_domain(self) -> dict[str, int]:
        """How many examples each domain has, the largest first."""
        return dict(Counter(example.domain for example in self.examples).most_common())


def load_examples(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    key: str = "data.train_files",
    domains: Mapping[str, float] | None = None,
) -> PromptDataset:
    """Read .jsonl and .parquet files and leave out prompts of more than `max_prompt_length` tokens.

    A row without an id is called `<file stem>:<row>`. `key` is the config key that lists the files. With `domains`
    (data.domains) those of weight 0 are left out, too. Raises ConfigError for whatever is wrong with a file or a row,
    for an id that stands twice, where no prompt is short enough, and where `domains` are not those of the prompts.
    """
    examples: list[Example] = []
    seen: dict[str, str] = {}
    shortest: int | None = None
    paths = [Path(file) for file in files]
    for path, label in zip(paths, _labels(paths, key), strict=True):
        for number, where, columns in read_rows(path, key=key, columns=COLUMNS):
            row = parse_row(columns, where)
            prompt_id = row.prompt_id or f"{label}:{number}"
            if prompt_id in seen:
                raise ConfigError(
                    f"{where}: id={prompt_id!r} already names the row at {seen[prompt_id]}: expected an id that stands "
                    "once in all files. Rename one, or leave 'id' out and rows are named by file and row."
                )
            seen[prompt_id] = where
            example = encode_row(row, tokenizer, prompt_id=prompt_id, where=where)
            shortest = min(len(example.token_ids), shortest or len(example.token_ids))
            if len(example.token_ids) <= max_prompt_length:
                examples.append(example)
    if not examples:
        raise ConfigError(
            f"{key}: all {len(seen)} prompts of {', '.join(map(str, paths))} are longer than data.max_prompt_length="
            f"{max_prompt_length} tokens; the shortest has {shortest}. Raise data.max_prompt_length."
        )
    num_fitting = len(examples)
    if domains:
        check_domains((example.domain for example in examples), domains, key=key)
        examples = [example for example in examples if domains[example.domain] > 0]
    return PromptDataset(
        examples,
        {example.prompt_id: example for example in examples},
        num_overlong=len(seen) - num_fitting,
        num_unweighted=num_fitting - len(examples),
    )


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


class PromptOrder:
    """The resumable, seeded order of fresh prompts.

    Invariants: each epoch gives every prompt once; the order depends on (seed, epoch) alone and not on how draws were
    split; prompts that were put back come first, in the order in which they were put.

    Domain weights do not change what an epoch is: every prompt once, none twice. They say how the domains alternate
    in it (`interleave`): each domain's prompts keep the order they would have without weights, and every stretch of the
    epoch is shared out by the weights. A domain that is used up drops out, the others share the rest of the epoch by
    their own weights, and the next epoch starts with all of them again. So the weights are the mixture that is trained on
    until the first domain is used up; a run that is to keep it throughout stops there (`trainer.total_training_steps`).
    """

    def __init__(
        self,
        prompts: Sequence[tuple[str, tuple[int, ...], str]] | Sequence[Example],
        *,
        seed: int,
        shuffle: bool,
        total_epochs: int | None,
        domains: Mapping[str, float] | None = None,
    ) -> None:
        """Take the prompts as examples or as (prompt_id, token_ids, domain); `total_epochs=None` never ends.

        `domains` are the weights (data.domains): above 0 for the domain of each prompt; None or empty = as they come.
        """
        self._rows = [(p.prompt_id, p.token_ids, p.domain) if isinstance(p, Example) else p for p in prompts]
        self._index = {prompt_id: i for i, (prompt_id, _, _) in enumerate(self._rows)}
        if not self._rows:
            raise ValueError("PromptOrder needs at least one prompt.")
        if len(self._index) < len(self._rows):
            raise ValueError("PromptOrder needs prompts with distinct ids.")
        if total_epochs is not None and total_epochs < 1:
            raise ValueError(f"total_epochs={total_epochs}: must be at least 1, or None for an endless order.")
        self._domains = dict(domains or {})
        for prompt_id, _, domain in self._rows if self._domains else ():
            if self._domains.get(domain, 0) <= 0:
                raise ValueError(f"prompt {prompt_id!r} is of the domain {domain!r}, which has no weight above 0.")
        self._seed = seed
        self._shuffle = shuffle
        self._total_epochs = total_epochs
        self._front: deque[Prompt] = deque()
        self._epoch = 0
        self._position = 0  # of the next prompt in the epoch's order; below the number of prompts
        self._epoch_order: tuple[int, list[int]] | None = None

    @classmethod
    def from_config(
        cls,
        prompts: Sequence[tuple[str, tuple[int, ...], str]] | Sequence[Example],
        config: Config,
        domains: Mapping[str, float] | None = None,
    ) -> PromptOrder:
        """The order of a run."""
        return cls(
            prompts,
            seed=config.trainer.seed if config.data.seed is None else config.data.seed,
            shuffle=config.data.shuffle,
            total_epochs=None if config.trainer.total_training_steps else config.trainer.total_epochs,
            domains=domains,
        )

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

    def prompt(self, prompt_id: str, epoch: int) -> Prompt:
        """A prompt that was drawn, found again by its name."""
        return self._prompt(self._index[prompt_id], epoch)

    def state_dict(self) -> dict[str, Any]:
        """Give the position in the order as plain JSON values; prompts are named by id, not copied."""
        return {
            "fingerprint": self._fingerprint,
            "num_prompts": len(self._rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "domains": self._domains,
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
                "Restore data.train_files, data.max_prompt_length, the domains of weight 0 in data.domains and the "
                "tokenizer of model.path, or start anew."
            )
        for name, now in (("seed", self._seed), ("shuffle", self._shuffle), ("domains", self._domains)):
            if state[name] != now:
                raise ConfigError(
                    f"data.{name}={now}, but the checkpoint was saved with {state[name]}: another order would repeat "
                    f"some prompts of the epoch and skip others. Set data.{name}={state[name]}, or start anew."
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._front = deque(self.prompt(prompt_id, epoch) for prompt_id, epoch in state["front"])

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
        """Give the current epoch's permutation of the prompts, with weights one in which the domains alternate."""
        if self._epoch_order is None or self._epoch_order[0] != self._epoch:
            order = list(range(len(self._rows)))
            if self._shuffle:
                # A text seed goes through SHA-512, not through hash(), so every process draws the same.
                random.Random(f"rollpacker prompts, seed {self._seed}, epoch {self._epoch}").shuffle(order)
            if self._domains:
                order = interleave(order, [domain for _, _, domain in self._rows], self._domains)
            self._epoch_order = (self._epoch, order)
        return self._epoch_order[1]

    def _prompt(self, index: int, epoch: int) -> Prompt:
        prompt_id, token_ids, domain = self._rows[index]
        return Prompt(prompt_id, token_ids, domain, epoch)
