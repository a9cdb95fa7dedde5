"""Log-probs, their gradient and the entropy against torch's own log_softmax and Categorical, on one rank.

tests/mpi covers the vocabulary-parallel case. Error = largest difference over largest entry, at most 1e-6.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from rollpacker.comm.groups import ParallelRanks
from rollpacker.training.logprobs import scale_logits, token_entropy, token_logprobs

TOLERANCE = 1e-6
TEMPERATURES = [1.0, 0.7, 1.5]
PADDINGS = [0, 1, 11]


def random_logits(num_padding_columns: int = 0, *, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """[4, 9, 37 + padding]; the padded columns hold what an untrained embedding would: the largest values of all."""
    generator = torch.Generator().manual_seed(num_padding_columns)
    logits = scale * torch.randn((4, 9, 37 + num_padding_columns), generator=generator)
    logits[..., 37:] += 100.0
    return logits.to(dtype)


def random_targets() -> Tensor:
    targets = torch.randint(0, 37, (4, 9), generator=torch.Generator().manual_seed(5))
    targets[0, 0], targets[0, 1] = 0, 36  # the first and the last column that is no padding
    return targets


def error(ours: Tensor, reference: Tensor) -> float:
    return ((ours - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize("num_padding_columns", PADDINGS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_scaled_logits_are_the_law_that_was_sampled(temperature: float, num_padding_columns: int) -> None:
    """The probabilities of Categorical(logits / temperature) over the real vocabulary, and exactly 0 on the padding."""
    logits = random_logits(num_padding_columns)
    before = logits.clone()
    probs = scale_logits(logits, temperature, num_padding_columns).softmax(dim=-1)
    assert torch.equal(logits, before), "the model's logits were overwritten"
    assert error(probs[..., :37], Categorical(logits=logits[..., :37] / temperature).probs) <= TOLERANCE
    assert probs[..., 37:].eq(0).all()


def test_scaled_logits_are_fp32_and_pass_the_gradient_on() -> None:
    """The gradient of a bf16 logit is that of its fp32 value over the temperature; padding gets none."""
    logits = random_logits(2, dtype=torch.bfloat16).requires_grad_()
    scaled = scale_logits(logits, 2.0, 2)
    assert scaled.dtype == torch.float32
    (gradient,) = torch.autograd.grad(scaled.sum(), logits)
    assert gradient[..., :37].eq(0.5).all()
    assert gradient[..., 37:].eq(0).all()


@pytest.mark.parametrize("num_padding_columns", PADDINGS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_entropy(temperature: float, num_padding_columns: int) -> None:
    logits = random_logits(num_padding_columns)
    ours = token_entropy(scale_logits(logits, temperature, num_padding_columns), None)
    assert ours.shape == (4, 9)
    assert error(ours, Categorical(logits=logits[..., :37] / temperature).entropy()) <= TOLERANCE


def test_entropy_at_its_extremes() -> None:
    """log(number of tokens) where all are alike, 0 where one is certain, whatever the offset; never below 0."""
    alike, certain = torch.full((1, 37), -500.0), torch.zeros((1, 37))
    certain[0, 3] = 1e5
    assert token_entropy(alike.unsqueeze(0), None).item() == pytest.approx(math.log(37), rel=1e-6)
    assert token_entropy(certain.unsqueeze(0), None).item() == 0.0
    assert token_entropy(random_logits(scale=50.0), None).min().item() >= -1e-6


def test_entropy_leaves_the_logits_alone() -> None:
    logits = random_logits()
    before = logits.clone()
    token_entropy(logits, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_padding_columns", PADDINGS)
def test_entropy_gradient(ranks: ParallelRanks, num_padding_columns: int) -> None:
    """By the logits, also where the same logits give log-probs afterwards, which overwrites them."""
    weights = torch.linspace(-2.0, 3.0, 36).view(4, 9)
    ours_leaf = random_logits(num_padding_columns).requires_grad_()
    scaled = scale_logits(ours_leaf, 0.7, num_padding_columns)
    entropy = token_entropy(scaled, ranks.tp_group)
    ours = (entropy * weights).sum() + token_logprobs(scaled, random_targets()).sum()
    ours.backward()
    leaf = random_logits(num_padding_columns).double().requires_grad_()
    logprobs = (leaf[..., :37] / 0.7).log_softmax(dim=-1)
    reference = (Categorical(logits=leaf[..., :37] / 0.7).entropy() * weights).sum()
    reference = reference + logprobs.gather(-1, random_targets().unsqueeze(-1)).sum()
    reference.backward()
    assert ours_leaf.grad is not None
    assert leaf.grad is not None
    assert error(ours_leaf.grad, leaf.grad) <= TOLERANCE


def test_entropy_over_a_group_of_one_rank(ranks: ParallelRanks) -> None:
    logits = random_logits()
    assert torch.equal(token_entropy(logits, ranks.tp_group), token_entropy(logits, None))


@pytest.mark.parametrize("num_padding_columns", PADDINGS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logprobs_and_their_gradient(ranks: ParallelRanks, temperature: float, num_padding_columns: int) -> None:
    """With a different weight for each token, so that no two rows of the gradient can be mixed up."""
    targets, weights = random_targets(), torch.linspace(-2.0, 3.0, 36).view(4, 9)
    ours_leaf = random_logits(num_padding_columns).requires_grad_()
    ours = token_logprobs(scale_logits(ours_leaf, temperature, num_padding_columns), targets)
    (ours * weights).sum().backward()
    leaf = random_logits(num_padding_columns).double().requires_grad_()
    logprobs = (leaf[..., :37] / temperature).log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (logprobs * weights).sum().backward()
    assert ours.shape == (4, 9)
    assert error(ours, logprobs) <= TOLERANCE
    assert ours_leaf.grad is not None
    assert leaf.grad is not None
    assert error(ours_leaf.grad, leaf.grad) <= TOLERANCE


def test_logprobs_of_a_certain_and_of_an_impossible_token(ranks: ParallelRanks) -> None:
    """0 for the one, minus the gap of the logits for the other: no overflow at large logits."""
    logits = torch.zeros((1, 2, 5))
    logits[..., 2] = 1e4
    ours = token_logprobs(logits, torch.tensor([[2, 0]]))
    assert ours.tolist() == [[0.0, -1e4]]
