"""Checkpoints from Hugging Face to Megatron and back, one parameter (or one output file) in memory at a time.

Both directions check all names and shapes and the free disk space before they write; what they write appears whole or not
at all.
A Megatron folder carries the files that are no weights (config.json, tokenizer, generation config) in `huggingface/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rollpacker.config import ConfigError
from rollpacker.model_shape import ModelShape, read_model_config, read_model_shape
from rollpacker.weights.hf import SafetensorsFolder, carry_along, write_hf_folder, written_aside
from rollpacker.weights.layout import ParameterLayout, megatron_layout
from rollpacker.weights.megatron_checkpoint import MegatronCheckpoint, StoredParameter, write_checkpoint
from rollpacker.weights.shards import join_shards, read_shard

Progress = Callable[[int, int, str], None]
"""Called after each parameter with the bytes done, the bytes in all, and the parameter's name."""

CARRIED = "huggingface"
_RESERVE_BYTES = 64 << 20
"""What must stay free beside the weights: tokenizer files, metadata."""


def hf_to_megatron(source: str, target: str, on_progress: Progress) -> None:
    """Write the model folder `source` as a Megatron distributed checkpoint that any TP x PP can load."""
    shape = read_model_shape(source, key="")
    layouts = megatron_layout(shape, 1)
    with SafetensorsFolder(source) as folder:
        _refuse_unknown(folder.names, {n for p in layouts for n in p.hf_names}, source, shape)
        parameters = [_describe(folder, layout) for layout in layouts]
    report = _Report(parameters, on_progress)

    def read(parameter: StoredParameter) -> Tensor:
        # Opened anew each time: pages of a mapped file count as this process's memory until it is closed.
        with SafetensorsFolder(source) as folder:
            tensor = read_shard(folder, parameter.layout, 0)
        report.done(parameter)
        return tensor

    _check_target(target, report.total_bytes)
    with written_aside(target) as aside:
        write_checkpoint(aside, parameters, shape.num_layers, read)
        (aside / CARRIED).mkdir()
        carry_along(Path(source), aside / CARRIED)


def megatron_to_hf(source: str, target: str, on_progress: Progress) -> None:
    """Write a Megatron distributed checkpoint as a model folder: safetensors files of about a layer each, and their index."""
    carried = carried_folder(source)
    shape = read_model_config(carried)
    checkpoint = MegatronCheckpoint(source)
    layouts = megatron_layout(shape, 1)
    parameters = [checkpoint.describe(layout, shape.num_layers) for layout in layouts]
    report = _Report(parameters, on_progress)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for parameter in parameters:
            yield from join_shards(parameter.layout, [checkpoint.read(parameter)])
            report.done(parameter)

    first_layer = [p.num_bytes for p in parameters if p.layout.layer == 0]
    _check_target(target, report.total_bytes)
    write_hf_folder(target, carried, tensors(), max_file_bytes=sum(first_layer))


def carried_folder(checkpoint: str) -> Path:
    """Where the Hugging Face files of a Megatron checkpoint lie: in it, or beside it as in a run's checkpoints."""
    for folder in (Path(checkpoint) / CARRIED, Path(checkpoint).absolute().parent / CARRIED):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"{checkpoint}: there is no {CARRIED}/config.json in it or beside it. Put config.json, the tokenizer files and "
        f"generation_config.json of the model into {Path(checkpoint) / CARRIED}."
    )


class _Report:
    """Adds up what has been converted and tells the caller."""

    def __init__(self, parameters: list[StoredParameter], on_progress: Progress) -> None:
        self.total_bytes = sum(p.num_bytes for p in parameters)
        self._done_bytes = 0
        self._on_progress = on_progress

    def done(self, parameter: StoredParameter) -> None:
        """One more parameter is through."""
        self._done_bytes += parameter.num_bytes
        self._on_progress(self._done_bytes, self.total_bytes, parameter.layout.name)


def _check_target(target: str, num_bytes: int) -> None:
    """Refuse a target that holds something, and a disk without room for `num_bytes` of weights."""
    path = Path(target)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{target} exists already and is not an empty folder. Choose another name, or remove it.")
    disk = next(parent for parent in path.absolute().parents if parent.is_dir())
    needed, free = num_bytes + _RESERVE_BYTES, shutil.disk_usage(disk).free
    if needed > free:
        raise ConfigError(
            f"{target} needs {needed / 2**30:.2f} GiB, but {disk} has {free / 2**30:.2f} GiB free "
            f"({(needed - free) / 2**30:.2f} GiB too few). Free some, or write to another disk."
        )


def _describe(folder: SafetensorsFolder, layout: ParameterLayout) -> StoredParameter:
    """Shape and dtype of a parameter at TP 1; the tensors it is made of must have the rows that config.json implies."""
    dim = layout.dim or 0
    needed = dict.fromkeys(layout.hf_names, 0)
    for segment in layout.shards[0]:
        needed[segment.hf_name] += segment.stop - segment.start
    described = {name: folder.describe(name) for name in needed}
    for name, (shape, dtype) in described.items():
        if shape[dim] != needed[name]:
            raise ConfigError(
                f"the tensor {name} has {shape[dim]} rows along axis {dim}, but config.json implies {needed[name]}. The "
                "weights do not belong to this config."
            )
        if dtype != next(iter(described.values()))[1]:
            raise ConfigError(
                f"{' and '.join(described)} go into one Megatron parameter but differ in dtype ({dtype})."
            )
    shape, dtype = next(iter(described.values()))
    return StoredParameter(layout, (*shape[:dim], sum(needed.values()), *shape[dim + 1 :]), dtype)


def _refuse_unknown(names: set[str], known: set[str], source: str, shape: ModelShape) -> None:
    """Weights that would be lost silently. A tied head that is stored all the same, and old rotary buffers, may go."""
    ignored = {"lm_head.weight"} if shape.tie_word_embeddings else set()
    unknown = sorted(n for n in names - known - ignored if not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ConfigError(
            f"{source} has {len(unknown)} tensors that its config.json does not imply and that would be lost, the first "
            f"ones {', '.join(unknown[:3])}. Its architecture is not what config.json says."
        )
