"""`make bench`: the refit in place against the golden one, megatron.core.resharding and plain copies, on a model of 1 GB.

Start it on two ranks (mpirun -n 2 python benchmarks/refit.py). A Megatron model of TP 2, an engine of TP 1: each rank keeps a
half of its engine's weights and receives the other. The golden refit is timed without vLLM's loader: every tensor is gathered
whole (gloo) and then copied, slice by slice, into the engine's parameters. Megatron's goes into a second Megatron model
of TP 1, over the MPI that ours uses (benchmarks/megatron_reshard.py). Seconds are medians of the slower rank's; machines are
noisy, ratios within one run mean more. Adds its rows to bench.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from rollpacker.comm.world import World, init_torch_distributed, join_world
from rollpacker.model_shape import ModelShape
from rollpacker.platform.device import Platform, select_platform
from rollpacker.weights.layout import engine_layout
from rollpacker.weights.refit import MegatronWeights
from rollpacker.weights.reshard import Resharder, bind_engine

# 0.50 B parameters: 1.01 GB in bf16.
SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM", num_layers=20, hidden_size=1280, ffn_hidden_size=4480, num_attention_heads=20,
    num_kv_heads=4, head_dim=64, vocab_size=32000, max_position_embeddings=4096, rope_theta=1e6, rms_norm_eps=1e-6,
    tie_word_embeddings=False, has_qkv_bias=True,
)  # fmt: skip
TRAINING_TP, ROLLOUT_TP = 2, 1


@torch.no_grad()
def fill(weights: MegatronWeights, rank: int) -> None:
    """Numbers that differ from rank to rank where the shards do."""
    layout = {p.name: p for p in weights.layout}
    for name, tensor in weights.tensors().items():
        period = 251 if layout[name].dim is None else 251 + rank
        tensor.copy_((torch.arange(tensor.numel(), dtype=torch.int32) % period).view(tensor.shape))


def golden(weights: MegatronWeights, engine: dict[str, torch.Tensor]) -> None:
    """Gather each tensor, put each of its rows where the engine has it."""
    places: dict[str, tuple[torch.Tensor, int, int]] = {}
    for parameter in engine_layout(SHAPE, ROLLOUT_TP):
        at = 0
        for segment in parameter.shards[0]:
            places[segment.hf_name] = (engine[parameter.name], parameter.dim or 0, at)
            at += segment.stop - segment.start
    for name, tensor in weights.export_hf():
        target, dim, at = places[name]
        target.narrow(dim, at, tensor.shape[dim]).copy_(tensor)


def seconds(world: World, work: Callable[[], Any], repeats: int) -> float:
    """Median of the slower rank's times; a first call warms up."""
    slower_rank_seconds(world, work)
    return statistics.median(slower_rank_seconds(world, work) for _ in range(repeats))


def slower_rank_seconds(world: World, work: Callable[[], Any]) -> float:
    """Of one call."""
    world.comm.Barrier()
    start = time.perf_counter()
    work()
    return float(max(world.comm.allgather(time.perf_counter() - start)))


def copies(resharder: Resharder, num_bytes: int, bucket_bytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Packing and unpacking all rounds in one buffer; and as many bytes, as one run, through the same buffer."""
    kernels, threads = resharder.kernels, torch.get_num_threads()
    resharder.bind()
    pack, _, unpack = resharder.tables
    buffer = torch.empty(2 * bucket_bytes, dtype=torch.uint8)
    flat, other = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    chunks = list(zip(flat.split(bucket_bytes), other.split(bucket_bytes), strict=True))

    def ours() -> None:
        kernels.copy(pack, destination_base=buffer.data_ptr(), threads=threads)
        kernels.copy(unpack, source_base=buffer.data_ptr(), threads=threads, past_cache=True)

    def plain() -> None:
        for chunk, _ in chunks:
            buffer[: len(chunk)].copy_(chunk)
        for _, chunk in chunks:
            chunk.copy_(buffer[: len(chunk)])

    return ours, plain


def measure(world: World, platform: Platform, repeats: int, bucket_mib: int) -> list[dict[str, Any]]:
    """All times, as rows of bench.json."""
    from megatron_reshard import MegatronModel, MegatronReshard  # Megatron, after the platform is prepared

    trained = MegatronModel.build(SHAPE, TRAINING_TP, platform)
    fill(trained.weights, world.rank)
    weights, bucket = trained.weights, bucket_mib << 20
    engine = {p.name: torch.zeros(p.size_of(0), dtype=torch.bfloat16) for p in engine_layout(SHAPE, ROLLOUT_TP)}
    resharder = bind_engine(weights, engine, ROLLOUT_TP, world, bucket_bytes=bucket)
    check_csrc(resharder, weights, engine)
    travels = sum(m.size for r in resharder.rounds for m in r.messages if m.is_send) * 2
    total = sum(t.numel() for t in engine.values()) * 2
    other = MegatronModel.build(SHAPE, ROLLOUT_TP, platform)
    megatron = MegatronReshard(trained, other, world)
    first_s = slower_rank_seconds(world, megatron.run)
    check_megatron(weights, other.weights)

    ours, plain = copies(resharder, travels, bucket)
    copy_s, plain_s = seconds(world, ours, repeats), seconds(world, plain, repeats)
    refit_s = seconds(world, resharder.run, repeats)
    golden_s = seconds(world, lambda: golden(weights, engine), repeats)
    megatron_s = seconds(world, megatron.run, repeats)
    memcpy_s = seconds(world, memcpy(total), repeats)
    check_s = seconds(world, resharder.check, 1)
    where = f"{world.size} ranks, bf16, TP {TRAINING_TP} -> {ROLLOUT_TP}, {len(resharder.rounds)} rounds of {bucket_mib} MiB"

    def rate(name: str, took_s: float) -> dict[str, Any]:
        bound = f"a plain copy of {total / 1e9:.2f} GB (ratio: its time over this)"
        return row(f"{name}, rate", total / took_s / 1e9, "GB/s", bound, memcpy_s / took_s)

    return [
        row("refit csrc", refit_s, "s", f"{total / 1e9:.2f} GB a rank, {travels / 1e9:.2f} of them sent; {where}", None),
        rate("refit csrc", refit_s),
        row("refit golden, gather and slice", golden_s, "s", "csrc (ratio: golden over csrc)", golden_s / refit_s),
        rate("refit golden", golden_s),
        row(
            "megatron.core.resharding", megatron_s, "s",
            f"csrc (ratio: Megatron's over csrc); {megatron.num_slices} slices a rank, plan and first run {first_s:.1f} s",
            megatron_s / refit_s,
        ),
        rate("megatron.core.resharding", megatron_s),
        row(
            "pack and unpack", 2 * travels / copy_s / 1e9, "GB/s",
            "as many bytes in plain copies (ratio: their time over ours; at least 0.8 is the target)", plain_s / copy_s,
        ),
        row("checksum of a refit", check_s, "s", "csrc (ratio: checksum over refit)", check_s / refit_s),
    ]  # fmt: skip


def check_csrc(resharder: Resharder, weights: MegatronWeights, engine: dict[str, torch.Tensor]) -> None:
    """What is timed is right: both refits write the same."""
    golden(weights, engine)
    expected = {name: tensor.clone() for name, tensor in engine.items()}
    for tensor in engine.values():
        tensor.zero_()
    resharder.run()
    assert all(torch.equal(engine[name], tensor) for name, tensor in expected.items()), "csrc differs from golden"


def check_megatron(source: MegatronWeights, destination: MegatronWeights) -> None:
    """Megatron's resharding filled its model with the same weights."""
    found = dict(destination.export_hf())
    assert all(torch.equal(found[name], tensor) for name, tensor in source.export_hf()), "Megatron's differs"


def memcpy(num_bytes: int) -> Callable[[], None]:
    """As many bytes from one place to another."""
    source, destination = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    return lambda: destination.copy_(source)  # type: ignore[return-value]


def row(name: str, value: float, unit: str, bound: str, ratio: float | None) -> dict[str, Any]:
    """As benchmarks/run.py has them."""
    return {"name": name, "value": value, "unit": unit, "bound": bound, "ratio": ratio}


def main() -> int:
    """Measure, print a table, add the rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each; the median counts")
    parser.add_argument("--bucket-mib", type=int, default=2, help="weights.bucket_mib; two fit into a core's cache")
    parser.add_argument("--out", type=Path, help="JSON list to add the rows to")
    args = parser.parse_args()
    world, platform = join_world(), select_platform("cpu")
    if world.size != TRAINING_TP:
        parser.error(f"start it on {TRAINING_TP} ranks: mpirun -n {TRAINING_TP} python benchmarks/refit.py")
    platform.prepare(world.local_rank)
    init_torch_distributed(world, "gloo", 600.0)
    rows = measure(world, platform, args.repeats, args.bucket_mib)
    if world.rank == 0:
        table = Table("", "value", "unit", "ratio", "bound", title="The refit of a 1-GB model")
        for r in rows:
            table.add_row(
                r["name"], f"{r['value']:.3g}", r["unit"], f"{r['ratio']:.2f}" if r["ratio"] else "", r["bound"]
            )
        Console(width=150).print(table)
        if args.out:
            earlier = json.loads(args.out.read_text()) if args.out.exists() else []
            args.out.write_text(json.dumps(earlier + rows, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
