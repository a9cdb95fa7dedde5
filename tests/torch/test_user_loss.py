"""A policy loss of the user's own: loaded by path.py:name, tried out before anything starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollpacker.comm.groups import ParallelRanks
from rollpacker.comm.samples import Sample
from rollpacker.config import AlgorithmConfig, Config, ConfigError
from rollpacker.training.batches import TrainSample, collate
from rollpacker.training.loss import load_policy_loss, ppo_clip
from rollpacker.training.objective import Objective

GOOD = """
import torch
def reinforce(logprobs, old_logprobs, advantages, mask, *, algorithm):
    return -advantages * logprobs
def with_clip(logprobs, old_logprobs, advantages, mask, *, algorithm):
    ratio = (logprobs - old_logprobs).exp()
    return -advantages * ratio, ratio > 1 + algorithm.clip_ratio_high
def mean(logprobs, old_logprobs, advantages, mask, *, algorithm):
    return (-advantages * logprobs).mean()
def constant(logprobs, old_logprobs, advantages, mask, *, algorithm):
    return torch.zeros_like(logprobs)
def infinite(logprobs, old_logprobs, advantages, mask, *, algorithm):
    return logprobs / 0
def crash(logprobs, old_logprobs, advantages, mask, *, algorithm):
    return logprobs @ advantages
def short(logprobs):
    return logprobs
def nan_outside(logprobs, old_logprobs, advantages, mask, *, algorithm):
    return -advantages / advantages.abs() * logprobs
def odd(logprobs, old_logprobs, advantages, mask, *, algorithm):
    return -advantages * logprobs, 0.0
"""


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    path = tmp_path / "losses.py"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_a_loss_of_ones_own(losses: Path) -> None:
    algorithm = AlgorithmConfig(loss=f"{losses}:reinforce")
    logprobs, advantages = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss, is_clipped = load_policy_loss(algorithm)(logprobs, logprobs, advantages, mask, algorithm=algorithm)
    assert torch.equal(loss, -advantages * logprobs)
    assert not is_clipped.any()


def test_it_may_say_where_it_clipped(losses: Path) -> None:
    algorithm = AlgorithmConfig(loss=f"{losses}:with_clip")
    logprobs, mask = torch.tensor([[0.5, 0.0]], requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    _, is_clipped = load_policy_loss(algorithm)(
        logprobs, torch.zeros(1, 2), torch.ones(1, 2), mask, algorithm=algorithm
    )
    assert is_clipped.tolist() == [[True, False]]


def test_what_it_makes_of_padding_does_not_matter(ranks: ParallelRanks, losses: Path) -> None:
    """0 / 0 where the advantages are 0, outside the mask: the gradient stays finite."""
    config = Config(algorithm=AlgorithmConfig(loss=f"{losses}:nan_outside"))
    objective = Objective(config, tp_group=None, num_padding_columns=0)
    samples = [
        TrainSample(Sample(i, np.array([1, 2], np.int32), np.full(n, 3, np.int32), np.zeros(n, np.float32)), 1.0, 1.0)
        for i, n in enumerate((3, 5))
    ]
    logits = torch.randn(2, 6, 7, requires_grad=True)
    loss, _ = objective.loss(logits, collate(samples, torch.device("cpu")))
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_the_built_in_ones_go_by_name() -> None:
    assert load_policy_loss(AlgorithmConfig()) is ppo_clip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reinforc", "has no reinforc. Did you mean reinforce?"),
        ("mean", r"it returned \(\), expected the loss of each token"),
        ("constant", "do not depend on logprobs"),
        ("infinite", "its values or their gradient are not finite"),
        ("crash", r"losses.py line 15 raised RuntimeError"),
        ("short", "raised TypeError"),
        ("odd", "the second thing it returned is not where it clipped"),
    ],
)
def test_what_is_wrong_with_it_is_said(losses: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy_loss(AlgorithmConfig(loss=f"{losses}:{name}"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss=ppo: expected one of ppo_clip, gspo"):
        load_policy_loss(AlgorithmConfig(loss="ppo"))
