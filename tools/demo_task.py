"""The demo's task: the remainder of a division by repeated subtraction, every intermediate value written out.

    prompt 47%6=      response 41,35,29,23,17,11,05#5

A response needs as many steps as the quotient, and the quotient is Pareto distributed: a long tail of
lengths is part of the problem, and a model of a million parameters on a CPU shows it. This file holds what
the data rows, the warm start and the reward have to agree on. `score` is the trainer's `reward.function`.
Standard library only.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

CHARACTERS = "0123456789%=,#"  # all that prompts and solutions are written with

# The law of the number of steps. With these values the median is 2 steps and one problem in 70 has 40.
PARETO_MINIMUM = 1.5
PARETO_ALPHA = 1.3
MAX_STEPS = 40
MAX_DIVISOR = 5
DIVIDEND_BOUND = 100  # dividends are below it, so two digits always do and all prompts have one length

_SEED_OFFSETS = {"train.jsonl": 1_000_003, "val.jsonl": 2_000_003}  # apart from each other and the warm start
_MAX_DRAWS = 200_000  # of validation problems; 64 unseen ones take 3,000

CARELESS = 0.25  # how often the teacher of the warm start gets a subtraction wrong

_RESPONSE = re.compile(r"(?P<steps>[0-9]+(?:,[0-9]+)*)#(?P<remainder>[0-9]+)")


class Problem(NamedTuple):
    """Find the remainder of the dividend `n` divided by `d`."""

    n: int
    d: int


def draw_problem(rng: random.Random) -> Problem:
    """Draw the number of steps from the Pareto law, then a divisor and a dividend that need so many."""
    num_steps = int(PARETO_MINIMUM * (1.0 - rng.random()) ** (-1.0 / PARETO_ALPHA))
    num_steps = max(1, min(MAX_STEPS, num_steps))
    fitting = [d for d in range(2, MAX_DIVISOR + 1) if d * (num_steps + 1) <= DIVIDEND_BOUND]
    d = rng.choice(fitting)
    return Problem(d * num_steps + rng.randrange(d), d)


def prompt_text(n: int, d: int) -> str:
    """Write the question, for example `47%6=`."""
    return f"{n:02d}%{d}="


def solution_text(n: int, d: int, rng: random.Random | None = None, careless: float = 0.0) -> str:
    """Write a teacher's response, without the end-of-sequence token: `41,35,29,23,17,11,05#5`.

    With probability `careless`, drawn from `rng`, a subtraction takes 1 to 4 too much and the rest goes on
    from the wrong value. A model taught so knows the procedure and yet fails often: the headroom RL needs.
    """
    steps = []
    while n >= d:
        n -= d
        if rng is not None and rng.random() < careless:
            n = max(0, n - rng.randint(1, 4))
        steps.append(f"{n:02d}")
    return ",".join(steps) + f"#{n}"


def answer_text(n: int, d: int) -> str:
    """Write the ground truth that `score` is given: quotient#remainder, `7#5` for 47%6."""
    return f"{n // d}#{n % d}"


def score(response: str, *, prompt: str, ground_truth: str, finish_reason: str, **unused: Any) -> float:
    """Give 1.0 for the right remainder after as many steps as the quotient, if the response ended itself.

    Anything else gives 0.0. The remainder alone could be guessed, one time in d, so the steps are counted;
    their values are not judged.
    """
    del prompt, unused  # the ground truth says it all
    return float(finish_reason == "stop" and extract_answer(response) == ground_truth)


def extract_answer(response: str) -> str | None:
    """Read quotient#remainder, `7#5`, out of a response; None where it is not of that form. For the vote of maj@k."""
    found = _RESPONSE.fullmatch(response)
    return found and f"{found['steps'].count(',') + 1}#{found['remainder']}"


def data_rows(num_rows: int, seed: int) -> Iterator[dict[str, str]]:
    """Give the rows of a prompt file, the same for the same seed; short problems are few, so rows repeat."""
    rng = random.Random(seed)
    for _ in range(num_rows):
        problem = draw_problem(rng)
        yield {"prompt": prompt_text(*problem), "answer": answer_text(*problem)}


def unseen_rows(num_rows: int, seed: int, known: set[str]) -> Iterator[dict[str, str]]:
    """Give `num_rows` different problems drawn by the same law, none of whose prompts is in `known`.

    Raises ValueError where the problems that are left do not suffice.
    """
    taken = set(known)
    rows = data_rows(_MAX_DRAWS, seed)
    for num_found in range(num_rows):
        row = next((row for row in rows if row["prompt"] not in taken), None)
        if row is None:
            raise ValueError(f"{num_rows} unseen rows: only {num_found} problems are not among the training prompts.")
        taken.add(row["prompt"])
        yield row


def val_rows(num_rows: int, seed: int, known: set[str]) -> Iterator[dict[str, str]]:
    """Give validation rows in two domains: three quarters "seen", as often as the law has them, and a quarter "unseen".

    There are fewer than 400 problems, so training has all short ones: what it has not is held out, and long.
    """
    num_unseen = num_rows // 4
    seen = (row for row in data_rows(_MAX_DRAWS, seed) if row["prompt"] in known)
    yield from ({**row, "domain": "seen"} for row in itertools.islice(seen, num_rows - num_unseen))
    yield from ({**row, "domain": "unseen"} for row in unseen_rows(num_unseen, seed, known))


def write_files(folder: Path, num_train: int, num_val: int, seed: int) -> None:
    """Write the prompt files of a seed: `train.jsonl`, and `val.jsonl` with other draws of the same law."""
    train = list(data_rows(num_train, _SEED_OFFSETS["train.jsonl"] + seed))
    val = val_rows(num_val, _SEED_OFFSETS["val.jsonl"] + seed, {row["prompt"] for row in train})
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "val.jsonl", val)


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows to `path` as JSON lines."""
    lines = (json.dumps(row) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
