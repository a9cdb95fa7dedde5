"""A job as nodes and ranks, and which parallel groups then cross nodes. Pure.

Ranks fill one node after the other; a training replica is contiguous (rank order tp-cp-pp-dp), and so is a rollout replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.config import Config


@dataclass(frozen=True)
class Topology:
    """Nodes with the same number of ranks each, one rank a GPU."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node

    @property
    def overrides(self) -> list[str]:
        """What tells the program the size that it is started with."""
        return [f"trainer.nnodes={self.num_nodes}", f"trainer.n_gpus_per_node={self.ranks_per_node}"]

    def num_nodes_of_group(self, size: int, stride: int) -> int:
        """Nodes that a group of `size` ranks, `stride` apart, lies on: the most that any such group of the job does."""
        starts = (start for start in range(self.num_ranks) if start // stride % size == 0)
        return max(len({(start + i * stride) // self.ranks_per_node for i in range(size)}) for start in starts)


def describe_groups(config: Config, topology: Topology) -> dict[str, str]:
    """For training and rollout: the parallel sizes, and between which nodes each group communicates.

    The sizes must fit the job (config_checks.check_parallel_shape).
    """
    training, rollout = config.training, config.rollout
    sizes = {
        "TP": training.tensor_model_parallel_size,
        "CP": training.context_parallel_size,
        "PP": training.pipeline_model_parallel_size,
        "DP": topology.num_ranks // training.replica_size,
    }
    groups, stride = [], 1
    for name, size in sizes.items():
        if size > 1:
            groups.append(f"{name} {size} {_where(topology.num_nodes_of_group(size, stride))}")
        stride *= size
    replica = rollout.tensor_model_parallel_size
    where = f" {_where(topology.num_nodes_of_group(replica, 1))}" if replica > 1 else ""
    return {
        "training": ", ".join(groups) or "1 rank",
        "rollout": f"TP {replica}{where}, {topology.num_ranks // replica} replica(s)",
    }


def _where(num_nodes: int) -> str:
    return "within a node" if num_nodes == 1 else f"over {num_nodes} nodes"
