"""Training while the rest decodes: when each training replica is free, and what it trains (paper section 4.4).

The StreamBatcher decides who gets which group; here is how long that takes. One object serves one round, from the moment in
which half of the GPUs leave the rollout.

Invariant: a replica trains one group after another and never two at a time; a group is trained once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollpacker.config import Config
from rollpacker.policy.streaming import StreamBatcher
from rollpacker.simulator.training import TrainingCost, UpdateTimes
from rollpacker.types import Group


@dataclass(frozen=True)
class StreamTimes:
    """What streaming has done: `overlap_s` is the training before the rollout's end, in seconds of a freed replica."""

    num_groups_streamed: int
    overlap_s: float
    update: UpdateTimes


class StreamedTraining:
    """The training replicas of one round."""

    def __init__(self, config: Config, cost: TrainingCost) -> None:
        self._cost = cost
        self._batcher = StreamBatcher(
            cost.num_replicas,
            adv_estimator=config.algorithm.adv_estimator,
            fetches_once=config.stream.fetch == "once",
        )
        self._free_s: dict[int, float] = {}
        self._num_freed = 0
        self._trained: list[tuple[int, float, float]] = []  # a group: (replica, begin, end)

    def on_scale_down(self, freed_gpus: Sequence[int], ready_s: float) -> None:
        """These GPUs, whole training replicas, have the trainer's weights at `ready_s`."""
        size = self._cost.replica_size
        replicas = range(freed_gpus[0] // size, (freed_gpus[-1] + 1) // size)
        self._num_freed = len(replicas)
        self._free_s = dict.fromkeys(replicas, ready_s)
        self._train(self._batcher.on_scale_down(replicas), ready_s)

    def on_group(self, group: Group, now_s: float) -> None:
        """A group is complete."""
        self._train(self._batcher.on_group(group), now_s)

    @property
    def has_begun(self) -> bool:
        """Whether GPUs have been freed."""
        return bool(self._free_s)

    def on_rollout_end(self, end_s: float, ready_s: float) -> StreamTimes:
        """The rest trains everywhere; the other replicas have the trainer's weights at `ready_s`."""
        for replica in range(self._cost.num_replicas):
            self._free_s.setdefault(replica, ready_s)
        self._train(self._batcher.on_rollout_end(), end_s)
        done_s = max(ready_s, *self._free_s.values()) + self._cost.optimizer_step_s
        overlap_s = sum(max(min(end, end_s) - begin, 0.0) for _, begin, end in self._trained)
        busy_s = [0.0] * self._cost.num_replicas
        for replica, begin, end in self._trained:
            busy_s[replica] += max(end - max(begin, ready_s), 0.0)
        return StreamTimes(
            num_groups_streamed=self._batcher.num_streamed,
            overlap_s=overlap_s / self._num_freed,
            update=UpdateTimes(None, None, done_s - ready_s, tuple(busy_s)),
        )

    def _train(self, sent: Iterable[tuple[int, Group]], now_s: float) -> None:
        for replica, group in sent:
            begin_s = max(self._free_s[replica], now_s)
            seconds = self._cost.group_s(group)
            self._free_s[replica] = begin_s + seconds
            self._trained.append((replica, begin_s, begin_s + seconds))
