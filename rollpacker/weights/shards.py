"""The layout table carried out on tensors: Hugging Face tensors cut into a Megatron shard, and shards joined back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rollpacker.weights.hf import SafetensorsFolder
from rollpacker.weights.layout import ParameterLayout


def read_shard(source: SafetensorsFolder, layout: ParameterLayout, tp_rank: int) -> Tensor:
    """The shard of tensor-parallel rank `tp_rank`, put together from the slices of its segments."""
    if layout.dim is None:
        return source.read(layout.hf_names[0])
    dim = layout.dim
    parts = [source.read(s.hf_name, dim=dim, start=s.start, stop=s.stop) for s in layout.shards[tp_rank]]
    if padding := layout.padding_rows(tp_rank):
        parts.append(torch.zeros(padding, *parts[0].shape[1:], dtype=parts[0].dtype))
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]


def join_shards(layout: ParameterLayout, shards: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Cut the shards of all tensor-parallel ranks into their segments and put each where it belongs in its Hugging Face
    tensor: yields (name, whole tensor).
    """
    if layout.dim is None:
        yield layout.hf_names[0], shards[0]
        return
    dim = layout.dim
    for hf_name in layout.hf_names:
        pieces = []
        for shard, segments in zip(shards, layout.shards, strict=True):
            at = 0
            for segment in segments:
                width = segment.stop - segment.start
                if segment.hf_name == hf_name:
                    pieces.append((segment.start, shard.narrow(dim, at, width)))
                at += width
        yield hf_name, torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0])], dim=dim)
