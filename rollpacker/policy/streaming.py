"""StreamBatcher: which training replica gets which finished group while the rollout goes on (paper section 4.4).

Rollout is the producer, training the consumer: from the scale-down on, each complete group goes to the least loaded of
the freed replicas; when the rollout ends, what is left is spread over all of them.

Invariants: a group is sent once, whole; advantages of a streamed group depend on that group alone, so estimators that
need the batch, and updates before the round's end, do not stream.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rollpacker.types import Group

_GROUP_LOCAL = ("grpo", "dr_grpo", "rloo")


def streaming_refusal(adv_estimator: str, num_updates: int) -> str | None:
    """Why groups must wait for the end of the round; None where they may stream. `num_updates` is per rollout."""
    if num_updates > 1:
        return (
            f"{num_updates} optimizer steps per rollout split it into mini-batches, which must be known before the first "
            "gradient: groups are not streamed. One step (algorithm.ppo_mini_batch_size=null, ppo_epochs=1) would allow it."
        )
    if adv_estimator not in _GROUP_LOCAL:
        return (
            f"algorithm.adv_estimator={adv_estimator} normalises over the whole batch, so groups wait for the end of the "
            f"round. {', '.join(_GROUP_LOCAL)} need their group alone and stream."
        )
    return None


class StreamBatcher:
    """Balances tokens over training replicas; one object serves one round."""

    def __init__(
        self, num_replicas: int, *, adv_estimator: str, num_updates: int = 1, fetches_once: bool = False
    ) -> None:
        """`fetches_once`: the freed replicas train what is complete at that moment, and nothing more before the end."""
        if num_replicas < 1:
            raise ValueError(f"num_replicas={num_replicas}: expected at least one training replica.")
        self._num_replicas = num_replicas
        self._fetches_once = fetches_once
        self.refusal = streaming_refusal(adv_estimator, num_updates)
        self._loads: list[tuple[int, int]] = []  # heap of (tokens sent, replica), of those that train already
        self._backlog: list[Group] = []
        self._has_ended = False
        self.num_streamed = 0  # groups sent before the rollout's end

    def on_scale_down(self, freed_replicas: Sequence[int]) -> list[tuple[int, Group]]:
        """These training replicas are free: send them what has waited, longest first."""
        if self.refusal is not None:
            return []
        self._loads = [(0, replica) for replica in sorted(freed_replicas)]
        waiting, self._backlog = self._backlog, []
        sent = self._send(_longest_first(waiting))
        self.num_streamed += len(sent)
        return sent

    def on_group(self, group: Group) -> list[tuple[int, Group]]:
        """A group is complete: (replica, group) if one is free, else it waits."""
        if not self._loads or (self._fetches_once and not self._has_ended):
            self._backlog.append(group)
            return []
        self.num_streamed += not self._has_ended
        return self._send([group])

    def on_rollout_end(self) -> list[tuple[int, Group]]:
        """All replicas train: spread what is left so that the sums of tokens are even in the end."""
        self._has_ended = True
        busy = {replica for _, replica in self._loads}
        self._loads += [(0, replica) for replica in range(self._num_replicas) if replica not in busy]
        heapq.heapify(self._loads)
        waiting, self._backlog = self._backlog, []
        return self._send(_longest_first(waiting))

    def _send(self, groups: Sequence[Group]) -> list[tuple[int, Group]]:
        sent = []
        for group in groups:
            load, replica = self._loads[0]
            heapq.heapreplace(self._loads, (load + _num_tokens(group), replica))
            sent.append((replica, group))
        return sent


def _num_tokens(group: Group) -> int:
    return sum(len(group.prompt.token_ids) + r.num_tokens for r in group.responses)


def _longest_first(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=_num_tokens, reverse=True)
