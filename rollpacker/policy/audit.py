"""SampleAudit: what the race did to the law of the trained samples, measured in every run.

Audit groups are prompts drawn by a seeded hash before launch that run without any race and are trained like the rest, so
they show the law that training should see. Every statistic compares the trained samples with them:

- ICC = B / (B + S_W), B = S_B - S_W / R0, of log length: the share of length that belongs to the prompt (S_W the mean
  variance within groups, S_B the variance of group means). Near 1 a race only reorders; near 0 it truncates.
- coverage c(q) = P_trained(L > Q_audit(q)) / (1 - q): what is left of the long responses.
- own-prompt coverage o(q), the same for r = log L - (mean log L of the group's other responses): a race between the
  responses of a prompt takes each prompt's own longest ones, which c(q) hides where prompts differ much.

A quantile that falls on tied values takes the fraction of them that makes the audit groups' own coverage 1; most ties
are responses at the cap. r is kept in bins of 1/256, whose members count as tied.

Invariants: counts only, so that a restored audit goes on bit for bit; nothing is reported from fewer than 32 audit
groups; groups that a filter rejected are in neither sample, so a filter does not look like a race.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.messages import AuditReport
from rollpacker.types import Group, Prompt

MIN_GROUPS = 32
_BINS = 256  # per unit of log length
_TOO_LOW = 0.8
_Z = 1.96


@dataclass(frozen=True)
class Coverage:
    """An estimate and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_biased(self) -> bool:
        """Below 0.8, and not by chance: the interval excludes 1."""
        return self.value < _TOO_LOW and self.high < 1.0


class SampleAudit:
    """Collects trained groups and compares them with the audit groups among them."""

    def __init__(self, *, fraction: float, seed: int) -> None:
        """`fraction` of the prompts are audited; 1 where there is no race, and so every group shows the law."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction}: expected a share of the prompts, within [0, 1].")
        self._threshold = fraction * 2.0**64
        self._seed = seed
        self._trained = _Lengths()
        self._audited = _Lengths()

    def is_audited(self, prompt: Prompt) -> bool:
        """Whether the prompt was drawn for the audit: a function of run seed, prompt and epoch."""
        text = f"audit/{self._seed}/{prompt.prompt_id}/{prompt.epoch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") < self._threshold

    def add_trained(self, groups: Iterable[Group]) -> None:
        """Fold in what a step trains."""
        for group in groups:
            lengths = [r.num_tokens for r in group.responses]
            self._trained.add(lengths)
            if self.is_audited(group.prompt):
                self._audited.add(lengths)

    def icc(self) -> float | None:
        """Share of the variance of log length that lies between prompts; slightly negative by chance where it is 0.

        None where it cannot be told: too few groups, groups of one response, or no variance at all.
        """
        audited = self._audited
        if audited.num_groups < MIN_GROUPS or audited.group_size < 2:
            return None
        within = audited.sum_within / audited.num_groups
        spread = audited.sum_squared_mean - audited.sum_mean**2 / audited.num_groups
        between = spread / (audited.num_groups - 1) - within / audited.group_size
        return between / (between + within) if between + within > 1e-12 else None

    def coverage(self, q: float) -> Coverage | None:
        """c(q), the share of the responses above the q-quantile of all lengths that training still sees."""
        # Responses of a group are alike: they count as fewer independent ones, by the usual design effect.
        return self._compare(self._audited.lengths, self._trained.lengths, q, max(self.icc() or 0.0, 0.0))

    def own_coverage(self, q: float) -> Coverage | None:
        """o(q), the same above the q-quantile of each prompt's own lengths; its deviations are not alike in a group."""
        return self._compare(self._audited.deviations, self._trained.deviations, q, 0.0)

    def report(self) -> AuditReport:
        """Everything for the metrics, with a warning where the race truncates."""
        pooled = {q: self.coverage(q) for q in (0.5, 0.9, 0.95, 0.99)}
        own = self.own_coverage(0.95)
        p50, p90, p95, p99 = (c.value if c else None for c in pooled.values())
        return AuditReport(
            num_groups=self._audited.num_groups,
            icc=self.icc(),
            coverage_p50=p50,
            coverage_p90=p90,
            coverage_p95=p95,
            coverage_p99=p99,
            own_coverage_p95=own.value if own else None,
            warning=_warning(pooled[0.95], own),
        )

    def _compare(self, audited: Counter[int], trained: Counter[int], q: float, icc: float) -> Coverage | None:
        sizes, groups = self._audited.group_size, self._audited.num_groups
        if groups < MIN_GROUPS or not audited or not trained:
            return None
        tail = 1.0 - q
        value = _exceedance(trained, *_threshold(audited, tail)) / tail
        effect = 1.0 + (sizes - 1) * icc
        num_audited, num_trained = audited.total() / effect, trained.total() / effect
        # log ratio of two proportions near `tail`; a zero count is taken as half a response
        seen = max(value * tail, 0.5 / num_trained)
        variance = (1.0 - tail) / (tail * num_audited) + (1.0 - seen) / (seen * num_trained)
        factor = math.exp(_Z * math.sqrt(variance))
        return Coverage(value, value / factor, max(value, seen / tail) * factor)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"trained": self._trained.state_dict(), "audited": self._audited.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved audit."""
        self._trained.load_state_dict(state["trained"])
        self._audited.load_state_dict(state["audited"])


class _Lengths:
    """Lengths of groups: how often each length and each own-prompt deviation occurred, and sums for the ICC."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        self.deviations: Counter[int] = Counter()  # in bins
        self.num_groups = 0
        self.num_responses = 0
        self.sum_within = 0.0
        self.sum_mean = 0.0
        self.sum_squared_mean = 0.0

    @property
    def group_size(self) -> float:
        """Responses per group."""
        return self.num_responses / max(self.num_groups, 1)

    def add(self, lengths: Sequence[int]) -> None:
        logs = [math.log(max(n, 1)) for n in lengths]
        total, size = sum(logs), len(logs)
        mean = total / size
        self.lengths.update(lengths)
        self.num_groups += 1
        self.num_responses += size
        self.sum_mean += mean
        self.sum_squared_mean += mean * mean
        if size > 1:
            self.sum_within += sum((x - mean) ** 2 for x in logs) / (size - 1)
            # x - (total - x) / (size - 1), the distance from the mean of the others
            self.deviations.update(round((x - mean) * size / (size - 1) * _BINS) for x in logs)

    def state_dict(self) -> dict[str, Any]:
        return {
            "lengths": sorted(self.lengths.items()),
            "deviations": sorted(self.deviations.items()),
            "num_groups": self.num_groups,
            "num_responses": self.num_responses,
            "sum_within": self.sum_within,
            "sum_mean": self.sum_mean,
            "sum_squared_mean": self.sum_squared_mean,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lengths = Counter({value: count for value, count in state["lengths"]})
        self.deviations = Counter({value: count for value, count in state["deviations"]})
        self.num_groups, self.num_responses = state["num_groups"], state["num_responses"]
        self.sum_within, self.sum_mean = state["sum_within"], state["sum_mean"]
        self.sum_squared_mean = state["sum_squared_mean"]


def _threshold(counts: Counter[int], tail: float) -> tuple[int, float]:
    """The value of which `counts` has the share `tail` above it, and the fraction of its ties that belongs to them."""
    wanted = tail * counts.total()
    above = 0
    for value in sorted(counts, reverse=True):
        if above + counts[value] >= wanted - 1e-9:
            return value, (wanted - above) / counts[value]
        above += counts[value]
    raise ValueError("no values")


def _exceedance(counts: Counter[int], threshold: int, tie_fraction: float) -> float:
    """Share of `counts` above the threshold, its ties counted with `tie_fraction`."""
    above = sum(n for value, n in counts.items() if value > threshold)
    return (above + tie_fraction * counts[threshold]) / counts.total()


def _warning(pooled: Coverage | None, own: Coverage | None) -> str | None:
    found = [
        f"{name}={c.value:.2f} (95 % interval {c.low:.2f} to {c.high:.2f})"
        for name, c in (("audit/coverage_p95", pooled), ("audit/own_coverage_p95", own))
        if c is not None and c.is_biased
    ]
    if not found:
        return None
    return (
        f"the race drops long responses: {' and '.join(found)}, where 1 is unbiased. Set tail_batching.eta_responses=1 if "
        "the own-prompt value is low, tail_batching.eta_prompts=1 or mode=off if it stays."
    )
