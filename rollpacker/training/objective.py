"""Objective: from the model's logits to the unnormalised loss sum of a micro-batch, and the sums that metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollpacker.config import Config
from rollpacker.training.batches import MicroBatch
from rollpacker.training.kl import token_kl
from rollpacker.training.logprobs import scale_logits, token_entropy, token_logprobs
from rollpacker.training.loss import load_policy_loss
from rollpacker.training.mismatch import MismatchWeights, mismatch_weights


@dataclass
class LossSums:
    """Sums over response tokens (extremes where named so), added up over micro-batches, chunks, updates and replicas.

    `policy_loss` and `kl_loss` are weighted sums that the trainer divides by the update's denominator.
    """

    policy_loss: float = 0.0
    kl_loss: float = 0.0
    num_tokens: float = 0.0
    num_clipped: float = 0.0
    approx_kl: float = 0.0
    entropy: float = 0.0
    advantage: float = 0.0
    advantage_max: float = -float("inf")
    advantage_min: float = float("inf")
    probs_diff: float = 0.0
    logprobs_diff: float = 0.0
    probs_diff_max: float = 0.0
    logprobs_diff_max: float = 0.0
    rollout_kl: float = 0.0
    rollout_kl_k3: float = 0.0
    num_weights: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0
    num_cut: float = 0.0

    def add(self, other: LossSums) -> None:
        """Fold another part in."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if name.endswith("_max"):
                setattr(self, name, max(mine, value))
            elif name.endswith("_min"):
                setattr(self, name, min(mine, value))
            else:
                setattr(self, name, mine + value)


class Objective:
    """What is minimised: policy loss x mismatch weight + KL - entropy bonus, each token weighted (spec: algorithms)."""

    def __init__(self, config: Config, *, tp_group: Any, num_padding_columns: int) -> None:
        self._algorithm = config.algorithm
        self._temperature = config.rollout.temperature
        self._policy_loss = load_policy_loss(config.algorithm)
        self._tp_group = tp_group
        self._num_padding_columns = num_padding_columns

    def logprobs(self, logits_BTV: Tensor, batch: MicroBatch) -> dict[int, np.ndarray]:
        """Log-probs of the response tokens, by request index."""
        return batch.response_rows(token_logprobs(self._scaled(logits_BTV), batch.targets_BT))

    def loss(self, logits_BTV: Tensor, batch: MicroBatch) -> tuple[Tensor, LossSums]:
        """The loss sum of the micro-batch (to be divided by the update's denominator) and its parts."""
        algorithm, mask = self._algorithm, batch.mask_BT
        logits_BTV = self._scaled(logits_BTV)
        with torch.set_grad_enabled(algorithm.entropy_coeff != 0):
            entropy = token_entropy(logits_BTV, self._tp_group)
        logprobs = token_logprobs(logits_BTV, batch.targets_BT)
        # Without log-probs of their own, the policy that is trained is the one that sampled: the ratio is 1.
        old = logprobs.detach() if batch.old_logprobs_BT is None else batch.old_logprobs_BT
        # Outside the mask the loss sees constants, so that whatever it makes of them has no gradient (0 x inf would).
        policy_loss, is_clipped = self._policy_loss(
            torch.where(mask, logprobs, 0.0),
            torch.where(mask, old, 0.0),
            batch.advantages_BT,
            mask,
            algorithm=algorithm,
        )
        weights = mismatch_weights(
            old,
            batch.rollout_logprobs_BT,
            mask,
            correction=algorithm.mismatch_correction,
            level=algorithm.mismatch_level,
            cap=algorithm.mismatch_cap,
        )
        policy_loss = (torch.where(mask, policy_loss * weights.correction_BT, 0.0) * batch.weights_BT).sum()
        kl_loss = logprobs.new_zeros(())
        if algorithm.use_kl_loss:
            assert batch.ref_logprobs_BT is not None, "a KL loss needs the reference's log-probs"
            kl = token_kl(logprobs, batch.ref_logprobs_BT, algorithm.kl_loss_type)
            kl_loss = (torch.where(mask, kl, 0.0) * batch.weights_BT).sum()
        loss = policy_loss + algorithm.kl_loss_coef * kl_loss
        if algorithm.entropy_coeff:
            loss = loss - algorithm.entropy_coeff * (entropy * batch.weights_BT).sum()
        sums = _measure(batch, logprobs.detach(), old, weights)
        sums.policy_loss, sums.kl_loss = policy_loss.item(), kl_loss.item()
        sums.num_clipped = is_clipped[mask].sum().item()
        sums.entropy = entropy.detach()[mask].sum().item()
        return loss, sums

    def _scaled(self, logits_BTV: Tensor) -> Tensor:
        return scale_logits(logits_BTV, self._temperature, self._num_padding_columns)


def _measure(batch: MicroBatch, logprobs: Tensor, old: Tensor, weights: MismatchWeights) -> LossSums:
    """How far the policy moved, and how far apart the engine's and the trainer's log-probs are."""
    mask = batch.mask_BT
    if not bool(mask.any()):
        return LossSums()
    train, rollout, advantages = old[mask], batch.rollout_logprobs_BT[mask], batch.advantages_BT[mask]
    difference = train - rollout
    probs_diff = (train.exp() - rollout.exp()).abs()
    return LossSums(
        num_tokens=mask.sum().item(),
        approx_kl=(train - logprobs[mask]).sum().item(),
        advantage=advantages.sum().item(),
        advantage_max=advantages.max().item(),
        advantage_min=advantages.min().item(),
        probs_diff=probs_diff.sum().item(),
        probs_diff_max=probs_diff.max().item(),
        logprobs_diff=difference.abs().sum().item(),
        logprobs_diff_max=difference.abs().max().item(),
        rollout_kl=-difference.sum().item(),
        rollout_kl_k3=(difference.clamp(max=20).exp() - 1 - difference).sum().item(),
        num_weights=weights.weights.numel(),
        weight=weights.weights.sum().item(),
        weight_square=weights.weights.square().sum().item(),
        num_cut=weights.is_cut.sum().item(),
    )
