"""`rollpacker plan`: what a refit moves between GPUs, over which links, and how long it takes at their bandwidths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from rollpacker.cli.terminal import add_config_arguments, columns, open_console
from rollpacker.config import ConfigError
from rollpacker.config_checks import check_parallel_shape
from rollpacker.config_file import load_config
from rollpacker.memory_estimate import ELEMENT_BYTES, GIB
from rollpacker.model_shape import ModelShape, check_model_shape
from rollpacker.simulator.cluster import cluster_size, model_shape
from rollpacker.simulator.constants import GPUS, MEMORY_EFFICIENCY, NETWORK_BANDWIDTH, GpuFacts
from rollpacker.weights.plan import Traffic, TrainingGrid, reshard_plan

HELP = (
    "Plan the refit of a job: bytes moved between GPUs by link, balance, predicted time (no GPU, no MPI, no weights)."
)


@dataclass(frozen=True)
class ElementSizes:
    """Bytes of an element in Megatron, in vLLM, and on the way: the smaller one travels."""

    training: int
    rollout: int

    @property
    def travelling(self) -> int:
        """A block is converted where its bytes are more."""
        return min(self.training, self.rollout)


@dataclass(frozen=True)
class RefitTime:
    """Seconds of the busiest rank on each resource, if it were used without a pause at its bandwidth."""

    nvlink_s: float
    network_s: float
    memory_s: float

    @property
    def total_s(self) -> float:
        """Buckets overlap copies and both links, so that the slowest counts."""
        return max(self.nvlink_s, self.network_s, self.memory_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser, example="configs/qwen2.5_7b_8k.yaml", override="rollout.tensor_model_parallel_size=4")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; the exit code."""
    config = load_config(arguments.config, list(arguments.overrides), prompts=None)
    shape = model_shape(config.model.path)
    num_gpus, per_node = cluster_size(config)
    check_parallel_shape(config, num_gpus)
    check_model_shape(config, shape)
    training, size = config.training, config.rollout.tensor_model_parallel_size
    grid = TrainingGrid(
        training.tensor_model_parallel_size, training.pipeline_model_parallel_size, training.context_parallel_size
    )
    start = time.perf_counter()
    try:
        plan = reshard_plan(shape, grid, size, per_node)
    except ValueError as error:
        raise ConfigError(f"rollout.tensor_model_parallel_size={size}: {error}.") from error
    seconds = time.perf_counter() - start
    console = open_console()
    path = config.model.path
    name = path if Path(path).is_dir() else f"{Path(path).name} as published ({path} is not there)"
    facts = [
        f"model     {name}, {shape.num_parameters() / 1e9:.1f} B parameters",
        f"cluster   {num_gpus} x {config.cluster.gpu}, {per_node} a node",
        f"training  TP {grid.tensor_model_parallel_size} x PP {grid.pipeline_model_parallel_size} x CP "
        f"{grid.context_parallel_size} x DP {num_gpus // grid.replica_size}, {training.dtype}",
        f"rollout   TP {size} x {num_gpus // size} replicas, {config.rollout_dtype}",
        f"plan      {len(plan.ops):,} block copies among {plan.period} ranks, {num_gpus // plan.period} times; made in "
        f"{seconds:.2f} s",
    ]
    console.print("\n".join(facts), soft_wrap=True)
    sizes = ElementSizes(ELEMENT_BYTES[training.dtype], ELEMENT_BYTES[config.rollout_dtype])
    traffic = plan.traffic()
    console.print(_bytes_table(traffic, sizes, num_gpus))
    console.print(_verdict(traffic, sizes, shape, grid, config.cluster.gpu), soft_wrap=True)
    return 0


def predict(traffic: Sequence[Traffic], sizes: ElementSizes, gpu: GpuFacts) -> RefitTime:
    """Time at the links' and the memory's bandwidths; a link carries both directions at once.

    A local copy reads and writes. What travels is read and written by the packing and read by the link, and written by the
    link and read and written by the unpacking.
    """

    def memory_bytes(t: Traffic) -> int:
        packed = t.sent * (sizes.training + 2 * sizes.travelling)
        unpacked = t.received * (2 * sizes.travelling + sizes.rollout)
        return t.local * (sizes.training + sizes.rollout) + packed + unpacked

    def busiest(num_bytes: Callable[[Traffic], int]) -> int:
        return max(num_bytes(t) for t in traffic)

    in_node = busiest(lambda t: max(t.sent_in_node, t.received_in_node)) * sizes.travelling
    between = busiest(lambda t: max(t.sent_between_nodes, t.received_between_nodes)) * sizes.travelling
    return RefitTime(
        nvlink_s=in_node / gpu.nvlink_bandwidth,
        network_s=between / NETWORK_BANDWIDTH,
        memory_s=busiest(memory_bytes) / (gpu.memory_bandwidth * MEMORY_EFFICIENCY),
    )


def _bytes_table(traffic: Sequence[Traffic], sizes: ElementSizes, num_gpus: int) -> Table:
    table = columns("GiB", "mean GPU", "busiest", f"all {num_gpus}")
    names = {
        "local": "stays on its GPU",
        "sent_in_node": "sent over NVLink",
        "received_in_node": "received over NVLink",
        "sent_between_nodes": "sent over InfiniBand",
        "received_between_nodes": "received over InfiniBand",
    }
    for field, name in names.items():
        size = sizes.rollout if field == "local" else sizes.travelling
        gib = [getattr(t, field) * size / GIB for t in traffic]
        mean = sum(gib) / len(gib)
        table.add_row(name, f"{mean:.2f}", f"{max(gib):.2f}", f"{mean * num_gpus:,.1f}")
    return table


def _verdict(traffic: Sequence[Traffic], sizes: ElementSizes, shape: ModelShape, grid: TrainingGrid, gpu: str) -> str:
    refit = predict(traffic, sizes, GPUS[gpu])
    shards = grid.tensor_model_parallel_size * grid.pipeline_model_parallel_size
    golden = shape.num_parameters() * sizes.training * (1 - 1 / shards) / GIB
    return (
        f"predicted {refit.total_s:.2f} s = the longest of NVLink {refit.nvlink_s:.2f}, InfiniBand {refit.network_s:.2f}, "
        f"GPU memory {refit.memory_s:.2f}\n"
        f"          of the busiest GPU, at the simulator's bandwidths; no GPU has run it yet\n"
        f"golden    weights.refit=golden gathers every tensor on every GPU: {golden:.1f} GiB received by each"
    )
