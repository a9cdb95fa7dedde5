"""Every estimator, loss, aggregation and correction, through the classes that train, against the oracle's formulas.

Value and gradient of the step's loss by logits; error = largest difference over largest entry, at most 1e-6,
in fp32. The logits are the model here: everything between them and the optimizer is the real code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_oracle import OracleResponse, step_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.comm.groups import ParallelRanks
from rollpacker.comm.samples import Sample
from rollpacker.config import AlgorithmConfig, Config, DataConfig
from rollpacker.messages import UpdatePlan
from rollpacker.platform.device import select_platform
from rollpacker.training.batches import TrainSample, collate
from rollpacker.training.objective import LossSums, Objective
from rollpacker.training.policy_update import PolicyUpdate, UpdateReport
from rollpacker.training.trainer import UpdateResult
from rollpacker.types import Group, Prompt, Request, ScoredResponse

TOLERANCE = 1e-6
CAP, VOCAB, R0 = 9, 13, 3
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus")
LENGTHS = (3, 9, 1, 5, 9, 2, 4, 4, 0, 7, 6, 1)  # ragged; two at the cap, one empty
REWARDS = (1.0, 0.0, 0.5, 1.0, 1.0, 1.0, -0.3, 2.0, 0.1, 0.0, 0.0, 1.0)  # the second group has no variance


LEARNING_RATE = 2.0


class LogitsTrainer:
    """A Trainer whose model is a table of logits: the same objective, the same sums, no Megatron."""

    def __init__(
        self,
        config: Config,
        logits: dict[int, torch.Tensor],
        old: dict[int, np.ndarray],
        ref: Any,
        learning_rate: float = 0.0,
    ) -> None:
        self.learning_rate = learning_rate
        self.objective = Objective(config, tp_group=None, num_padding_columns=0)
        self.logits, self.old, self.ref = logits, old, ref
        self.is_reference = False
        self.num_passes = 0
        self.total = 0.0
        self.losses: list[float] = []

    def advance_lr(self) -> None:
        pass

    def begin(self) -> None:
        self.total = 0.0
        for leaf in self.logits.values():
            leaf.grad = None

    def logprobs(self, samples: Sequence[TrainSample]) -> dict[int, np.ndarray]:
        self.num_passes += 1
        values = self.ref if self.is_reference else self.old
        if not values:  # those of the logits as they are now
            with torch.no_grad():
                values = {
                    s.sample.request_index: self.logits[s.sample.request_index]
                    .log_softmax(-1)
                    .gather(1, torch.from_numpy(s.sample.response_ids.astype(np.int64))[:, None])[:, 0]
                    .numpy()
                    for s in samples
                }
        return {s.sample.request_index: values[s.sample.request_index] for s in samples}

    def accumulate(self, samples: Sequence[TrainSample]) -> LossSums:
        sums = LossSums()
        for part in (samples[0::2], samples[1::2]):  # two micro-batches, padded differently
            if part:
                batch = collate(part, torch.device("cpu"))
                rows = []
                for s in part:
                    index, prompt = s.sample.request_index, len(s.sample.prompt_ids)
                    padding = batch.input_ids_BT.shape[1] - (prompt - 1) - len(s.sample.response_ids)
                    rows.append(torch.nn.functional.pad(self.logits[index], (0, 0, prompt - 1, padding)))
                loss, measured = self.objective.loss(torch.stack(rows), batch)
                loss.backward()
                self.total += loss.item()
                sums.add(measured)
        return sums

    def update(self, denominator: int) -> UpdateResult:
        self.losses.append(self.total / denominator)
        for leaf in self.logits.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad / denominator
            leaf.data -= self.learning_rate * leaf.grad
        return UpdateResult(0.0, 0.0)

    @contextlib.contextmanager
    def in_model(self):
        self.is_reference = True
        yield
        self.is_reference = False


@dataclasses.dataclass
class Scenario:
    """A step: groups of ragged responses with log-probs of every kind near those of the logits."""

    seed: int = 0

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.logits, self.old, self.ref, self.samples, self.responses, oracle = {}, {}, {}, [], [], []
        for i, length in enumerate(LENGTHS):
            prompt = random.integers(0, VOCAB, random.integers(1, 5)).astype(np.int32)
            tokens = random.integers(0, VOCAB, length).astype(np.int32)
            logits = torch.from_numpy(random.normal(size=(length, VOCAB)).astype(np.float32))
            near = logits.double().log_softmax(-1).gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0]
            kinds = [(near.numpy() + random.normal(scale=s, size=length)).astype(np.float32) for s in (0.3, 0.4, 0.5)]
            self.logits[i] = logits.requires_grad_()
            self.old[i], rollout, self.ref[i] = kinds
            self.samples.append(Sample(i, prompt, tokens, rollout))
            is_truncated = length == CAP
            request = Request(i, Prompt(f"p{i // R0}", tuple(prompt.tolist())), i % R0, 0, 0, CAP)
            reason = "length" if is_truncated else "stop"
            self.responses.append(ScoredResponse(request, length, reason, REWARDS[i], False, 0.0))
            fields = [torch.from_numpy(x).double() for x in (rollout, self.old[i], self.ref[i])]
            oracle.append(OracleResponse(i // R0, REWARDS[i], torch.from_numpy(tokens), *fields, is_truncated))
        self.oracle = oracle

    def run(self, algorithm: AlgorithmConfig, learning_rate: float = 0.0) -> tuple[LogitsTrainer, UpdateReport]:
        config = Config(data=DataConfig(max_response_length=CAP), algorithm=algorithm)
        trainer = LogitsTrainer(config, self.logits, self.old, self.ref, learning_rate)
        needs_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
        world: Any = SimpleNamespace(comm=SimpleNamespace(allgather=lambda value: [value]))
        ranks = ParallelRanks(0, 1, 0, 1, 0, 1, None, None, None)
        update = PolicyUpdate(
            trainer,  # type: ignore[arg-type]
            trainer if needs_reference else None,  # type: ignore[arg-type]
            ranks,
            world,
            config,
            select_platform("cpu"),
        )
        groups = tuple(
            Group(r[0].request.prompt, tuple(r))
            for r in (self.responses[i : i + R0] for i in range(0, len(LENGTHS), R0))
        )
        plan = UpdatePlan(1, 0, groups, sum(LENGTHS), len(LENGTHS), None)  # type: ignore[arg-type]
        return trainer, update.run(plan, self.samples, lambda _: contextlib.nullcontext())


def check(algorithm: AlgorithmConfig, seed: int = 0) -> None:
    """One update over all groups; old log-probs are the scenario's, so that ratios differ from 1."""
    scenario = Scenario(seed)
    algorithm = dataclasses.replace(algorithm, ppo_epochs=2)  # more than one update: old log-probs have their pass
    trainer, _ = scenario.run(algorithm)
    leaves = [scenario.logits[i].detach().double().requires_grad_() for i in range(len(LENGTHS))]
    expected = step_loss(leaves, scenario.oracle, algorithm, CAP)
    expected.backward()
    gradient = torch.cat([leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves])
    ours = torch.cat([scenario.logits[i].grad for i in range(len(LENGTHS))]).double()
    assert len(trainer.losses) == 2
    # The sum may cancel; its terms are of the size of 1.
    assert abs(trainer.losses[-1] - expected.item()) <= TOLERANCE * max(abs(expected.item()), 1.0)
    assert ((ours - gradient).abs().max() / gradient.abs().max()).item() <= TOLERANCE


@pytest.mark.parametrize(("loss", "estimator", "mode"), itertools.product(("ppo_clip", "gspo"), ESTIMATORS, MODES))
def test_each_estimator_and_loss_in_each_aggregation(
    ranks: ParallelRanks, loss: str, estimator: str, mode: str
) -> None:
    check(AlgorithmConfig(loss=loss, adv_estimator=estimator, loss_agg_mode=mode, clip_ratio_high=0.28))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("where", ["use_kl_loss", "use_kl_in_reward"])
def test_kl_in_the_loss_and_in_the_reward(ranks: ParallelRanks, where: str, kind: str, mode: str) -> None:
    options = {where: True, "kl_loss_type": kind, "kl_penalty": kind, "kl_loss_coef": 0.3, "kl_reward_coef": 0.3}
    for estimator in ("grpo", "reinforce_plus_plus"):
        check(AlgorithmConfig(adv_estimator=estimator, loss_agg_mode=mode, **options))


@pytest.mark.parametrize("mode", MODES)
def test_the_entropy_bonus(ranks: ParallelRanks, mode: str) -> None:
    check(AlgorithmConfig(loss_agg_mode=mode, entropy_coeff=0.7))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlong", ["mask", "soft_penalty"])
def test_responses_cut_at_the_cap(ranks: ParallelRanks, overlong: str, mode: str) -> None:
    """Left out of the sum and of the counts, but not of their group's mean; or punished along the buffer."""
    check(AlgorithmConfig(loss_agg_mode=mode, overlong=overlong, overlong_buffer_len=4, overlong_penalty_factor=0.8))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_mismatch_corrections(ranks: ParallelRanks, correction: str, level: str) -> None:
    for mode in MODES:
        check(
            AlgorithmConfig(loss_agg_mode=mode, mismatch_correction=correction, mismatch_level=level, mismatch_cap=1.3)
        )


choices = st.fixed_dictionaries(
    {
        "loss": st.sampled_from(["ppo_clip", "gspo"]),
        "adv_estimator": st.sampled_from(ESTIMATORS),
        "norm_adv_by_std_in_grpo": st.booleans(),
        "loss_agg_mode": st.sampled_from(MODES),
        "clip_ratio_low": st.sampled_from([0.1, 0.3]),
        "clip_ratio_c": st.sampled_from([None, 1.5, 3.0]),
        "entropy_coeff": st.sampled_from([0.0, 0.05]),
        "use_kl_loss": st.booleans(),
        "use_kl_in_reward": st.booleans(),
        "kl_loss_type": st.sampled_from(["k1", "k2", "k3"]),
        "kl_penalty": st.sampled_from(["k1", "k2", "k3"]),
        "kl_loss_coef": st.just(0.1),
        "kl_reward_coef": st.just(0.1),
        "overlong": st.sampled_from(["keep", "mask", "soft_penalty"]),
        "overlong_buffer_len": st.just(5),
        "mismatch_correction": st.sampled_from(["none", "tis", "mis"]),
        "mismatch_level": st.sampled_from(["token", "sequence"]),
    }
)


@settings(max_examples=60, derandomize=True)
@given(options=choices, seed=st.integers(0, 50))
def test_any_combination(ranks: ParallelRanks, options: dict[str, Any], seed: int) -> None:
    check(AlgorithmConfig(**options), seed)


def test_mini_batches_are_exact_at_their_boundaries(ranks: ParallelRanks) -> None:
    """Each update's loss is the oracle's over its own groups and counts."""
    scenario = Scenario()
    algorithm = AlgorithmConfig(ppo_mini_batch_size=2)
    trainer, report = scenario.run(algorithm)
    leaves = [scenario.logits[i].detach().double() for i in range(len(LENGTHS))]
    expected = [
        step_loss(leaves[part], scenario.oracle[part], algorithm, CAP).item()
        for part in (slice(0, 2 * R0), slice(2 * R0, 4 * R0))
    ]
    assert trainer.losses == pytest.approx(expected, rel=1e-5)
    assert len(report.results) == 2
    assert report.sums.policy_loss == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_a_short_round_is_cut_into_equal_parts(ranks: ParallelRanks) -> None:
    """Four groups with a mini-batch of three: two and two, not three and one."""
    trainer, report = Scenario().run(AlgorithmConfig(ppo_mini_batch_size=3))
    halves, _ = Scenario().run(AlgorithmConfig(ppo_mini_batch_size=2))
    assert trainer.losses == halves.losses
    assert len(report.results) == 2


def test_the_second_update_is_clipped_around_the_policy_that_sampled(ranks: ParallelRanks) -> None:
    """Old log-probs are taken once, before the first update: after it the ratios are no longer 1."""
    scenario = Scenario()
    algorithm = AlgorithmConfig(ppo_epochs=2, clip_ratio_low=0.05, clip_ratio_high=0.05)
    scenario.old = {}
    with torch.no_grad():
        for i, r in enumerate(scenario.oracle):
            at = torch.arange(len(r.targets)), r.targets.long()
            r.old_logprobs = scenario.logits[i].double().log_softmax(-1)[at]
    first = [scenario.logits[i].detach().double().requires_grad_() for i in range(len(LENGTHS))]
    losses = [step_loss(first, scenario.oracle, algorithm, CAP)]
    losses[0].backward()
    moved = [leaf.detach() - LEARNING_RATE * leaf.grad for leaf in first]
    losses.append(step_loss(moved, scenario.oracle, algorithm, CAP))
    trainer, report = scenario.run(algorithm, learning_rate=LEARNING_RATE)
    assert trainer.losses == pytest.approx([loss.item() for loss in losses], abs=1e-5)
    assert abs(trainer.losses[1] - trainer.losses[0]) > 1e-3
    assert report.sums.num_clipped > 0


def test_with_one_update_no_pass_for_old_logprobs_is_paid(ranks: ParallelRanks) -> None:
    """The ratio is 1, so the loss is the mean of -A, and the gradient that of the plain policy gradient."""
    scenario = Scenario()
    trainer, report = scenario.run(AlgorithmConfig(adv_estimator="rloo"))
    for i, r in enumerate(scenario.oracle):
        with torch.no_grad():
            exact = scenario.logits[i].double().log_softmax(-1)
            r.old_logprobs = exact[torch.arange(len(r.targets)), r.targets.long()]
    leaves = [scenario.logits[i].detach().double() for i in range(len(LENGTHS))]
    expected = step_loss(leaves, scenario.oracle, AlgorithmConfig(adv_estimator="rloo"), CAP).item()
    assert trainer.losses == pytest.approx([expected], rel=1e-5)
    assert report.sums.approx_kl == 0
    assert trainer.num_passes == 0


def test_rewards_in_the_report_are_those_behind_the_advantages(ranks: ParallelRanks) -> None:
    _, report = Scenario().run(
        AlgorithmConfig(overlong="soft_penalty", overlong_buffer_len=4, overlong_penalty_factor=0.8)
    )
    assert report.rewards[1] == pytest.approx(REWARDS[1] - 0.8)
    assert report.rewards[9] == pytest.approx(REWARDS[9] - 0.8 * 2 / 4)
    assert report.rewards[0] == REWARDS[0]
