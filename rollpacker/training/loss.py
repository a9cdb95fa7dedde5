"""Policy losses per token, by name, and how they become one number.

A policy loss maps log-probs, old log-probs, advantages and the response mask to a loss for each token. Aggregation is a
weight for each token and one global denominator, so that any split into micro-batches, chunks or replicas gives the same
sum (docs/design/001). docs/algorithms.md has formula, source and test of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rollpacker.config import AlgorithmConfig, ConfigError
from rollpacker.user_function import describe_error, load_user_function

_MAX_LOG_RATIO = 80.0
"""exp of more overflows fp32, and inf x 0 would make the gradient of a clipped token NaN."""

_SIGNATURE = "(logprobs, old_logprobs, advantages, mask, *, algorithm)"


class PolicyLoss(Protocol):
    """All tensors are [batch, time]; `mask` marks response tokens. Returns the loss of each token, to be minimised, and
    whether a clip took effect there. What it returns outside the mask is ignored.
    """

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, algorithm: AlgorithmConfig
    ) -> tuple[Tensor, Tensor]:
        """Give (loss, is_clipped)."""


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,  # noqa: ARG001 (part of the signature)
    *,
    algorithm: AlgorithmConfig,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), asymmetric (DAPO, 2503.14476), dual clip (1912.09729, eq. 5)."""
    ratio = (logprobs - old_logprobs).clamp(max=_MAX_LOG_RATIO).exp()
    loss, is_clipped = _clipped(ratio, advantages, algorithm)
    if algorithm.clip_ratio_c is not None:
        bound = -advantages * algorithm.clip_ratio_c
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, is_clipped


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071, eqs. 5 to 7): one ratio a response, the geometric mean of its tokens' ratios.

    Use it with loss_agg_mode seq-mean-token-mean and a far smaller clip range (the paper: 3e-4 and 4e-4).
    """
    counts = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).sum(dim=-1, keepdim=True) / counts
    ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp().expand_as(logprobs)
    return _clipped(ratio, advantages, algorithm)


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": ppo_clip, "gspo": gspo}


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), and where the second is the smaller."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def load_policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The built-in loss of that name, or the user's `path.py:name`, tried once on a small input.

    A user's loss may return the loss alone. Raises ConfigError for whatever is wrong with it.
    """
    if algorithm.loss in POLICY_LOSSES:
        return POLICY_LOSSES[algorithm.loss]
    if ":" not in algorithm.loss:
        raise ConfigError(
            f"algorithm.loss={algorithm.loss}: expected one of {', '.join(POLICY_LOSSES)}, or a loss of your own as "
            "path.py:name."
        )
    function = load_user_function("algorithm.loss", algorithm.loss, _SIGNATURE)

    def loss(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, algorithm: AlgorithmConfig
    ) -> tuple[Tensor, Tensor]:
        result = function(logprobs, old_logprobs, advantages, mask, algorithm=algorithm)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        return result, torch.zeros_like(mask)

    _try_out(loss, algorithm)
    return loss


def _try_out(loss: PolicyLoss, algorithm: AlgorithmConfig) -> None:
    """Call a user's loss on two short responses, so that its mistakes show before anything expensive starts."""
    spec = algorithm.loss
    logprobs = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    old, advantages = logprobs.detach() - 0.1, torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
    gradient = None
    try:
        values, is_clipped = loss(torch.where(mask, logprobs, 0.0), old, advantages, mask, algorithm=algorithm)
        if isinstance(values, Tensor) and values.shape == mask.shape and values.requires_grad:
            (gradient,) = torch.autograd.grad(torch.where(mask, values, 0.0).sum(), logprobs)
    except Exception as error:
        path = Path(spec.rpartition(":")[0]).absolute()
        raise ConfigError(
            f"algorithm.loss={spec}: {describe_error(error, path)}. It is called as {spec.rpartition(':')[2]}{_SIGNATURE}."
        ) from error
    if not isinstance(values, Tensor) or values.shape != logprobs.shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(
            f"algorithm.loss={spec}: it returned {found}, expected the loss of each token, a tensor of the shape of "
            "logprobs [batch, time]; the program takes the mean (algorithm.loss_agg_mode)."
        )
    if gradient is None or not bool(torch.isfinite(values[mask]).all() and torch.isfinite(gradient).all()):
        raise ConfigError(
            f"algorithm.loss={spec}: its values or their gradient are not finite, or do not depend on logprobs."
        )
    if not isinstance(is_clipped, Tensor) or is_clipped.shape != mask.shape or is_clipped.dtype != torch.bool:
        raise ConfigError(
            f"algorithm.loss={spec}: the second thing it returned is not where it clipped, a bool tensor [batch, time]. "
            "Return that, or the loss alone."
        )


def token_weight(loss_agg_mode: str, num_tokens: int, max_response_length: int) -> float:
    """Weight of each token of a response of `num_tokens`; the sum of weighted losses is divided by `denominator`."""
    if loss_agg_mode == "seq-mean-token-mean":
        return 1.0 / max(num_tokens, 1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return 1.0 / max_response_length
    return 1.0


def denominator(loss_agg_mode: str, num_tokens: int, num_sequences: int) -> int:
    """What the sum of an optimizer step is divided by: its response tokens for token-mean, else its responses."""
    return max(num_tokens if loss_agg_mode == "token-mean" else num_sequences, 1)
