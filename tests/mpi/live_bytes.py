"""Bytes of live tensors, operator by operator: what torch.cuda.max_memory_allocated says on a GPU, for the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside this context `peak` is the most bytes that storages, but for those of `already_there`, took at once.

    Sees the outputs of every operator, in backward passes too; not what a kernel allocates and frees within itself.
    """

    def __init__(self, already_there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._ignored = {StorageWeakRef(t.untyped_storage()).cdata for t in already_there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                reference = StorageWeakRef(leaf.untyped_storage())
                if reference.cdata not in self._ignored:
                    self._live[reference.cdata] = (reference, leaf.untyped_storage().nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._live.values()))
        return result
