"""The step's loss written out from the formulas in float64, one response at a time: the oracle of the algorithms.

It shares no code with the package. `logits` holds [T, vocabulary] for each response (the positions that predict its tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker.config import AlgorithmConfig


@dataclass
class OracleResponse:
    """What the formulas need to know of one response."""

    group: int
    reward: float
    targets: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    is_truncated: bool


def step_loss(
    logits: list[Tensor],
    responses: list[OracleResponse],
    algorithm: AlgorithmConfig,
    cap: int,
    only: Sequence[int] | None = None,
) -> Tensor:
    """The scalar whose gradient an optimizer step takes, normalised by its own counts.

    The step is made of all responses, the update of those of `only` (a mini-batch), or of all.
    """
    chosen = range(len(responses)) if only is None else only
    kept = [i for i in chosen if not (algorithm.overlong == "mask" and responses[i].is_truncated)]
    advantages = _advantages(responses, algorithm, cap)
    per_response = []
    for i in kept:
        r = responses[i]
        logprobs = torch.stack(
            [row.log_softmax(-1)[t] for row, t in zip(logits[i], r.targets, strict=True)] or [_zero()]
        )
        if not len(r.targets):
            per_response.append(logits[i].sum() * 0 + torch.zeros(0, dtype=torch.float64))
            continue
        loss = _policy_loss(logprobs, r.old_logprobs, advantages[i], algorithm) * _correction(r, algorithm)
        if algorithm.use_kl_loss:
            loss = loss + algorithm.kl_loss_coef * _kl(algorithm.kl_loss_type, logprobs, r.ref_logprobs)
        entropy = torch.stack([-(row.softmax(-1) * row.log_softmax(-1)).sum() for row in logits[i]])
        per_response.append(loss - algorithm.entropy_coeff * entropy)
    num_tokens = sum(len(x) for x in per_response)
    num_sequences = len(per_response)
    totals: dict[str, Callable[[], Tensor]] = {
        "token-mean": lambda: torch.stack([x.sum() for x in per_response]).sum() / num_tokens,
        "seq-mean-token-sum": lambda: torch.stack([x.sum() for x in per_response]).sum() / num_sequences,
        "seq-mean-token-mean": lambda: (
            torch.stack([x.sum() / max(len(x), 1) for x in per_response]).sum() / num_sequences
        ),
        "seq-mean-token-sum-norm": lambda: torch.stack([x.sum() / cap for x in per_response]).sum() / num_sequences,
    }
    return totals[algorithm.loss_agg_mode]()


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _reward(r: OracleResponse, algorithm: AlgorithmConfig, cap: int) -> float:
    if algorithm.overlong != "soft_penalty":
        return r.reward
    length, start = len(r.targets), cap - algorithm.overlong_buffer_len
    if length <= start:
        return r.reward
    return r.reward - algorithm.overlong_penalty_factor * (length - start) / algorithm.overlong_buffer_len


def _advantages(responses: list[OracleResponse], algorithm: AlgorithmConfig, cap: int) -> list[Tensor]:
    penalties = []
    for r in responses:
        kl = _kl(algorithm.kl_penalty, r.old_logprobs, r.ref_logprobs)
        penalties.append(algorithm.kl_reward_coef * kl if algorithm.use_kl_in_reward else torch.zeros_like(kl))
    if algorithm.adv_estimator == "reinforce_plus_plus":
        returns = [
            torch.tensor([_reward(r, algorithm, cap) - p[t:].sum().item() for t in range(len(p))], dtype=torch.float64)
            for r, p in zip(responses, penalties, strict=True)
        ]
        everything = torch.cat(returns)
        return [(x - everything.mean()) / torch.sqrt(everything.var() + 1e-8) for x in returns]
    rewards = [_reward(r, algorithm, cap) - p.sum().item() for r, p in zip(responses, penalties, strict=True)]
    advantages = []
    for i, r in enumerate(responses):
        group = [rewards[j] for j, other in enumerate(responses) if other.group == r.group]
        others = [rewards[j] for j, other in enumerate(responses) if other.group == r.group and j != i]
        mean = sum(group) / len(group)
        if algorithm.adv_estimator == "rloo":
            value = rewards[i] - sum(others) / len(others)
        elif algorithm.adv_estimator == "dr_grpo" or not algorithm.norm_adv_by_std_in_grpo:
            value = rewards[i] - mean
        else:
            std = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
            value = (rewards[i] - mean) / (std + 1e-6)
        advantages.append(torch.full((len(r.targets),), value, dtype=torch.float64))
    return advantages


def _policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    low, high, c = algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c
    if algorithm.loss == "gspo":
        ratio = torch.prod(torch.exp(logprobs - old)) ** (1 / len(old))
        return torch.stack([-torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a) for a in advantages])
    ratios = torch.exp(logprobs) / torch.exp(old)
    objective = []
    for ratio, a in zip(ratios, advantages, strict=True):
        value = torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        objective.append(torch.max(value, c * a) if c is not None and a < 0 else value)
    return -torch.stack(objective)


def _kl(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    ratio = torch.exp(reference) / torch.exp(logprobs)
    return {"k1": -torch.log(ratio), "k2": torch.log(ratio) ** 2 / 2, "k3": ratio - torch.log(ratio) - 1}[kind]


def _correction(r: OracleResponse, algorithm: AlgorithmConfig) -> Tensor:
    weights = torch.exp(r.old_logprobs) / torch.exp(r.rollout_logprobs)
    if algorithm.mismatch_level == "sequence":
        weights = torch.prod(weights).expand(len(weights))
    if algorithm.mismatch_correction == "tis":
        return weights.clamp(max=algorithm.mismatch_cap)
    if algorithm.mismatch_correction == "mis":
        return torch.where(weights <= algorithm.mismatch_cap, weights, torch.zeros_like(weights))
    return torch.ones_like(weights)
