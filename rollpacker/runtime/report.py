"""StepReporter: what a step was like, gathered to rank 0: metrics, samples, trace, display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.comm.world import World
from rollpacker.messages import Event, RequestFinished, RewardDone, RoundPlan, UpdatePlan
from rollpacker.profiling.bubbles import idle_ratio, reward_bubble_ratio, rollout_bubble_ratio
from rollpacker.profiling.nvtx import StageTimer
from rollpacker.profiling.rows import length_metrics, rollout_metrics, sample_rows, spread
from rollpacker.profiling.trace import Span, TraceWriter
from rollpacker.runtime.console import ProgressDisplay
from rollpacker.runtime.metrics import MetricsWriter
from rollpacker.runtime.rollout import Rollout, RoundFacts
from rollpacker.runtime.validation import ValidationReport
from rollpacker.runtime.watchdog import Heartbeat
from rollpacker.training.mismatch import mismatch_advice
from rollpacker.training.objective import LossSums
from rollpacker.training.policy_update import UpdateReport
from rollpacker.types import ScoredResponse

_MAX_REWARD_MESSAGES = 3


@dataclass
class StepReport:
    """What this rank measured of a step besides the timers; seconds of the job's clock."""

    start_s: float = 0.0
    end_s: float = 0.0
    weight_version: int = 0
    update: UpdateReport = field(default_factory=UpdateReport)


@dataclass(frozen=True)
class _RankReport:
    """What travels to rank 0 once a step."""

    seconds: dict[str, float]
    spans: list[Span]
    facts: RoundFacts
    train_busy_s: float
    loss_sums: LossSums
    reward_messages: list[str]


@dataclass(frozen=True)
class Sinks:
    """Where rank 0 puts what it knows; the other ranks have none."""

    metrics: MetricsWriter
    trace: TraceWriter | None
    display: ProgressDisplay


class StepReporter:
    """Collective at the end of each step; everything else is local."""

    def __init__(
        self,
        world: World,
        sinks: Sinks | None,
        *,
        max_response_length: int,
        mismatch_correction: str,
        heartbeat: Heartbeat,
    ) -> None:
        self._heartbeat = heartbeat
        self._world = world
        self._mismatch_correction = mismatch_correction
        self._has_warned = self._has_warned_of_race = False
        self._sinks = sinks
        self._cap = max_response_length
        self._num_requests = 0
        self._num_finished = 0
        self._num_tokens = 0
        self._last_finish_s = 0.0
        self._last_reward_s = 0.0
        self._step = 0

    def begin_step(self, plan: RoundPlan) -> None:
        """A round opens."""
        self._step, self._num_requests = plan.step, len(plan.requests)
        self._num_finished = self._num_tokens = 0
        self.on_stage("gen")

    def on_launch(self, num_requests: int) -> None:
        """The open round grows."""
        self._num_requests += num_requests

    def on_stage(self, name: str) -> None:
        """A stage begins."""
        self._heartbeat.stage(self._step, name)
        if self._sinks:
            self._sinks.display.stage(self._step, name)

    def on_event(self, event: Event) -> None:
        """Follow the rollout."""
        if isinstance(event, RequestFinished):
            self._num_finished += 1
            self._num_tokens += event.num_tokens
            self._last_finish_s = self._last_reward_s = self._world.now()
            if self._sinks:
                self._sinks.display.progress(self._num_finished, self._num_requests, self._num_tokens)
        elif isinstance(event, RewardDone):
            self._last_reward_s = self._world.now()

    def on_progress(self, num_finished: int, num_requests: int, num_tokens: int) -> None:
        """Follow a validation: responses finished, responses asked for, tokens generated."""
        if self._sinks:
            self._sinks.display.progress(num_finished, num_requests, num_tokens)

    def write_validation(self, report: ValidationReport) -> None:
        """A validation is done: rank 0 writes its row, its bars in the trace, and a line."""
        if self._sinks is None:
            return
        self._sinks.metrics.write_validation(report.row)
        if self._sinks.trace is not None:
            self._sinks.trace.add(report.spans)
        self._note_failures(report.reward_messages, "validation")
        self._sinks.display.validation_done(report.row)

    def end_step(self, update: UpdatePlan, report: StepReport, rollout: Rollout, timer: StageTimer) -> None:
        """Gather what the ranks measured; rank 0 writes one row of metrics, the samples, the trace, and a line."""
        seconds, spans = timer.take()
        rollout_spans, messages = rollout.take_spans()
        mine = _RankReport(
            seconds, spans + rollout_spans, rollout.facts, report.update.busy_s, report.update.sums, messages
        )
        gathered = self._world.comm.gather(mine)
        if self._sinks is None or gathered is None:
            return
        metrics = self._metrics(update, report, gathered)
        self._sinks.metrics.write(metrics)
        self._sinks.metrics.write_samples(sample_rows(update, rollout.facts.launch_s, report.weight_version))
        if self._sinks.trace is not None:
            self._sinks.trace.add(span for rank in gathered for span in rank.spans)
            for rank, facts in enumerate(r.facts for r in gathered):
                self._sinks.trace.add_counter(rank, "quanta", report.end_s, facts.num_quanta)
                self._sinks.trace.add_counter(rank, "control_cpu_s", report.end_s, facts.control_cpu_s)
                self._sinks.trace.add_counter(rank, "engine_busy_s", report.end_s, facts.engine_busy_s)
                self._sinks.trace.add_counter(rank, "engine_cpu_s", report.end_s, facts.engine_cpu_s)
        self._warn_of_mismatch(metrics)
        self._warn_of_race(update)
        self._note_failures([m for rank in gathered for m in rank.reward_messages], "step")
        self._sinks.display.step_done(metrics)

    def _warn_of_mismatch(self, metrics: dict[str, Any]) -> None:
        """Once a run: it does not go away by itself, and the metrics say how it goes on."""
        advice = mismatch_advice(
            metrics["mismatch/k3_kl"], metrics["mismatch/effective_sample_size"], self._mismatch_correction
        )
        if advice and not self._has_warned and self._sinks is not None:
            self._sinks.display.note(f"step {self._step}: {advice}")
            self._has_warned = True

    def _warn_of_race(self, update: UpdatePlan) -> None:
        """Once a run: what the race does to the samples."""
        audit = update.stats.audit
        if audit is not None and audit.warning and not self._has_warned_of_race and self._sinks is not None:
            self._sinks.display.note(f"step {self._step}: {audit.warning}")
            self._has_warned_of_race = True

    def _note_failures(self, messages: Sequence[str], where: str) -> None:
        assert self._sinks is not None, "only rank 0 tells the user"
        for message in messages[:_MAX_REWARD_MESSAGES]:
            self._sinks.display.note(f"reward failed: {message}")
        if len(messages) > _MAX_REWARD_MESSAGES:
            self._sinks.display.note(f"... and {len(messages) - _MAX_REWARD_MESSAGES} more in this {where}")

    def _metrics(self, update: UpdatePlan, report: StepReport, ranks: Sequence[_RankReport]) -> dict[str, Any]:
        responses = [r for g in update.groups for r in g.responses]
        sums = LossSums()
        for rank in ranks:
            sums.add(rank.loss_sums)
        return {
            "training/global_step": update.step,
            "training/epoch": update.epoch,
            **length_metrics([r.num_tokens for r in responses], self._cap),
            **spread("critic/score", [r.reward for r in responses]),
            **spread("critic/rewards", report.update.rewards),
            **_actor_metrics(sums, report.update),
            **_mismatch_metrics(sums),
            **rollout_metrics(update),
            **self._time_metrics(update, responses, report, ranks),
        }

    def _time_metrics(
        self, update: UpdatePlan, responses: Sequence[ScoredResponse], report: StepReport, ranks: Sequence[_RankReport]
    ) -> dict[str, Any]:
        def slowest(stage: str) -> float | None:
            return max((r.seconds[stage] for r in ranks if stage in r.seconds), default=None)

        step_s = report.end_s - report.start_s
        tokens = update.num_tokens + sum(len(r.request.prompt.token_ids) for r in responses)
        round_s = max(r.facts.wall_s for r in ranks)
        train_s = slowest("update_actor") or 0.0
        sync_s = slowest("update_weights") or 0.0
        reward_s = max(self._last_reward_s - self._last_finish_s, 0.0)
        return {
            "timing_s/step": step_s,
            "timing_s/gen": slowest("gen"),
            "timing_s/reward": reward_s,
            "timing_s/old_log_prob": slowest("old_log_prob"),
            "timing_s/ref": slowest("ref"),
            "timing_s/update_actor": train_s,
            "timing_s/update_weights": sync_s,
            "timing_s/save_checkpoint": slowest("save_checkpoint"),
            "timing_s/testing": slowest("testing"),
            "perf/time_per_step": step_s,
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / step_s / self._world.size,
            "bubble/rollout_ratio": (
                rollout_bubble_ratio([r.facts.engine_busy_s for r in ranks], round_s) if round_s else None
            ),
            "bubble/reward_ratio": reward_bubble_ratio(0.0, reward_s, step_s),
            "bubble/train_ratio": idle_ratio("train", [r.train_busy_s for r in ranks], train_s) if train_s else None,
            "bubble/sync_ratio": (
                idle_ratio("sync", [r.seconds.get("update_weights", 0.0) for r in ranks], sync_s) if sync_s else None
            ),
        }


def _actor_metrics(sums: LossSums, report: UpdateReport) -> dict[str, Any]:
    """Means over response tokens and over the step's optimizer steps; the learning rate is the same in all of them."""
    tokens = max(sums.num_tokens, 1)
    norms = [r.grad_norm for r in report.results]
    return {
        "critic/advantages/mean": sums.advantage / tokens,
        "critic/advantages/max": sums.advantage_max,
        "critic/advantages/min": sums.advantage_min,
        "actor/pg_loss": sums.policy_loss,
        "actor/kl_loss": sums.kl_loss,
        "actor/pg_clipfrac": sums.num_clipped / tokens,
        "actor/ppo_kl": sums.approx_kl / tokens,
        "actor/entropy": sums.entropy / tokens,
        "actor/grad_norm": sum(norms) / max(len(norms), 1),
        "actor/lr": report.results[-1].lr if report.results else None,
        "actor/num_updates": len(norms),
        "training/rollout_probs_diff_mean": sums.probs_diff / tokens,
        "training/rollout_probs_diff_max": sums.probs_diff_max,
        "training/rollout_logprobs_diff_mean": sums.logprobs_diff / tokens,
        "training/rollout_logprobs_diff_max": sums.logprobs_diff_max,
    }


def _mismatch_metrics(sums: LossSums) -> dict[str, Any]:
    tokens, weights = max(sums.num_tokens, 1), max(sums.num_weights, 1)
    return {
        "mismatch/kl": sums.rollout_kl / tokens,
        "mismatch/k3_kl": sums.rollout_kl_k3 / tokens,
        "mismatch/weight_mean": sums.weight / weights,
        "mismatch/effective_sample_size": sums.weight**2 / max(sums.weight_square * weights, 1e-30),
        "mismatch/masked_ratio": sums.num_cut / weights,
    }
