"""ClusterBackend: carries the controller's decisions out on real engines and real gradients.

It owns the order of things within a step; the rollout (live or replayed), the trainer, the weights and the engine are
handed in by `worker.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rollpacker.comm.groups import ParallelRanks
from rollpacker.comm.samples import Sample, exchange_samples
from rollpacker.comm.world import World
from rollpacker.config import Config
from rollpacker.loop import RunStopped
from rollpacker.messages import Action, Event, LaunchRequests, RoundPlan, UpdatePlan
from rollpacker.platform.device import Platform
from rollpacker.profiling.nvtx import StageTimer
from rollpacker.rollout.engine import RolloutEngine
from rollpacker.runtime.checkpointing import Checkpointer, RunState
from rollpacker.runtime.dump import write_dump
from rollpacker.runtime.report import StepReport, StepReporter
from rollpacker.runtime.rollout import Rollout
from rollpacker.runtime.stopping import StopSwitch
from rollpacker.runtime.validation import Validator
from rollpacker.training.objective import LossSums
from rollpacker.training.policy_update import PolicyUpdate
from rollpacker.weights.noise import with_noise
from rollpacker.weights.refit import MegatronWeights
from rollpacker.weights.reshard import Resharder


@dataclass(frozen=True)
class Parts:
    """What the worker built for this rank; `engine` is None when a dump is replayed, `validator` also without val_files.

    `resharder` is None for the golden refit.
    """

    rollout: Rollout
    engine: RolloutEngine | None
    policy_update: PolicyUpdate
    weights: MegatronWeights
    resharder: Resharder | None
    ranks: ParallelRanks
    timer: StageTimer
    reporter: StepReporter
    checkpointer: Checkpointer
    stop: StopSwitch
    platform: Platform
    validator: Validator | None
    total_steps: int


class ClusterBackend:
    """One rank's share of every step; all ranks run the same calls in the same order."""

    def __init__(
        self, parts: Parts, config: Config, world: World, digest: Callable[[], int], run_state: Callable[[], RunState]
    ) -> None:
        """`run_state` is what a checkpoint says of the run besides the backend's own part; asked on rank 0."""
        self._parts = parts
        self._config = config
        self._world = world
        self._digest = digest
        self._run_state = run_state
        self._weight_version = 0  # each step makes one: the number of steps done
        self._validated_step: int | None = None
        self._kept_state: RunState | None = None
        self._update: UpdatePlan | None = None
        self._report = StepReport()

    def between_steps(self) -> None:
        """Raises RunStopped if any rank has a reason to stop, JobError if a checkpoint could not be written."""
        self._parts.checkpointer.check()
        if self._kept_state is None:  # before the first step of this job
            self._kept_state = self._current_state()
        self._parts.stop.between_steps(self._world)

    def launch(self, plan: RoundPlan) -> None:
        """Hand the round's requests to the engine of this rank."""
        self._refuse_stale_weights()
        self._parts.reporter.begin_step(plan)
        self._parts.timer.begin_step(plan.step)
        self._report = StepReport(start_s=self._world.now(), weight_version=self._weight_version)
        self._parts.rollout.launch(plan)

    def _refuse_stale_weights(self) -> None:
        engine = self._parts.engine
        if engine is not None and engine.weight_version != self._weight_version:
            raise RuntimeError(
                f"the engine has version {engine.weight_version} of the weights, the trainer {self._weight_version}: a round "
                "would sample from another policy than the one that is trained"
            )

    def events(self) -> Iterator[Event]:
        """Decode, score and exchange until the round has ended."""
        with self._parts.timer.stage("gen"):
            for event in self._parts.rollout.events(self._digest):
                self._parts.reporter.on_event(event)
                yield event

    def apply(self, action: Action) -> None:
        """Carry out an action on this rank's replica."""
        if isinstance(action, LaunchRequests):
            self._parts.reporter.on_launch(len(action.requests))
        self._parts.rollout.apply(action)

    def apply_update(self, update: UpdatePlan) -> None:
        """Move the samples to their training replicas and train on them."""
        parts, timer = self._parts, self._parts.timer
        self._update = update
        if parts.engine is not None:
            parts.engine.sleep()
        with timer.stage("exchange"):
            samples = parts.rollout.take_samples()
            if self._config.trainer.rollout_data_dir and samples:
                write_dump(self._config.trainer.rollout_data_dir, self._world.rank, update, samples)
            mine = exchange_samples(self._world.comm, _by_rank(samples, parts.policy_update.destinations(update)))
        self._report.update = parts.policy_update.run(update, mine, self._training_stage)
        if not parts.ranks.reports_metrics:
            self._report.update.sums = LossSums()

    @contextlib.contextmanager
    def _training_stage(self, name: str) -> Iterator[None]:
        """A stage of the update, shown and timed."""
        self._parts.reporter.on_stage(name)
        with self._parts.timer.stage(name):
            yield

    def sync_weights(self) -> None:
        """Refit: the trained weights go into the engine; then the step is reported."""
        parts = self._parts
        assert self._update is not None, "apply_update() comes before sync_weights()"
        step = self._weight_version = self._update.step
        save_freq = self._config.trainer.save_freq
        if save_freq > 0 and step % save_freq == 0:
            parts.reporter.on_stage("save_checkpoint")
            with parts.timer.stage("save_checkpoint"):  # before the refit: the engine sleeps, and leaves its memory
                parts.checkpointer.begin(step)
        parts.reporter.on_stage("update_weights")
        with parts.timer.stage("update_weights"):
            self.refit(self._weight_version)
        self._report.end_s = self._world.now()
        self.validate_if_due(step)
        parts.reporter.end_step(self._update, self._report, parts.rollout, parts.timer)
        self._kept_state = self._current_state()
        parts.checkpointer.commit(self._kept_state)

    def save(self) -> None:
        """A checkpoint of where the run stands now, complete when this returns. Collective."""
        self._save_state(self._current_state())

    def save_stopped(self) -> None:
        """A checkpoint of where the run stood after its last whole step. Collective."""
        self._save_state(self._kept_state or self._current_state())

    def _save_state(self, state: RunState | None) -> None:
        parts = self._parts
        if parts.checkpointer.newest_step != self.num_done:
            parts.reporter.on_stage("save_checkpoint")
            if parts.engine is not None:
                parts.engine.sleep()
            parts.checkpointer.begin(self.num_done)
            parts.checkpointer.commit(state)
        parts.checkpointer.wait()

    def _current_state(self) -> RunState | None:
        """What a checkpoint says of the run; rank 0 only."""
        if self._world.rank != 0:
            return None
        return {
            **self._run_state(),
            "step": self.num_done,
            "validated_step": self._validated_step,
            "num_virtual_steps": self._parts.rollout.num_virtual_steps,
        }

    def start(self, state: RunState | None) -> None:
        """The first refit; `state` is what a checkpoint says of the run that is gone on with."""
        if state is not None:
            self._weight_version, self._validated_step = state["step"], state["validated_step"]
            self._parts.rollout.num_virtual_steps = state["num_virtual_steps"]
        self.refit(self._weight_version)

    @property
    def num_done(self) -> int:
        """Optimizer steps so far, those of earlier jobs included."""
        return self._weight_version

    def validate_if_due(self, step: int) -> None:
        """After `step` steps, where that has not been done; a stop leaves it to the next start."""
        trainer = self._config.trainer
        if step == 0:
            is_due = trainer.val_before_train
        else:
            is_due = trainer.test_freq > 0 and (step % trainer.test_freq == 0 or step == self._parts.total_steps)
        if is_due and self._validated_step != step:
            with contextlib.suppress(RunStopped):  # the run itself is stopped between two steps
                self._validate(step)

    def validate_last(self, step: int) -> None:
        """At the end of a run, if validations are due at all and its last step had none. Raises RunStopped."""
        if self._config.trainer.test_freq > 0 and self._validated_step != step:
            self._validate(step)

    def _validate(self, step: int) -> None:
        """Score the engine's weights on the validation prompts; nothing of the training changes by it."""
        parts = self._parts
        if parts.validator is None:
            return
        parts.reporter.on_stage("testing")
        with parts.timer.stage("testing"):
            report = parts.validator.run(step, self._weight_version)
        self._validated_step = step
        if report is not None:
            parts.reporter.write_validation(report)

    def refit(self, weight_version: int) -> None:
        """The trained weights into this rank's engine, under a new version."""
        engine = self._parts.engine
        if engine is None:
            return
        self._parts.platform.release_cached_memory()
        engine.wake("weights")
        if self._parts.resharder is None:
            self._refit_golden(engine, weight_version)
        else:
            self._refit_in_place(engine, self._parts.resharder, weight_version)
        self._parts.platform.release_cached_memory()  # whole tensors, or the buffers of the rounds
        engine.wake("kv_cache")

    def _refit_golden(self, engine: RolloutEngine, weight_version: int) -> None:
        """Gather every parameter whole, load it by its Hugging Face name."""
        named_tensors = self._parts.weights.export_hf()
        if self._config.rollout.weight_noise:
            named_tensors = with_noise(named_tensors, self._config.rollout.weight_noise, seed=weight_version)
        engine.load_weights(named_tensors, weight_version)

    def _refit_in_place(self, engine: RolloutEngine, resharder: Resharder, weight_version: int) -> None:
        """Shards into shards, and a checksum of both sides now and then."""
        check_freq = self._config.weights.check_freq
        with engine.rewriting(weight_version):
            resharder.run()
            if check_freq > 0 and weight_version % check_freq == 0:
                resharder.check()
            self._parts.platform.synchronize()  # before the buffers' memory is given back


def _by_rank(samples: Mapping[int, Sample], destinations: Mapping[int, list[int]]) -> dict[int, list[Sample]]:
    """This rank's samples by the ranks that train them; those of responses that nobody trains are left behind."""
    outgoing: dict[int, list[Sample]] = {}
    for index, ranks in destinations.items():
        if index in samples:
            for rank in ranks:
                outgoing.setdefault(rank, []).append(samples[index])
    return outgoing
