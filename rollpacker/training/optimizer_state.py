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

KEY_PREFIX = "optimizer."
"""Of the names of states in a checkpoint. `gather` gives tensors of its own, which training does not touch."""
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
        (self._optimizer,) = getattr(optimizer, "chained_optimizers", [optimizer])
        self._adam = self._optimizer.optimizer
        if not isinstance(self._adam, torch.optim.Adam):  # AdamW is one, too
            raise RuntimeError(
                f"Megatron took {type(self._adam).__module__} for its Adam, whose states checkpoints do not know: this "
                "version runs without transformer-engine and apex. Uninstall them from its environment."
            )
        for parameter in (p for group in self._adam.param_groups for p in group["params"]):
            if not self._adam.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in _MOMENTS}
                self._adam.state[parameter].update(step=torch.tensor(0.0), **zeros)

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far."""
        return int(next((state["step"] for state in self._adam.state.values()), 0))

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        for state in self._adam.state.values():
            state["step"] = torch.tensor(float(value))  # one for each: every parameter counts its own up

    def gather(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank is to write, as Megatron's sharded tensors. Collective over the data-parallel groups."""
        written: dict[str, Any] = {}
        load: dict[int, int] = {}
        for number, parameter, sharded in _parameters(model_state):
            if any(sharded.replica_id[:2]):  # another tensor-parallel rank or stage has the same
                continue
            group = getattr(self._optimizer, "data_parallel_group", None)
            size = 1 if group is None else group.size()
            writer = min(range(size), key=lambda rank: load.get(rank, 0))
            load[writer] = load.get(writer, 0) + parameter.numel()
            stretch = _stretch(self._optimizer, parameter)
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
        for number, parameter, sharded in _parameters(model_state):
            if _stretch(self._optimizer, parameter) is not None:
                for name in _names(parameter):
                    target = torch.zeros(parameter.shape)
                    wanted[f"{number}.{name}"] = _as_sharded(sharded, name, target, sharded.replica_id)
        return wanted

    @torch.no_grad()
    def fill(self, loaded: Mapping[str, Tensor], model_state: Mapping[str, Any]) -> None:
        """Take this rank's stretches out of what `wanted` has brought."""
        for number, parameter, _ in _parameters(model_state):
            stretch = _stretch(self._optimizer, parameter)
            if stretch is not None:
                for name in _names(parameter):
                    whole = loaded[f"{number}.{name}"].flatten()
                    stretch.states[name].copy_(whole[stretch.start : stretch.stop].view_as(stretch.states[name]))


def _parameters(model_state: Mapping[str, Any]) -> Iterator[tuple[int, Any, Any]]:
    """Each trained parameter by number, and how Megatron shards it; alike on data-parallel ranks."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for number, sharded in enumerate(nested_values(model_state)):
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and sharded.data.requires_grad:
            yield number, sharded.data, sharded


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
    changes: dict[str, Any] = {"key": f"{KEY_PREFIX}{name}.{sharded.key}", "data": data, "replica_id": replica_id}
    if hasattr(sharded, "dtype"):  # a factory, which cuts a parameter in two, has none
        changes["dtype"] = data.dtype
    return replace(sharded, **changes)
