"""The optimizer's states (fp32 weights, both moments of Adam) as whole parameters, for checkpoints of any parallel shape.

A DistributedOptimizer holds stretches of flat buffers, cut for one data-parallel size. Here each parameter's states are put
together on one rank of its data-parallel group, which alone writes them, and loading takes back no more than this rank's
stretches. Ours, because megatron-core 0.16.1 stores wrong values where a parameter's size is no multiple of 64 (it leaves
the padding between parameters out of the buffer it gathers, and not out of the places where it then looks for them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Stretch:
    """What this rank holds of a parameter's states: elements start to stop of the flat parameter, by state name."""

    start: int
    stop: int
    states: dict[str, Tensor]


class OptimizerState:
    """The states of Megatron's Adam, plain or distributed."""

    def __init__(self, optimizer: Any) -> None:
        """Moments are allocated now: torch's Adam would make them in its first step, Megatron's hides them until then."""
        self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        for group in (g for o in self._optimizers for g in o.optimizer.param_groups):
            self._allocate(group["params"])

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far."""
        adam = self._optimizers[0].optimizer
        counters = [state["step"] for state in adam.state.values() if "step" in state]
        return int(counters[0]) if counters else int(adam.param_groups[0].get("step", 0))

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        for adam in (o.optimizer for o in self._optimizers):
            for state in adam.state.values():
                if "step" in state:
                    state["step"] = torch.tensor(float(value))  # one for each: every parameter counts its own up
            for group in adam.param_groups:
                if "step" in group:
                    group["step"] = value

    def gather(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank is to write, as Megatron's sharded tensors. Collective over the data-parallel groups."""
        written: dict[str, Any] = {}
        load: dict[int, int] = {}
        for number, parameter, sharded, optimizer in self._parameters(model_state):
            if any(sharded.replica_id[:2]):  # another tensor-parallel rank or stage has the same
                continue
            group = getattr(optimizer, "data_parallel_group", None)
            size = 1 if group is None else group.size()
            writer = min(range(size), key=lambda rank: load.get(rank, 0))
            load[writer] = load.get(writer, 0) + parameter.numel()
            stretch = _stretch(optimizer, parameter)
            for name in _names(parameter):
                whole = _put_together(parameter, stretch, name, group, writer)
                if group is None:
                    written[f"{number}.{name}"] = _as_sharded(sharded, name, whole, sharded.replica_id)
                elif group.rank() == writer:
                    written[f"{number}.{name}"] = _as_sharded(sharded, name, whole.cpu(), (0, 0, 0))
        return written

    def wanted(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """Where to load the parameters of which this rank holds a stretch, whole."""
        wanted: dict[str, Any] = {}
        for number, parameter, sharded, optimizer in self._parameters(model_state):
            if _stretch(optimizer, parameter) is not None:
                for name in _names(parameter):
                    target = torch.zeros(parameter.shape)
                    wanted[f"{number}.{name}"] = _as_sharded(sharded, name, target, sharded.replica_id)
        return wanted

    @torch.no_grad()
    def fill(self, loaded: Mapping[str, Tensor], model_state: Mapping[str, Any]) -> None:
        """Take this rank's stretches out of what `wanted` has brought."""
        for number, parameter, _, optimizer in self._parameters(model_state):
            stretch = _stretch(optimizer, parameter)
            if stretch is not None:
                for name in _names(parameter):
                    whole = loaded[f"{number}.{name}"].flatten()
                    stretch.states[name].copy_(whole[stretch.start : stretch.stop].view_as(stretch.states[name]))

    def _allocate(self, parameters: list[Any]) -> None:
        for adam in (o.optimizer for o in self._optimizers):
            if not isinstance(adam, torch.optim.Adam):  # AdamW is one, too; others allocate when they are made
                continue
            for parameter in parameters:
                if not adam.state[parameter]:
                    adam.state[parameter].update(step=torch.tensor(0.0))
                    adam.state[parameter].update({name: torch.zeros_like(parameter) for name in _MOMENTS})

    def _parameters(self, model_state: Mapping[str, Any]) -> Iterator[tuple[int, Any, Any, Any]]:
        """Each trained parameter by number, how Megatron shards it, and its optimizer; alike on data-parallel ranks."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        optimizer = self._optimizers[0]
        for number, sharded in enumerate(nested_values(model_state)):
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and sharded.data.requires_grad:
                yield number, sharded.data, sharded, optimizer


def _names(parameter: Tensor) -> tuple[str, ...]:
    """The states of a parameter; where it is fp32 itself the optimizer has no other copy of it."""
    return _MOMENTS if parameter.dtype == torch.float32 else ("param", *_MOMENTS)


def _stretch(optimizer: Any, parameter: Any) -> _Stretch | None:
    """What this rank holds of it, if anything."""
    if hasattr(optimizer, "model_param_group_index_map"):  # a DistributedOptimizer
        if parameter not in optimizer.model_param_group_index_map:
            return None
        held = optimizer._get_model_param_range_map(parameter)["param"]
        return _Stretch(held.start, held.end, optimizer._get_main_param_and_optimizer_states(parameter))
    main = getattr(parameter, "main_param", parameter)
    return _Stretch(0, parameter.numel(), {"param": main, **optimizer.optimizer.state[main]})


def _put_together(parameter: Tensor, stretch: _Stretch | None, name: str, group: Any, writer: int) -> Tensor:
    """The whole state of a parameter, on the group's rank `writer`."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if stretch is not None:
        whole[stretch.start : stretch.stop] = stretch.states[name].detach().flatten()
    if group is not None and group.size() > 1:
        torch.distributed.reduce(whole, torch.distributed.get_global_rank(group, writer), group=group)
    return whole.view(parameter.shape)


def _as_sharded(sharded: Any, name: str, data: Tensor, replica_id: tuple[int, ...]) -> Any:
    """The state laid out as its parameter is."""
    changes: dict[str, Any] = {"key": f"optimizer.{name}.{sharded.key}", "data": data, "replica_id": replica_id}
    if hasattr(sharded, "dtype"):  # a factory, which cuts a parameter in two, has none
        changes["dtype"] = data.dtype
    return replace(sharded, **changes)
