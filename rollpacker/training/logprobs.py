"""Token log-probabilities and entropy from vocabulary-parallel logits, under the law that was sampled (temperature)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollpacker.memory_estimate import ENTROPY_CHUNK_BYTES


def scale_logits(logits_BTV: Tensor, temperature: float, num_padding_columns: int) -> Tensor:
    """Logits [batch, time, vocab/tp] in fp32, divided by the temperature; padded vocabulary can never be sampled."""
    if logits_BTV.dtype == torch.float32:
        logits_BTV = logits_BTV / temperature
    else:
        logits_BTV = logits_BTV.float().div_(temperature)  # one copy, not two
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
    if not torch.is_grad_enabled():
        logits_BTV = logits_BTV.detach()  # or autograd would have the probabilities kept all the same
    entropy: Tensor = _VocabParallelEntropy.apply(logits_BTV, tp_group)
    return entropy


_CHUNK_ELEMENTS = ENTROPY_CHUNK_BYTES // 4  # in fp32, two of which are held at a time


class _VocabParallelEntropy(torch.autograd.Function):
    """H = log Z - sum(p z), and dH/dz_j = -p_j (log p_j + H): one copy of the probabilities is kept for the gradient.

    Positions are worked off in chunks, so that without a gradient no copy of the logits is made.
    """

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
        batch, time, columns = logits_BTV.shape
        peak_BT = logits_BTV.amax(dim=-1)
        _reduce(peak_BT, dist.ReduceOp.MAX, tp_group)
        sums = torch.empty((2, batch, time), dtype=logits_BTV.dtype, device=logits_BTV.device)
        weights_BTV = torch.empty_like(logits_BTV) if ctx.needs_input_grad[0] else None
        step = max(_CHUNK_ELEMENTS // (batch * columns), 1)
        for start in range(0, time, step):
            part = slice(start, start + step)
            shifted = logits_BTV[:, part] - peak_BT[:, part, None]
            weights = shifted.exp()
            # A padded column has weight 0 and a hugely negative logit; 0 x that must count as 0.
            sums[0, :, part] = weights.sum(dim=-1)
            sums[1, :, part] = shifted.clamp_(min=-1e4).mul_(weights).sum(dim=-1)
            if weights_BTV is not None:
                weights_BTV[:, part] = weights
        _reduce(sums, dist.ReduceOp.SUM, tp_group)
        entropy = sums[0].log() - sums[1] / sums[0]
        if weights_BTV is not None:
            ctx.save_for_backward(weights_BTV.div_(sums[0].unsqueeze(-1)), entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None]:
        probs_BTV, entropy_BT = ctx.saved_tensors
        log_probs_BTV = probs_BTV.clamp(min=torch.finfo(probs_BTV.dtype).tiny).log()
        return -probs_BTV * (log_probs_BTV + entropy_BT.unsqueeze(-1)) * grad_BT.unsqueeze(-1), None


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
