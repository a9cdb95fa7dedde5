"""Estimators of the KL divergence from a reference, per token (J. Schulman, "Approximating KL Divergence", 2020).

For a token sampled from the policy p, with log-ratio d = log q - log p to the reference q:
k1 = -d (unbiased, high variance), k2 = d^2 / 2 (biased, low variance), k3 = exp(d) - d - 1 (unbiased, low variance, >= 0).
As a loss, the gradient of k2 is the one whose expectation is that of KL(p || q); the gradient of k1 averages to zero.
"""

from __future__ import annotations

from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""k3 grows as exp(d): a token the policy all but excludes must not outweigh the batch (verl clips at the same value)."""


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, kl_type: str) -> Tensor:
    """KL(policy || reference) of each token, same shape as the log-probs; `kl_type` is k1, k2 or k3."""
    log_ratio = ref_logprobs - logprobs
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return 0.5 * log_ratio.square()
    if kl_type == "k3":
        log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return log_ratio.exp() - log_ratio - 1
    raise ValueError(f"unknown KL estimator {kl_type!r}")
