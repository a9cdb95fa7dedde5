"""Hugging Face folders: safetensors in, slice by slice, and out, in files of bounded size, with all that lies beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollpacker.config import ConfigError

INDEX_NAME = "model.safetensors.index.json"
_MAX_FILE_BYTES = 4 << 30
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class SafetensorsFolder(AbstractContextManager["SafetensorsFolder"]):
    """Named tensors of a folder's *.safetensors files; reads only the slices that are asked for."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        index = self._folder / INDEX_NAME
        names = sorted(self._folder.glob("*.safetensors"))
        if index.is_file():
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            names = [self._folder / name for name in sorted(listed)]
        for path in names:
            if not path.is_file():
                raise ConfigError(f"{index} lists {path.name}, which is not there: the folder is incomplete.")
            try:
                file = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except Exception as error:
                raise ConfigError(
                    f"{path} cannot be read as safetensors: {error}. Download or copy it again."
                ) from error
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, which is not read."""
        view = self._slice_of(name)
        if view.get_dtype() not in _SAFETENSORS_DTYPES:
            raise ConfigError(
                f"{self._folder}: the tensor {name} is stored as {view.get_dtype()}; supported are "
                f"{', '.join(_SAFETENSORS_DTYPES)}. Use the weights that are not quantised."
            )
        return tuple(view.get_shape()), _SAFETENSORS_DTYPES[view.get_dtype()]

    def read(self, name: str, *, dim: int = 0, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """The slice `start:stop` along `dim` (0 or 1) of a tensor, or all of it."""
        view = self._slice_of(name)
        if start is None:
            return view[:]
        return view[start:stop] if dim == 0 else view[:, start:stop]

    def _slice_of(self, name: str) -> Any:
        if name not in self._files:
            raise ConfigError(
                f"{self._folder}: there is no tensor {name!r}, which its config.json implies. The weights do not belong "
                "to this config, or the folder is incomplete."
            )
        return self._files[name].get_slice(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@contextmanager
def written_aside(target: str | Path) -> Iterator[Path]:
    """A new folder that replaces `target` when all went well and is removed when not, so that an interrupted export leaves
    nothing that looks complete.
    """
    target = Path(target)
    aside = target.absolute().with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        shutil.rmtree(target, ignore_errors=True)
        aside.replace(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_hf_folder(
    target: str | Path,
    source: str | Path,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a model folder that `transformers` loads: weights, index, and the other files of `source` carried along.

    A file's tensors are held in memory until it is written, `max_file_bytes` at most unless a single tensor is larger.
    """
    weight_map: dict[str, str] = {}
    total_bytes, dtype = 0, torch.float32
    with written_aside(target) as aside:
        for number, tensors in enumerate(_in_files(named_tensors, max_file_bytes), start=1):
            name = f"model-{number:05d}.safetensors"
            save_file(tensors, str(aside / name), metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, name))
            total_bytes += sum(t.nbytes for t in tensors.values())
            dtype = next(iter(tensors.values())).dtype
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (aside / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
        carry_along(Path(source), aside)
        _name_dtype(aside / "config.json", str(dtype).removeprefix("torch."))


def _in_files(
    named_tensors: Iterable[tuple[str, torch.Tensor]], max_file_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in named_tensors:
        if tensors and num_bytes + tensor.nbytes > max_file_bytes:
            yield tensors
            tensors, num_bytes = {}, 0
        tensors[name] = tensor.cpu().contiguous()
        num_bytes += tensor.nbytes
    if tensors:
        yield tensors


def carry_along(source: Path, target: Path) -> None:
    """Copy what is no weight: config.json, tokenizer, chat template, generation config."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt") and path.name != INDEX_NAME:
            shutil.copy(path, target / path.name)


def _name_dtype(config_json: Path, dtype: str) -> None:
    config = json.loads(config_json.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    config_json.write_text(json.dumps(config, indent=2), encoding="utf-8")
