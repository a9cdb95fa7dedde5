"""What the prompts ask of the engines: how long each response is, and whether it is right.

A length is a function of its request's seed alone (run seed, step, prompt, response index), as the sampled noise is in a
real run: whatever replica decodes it, and whatever the others do. Two laws:

- `LognormalWorkload`, hierarchical: log length = mu_i + sigma_within e, mu_i = log median + sigma_between z_i; a share of
  hard prompts (the largest z_i) runs to the cap with a probability of its own.
- `MeasuredWorkload`: a response is drawn from those that were measured for its prompt, with replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.config import Config, ConfigError
from rollpacker.config_simulator import WorkloadConfig
from rollpacker.simulator.constants import BETA_ACCURACY
from rollpacker.simulator.lengths_file import MeasuredPrompt, read_lengths
from rollpacker.simulator.noise import AT_CAP, LENGTH, SCORE, Floats, Seeds, normal, uniform
from rollpacker.types import Request

Ints = NDArray[np.int64]

_ERFC = np.frompyfunc(math.erfc, 1, 1)
DEFAULT_NUM_STEPS = 40
"""Prompts of an epoch, in steps, where the config does not say: as in the paper's runs."""


@dataclass(frozen=True)
class LognormalLaw:
    """Lengths before the cap: see the module."""

    median_tokens: float
    sigma_within: float
    sigma_between: float
    hard_share: float = 0.0
    hard_cap_probability: float = 0.0


# Fitted to six ratios of Fig. 11 each (eta of prompts alone 1.125, 1.25, 1.5 and of responses alone), in the study that
# preceded this simulator (docs/simulator.md); "both 1.25" and the other tables are not in the fit.
PRESETS = {
    "7b_8k": LognormalLaw(541, 1.25, 0.56),
    "14b_16k": LognormalLaw(501, 1.00, 0.73, 0.32, 0.064),
    "32b_32k": LognormalLaw(352, 0.53, 0.99, 0.24, 0.134),
}


PRESET_CAPS = {"7b_8k": 8192, "14b_16k": 16384, "32b_32k": 32768}
"""`data.max_response_length` of the setting that each preset was fitted to."""


class Workload(Protocol):
    """The prompts of an epoch and the law of their responses."""

    prompts: list[tuple[str, tuple[int, ...], str]]
    position: dict[str, int]  # of each prompt id in them

    def lengths(self, requests: Sequence[Request]) -> Ints:
        """Response tokens of each request, capped."""

    def scores(self, requests: Sequence[Request], lengths: Ints) -> Floats:
        """1 where the response is right, else 0."""

    def reference(self, num_responses: int) -> Ints:
        """`num_responses` unraced lengths of each prompt, [prompts, responses]; the same in every call."""

    def survival(self, which: Ints, lengths: Ints) -> Floats:
        """The true law: the probability that a response of prompt `which[i]` is longer than `lengths[i]`."""


def build_workload(config: Config) -> Workload:
    """The workload that a config names. Raises ConfigError where it names none, or a malformed file."""
    workload = config.workload
    if workload.lengths_file is not None:
        return MeasuredWorkload(read_lengths(workload.lengths_file), config)
    return LognormalWorkload(_law(workload), config)


def _law(workload: WorkloadConfig) -> LognormalLaw:
    preset = PRESETS[workload.preset] if workload.preset else None
    names = ("median_tokens", "sigma_within", "sigma_between")
    values = {name: getattr(workload, name) for name in names}
    if preset is None and None in values.values():
        missing = [f"workload.{name}" for name, value in values.items() if value is None]
        raise ConfigError(
            f"the simulator needs the law of the response lengths: set workload.preset ({', '.join(PRESETS)}), or "
            f"workload.lengths_file to measured lengths (a CSV, or a run directory), or {', '.join(missing)}."
        )
    for name in ("hard_share", "hard_cap_probability"):
        values[name] = getattr(workload, name)
    given = {name: value for name, value in values.items() if value is not None}
    return LognormalLaw(**{**(vars(preset) if preset else {}), **given})


def intraclass_correlation(lengths: Sequence[Sequence[int]]) -> float | None:
    """ICC of log length: the share of its variance that lies between prompts; groups of one response do not count."""
    logs = [np.log(group) for group in lengths if len(group) > 1]
    if len(logs) < 2:
        return None
    within = float(np.mean([x.var(ddof=1) for x in logs]))
    size = len(logs) / sum(1 / len(x) for x in logs)
    between = float(np.var([x.mean() for x in logs], ddof=1)) - within / size
    return between / (between + within) if between + within > 0 else None


class LognormalWorkload:
    """Prompts whose lengths follow a `LognormalLaw`."""

    def __init__(self, law: LognormalLaw, config: Config) -> None:
        self._law = law
        self._cap = config.data.max_response_length
        self._seed = config.trainer.seed
        count = config.workload.num_prompts or DEFAULT_NUM_STEPS * config.data.train_batch_size
        rng = np.random.default_rng([self._seed, 0])
        z = rng.standard_normal(count)
        self._mu: Floats = math.log(law.median_tokens) + law.sigma_between * z
        hardest = NormalDist().inv_cdf(1 - law.hard_share) if law.hard_share > 0 else math.inf
        self._at_cap: Floats = np.where(z > hardest, law.hard_cap_probability, 0.0)
        self._accuracy = _accuracies(config.workload.accuracy, count, rng)
        tokens = (0,) * config.workload.prompt_tokens
        self.prompts = [(f"p{i}", tokens, "default") for i in range(count)]
        self.position = {name: i for i, (name, _, _) in enumerate(self.prompts)}

    def lengths(self, requests: Sequence[Request]) -> Ints:
        """Response tokens of each request, capped."""
        which, seeds = _which(requests, self.position)
        return self._draw(which, normal(seeds, LENGTH), uniform(seeds, AT_CAP))

    def scores(self, requests: Sequence[Request], lengths: Ints) -> Floats:
        """Right with the prompt's own success rate; a response that was cut at the cap is wrong."""
        which, seeds = _which(requests, self.position)
        return ((uniform(seeds, SCORE) < self._accuracy[which]) & (lengths < self._cap)).astype(np.float64)

    def reference(self, num_responses: int) -> Ints:
        """Lengths from noise that no request uses."""
        rng = np.random.default_rng([self._seed, 1])
        shape = len(self.prompts), num_responses
        which = np.repeat(np.arange(shape[0])[:, None], num_responses, axis=1)
        return self._draw(which, rng.standard_normal(shape), rng.random(shape))

    def survival(self, which: Ints, lengths: Ints) -> Floats:
        """The true law; a length is a rounded-up lognormal number."""
        sigma = max(self._law.sigma_within, 1e-9)
        score = (np.log(np.maximum(lengths, 1)) - self._mu[which]) / (sigma * math.sqrt(2))
        at_cap = self._at_cap[which]
        found = at_cap + (1 - at_cap) * 0.5 * _ERFC(score).astype(np.float64)
        return np.where(lengths < 1, 1.0, np.where(lengths >= self._cap, 0.0, found))

    def _draw(self, which: Ints, noise: Floats, luck: Floats) -> Ints:
        tokens = np.ceil(np.exp(np.minimum(self._mu[which] + self._law.sigma_within * noise, 30.0)))
        tokens[luck < self._at_cap[which]] = self._cap
        capped: Ints = np.clip(tokens, 1, self._cap).astype(np.int64)
        return capped


class MeasuredWorkload:
    """Prompts whose responses were measured; copied, evenly, where there are too few of them."""

    def __init__(self, measured: Sequence[MeasuredPrompt], config: Config) -> None:
        self._cap = config.data.max_response_length
        self._seed = config.trainer.seed
        self.measured = list(measured)
        least = DEFAULT_NUM_STEPS * config.data.train_batch_size
        count = config.workload.num_prompts or max(len(measured), least)
        rng = np.random.default_rng([self._seed, 0])
        copies, rest = divmod(count, len(measured))
        extra = np.sort(rng.permutation(len(measured))[:rest])
        self._source: Ints = np.concatenate([np.tile(np.arange(len(measured)), copies), extra]).astype(np.int64)
        self._counts: Ints = np.array([len(p.response_tokens) for p in measured])
        self._offsets: Ints = np.concatenate([[0], np.cumsum(self._counts)[:-1]])
        flat = np.array([n for p in measured for n in p.response_tokens], dtype=np.int64)
        self.num_over_cap = int((flat > self._cap).sum())
        self._tokens: Ints = np.minimum(flat, self._cap)
        # prompt-major and sorted within each prompt, as one rising list: prompt x stride + tokens
        self._stride = self._cap + 1
        self._ranked: Ints = np.sort(np.repeat(np.arange(len(measured)), self._counts) * self._stride + self._tokens)
        self._accuracy = _accuracies(config.workload.accuracy, len(measured), rng)
        self._correct = self._correct_flags()
        default = config.workload.prompt_tokens
        prompt_tokens = [(0,) * (p.prompt_tokens or default) for p in measured]
        self.prompts = []
        for place, source in enumerate(self._source):
            copy, name = place // len(measured), measured[source].name
            self.prompts.append((f"{name}/{copy}" if copy else name, prompt_tokens[source], "default"))
        self.position = {name: i for i, (name, _, _) in enumerate(self.prompts)}

    def _correct_flags(self) -> Floats | None:
        """Of each measured response; None where the file does not say for all of them."""
        if any(p.correct is None for p in self.measured):
            return None
        return np.array([c for p in self.measured for c in p.correct or ()], dtype=np.float64)

    def lengths(self, requests: Sequence[Request]) -> Ints:
        """Response tokens of each request, capped."""
        return self._tokens[self._picked(requests)]

    def scores(self, requests: Sequence[Request], lengths: Ints) -> Floats:
        """What was measured with that length, or the prompt's own success rate."""
        if self._correct is not None:
            return self._correct[self._picked(requests)]
        which, seeds = _which(requests, self.position)
        return ((uniform(seeds, SCORE) < self._accuracy[self._source[which]]) & (lengths < self._cap)).astype(
            np.float64
        )

    def reference(self, num_responses: int) -> Ints:
        """Lengths from noise that no request uses."""
        rng = np.random.default_rng([self._seed, 1])
        luck = rng.random((len(self.prompts), num_responses))
        return self._tokens[self._pick(self._source[:, None], luck)]

    def survival(self, which: Ints, lengths: Ints) -> Floats:
        """The true law: what was measured."""
        source = self._source[which]
        num_up_to = np.searchsorted(self._ranked, source * self._stride + np.minimum(lengths, self._cap), side="right")
        found: Floats = 1.0 - (num_up_to - self._offsets[source]) / self._counts[source]
        return found

    def _picked(self, requests: Sequence[Request]) -> Ints:
        which, seeds = _which(requests, self.position)
        return self._pick(self._source[which], uniform(seeds, LENGTH))

    def _pick(self, source: Ints, luck: Floats) -> Ints:
        picked: Ints = self._offsets[source] + (luck * self._counts[source]).astype(np.int64)
        return picked


def _accuracies(mean: float, count: int, rng: np.random.Generator) -> Floats:
    """Success rates of the prompts: most are nearly always, or nearly never, solved."""
    if mean in (0.0, 1.0):
        return np.full(count, mean)
    return rng.beta(BETA_ACCURACY, BETA_ACCURACY * (1 - mean) / mean, count)


def _which(requests: Sequence[Request], position: dict[str, int]) -> tuple[Ints, Seeds]:
    which = np.fromiter((position[r.prompt.prompt_id] for r in requests), np.int64, len(requests))
    return which, np.fromiter((r.seed for r in requests), np.uint64, len(requests))
