"""megatron.core.resharding as a baseline of `make bench`: from a Megatron model of one TP size into one of another.

It is Megatron to Megatron only: the destination has Megatron's names and layouts, so it does less than a refit of an engine.
Its own copy services need CUDA (GlooCopyService makes a stream), hence one over the MPI that our refit travels by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.refit import reshard_model_weights
from torch import Tensor

from rollpacker.comm.world import World
from rollpacker.config import TrainingConfig
from rollpacker.model_shape import ModelShape
from rollpacker.platform.device import Platform
from rollpacker.training.model import build_module, init_parallel_groups
from rollpacker.weights.refit import MegatronWeights


@dataclass
class MegatronModel:
    """A GPTModel in bf16 with the groups that it was built on."""

    module: Any
    weights: MegatronWeights

    @classmethod
    def build(cls, shape: ModelShape, tp_size: int, platform: Platform) -> MegatronModel:
        """At this TP size; the rest of the world is data parallel. Weights are whatever the memory held."""
        parallel_state.destroy_model_parallel()  # forgets the groups of an earlier model, which keeps them
        training = TrainingConfig(tensor_model_parallel_size=tp_size, dtype="bf16")
        ranks = init_parallel_groups(training, platform, seed=1)
        module = build_module(shape, training, platform, ranks)
        module.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return cls(module, MegatronWeights(module, shape, ranks))


class MegatronReshard:
    """megatron.core.resharding from one model into another."""

    def __init__(self, source: MegatronModel, destination: MegatronModel, world: World) -> None:
        self._source, self._destination = source, destination
        self._service = _MpiCopyService(world)

    def run(self) -> None:
        """Fill the destination; Megatron keeps the plan that the first call makes."""
        reshard_model_weights([self._source.module], [self._destination.module], self._service)

    @property
    def num_slices(self) -> int:
        """That this rank receives, after the first run."""
        return len(self._destination.module._cached_reshard_plan.recv_ops)


class _MpiCopyService:
    """Megatron's CopyService, of which it calls only what has numbers of tasks: one message for each slice of each parameter,
    all started, then waited for; a rank's own slices are copied.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._sends: list[tuple[int, Tensor, int]] = []
        self._receives: list[tuple[int, Tensor, int]] = []

    def submit_send_with_id(self, task_id: int, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor."""
        self._sends.append((task_id, tensor, rank))

    def submit_recv_with_id(self, task_id: int, tensor: Tensor, rank: int) -> None:
        """Receive into a contiguous tensor."""
        self._receives.append((task_id, tensor, rank))

    @torch.no_grad()
    def run(self) -> None:
        """All that was submitted."""
        comm, me = self._world.comm, self._world.rank
        own = {task_id: tensor for task_id, tensor, rank in self._sends if rank == me}
        requests = [comm.Irecv(_bytes(t), source=rank, tag=i) for i, t, rank in self._receives if rank != me]
        requests += [comm.Isend(_bytes(t), dest=rank, tag=i) for i, t, rank in self._sends if rank != me]
        for task_id, tensor, rank in self._receives:
            if rank == me:
                tensor.copy_(own[task_id])
        for request in requests:
            request.Wait()
        comm.Barrier()  # as comm/transfers.py: Megatron waits in gloo next
        self._sends.clear()
        self._receives.clear()


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()
