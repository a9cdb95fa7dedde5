"""Policy losses against the formulas, entry by entry in plain Python; aggregation against its definitions.

Error of a tensor = largest difference over largest entry, at most 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollpacker.config import AlgorithmConfig
from rollpacker.training.loss import denominator, ppo_clip, token_weight

TOLERANCE = 1e-6
CLIPS = [(0.2, 0.2), (0.2, 0.28), (0.1, 0.5), (0.4, 0.05), (0.0, 0.3), (0.0, 0.0)]
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MAX_RESPONSE_LENGTH = 8


class ClipRange(NamedTuple):
    low: float
    high: float
    dual: float | None

    def config(self) -> AlgorithmConfig:
        return AlgorithmConfig(clip_ratio_low=self.low, clip_ratio_high=self.high, clip_ratio_c=self.dual)


def expected_of_one_token(logprob: float, old: float, advantage: float, clip: ClipRange) -> tuple[float, float, bool]:
    """Loss, its derivative by `logprob`, and whether PPO's clip is active, case by case.

    The objective to maximise is min(r A, clip(r) A): A min(r, 1 + high) for A >= 0, else A max(r, 1 - low). Dual clip
    bounds the latter from below by A c.
    """
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        is_clipped = ratio > 1 + clip.high
        bounded = 1 + clip.high if is_clipped else ratio
        is_flat = is_clipped
    else:
        is_clipped = ratio < 1 - clip.low
        bounded = 1 - clip.low if is_clipped else ratio
        is_bounded = clip.dual is not None and bounded > clip.dual
        if is_bounded:
            bounded = clip.dual
        is_flat = is_clipped or is_bounded
    slope = 0.0 if is_flat else advantage * ratio
    return -advantage * bounded, -slope, is_clipped and advantage != 0


def run(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of its sum, and the clip flags."""
    leaf = logprobs.clone().requires_grad_()
    mask = torch.ones_like(leaf, dtype=torch.bool)
    loss, is_clipped = ppo_clip(leaf, old, advantages, mask, algorithm=clip.config())
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient, is_clipped


def expected(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor, Tensor]:
    shape = logprobs.shape
    columns = [t.expand(shape).flatten().tolist() for t in (logprobs, old, advantages)]
    losses, gradients, flags = zip(
        *(expected_of_one_token(*entry, clip) for entry in zip(*columns, strict=True)), strict=True
    )
    return (
        torch.tensor(losses, dtype=torch.float64).view(shape),
        torch.tensor(gradients, dtype=torch.float64).view(shape),
        torch.tensor(flags).view(shape),
    )


def error(ours: Tensor, reference: Tensor) -> float:
    largest = reference.abs().max().item()
    return (ours.double() - reference).abs().max().item() / (largest or 1.0)


def check(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: ClipRange) -> None:
    loss, gradient, is_clipped = run(logprobs, old, advantages, clip)
    want_loss, want_gradient, want_clipped = expected(logprobs, old, advantages, clip)
    assert loss.shape == logprobs.shape
    assert error(loss, want_loss) <= TOLERANCE
    assert error(gradient, want_gradient) <= TOLERANCE
    assert torch.equal(is_clipped, want_clipped)


@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
@pytest.mark.parametrize(("low", "high"), CLIPS)
def test_value_and_gradient(low: float, high: float, dual: float | None) -> None:
    """Ratios from exp(-2) to exp(2): inside the clip range, outside it on both sides, beyond the dual bound."""
    generator = torch.Generator().manual_seed(0)
    old = -5 * torch.rand((6, 50), generator=generator) - 2
    logprobs = old + 4 * torch.rand(old.shape, generator=generator) - 2
    advantages = torch.randn(old.shape, generator=generator)
    advantages[:, ::7] = 0.0
    check(logprobs, old, advantages, ClipRange(low, high, dual))


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("difference", [-60.0, -10.0, -1e-3, 1e-3, 10.0, 60.0])
def test_ratios_far_inside_and_outside(difference: float, sign: float, dual: float | None) -> None:
    """In double precision: the exponential of a large difference magnifies its rounding."""
    old = torch.full((2, 3), -70.0, dtype=torch.float64)
    check(old + difference, old, sign * torch.ones_like(old), ClipRange(0.2, 0.28, dual))


@pytest.mark.parametrize(
    ("advantage", "dual", "loss"),
    [(2.0, 3.0, -2.0 * 1.28), (2.0, None, -2.0 * 1.28), (-2.0, 3.0, 2.0 * 3.0), (0.0, 3.0, 0.0), (0.0, None, 0.0)],
)
def test_a_ratio_beyond_fp32_is_clipped_like_any_other(advantage: float, dual: float | None, loss: float) -> None:
    """exp(100) overflows fp32. The clipped loss is finite and flat there, so its gradient is 0, not NaN."""
    logprobs, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-101.0, -1.0]])
    ours, gradient, _ = run(logprobs, old, torch.full((1, 2), advantage), ClipRange(0.2, 0.28, dual))
    assert ours[0, 0].item() == pytest.approx(loss)
    assert gradient[0].tolist() == [0.0, -advantage]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-5, 5, allow_subnormal=False)), min_size=1, max_size=20
    ),
    st.sampled_from(CLIPS),
    st.one_of(st.none(), st.floats(1.5, 10)),
)
def test_any_tokens(entries: list[tuple[float, float, float]], clip: tuple[float, float], dual: float | None) -> None:
    """Double precision; ratios within rounding of a bound are moved off it, for there two answers are right."""
    low, high = clip
    bounds = [1 - low, 1 + high, dual or math.inf]
    entries = [
        (new, old, a) if min(abs(math.exp(new - old) - b) for b in bounds) > 1e-9 else (new + 1e-6, old, a)
        for new, old, a in entries
    ]
    logprobs, old, advantages = torch.tensor(entries, dtype=torch.float64).T.unsqueeze(1).unbind()
    check(logprobs, old, advantages, ClipRange(low, high, dual))


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(("low", "high"), CLIPS)
def test_on_policy_it_is_the_policy_gradient(low: float, high: float, dual: float | None) -> None:
    """Where old and new log-probs are the same: loss -A, gradient -A, nothing clipped, whatever the range."""
    logprobs = torch.tensor([[-0.1, -3.0, -20.0], [-7.0, -0.5, 0.0]])
    advantages = torch.tensor([[1.5, -2.0, 0.0], [-0.25, 4.0, -1.0]])
    loss, gradient, is_clipped = run(logprobs, logprobs.clone(), advantages, ClipRange(low, high, dual))
    assert torch.equal(loss, -advantages)
    assert torch.equal(gradient, -advantages)
    assert not is_clipped.any()


def test_one_advantage_for_each_sequence_is_that_of_its_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, old = torch.randn((2, 4, 9), generator=generator).unbind()
    advantages_B1 = torch.randn((4, 1), generator=generator)
    clip = ClipRange(0.2, 0.28, 3.0)
    for ours, theirs in zip(
        run(logprobs, old, advantages_B1, clip), run(logprobs, old, advantages_B1.expand(4, 9), clip), strict=True
    ):
        assert torch.equal(ours, theirs)


def aggregate(mode: str, losses: Sequence[Sequence[float]]) -> float:
    """The four modes, from their definitions, over the token losses of every response of the step."""
    if mode == "token-mean":
        return fmean([loss for response in losses for loss in response])
    of_each = []
    for response in losses:
        value = 0.0
        for loss in response:
            value += loss
        if mode == "seq-mean-token-mean":
            value = value / len(response) if response else 0.0
        elif mode == "seq-mean-token-sum-norm":
            value = value / MAX_RESPONSE_LENGTH
        of_each.append(value)
    return fmean(of_each)


def weighted_sum(mode: str, losses: Sequence[Sequence[float]]) -> float:
    """What one micro-batch, chunk or replica adds up."""
    weights = [token_weight(mode, len(response), MAX_RESPONSE_LENGTH) for response in losses]
    return sum(weight * loss for weight, response in zip(weights, losses, strict=True) for loss in response)


def global_count(mode: str, losses: Sequence[Sequence[float]]) -> int:
    return denominator(mode, sum(len(response) for response in losses), len(losses))


step_losses = st.lists(
    st.lists(st.floats(-10, 10, allow_subnormal=False), max_size=MAX_RESPONSE_LENGTH), min_size=1, max_size=9
).filter(any)


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(losses=step_losses)
def test_aggregation_is_what_its_name_says(mode: str, losses: list[list[float]]) -> None:
    ours = weighted_sum(mode, losses) / global_count(mode, losses)
    assert ours == pytest.approx(aggregate(mode, losses), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(losses=step_losses, data=st.data())
def test_any_split_sums_to_the_whole(mode: str, losses: list[list[float]], data: st.DataObject) -> None:
    """Parts of a step, some of them empty, add up and are divided once by the global count."""
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(losses), max_size=len(losses)))
    parts = [[r for r, p in zip(losses, part_of, strict=True) if p == part] for part in range(4)]
    whole = weighted_sum(mode, losses) / global_count(mode, losses)
    of_parts = sum(weighted_sum(mode, part) for part in parts) / global_count(mode, losses)
    assert of_parts == pytest.approx(whole, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_ragged_responses_by_hand(mode: str) -> None:
    """Responses of 1, 0, 3 and 8 tokens, every token with loss 2; the empty one counts as a response."""
    losses = [[2.0], [], [2.0] * 3, [2.0] * 8]
    by_hand = {
        "token-mean": 2.0,
        "seq-mean-token-sum": (2 + 0 + 6 + 16) / 4,
        "seq-mean-token-mean": (2 + 0 + 2 + 2) / 4,
        "seq-mean-token-sum-norm": (2 + 0 + 6 + 16) / 8 / 4,
    }
    assert weighted_sum(mode, losses) / global_count(mode, losses) == pytest.approx(by_hand[mode])
    assert aggregate(mode, losses) == pytest.approx(by_hand[mode])
