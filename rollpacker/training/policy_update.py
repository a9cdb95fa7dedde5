"""PolicyUpdate: what becomes of a round's samples. Where each is trained, what it is worth, and one optimizer step or more.

Everything that follows from the events (who trains what, rewards, counts) is computed on every rank alike; only log-probs
travel, as sums. With one optimizer step per rollout the policy in training is the one that sampled, and no pass for old
log-probs is paid. Invariant: within each update the gradient is that of the update's own groups over their global count,
however many ranks share the work.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch

from rollpacker.comm.groups import ParallelRanks
from rollpacker.comm.samples import Sample
from rollpacker.comm.world import World
from rollpacker.config import Config
from rollpacker.data.packing import assign_to_replicas, split_mini_batches
from rollpacker.messages import UpdatePlan
from rollpacker.platform.device import Platform
from rollpacker.training.advantages import (
    GROUP_ESTIMATORS,
    group_advantages,
    overlong_penalty,
    returns_to_go,
    whiten,
)
from rollpacker.training.batches import TrainSample
from rollpacker.training.kl import token_kl
from rollpacker.training.loss import denominator, token_weight
from rollpacker.training.objective import LossSums
from rollpacker.training.reference import ReferenceWeights
from rollpacker.training.trainer import Trainer, UpdateResult
from rollpacker.types import Group, ScoredResponse

Stage = Callable[[str], AbstractContextManager[None]]


@dataclass
class UpdateReport:
    """What this rank measured of the step's updates; `policy_loss` and `kl_loss` of `sums` are means over updates.

    `busy_s`: seconds in forward and backward passes, without the wait for other ranks at the end. `rewards`: those that the
    advantages were made of, of all responses of the step.
    """

    sums: LossSums = field(default_factory=LossSums)
    results: list[UpdateResult] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    busy_s: float = 0.0


class PolicyUpdate:
    """Turns an UpdatePlan and samples into weights. All ranks call the same methods in the same order."""

    def __init__(
        self,
        trainer: Trainer,
        reference: ReferenceWeights | None,
        ranks: ParallelRanks,
        world: World,
        config: Config,
        platform: Platform,
    ) -> None:
        self._trainer = trainer
        self._reference = reference
        self._ranks = ranks
        self._world = world
        self._platform = platform
        self._algorithm = config.algorithm
        self._cap = config.data.max_response_length
        # The world ranks of each training replica: every one of them needs the replica's samples.
        dp_ranks = world.comm.allgather(ranks.dp_rank)
        self._replica_ranks = [[r for r, d in enumerate(dp_ranks) if d == replica] for replica in range(ranks.dp_size)]

    def destinations(self, update: UpdatePlan) -> dict[int, list[int]]:
        """The world ranks that train each response, by request index: in each mini-batch, replicas are filled by tokens."""
        destinations: dict[int, list[int]] = {}
        for groups in split_mini_batches(update.groups, self._algorithm.ppo_mini_batch_size):
            responses = [r for g in groups for r in g.responses]
            lengths = [len(r.request.prompt.token_ids) + r.num_tokens for r in responses]
            for replica, indices in enumerate(assign_to_replicas(lengths, self._ranks.dp_size)):
                for i in indices:
                    destinations[responses[i].request.index] = self._replica_ranks[replica]
        return destinations

    def run(self, update: UpdatePlan, samples: Sequence[Sample], stage: Stage) -> UpdateReport:
        """Train on `samples`, this replica's share of the plan. `stage(name)` times what is done inside it."""
        responses = {r.request.index: r for g in update.groups for r in g.responses}
        mine = {s.request_index: TrainSample(s, 0.0, self._weight(responses[s.request_index])) for s in samples}
        mini_batches = split_mini_batches(update.groups, self._algorithm.ppo_mini_batch_size)
        if self._algorithm.needs_old_logprobs(len(mini_batches)):
            with stage("old_log_prob"):
                _add(mine, "old_logprobs", self._trainer.logprobs(list(mine.values())))
        if self._reference is not None:
            with stage("ref"), self._reference.in_model():
                _add(mine, "ref_logprobs", self._trainer.logprobs(list(mine.values())))
        report = UpdateReport(rewards=[self._reward(r) for r in responses.values()])
        _add(mine, "advantage", self._advantages(update, mine))
        with stage("update_actor"):
            self._trainer.advance_lr()
            for _ in range(self._algorithm.ppo_epochs):
                for groups in mini_batches:
                    self._step(groups, mine, report)
        report.sums.policy_loss /= max(len(report.results), 1)
        report.sums.kl_loss /= max(len(report.results), 1)
        return report

    def _step(self, groups: Sequence[Group], mine: Mapping[int, TrainSample], report: UpdateReport) -> None:
        """One optimizer step on `groups`."""
        responses = [r for g in groups for r in g.responses]
        kept = [r.num_tokens for r in responses if self._weight(r)]
        count = denominator(self._algorithm.loss_agg_mode, sum(kept), len(kept))
        self._trainer.begin()
        start = time.perf_counter()
        sums = self._trainer.accumulate([mine[r.request.index] for r in responses if r.request.index in mine])
        self._platform.synchronize()
        report.busy_s += time.perf_counter() - start
        sums.policy_loss /= count
        sums.kl_loss /= count
        report.sums.add(sums)
        report.results.append(self._trainer.update(count))

    def _weight(self, response: ScoredResponse) -> float:
        """Weight of each token of the response; 0 where a response that was cut at the cap is to be left out."""
        if self._algorithm.overlong == "mask" and response.finish_reason == "length":
            return 0.0
        return token_weight(self._algorithm.loss_agg_mode, response.num_tokens, self._cap)

    def _reward(self, response: ScoredResponse) -> float:
        """The score, less the overlong penalty."""
        if self._algorithm.overlong != "soft_penalty":
            return response.reward
        return response.reward + overlong_penalty(
            response.num_tokens,
            max_response_length=self._cap,
            buffer_len=self._algorithm.overlong_buffer_len,
            factor=self._algorithm.overlong_penalty_factor,
        )

    def _advantages(
        self, update: UpdatePlan, mine: Mapping[int, TrainSample]
    ) -> dict[int, float] | dict[int, np.ndarray]:
        """The advantage of each response (of each of its tokens, where the estimator tells them apart)."""
        penalties = self._kl_penalties(mine)
        if self._algorithm.adv_estimator not in GROUP_ESTIMATORS:
            return self._whitened_returns(update, mine, penalties)
        totals = self._share({i: float(p.sum()) for i, p in penalties.items()})
        advantages: dict[int, float] = {}
        for group in update.groups:
            values = group_advantages(
                [self._reward(r) - totals.get(r.request.index, 0.0) for r in group.responses],
                adv_estimator=self._algorithm.adv_estimator,
                divide_by_std=self._algorithm.norm_adv_by_std_in_grpo,
            )
            advantages.update({r.request.index: a for r, a in zip(group.responses, values, strict=True)})
        return {i: advantages[i] for i in mine}

    def _kl_penalties(self, mine: Mapping[int, TrainSample]) -> dict[int, np.ndarray]:
        """What each token's KL to the reference costs in reward; on the last stage, empty elsewhere and without it."""
        if not self._algorithm.use_kl_in_reward:
            return {}
        penalties = {}
        for index, s in mine.items():
            if s.old_logprobs is not None and s.ref_logprobs is not None:
                old, ref = torch.from_numpy(s.old_logprobs).double(), torch.from_numpy(s.ref_logprobs).double()
                kl = token_kl(old, ref, self._algorithm.kl_penalty)
                penalties[index] = self._algorithm.kl_reward_coef * kl.numpy()
        return penalties

    def _whitened_returns(
        self, update: UpdatePlan, mine: Mapping[int, TrainSample], penalties: Mapping[int, np.ndarray]
    ) -> dict[int, np.ndarray]:
        """REINFORCE++: each token's return, whitened over the response tokens of the whole step."""
        rewards = {r.request.index: self._reward(r) for g in update.groups for r in g.responses}
        returns = {}
        for index, s in mine.items():
            none = np.zeros(len(s.sample.response_ids))
            returns[index] = returns_to_go(rewards[index], penalties.get(index, none))
        counted = returns.values() if self._ranks.reports_metrics else ()
        num_tokens = self._sum(float(sum(len(r) for r in counted)))
        mean = self._sum(math.fsum(x for r in counted for x in r)) / max(num_tokens, 1)
        square = self._sum(math.fsum((x - mean) ** 2 for r in counted for x in r))
        variance = square / max(num_tokens - 1, 1)
        return {index: whiten(r, mean=mean, variance=variance) for index, r in returns.items()}

    def _sum(self, value: float) -> float:
        return math.fsum(self._world.comm.allgather(value))

    def _share(self, values: dict[int, float]) -> dict[int, float]:
        """Values that only some ranks know, on all of them; nothing travels where nobody can have any."""
        if not self._algorithm.use_kl_in_reward:
            return {}
        shared: dict[int, float] = {}
        for part in self._world.comm.allgather(values if self._ranks.reports_metrics else {}):
            shared |= part
        return shared


def _add(samples: dict[int, TrainSample], name: str, values: Mapping[int, object]) -> None:
    """Set a field of the samples that `values` has one for."""
    for index, value in values.items():
        samples[index] = dataclasses.replace(samples[index], **{name: value})  # type: ignore[arg-type]
