"""What a validation says of a model: avg@k, maj@k and pass@k over n sampled responses per prompt. Pure arithmetic.

Each is computed per prompt and then averaged over the prompts of a domain, and over all prompts where there are several
domains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALL_DOMAINS = "all"
CORRECT = 1.0
"""A response is correct for pass@k from this score on; a partial score counts in avg@k and maj@k, and not here."""


@dataclass(frozen=True)
class Attempt:
    """A response as the metrics see it. `answer` is None where none could be extracted (the reward failed)."""

    score: float
    answer: str | None


def average(attempts: Sequence[Attempt]) -> float:
    """The mean score."""
    return math.fsum(a.score for a in attempts) / len(attempts)


def majority(attempts: Sequence[Attempt]) -> float:
    """The score of the answer that most responses give; of tied answers, the expected score of a fair draw among them.

    Answers are compared as text. An answer's score is the mean over the responses that give it, since a reward may judge
    more than the answer. A response without an answer votes for one that nobody shares.
    """
    scores: dict[str | int, list[float]] = {}
    for number, attempt in enumerate(attempts):
        scores.setdefault(number if attempt.answer is None else attempt.answer, []).append(attempt.score)
    most = max(len(votes) for votes in scores.values())
    tied = [math.fsum(votes) / most for votes in scores.values() if len(votes) == most]
    return math.fsum(tied) / len(tied)


def pass_at(k: int, num_attempts: int, num_correct: int) -> float:
    """The probability that k of n responses, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374).
    """
    if not 1 <= k <= num_attempts or not 0 <= num_correct <= num_attempts:
        raise ValueError(f"pass@{k} of {num_attempts} responses, {num_correct} of them correct: expected k, c <= n.")
    return 1.0 - math.comb(num_attempts - num_correct, k) / math.comb(num_attempts, k)


def pass_sizes(num_attempts: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range((num_attempts - 1).bit_length())), num_attempts]


def val_core(groups: Sequence[tuple[str, Sequence[Attempt]]], num_attempts: int) -> dict[str, float]:
    """The `val-core/<domain>/*` metrics of (domain, the `num_attempts` responses of a prompt) pairs, domains in order."""
    by_domain: dict[str, list[Sequence[Attempt]]] = {}
    for domain, attempts in groups:
        by_domain.setdefault(domain, []).append(attempts)
    if len(by_domain) > 1:
        by_domain[ALL_DOMAINS] = [attempts for _, attempts in groups]
    return {
        f"val-core/{domain}/{name}": math.fsum(values) / len(values)
        for domain, prompts in by_domain.items()
        for name, values in _per_prompt(prompts, num_attempts)
    }


def _per_prompt(prompts: Sequence[Sequence[Attempt]], n: int) -> Iterator[tuple[str, list[float]]]:
    yield f"avg@{n}", [average(attempts) for attempts in prompts]
    yield f"maj@{n}", [majority(attempts) for attempts in prompts]
    num_correct = [sum(a.score >= CORRECT for a in attempts) for attempts in prompts]
    for k in pass_sizes(n):
        yield f"pass@{k}", [pass_at(k, n, c) for c in num_correct]
