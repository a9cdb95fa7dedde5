"""The part of a step's rows that follows from the update plan alone: metrics.jsonl and samples.jsonl, real or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollpacker.messages import AuditReport, UpdatePlan
from rollpacker.types import RoundKind

Metric = float | int | None


def length_metrics(lengths: Sequence[int], cap: int) -> dict[str, Metric]:
    """The response_length/* keys, in tokens, of a step's responses.

    Percentiles interpolate linearly; `clip_ratio` is the share of responses as long as the cap. No response: all None.
    """
    names = ("mean", "max", "min", "p50", "p95", "p99", "clip_ratio")
    if not len(lengths):
        return {f"response_length/{name}": None for name in names}
    array = np.asarray(lengths)
    p50, p95, p99 = (float(p) for p in np.percentile(array, (50, 95, 99)))
    values = (float(array.mean()), int(array.max()), int(array.min()), p50, p95, p99, float((array >= cap).mean()))
    return {f"response_length/{name}": value for name, value in zip(names, values, strict=True)}


def spread(prefix: str, values: Sequence[float]) -> dict[str, Metric]:
    """`<prefix>/mean`, `/max` and `/min` of `values`; None where there is none."""
    if not len(values):
        return {f"{prefix}/{name}": None for name in ("mean", "max", "min")}
    array = np.asarray(values, dtype=np.float64)
    return {
        f"{prefix}/mean": float(array.mean()),
        f"{prefix}/max": float(array.max()),
        f"{prefix}/min": float(array.min()),
    }


def rollout_metrics(update: UpdatePlan) -> dict[str, Any]:
    """The keys that the controller's own counts give."""
    stats = update.stats
    return {
        "rollout/is_long_round": int(stats.kind is RoundKind.LONG),
        "rollout/long_queue_len": stats.long_queue_len,
        "rollout/aborted_prompts": stats.num_aborted_prompts,
        "rollout/aborted_responses": stats.num_aborted_responses,
        "rollout/wasted_token_ratio": stats.num_tokens_wasted / max(stats.num_tokens_generated, 1),
        "rollout/num_preemptions": stats.num_preemptions,
        "rollout/tensor_model_parallel_size": stats.tensor_model_parallel_size,
        "filter/num_rejected": stats.num_rejected_groups,
        "filter/num_launched": stats.num_launched,
        "planner/tp": stats.tensor_model_parallel_size,
        "planner/switched": int(stats.has_switched_tensor_parallel),
        "reward/timeout_count": stats.num_reward_timeouts,
        "reward/error_count": stats.num_reward_errors,
        "reward/timeout_budget_s": stats.reward_timeout_budget_s,
        "stream/scale_down_progress": stats.scale_down_progress,
        **_audit_metrics(stats.audit),
    }


def _audit_metrics(audit: AuditReport | None) -> dict[str, Any]:
    names = ("num_groups", "icc", "coverage_p50", "coverage_p90", "coverage_p95", "coverage_p99", "own_coverage_p95")
    return {f"audit/{name}": getattr(audit, name, None) for name in names}


def sample_rows(update: UpdatePlan, launch_s: float, weight_version: int) -> list[dict[str, Any]]:
    """The rows of samples.jsonl: one for each trained response."""
    return [
        {
            "step": update.step,
            "epoch": group.prompt.epoch,
            "round": update.stats.kind.value,
            "prompt_id": group.prompt.prompt_id,
            "response_index": r.request.response_index,
            "domain": group.prompt.domain,
            "num_prompt_tokens": len(group.prompt.token_ids),
            "num_response_tokens": r.num_tokens,
            "finish_reason": r.finish_reason,
            "reward": r.reward,
            "weight_version": weight_version,
            "launch_s": launch_s,
            "finish_s": r.finish_s,
        }
        for group in update.groups
        for r in group.responses
    ]
