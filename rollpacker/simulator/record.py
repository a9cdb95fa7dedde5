"""What a simulated run leaves: rows and bars of each step in the formats of a real run, and the summary of the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollpacker.config import Config
from rollpacker.messages import UpdatePlan
from rollpacker.profiling.bubbles import idle_ratio, reward_bubble_ratio, rollout_bubble_ratio
from rollpacker.profiling.rows import length_metrics, rollout_metrics, sample_rows, spread
from rollpacker.profiling.trace import Span, TraceWriter
from rollpacker.simulator.law import coverage, own_coverage
from rollpacker.simulator.streaming import StreamTimes
from rollpacker.simulator.training import UpdateTimes
from rollpacker.simulator.workload import Workload
from rollpacker.types import Request, RoundKind


@dataclass(frozen=True)
class RoundFacts:
    """One rollout; seconds of the virtual clock, lists by replica."""

    launch_s: float
    end_s: float
    tensor_model_parallel_size: int
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    freed_s: tuple[float, ...]  # from the scale-down to the end, for the replicas that left
    busy_periods: tuple[tuple[tuple[float, float], ...], ...]
    reward_wait_s: float
    num_aborted_tokens: int
    finished: tuple[tuple[Request, int, float], ...]  # request, tokens, time

    @property
    def wall_s(self) -> float:
        """Launch to end."""
        return self.end_s - self.launch_s


@dataclass
class StepFacts:
    """One step: its rollout, its update, and what lies between them."""

    start_s: float
    round: RoundFacts
    times: UpdateTimes
    phase_switch_s: float
    refit_s: float
    stream: StreamTimes | None = None

    @property
    def streamed_gpu_s(self) -> float:
        """GPU-seconds of training before the rollout's end."""
        done = self.round
        num_freed = done.tensor_model_parallel_size * sum(s > 0 for s in done.freed_s)
        return 0.0 if self.stream is None else self.stream.overlap_s * num_freed

    @property
    def end_s(self) -> float:
        """The end of the refit."""
        return self.round.end_s + self.phase_switch_s + self.times.total_s + self.refit_s


class StepSink(Protocol):
    """Takes what is known of a step at its end."""

    def end_step(self, update: UpdatePlan, facts: StepFacts) -> None:
        """The step is over."""


class RowWriter(Protocol):
    """metrics.jsonl and samples.jsonl (runtime/metrics.py)."""

    def write(self, metrics: Mapping[str, Any], /) -> None:
        """Append the row of a step."""

    def write_samples(self, rows: Sequence[Mapping[str, Any]], /) -> None:
        """Append the rows of its samples."""


@dataclass(frozen=True)
class Summary:
    """Means over the run, drain included, per P0 x R0 trained samples; coverages against the workload's true law."""

    rollout_s_per_step: float
    step_s: float
    bubble_ratio: float
    wasted_token_ratio: float
    coverage_p95: float
    own_coverage_p95: float
    long_round_share: float

    def to_json(self) -> str:
        """summary.json."""
        return json.dumps(vars(self), indent=2) + "\n"


@dataclass
class _Totals:
    num_rounds: int = 0
    num_long_rounds: int = 0
    num_samples: int = 0
    num_preemptions: int = 0
    rollout_s: float = 0.0
    step_s: float = 0.0
    busy_s: float = 0.0  # of GPUs while a rollout is open; training on those that it has freed counts
    idle_s: float = 0.0
    num_generated: int = 0
    num_trained_tokens: int = 0
    trained: list[tuple[str, int]] = field(default_factory=list)  # prompt id, tokens


class Recorder:
    """Sums up the steps; writes them where `rows` and `trace` are given."""

    def __init__(
        self, config: Config, num_gpus: int, rows: RowWriter | None = None, trace: TraceWriter | None = None
    ) -> None:
        self._config, self._num_gpus = config, num_gpus
        self._rows, self._trace = rows, trace
        self.totals = _Totals()
        self.last_update: UpdatePlan | None = None

    def end_step(self, update: UpdatePlan, facts: StepFacts) -> None:
        """Add the step to the sums, and write its rows and bars."""
        totals, done, size = self.totals, facts.round, facts.round.tensor_model_parallel_size
        self.last_update = update
        totals.num_rounds += 1
        totals.num_long_rounds += update.stats.kind is RoundKind.LONG
        totals.num_samples += update.num_sequences
        totals.num_preemptions += update.stats.num_preemptions
        totals.rollout_s += done.wall_s
        totals.step_s += facts.end_s - facts.start_s
        totals.busy_s += size * sum(done.busy_s) + facts.streamed_gpu_s
        totals.idle_s += size * sum((*done.idle_s, *done.freed_s)) - facts.streamed_gpu_s
        totals.num_generated += update.stats.num_tokens_generated
        totals.num_trained_tokens += update.num_tokens
        totals.trained += [(g.prompt.prompt_id, r.num_tokens) for g in update.groups for r in g.responses]
        if self._rows is not None:
            self._rows.write(self._metrics(update, facts))
            self._rows.write_samples(sample_rows(update, done.launch_s, update.step - 1))
        if self._trace is not None:
            self._trace.add(self._spans(update, facts))
            for rank in range(self._num_gpus):
                self._trace.add_counter(rank, "engine_busy_s", facts.end_s, done.busy_s[rank // size])

    def summary(self, workload: Workload) -> Summary:
        """The whole run. Raises ValueError where nothing was trained."""
        totals, data = self.totals, self._config.data
        if not totals.num_samples:
            raise ValueError("nothing was trained")
        num_steps = totals.num_samples / (data.train_batch_size * self._config.rollout.n)
        which = np.array([workload.position[prompt_id] for prompt_id, _ in totals.trained])
        lengths = np.array([tokens for _, tokens in totals.trained])
        return Summary(
            rollout_s_per_step=totals.rollout_s / num_steps,
            step_s=totals.step_s / num_steps,
            bubble_ratio=1 - totals.busy_s / (totals.busy_s + totals.idle_s),
            wasted_token_ratio=1 - totals.num_trained_tokens / totals.num_generated,
            coverage_p95=coverage(workload, lengths, 0.95),
            own_coverage_p95=own_coverage(workload, which, lengths, 0.95),
            long_round_share=totals.num_long_rounds / totals.num_rounds,
        )

    def _metrics(self, update: UpdatePlan, facts: StepFacts) -> dict[str, Any]:
        done, times, size = facts.round, facts.times, facts.round.tensor_model_parallel_size
        responses = [r for group in update.groups for r in group.responses]
        step_s = facts.end_s - facts.start_s
        tokens = update.num_tokens + sum(len(r.request.prompt.token_ids) for r in responses)
        return {
            "training/global_step": update.step,
            "training/epoch": update.epoch,
            **length_metrics([r.num_tokens for r in responses], self._config.data.max_response_length),
            **spread("critic/score", [r.reward for r in responses]),
            **rollout_metrics(update),
            "stream/num_groups_streamed": None if facts.stream is None else facts.stream.num_groups_streamed,
            "stream/overlap_s": None if facts.stream is None else facts.stream.overlap_s,
            "timing_s/step": step_s,
            "timing_s/gen": done.wall_s,
            "timing_s/reward": done.reward_wait_s,
            "timing_s/old_log_prob": times.old_log_prob_s,
            "timing_s/ref": times.ref_s,
            "timing_s/update_actor": times.update_actor_s,
            "timing_s/update_weights": facts.refit_s,
            "perf/time_per_step": step_s,
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / step_s / self._num_gpus,
            "bubble/rollout_ratio": rollout_bubble_ratio([s for s in done.busy_s for _ in range(size)], done.wall_s),
            "bubble/reward_ratio": reward_bubble_ratio(0.0, done.reward_wait_s, step_s),
            "bubble/train_ratio": idle_ratio("train", times.busy_s, times.update_actor_s),
            "bubble/sync_ratio": 0.0,
        }

    def _spans(self, update: UpdatePlan, facts: StepFacts) -> Iterator[Span]:
        done, size, arguments = facts.round, facts.round.tensor_model_parallel_size, {"step": update.step}
        for rank in range(self._num_gpus):
            for name, start_s, end_s in _stages(update.step, facts):
                yield Span(name, rank, "stage", start_s, end_s, arguments)
            for start_s, end_s in done.busy_periods[rank // size]:
                yield Span("decode", rank, "engine", start_s, end_s, arguments)
        for request, num_tokens, finish_s in done.finished:
            prompt_id = request.prompt.prompt_id
            yield Span(
                f"{prompt_id}/{request.response_index}",
                request.replica * size,
                "request",
                done.launch_s,
                finish_s,
                {"prompt_id": prompt_id, "tokens": num_tokens, **arguments},
            )


def _stages(step: int, facts: StepFacts) -> Iterator[tuple[str, float, float]]:
    """The bars of the stage lane: the step, and in it what came one after another."""
    yield f"step_{step}", facts.start_s, facts.end_s
    yield "gen", facts.round.launch_s, facts.round.end_s
    time_s = facts.round.end_s + facts.phase_switch_s / 2
    for name in ("old_log_prob", "ref", "update_actor"):
        seconds = getattr(facts.times, f"{name}_s")
        if seconds is not None:
            yield name, time_s, time_s + seconds
            time_s += seconds
    yield "update_weights", facts.end_s - facts.refit_s, facts.end_s
