"""Megatron's distributed checkpoints (torch_dist) of model weights, a parameter at a time, in one process without Megatron.

The format: `metadata.json` names it, `common.pt` holds what is not sharded, and torch's distributed checkpoint (`.metadata`
and `*.distcp`) holds global tensors in chunks, which `megatron.core.dist_checkpointing.load` cuts for any TP x PP. Our layout
table at TP 1 has the same global tensors: gate rows before up rows, grouped QKV, one slice of a stack for each layer.
Source: `sharded_state_dict` of GPTModel and its layers, megatron-core 0.16.1.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rollpacker.config import ConfigError
from rollpacker.weights.layout import ParameterLayout

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MODULES_WITH_EXTRA_STATE = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Megatron stores (and demands) a scaling state of each linear module of a layer; without FP8 it is None."""


@dataclass(frozen=True)
class StoredParameter:
    """A parameter at TP 1 with the shape and dtype it has in the checkpoint (its layer's slice, if it has a layer)."""

    layout: ParameterLayout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_checkpoint(
    folder: Path, parameters: Sequence[StoredParameter], num_layers: int, read: Callable[[StoredParameter], Tensor]
) -> None:
    """Write `parameters` to the folder, a file for each layer and one for the rest; `read` is called for one after the
    other, and its tensor is forgotten once it is written.

    Written by hand and not by torch's own writer, which keeps a tensor of every name until the end.
    """
    files: dict[str, list[StoredParameter]] = {}
    for p in parameters:
        number = 0 if p.layout.layer is None else p.layout.layer + 1
        files.setdefault(f"__0_{number}.distcp", []).append(p)
    entries: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, members in files.items():
        with (folder / name).open("wb") as file:
            for p in members:
                chunk = _chunk(p.layout, p.shape)
                size = torch.Size(p.shape if p.layout.layer is None else (num_layers, *p.shape))
                entry = entries.setdefault(
                    p.layout.checkpoint_key, TensorStorageMetadata(TensorProperties(dtype=p.dtype), size, [])
                )
                cast(TensorStorageMetadata, entry).chunks.append(chunk)
                index = MetadataIndex(p.layout.checkpoint_key, chunk.offsets)
                places[index] = _append(file, name, read(p).contiguous().reshape(chunk.sizes))
            layer = members[0].layout.layer
            for module in _MODULES_WITH_EXTRA_STATE if layer is not None else ():
                key = f"decoder.layers.{module}._extra_state/shard_{layer}_{num_layers}"
                entries[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = _append(file, name, [None])
            os.fsync(file.fileno())
    torch.save({}, folder / "common.pt")
    metadata = Metadata(entries, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")


def _append(file: IO[bytes], name: str, value: object) -> _StorageInfo:
    """Save a value at the end of the file; where it lies."""
    start = file.tell()
    torch.save(value, file)
    return _StorageInfo(name, start, file.tell() - start)


class MegatronCheckpoint:
    """Reads parameters at TP 1 out of a checkpoint that was written at any TP x PP."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        about = self._folder / "metadata.json"
        if not about.is_file():
            raise ConfigError(f"{folder}: not a Megatron distributed checkpoint, it has no metadata.json.")
        backend = json.loads(about.read_text(encoding="utf-8")).get("sharded_backend")
        if backend != "torch_dist":
            raise ConfigError(f"{about}: the format {backend} is not supported, only torch_dist is.")
        self._reader = dcp.FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except OSError as error:
            raise ConfigError(f"{folder}: the checkpoint is incomplete, {error}.") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def describe(self, layout: ParameterLayout, num_layers: int) -> StoredParameter:
        """Shape and dtype of a parameter as it is stored, rows of vocabulary padding left out."""
        stored = self._metadata.state_dict_metadata.get(layout.checkpoint_key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ConfigError(
                f"{self._folder}: there is no tensor {layout.checkpoint_key!r}, which config.json implies. The checkpoint "
                "belongs to another model, or its keys are not those of a GPTModel with Megatron's local layers."
            )
        shape = tuple(stored.size)
        if layout.layer is not None:
            if shape[0] != num_layers:
                raise ConfigError(
                    f"{self._folder}: {layout.checkpoint_key} has {shape[0]} layers, but config.json says {num_layers}."
                )
            shape = shape[1:]
        dim = layout.dim or 0
        needed = sum(s.stop - s.start for s in layout.shards[0])
        if shape[dim] < needed or (shape[dim] > needed and not layout.num_padding_rows):
            raise ConfigError(
                f"{self._folder}: {layout.checkpoint_key} has {shape[dim]} rows along axis {dim}, but config.json implies "
                f"{needed}. The checkpoint belongs to another model."
            )
        return StoredParameter(layout, (*shape[:dim], needed, *shape[dim + 1 :]), stored.properties.dtype)

    def read(self, parameter: StoredParameter) -> Tensor:
        """The whole parameter, put together from the chunks that hold parts of it."""
        key, chunk = parameter.layout.checkpoint_key, _chunk(parameter.layout, parameter.shape)
        stored = self._metadata.state_dict_metadata[key]
        target = torch.empty(tuple(chunk.sizes), dtype=parameter.dtype)
        items = create_read_items_for_chunk_list(key, stored, [chunk])
        self._reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        return target.reshape(parameter.shape)


class _IntoTensor(LoadPlanner):
    """Directs all that torch's reader reads into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Everything is known already."""

    def create_local_plan(self) -> LoadPlan:
        """The caller has the plan."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """One process: nothing to agree on."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:  # noqa: ARG002 (part of torch's signature)
        """Weights are tensors."""
        raise TypeError(f"{read_item.storage_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where in the target this piece belongs."""
        pieces = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(start, start + length) for start, length in pieces)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The reader has written into the target itself."""


def _chunk(layout: ParameterLayout, shape: tuple[int, ...]) -> ChunkStorageMetadata:
    """Where the parameter lies in its global tensor: all of it, or one layer of a stack."""
    if layout.layer is None:
        return ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return ChunkStorageMetadata(torch.Size([layout.layer, *[0] * len(shape)]), torch.Size([1, *shape]))
