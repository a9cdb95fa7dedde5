"""Hugging Face folders: safetensors in, slice by slice, and out, in files of bounded size, with all that lies beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollpacker.config import ConfigError

INDEX_NAME = "model.safetensors.index.json"
_MAX_FILE_BYTES = 4 << 30


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

    def read(self, name: str, *, dim: int = 0, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """The slice `start:stop` along `dim` (0 or 1) of a tensor, or all of it."""
        if name not in self._files:
            raise ConfigError(
                f"{self._folder}: there is no tensor {name!r}, which its config.json implies. The weights do not belong "
                "to this config, or the folder is incomplete."
            )
        view = self._files[name].get_slice(name)
        if start is None:
            return view[:]
        return view[start:stop] if dim == 0 else view[:, start:stop]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def write_hf_folder(target: str | Path, source: str | Path, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a model folder that `transformers` loads: weights, index, and the other files of `source` carried along.

    Written beside `target` and renamed, so that an interrupted export leaves nothing that looks complete.
    """
    target, source = Path(target), Path(source)
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total_bytes, dtype = 0, torch.float32
    for number, tensors in enumerate(_in_files(named_tensors), start=1):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, str(aside / name), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total_bytes += sum(t.nbytes for t in tensors.values())
        dtype = next(iter(tensors.values())).dtype
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (aside / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    _carry_along(source, aside, str(dtype).removeprefix("torch."))
    shutil.rmtree(target, ignore_errors=True)
    aside.replace(target)


def _in_files(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in named_tensors:
        if tensors and num_bytes + tensor.nbytes > _MAX_FILE_BYTES:
            yield tensors
            tensors, num_bytes = {}, 0
        tensors[name] = tensor.cpu().contiguous()
        num_bytes += tensor.nbytes
    if tensors:
        yield tensors


def _carry_along(source: Path, target: Path, dtype: str) -> None:
    """Tokenizer, chat template, generation config; config.json with the dtype of the new weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt") and path.name != INDEX_NAME:
            shutil.copy(path, target / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
