"""Megatron's own checkpoint code reads what `convert` writes, on every shape, and `convert` reads what Megatron writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grid import Grid
from safetensors.torch import load_file
from tiny_models import write_model

from rollpacker.comm.world import World
from rollpacker.config import TrainingConfig
from rollpacker.platform.device import Platform
from rollpacker.training.model import load_megatron_checkpoint
from rollpacker.weights.convert import hf_to_megatron, megatron_to_hf

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODELS = [("qwen2", "tied"), ("qwen3", "untied"), ("qwen3", "tied"), ("llama3", "untied")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model_folder(request: pytest.FixtureRequest, world: World, shared_tmp: Path) -> Path:
    """A model, and beside it the checkpoint that one rank made of it."""
    family, embeddings = request.param
    folder = shared_tmp / f"checkpoint_{family}_{embeddings}"
    if world.rank == 0:
        write_model(folder, family=family, tied=embeddings == "tied")
        hf_to_megatron(str(folder), f"{folder}_megatron", lambda *_: None)
    world.comm.Barrier()
    return folder


def grid_on(world: World, platform: Platform, folder: Path, tp: int, pp: int) -> Grid:
    if world.size % (tp * pp):
        pytest.skip(f"TP {tp} x PP {pp} does not tile {world.size} rank(s)")
    training = TrainingConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, dtype="fp32")
    return Grid.get(folder, platform, training)


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_megatron_loads_a_converted_checkpoint(
    world: World, platform: Platform, model_folder: Path, tp: int, pp: int
) -> None:
    """Strictly: no key too many, none too few; and bit for bit. The vocabulary of 37 is padded to 38 rows at TP 2."""
    grid = grid_on(world, platform, model_folder, tp, pp)
    with torch.no_grad():
        for parameter in grid.model.parameters():
            parameter.fill_(torch.nan)
    load_megatron_checkpoint(grid.model.module, f"{model_folder}_megatron", platform)
    check_equal({name: t.cpu() for name, t in grid.weights.export_hf()}, load_file(model_folder / "model.safetensors"))


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_a_checkpoint_of_megatrons_converts_back(
    world: World, platform: Platform, model_folder: Path, shared_tmp: Path, tp: int, pp: int
) -> None:
    from megatron.core import dist_checkpointing

    grid = grid_on(world, platform, model_folder, tp, pp)
    grid.weights.import_hf(str(model_folder))
    run = shared_tmp / f"{model_folder.name}_{tp}_{pp}"
    if world.rank == 0:
        (run / "megatron").mkdir(parents=True)
        (run / "huggingface").symlink_to(model_folder)  # beside it, as in a run's checkpoints
    world.comm.Barrier()
    with platform.megatron_calls():
        dist_checkpointing.save(grid.model.module.sharded_state_dict(), str(run / "megatron"))
    world.comm.Barrier()
    if world.rank == 0:
        megatron_to_hf(str(run / "megatron"), str(run / "back"), lambda *_: None)
        back: dict[str, Any] = {}
        for file in (run / "back").glob("*.safetensors"):
            back |= load_file(file)
        check_equal(back, load_file(model_folder / "model.safetensors"))
    world.comm.Barrier()


def check_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
