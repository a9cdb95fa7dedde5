"""Token log-probabilities and entropy from vocabulary-parallel logits, under the law that was sampled (temperature)."""

from __future__ import annotations

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


@torch.no_grad()
def token_entropy(logits_BTV: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Entropy in nats of each position's distribution, [batch, time]: log Z - sum(p * logit)."""
    peak = logits_BTV.amax(dim=-1)
    _reduce(peak, dist.ReduceOp.MAX, tp_group)
    shifted = logits_BTV - peak.unsqueeze(-1)
    weights = shifted.exp()
    # A padded column has weight 0 and a hugely negative logit; 0 x that must count as 0.
    sums = torch.stack([weights.sum(dim=-1), (weights * shifted.clamp(min=-1e4)).sum(dim=-1)])
    _reduce(sums, dist.ReduceOp.SUM, tp_group)
    return sums[0].log() - sums[1] / sums[0]


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
