"""Builds this rank's parts and wires them together. The only place that knows all of rollout, reward, training, weights."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from pathlib import Path
from typing import Any

from rollpacker.comm.groups import ParallelRanks
from rollpacker.comm.world import World, init_torch_distributed, is_user_terminal
from rollpacker.config import Config, FilterConfig, TailBatchingConfig
from rollpacker.config_file import to_yaml
from rollpacker.data.prompts import PromptOrder
from rollpacker.policy.assembly import Machine, build_controller
from rollpacker.policy.controller import StepController
from rollpacker.profiling.capture import build_capture
from rollpacker.profiling.nvtx import StageTimer
from rollpacker.profiling.trace import TraceWriter
from rollpacker.runtime.backend import ClusterBackend, Parts
from rollpacker.runtime.checkpoint_folder import EXPORTED, MEGATRON
from rollpacker.runtime.checkpointing import Checkpointer, RunState
from rollpacker.runtime.checks import Checked
from rollpacker.runtime.console import ProgressDisplay
from rollpacker.runtime.inference import (
    build_engine,
    build_rollout,
    build_validator,
)
from rollpacker.runtime.loggers import open_loggers
from rollpacker.runtime.metrics import TRACE, MetricsWriter, file_sizes, prepare_run_dir, resume_run_dir
from rollpacker.runtime.report import Sinks, StepReporter
from rollpacker.runtime.rollout import Rollout
from rollpacker.runtime.stopping import StopSwitch
from rollpacker.runtime.watchdog import Heartbeat, Watchdog
from rollpacker.training.checkpoint import TrainingState
from rollpacker.training.model import build_model, init_parallel_groups
from rollpacker.training.optimizer import build_lr_schedule, build_optimizer
from rollpacker.training.policy_update import PolicyUpdate
from rollpacker.training.reference import ReferenceWeights
from rollpacker.training.trainer import Trainer
from rollpacker.weights.hf import write_hf_folder
from rollpacker.weights.refit import MegatronWeights
from rollpacker.weights.reshard import Resharder, bind_engine


class Worker:
    """One rank's program: build, run, export."""

    def __init__(self, config: Config, world: World, checked: Checked, stop: StopSwitch) -> None:
        resume = checked.resume
        if resume is not None:
            world = world.continued(resume.run_state["elapsed_s"])
        self.config = config
        self.world = world
        self.checked = checked
        self.stop = stop
        self.heartbeat = Heartbeat()
        self.moved_aside: Path | None = None
        self.run_dir = Path(config.trainer.default_local_dir)
        platform = checked.platform
        world.agree(lambda: platform.prepare(world.local_rank))
        init_torch_distributed(world, platform.torch_backend, config.trainer.collective_timeout_s)
        self.ranks = init_parallel_groups(config.training, platform, config.trainer.seed)
        model = build_model(checked.shape, config.training, platform, self.ranks)
        self.weights = MegatronWeights(model, checked.shape, self.ranks)
        self.reference = self._load_reference(model)
        if resume is None:
            world.agree(lambda: self.weights.import_hf(config.model.path))
        self.trainer, training_state = self._build_trainer(model, self.ranks)
        self.checkpointer = Checkpointer(self.run_dir / "checkpoints", world, training_state, config)
        if resume is not None:
            training_state.load(resume.folder / MEGATRON)
            if resume.is_in_place:
                self.checkpointer.newest_step = resume.step
        self.engine = None if checked.replay is not None else build_engine(config, platform)
        self._resharder = self._build_resharder()
        self.controller = world.agree(self._build_controller)
        # Last of all, so that a run that cannot start neither writes a run directory nor moves an earlier one aside.
        self._sinks = world.agree(self._open_sinks)
        self.backend = self._build_backend()
        self.backend.start(None if resume is None else resume.run_state)
        self._watchdog = self._start_watchdog()

    @property
    def display(self) -> ProgressDisplay | None:
        """What the user sees; rank 0 only."""
        return self._sinks.display if self._sinks else None

    def export_model(self, step: int) -> Path:
        """Write the trained weights as a Hugging Face folder; where. Collective; rank 0 writes."""
        folder = self.run_dir / "checkpoints" / f"step_{step}" / EXPORTED
        tensors = self.weights.export_hf()
        if self.world.rank == 0:
            write_hf_folder(folder, self.config.model.path, tensors)
        else:
            for _ in tensors:
                pass
        return folder

    def save_stopped(self) -> None:
        """The checkpoint of a run that was asked to stop."""
        reasons = [reason for reason in self.world.comm.allgather(self.stop.reason) if reason is not None]
        if self.display is not None:
            step = self.backend.num_done
            self.display.note(f"stopping ({reasons[0] if reasons else 'asked to'}); saving the state after step {step}")
        self.backend.save_stopped()

    def close(self) -> None:
        """End the reward workers and finish the files."""
        self._watchdog.stop()
        if self.checked.rewards is not None:
            self.checked.rewards.close()
        if self._sinks is not None:
            self._sinks.display.stop()
            self._sinks.metrics.close()
            if self._sinks.trace is not None:
                self._sinks.trace.close()

    def _start_watchdog(self) -> Watchdog:
        """Reports of one job lie together, apart from those of an earlier one."""
        if self.checked.rewards is not None:
            self.heartbeat.num_rewards_out = lambda: self.checked.rewards.num_outstanding
        began = self.world.comm.bcast(time.strftime("%Y%m%d-%H%M%S"))
        watchdog = Watchdog(
            self.heartbeat, self.world, self.run_dir / "stall" / began, self.config.trainer.stall_timeout_s
        )
        watchdog.start()
        return watchdog

    def _open_sinks(self) -> Sinks | None:
        if self.world.rank != 0:
            return None
        trainer = self.config.trainer
        resume = self.checked.resume
        if resume is not None and resume.is_in_place:
            sizes = resume.run_state["file_sizes"]
            resume_run_dir(self.run_dir, to_yaml(self.config), sizes)
        else:
            sizes = {}
            self.moved_aside = prepare_run_dir(self.run_dir, to_yaml(self.config))
        is_terminal, width = is_user_terminal()
        display = ProgressDisplay(
            self.checked.total_steps,
            is_terminal=is_terminal,
            width=width,
            stream=sys.stdout if "console" in trainer.logger else io.StringIO(),
        )
        return Sinks(
            metrics=MetricsWriter(
                self.run_dir, open_loggers(self.config, display.note, None if resume is None else resume.step + 1)
            ),
            trace=TraceWriter(self.run_dir / TRACE, resume_at=sizes.get(TRACE)) if self.config.profiler.trace else None,
            display=display,
        )

    def _load_reference(self, model: Any) -> ReferenceWeights | None:
        """Before the trained weights, since both pass through the one model."""
        if not self.config.algorithm.needs_reference:
            return None
        path = self.config.model.reference_path or self.config.model.path
        self.world.agree(lambda: self.weights.import_hf(path))
        return ReferenceWeights(model)

    def _build_trainer(self, model: Any, ranks: ParallelRanks) -> tuple[Trainer, TrainingState]:
        training, platform = self.config.training, self.checked.platform
        optimizer = build_optimizer(model, training, platform)
        schedule = build_lr_schedule(optimizer, training, self.checked.total_steps)
        trainer = Trainer(model, optimizer, schedule, self.config, self.checked.shape, ranks, platform)
        return trainer, TrainingState(model, optimizer, schedule, ranks, platform)

    def _build_controller(self) -> StepController:
        config, replay = self.config, self.checked.replay
        if replay is not None:  # a dump holds what its run has trained
            config = dataclasses.replace(config, filter=FilterConfig(), tail_batching=TailBatchingConfig())
        order = PromptOrder.from_config(self.checked.dataset.examples, config, config.data.domains)
        controller = build_controller(config, replay or order, Machine(self.world.size))
        if self.checked.resume is not None:
            controller.load_state_dict(self.checked.resume.run_state["controller"])
        return controller

    def _build_backend(self) -> ClusterBackend:
        config, world = self.config, self.world
        profiler = config.profiler
        folder = self.run_dir / "torch_profile"
        capture = build_capture(profiler.tool, profiler.steps, profiler.ranks, world.rank, folder)
        reporter = StepReporter(
            world,
            self._sinks,
            max_response_length=config.data.max_response_length,
            mismatch_correction=config.algorithm.mismatch_correction,
            heartbeat=self.heartbeat,
        )
        validator = None
        if self.engine is not None:
            validator = build_validator(
                config,
                world,
                self.checked,
                self.engine,
                reporter.on_progress,
                lambda: self.stop.drops_round,
                self.heartbeat,
            )
        parts = Parts(
            rollout=self._build_rollout(),
            engine=self.engine,
            policy_update=PolicyUpdate(self.trainer, self.reference, self.ranks, world, config, self.checked.platform),
            weights=self.weights,
            resharder=self._resharder,
            ranks=self.ranks,
            timer=StageTimer(world.rank, world.now, nvtx=config.profiler.nvtx, capture=capture),
            reporter=reporter,
            checkpointer=self.checkpointer,
            stop=self.stop,
            platform=self.checked.platform,
            validator=validator,
            total_steps=self.checked.total_steps,
        )
        return ClusterBackend(parts, config, world, lambda: self.controller.digest, self._run_state)

    def _run_state(self) -> RunState:
        """What a checkpoint says of the run, besides where the backend stands."""
        return {
            "elapsed_s": self.world.now(),
            "file_sizes": file_sizes(self.run_dir),
            "controller": self.controller.state_dict(),
            "config": dataclasses.asdict(self.config),
            "model_shape": dataclasses.asdict(self.checked.shape),
        }

    def _build_resharder(self) -> Resharder | None:
        config = self.config
        if self.engine is None or config.weights.refit == "golden":
            return None
        size, bucket_bytes = config.rollout.tensor_model_parallel_size, config.weights.bucket_mib << 20
        return bind_engine(self.weights, self.engine.parameters(), size, self.world, bucket_bytes=bucket_bytes)

    def _build_rollout(self) -> Rollout:
        if self.checked.replay is not None:
            return self.checked.replay
        assert self.engine is not None, "a live rollout has an engine"
        return build_rollout(
            self.config,
            self.world,
            self.checked,
            self.engine,
            self.checked.dataset,
            wants_to_stop=lambda: self.stop.drops_round,
            heartbeat=self.heartbeat,
        )
