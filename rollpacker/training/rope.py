"""Rotary frequencies of Llama 3.x.

Megatron knows this scaling with the numbers of Llama 3.1 only; config.json may name others, so we compute it and set it.
"""

from __future__ import annotations

import math

import torch

from rollpacker.model_shape import Llama3RopeScaling


def llama3_inverse_frequencies(head_dim: int, rope_theta: float, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Radians per position of each pair of channels, fp32 [head_dim / 2].

    A frequency that turns more than `high_freq_factor` times within the original context stays; one that turns less than
    `low_freq_factor` times is divided by `factor`; between the two the share that stays grows linearly with the turns.
    Source: Llama 3.1 (rope_type llama3 of transformers).
    """
    inv_freq = 1.0 / rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return share * inv_freq + (1.0 - share) * inv_freq / scaling.factor
