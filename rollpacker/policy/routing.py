"""Which replica decodes which response, and where requests go when replicas leave the rollout.

Invariants: a router sees what is known before the first token alone, so it cannot select samples; the responses of a
group are routed one by one, never as a group. (paper section 4.1)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollpacker.types import Prompt

Predict = Callable[[Prompt], float]
"""Expected tokens of a response."""


class Router(Protocol):
    """Gives each response of a launch its replica; one object serves one round."""

    def assign(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[int]:
        """The replica of each response, in launch order: `prompts` names the prompt of each one."""

    def release(self, index: int) -> None:
        """The request has finished or was aborted."""

    def observe(self, kv_cache_usage_of: Mapping[int, float], freed_replicas: Collection[int]) -> None:
        """Share of its KV cache that each replica uses now, and the replicas that have left the rollout."""


class LaunchRouter:
    """The part of a router that decides from the launch alone: it only needs to know which replicas there are."""

    def __init__(self, num_replicas: int) -> None:
        self._replicas = list(range(num_replicas))

    def release(self, index: int) -> None:
        """Nothing to note."""

    def observe(self, kv_cache_usage_of: Mapping[int, float], freed_replicas: Collection[int]) -> None:  # noqa: ARG002
        """Replicas that have left the rollout get nothing more."""
        self._replicas = [replica for replica in self._replicas if replica not in freed_replicas]


class RequestRouter(LaunchRouter):
    """Deals responses out to the replicas one by one, so that the responses of a group decode on different replicas and
    every replica gets as many as the others (give or take one).
    """

    def assign(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[int]:
        """The replica of each response, in launch order; `first_index` is the first one's place in the round."""
        return [self._replicas[(first_index + i) % len(self._replicas)] for i in range(len(prompts))]


class BalancedRouter:
    """Sends each response to the replica that has promised the fewest tokens: it has the most free KV to come.

    A replica's promise is the sum, over its live requests, of prompt plus predicted response; or what its KV cache is
    seen to hold, if that is more (a response that outlives its prediction). Launched longest first, this is Graham's
    LPT rule; with equal predictions it deals the responses out in turn.
    """

    def __init__(self, num_replicas: int, predict: Predict, *, capacity_tokens: int = 0) -> None:
        """`capacity_tokens` is the KV cache of a replica, where `observe` is used."""
        self._predict = predict
        self._capacity_tokens = capacity_tokens
        self._promised = dict.fromkeys(range(num_replicas), 0.0)
        self._held: dict[int, float] = {}
        self._promise_of: dict[int, tuple[int, float]] = {}

    def assign(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[int]:
        """The replica of each response, in launch order; ties go to the lowest replica."""
        loads = [(max(tokens, self._held.get(replica, 0.0)), replica) for replica, tokens in self._promised.items()]
        heapq.heapify(loads)
        replicas = []
        for index, prompt in enumerate(prompts, first_index):
            tokens = len(prompt.token_ids) + self._predict(prompt)
            load, replica = loads[0]
            heapq.heapreplace(loads, (load + tokens, replica))
            self._promised[replica] += tokens
            self._promise_of[index] = replica, tokens
            replicas.append(replica)
        return replicas

    def release(self, index: int) -> None:
        """The request has finished or was aborted: its replica is rid of it."""
        replica, tokens = self._promise_of.pop(index)
        if replica in self._promised:
            self._promised[replica] -= tokens

    def observe(self, kv_cache_usage_of: Mapping[int, float], freed_replicas: Collection[int]) -> None:
        """Share of its KV cache that each replica uses now, and the replicas that have left the rollout."""
        self._held = {replica: usage * self._capacity_tokens for replica, usage in kv_cache_usage_of.items()}
        for replica in freed_replicas:
            self._promised.pop(replica, None)


@dataclass(frozen=True)
class RunningRequest:
    """A request in the middle of its generation; `num_tokens` counts prompt and response so far."""

    index: int
    replica: int
    num_tokens: int
    predicted_tokens: float

    @property
    def peak_tokens(self) -> float:
        """KV that it will hold at its end, in tokens."""
        return max(self.predicted_tokens, float(self.num_tokens))


def plan_migration(requests: Sequence[RunningRequest], staying: Collection[int]) -> dict[int, int]:
    """Where the requests of the other replicas go: request index -> one of the replicas `staying` (at least one).

    Longest first, each to the replica with the fewest tokens to hold in the end. A request that already runs on a
    staying replica does not move.
    """
    load_of = dict.fromkeys(sorted(staying), 0.0)
    movers = []
    for request in requests:
        if request.replica in load_of:
            load_of[request.replica] += request.peak_tokens
        else:
            movers.append(request)
    heap = [(load, replica) for replica, load in load_of.items()]
    heapq.heapify(heap)
    targets = {}
    for request in sorted(movers, key=lambda r: (-r.peak_tokens, r.index)):
        load, replica = heap[0]
        targets[request.index] = replica
        heapq.heapreplace(heap, (load + request.peak_tokens, replica))
    return targets
