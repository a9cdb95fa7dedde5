"""Policy losses per token, and how they become one number.

A loss maps log-probs, old log-probs and advantages to a loss for each token. Aggregation is a weight for each token and
one global denominator, so that any split into micro-batches, chunks or replicas gives the same sum (docs/design/001).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 80.0
"""exp of more overflows fp32, and inf x 0 would make the gradient of a clipped token NaN."""


@dataclass(frozen=True)
class ClipRange:
    """PPO's clip range: the ratio stays in [1 - low, 1 + high]; `dual` bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float | None


def ppo_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), asymmetric (DAPO, 2503.14476), dual clip (1912.09729, eq. 5).

    All arguments [batch, time]. Returns the loss of each token and whether the clip took effect there.
    """
    ratio = (logprobs - old_logprobs).clamp(max=_MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    if clip.dual is not None:
        bound = -advantages * clip.dual
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, is_clipped


def sequence_weight(loss_agg_mode: str, num_tokens: int, max_response_length: int) -> float:
    """Weight of each token of a response of `num_tokens`; the sum of weighted losses is divided by `denominator`."""
    if loss_agg_mode == "seq-mean-token-mean":
        return 1.0 / max(num_tokens, 1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return 1.0 / max_response_length
    return 1.0


def denominator(loss_agg_mode: str, num_tokens: int, num_sequences: int) -> int:
    """What the step's sum is divided by: its response tokens for token-mean, else its responses."""
    return num_tokens if loss_agg_mode == "token-mean" else num_sequences
