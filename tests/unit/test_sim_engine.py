"""The engine against a loop that makes every step and counts every block; preemption, capacity and sharing by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.simulator.cost import StepCurve
from rollpacker.simulator.engine import BLOCK_TOKENS, Replica


class LinearCost:
    """A step takes 10 ms, 1 ms a request, and from a mean context of 20.5 on 0.1 ms for each token more."""

    prefill_tokens_per_s = 777.0

    def curve(self, batch: int) -> StepCurve:
        flat = 0.010 + 0.001 * batch
        return StepCurve([(20.5, flat, 0.0), (math.inf, flat - 20.5e-4, 1e-4)])


@dataclass
class Job:
    prompt: int
    target: int
    group: int
    add_s: float = 0.0
    abort_s: float | None = None
    generated: int = 0


@dataclass
class Outcome:
    """(time, index) of first tokens and of ends; the sums."""

    started: list[tuple[float, int]] = field(default_factory=list)
    ended: list[tuple[float, int]] = field(default_factory=list)
    aborted_tokens: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0


class StepByStep:
    """The oracle: vLLM's rules, one step and one block at a time."""

    def __init__(self, jobs: list[Job], capacity_blocks: int, max_num_seqs: int) -> None:
        self.jobs, self.capacity, self.max_num_seqs = jobs, capacity_blocks, max_num_seqs
        self.generated = {i: job.generated for i, job in enumerate(jobs)}
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.first = {i for i, job in enumerate(jobs) if job.generated}  # another engine gave them theirs
        self.out = Outcome()

    def blocks(self, indices: list[int]) -> int:
        """Blocks of the prompt that are full are shared in a group; everything else is a request's own."""
        shared = {(self.jobs[i].group, b) for i in indices for b in range(self.jobs[i].prompt // BLOCK_TOKENS)}
        own = 0
        for i in indices:
            job = self.jobs[i]
            own += math.ceil((job.prompt + self.generated[i]) / BLOCK_TOKENS) - job.prompt // BLOCK_TOKENS
        return len(shared) + own

    def run(self) -> Outcome:
        now, todo = 0.0, sorted(range(len(self.jobs)), key=lambda i: self.jobs[i].add_s)
        aborts = sorted((j.abort_s, i) for i, j in enumerate(self.jobs) if j.abort_s is not None)
        while True:
            while (todo and self.jobs[todo[0]].add_s <= now) or (aborts and aborts[0][0] <= now):
                if todo and (not aborts or self.jobs[todo[0]].add_s <= aborts[0][0]):
                    self.waiting.append(todo.pop(0))
                else:
                    self.abort(aborts.pop(0)[1])
            if not self.running and not self.waiting:
                upcoming = [self.jobs[i].add_s for i in todo] + [t for t, _ in aborts]
                if not upcoming:
                    self.out.end_s = now
                    return self.out
                now = min(upcoming)
                continue
            now = self.step(now)

    def abort(self, index: int) -> None:
        for where in (self.running, self.waiting):
            if index in where:
                where.remove(index)
                self.out.aborted_tokens += self.generated[index] - self.jobs[index].generated

    def step(self, now: float) -> float:
        is_short = False
        while self.blocks(self.running) > self.capacity:
            victim = max(self.running)
            self.running.remove(victim)
            self.waiting.append(victim)
            self.out.num_preemptions += 1
            is_short = True
        prefill = 0
        while not is_short and self.waiting and len(self.running) < self.max_num_seqs:
            head = min(self.waiting)
            if self.blocks([*self.running, head]) > self.capacity:
                break
            job = self.jobs[head]
            cached = any(self.jobs[i].group == job.group for i in self.running)
            tokens = job.prompt + self.generated[head]
            prefill += max(tokens - cached * (job.prompt // BLOCK_TOKENS * BLOCK_TOKENS), 1)
            self.waiting.remove(head)
            self.running.append(head)
        mean = sum(self.jobs[i].prompt + self.generated[i] for i in self.running) / len(self.running)
        piece = LinearCost().curve(len(self.running)).pieces[mean >= 20.5]
        end = now + prefill / LinearCost.prefill_tokens_per_s + piece[1] + piece[2] * mean
        for i in list(self.running):
            self.generated[i] += 1
            self.out.num_tokens += 1
            if i not in self.first:
                self.first.add(i)
                self.out.started.append((end, i))
        for i in sorted(self.running):
            if self.generated[i] == self.jobs[i].target:
                self.running.remove(i)
                self.out.ended.append((end, i))
        self.out.busy_s += end - now
        return end


def by_events(jobs: list[Job], capacity_blocks: int, max_num_seqs: int) -> Outcome:
    """The same with the engine, from event to event."""
    engine = Replica(LinearCost(), capacity_tokens=capacity_blocks * BLOCK_TOKENS, max_num_seqs=max_num_seqs)
    out = Outcome()
    moments = [(job.add_s, 0, i) for i, job in enumerate(jobs)]
    moments += [(job.abort_s, 1, i) for i, job in enumerate(jobs) if job.abort_s is not None]
    moments.sort(key=lambda m: (m[0], m[1]))

    def schedule(now_s: float) -> None:
        started, first_s = engine.schedule(now_s)
        out.started += [(first_s, i) for i in started]

    while moments or engine.num_requests:
        next_s = engine.next_event_s
        if moments and moments[0][0] < next_s:
            time_s = moments[0][0]
            engine.advance(time_s)
            while moments and moments[0][0] == time_s:
                _, kind, i = moments.pop(0)
                if kind:
                    tokens = engine.abort(i)
                    out.aborted_tokens += 0 if tokens is None else tokens - jobs[i].generated
                else:
                    job = jobs[i]
                    engine.add(
                        i,
                        prompt_tokens=job.prompt,
                        target_tokens=job.target,
                        group=job.group,
                        generated_tokens=job.generated,
                    )
        else:
            ended = engine.pop_finished()
            time_s = engine.time_s
            out.ended += [(time_s, i) for i in ended]
        schedule(time_s)
        assert engine.time_s > time_s or engine.kv_cache_usage <= 1
    out.num_preemptions, out.num_tokens = engine.num_preemptions, engine.num_tokens
    out.busy_s, out.end_s = engine.busy_s, engine.time_s
    assert engine.busy_s + engine.idle_s == pytest.approx(engine.time_s, abs=1e-9)
    assert sum(end - start for start, end in engine.periods) == pytest.approx(engine.busy_s, abs=1e-9)
    return out


# Times off the grid of step ends, where a tie could be rounded either way.
TIMES = st.integers(0, 600).map(lambda n: n * 0.0113 + 0.000_271 * (n > 0))


@st.composite
def job_lists(draw: st.DrawFn) -> tuple[list[Job], int, int]:
    prompts = draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    jobs = []
    for _ in range(draw(st.integers(1, 9))):
        group = draw(st.integers(0, len(prompts) - 1))
        target = draw(st.integers(1, 70))
        add_s = draw(st.sampled_from([0.0, 0.0, 0.0, draw(TIMES)]))
        abort_s = draw(st.one_of(st.none(), st.none(), TIMES.map(lambda t, a=add_s: a + t + 0.000_031)))
        generated = draw(st.sampled_from([0, 0, 0, target - 1]))
        jobs.append(Job(prompts[group], target, group, add_s, abort_s, generated))
    longest = max(math.ceil((j.prompt + j.target) / BLOCK_TOKENS) for j in jobs)
    return jobs, draw(st.integers(longest, longest + 12)), draw(st.integers(1, 6))


@settings(max_examples=200, deadline=None)
@given(job_lists())
def test_events_equal_the_loop_over_steps(case: tuple[list[Job], int, int]) -> None:
    jobs, _, _ = case
    found, wanted = by_events(*case), StepByStep(*case).run()
    aborted_before_first = {i for i, job in enumerate(jobs) if job.abort_s is not None}
    started = [(t, i) for t, i in found.started if i not in aborted_before_first]
    assert [i for _, i in found.ended] == [i for _, i in wanted.ended]
    assert [t for t, _ in found.ended] == pytest.approx([t for t, _ in wanted.ended], abs=1e-9)
    expected = [(t, i) for t, i in wanted.started if i not in aborted_before_first]
    assert [i for _, i in started] == [i for _, i in expected]
    assert [t for t, _ in started] == pytest.approx([t for t, _ in expected], abs=1e-9)
    assert found.num_preemptions == wanted.num_preemptions
    assert (found.num_tokens, found.aborted_tokens) == (wanted.num_tokens, wanted.aborted_tokens)
    assert found.busy_s == pytest.approx(wanted.busy_s, abs=1e-9)


def test_the_last_launched_is_preempted_recomputed_and_ends_with_all_its_tokens() -> None:
    """Three requests of 16 + 40 tokens in 8 blocks: at most two can end in it together."""
    out = by_events([Job(16, 40, group) for group in range(3)], capacity_blocks=8, max_num_seqs=8)
    assert out.num_preemptions > 0
    assert [i for _, i in out.ended] == [0, 1, 2]
    assert out.num_tokens == 120


def test_no_slot_no_admission() -> None:
    out = by_events([Job(16, 10, g) for g in range(4)], capacity_blocks=100, max_num_seqs=2)
    assert out.ended[1][0] < out.started[2][0]


def test_a_group_shares_the_full_blocks_of_its_prompt() -> None:
    """Eight requests of a prompt of 160 tokens: 10 blocks once and one each for the response; apart they need 88."""
    together = by_events([Job(160, 16, 0) for _ in range(8)], capacity_blocks=18, max_num_seqs=8)
    apart = by_events([Job(160, 16, g) for g in range(8)], capacity_blocks=18, max_num_seqs=8)
    assert len({t for t, _ in together.ended}) == 1 and together.num_preemptions == 0
    assert len({t for t, _ in apart.ended}) == 8


def test_a_request_too_large_for_the_cache_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="does not fit"):
        by_events([Job(16, 100, 0)], capacity_blocks=3, max_num_seqs=8)


def test_a_long_stretch_costs_no_loop() -> None:
    """10^12 tokens in one event."""
    engine = Replica(LinearCost(), capacity_tokens=2**50, max_num_seqs=8)
    engine.add(0, prompt_tokens=1, target_tokens=10**12, group=0)
    engine.schedule(0.0)
    assert engine.pop_finished() == [0]
    assert engine.num_tokens == 10**12


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=30), st.integers(1, 5))
def test_littles_law_holds_of_the_slots_and_of_the_queue(jobs: list[tuple[int, int]], num_slots: int) -> None:
    """Number of requests x time is the sum of their times: of those that the engine says run, and of those that wait."""
    engine = Replica(LinearCost(), capacity_tokens=2**50, max_num_seqs=num_slots)
    for i, (prompt, target) in enumerate(jobs):
        engine.add(i, prompt_tokens=prompt, target_tokens=target, group=i)
    admitted, ended = {}, {}
    running_area = waiting_area = 0.0
    started, _ = engine.schedule(0.0)
    while True:
        admitted |= dict.fromkeys(started, engine.time_s)
        if not engine.num_requests:
            break
        running, waiting, before_s = engine.num_running, engine.num_requests - engine.num_running, engine.time_s
        assert running == min(num_slots, running + waiting)  # no slot is free while a request waits
        ended |= dict.fromkeys(engine.pop_finished(), engine.time_s)
        running_area += running * (engine.time_s - before_s)
        waiting_area += waiting * (engine.time_s - before_s)
        started, _ = engine.schedule(engine.time_s)
    assert admitted.keys() == ended.keys() == set(range(len(jobs)))
    assert running_area == pytest.approx(sum(ended[i] - admitted[i] for i in ended))
    assert waiting_area == pytest.approx(sum(admitted.values()))
    assert engine.num_tokens == sum(target for _, target in jobs)
