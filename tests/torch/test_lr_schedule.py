"""The learning rate of each step: linear warm-up, then constant, linear or cosine, against the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from rollpacker.comm.groups import ParallelRanks
from rollpacker.config import TrainingConfig
from rollpacker.training.optimizer import build_lr_schedule

PEAK, LOW, WARMUP, STEPS = 2e-3, 5e-4, 4, 20


def rates(style: str, warmup: int) -> list[float]:
    training = TrainingConfig(lr=PEAK, min_lr=LOW, lr_decay_style=style, lr_warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    schedule = build_lr_schedule(optimizer, training, STEPS)
    values = []
    for _ in range(STEPS):
        schedule.step(1)  # as Trainer.advance_lr does, before the step's first update
        values.append(optimizer.param_groups[0]["lr"])
    return values


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_warm_up_and_decay(ranks: ParallelRanks, style: str, warmup: int) -> None:
    for step, rate in enumerate(rates(style, warmup), start=1):
        if warmup and step <= warmup:
            expected = PEAK * step / warmup
        else:
            done = (step - warmup) / (STEPS - warmup)
            share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (math.cos(math.pi * done) + 1)}[style]
            expected = PEAK if style == "constant" else LOW + (PEAK - LOW) * share
        assert rate == pytest.approx(expected, rel=1e-9), (style, step)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_last_step_has_the_lowest_rate(ranks: ParallelRanks, style: str) -> None:
    assert rates(style, WARMUP)[-1] == pytest.approx(LOW)
