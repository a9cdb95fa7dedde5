"""Trainer: gradient sums of samples, then one optimizer step.

Exactness contract (docs/design/001): `accumulate` adds the *unnormalised sum* of its samples' gradients on this rank and
may be called any number of times, with any split of the samples; nothing is communicated between data-parallel ranks and
no parameter moves. `update` reduces once (DP, tied embeddings), divides once by the global count, clips, and steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollpacker.comm.groups import ParallelRanks
from rollpacker.config import Config
from rollpacker.data.packing import split_micro_batches
from rollpacker.model_shape import ModelShape
from rollpacker.platform.device import Platform
from rollpacker.training.batches import MicroBatch, TrainSample, collate
from rollpacker.training.objective import LossSums, Objective


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
        self._platform = platform
        padding = shape.padded_vocab_size(ranks.tp_size) - shape.vocab_size
        rows = shape.padded_vocab_size(ranks.tp_size) // ranks.tp_size
        self._objective = Objective(
            config,
            tp_group=ranks.tp_group,
            num_padding_columns=min(max(padding - (ranks.tp_size - 1 - ranks.tp_rank) * rows, 0), rows),
        )

    def advance_lr(self) -> None:
        """Go on to the next step's learning rate; once a step, however many updates it makes."""
        self._lr_schedule.step(1)

    def begin(self) -> None:
        """Clear the gradients of the update before."""
        with self._platform.megatron_calls():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()

    def accumulate(self, samples: Sequence[TrainSample]) -> LossSums:
        """Add the gradient sums of `samples`; a rank without samples does nothing. Sums count on the last stage."""
        sums = LossSums()

        def loss(logits_BTV: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, LossSums]:
            loss_sum, part = self._objective.loss(logits_BTV, batch)
            return loss_sum, batch.mask_BT.sum().int(), part

        for part in self._run(samples, loss, forward_only=False):
            sums.add(part)
        return sums

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> dict[int, np.ndarray]:
        """Log-probs [T] of each sample's response by request index; on the last stage, empty elsewhere."""
        result: dict[int, np.ndarray] = {}

        def collect(logits_BTV: Tensor, batch: MicroBatch, *, non_loss_data: bool) -> dict[int, np.ndarray]:  # noqa: ARG001
            return self._objective.logprobs(logits_BTV, batch)

        for part in self._run(samples, collect, forward_only=True):
            result |= part
        return result

    def update(self, denominator: int) -> UpdateResult:
        """Reduce the gradients once, divide by the global count, clip, step."""
        self.reduce_gradients(denominator)
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

    def _run(self, samples: Sequence[TrainSample], on_logits: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Run the model over `samples` in micro-batches; what `on_logits` reports of each, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not samples:
            return []
        indices = split_micro_batches(
            [s.sample.num_tokens for s in samples],
            max_tokens=self._training.max_tokens_per_gpu,
            max_sequences=self._training.micro_batch_size,
        )
        batches = [collate([samples[i] for i in batch], self._platform.device) for batch in indices]

        def forward_step(source: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
            """Megatron's contract: the model's output, and a function from it to what is wanted of it."""
            batch = next(source)
            output = model(batch.input_ids_BT, batch.position_ids_BT, None)
            return output, lambda logits_BTV, **kwargs: on_logits(logits_BTV, batch, **kwargs)

        with self._platform.megatron_calls():
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=[self.model],
                num_microbatches=len(batches),
                seq_length=max(b.input_ids_BT.shape[1] for b in batches),
                micro_batch_size=max(b.input_ids_BT.shape[0] for b in batches),
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return results
