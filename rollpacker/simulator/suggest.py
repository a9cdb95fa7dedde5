"""The fastest config of a job by simulation: parallel shapes of the trainer and the engines, then the race.

Rollout and training of a step are one after another, so they are found apart: a rollout is simulated once for a rollout TP,
a KV cache and a race, and what it trained is then priced for every training shape. Shapes are ranked under one race (eta
1.25, or none) on a short run, best bound first: a bound is the shape's own training plus the rollout with the roomiest KV
cache of its rollout TP. Then every race is simulated on the best shape, and the best shapes once more under the race chosen.

A race buys its speed with long responses that it does not train. So of the races within `TOLERANCE` of the fastest the one
whose samples are nearest to the law is taken; no race is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollpacker.config import Config, ConfigError, TailBatchingConfig
from rollpacker.memory_estimate import GIB
from rollpacker.messages import UpdatePlan
from rollpacker.model_shape import ModelShape, check_model_shape
from rollpacker.simulator.cluster import Cluster
from rollpacker.simulator.record import Recorder, StepFacts, Summary
from rollpacker.simulator.run import Simulation
from rollpacker.simulator.shapes import (
    MAX_NODES,
    Candidate,
    Rejection,
    enumerate_shapes,
    fewest_nodes,
    num_gpus,
    with_keys,
)
from rollpacker.simulator.training import TrainingCost

ETAS = (1.125, 1.25, 1.5)
"""Races that are tried, for prompts and responses alike; the paper's is 1.25."""
_RANKING_ETA = 1.25
TOLERANCE = 0.05
_SLACK = 1.01
"""A rollout with less KV cache may come out faster by a hair, as preempted requests lose a race: bounds allow for it."""
_RANKING_STEPS = 5
"""Shapes are ranked on a period of eta 1.25: four SHORT rounds and the LONG one that they fill."""
_PERIOD, _MOST_PERIODS, _LEAST_PERIODS, _SAMPLES = 9, 5, 2, 46080
"""The other simulations last periods of eta 1.125, fewer of large batches. Five are whole periods of every race: one LONG
round more or less is several percent of a step.
"""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prediction:
    """A simulated run; seconds a step of P0 x R0 trained samples, as in `Summary`."""

    candidate: Candidate
    summary: Summary
    training_s: float
    num_preemptions: int

    @property
    def config(self) -> Config:
        """What was simulated."""
        return self.candidate.config

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.summary.step_s


@dataclass(frozen=True)
class Suggestion:
    """The best shapes, the fastest first, all under the race chosen; the races on the best shape; what does not fit."""

    best: tuple[Prediction, ...]
    races: tuple[Prediction, ...]
    rejected: tuple[Rejection, ...]
    num_fitting: int
    num_simulations: int


@dataclass(frozen=True)
class _Rollouts:
    """A simulated run without its training: the same for all training shapes."""

    summary: Summary
    updates: tuple[UpdatePlan, ...]
    trained_s: float  # of the run, in the training shape it was simulated with
    num_steps: float
    num_preemptions: int


class _Steps:
    """Keeps what each step trained."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.updates: list[UpdatePlan] = []
        self.trained_s = 0.0

    def end_step(self, update: UpdatePlan, facts: StepFacts) -> None:
        """The step is over."""
        self._recorder.end_step(update, facts)
        self.updates.append(update)
        self.trained_s += facts.times.total_s


def suggest(base: Config, model: ModelShape, progress: Progress = lambda text: None) -> Suggestion:  # noqa: ARG005
    """The best configs for the job that `base` describes: model, data, cluster and workload, with its own shape left open.

    `base.tail_batching.mode` off leaves the race out. Raises ConfigError where nothing fits, with the arithmetic.
    """
    check_model_shape(base, model)
    races = _races(base)
    fullest = with_race(base, races[-1])
    fitting, rejected = enumerate_shapes(fullest, model)
    if not fitting:
        fitting = _with_context_parallelism(fullest, model, rejected)
    return _Search(races, progress).run(fitting, rejected)


def _races(base: Config) -> list[float | None]:
    """Those that the config admits, the one of most requests last: a reward that drops groups, for example, needs one."""
    if base.tail_batching.mode == "off":
        return [None]
    return [None, *ETAS] if base.reward.on_error != "drop_group" else [*ETAS]


def with_race(config: Config, eta: float | None) -> Config:
    """The config with this race; None = without one."""
    if eta is None:
        plain = TailBatchingConfig()
        return with_keys(
            config, "tail_batching", mode="off", eta_prompts=plain.eta_prompts, eta_responses=plain.eta_responses
        )
    return with_keys(config, "tail_batching", mode="paper", eta_prompts=eta, eta_responses=eta)


def race_of(config: Config) -> float | None:
    """The eta of a config that `with_race` made."""
    return None if config.tail_batching.mode == "off" else config.tail_batching.eta_prompts


def with_job_length(base: Config) -> Config:
    """An epoch of a few steps, unless the caller has said how many prompts it has."""
    if base.workload.num_prompts is not None:
        return base
    num_periods = _SAMPLES // (_PERIOD * base.data.train_batch_size * base.rollout.n)
    num_steps = _PERIOD * min(max(num_periods, _LEAST_PERIODS), _MOST_PERIODS)
    return with_keys(base, "workload", num_prompts=num_steps * base.data.train_batch_size)


def _with_context_parallelism(base: Config, model: ModelShape, rejected: Sequence[Rejection]) -> list[Candidate]:
    """What fits with context parallelism alone; without that an error that names the nearest miss and what would do."""
    fitting, _ = enumerate_shapes(base, model, use_cp=True)
    if fitting:
        return fitting
    by_memory = [r for r in rejected if r.lacks_bytes is not None]
    if not by_memory:
        raise ConfigError(f"no parallel shape suits {base.model.path} on {num_gpus(base)} GPUs: {rejected[0].reason}")
    nearest = min(by_memory, key=lambda r: r.lacks_bytes or 0)
    per_node = base.trainer.n_gpus_per_node or 1
    nodes = fewest_nodes(base, model)
    needs = (
        f"It needs at least {nodes * per_node} GPUs ({nodes} nodes of {per_node})"
        if nodes
        else f"It does not fit {MAX_NODES * per_node} GPUs either"
    )
    lacks_gib = (nearest.lacks_bytes or 0) / GIB
    raise ConfigError(
        f"{base.model.path} does not fit {num_gpus(base)} GPUs of {base.trainer.gpu_memory_gib:.1f} GiB in any of "
        f"{len(rejected)} shapes. The nearest, {describe_shape(nearest.config)}, lacks {lacks_gib:.1f} GiB: "
        f"{nearest.reason}. {needs}; GPUs with more memory (--gpu-memory-gib) or shorter responses "
        "(--max-response-length) help as well."
    )


def describe_shape(config: Config) -> str:
    """The parallel sizes in one line."""
    return f"training {describe_training(config)}, rollout TP {config.rollout.tensor_model_parallel_size}"


def describe_training(config: Config) -> str:
    """The parallel sizes of the training."""
    training = config.training
    cp = f" x CP {training.context_parallel_size}" if training.context_parallel_size > 1 else ""
    return (
        f"TP {training.tensor_model_parallel_size} x PP {training.pipeline_model_parallel_size}{cp} x DP "
        f"{num_gpus(config) // training.replica_size}"
    )


class _Search:
    """Simulates as little as it must; remembers what it has simulated."""

    def __init__(self, races: Sequence[float | None], progress: Progress) -> None:
        self._races, self._progress = races, progress
        self._simulated: dict[tuple[int, float, int, int | None, float | None], _Rollouts] = {}

    def run(self, fitting: Sequence[Candidate], rejected: Sequence[Rejection]) -> Suggestion:
        """Shapes, then races, then the best shapes under the race chosen."""
        data = fitting[0].config.data
        num_prompts = min(fitting[0].config.workload.num_prompts or 0, _RANKING_STEPS * data.train_batch_size)
        full = {_sizes(c): c for c in fitting}
        short = [Candidate(with_keys(c.config, "workload", num_prompts=num_prompts), c.estimate) for c in fitting]
        ranking = _RANKING_ETA if _RANKING_ETA in self._races else None
        listed = [full[_sizes(p.candidate)] for p in self._rank(short, ranking)]
        races = [self._predict(listed[0], eta) for eta in self._races]
        chosen = race_of(choose_race(races).config)
        best = sorted((self._predict(c, chosen) for c in listed), key=lambda p: p.step_s)
        if _sizes(best[0].candidate) != _sizes(listed[0]):
            races = [self._predict(full[_sizes(best[0].candidate)], eta) for eta in self._races]
        return Suggestion(tuple(best), tuple(races), tuple(rejected), len(fitting), len(self._simulated))

    def _rank(self, fitting: Sequence[Candidate], eta: float | None) -> list[Prediction]:
        """The fastest shape, the fastest that trains otherwise, and the fastest that rolls out otherwise, in this order."""
        bounds = []
        for size in sorted({_rollout_size(c) for c in fitting}):
            group = [c for c in fitting if _rollout_size(c) == size]
            rollouts = self._rollouts(max(group, key=lambda c: c.estimate.kv_cache.num_tokens), eta)
            bounds += [(self._price(c, rollouts, eta).step_s, number, c) for number, c in enumerate(group)]
        found: list[Prediction] = []
        for bound, _, candidate in sorted(bounds, key=lambda b: b[:2]):
            if _could_matter(candidate, bound / _SLACK, found):
                found.append(self._predict(candidate, eta))
        return shortlist(found)

    def _predict(self, candidate: Candidate, eta: float | None) -> Prediction:
        return self._price(candidate, self._rollouts(candidate, eta), eta)

    def _price(self, candidate: Candidate, rollouts: _Rollouts, eta: float | None) -> Prediction:
        """The rollouts with the training of this candidate."""
        raced = Candidate(with_race(candidate.config, eta), candidate.estimate)
        cost = TrainingCost(raced.config, Cluster(raced.config))
        trained_s = math.fsum(cost.times(update).total_s for update in rollouts.updates)
        values = vars(rollouts.summary) | {
            "step_s": rollouts.summary.step_s + (trained_s - rollouts.trained_s) / rollouts.num_steps
        }
        return Prediction(raced, Summary(**values), trained_s / rollouts.num_steps, rollouts.num_preemptions)

    def _rollouts(self, candidate: Candidate, eta: float | None) -> _Rollouts:
        config = candidate.config
        rollout, num_prompts = config.rollout, config.workload.num_prompts
        key = (_rollout_size(candidate), rollout.gpu_memory_utilization, rollout.max_num_seqs, num_prompts, eta)
        if key not in self._simulated:
            race = "no race" if eta is None else f"eta {eta:g}"
            self._progress(f"simulation {len(self._simulated) + 1}: rollout TP {key[0]}, {race}")
            self._simulated[key] = _simulate(with_race(config, eta))
        return self._simulated[key]


def choose_race(races: Sequence[Prediction]) -> Prediction:
    """Of those within `TOLERANCE` of the fastest the one whose coverages are nearest to 1."""
    fastest = min(p.step_s for p in races)
    near = [p for p in races if p.step_s <= (1 + TOLERANCE) * fastest]
    return min(near, key=lambda p: abs(1 - p.summary.coverage_p95) + abs(1 - p.summary.own_coverage_p95))


def _simulate(config: Config) -> _Rollouts:
    simulation = Simulation(config)
    recorder = Recorder(config, simulation.cluster.num_gpus)
    steps = _Steps(recorder)
    simulation.run_into(steps)
    return _Rollouts(
        summary=recorder.summary(simulation.workload),
        updates=tuple(steps.updates),
        trained_s=steps.trained_s,
        num_steps=recorder.totals.num_samples / (config.data.train_batch_size * config.rollout.n),
        num_preemptions=recorder.totals.num_preemptions,
    )


def shortlist(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The fastest; the fastest of another training TP x PP; the fastest of another rollout TP: a choice for each decision.

    Ties go to the first of `predictions`.
    """
    best = min(predictions, key=lambda p: p.step_s)
    trained, rolled = _training_sizes(best.candidate), _rollout_size(best.candidate)
    others = (
        [p for p in predictions if _training_sizes(p.candidate) != trained],
        [p for p in predictions if _rollout_size(p.candidate) != rolled],
    )
    chosen = [best]
    for group in others:
        if group and (other := min(group, key=lambda p: p.step_s)) not in chosen:
            chosen.append(other)
    return chosen


def _could_matter(candidate: Candidate, least_s: float, found: Sequence[Prediction]) -> bool:
    """Whether a candidate that takes at least `least_s` could be in the shortlist."""
    if not found:
        return True
    best = min(found, key=lambda p: p.step_s)
    rivals = [best.step_s]
    for of in (_training_sizes, _rollout_size):
        if of(candidate) != of(best.candidate):
            rivals.append(min((p.step_s for p in found if of(p.candidate) != of(best.candidate)), default=math.inf))
    return least_s < max(rivals)


def _sizes(candidate: Candidate) -> tuple[tuple[int, int, int], int]:
    """What no two candidates have in common."""
    return _training_sizes(candidate), _rollout_size(candidate)


def _training_sizes(candidate: Candidate) -> tuple[int, int, int]:
    training = candidate.config.training
    return (
        training.tensor_model_parallel_size,
        training.pipeline_model_parallel_size,
        training.context_parallel_size,
    )


def _rollout_size(candidate: Candidate) -> int:
    return candidate.config.rollout.tensor_model_parallel_size
