"""ClusterBackend: carries the controller's decisions out on real engines and real gradients.

It owns the order of things within a step; the rollout (live or replayed), the trainer, the weights and the engine are
handed in by `worker.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rollpacker.comm.groups import ParallelRanks
from rollpacker.comm.samples import Sample, exchange_samples
from rollpacker.comm.world import World
from rollpacker.config import Config
from rollpacker.data.packing import assign_to_replicas
from rollpacker.messages import Action, Event, RoundPlan, UpdatePlan
from rollpacker.platform.device import Platform
from rollpacker.profiling.nvtx import StageTimer
from rollpacker.rollout.engine import RolloutEngine
from rollpacker.runtime.dump import write_dump
from rollpacker.runtime.report import StepReport, StepReporter
from rollpacker.runtime.rollout import Placement, Rollout
from rollpacker.runtime.validation import Validator
from rollpacker.training.advantages import group_advantages
from rollpacker.training.loss import denominator, sequence_weight
from rollpacker.training.trainer import LossSums, Trainer, TrainSample
from rollpacker.types import ScoredResponse
from rollpacker.weights.refit import MegatronWeights


@dataclass(frozen=True)
class Parts:
    """What the worker built for this rank; `engine` is None when a dump is replayed, `validator` also without val_files."""

    rollout: Rollout
    engine: RolloutEngine | None
    trainer: Trainer
    weights: MegatronWeights
    placement: Placement
    ranks: ParallelRanks
    timer: StageTimer
    reporter: StepReporter
    export_model: Callable[[int], object]
    platform: Platform
    validator: Validator | None
    total_steps: int


class ClusterBackend:
    """One rank's share of every step; all ranks run the same calls in the same order."""

    def __init__(self, parts: Parts, config: Config, world: World, digest: Callable[[], int]) -> None:
        self._parts = parts
        self._config = config
        self._world = world
        self._digest = digest
        self._weight_version = 0
        # The world ranks of each training replica: every one of them needs the replica's samples.
        dp_ranks = world.comm.allgather(parts.ranks.dp_rank)
        self._replica_ranks = [
            [r for r, d in enumerate(dp_ranks) if d == replica] for replica in range(parts.ranks.dp_size)
        ]
        self._update: UpdatePlan | None = None
        self._report = StepReport()

    def launch(self, plan: RoundPlan) -> None:
        """Hand the round's requests to the engine of this rank."""
        self._parts.reporter.begin_step(plan)
        self._parts.timer.begin_step(plan.step)
        self._report = StepReport(start_s=self._world.now(), weight_version=self._weight_version)
        self._parts.rollout.launch(plan)

    def events(self) -> Iterator[Event]:
        """Decode, score and exchange until the round has ended."""
        with self._parts.timer.stage("gen"):
            for event in self._parts.rollout.events(self._digest):
                self._parts.reporter.on_event(event)
                yield event

    def apply(self, action: Action) -> None:
        """Carry out an action on this rank's replica."""
        self._parts.rollout.apply(action)

    def apply_update(self, update: UpdatePlan) -> None:
        """Move the samples to their training replicas, add their gradients up, make one optimizer step."""
        parts, timer = self._parts, self._parts.timer
        self._update = update
        if parts.engine is not None:
            parts.engine.sleep()
        with timer.stage("exchange"):
            samples = parts.rollout.take_samples()
            if self._config.trainer.rollout_data_dir and samples:
                write_dump(self._config.trainer.rollout_data_dir, self._world.rank, update, samples)
            responses = [r for g in update.groups for r in g.responses]
            mine = exchange_samples(self._world.comm, self._outgoing(responses, samples))
        parts.reporter.on_stage("update_actor")
        with timer.stage("update_actor"):
            parts.trainer.begin()
            start = time.perf_counter()
            sums = parts.trainer.accumulate(self._train_samples(update, mine))
            parts.platform.synchronize()
            self._report.train_busy_s = time.perf_counter() - start
            count = denominator(self._config.algorithm.loss_agg_mode, update.num_tokens, update.num_sequences)
            result = parts.trainer.update(count)
        self._report.denominator = count
        self._report.loss_sums = sums if parts.ranks.reports_metrics else LossSums()
        self._report.update_result = result

    def sync_weights(self) -> None:
        """Refit: the trained weights go into the engine; then the step is reported."""
        parts = self._parts
        self._weight_version += 1
        parts.reporter.on_stage("update_weights")
        with parts.timer.stage("update_weights"):
            self.refit(self._weight_version)
        self._report.end_s = self._world.now()
        assert self._update is not None, "apply_update() comes before sync_weights()"
        save_freq = self._config.trainer.save_freq
        if save_freq > 0 and self._update.step % save_freq == 0:
            parts.reporter.on_stage("save_checkpoint")
            with parts.timer.stage("save_checkpoint"):
                parts.export_model(self._update.step)
        self._validate_if_due(self._update.step)
        parts.reporter.end_step(self._update, self._report, parts.rollout, parts.timer)

    def _validate_if_due(self, step: int) -> None:
        test_freq = self._config.trainer.test_freq
        if test_freq > 0 and (step % test_freq == 0 or step == self._parts.total_steps):
            self.validate(step)

    def validate(self, step: int) -> None:
        """Score the engine's weights on the validation prompts; nothing of the training changes by it."""
        parts = self._parts
        if parts.validator is None:
            return
        parts.reporter.on_stage("testing")
        with parts.timer.stage("testing"):
            report = parts.validator.run(step, self._weight_version)
        if report is not None:
            parts.reporter.write_validation(report)

    def refit(self, weight_version: int) -> None:
        """Golden path: gather every parameter whole, load it by its Hugging Face name."""
        engine = self._parts.engine
        if engine is None:
            return
        self._parts.platform.release_cached_memory()
        engine.wake("weights")
        engine.load_weights(self._parts.weights.export_hf(), weight_version)
        engine.wake("kv_cache")

    def _outgoing(self, responses: Sequence[ScoredResponse], samples: dict[int, Sample]) -> dict[int, list[Sample]]:
        """Samples of this rank by destination: replicas are filled by token count, known to all from the events."""
        lengths = [len(r.request.prompt.token_ids) + r.num_tokens for r in responses]
        outgoing: dict[int, list[Sample]] = {}
        for replica, indices in enumerate(assign_to_replicas(lengths, len(self._replica_ranks))):
            for i in indices:
                sample = samples.get(responses[i].request.index)
                if sample is not None:
                    for rank in self._replica_ranks[replica]:
                        outgoing.setdefault(rank, []).append(sample)
        return outgoing

    def _train_samples(self, update: UpdatePlan, samples: Sequence[Sample]) -> list[TrainSample]:
        """Add what the loss needs of the group: advantages and token weights follow from the rewards in the events."""
        algorithm = self._config.algorithm
        advantages: dict[int, float] = {}
        for group in update.groups:
            values = group_advantages(
                [r.reward for r in group.responses],
                adv_estimator=algorithm.adv_estimator,
                divide_by_std=algorithm.norm_adv_by_std_in_grpo,
            )
            advantages.update({r.request.index: a for r, a in zip(group.responses, values, strict=True)})
        self._report.advantages = list(advantages.values())
        return [
            TrainSample(
                sample=s,
                advantage=advantages[s.request_index],
                token_weight=sequence_weight(
                    algorithm.loss_agg_mode, len(s.response_ids), self._config.data.max_response_length
                ),
            )
            for s in samples
        ]
