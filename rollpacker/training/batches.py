"""Samples as the loss needs them, and micro-batches of them: right-padded rows, shifted by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollpacker.comm.samples import Sample


@dataclass(frozen=True)
class TrainSample:
    """A sample with what the loss needs besides its tokens.

    `advantage` is one number, or one for each response token ([T] float32). `token_weight` is the weight of each of its
    tokens in the loss sum; 0 leaves the response out. `old_logprobs` [T] are those of the policy that sampled, None
    where that is the policy in training; `ref_logprobs` [T] those of the reference model, None where there is none.
    """

    sample: Sample
    advantage: float | np.ndarray
    token_weight: float
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded sequences [batch, time]; position t predicts token t + 1, so the response starts one early.

    `mask_BT` marks response tokens; everything after it is 0 elsewhere. Old and reference log-probs are None where the
    samples have none.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor
    weights_BT: Tensor
    advantages_BT: Tensor
    rollout_logprobs_BT: Tensor
    old_logprobs_BT: Tensor | None
    ref_logprobs_BT: Tensor | None
    samples: tuple[TrainSample, ...]

    def response_rows(self, values_BT: Tensor) -> dict[int, np.ndarray]:
        """Cut the response tokens out of [batch, time] values: request index -> [T] float32."""
        rows = values_BT.detach().float().cpu().numpy()
        return {s.sample.request_index: rows[i, _response(s.sample)].copy() for i, s in enumerate(self.samples)}


def collate(samples: Sequence[TrainSample], device: torch.device) -> MicroBatch:
    """Pad samples to the longest; either all of them have old (reference) log-probs, or none."""
    rows, columns = len(samples), max(s.sample.num_tokens for s in samples) - 1
    inputs = np.zeros((rows, columns), np.int64)
    targets = np.zeros((rows, columns), np.int64)
    mask = np.zeros((rows, columns), bool)
    for row, s in enumerate(samples):
        tokens = np.concatenate([s.sample.prompt_ids, s.sample.response_ids])
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = tokens[1:]
        mask[row, _response(s.sample)] = True

    def on_responses(values: Sequence[float | np.ndarray]) -> Tensor:
        array = np.zeros((rows, columns), np.float32)
        for row, (s, value) in enumerate(zip(samples, values, strict=True)):
            array[row, _response(s.sample)] = value
        return torch.from_numpy(array).to(device)

    def optional(values: Sequence[np.ndarray | None]) -> Tensor | None:
        present = [v for v in values if v is not None]
        if present and len(present) < rows:
            raise ValueError("some samples of a micro-batch have these log-probs and some have not")
        return on_responses(present) if present else None

    positions = np.broadcast_to(np.arange(columns), (rows, columns)).copy()
    return MicroBatch(
        input_ids_BT=torch.from_numpy(inputs).to(device),
        position_ids_BT=torch.from_numpy(positions).to(device),
        targets_BT=torch.from_numpy(targets).to(device),
        mask_BT=torch.from_numpy(mask).to(device),
        weights_BT=on_responses([s.token_weight for s in samples]),
        advantages_BT=on_responses([s.advantage for s in samples]),
        rollout_logprobs_BT=on_responses([s.sample.rollout_logprobs for s in samples]),
        old_logprobs_BT=optional([s.old_logprobs for s in samples]),
        ref_logprobs_BT=optional([s.ref_logprobs for s in samples]),
        samples=tuple(samples),
    )


def _response(sample: Sample) -> slice:
    """Columns of the shifted row that predict the response."""
    return slice(len(sample.prompt_ids) - 1, sample.num_tokens - 1)
