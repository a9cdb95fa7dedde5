"""The plan carried out by the extension on real ranks: every engine shard is bit for bit what cutting the model gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from grid import Grid
from safetensors.torch import load_file
from tiny_models import FAMILIES, write_model
from torch import nn

from rollpacker.comm.world import World
from rollpacker.config import TrainingConfig
from rollpacker.model_shape import ModelShape
from rollpacker.platform.device import Platform
from rollpacker.weights.layout import engine_layout
from rollpacker.weights.reshard import Resharder, bind_engine

sys.path.insert(0, str(Path(__file__).parents[1]))

from resharding import engine_shards

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODELS = [(family, embeddings) for family in FAMILIES for embeddings in ("tied", "untied")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model_folder(request: pytest.FixtureRequest, world: World, shared_tmp: Path) -> Path:
    family, embeddings = request.param
    folder = shared_tmp / f"reshard_{family}_{embeddings}"
    if world.rank == 0:
        write_model(folder, family=family, tied=embeddings == "tied")
    world.comm.Barrier()
    return folder


def empty_engine(shape: ModelShape, size: int, rank: int, dtype: torch.dtype, device: str) -> dict[str, nn.Parameter]:
    """What vLLM allocates, full of rubbish. Matrices have their real shapes, so that padding is rows."""
    parameters = {}
    for p in engine_layout(shape, size):
        rubbish = torch.full(p.size_of(rank), 7.0, dtype=dtype, device=device)
        parameters[p.name] = nn.Parameter(rubbish, requires_grad=False)
    return parameters


def bind(
    world: World, platform: Platform, folder: Path, tp: int, pp: int, rollout: int, dtype: str = "fp32", mib: float = 1
) -> tuple[Resharder, dict[str, nn.Parameter], Grid]:
    training = TrainingConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, dtype="fp32")
    grid = Grid.get(folder, platform, training)
    grid.weights.import_hf(str(folder))
    engine = empty_engine(grid.shape, rollout, world.rank % rollout, DTYPES[dtype], platform.device.type)
    return bind_engine(grid.weights, engine, rollout, world, bucket_bytes=int(mib * 2**20)), engine, grid


def expected_shards(folder: Path, shape: ModelShape, rollout: int, rank: int) -> dict[str, torch.Tensor]:
    full = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    return {n: torch.from_numpy(np.ascontiguousarray(x)) for n, x in engine_shards(full, shape, rollout, rank).items()}


def skip_unless_it_fits(world: World, *sizes: int) -> None:
    if any(world.size % size for size in sizes):
        pytest.skip(f"sizes {sizes} do not tile {world.size} rank(s)")


@pytest.mark.parametrize("rollout", [1, 2, 4])
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_engine_shards_are_bit_exact(
    world: World, platform: Platform, model_folder: Path, tp: int, pp: int, rollout: int
) -> None:
    """fp32 and cut to bf16 as torch cuts it; in one round and in some thirty; again after the weights have changed."""
    skip_unless_it_fits(world, tp * pp, rollout)
    for dtype, mib in (("fp32", 1), ("fp32", 2**-10), ("bf16", 2**-10)):
        resharder, engine, grid = bind(world, platform, model_folder, tp, pp, rollout, dtype, mib)
        wanted = expected_shards(model_folder, grid.shape, rollout, world.rank % rollout)
        assert engine.keys() == wanted.keys()
        for factor in (1.0, -0.5):
            with torch.no_grad():
                for tensor in grid.weights.tensors().values():
                    tensor.mul_(factor)
            resharder.run()
            for name, tensor in wanted.items():
                tensor.mul_(factor)
                assert torch.equal(engine[name].cpu(), tensor.to(DTYPES[dtype])), (name, dtype, factor)
            resharder.check()


def stale(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed[3, 5] += 1e-6
    return changed


@pytest.mark.parametrize("damaged", [stale, lambda w: w.flip(0), lambda w: w.roll(1, 0)], ids=["stale", "flip", "roll"])
def test_a_checksum_finds_wrong_and_misplaced_elements(
    world: World, platform: Platform, model_folder: Path, damaged: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """On the last rank one element is not the trainer's, or all are in another order: that rank says so, and names it."""
    resharder, engine, _ = bind(world, platform, model_folder, 1, 1, 1)
    resharder.run()
    resharder.check()
    if world.rank < world.size - 1:
        resharder.check()
        return
    weight = engine["model.layers.1.mlp.gate_up_proj.weight"]
    weight.copy_(damaged(weight))
    with pytest.raises(RuntimeError, match=r"1 of \d+ blocks .*model\.layers\.1\.mlp\.gate_up_proj\.weight"):
        resharder.check()


def test_a_parameter_that_moves_is_found_again(world: World, platform: Platform, model_folder: Path) -> None:
    """A parameter of either side that gets other memory between two refits is read and written where it is now."""
    resharder, engine, grid = bind(world, platform, model_folder, 1, 1, 1)
    resharder.run()
    embedding, norm = engine["model.embed_tokens.weight"], engine["model.norm.weight"]
    expected = embedding.clone()
    embedding.data = torch.full_like(embedding, 3.0)
    trained = grid.weights.parameter("decoder.final_layernorm.weight")
    in_training = trained.data
    trained.data = torch.full_like(in_training, 5.0)
    try:
        with pytest.raises(RuntimeError, match=r"2 of \d+ blocks .*model\.embed_tokens\.weight.*model\.norm\.weight"):
            resharder.check()
        resharder.run()
        resharder.check()
    finally:
        trained.data = in_training  # the model is other tests' too
    assert torch.equal(embedding[: grid.shape.vocab_size], expected[: grid.shape.vocab_size])
    assert torch.equal(norm, torch.full_like(norm, 5.0))


def test_another_model_is_refused(world: World, platform: Platform, model_folder: Path) -> None:
    _, engine, grid = bind(world, platform, model_folder, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"disagree about the parameters \['model.norm.weight'\]"):
        bind_engine(
            grid.weights, {n: t for n, t in engine.items() if n != "model.norm.weight"}, 1, world, bucket_bytes=1
        )
    engine["model.norm.weight"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match="has 7 elements on rank"):
        bind_engine(grid.weights, engine, 1, world, bucket_bytes=1)
    half = {n: t.half() if "norm" in n else t for n, t in empty_engine(grid.shape, 1, 0, torch.float32, "cpu").items()}
    with pytest.raises(RuntimeError, match="the engine's parameters are"):
        bind_engine(grid.weights, half, 1, world, bucket_bytes=1)
