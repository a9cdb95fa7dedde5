"""Trainer: gradient sums of samples, then one optimizer step.

Exactness contract (docs/design/001): `accumulate` adds the *unnormalised sum* of its samples' gradients on this rank and
may be called any number of times, with any split of the samples; nothing is communicated between data-parallel ranks and
no parameter moves. `update` reduces once (DP, tied embeddings), divides once by the global count, clips, and steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollpacker.comm.groups import ParallelRanks
from rollpacker.comm.samples import Sample
from rollpacker.config import Config
from rollpacker.data.packing import split_micro_batches
from rollpacker.model_shape import ModelShape
from rollpacker.platform.device import Platform
from rollpacker.training.logprobs import scale_logits, token_entropy, token_logprobs
from rollpacker.training.loss import ClipRange, ppo_clip


@dataclass(frozen=True)
class TrainSample:
    """A sample with what the loss needs of its group: the advantage, and the weight of each of its tokens."""

    sample: Sample
    advantage: float
    token_weight: float


@dataclass
class LossSums:
    """Sums over response tokens (maxima where named so), added up over micro-batches, chunks and replicas."""

    loss: float = 0.0
    num_clipped: float = 0.0
    approx_kl: float = 0.0
    entropy: float = 0.0
    num_tokens: float = 0.0
    probs_diff: float = 0.0
    logprobs_diff: float = 0.0
    probs_diff_max: float = 0.0
    logprobs_diff_max: float = 0.0

    def add(self, other: LossSums) -> None:
        """Fold another part of the step in."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name.endswith("_max") else mine + value)


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did: the gradient norm before clipping, and the learning rate."""

    grad_norm: float
    lr: float


class Trainer:
    """Drives Megatron's forward-backward schedule over micro-batches of padded sequences."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        lr_schedule: Any,
        config: Config,
        shape: ModelShape,
        ranks: ParallelRanks,
        platform: Platform,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._lr_schedule = lr_schedule
        self._training = config.training
        self._temperature = config.rollout.temperature
        self._clip = ClipRange(
            config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high, config.algorithm.clip_ratio_c
        )
        self._ranks = ranks
        self._platform = platform
        padding = shape.padded_vocab_size(ranks.tp_size) - shape.vocab_size
        rows = shape.padded_vocab_size(ranks.tp_size) // ranks.tp_size
        self._num_padding_columns = min(max(padding - (ranks.tp_size - 1 - ranks.tp_rank) * rows, 0), rows)

    def begin(self) -> None:
        """Clear the gradients of the step before."""
        with self._platform.megatron_calls():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()

    def accumulate(self, samples: Sequence[TrainSample]) -> LossSums:
        """Add the gradient sums of `samples`; a rank without samples does nothing. Sums count on the last stage."""
        sums = LossSums()
        if not samples:
            return sums
        batches = split_micro_batches(
            [s.sample.num_tokens for s in samples],
            max_tokens=self._training.max_tokens_per_gpu,
            max_sequences=self._training.micro_batch_size,
        )
        micro_batches = [_collate([samples[i] for i in b], self._platform.device) for b in batches]
        for part in self._forward_backward(micro_batches):
            sums.add(part)
        return sums

    def update(self, denominator: int) -> UpdateResult:
        """Reduce the gradients once, divide by the global count, clip, step."""
        self.reduce_gradients(denominator)
        self._lr_schedule.step(1)
        with self._platform.megatron_calls():
            _, grad_norm, _ = self.optimizer.step()
        grad_norm = float(grad_norm or 0.0)
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"the gradient norm is {grad_norm}, and the weights with it are lost. Lower training.lr, or look at the "
                "last rows of metrics.jsonl for what grew."
            )
        return UpdateResult(grad_norm=grad_norm, lr=float(self.optimizer.param_groups[0]["lr"]))

    def reduce_gradients(self, denominator: int) -> None:
        """Sum the gradients over data-parallel replicas and tied embeddings, then divide by `denominator`."""
        from megatron.core.distributed import finalize_model_grads

        with self._platform.megatron_calls():
            finalize_model_grads([self.model], num_tokens=None)
            self.model.scale_gradients(1.0 / denominator)

    def _forward_backward(self, micro_batches: list[_MicroBatch]) -> list[LossSums]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with self._platform.megatron_calls():
            return get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iter(micro_batches),
                model=[self.model],
                num_microbatches=len(micro_batches),
                seq_length=max(m.input_ids_BT.shape[1] for m in micro_batches),
                micro_batch_size=max(m.input_ids_BT.shape[0] for m in micro_batches),
                forward_only=False,
            )

    def _forward_step(self, micro_batches: Iterator[_MicroBatch], model: Any) -> tuple[Any, Any]:
        """Megatron's contract: the model's output, and a function from it to (loss sum, token count, what to report)."""
        batch = next(micro_batches)
        output = model(batch.input_ids_BT, batch.position_ids_BT, None)
        return output, lambda logits_BTV: self._loss(logits_BTV, batch)

    def _loss(self, logits_BTV: torch.Tensor, batch: _MicroBatch) -> tuple[torch.Tensor, torch.Tensor, LossSums]:
        logits_BTV = scale_logits(logits_BTV, self._temperature, self._num_padding_columns)
        entropy = token_entropy(logits_BTV.detach(), self._ranks.tp_group)
        logprobs = token_logprobs(logits_BTV, batch.targets_BT)
        # One optimizer step per rollout: the policy that is trained is the one that sampled, so the ratio is 1.
        old_logprobs = logprobs.detach()
        loss, is_clipped = ppo_clip(logprobs, old_logprobs, batch.advantages_B1, self._clip)
        loss_sum = (loss * batch.weights_BT).sum()
        mask = batch.mask_BT
        train, rollout = old_logprobs[mask], batch.rollout_logprobs_BT[mask]
        logprobs_diff, probs_diff = (train - rollout).abs(), (train.exp() - rollout.exp()).abs()
        sums = LossSums(
            loss=loss_sum.item(),
            num_clipped=is_clipped[mask].sum().item(),
            approx_kl=(old_logprobs - logprobs.detach())[mask].sum().item(),
            entropy=entropy[mask].sum().item(),
            num_tokens=mask.sum().item(),
            probs_diff=probs_diff.sum().item(),
            logprobs_diff=logprobs_diff.sum().item(),
            probs_diff_max=probs_diff.max().item() if probs_diff.numel() else 0.0,
            logprobs_diff_max=logprobs_diff.max().item() if logprobs_diff.numel() else 0.0,
        )
        return loss_sum, mask.sum().int(), sums


@dataclass(frozen=True)
class _MicroBatch:
    """Right-padded sequences; position t predicts token t + 1, so prompt and response shift by one."""

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    mask_BT: torch.Tensor
    weights_BT: torch.Tensor
    rollout_logprobs_BT: torch.Tensor
    advantages_B1: torch.Tensor


def _collate(samples: Sequence[TrainSample], device: torch.device) -> _MicroBatch:
    rows, columns = len(samples), max(s.sample.num_tokens for s in samples) - 1
    inputs = np.zeros((rows, columns), np.int64)
    targets = np.zeros((rows, columns), np.int64)
    mask = np.zeros((rows, columns), bool)
    weights = np.zeros((rows, columns), np.float32)
    rollout_logprobs = np.zeros((rows, columns), np.float32)
    for row, train_sample in enumerate(samples):
        s = train_sample.sample
        tokens = np.concatenate([s.prompt_ids, s.response_ids])
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = tokens[1:]
        response = slice(len(s.prompt_ids) - 1, len(tokens) - 1)
        mask[row, response] = True
        weights[row, response] = train_sample.token_weight
        rollout_logprobs[row, response] = s.rollout_logprobs
    positions = np.broadcast_to(np.arange(columns), (rows, columns)).copy()
    advantages = np.array([[s.advantage] for s in samples], np.float32)
    arrays = (inputs, positions, targets, mask, weights, rollout_logprobs, advantages)
    return _MicroBatch(*(torch.from_numpy(a).to(device) for a in arrays))
