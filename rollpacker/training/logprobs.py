"""Token log-probabilities and entropy from vocabulary-parallel logits, under the law that was sampled (temperature)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def scale_logits(logits_BTV: Tensor, temperature: float, num_padding_columns: int) -> Tensor:
    """Logits [batch, time, vocab/tp] in fp32, divided by the temperature; padded vocabulary can never be sampled."""
    logits_BTV = logits_BTV.float() / temperature
    if num_padding_columns:
        is_padding = torch.arange(logits_BTV.shape[-1], device=logits_BTV.device) >= (
            logits_BTV.shape[-1] - num_padding_columns
        )
        logits_BTV = logits_BTV.masked_fill(is_padding, torch.finfo(torch.float32).min)
    return logits_BTV


def token_logprobs(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Log-prob of each target under vocabulary-parallel logits [batch, time, vocab/tp] -> [batch, time].

    `logits_BTV` is overwritten: Megatron's cross entropy works in place.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits_BTV, targets_BT)


def token_entropy(logits_BTV: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Entropy in nats of each position's distribution, [batch, time]; differentiable where the logits are.

    Call it before `token_logprobs`, which overwrites the logits.
    """
    entropy: Tensor = _VocabParallelEntropy.apply(logits_BTV, tp_group)
    return entropy


class _VocabParallelEntropy(torch.autograd.Function):
    """H = log Z - sum(p z), and dH/dz_j = -p_j (log p_j + H): one copy of the probabilities is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
        peak = logits_BTV.amax(dim=-1)
        _reduce(peak, dist.ReduceOp.MAX, tp_group)
        shifted = logits_BTV - peak.unsqueeze(-1)
        weights = shifted.exp()
        # A padded column has weight 0 and a hugely negative logit; 0 x that must count as 0.
        sums = torch.stack([weights.sum(dim=-1), (weights * shifted.clamp(min=-1e4)).sum(dim=-1)])
        _reduce(sums, dist.ReduceOp.SUM, tp_group)
        entropy = sums[0].log() - sums[1] / sums[0]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(weights.div_(sums[0].unsqueeze(-1)), entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None]:
        probs_BTV, entropy_BT = ctx.saved_tensors
        log_probs_BTV = probs_BTV.clamp(min=torch.finfo(probs_BTV.dtype).tiny).log()
        return -probs_BTV * (log_probs_BTV + entropy_BT.unsqueeze(-1)) * grad_BT.unsqueeze(-1), None


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
