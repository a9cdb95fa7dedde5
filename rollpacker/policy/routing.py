"""Which replica decodes which response, and where requests go when replicas leave the rollout.

Invariants: a router sees what is known before the first token alone, so it cannot select samples; the responses of a
group are routed one by one, never as a group. (paper section 4.1)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollpacker.types import Prompt, Request


class Router(Protocol):
    """Gives each response of a launch its replica."""

    def assign(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[int]:
        """The replica of each response, in launch order: `prompts` names the prompt of each one."""


class RequestRouter:
    """Deals responses out to the replicas one by one, so that the responses of a group decode on different replicas and
    every replica gets as many as the others (give or take one).
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def assign(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[int]:
        """The replica of each response, in launch order; `first_index` is the first one's place in the round."""
        return [(first_index + i) % self._num_replicas for i in range(len(prompts))]


class BalancedRouter:
    """Sends each response to the replica that has promised the fewest tokens: it has the most free KV to come.

    A replica's promise is the sum, over its live requests, of prompt plus predicted response; or what its KV cache is
    seen to hold, if that is more (a response that outlives its prediction). Launched longest first, this is Graham's
    LPT rule; with equal predictions it deals the responses out in turn. One object serves one round.
    """

    def __init__(self, num_replicas: int, predict: Callable[[Prompt], float]) -> None:
        self._predict = predict
        self._promised = [0.0] * num_replicas
        self._held = [0.0] * num_replicas
        self._promise_of: dict[int, float] = {}

    def assign(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[int]:
        """The replica of each response, in launch order; ties go to the lowest replica."""
        loads = [(max(pair), replica) for replica, pair in enumerate(zip(self._promised, self._held, strict=True))]
        heapq.heapify(loads)
        replicas = []
        for index, prompt in enumerate(prompts, first_index):
            tokens = len(prompt.token_ids) + self._predict(prompt)
            load, replica = loads[0]
            heapq.heapreplace(loads, (load + tokens, replica))
            self._promised[replica] += tokens
            self._promise_of[index] = tokens
            replicas.append(replica)
        return replicas

    def release(self, request: Request) -> None:
        """The request has finished or was aborted: its replica is rid of it."""
        self._promised[request.replica] -= self._promise_of.pop(request.index, 0.0)

    def observe(self, replica: int, kv_tokens: float) -> None:
        """Tokens that a replica's KV cache holds now."""
        self._held[replica] = kv_tokens


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


def plan_migration(
    requests: Sequence[RunningRequest], staying: Collection[int], capacity_tokens: float
) -> Mapping[int, int] | None:
    """Where the requests of the other replicas go: request index -> replica that stays; None if they do not fit.

    Longest first, each to the replica with the least projected peak. A request that already runs on a staying replica
    does not move. `capacity_tokens` is what one replica's KV cache holds.
    """
    peaks = dict.fromkeys(sorted(staying), 0.0)
    movers = []
    for request in requests:
        if request.replica in peaks:
            peaks[request.replica] += request.peak_tokens
        else:
            movers.append(request)
    heap = [(peak, replica) for replica, peak in peaks.items()]
    heapq.heapify(heap)
    targets = {}
    for request in sorted(movers, key=lambda r: (-r.peak_tokens, r.index)):
        if not heap:
            return None
        peak, replica = heap[0]
        targets[request.index] = replica
        heapq.heapreplace(heap, (peak + request.peak_tokens, replica))
    return targets if all(peak <= capacity_tokens for peak, _ in heap) else None
