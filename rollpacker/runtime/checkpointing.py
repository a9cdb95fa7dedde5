"""Saving a run while it goes on, and finding what to resume from.

A save begins with a copy to host memory, collective and timed (`begin`). Each rank's thread then writes its files beside the
training and says in a file what it wrote; rank 0's thread waits for all of them and for the run's own state (`commit`, once
the step's row is in metrics.jsonl), writes table of contents and manifest, and gives the checkpoint its name. So the newest
checkpoint never knows of a row that is not there, and a failed disk ends the run by name (`check`).
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollpacker.comm.world import AgreedError, JobError, World
from rollpacker.config import Config, ConfigError
from rollpacker.runtime.checkpoint_folder import (
    MEGATRON,
    RUN_STATE,
    CheckpointFolder,
    FileFacts,
    damage,
    flush,
    read_facts,
    read_run_state,
    write_durably,
)
from rollpacker.training.checkpoint import TrainingState
from rollpacker.weights.convert import CARRIED
from rollpacker.weights.hf import carry_along

RunState = dict[str, Any]
"""What rank 0 knows of a run and its files do not say, as plain JSON values."""

_POLL_S = 0.05
_RANKS = "ranks"
"""Where the ranks say what they have written; gone once the checkpoint is complete."""
_FIXED = {
    "rollout.replay": "its position belongs to that source of prompts.",
    "tail_batching.mode": "the queue of deferred prompts belongs to a mode.",
    "filter.mode": "what waits for a step belongs to a filter.",
    "data.max_response_length": "what the run has learnt of lengths ends at the cap.",
    "planner.policy": "what the planner has learnt belongs to a policy.",
}
"""What a resumed run must not change, and why."""


@dataclass(frozen=True)
class ResumePoint:
    """A whole checkpoint: its folder, step, what rank 0 knew of the run, and what was found wrong with newer ones.

    `is_in_place`: the run goes on in its own directory.
    """

    folder: Path
    step: int
    run_state: RunState
    is_in_place: bool = True
    rejected: tuple[str, ...] = ()


@dataclass
class _Save:
    """A checkpoint on its way to the disk."""

    step: int
    thread: threading.Thread | None = None
    error: Exception | None = None
    run_state: RunState | None = None
    may_commit: threading.Event = field(default_factory=threading.Event)


class Checkpointer:
    """Writes the checkpoints of a run; one save at a time. `begin` and `wait` are collective."""

    def __init__(self, root: Path, world: World, state: TrainingState, config: Config) -> None:
        self._folder = CheckpointFolder(root)
        self._world = world
        self._state = state
        self._model_path = Path(config.model.path)
        self._keep_last = config.trainer.keep_last
        self._save: _Save | None = None
        self.newest_step: int | None = None
        """Of the newest checkpoint that was begun or resumed from."""

    def begin(self, step: int) -> None:
        """Copy the state after `step` steps; its files are written from now on."""
        self.wait()
        folder = self._folder.partial(step)
        error = self._world.comm.bcast(self._prepare(step) if self._world.rank == 0 else None)
        if error is not None:
            self._refuse(error, step)
        pending = self._state.snapshot(folder / MEGATRON)
        save = _Save(step)

        def write() -> None:
            try:
                self._write_mine(folder, pending)
                if self._world.rank == 0:
                    self._complete(save, folder, pending)
            except Exception as error:  # noqa: BLE001 (torch makes a RuntimeError of a full disk; `check` tells it)
                save.error = error

        save.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        save.thread.start()
        self._save, self.newest_step = save, step

    def commit(self, run_state: RunState | None) -> None:
        """Everything that the checkpoint refers to is on the disk; rank 0 gives the run's state, the others None."""
        if self._save is not None and not self._save.may_commit.is_set():
            self._save.run_state = run_state
            self._save.may_commit.set()

    def check(self) -> None:
        """Raise JobError if this rank's files could not be written; also in between."""
        save = self._save
        if save is not None and save.error is not None:
            self._refuse(save.error, save.step)

    def wait(self) -> None:
        """Until a save that was begun and committed is complete on all ranks."""
        save = self._save
        if save is None:
            return
        assert save.thread is not None
        save.thread.join()
        self.check()
        self._world.wait_for_all()
        self._save = None

    def _write_mine(self, folder: Path, pending: Any) -> None:
        """This rank's files, and then the word that they are there."""
        written = pending.write()
        mine = {f"{MEGATRON}/{p.name}": read_facts(p) for p in pending.paths}
        spoken = folder / _RANKS / f"{self._world.rank}"
        spoken.parent.mkdir(exist_ok=True)
        aside = spoken.with_suffix(".partial")
        aside.write_bytes(pickle.dumps((written, mine)))
        aside.replace(spoken)

    def _complete(self, save: _Save, folder: Path, pending: Any) -> None:
        """Rank 0: when all have written and the step has been reported."""
        spoken = [folder / _RANKS / f"{rank}" for rank in range(self._world.size)]
        while not all(path.exists() for path in spoken):
            time.sleep(_POLL_S)
        words = [pickle.loads(path.read_bytes()) for path in spoken]
        facts: dict[str, FileFacts] = {name: f for _, theirs in words for name, f in theirs.items()}
        pending.finish([written for written, _ in words])
        carried = folder / MEGATRON / CARRIED  # for `rollpacker convert megatron-to-hf`
        carried.mkdir()
        carry_along(self._model_path, carried)
        for path in (*spoken, folder / _RANKS):
            path.rmdir() if path.is_dir() else path.unlink()
        save.may_commit.wait()
        write_durably(folder / RUN_STATE, json.dumps(save.run_state))
        others = [p for p in folder.rglob("*") if p.is_file() and str(p.relative_to(folder)) not in facts]
        flush(others)
        facts |= {str(p.relative_to(folder)): read_facts(p) for p in others}
        self._folder.complete(save.step, facts, {"num_ranks": self._world.size})
        self._folder.prune(self._keep_last)

    def _prepare(self, step: int) -> OSError | None:
        """The folder; why there is none, so that all ranks can end the run."""
        try:
            self._folder.prepare(step)
        except OSError as error:
            return error
        return None

    def _refuse(self, error: Exception, step: int) -> None:
        earlier = [s for s in self._folder.steps() if s != step]
        kept = f"step_{earlier[0]} is untouched" if earlier else "there is no earlier one"
        raise JobError(
            f"the checkpoint of step {step} could not be written to {self._folder.root}: {_disk_error(error)}. "
            f"{kept[0].upper()}{kept[1:]}; free space or mend the disk, then start the same command again."
        ) from error


def _disk_error(error: BaseException) -> str:
    """What the disk said, be it behind what a library made of it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return f"{type(error).__name__}: {error}"
    return f"{seen.strerror or seen}{f' ({seen.filename})' if seen.filename else ''}"


def find_resume_point(config: Config, world: World, *, is_dry_run: bool = False) -> ResumePoint | None:
    """The newest whole checkpoint that the config asks to go on from; None for a fresh run. Collective; raises AgreedError.

    All ranks share the reading of the files; a dry run looks at their sizes only.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return None

    def damage_seen_by_any(folder: Path) -> str | None:
        seen = world.comm.allgather(damage(folder, world.rank, world.size, reads=not is_dry_run))
        return next((wrong for wrong in seen if wrong is not None), None)

    if trainer.resume_from_path is not None:
        given = Path(trainer.resume_from_path)
        if wrong := damage_seen_by_any(given):
            raise AgreedError(
                f"trainer.resume_from_path={given} is not a whole checkpoint: {wrong}. Name a folder step_N of a run's "
                "checkpoints/."
            )
        return _resume_point(given, is_in_place=False)
    folders = CheckpointFolder(Path(trainer.default_local_dir) / "checkpoints")
    rejected: list[str] = []
    for step in world.comm.bcast(folders.steps() if world.rank == 0 else None):
        wrong = damage_seen_by_any(folders.path(step))
        if wrong is None:
            return _resume_point(folders.path(step), is_in_place=True, rejected=rejected)
        rejected.append(f"the checkpoint {folders.path(step)} is damaged ({wrong})")
    if rejected:
        raise AgreedError(
            f"trainer.resume_mode=auto: {'; '.join(rejected)}; none is whole. Restore one, or set "
            "trainer.resume_mode=disable to start anew (the run directory is then moved aside)."
        )
    return None


def _resume_point(folder: Path, *, is_in_place: bool, rejected: Sequence[str] = ()) -> ResumePoint:
    state = read_run_state(folder)
    return ResumePoint(folder, int(state["step"]), state, is_in_place, tuple(rejected))


def check_resumable(config: Config, shape: object, point: ResumePoint) -> list[str]:
    """What of the config differs from the run that saved, a line each. Raises ConfigError for what must not."""
    saved = point.run_state["config"]
    changed = []
    for section, values in dataclasses.asdict(config).items():
        for name, now in values.items():
            before = saved.get(section, {}).get(name)
            if json.loads(json.dumps(now)) != before:
                changed.append((f"{section}.{name}", before, now))
    for dotted, before, now in changed:
        if dotted in _FIXED:
            raise ConfigError(
                f"{dotted}={now}, but the checkpoint {point.folder} was saved with {before}: {_FIXED[dotted]} Set it "
                "back, or start anew with trainer.resume_mode=disable."
            )
    if point.run_state["model_shape"] != json.loads(json.dumps(dataclasses.asdict(shape))):  # type: ignore[call-overload]
        raise ConfigError(
            f"model.path={config.model.path} has another shape than the model of the checkpoint {point.folder}. Name the "
            "model that the run began with, or start anew with trainer.resume_mode=disable."
        )
    return [
        f"{dotted}: {before} -> {now}" for dotted, before, now in changed if not dotted.startswith("trainer.resume")
    ]
