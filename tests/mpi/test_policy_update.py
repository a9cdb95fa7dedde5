"""A whole update, algorithms included, on every parallel shape: gradients equal the formulas on the Hugging Face model.

The learning rate is 0, so that every update of a step starts from the same weights and has its own oracle. Error =
max|a - b| / max|b| per parameter, at most 1e-5 in fp32.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_oracle import OracleResponse, step_loss
from grid import Grid
from tiny_models import VOCAB, write_model
from transformers import AutoModelForCausalLM

from rollpacker.comm.samples import Sample, exchange_samples
from rollpacker.comm.world import World
from rollpacker.config import AlgorithmConfig, Config, DataConfig, RolloutConfig, TrainingConfig
from rollpacker.messages import UpdatePlan
from rollpacker.platform.device import Platform
from rollpacker.training.batches import TrainSample
from rollpacker.training.objective import LossSums
from rollpacker.training.optimizer import build_lr_schedule, build_optimizer
from rollpacker.training.policy_update import PolicyUpdate, UpdateReport
from rollpacker.training.reference import ReferenceWeights
from rollpacker.training.trainer import Trainer
from rollpacker.types import Group, Prompt, Request, ScoredResponse
from rollpacker.weights.refit import MegatronWeights

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
CAP, R0, NUM_GROUPS = 20, 3, 4
TEMPERATURE = 0.8
ALGORITHMS = {
    "everything": AlgorithmConfig(
        adv_estimator="reinforce_plus_plus",
        use_kl_in_reward=True,
        kl_reward_coef=0.2,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_loss_type="k2",
        entropy_coeff=0.1,
        overlong="soft_penalty",
        overlong_buffer_len=8,
        mismatch_correction="tis",
        mismatch_cap=1.2,
        ppo_mini_batch_size=2,
    ),
    "gspo": AlgorithmConfig(
        loss="gspo",
        loss_agg_mode="seq-mean-token-mean",
        use_kl_in_reward=True,
        kl_penalty="k3",
        overlong="mask",
        mismatch_correction="mis",
        mismatch_level="sequence",
        ppo_epochs=2,
    ),
}


class RecordingTrainer(Trainer):
    """Keeps the global gradient of each update by Hugging Face name."""

    weights: MegatronWeights
    gradients: list[dict[str, torch.Tensor]]

    def reduce_gradients(self, denominator: int) -> None:
        super().reduce_gradients(denominator)
        self.gradients.append({n: g.clone().cpu() for n, g in self.weights.export_hf(lambda p: p.main_grad)})


@pytest.fixture(scope="module")
def folders(world: World, shared_tmp: Path) -> tuple[Path, Path]:
    """A model, and another one as its reference."""
    policy, reference = shared_tmp / "policy", shared_tmp / "reference"
    if world.rank == 0:
        write_model(policy, tied=True, seed=3)
        write_model(reference, tied=True, seed=4)
    world.comm.Barrier()
    return policy, reference


def random_step(seed: int = 0) -> tuple[UpdatePlan, dict[int, Sample]]:
    random = np.random.default_rng(seed)
    groups, samples = [], {}
    for g in range(NUM_GROUPS):
        prompt = random.integers(0, VOCAB, random.integers(1, 6)).astype(np.int32)
        responses = []
        for i in range(R0):
            index = g * R0 + i
            length = CAP if index in (2, 7) else int(random.integers(1, CAP))
            tokens = random.integers(0, VOCAB, length).astype(np.int32)
            rollout = (-3.6 + random.normal(scale=0.3, size=length)).astype(np.float32)
            samples[index] = Sample(index, prompt, tokens, rollout)
            request = Request(index, Prompt(f"p{g}", tuple(prompt.tolist())), i, 0, 0, CAP)
            reason = "length" if length == CAP else "stop"
            responses.append(ScoredResponse(request, length, reason, float(random.normal()), False, 0.0))
        groups.append(Group(responses[0].request.prompt, tuple(responses)))
    lengths = [len(s.response_ids) for s in samples.values()]
    return UpdatePlan(1, 0, tuple(groups), sum(lengths), len(lengths), None), samples  # type: ignore[arg-type]


def run_update(
    world: World, platform: Platform, folders: tuple[Path, Path], algorithm: AlgorithmConfig, tp: int, pp: int
) -> tuple[RecordingTrainer, UpdateReport]:
    config = Config(
        data=DataConfig(max_response_length=CAP),
        rollout=RolloutConfig(temperature=TEMPERATURE, n=R0),
        algorithm=algorithm,
        training=TrainingConfig(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, dtype="fp32", lr=0.0, weight_decay=0.0,
            use_distributed_optimizer=False,
            max_tokens_per_gpu=60,
        ),
    )  # fmt: skip
    grid = Grid.get(folders[0], platform, config.training)
    grid.weights.import_hf(str(folders[1]))
    reference = ReferenceWeights(grid.model)
    grid.weights.import_hf(str(folders[0]))
    optimizer = build_optimizer(grid.model, config.training, platform)
    schedule = build_lr_schedule(optimizer, config.training, 10)
    trainer = RecordingTrainer(grid.model, optimizer, schedule, config, grid.shape, grid.ranks, platform)
    trainer.weights, trainer.gradients = grid.weights, []
    update = PolicyUpdate(trainer, reference, grid.ranks, world, config, platform)
    plan, samples = random_step()
    outgoing: dict[int, list[Sample]] = {}
    for index, ranks in update.destinations(plan).items():
        if index % world.size == world.rank:  # as if each rank had decoded some
            for rank in ranks:
                outgoing.setdefault(rank, []).append(samples[index])
    mine = exchange_samples(world.comm, outgoing)
    return trainer, update.run(plan, mine, lambda _: contextlib.nullcontext())


def oracle_gradients(
    folders: tuple[Path, Path], algorithm: AlgorithmConfig
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """(loss, gradients) of each mini-batch, in float64 on the Hugging Face model."""
    plan, samples = random_step()
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64, attn_implementation="eager") for f in folders
    )

    def logits_of(model: Any, s: Sample) -> torch.Tensor:
        tokens = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64))
        return model(tokens[None]).logits[0, len(s.prompt_ids) - 1 : -1] / TEMPERATURE

    responses, by_index = [], {}
    for g, group in enumerate(plan.groups):
        for r in group.responses:
            s = samples[r.request.index]
            targets = torch.from_numpy(s.response_ids.astype(np.int64))
            with torch.no_grad():
                old, ref = (
                    logits_of(m, s).log_softmax(-1).gather(1, targets[:, None])[:, 0] for m in (policy, reference)
                )
            rollout = torch.from_numpy(s.rollout_logprobs).double()
            by_index[r.request.index] = len(responses)
            responses.append(OracleResponse(g, r.reward, targets, rollout, old, ref, r.finish_reason == "length"))
    size = algorithm.ppo_mini_batch_size or NUM_GROUPS
    results = []
    for _ in range(algorithm.ppo_epochs):
        for start in range(0, NUM_GROUPS, size):
            policy.zero_grad()
            chosen = range(start * R0, min(start + size, NUM_GROUPS) * R0)
            leaves = [logits_of(policy, samples[i]) for i in range(len(responses))]
            loss = step_loss(leaves, responses, algorithm, CAP, only=chosen)
            loss.backward()
            results.append((loss.item(), {n: p.grad.clone() for n, p in policy.named_parameters()}))
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_an_update_equals_the_formulas_on_every_shape(
    world: World, platform: Platform, folders: tuple[Path, Path], tp: int, pp: int, algorithm: AlgorithmConfig
) -> None:
    if world.size % (tp * pp):
        pytest.skip(f"TP {tp} x PP {pp} does not tile {world.size} rank(s)")
    trainer, report = run_update(world, platform, folders, algorithm, tp, pp)
    expected = oracle_gradients(folders, algorithm)
    assert len(trainer.gradients) == len(report.results) == len(expected)
    for ours, (_, reference) in zip(trainer.gradients, expected, strict=True):
        assert ours.keys() == reference.keys()
        worst = max(((ours[n] - reference[n]).abs().max() / reference[n].abs().max()).item() for n in reference)
        assert worst <= 1e-5
    check_sums(world, trainer, report, algorithm, fmean(loss for loss, _ in expected))


def check_sums(
    world: World, trainer: RecordingTrainer, report: UpdateReport, algorithm: AlgorithmConfig, mean_loss: float
) -> None:
    """What the ranks report adds up to the oracle's loss and counts each response token once an epoch."""
    mine = report.sums if trainer.weights._ranks.reports_metrics else LossSums()
    sums = LossSums()
    for part in world.comm.allgather(mine):
        sums.add(part)
    _, samples = random_step()
    assert sums.num_tokens == algorithm.ppo_epochs * sum(len(s.response_ids) for s in samples.values())
    if not algorithm.entropy_coeff:
        loss = sums.policy_loss + algorithm.kl_loss_coef * sums.kl_loss
        assert loss == pytest.approx(mean_loss, abs=1e-5)
    else:  # the bonus is not among the sums: its size is that of the entropy
        bonus = sums.policy_loss + algorithm.kl_loss_coef * sums.kl_loss - mean_loss
        assert bonus == pytest.approx(algorithm.entropy_coeff * sums.entropy / sums.num_tokens, rel=0.05)


def test_logprobs_and_the_reference_swap(world: World, platform: Platform, folders: tuple[Path, Path]) -> None:
    """Inside `in_model` the log-probs are the reference's; afterwards the trained weights are back bit for bit."""
    tp = 2 if world.size % 2 == 0 else 1
    training = TrainingConfig(tensor_model_parallel_size=tp, dtype="fp32", max_tokens_per_gpu=60)
    config = Config(training=training, rollout=RolloutConfig(temperature=TEMPERATURE))
    grid = Grid.get(folders[0], platform, training)
    grid.weights.import_hf(str(folders[1]))
    reference = ReferenceWeights(grid.model)
    grid.weights.import_hf(str(folders[0]))
    optimizer = build_optimizer(grid.model, training, platform)
    schedule = build_lr_schedule(optimizer, training, 10)
    trainer = Trainer(grid.model, optimizer, schedule, config, grid.shape, grid.ranks, platform)
    before = [p.detach().clone() for p in grid.model.parameters()]
    _, samples = random_step()
    train_samples = [TrainSample(s, 0.0, 1.0) for s in samples.values()]
    own = trainer.logprobs(train_samples)
    with reference.in_model():
        theirs = trainer.logprobs(train_samples)
    assert all(torch.equal(a, b) for a, b in zip(before, grid.model.parameters(), strict=True))
    for folder, ours in zip(folders, (own, theirs), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for index, s in samples.items():
            tokens = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64))
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, len(s.prompt_ids) - 1 : -1] / TEMPERATURE
            expected = logits.log_softmax(-1).gather(1, tokens[len(s.prompt_ids) :, None])[:, 0].numpy()
            assert np.abs(ours[index] - expected).max() <= 1e-5
