"""Replica: one vLLM engine under continuous batching, advanced from event to event.

A step gives every running request one token. Before a step, as vLLM V1 schedules it:
1. blocks of 16 tokens are taken for the tokens to come; where they do not suffice, the running request that was launched
   last (the lowest priority) is preempted: it loses its KV and waits again, to be recomputed;
2. after a step without preemption, waiting requests are admitted in launch order while a slot (max_num_seqs) and blocks
   for their tokens so far are free; the head of the queue is never passed. Their prefill lengthens the step, at whose end
   they have their first token.
Requests of a prompt share the full blocks of the prompt while they run on one replica.

Between two events the running set is fixed, so any number of steps costs O(1) (`StepCurve`); an event costs O(log n).

Invariants: blocks in use never exceed the capacity; busy and idle seconds add up to the time that has passed; a request
gets exactly its tokens, however often it is preempted. `tests/unit/test_sim_engine.py` compares with a per-token loop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass

from rollpacker.simulator.cost import EngineCost, StepCurve

BLOCK_TOKENS = 16


@dataclass(slots=True)
class _Entry:
    """A request in this replica. `origin` is the step count at which it would have had no token, were it never preempted."""

    prompt_tokens: int
    target_tokens: int
    group: Hashable
    generated_tokens: int = 0  # while it waits
    origin: int = 0  # while it runs
    is_running: bool = False
    has_started: bool = False


class Replica:
    """The engine of one tensor-parallel group."""

    def __init__(self, cost: EngineCost, *, capacity_tokens: int, max_num_seqs: int, time_s: float = 0.0) -> None:
        self._cost = cost
        self._capacity_blocks = capacity_tokens // BLOCK_TOKENS
        self._max_num_seqs = max_num_seqs
        self.time_s = time_s  # of the step boundary that `step` names
        self.step = 0
        self.num_running = 0
        self.num_tokens = 0
        self.num_preemptions = 0
        self.busy_s = 0.0
        self.idle_s = 0.0
        self.next_event_s = math.inf
        self.slowdown = 1.0  # of the steps from here on: another process on the same GPUs; `advance` before a change
        self.periods: list[tuple[float, float]] = []  # in which requests ran
        self._busy_since: float | None = None
        self._entries: dict[int, _Entry] = {}
        self._finishes: list[tuple[int, int]] = []  # (step, index), with stale ones
        self._youngest: list[int] = []  # -index of the running, with stale ones
        self._waiting: list[int] = []
        self._context = 0  # tokens of the running requests: prompts and responses so far
        self._phases = [0] * BLOCK_TOKENS  # running requests by (tokens - step) mod 16
        self._sharers: dict[Hashable, int] = {}
        self._saved_blocks = 0
        self._curve: StepCurve | None = None
        self._prefill_s = 0.0  # what the next step takes longer
        self._span = 0  # steps to the next event

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._entries)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that the next step needs; above 1 only where a preemption is due."""
        return self._blocks() / self._capacity_blocks

    def add(
        self, index: int, *, prompt_tokens: int, target_tokens: int, group: Hashable, generated_tokens: int = 0
    ) -> None:
        """Queue a request that ends after `target_tokens`; its launch order `index` is its priority.

        `generated_tokens` of them another replica has made. Call `schedule` when all are queued.
        """
        self._entries[index] = _Entry(
            prompt_tokens, target_tokens, group, generated_tokens, has_started=generated_tokens > 0
        )
        heapq.heappush(self._waiting, index)

    def advance(self, time_s: float) -> None:
        """Move to the first step boundary at or after `time_s`: a step that has begun is completed."""
        if not self.num_running:
            if time_s > self.time_s:
                self.idle_s += time_s - self.time_s
                self.time_s = time_s
            return
        left_s = (time_s - self.time_s) / self.slowdown
        if left_s <= 0 or not self._span:
            return
        assert self._curve is not None, "schedule() has priced the batch"
        left_s -= self._prefill_s
        mean = self._context / self.num_running
        self._move(min(max(self._curve.steps_to_cover(mean, left_s) if left_s > 0 else 1, 1), self._span))

    def pop_finished(self) -> list[int]:
        """Move to the next event; the requests that end there, in launch order. `schedule` follows."""
        if self._span:
            self._move(self._span)
        ended = []
        while (head := self._next_finish()) is not None and head == self.step:
            ended.append(self._finishes[0][1])
            self._remove(ended[-1])
        return sorted(ended)

    def abort(self, index: int) -> int | None:
        """Drop a request; its tokens so far. None where it is not here, or ends with the step that is being completed."""
        entry = self._entries.get(index)
        if entry is None:
            return None
        if not entry.is_running:
            del self._entries[index]
            return entry.generated_tokens
        if entry.origin + entry.target_tokens == self.step:
            return None
        tokens = self.step - entry.origin
        self._remove(index)
        return tokens

    def schedule(self, now_s: float) -> tuple[list[int], float]:
        """Decide the next steps: preempt, admit, find the next event. Who gets a first token, and when.

        While a step is being completed, its end is the next event, and nothing is decided before.
        """
        started: list[int] = []
        self.next_event_s, self._span = math.inf, 0
        if self.time_s > now_s or self._next_finish() == self.step:
            self.next_event_s = self.time_s if self._entries else math.inf
            self._note_period()
            return started, self.time_s
        num_preemptions = self.num_preemptions
        while self._blocks() > self._capacity_blocks:
            self._preempt()
        if num_preemptions == self.num_preemptions:
            started = self._admit()
        self._note_period()
        if not self.num_running:
            if self._entries and num_preemptions == self.num_preemptions:
                raise RuntimeError(
                    f"a waiting request does not fit an empty KV cache of {self._capacity_blocks} blocks"
                )
            return started, self.time_s
        finish = self._next_finish()
        assert finish is not None, "a running request has an end"
        span = finish - self.step
        if num_preemptions != self.num_preemptions:
            span = 1  # admission is tried again after one step
        self._span = min(span, self._steps_to_overflow(span))
        self._curve = self._cost.curve(self.num_running)
        self.next_event_s = self._end_s(self._span)
        return started, self._end_s(1) if started else self.time_s

    def _end_s(self, num_steps: int) -> float:
        """When so many more steps are done."""
        assert self._curve is not None, "schedule() has priced the batch"
        steps_s = self._curve.total_s(self._context / self.num_running, num_steps)
        return self.time_s + self.slowdown * (self._prefill_s + steps_s)

    def _move(self, num_steps: int) -> None:
        end_s = self.next_event_s if num_steps == self._span else self._end_s(num_steps)
        self._prefill_s = 0.0
        self.busy_s += end_s - self.time_s
        self.time_s = end_s
        self.step += num_steps
        self._span -= num_steps
        self._context += self.num_running * num_steps
        self.num_tokens += self.num_running * num_steps

    def _next_finish(self) -> int | None:
        while self._finishes:
            step, index = self._finishes[0]
            entry = self._entries.get(index)
            if entry is not None and entry.is_running and entry.origin + entry.target_tokens == step:
                return step
            heapq.heappop(self._finishes)
        return None

    def _blocks(self) -> int:
        """Blocks that the next step needs: each running request holds its tokens so far, in whole blocks."""
        step = self.step
        padding = sum(n * (-(phase + step) % BLOCK_TOKENS) for phase, n in enumerate(self._phases) if n)
        return (self._context + padding) // BLOCK_TOKENS - self._saved_blocks

    def _steps_to_overflow(self, limit: int) -> int:
        """Steps until the blocks do not suffice, if that is within `limit`; else `limit`."""
        n = self.num_running
        most = (self._context + n * (limit + BLOCK_TOKENS - 1)) // BLOCK_TOKENS - self._saved_blocks
        if most <= self._capacity_blocks:
            return limit
        free = self._capacity_blocks - self._blocks()
        rounds, free = divmod(free, n)  # in 16 steps each request takes one block
        steps = rounds * BLOCK_TOKENS
        while free >= 0 and steps < limit:
            steps += 1
            free -= self._phases[(1 - self.step - steps) % BLOCK_TOKENS]
        return min(steps, limit)

    def _preempt(self) -> None:
        while True:
            index = -heapq.heappop(self._youngest)
            entry = self._entries.get(index)
            if entry is not None and entry.is_running:
                break
        if self.num_running == 1:
            raise RuntimeError(f"request {index} alone does not fit a KV cache of {self._capacity_blocks} blocks")
        generated = self.step - entry.origin
        self._remove(index)
        entry.is_running, entry.generated_tokens = False, generated
        self._entries[index] = entry
        heapq.heappush(self._waiting, index)
        self.num_preemptions += 1

    def _admit(self) -> list[int]:
        """Let the waiting in; those among them that get their first token."""
        started = []
        prefill_tokens = 0
        if self._waiting and self.num_running < self._max_num_seqs:
            free = self._capacity_blocks - self._blocks()
            while self._waiting and self.num_running < self._max_num_seqs:
                index = self._waiting[0]
                entry = self._entries.get(index)
                if entry is None or entry.is_running:
                    heapq.heappop(self._waiting)
                    continue
                tokens = entry.prompt_tokens + entry.generated_tokens
                shared = entry.prompt_tokens // BLOCK_TOKENS if self._sharers.get(entry.group) else 0
                blocks = -(-tokens // BLOCK_TOKENS) - shared
                if blocks > free:
                    break
                heapq.heappop(self._waiting)
                free -= blocks
                prefill_tokens += max(tokens - shared * BLOCK_TOKENS, 1)
                self._start(index, entry, tokens, shared)
                if not entry.has_started:
                    entry.has_started = True
                    started.append(index)
        self._prefill_s += prefill_tokens / self._cost.prefill_tokens_per_s  # nothing is left but of a step not begun
        return started

    def _start(self, index: int, entry: _Entry, tokens: int, shared_blocks: int) -> None:
        entry.is_running = True
        entry.origin = self.step - entry.generated_tokens
        self.num_running += 1
        self._context += tokens
        self._phases[(tokens - self.step) % BLOCK_TOKENS] += 1
        self._sharers[entry.group] = self._sharers.get(entry.group, 0) + 1
        self._saved_blocks += shared_blocks
        heapq.heappush(self._finishes, (entry.origin + entry.target_tokens, index))
        heapq.heappush(self._youngest, -index)

    def _remove(self, index: int) -> None:
        """Take a running request out."""
        entry = self._entries.pop(index)
        tokens = entry.prompt_tokens + self.step - entry.origin
        self.num_running -= 1
        self._context -= tokens
        self._phases[(tokens - self.step) % BLOCK_TOKENS] -= 1
        left = self._sharers[entry.group] - 1
        if left:
            self._sharers[entry.group] = left
            self._saved_blocks -= entry.prompt_tokens // BLOCK_TOKENS
        else:
            del self._sharers[entry.group]

    def stop(self, end_s: float) -> int:
        """The round is over: drop what is left, at the boundary where it stands; tokens that running requests had."""
        tokens = sum(self.step - e.origin for e in self._entries.values() if e.is_running)
        for index in [i for i, e in self._entries.items() if e.is_running]:
            self._remove(index)
        self._entries.clear()
        self._note_period()
        self.advance(end_s)
        return tokens

    def _note_period(self) -> None:
        """Begin or end a stretch of time in which something runs."""
        if self.num_running and self._busy_since is None:
            self._busy_since = self.time_s
        elif not self.num_running and self._busy_since is not None:
            self.periods.append((self._busy_since, self.time_s))
            self._busy_since = None
