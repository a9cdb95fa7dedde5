"""Where metrics go besides the run directory's own files: TensorBoard and Weights & Biases. Rank 0 alone has them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rollpacker.config import Config, ConfigError

_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0


class Logger(Protocol):
    """Takes the values of a step; a step may come twice (its validation, then its metrics), never one before it."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step by name; all of them are finite."""

    def close(self) -> None:
        """Finish; closing twice is allowed."""


def check_loggers(config: Config) -> None:
    """Refuse loggers that could not be opened, before anything is built. Raises ConfigError."""
    for name in ("tensorboard", "wandb"):
        if name in config.trainer.logger and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger lists {name}, but {name} is not installed: install it with `pip install {name}`, or take "
                f"{name} out of trainer.logger."
            )
    if "wandb" in config.trainer.logger and config.trainer.wandb_mode == "online":
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))
        # Without a key wandb.init would ask for one, on a terminal that the launcher makes up and nobody reads.
        if not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "trainer.logger lists wandb, but there is no API key for it: run `wandb login` once, or set "
                "trainer.wandb_mode=offline, which writes to the run directory only (`wandb sync` sends it later)."
            )


def open_loggers(config: Config, say: Callable[[str], None], first_step: int | None = None) -> list[Logger]:
    """What trainer.logger lists besides the console; `say` takes a line for the user. A run that is gone on with names the
    first step that it does (again).
    """
    run_dir = Path(config.trainer.default_local_dir)
    loggers: list[Logger] = []
    if "tensorboard" in config.trainer.logger:
        loggers.append(TensorBoardFile(run_dir / "tensorboard", first_step))
    if "wandb" in config.trainer.logger:
        loggers.append(WandbRun(config, run_dir, say))
    return loggers


class TensorBoardFile:
    """One TensorBoard event file, one event for each step.

    torch.utils.tensorboard takes 3 to 4 s to import without torch (0.7 s after it), tensorboard's record writer 0.3 s;
    neither is imported by a rank that does not write. The record writer also needs no thread, unlike the event writers
    of both packages.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        """TensorBoard drops what earlier files have from `first_step` on."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(self._event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one event, and flush it."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def _append(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _new_id() -> str:
    return uuid.uuid4().hex[:8]


def _wandb_id(run_dir: Path) -> str:
    """The same for a run however often it is gone on with; offline, each time is a run of its own."""
    path = run_dir / "wandb" / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_new_id(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


class WandbRun:
    """A run of Weights & Biases, its files in the run directory's `wandb/`.

    A process of wandb's own does the sending, so a network that is slow or goes away costs training nothing: what could
    not be sent stays in the folder, for `wandb sync`. Where no server answers at the start, the run is an offline one. An
    error of wandb's ends the logging to wandb, with a message, and nothing else. (That process starts after MPI_Init, where
    a fork would be unsafe; Python's subprocess uses vfork on Linux, which copies no pages.)
    """

    def __init__(
        self, config: Config, run_dir: Path, say: Callable[[str], None], *, init_timeout_s: float = _INIT_TIMEOUT_S
    ) -> None:
        import wandb

        self._say = say
        self._teardown = wandb.teardown
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=init_timeout_s, finish_timeout=_FINISH_TIMEOUT_S
        )
        arguments: dict[str, Any] = {
            "project": config.trainer.project_name,
            "name": config.trainer.experiment_name,
            "dir": str(run_dir),
            "config": dataclasses.asdict(config),
            "settings": settings,
        }
        self._run: Any = None
        if config.trainer.wandb_mode == "online":
            same = {"id": _wandb_id(run_dir), "resume": "allow"}
            self._call("did not start online", lambda: wandb.init(mode="online", **same, **arguments))
        if self._run is None:
            self._call("did not start", lambda: wandb.init(mode="offline", id=_new_id(), **arguments))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the values to wandb's process."""
        if self._run is not None:
            run = self._run
            self._call("stopped", lambda: run.log(dict(values), step=step) or run)

    def close(self) -> None:
        """End the run and wandb's process, so that all is on disk; waits a minute at most for what is still to be sent."""
        if self._run is not None:
            run = self._run
            self._call("did not finish", lambda: run.finish() or self._teardown())

    def _call(self, failure: str, call: Callable[[], Any]) -> None:
        """The run is what `call` gives, or gone with a message if it fails."""
        self._run, message = None, ""
        try:
            self._run = call()
        except Exception as error:  # noqa: BLE001 (whatever a logger may raise, it must not end the training)
            message = " ".join(str(error).split())
        if message:
            self._say(f"wandb {failure}, its files stay in the run directory (wandb sync sends them): {message}")
