"""An engine that is wrong on purpose: noise on its weights, as quantisation or other kernels would put on its log-probs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def with_noise(
    named_tensors: Iterable[tuple[str, Tensor]], relative_std: float, *, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Add Gaussian noise of `relative_std` times each matrix's own standard deviation; vectors stay as they are.

    The noise is a function of seed and name, so that all ranks of an engine draw the same.
    """
    for name, tensor in named_tensors:
        if tensor.dim() < 2:
            yield name, tensor
            continue
        generator = torch.Generator().manual_seed((seed << 32) | zlib.crc32(name.encode()))
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        yield name, tensor + relative_std * tensor.std() * noise
