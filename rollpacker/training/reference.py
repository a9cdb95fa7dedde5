"""The reference model of a KL term: its weights in host memory, swapped into the training model for a forward pass.

One model on the device instead of two: a step pays two copies of the shard over the bus, and host memory holds two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class ReferenceWeights:
    """The shard of this rank, as it was in the model when this object was made."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = _host_copy(model)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the reference into the model; at the end the trained weights are back, bit for bit."""
        trained = _host_copy(self._model)
        _load(self._model, self._weights)
        try:
            yield
        finally:
            _load(self._model, trained)


def _host_copy(model: Any) -> list[Tensor]:
    return [p.detach().to("cpu", copy=True) for p in model.parameters()]


@torch.no_grad()
def _load(model: Any, weights: list[Tensor]) -> None:
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
