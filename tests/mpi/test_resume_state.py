"""What is trained, saved at one parallel shape and loaded at another: weights, optimizer states, and what follows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grid import Grid
from tiny_models import VOCAB, write_model

from rollpacker.comm.samples import Sample
from rollpacker.comm.world import World
from rollpacker.config import Config, TrainingConfig
from rollpacker.platform.device import Platform
from rollpacker.training.batches import TrainSample
from rollpacker.training.checkpoint import TrainingState
from rollpacker.training.optimizer import build_lr_schedule, build_optimizer
from rollpacker.training.trainer import Trainer

# (TP, PP) saved at, (TP, PP) loaded at; what is left of the ranks is DP.
PAIRS = [
    ((1, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((1, 1), (1, 2)),
    ((1, 1), (2, 2)),
    ((2, 1), (1, 2)),
    ((1, 2), (2, 1)),
    ((2, 2), (1, 1)),
]
# Embeddings, dtype, whether the optimizer is distributed.
KINDS = [("tied", "fp32", True), ("untied", "fp32", False), ("untied", "bf16", True), ("tied", "bf16", False)]
TOTAL_STEPS = 10


@dataclasses.dataclass
class Training:
    """A trainer on one parallel shape, with its own optimizer."""

    trainer: Trainer
    state: TrainingState
    grid: Grid
    world: World

    def step(self, seed: int) -> None:
        """One update on samples that are the same on every shape, dealt out to the replicas."""
        self.trainer.begin()
        samples = _samples(seed)
        ranks = self.grid.ranks
        self.trainer.accumulate(samples[ranks.dp_rank :: ranks.dp_size])
        self.trainer.update(sum(len(s.sample.response_ids) for s in samples))
        self.trainer.advance_lr()

    def save(self, folder: Path) -> None:
        if self.world.rank == 0:
            folder.mkdir()
        self.world.comm.Barrier()
        pending = self.state.snapshot(folder)
        written = self.world.comm.gather(pending.write())
        if written is not None:
            pending.finish(written)
        self.world.comm.Barrier()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.grid.weights.export_hf()}


@pytest.fixture(scope="module")
def model_folders(world: World, shared_tmp: Path) -> dict[str, Path]:
    """A model with tied embeddings and one without."""
    folders = {name: shared_tmp / f"resume_{name}" for name in ("tied", "untied")}
    if world.rank == 0:
        for name, folder in folders.items():
            write_model(folder, family="qwen2", tied=name == "tied")
    world.comm.Barrier()
    return folders


def training_on(
    world: World, platform: Platform, folder: Path, shape: tuple[int, int], *, distributed: bool, dtype: str
) -> Training:
    tp, pp = shape
    if world.size % (tp * pp):
        pytest.skip(f"TP {tp} x PP {pp} does not tile {world.size} rank(s)")
    config = TrainingConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        dtype=dtype,
        use_distributed_optimizer=distributed,
        lr=1e-2,
        lr_decay_style="linear",
    )
    grid = Grid.get(folder, platform, config)
    grid.weights.import_hf(str(folder))
    optimizer = build_optimizer(grid.model, config, platform)
    optimizer.reload_model_params()
    schedule = build_lr_schedule(optimizer, config, TOTAL_STEPS)
    trainer = Trainer(grid.model, optimizer, schedule, Config(training=config), grid.shape, grid.ranks, platform)
    state = TrainingState(grid.model, optimizer, schedule, grid.ranks, platform)
    return Training(trainer, state, grid, world)


def stored(folder: Path, platform: Platform) -> dict[str, Any]:
    """All tensors of a checkpoint, whole; rows of vocabulary padding left out."""
    from megatron.core import dist_checkpointing

    with platform.megatron_calls():
        tensors = dist_checkpointing.load_plain_tensors(str(folder))
    return {
        name: t[:VOCAB] if "word_embeddings" in name or "output_layer" in name else t
        for name, t in tensors.items()
        if isinstance(t, torch.Tensor)
    }


@pytest.mark.parametrize(("embeddings", "dtype", "distributed"), KINDS)
@pytest.mark.parametrize(("saving", "loading"), PAIRS, ids=str)
def test_another_shape_goes_on_as_the_first_would(
    world: World,
    platform: Platform,
    model_folders: dict[str, Path],
    shared_tmp: Path,
    saving: tuple[int, int],
    loading: tuple[int, int],
    embeddings: str,
    dtype: str,
    distributed: bool,
) -> None:
    """Weights and optimizer states bit for bit. So is the next update on the same shape; on another one its gradients differ
    in their last digits, which Adam makes 1e-5 of at a rate of 1e-2 (bf16: 3e-2, a few of its units).
    """
    model_folder = model_folders[embeddings]
    kind = {"dtype": dtype, "distributed": distributed}
    first = training_on(world, platform, model_folder, saving, **kind)
    training_on(world, platform, model_folder, loading, **kind)
    first = training_on(world, platform, model_folder, saving, **kind)
    folder = shared_tmp / f"{model_folder.name}_{saving}_{loading}_{dtype}_{distributed}"
    for seed in (1, 2):
        first.step(seed)
    first.save(folder)
    before = first.weights()
    first.step(3)
    expected = first.weights()

    second = training_on(world, platform, model_folder, loading, **kind)
    second.state.load(folder)
    after = second.weights()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    second.save(folder.with_name(folder.name + "_again"))
    ours, theirs = stored(folder.with_name(folder.name + "_again"), platform), stored(folder, platform)
    assert ours.keys() == theirs.keys()
    assert any("exp_avg_sq" in name for name in theirs)
    assert any(name.startswith("optimizer.param.") for name in theirs) == (dtype == "bf16")
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    second.step(3)
    bound = 0 if saving == loading else 1e-5 if dtype == "fp32" else 3e-2
    for name, tensor in second.weights().items():
        assert (tensor - expected[name]).abs().max() <= bound, name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in second.weights().items())


def _samples(seed: int) -> list[TrainSample]:
    random = np.random.default_rng(seed)
    samples = []
    for index in range(8):
        prompt, response = (random.integers(1, VOCAB, n).astype(np.int32) for n in (3, 5 + index % 3))
        sample = Sample(index, prompt, response, np.full(len(response), -3.0, np.float32))
        samples.append(TrainSample(sample, advantage=float(random.normal()), token_weight=1.0))
    return samples
