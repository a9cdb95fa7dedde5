"""A policy loss of the user's own: loaded by path.py:name, tried out before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollpacker.config import AlgorithmConfig, ConfigError
from rollpacker.training.loss import load_policy_loss, ppo_clip

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


def test_the_built_in_ones_go_by_name() -> None:
    assert load_policy_loss(AlgorithmConfig()) is ppo_clip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reinforc", "has no reinforc. Did you mean reinforce?"),
        ("mean", r"it returned \(\), expected the loss of each token"),
        ("constant", "do not depend on logprobs"),
        ("infinite", "its values are not finite"),
        ("crash", r"losses.py line 15 raised RuntimeError"),
        ("short", "raised TypeError"),
    ],
)
def test_what_is_wrong_with_it_is_said(losses: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy_loss(AlgorithmConfig(loss=f"{losses}:{name}"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss=ppo: expected one of ppo_clip, gspo"):
        load_policy_loss(AlgorithmConfig(loss="ppo"))
