"""Domain weights (`data.domains`): which prompts take part, and how those of several domains alternate in an epoch.

Pure arithmetic, no draws: the alternation is the Webster rule of apportionment, so that not only long stretches but
every batch is close to the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rollpacker.config import ConfigError


def check_domains(domains: Iterable[str], weights: Mapping[str, float], *, key: str) -> None:
    """Raise ConfigError unless `weights` (data.domains) name exactly the `domains` of the prompts of config key `key`."""
    counts = Counter(domains)
    found = ", ".join(f"{name!r} ({count} prompts)" for name, count in counts.most_common(20))
    for name in weights:
        if name not in counts:
            raise ConfigError(
                f"data.domains names {name!r}, but no prompt of {key} that is short enough has that domain; there are "
                f"{found}. Correct the name, or delete it."
            )
    for name in counts:
        if name not in weights:
            raise ConfigError(
                f"data.domains does not name {name!r}, the domain of {counts[name]} prompts of {key}; there are "
                f"{found}. Give it a weight; 0 leaves it out."
            )


def interleave(order: Sequence[int], domains: Sequence[str], weights: Mapping[str, float]) -> list[int]:
    """Rearrange `order`, indices of `domains`, so that the domains alternate by weight; within one, order stays.

    The r-th prompt of a domain (r = 0, 1, ...) comes at the time (r + 1/2) / weight. By time t each domain has then
    given round(t * weight) prompts, so among the first n prompts the count of one of k domains is within
    (1 + s * (k - 2)) / 2 of n * s, where s is its weight's share of the sum. This holds until a domain is used up;
    from there on it holds for the others among themselves. Every index stays, once.
    """
    ranks: Counter[str] = Counter()
    times: list[tuple[float, int]] = []
    for place, index in enumerate(order):
        domain = domains[index]
        times.append((_time(ranks[domain], weights[domain]), place))
        ranks[domain] += 1
    return [order[place] for _, place in sorted(times)]


def first_exhausted(counts: Mapping[str, int], weights: Mapping[str, float]) -> tuple[str, int]:
    """Name the domain that is used up first in an epoch, and how many prompts of all domains have come by then.

    Those of other domains that come at the very same time as its last one are counted, too.
    """
    ends = {domain: _time(count - 1, weights[domain]) for domain, count in counts.items()}
    first = min(ends, key=lambda domain: ends[domain])
    return first, sum(_time(rank, weights[d]) <= ends[first] for d, count in counts.items() for rank in range(count))


def _time(rank: int, weight: float) -> float:
    return (rank + 0.5) / weight
