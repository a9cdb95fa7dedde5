"""The law that sampled against the law that is trained: importance weights, and how far the two are apart.

The engine samples from mu (its own kernels and precision; temperature, top-p and top-k applied), the trainer computes pi
(the same temperature, no truncation). With d = log pi - log mu of a sampled token, exp(d) is its importance weight.
tis: min(weight, cap) ("truncated importance sampling", Espeholt et al. 2018; Yao et al. 2025); mis: the weight, or 0
above the cap ("masked", Liu, Li et al. 2025). At sequence level it is that of the whole response, exp(sum of d).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_WEIGHT = 20.0


@dataclass(frozen=True)
class MismatchWeights:
    """Importance weights without gradient.

    `correction_BT` multiplies the loss of each token (1 where nothing is corrected). `weights` are the raw weights that were
    counted, one for each response token, or one for each response at sequence level; `is_cut` says which the cap changed.
    """

    correction_BT: Tensor
    weights: Tensor
    is_cut: Tensor


@torch.no_grad()
def mismatch_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, correction: str, level: str, cap: float
) -> MismatchWeights:
    """Weights from log-probs [batch, time] under the trained and the sampled law; `mask` marks response tokens.

    `correction` is none, tis or mis; `level` token or sequence. With `none` the weights are only measured.
    """
    log_weights = torch.where(mask, logprobs - rollout_logprobs, 0.0)
    if level == "sequence":
        log_weights = log_weights.sum(dim=-1, keepdim=True).expand_as(log_weights)
    weights_BT = log_weights.clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp()
    is_over = weights_BT > cap
    if correction == "tis":
        applied = weights_BT.clamp(max=cap)
    elif correction == "mis":
        applied = torch.where(is_over, 0.0, weights_BT)
    elif correction == "none":
        applied = torch.ones_like(weights_BT)
    else:
        raise ValueError(f"unknown mismatch correction {correction!r}")
    if level == "sequence":
        has_tokens = mask.any(dim=-1)
        return MismatchWeights(applied, weights_BT[has_tokens, 0], is_over[has_tokens, 0])
    return MismatchWeights(applied, weights_BT[mask], is_over[mask])


def mismatch_advice(kl: float, effective_sample_size: float, correction: str) -> str | None:
    """One paragraph for the user when the two laws are too far apart to ignore, else None.

    `kl` is KL(rollout || train) per token in nats, `effective_sample_size` a share of the samples.
    """
    if kl <= 0.01 and effective_sample_size >= 0.9:
        return None
    measured = (
        f"the engine samples from another law than the one trained: KL(rollout||train) = {kl:.3g} nats a token, "
        f"effective sample size {effective_sample_size:.0%}"
    )
    if correction == "none":
        return (
            f"{measured}. Set algorithm.mismatch_correction=tis (or mis), or make rollout.dtype equal training.dtype."
        )
    return (
        f"{measured}; algorithm.mismatch_correction={correction} weighs it, but the further apart, the less is learnt."
    )
