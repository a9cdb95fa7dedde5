"""TailBatchScheduler: the paper's tail batching (`tail_batching.mode: paper`, section 4.1), in the rules of docs/spec.md.

A SHORT round launches more prompts and more responses than it needs and keeps the first that finish; prompts that were
too slow wait in the LongPromptQueue until they fill a LONG round, in which nothing races. Finishing means the end of
generation, never the return of a reward: a slow verifier must not select samples.

Invariants: every prompt drawn is trained once, or rejected and counted, or still queued, or back among the fresh ones;
nothing is trained that another round has generated; the queue is first in, first out; a round always ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.messages import AbortRequest, Action, EndRound, LaunchRequests, RejectGroup, RoundPlan, TrainGroup
from rollpacker.policy.audit import SampleAudit
from rollpacker.policy.controller import RoundState, build_group
from rollpacker.policy.filters import AcceptanceRate, GroupFilter
from rollpacker.policy.launch import RoundLauncher
from rollpacker.policy.plain import ReturningSource
from rollpacker.types import Group, Prompt, Request, RoundKind

_Key = tuple[str, int]


@dataclass(frozen=True)
class TailBatchOptions:
    """The sizes and switches of tail batching; names as in the config."""

    train_batch_size: int  # P0, prompts a step
    num_responses: int  # R0, responses a prompt
    eta_prompts: float
    eta_responses: float
    drain: str = "training"  # training | epoch | none
    total_steps: int | None = None
    max_launched_ratio: float = 4.0
    drop_failed_groups: bool = False

    @property
    def num_raced_prompts(self) -> int:
        """Prompts that a SHORT round keeps in the race."""
        return _ceil(self.eta_prompts * self.train_batch_size)

    @property
    def num_raced_responses(self) -> int:
        """Responses a prompt in a SHORT round."""
        return _ceil(self.eta_responses * self.num_responses)

    @property
    def max_launched(self) -> int:
        """Prompts that a SHORT round may launch in all, replacements of rejected ones included."""
        return max(math.floor(self.max_launched_ratio * self.train_batch_size), self.num_raced_prompts)


def _ceil(x: float) -> int:
    return math.ceil(x - 1e-9)  # 1.1 * 10 is 11.000000000000002


@dataclass(frozen=True)
class QueuedPrompt:
    """A prompt that waits for a LONG round; `reason` is unfinished (lost a race), audit, or end (of the data)."""

    prompt: Prompt
    reason: str


class LongPromptQueue:
    """First in, first out."""

    def __init__(self) -> None:
        self._entries: deque[QueuedPrompt] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, prompt: Prompt, reason: str) -> None:
        """Join the tail."""
        self._entries.append(QueuedPrompt(prompt, reason))

    def pop(self, n: int) -> list[QueuedPrompt]:
        """Take the first `n`, or as many as there are."""
        return [self._entries.popleft() for _ in range(min(n, len(self._entries)))]

    def state_dict(self) -> list[list[Any]]:
        """Plain JSON values, in order; prompts are named, not copied."""
        return [[e.prompt.prompt_id, e.prompt.epoch, e.reason] for e in self._entries]

    def load_state_dict(self, state: Sequence[Sequence[Any]], prompt_of: Callable[[str, int], Prompt]) -> None:
        """Go back to a saved queue; `prompt_of(prompt_id, epoch)` gives the prompts."""
        self._entries = deque(QueuedPrompt(prompt_of(prompt_id, epoch), reason) for prompt_id, epoch, reason in state)


@dataclass
class _Race:
    """The open round, as far as the selection must know it."""

    finished: dict[_Key, None] = field(default_factory=dict)  # prompts in the order in which generation ended
    num_accepted: int = 0
    num_judged: int = 0
    num_filtered: int = 0


class TailBatchScheduler:
    """Both seams of the controller, RoundComposer and SelectionPolicy: what a race leaves over, later rounds launch."""

    def __init__(
        self,
        source: ReturningSource,
        launcher: RoundLauncher,
        options: TailBatchOptions,
        *,
        audit: SampleAudit,
        group_filter: GroupFilter | None = None,
    ) -> None:
        self._source = source
        self._launcher = launcher
        self._options = options
        self._audit = audit
        self._filter = group_filter
        self._queue = LongPromptQueue()
        self._acceptance = AcceptanceRate()
        self._epoch: int | None = None  # the one that is not drained yet, where drain is epoch
        self._race = _Race()

    # --- what a step launches ---

    def compose(self, step: int) -> RoundPlan | None:
        """LONG once the queue fills a round, or what is left of the run is needed to empty it; else SHORT."""
        batch = self._options.train_batch_size
        if len(self._queue) >= batch or self._must_drain(step):
            return self._compose_long(step)
        while True:
            prompts = self._draw(self._num_to_launch())
            if len(prompts) >= batch:
                return self._plan(step, RoundKind.SHORT, prompts, batch)
            if self._options.drain == "none":
                self._source.push_front(prompts)
                return self._compose_long(step) if len(self._queue) >= batch else None
            for prompt in prompts:  # the boundary: too few for a SHORT round
                self._queue.push(prompt, "end")
            if len(self._queue):
                return self._compose_long(step)
            if self._epoch is None:
                return None
            self._epoch = None  # drained; the next epoch may begin

    def long_queue_len(self) -> int:
        """Prompts that wait for a LONG round."""
        return len(self._queue)

    def _must_drain(self, step: int) -> bool:
        """Whether the steps left before the hard cap are those that the queue needs."""
        options = self._options
        if options.drain == "none" or options.total_steps is None or not len(self._queue):
            return False
        return options.total_steps - step + 1 <= math.ceil(len(self._queue) / options.train_batch_size)

    def _compose_long(self, step: int) -> RoundPlan:
        entries = self._queue.pop(self._options.train_batch_size)
        # Longest first; prompts of equal prediction stay in the order of the queue.
        prompts = sorted((e.prompt for e in entries), key=lambda p: -self._launcher.predict(p))
        return self._plan(step, RoundKind.LONG, prompts, len(prompts))

    def _plan(self, step: int, kind: RoundKind, prompts: Sequence[Prompt], num_groups: int) -> RoundPlan:
        options = self._options
        is_raced = kind is RoundKind.SHORT
        self._race = _Race()
        return self._launcher.plan(
            step,
            kind,
            prompts,
            num_groups=num_groups,
            num_responses=options.num_raced_responses if is_raced else options.num_responses,
            is_raced=is_raced,
        )

    def _num_to_launch(self) -> int:
        """Prompts to launch so that as many should pass the filter as race without one, within the round's bound."""
        wanted = self._options.num_raced_prompts
        if self._filter is None:
            return wanted
        return min(self._acceptance.num_to_launch(wanted), self._options.max_launched)

    def _draw(self, n: int) -> list[Prompt]:
        """Up to `n` fresh prompts; those that are drawn for the audit go to the queue, unraced and unseen.

        Where drain is `epoch`, the prompts of the next epoch stay where they are.
        """
        fresh: list[Prompt] = []
        while len(fresh) < n:
            drawn = self._source.draw(n - len(fresh))
            usable = drawn
            if self._options.drain == "epoch" and drawn:
                self._epoch = drawn[0].epoch if self._epoch is None else self._epoch
                usable = [p for p in drawn if p.epoch <= self._epoch]
                self._source.push_front(drawn[len(usable) :])
            for prompt in usable:
                if self._audit.is_audited(prompt):
                    self._queue.push(prompt, "audit")
                else:
                    fresh.append(prompt)
            if not usable or len(usable) < len(drawn):
                break
        return fresh

    # --- what becomes of responses and groups ---

    def on_finished(self, state: RoundState, request: Request) -> Sequence[Action]:
        """A prompt finishes with its R0-th response: abort its others; with the P0-th prompt abort all others."""
        race, key = self._race, request.prompt.key
        self._launcher.release(request.index)
        if len(state.finished_of[key]) < self._options.num_responses:
            return ()
        race.finished[key] = None
        if state.plan.kind is RoundKind.LONG:
            return ()
        actions = [self._abort(r) for r in state.requests_of[key] if r.index not in state.finished]
        if self._filter is None and len(race.finished) == state.plan.num_groups:
            actions += self._abort_unfinished(state)
        return actions

    def on_scored(self, state: RoundState, request: Request) -> Sequence[Action]:
        """Judge a prompt that has finished and whose kept responses are all scored; replace it, or end the round."""
        race, key = self._race, request.prompt.key
        if key not in race.finished or state.num_scored_of[key] < self._options.num_responses:
            return ()
        group = build_group(state, state.finished_of[key])
        race.num_judged += 1
        action = self._judge(race, group)
        if race.num_accepted == state.plan.num_groups:
            return [action, *self._end(race, state)]
        if self._replaces(state):
            launched = self._replace(race, state)
            if launched:
                return [action, LaunchRequests(launched)]
            is_last = race.num_judged == len(state.requests_of)
        else:
            is_last = race.num_judged == state.plan.num_groups
        return [action, *self._end(race, state)] if is_last else [action]

    def on_round_end(self, state: RoundState) -> None:
        """Queue what was too slow, give back what was not, and write down what the round has shown."""
        needed = self._options.num_responses
        cutoff = max((f.num_tokens for f in state.finished.values()), default=1)
        returned = []
        for key, requests in state.requests_of.items():
            if key in state.trained or key in state.rejected:
                continue
            prompt, finished = requests[0].prompt, state.finished_of.get(key, [])
            num_ended = len(finished) + sum(r.index in state.late for r in requests)
            # Neither is evidence of length: it was done, too late by a moment; or it has waited for a slot.
            if num_ended >= needed or any(r.index not in state.started for r in requests):
                returned.append(prompt)
                continue
            self._queue.push(prompt, "unfinished")
            lengths = [state.finished[r.index].num_tokens for r in finished]
            self._launcher.history.add_censored(prompt.prompt_id, lengths, needed - len(lengths), cutoff)
        self._source.push_front(returned)
        self._launcher.end_round(state)

    def _judge(self, race: _Race, group: Group) -> TrainGroup | RejectGroup:
        if self._options.drop_failed_groups and any(r.is_reward_error for r in group.responses):
            return RejectGroup(group.prompt, "reward_error")
        race.num_filtered += 1
        if self._filter is not None and not self._filter.accepts([r.reward for r in group.responses]):
            return RejectGroup(group.prompt, "filter")
        race.num_accepted += 1
        return TrainGroup(group)

    def _replaces(self, state: RoundState) -> bool:
        """Only SHORT rounds with a filter replace what is rejected; the others have closed, or shrink."""
        return self._filter is not None and state.plan.kind is RoundKind.SHORT

    def _replace(self, race: _Race, state: RoundState) -> tuple[Request, ...]:
        """Fresh prompts for the rejected ones, so that as many race on as without a filter."""
        num_prompts = len(state.requests_of)
        num_missing = self._options.num_raced_prompts - race.num_accepted - (num_prompts - race.num_judged)
        if num_missing <= 0:
            return ()
        prompts = self._draw(min(num_missing, self._options.max_launched - num_prompts))
        return self._launcher.add(state, prompts, self._options.num_raced_responses)

    def _end(self, race: _Race, state: RoundState) -> list[Action]:
        if self._filter is not None:
            self._acceptance.add_round(race.num_accepted, race.num_filtered)
        actions = self._abort_unfinished(state)
        if not race.num_accepted:  # train what there is rather than nothing
            keys = list(race.finished)[: state.plan.num_groups]
            actions += [TrainGroup(build_group(state, state.finished_of[key])) for key in keys]
        return [*actions, EndRound()]

    def _abort(self, request: Request) -> Action:
        self._launcher.release(request.index)
        return AbortRequest(request)

    def _abort_unfinished(self, state: RoundState) -> list[Action]:
        """Abort what still runs of the prompts that have not finished; the others have no request left in an engine."""
        return [
            self._abort(r)
            for r in state.requests
            if r.prompt.key not in self._race.finished
            and r.index not in state.finished
            and r.index not in state.aborted
        ]

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next round depends on, as plain JSON values; between two rounds."""
        return {
            "source": self._source.state_dict(),
            "queue": self._queue.state_dict(),
            "acceptance": self._acceptance.state_dict(),
            "launcher": self._launcher.state_dict(),
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self._source.load_state_dict(state["source"])
        self._queue.load_state_dict(state["queue"], self._source.prompt)
        self._acceptance.load_state_dict(state["acceptance"])
        self._launcher.load_state_dict(state["launcher"])
        self._epoch = state["epoch"]
