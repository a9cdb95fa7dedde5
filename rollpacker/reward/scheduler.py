"""Scores responses in worker processes while the rollout goes on.

Invariants: every response that is submitted comes back exactly once; nothing here waits for a reward function, except
`start` and `wait`; a reward that raises, gives no finite number, is late or kills its process costs that sample alone.

The workers are children of a fork server that starts before MPI: forking an MPI process is unsafe. A pool of the
standard library cannot kill one task, so each worker has its own socket here, and a late one is killed and replaced.
Tasks go ahead of their turn to a busy worker while a backlog lasts, so that the pace is not set by how often the
owner polls. A worker says when it begins a task: the time limit runs from there.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util

from rollpacker.config import ConfigError
from rollpacker.reward import scorer

_CONTEXT = multiprocessing.get_context("forkserver")
_MAX_IN_FLIGHT = 4  # tasks sent to one worker while a backlog lasts, otherwise one: a late task holds up the next
_BACKLOG = 8  # queued tasks per worker
_LOAD_TIMEOUT_S = 120.0  # for a worker to import its reward function
_MAX_IDLE_DEATHS = 3  # in a row and per worker, before the scheduler gives up


@dataclass(frozen=True)
class RewardResult:
    """What became of one submitted response; `is_error` marks a score 0.0 that stands for the failure in `message`.

    `answer` is what the response answers, where that was asked for and there is one.
    """

    request_index: int
    score: float
    is_error: bool
    execution_s: float
    message: str = ""
    answer: str | None = None


def start_forkserver() -> None:
    """Start the process that forks the workers, unless it runs already. Call it before MPI_Init."""
    resource_tracker.ensure_running()  # first: it unblocks signals
    # The standard library only; a worker then starts in 10 ms, not 150.
    forkserver.set_forkserver_preload([scorer.__name__])
    # Slurm signals every process of a job, but only the owner decides: what starts here inherits the blocked signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, scorer.OWNERS_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Task:
    sequence: int
    request_index: int
    prompt_id: str
    timeout_s: float
    frame: bytes


class _Worker:
    """The owner's end of a worker process: the socket, and the tasks that were sent and not answered, in order."""

    def __init__(self, verifier: str, function: str | None) -> None:
        start_forkserver()  # anew, should something have killed it
        self.socket, channel = socket.socketpair()
        with channel, _without_main():
            self.process = _CONTEXT.Process(
                target=scorer.run_tasks, args=(channel, verifier, function), name="reward-worker"
            )
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.socket.setblocking(False)
        self.is_ready = False
        self.is_gone = False  # its socket ended; its exit code, and the sentinel with it, comes a moment later
        self.spawned_s = time.monotonic()
        self.failure = ""
        self.in_flight: deque[_Task] = deque()
        self.begun_s: float | None = None  # when it began in_flight[0]; processes of a host share this clock
        self.outbox = bytearray()
        self._inbox = bytearray()

    def send(self, task: _Task) -> None:
        self.in_flight.append(task)
        self.outbox += task.frame
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes; a worker that is busy may leave the rest for later."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # death shows when reading
            del self.outbox[: self.socket.send(self.outbox)]

    def receive(self) -> tuple[list[tuple[int, float, float, str]], bool]:
        """Read what is there: whole reports, and whether the worker is still connected."""
        is_alive = True
        try:
            while data := self.socket.recv(65536):
                self._inbox += data
            is_alive = False
        except BlockingIOError:
            pass
        except ConnectionResetError:
            is_alive = False
        reports, start = [], 0
        while len(self._inbox) - start >= scorer.REPORT.size:
            kind, seconds, score, length = scorer.REPORT.unpack_from(self._inbox, start)
            end = start + scorer.REPORT.size + length
            if len(self._inbox) < end:
                break
            reports.append((kind, seconds, score, self._inbox[end - length : end].decode()))
            start = end
        del self._inbox[:start]
        return reports, is_alive

    def deadline_s(self) -> float:
        if self.is_gone:
            return math.inf
        if not self.is_ready:
            return self.spawned_s + _LOAD_TIMEOUT_S
        return math.inf if self.begun_s is None else self.begun_s + self.in_flight[0].timeout_s

    def kill(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # once more by itself: a worker that only just started has no group of its own
        self.socket.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: a child would run the owner's script again (or import pytest), and needs none of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.process.join(timeout=5)
    workers.clear()


class RewardScheduler:
    """Scores responses on `num_workers` processes; see the module's docstring. Not for use by several threads."""

    def __init__(self, verifier: str, function: str | None, num_workers: int) -> None:
        """Take `reward.verifier`, `reward.function` and `reward.num_workers`; processes start in `start`."""
        self._verifier = verifier
        self._function = function
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._queue: deque[_Task] = deque()
        self._done: list[tuple[int, RewardResult]] = []
        self._num_submitted = 0
        self._num_finished = 0
        self._num_idle_deaths = 0
        self._is_started = False
        # Not atexit or weakref: at exit multiprocessing waits for its children, and this must come before.
        self._stop = util.Finalize(self, _kill_all, args=(self._workers,), exitpriority=10)

    def start(self) -> None:
        """Start the workers and load the reward function in each; returns when all are ready (math: about 1 s).

        Raises ConfigError where the function does not load, so call it before training. Does nothing when started.
        """
        if self._is_started:
            return
        if not self._stop.still_active():
            raise RuntimeError("the reward scheduler is closed.")
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self._verifier, self._function))
        while not all(worker.is_ready for worker in self._workers):
            self._advance(timeout_s=1.0)
        self._is_started = True

    def submit(
        self,
        request_index: int,
        *,
        response: str,
        prompt: str,
        ground_truth: str,
        finish_reason: str,
        domain: str,
        prompt_id: str,
        timeout_s: float,
        wants_answer: bool = False,
    ) -> None:
        """Hand a response over for scoring, in the order of the calls; `timeout_s` runs from the start of the score.

        `wants_answer`: have the answer extracted as well, for a majority vote.
        """
        self.start()
        facts = {"prompt": prompt, "ground_truth": ground_truth, "finish_reason": finish_reason}
        facts |= {"domain": domain, "prompt_id": prompt_id}
        frame = scorer.pack_task(response, facts, wants_answer=wants_answer)
        self._queue.append(_Task(self._num_submitted, request_index, prompt_id, timeout_s, frame))
        self._num_submitted += 1
        self._dispatch()

    def poll(self) -> list[RewardResult]:
        """Give the results that have come in, as they came. Never waits; call it every few milliseconds.

        Raises RuntimeError where workers die again and again without having begun a task.
        """
        if self._num_finished < self._num_submitted:
            self._advance(timeout_s=0.0)
        results = [result for _, result in self._done]
        self._done.clear()
        return results

    def wait(self) -> list[RewardResult]:
        """Wait for everything submitted so far and give what was not given yet, in the order of submission."""
        while self._num_finished < self._num_submitted:
            self._advance(timeout_s=1.0)
        self._done.sort(key=lambda entry: entry[0])
        return self.poll()

    @property
    def num_outstanding(self) -> int:
        """Count the responses that were submitted and whose results were not given yet."""
        return self._num_submitted - self._num_finished + len(self._done)

    def close(self) -> None:
        """Kill the workers; what is outstanding is dropped. Done at exit too, and harmless when repeated."""
        self._stop()
        self._is_started = False
        self._queue.clear()
        self._done.clear()
        self._num_finished = self._num_submitted

    def _advance(self, timeout_s: float) -> None:
        """Read reports (waiting for one up to `timeout_s`), replace dead and late workers, send tasks."""
        by_descriptor = {w.process.sentinel if w.is_gone else w.socket.fileno(): w for w in self._workers}
        poller = select.poll()
        for descriptor, worker in by_descriptor.items():
            poller.register(descriptor, select.POLLIN | (select.POLLOUT if worker.outbox else 0))
        if timeout_s:
            next_s = min(worker.deadline_s() for worker in self._workers) - time.monotonic()
            timeout_s = min(timeout_s, max(next_s, 0.0))
        for descriptor, _ in poller.poll(math.ceil(timeout_s * 1e3)):
            worker = by_descriptor[descriptor]
            if worker.is_gone:
                self._replace(worker, f"the reward function ended its process ({_describe_exit(worker)})")
            else:
                self._exchange(worker)
        now_s = time.monotonic()
        for worker in [w for w in self._workers if w.deadline_s() < now_s]:
            self._end_late(worker, now_s)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send queued tasks: one to each idle worker, and some more while there is a backlog."""
        while self._queue:
            free = [w for w in self._workers if w.is_ready and not w.is_gone and len(w.in_flight) < _MAX_IN_FLIGHT]
            worker = min(free, key=lambda w: len(w.in_flight), default=None)
            if worker is None or (worker.in_flight and len(self._queue) <= _BACKLOG * self._num_workers):
                return
            worker.send(self._queue.popleft())

    def _exchange(self, worker: _Worker) -> None:
        if worker.outbox:
            worker.flush()
        reports, is_alive = worker.receive()
        for kind, seconds, score, text in reports:
            if kind == scorer.READY:
                worker.is_ready = True
            elif kind == scorer.FAILED:
                worker.failure = text
            elif kind == scorer.BEGUN:
                worker.begun_s = seconds
                self._num_idle_deaths = 0
            elif kind == scorer.ANSWERED:
                self._score(worker, seconds, score, answer=text)
            else:
                self._score(worker, seconds, score, message=text)
        if not is_alive:
            worker.kill()
            worker.outbox.clear()
            worker.is_gone = True

    def _score(
        self, worker: _Worker, seconds: float, score: float, message: str = "", answer: str | None = None
    ) -> None:
        task = worker.in_flight.popleft()
        worker.begun_s = None
        if seconds > task.timeout_s:  # the owner polled too late to kill it; the same law holds
            score, answer = 0.0, None
            message = f"the reward took {seconds:.3g} s, its limit is {task.timeout_s:g} s"
        self._finish(task, score, seconds, message, answer)

    def _end_late(self, worker: _Worker, now_s: float) -> None:
        why = f"loading took more than {_LOAD_TIMEOUT_S:g} s"
        if worker.begun_s is not None:
            why = f"stopped after {now_s - worker.begun_s:.3g} s, its limit is {worker.in_flight[0].timeout_s:g} s"
        self._replace(worker, why)

    def _replace(self, worker: _Worker, why: str) -> None:
        """Put a new worker in the place of one that is dead or late: the task it had begun fails, others go back."""
        worker.kill()
        if not self._is_started:
            self.close()
            name = f"reward.function={self._function}" if self._function else f"reward.verifier={self._verifier}"
            raise ConfigError(worker.failure or f"{name} did not load: {why}.")
        if worker.begun_s is not None:
            self._finish(worker.in_flight.popleft(), 0.0, time.monotonic() - worker.begun_s, why)
        else:
            self._num_idle_deaths += 1
            if self._num_idle_deaths > _MAX_IDLE_DEATHS * self._num_workers:
                self.close()
                raise RuntimeError(
                    f"reward workers died {self._num_idle_deaths} times in a row before they began a task; the last: "
                    f"{worker.failure or why}. Is the node out of memory, or was the reward function's file edited?"
                )
        self._queue.extendleft(reversed(worker.in_flight))
        self._workers[self._workers.index(worker)] = _Worker(self._verifier, self._function)

    def _finish(self, task: _Task, score: float, seconds: float, message: str, answer: str | None = None) -> None:
        text = f"prompt {task.prompt_id}: {message}" if message else ""
        result = RewardResult(task.request_index, score, bool(message), seconds, text, answer)
        self._done.append((task.sequence, result))
        self._num_finished += 1


def _describe_exit(worker: _Worker) -> str:
    code = worker.process.exitcode or 0
    return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
