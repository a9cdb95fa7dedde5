"""The process that scores: it loads the reward function once and then runs it on task after task.

It is a child of the fork server and talks to its owner, the scheduler, over one socket: tasks in (LENGTH, then a pickle),
reports out (REPORT, then text). It says when it begins a task, because the time limit runs from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import reprlib
import signal
import socket
import struct
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from rollpacker.config import ConfigError
from rollpacker.reward.verifier import Verifier, load_verifier
from rollpacker.user_function import describe_error

OWNERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LENGTH = struct.Struct("<I")  # bytes of the pickled task that follow
REPORT = struct.Struct("<BddI")  # kind, seconds, score, bytes of text that follow
# The text of FAILED and RAISED says what went wrong; that of ANSWERED is the answer, and SCORED has none.
READY, FAILED, BEGUN, SCORED, ANSWERED, RAISED = range(6)
_PR_SET_PDEATHSIG = 1


def run_tasks(channel: socket.socket, verifier: str, function: str | None) -> None:
    """Load the reward function, then score task after task until the owner closes the channel."""
    _obey_owner()
    channel.set_inheritable(False)  # a program that outlives this process must not keep the channel open
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), channel.makefile("rb") as tasks:
        try:
            judge = load_verifier(verifier, function)
        except ConfigError as error:
            _report(channel, FAILED, text=str(error))
            return
        _report(channel, READY)
        while header := tasks.read(LENGTH.size):
            response, facts, wants_answer = pickle.loads(tasks.read(*LENGTH.unpack(header)))
            _report(channel, BEGUN, seconds=time.monotonic())
            _report(channel, *_score(judge, response, facts, wants_answer))


def pack_task(response: str, facts: dict[str, str], *, wants_answer: bool) -> bytes:
    """One task as it travels to a process."""
    payload = pickle.dumps((response, facts, wants_answer), pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(payload)) + payload


def _obey_owner() -> None:
    """Die with the owner, whatever kills it, and leave its signals to it."""
    os.setpgid(0, 0)  # the owner kills the group: the worker and what the reward function started
    # The kernel kills this process when its parent, the fork server, ends; that ends when nobody holds this descriptor.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in OWNERS_SIGNALS[1:]:
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OWNERS_SIGNALS)


def _ignore(*_: Any) -> None:
    """Ignore a signal; unlike SIG_IGN, programs that a reward function starts do not inherit it."""


def _score(judge: Verifier, response: str, facts: dict[str, str], wants_answer: bool) -> tuple[int, float, float, str]:
    """Run the reward function, and extract the answer if asked: the kind of report, seconds, score and text."""
    start_s = time.monotonic()
    answer: Any = None
    code = getattr(judge.score, "__code__", None)
    try:
        value: Any = judge.score(response, **facts)
        if not hasattr(type(value), "__float__"):
            raise TypeError(f"the reward function returned {reprlib.repr(value)}, expected a number")
        score = float(value)
        if not math.isfinite(score):
            raise ValueError(f"the reward function returned {score}, expected a finite number")
        if wants_answer:
            answer = judge.extract_answer(response)
            if not isinstance(answer, str | None):
                raise TypeError(f"extract_answer returned {reprlib.repr(answer)}, expected text or None")
    except (Exception, SystemExit) as error:  # noqa: BLE001 (users' code may raise anything; it costs that sample only)
        return RAISED, time.monotonic() - start_s, 0.0, describe_error(error, Path(code.co_filename) if code else None)
    return SCORED if answer is None else ANSWERED, time.monotonic() - start_s, score, answer or ""


def _report(channel: socket.socket, kind: int, seconds: float = 0.0, score: float = 0.0, text: str = "") -> None:
    encoded = text.encode(errors="replace")
    channel.sendall(REPORT.pack(kind, seconds, score, len(encoded)) + encoded)
