"""The gradient is the same on every parallel shape, in every split, and equal to plain PyTorch on the Hugging Face model.

Error = max|a - b| / max|b| per parameter, at most 1e-5 in fp32 (docs/design/001).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from grid import Grid
from tiny_models import random_samples, reference_gradients, write_model

from rollpacker.comm.world import World
from rollpacker.config import AlgorithmConfig, Config, DataConfig, RolloutConfig, TrainingConfig
from rollpacker.data.packing import assign_to_replicas
from rollpacker.platform.device import Platform
from rollpacker.training.batches import TrainSample
from rollpacker.training.optimizer import build_lr_schedule, build_optimizer
from rollpacker.training.trainer import Trainer
from rollpacker.weights.refit import MegatronWeights

TOLERANCE = 1e-5
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODELS = [("qwen2", "tied"), ("qwen2", "untied"), ("qwen3", "tied"), ("llama3", "untied")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model_folder(request: pytest.FixtureRequest, world: World, shared_tmp: Path) -> Path:
    family, embeddings = request.param
    folder = shared_tmp / f"model_{family}_{embeddings}"
    if world.rank == 0:
        write_model(folder, family=family, tied=embeddings == "tied")
    world.comm.Barrier()
    return folder


def trainer_on(
    folder: Path, platform: Platform, tp: int, pp: int, *, temperature: float = 1.0, **training: object
) -> tuple[Trainer, MegatronWeights]:
    """A fresh trainer on the given shape over all ranks, with the weights of `folder`."""
    training = {"max_tokens_per_gpu": 100, "use_distributed_optimizer": False, "dtype": "fp32", "lr": 1e-3, **training}
    config = Config(
        data=DataConfig(max_response_length=30),
        rollout=RolloutConfig(temperature=temperature),
        algorithm=AlgorithmConfig(),
        training=TrainingConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **training),  # type: ignore[arg-type]
    )
    grid = Grid.get(folder, platform, config.training)
    weights = grid.weights
    weights.import_hf(str(folder))
    optimizer = build_optimizer(grid.model, config.training, platform)
    schedule = build_lr_schedule(optimizer, config.training, 10)
    return Trainer(grid.model, optimizer, schedule, config, grid.shape, grid.ranks, platform), weights


def gradients(
    folder: Path,
    platform: Platform,
    tp: int,
    pp: int,
    samples: list[TrainSample],
    *,
    chunks: int = 1,
    denominator: int,
    temperature: float = 1.0,
    **training: object,
) -> dict[str, torch.Tensor]:
    """Global gradient by Hugging Face name, accumulated in `chunks` calls on the replica each sample is assigned to."""
    trainer, weights = trainer_on(folder, platform, tp, pp, temperature=temperature, **training)
    ranks = weights._ranks
    mine = assign_to_replicas([s.sample.num_tokens for s in samples], ranks.dp_size)[ranks.dp_rank]
    trainer.begin()
    for chunk in range(chunks):
        trainer.accumulate([samples[i] for i in mine[chunk::chunks]])
    trainer.reduce_gradients(denominator)
    return {name: g.clone().cpu() for name, g in weights.export_hf(lambda p: p.main_grad)}


def worst_error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max()).item() for n in b)


def fits(world: World, tp: int, pp: int) -> None:
    if world.size % (tp * pp):
        pytest.skip(f"TP {tp} x PP {pp} does not tile {world.size} rank(s)")


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_gradients_equal_plain_pytorch(world: World, platform: Platform, model_folder: Path, tp: int, pp: int) -> None:
    fits(world, tp, pp)
    samples = random_samples(7)
    _, reference = reference_gradients(model_folder, samples, denominator=50)
    ours = gradients(model_folder, platform, tp, pp, samples, denominator=50)
    assert worst_error(ours, reference) <= TOLERANCE


def test_gradients_under_a_temperature(world: World, platform: Platform, model_folder: Path) -> None:
    samples = random_samples(5, seed=3)
    _, reference = reference_gradients(model_folder, samples, denominator=9, temperature=0.7)
    ours = gradients(model_folder, platform, 1, 1, samples, denominator=9, temperature=0.7)
    assert worst_error(ours, reference) <= TOLERANCE


@pytest.mark.parametrize(
    ("chunks", "training"),
    [
        (1, {"micro_batch_size": 1}),
        (1, {"max_tokens_per_gpu": 10_000}),
        (3, {"max_tokens_per_gpu": 40}),
        (7, {"micro_batch_size": 2}),
        (2, {"recompute_granularity": "full"}),
    ],
)
def test_gradients_do_not_depend_on_the_split(
    world: World, platform: Platform, model_folder: Path, chunks: int, training: dict[str, object]
) -> None:
    """Micro-batches of one, all in one, uneven chunks (some empty on some replicas), recomputed activations."""
    samples = random_samples(7)
    whole = gradients(model_folder, platform, 1, 1, samples, denominator=50)
    split = gradients(model_folder, platform, 1, 1, samples, denominator=50, chunks=chunks, **training)
    assert worst_error(split, whole) <= TOLERANCE


def test_mean_of_local_means_would_be_caught(world: World, platform: Platform, model_folder: Path) -> None:
    """The usual mistake, each replica dividing by its own count, misses by far more than the tolerance."""
    samples = random_samples(6, seed=5)
    halves = [samples[:2], samples[2:]]
    counts = [sum(len(s.sample.response_ids) for s in half) for half in halves]
    right = gradients(model_folder, platform, 1, 1, samples, denominator=sum(counts))
    means = [gradients(model_folder, platform, 1, 1, h, denominator=c) for h, c in zip(halves, counts, strict=True)]
    wrong = {n: (means[0][n] + means[1][n]) / 2 for n in right}
    assert worst_error(wrong, right) >= 1e-2


def test_more_replicas_than_samples(world: World, platform: Platform, model_folder: Path) -> None:
    """A replica without samples skips forward and backward but joins the reduction."""
    samples = random_samples(1)
    _, reference = reference_gradients(model_folder, samples, denominator=3)
    assert worst_error(gradients(model_folder, platform, 1, 1, samples, denominator=3), reference) <= TOLERANCE


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_one_optimizer_step_is_the_same_everywhere(
    world: World, platform: Platform, model_folder: Path, tp: int, pp: int, use_distributed_optimizer: bool
) -> None:
    """After one Adam step with a large epsilon (so that it is nearly linear in the gradient) the weights agree with
    AdamW of plain PyTorch; the gradient norm before clipping too."""
    fits(world, tp, pp)
    samples = random_samples(7)
    options = {"adam_eps": 1e-2, "clip_grad": 0.05, "weight_decay": 0.0, "lr": 1e-2}
    trainer, weights = trainer_on(
        model_folder, platform, tp, pp, use_distributed_optimizer=use_distributed_optimizer, **options
    )
    ranks = weights._ranks
    before = {n: t.clone().cpu() for n, t in weights.export_hf()}
    mine = assign_to_replicas([s.sample.num_tokens for s in samples], ranks.dp_size)[ranks.dp_rank]
    trainer.advance_lr()
    trainer.begin()
    trainer.accumulate([samples[i] for i in mine])
    result = trainer.update(50)
    after = {n: t.clone().cpu() for n, t in weights.export_hf()}
    _, reference = reference_gradients(model_folder, samples, denominator=50)
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in reference.values())).item()  # type: ignore[arg-type]
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    scale = min(0.05 / (norm + 1e-6), 1.0)
    for name, gradient in reference.items():
        g = gradient * scale
        expected = before[name] - 1e-2 * g / (g.abs() + 1e-2)  # Adam's first step: m/(1-b1) = g, v/(1-b2) = g^2
        moved = (expected - before[name]).abs().max()
        assert (after[name] - expected).abs().max() <= 1e-4 * moved + 1e-7, name
