"""Checkpoints of what is trained: Megatron's distributed format for weights, optimizer and random states.

A save has two halves. `snapshot` is collective: it plans which rank writes what and copies that to host memory, so that
training may go on. `PendingCheckpoint.write` is local and blocking, meant for a thread of its own: it writes this rank's
files and says what is in them. Rank 0 closes the checkpoint with everybody's words (`finish`). Nobody waits in a collective
for a disk, and no process is forked (after MPI_Init that is unsafe on InfiniBand), as Megatron's own writer would.

Loading works on any other TP x PP x DP: weights and optimizer states are stored in the shape of the whole parameters.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollpacker.comm.groups import ParallelRanks
from rollpacker.platform.device import Platform
from rollpacker.training.optimizer_state import KEY_PREFIX, OptimizerState


class TrainingState:
    """Weights, optimizer and random states of this rank, to be saved and loaded together with all other ranks."""

    def __init__(self, model: Any, optimizer: Any, lr_schedule: Any, ranks: ParallelRanks, platform: Platform) -> None:
        """`model` is the DDP-wrapped GPTModel."""
        self._module = model.module
        self._states = OptimizerState(optimizer)
        self._lr_schedule = lr_schedule
        self._dp_group = ranks.dp_group
        self._parallel_shape = [ranks.tp_size, ranks.pp_size, ranks.dp_size]
        self._platform = platform

    def snapshot(self, folder: Path) -> PendingCheckpoint:
        """Copy what this rank is to write into `folder` (which exists, and is empty) to host memory. Collective."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        pending = _plan_only()
        with self._platform.megatron_calls():
            dist_checkpointing.save(
                self._to_save(),
                str(folder),
                sharded_strategy=FullyParallelSaveStrategyWrapper(pending, self._dp_group),
                async_sharded_save=True,
            )
        return PendingCheckpoint(folder, pending.writer, pending.global_metadata)

    def load(self, folder: Path) -> None:
        """Fill this rank's shards from a checkpoint that was saved at any TP x PP x DP. Collective.

        Learning rate, weight decay and Adam's constants stay those of this run's config. Random states are taken back on
        the shape that saved them only: there is one for each rank, and nothing that is trained draws from them.
        """
        from megatron.core import dist_checkpointing

        with self._platform.megatron_calls():
            model = self._model_state()
            common = dist_checkpointing.load_common_state_dict(str(folder))
            wanted = {"model": model, "optimizer": self._states.wanted(model)}
            if common["parallel_shape"] == self._parallel_shape:
                wanted["random_states"] = self._random_states()
            # Each rank asks for what it needs, so no one shard has exactly one reader.
            loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
            self._module.load_state_dict(loaded["model"])
            self._states.fill(loaded["optimizer"], self._model_state())
        self._states.num_updates = common["num_updates"]
        self._lr_schedule.num_steps = 0
        self._lr_schedule.step(common["num_lr_steps"])
        if "random_states" in loaded:
            _set_random_states(loaded["random_states"])

    def _to_save(self) -> dict[str, Any]:
        model = self._model_state()
        return {
            "model": model,
            "optimizer": self._states.gather(model),
            "random_states": self._random_states(),
            "num_updates": self._states.num_updates,
            "num_lr_steps": self._lr_schedule.num_steps,
            "parallel_shape": self._parallel_shape,
        }

    def _model_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._module.sharded_state_dict()
        return state

    def _random_states(self) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return ShardedObject("random_states", _read_random_states(), (size,), (rank,))


class PendingCheckpoint:
    """What this rank has still to write of a checkpoint; host memory until it is written."""

    def __init__(self, folder: Path, writer: Any, global_metadata: Any) -> None:
        """`global_metadata` is rank 0's."""
        self._folder = folder
        self._writer = writer
        self._global_metadata = global_metadata
        self._buckets = [
            (path, name, (objects, [(item, _on_host(item.index.fqn, tensor)) for item, tensor in tensors]))
            for path, name, (objects, tensors) in writer.write_buckets
        ]
        self.paths = [Path(path) for path, _, _ in self._buckets]
        """The files that `write` makes."""

    def write(self) -> list[Any]:
        """Write this rank's files, fsync included; where in them what lies (for `finish`). Raises OSError."""
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        transforms = [self._writer.transforms]
        written: list[Any] = []
        for number, bucket in enumerate(self._buckets):
            results: queue.Queue[Any] = queue.Queue()
            running: queue.Queue[int] = queue.Queue()
            running.put(number)
            FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, running, use_fsync=True)
            _, outcome = results.get()
            if isinstance(outcome, Exception):
                raise outcome
            written += outcome
        self._buckets.clear()
        return written

    def finish(self, written: Sequence[list[Any]]) -> None:
        """Write the table of contents, from what `write` gave on each rank. Rank 0 only."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        self._writer.finish(self._global_metadata, list(written))
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """In host memory, and not what training goes on to change."""
    return tensor.detach().to("cpu", copy=not name.startswith(KEY_PREFIX))


def _plan_only() -> Any:
    """A save strategy that plans, and leaves the writing to `PendingCheckpoint`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    # Megatron's queue of results lives in a process of its own, which every plan would start.
    filesystem_async._results_queue = queue.Queue()

    class PlanOnly(TorchDistSaveShardedStrategy):
        def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
            self.writer, self.global_metadata = writer, planned[1]
            return AsyncRequest(None, (), [])

    return PlanOnly("torch_dist", 1, thread_count=1)


def _read_random_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
