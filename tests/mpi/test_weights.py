"""Hugging Face -> Megatron -> Hugging Face is bit-exact on every shape, and transformers loads what we export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from grid import Grid
from safetensors.torch import load_file
from tiny_models import FAMILIES, write_model

from rollpacker.comm.world import World
from rollpacker.config import ConfigError, TrainingConfig
from rollpacker.platform.device import Platform
from rollpacker.weights.hf import SafetensorsFolder, write_hf_folder

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODELS = [(family, embeddings) for family in FAMILIES for embeddings in ("tied", "untied")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model_folder(request: pytest.FixtureRequest, world: World, shared_tmp: Path) -> Path:
    family, embeddings = request.param
    folder = shared_tmp / f"weights_{family}_{embeddings}"
    if world.rank == 0:
        write_model(folder, family=family, tied=embeddings == "tied")
    world.comm.Barrier()
    return folder


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_round_trip_is_bit_exact(
    world: World, platform: Platform, model_folder: Path, shared_tmp: Path, tp: int, pp: int
) -> None:
    if world.size % (tp * pp):
        pytest.skip(f"TP {tp} x PP {pp} does not tile {world.size} rank(s)")
    training = TrainingConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, dtype="fp32")
    weights = Grid.get(model_folder, platform, training).weights
    weights.import_hf(str(model_folder))
    original = load_file(model_folder / "model.safetensors")
    exported = {name: tensor.cpu() for name, tensor in weights.export_hf()}
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name


def test_transformers_loads_an_export(world: World, platform: Platform, model_folder: Path, shared_tmp: Path) -> None:
    """Same logits to the last bit as the original folder; the other files are carried along."""
    from transformers import AutoModelForCausalLM

    weights = Grid.get(model_folder, platform, TrainingConfig(dtype="fp32")).weights
    weights.import_hf(str(model_folder))
    target = shared_tmp / f"export_{model_folder.name}"
    tensors = weights.export_hf()
    if world.rank == 0:
        write_hf_folder(target, model_folder, tensors)
        ids = torch.arange(1, 20)[None]
        with torch.no_grad():
            ours = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)(ids).logits
            theirs = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)(ids).logits
        assert torch.equal(ours, theirs)
        assert (target / "generation_config.json").is_file()
        assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
        assert not list(shared_tmp.glob(".*partial"))
    else:
        for _ in tensors:
            pass
    world.comm.Barrier()


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_equal_transformers(world: World, platform: Platform, model_folder: Path, tp: int) -> None:
    """Every position of a random sequence, to 1e-5 in fp32; the vocabulary is put together from its shards."""
    from transformers import AutoModelForCausalLM

    if world.size % tp:
        pytest.skip(f"TP {tp} does not tile {world.size} rank(s)")
    grid = Grid.get(model_folder, platform, TrainingConfig(tensor_model_parallel_size=tp, dtype="fp32"))
    grid.weights.import_hf(str(model_folder))
    ids = torch.randint(0, grid.shape.vocab_size, (1, 100), generator=torch.Generator().manual_seed(3))
    on_device = ids.to(platform.device)
    with torch.no_grad(), platform.megatron_calls():
        local = grid.model(on_device, torch.arange(100, device=platform.device)[None], None)[0]
    shards = [torch.empty_like(local) for _ in range(tp)]
    torch.distributed.all_gather(shards, local.contiguous(), group=grid.ranks.tp_group)
    ours = torch.cat(shards, dim=-1)[:, : grid.shape.vocab_size].cpu()
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)(ids).logits[0]
    assert (ours - theirs).abs().max() <= 1e-5


def test_incomplete_folders_are_named(world: World, tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "m", _with_config(tmp_path), [("a", torch.zeros(2, 3))])
    with SafetensorsFolder(tmp_path / "m") as folder:
        assert folder.read("a", dim=1, start=1, stop=3).shape == (2, 2)
        with pytest.raises(ConfigError, match="no tensor 'b'"):
            folder.read("b")
    (tmp_path / "m" / "model-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00001\.safetensors, which is not there"):
        SafetensorsFolder(tmp_path / "m")
    (tmp_path / "m" / "model-00001.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        SafetensorsFolder(tmp_path / "m")


def _with_config(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    return source
