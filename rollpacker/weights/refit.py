"""Megatron shards from and to Hugging Face tensors, by the layout table: import, and the golden export of a refit.

The golden path gathers every tensor whole on every rank, one parameter at a time, and hands it on under its Hugging Face
name. It is slow and simple: the oracle of every faster way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollpacker.comm.groups import ParallelRanks
from rollpacker.model_shape import ModelShape
from rollpacker.weights.hf import SafetensorsFolder
from rollpacker.weights.layout import TIED_HEAD, ParameterLayout, megatron_layout, stage_of
from rollpacker.weights.plan import TrainingGrid
from rollpacker.weights.shards import join_shards, read_shard


class MegatronWeights:
    """The parameters of this rank's pipeline stage under their names in the whole model."""

    def __init__(self, model: Any, shape: ModelShape, ranks: ParallelRanks) -> None:
        self._ranks = ranks
        self.shape = shape
        self.layout = megatron_layout(shape, ranks.tp_size)
        self._parameters = _global_names(model, shape, ranks)
        if unknown := self._parameters.keys() - {p.name for p in self.layout} - {TIED_HEAD}:
            raise RuntimeError(
                f"the layout table does not know these parameters of Megatron's model: {sorted(unknown)}"
            )

    @property
    def grid(self) -> TrainingGrid:
        """How the model is spread over the ranks."""
        return TrainingGrid(self._ranks.tp_size, self._ranks.pp_size)

    def tensors(self) -> dict[str, Tensor]:
        """The local shards of all parameters of this stage, by name: the parameters themselves, whose memory may move."""
        return dict(self._parameters)

    def parameter(self, name: str) -> Tensor:
        """The local shard of a parameter of this stage."""
        return self._parameters[name]

    @torch.no_grad()
    def import_hf(self, folder: str) -> None:
        """Fill this rank's shards from a Hugging Face folder; each rank reads only its slices."""
        with SafetensorsFolder(folder) as source:
            for layout in self.layout:
                for parameter in self._local_copies(layout):
                    parameter.copy_(read_shard(source, layout, self._ranks.tp_rank))

    def export_hf(self, tensor_of: Callable[[Tensor], Tensor] = lambda p: p.data) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) on every rank, in the order of the layout. Collective.

        `tensor_of` picks what is exported of a parameter: its data, or its gradient.
        """
        for layout in self.layout:
            local = self._parameters.get(layout.name)
            shards = self._gather_shards(layout, None if local is None else tensor_of(local))
            yield from join_shards(layout, shards)

    def _local_copies(self, layout: ParameterLayout) -> list[Tensor]:
        """Where this rank keeps the parameter: nowhere, once, or (tied embedding) on the last stage as the head too."""
        copies = [self._parameters[layout.name]] if layout.name in self._parameters else []
        is_tied_head = layout.is_on_first_stage and self.shape.tie_word_embeddings and self._ranks.pp_rank > 0
        if is_tied_head and TIED_HEAD in self._parameters:
            copies.append(self._parameters[TIED_HEAD])
        return copies

    def _gather_shards(self, layout: ParameterLayout, local: Tensor | None) -> list[Tensor]:
        """All tensor-parallel shards: gathered on the stage that owns the parameter, then broadcast to the others."""
        owner = stage_of(layout, self.shape.num_layers, self._ranks.pp_size)
        shards: list[Tensor] = []
        if self._ranks.pp_rank == owner:
            assert local is not None, f"stage {owner} owns {layout.name} but does not hold it"
            shards = [local]
            if self._ranks.tp_size > 1 and layout.dim is not None:
                shards = [torch.empty_like(local) for _ in range(self._ranks.tp_size)]
                dist.all_gather(shards, local.contiguous(), group=self._ranks.tp_group)
        if self._ranks.pp_size > 1:
            shards = self._broadcast_from_stage(owner, shards)
        return shards

    def _broadcast_from_stage(self, owner: int, shards: list[Tensor]) -> list[Tensor]:
        group = self._ranks.pp_group
        source = dist.get_global_rank(group, owner)
        facts: list[Any] = [(len(shards), shards[0].shape, shards[0].dtype, shards[0].device.type) if shards else None]
        dist.broadcast_object_list(facts, src=source, group=group)
        count, shape, dtype, device_type = facts[0]
        device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else "cpu"
        if self._ranks.pp_rank != owner:
            shards = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
        for shard in shards:
            dist.broadcast(shard, src=source, group=group)
        return shards


def _global_names(model: Any, shape: ModelShape, ranks: ParallelRanks) -> dict[str, Tensor]:
    """Megatron numbers the layers of each stage from 0 and prefixes the names of wrapped modules."""
    first_layer = ranks.pp_rank * (shape.num_layers // ranks.pp_size)
    named = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first_layer)
        named[".".join(parts)] = parameter
    return named
