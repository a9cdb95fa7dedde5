"""TailIsolationRouter: the responses predicted to be the longest decode alone, on a few replicas of low concurrency.

A baseline after TailSieve (arXiv 2608.22788), without its probes and speculation: nothing races and nothing is deferred, so
the law of the samples is untouched. A decode step of a replica is the slower the more requests share it, so a response
that runs long should share with few. The split of prompts and replicas into tail and bulk is the one that makes

    max over both pools of  max(tokens / replicas x step(c) / c,  longest response x step(c)),   c = requests per replica

the least; step(c) is the time of a decode step. All prompts in one pool is one of the splits, so isolation is used where
it helps.

Invariant: routing follows from history, before the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollpacker.policy.routing import BalancedRouter, LaunchRouter, Predict
from rollpacker.types import Prompt


@dataclass(frozen=True)
class Split:
    """The `num_prompts` longest prompts decode on `num_replicas` replicas of their own; `seconds` is the prediction."""

    num_prompts: int
    num_replicas: int
    seconds: float


def best_split(
    tokens: Sequence[float], num_replicas: int, num_responses: int, step_s: Callable[[float], float]
) -> Split:
    """The fastest split. `tokens` are the predicted tokens of a response of each prompt, longest first.

    Every split is tried: O(prompts x replicas) evaluations of `step_s`.
    """
    total = [0.0]
    for n in tokens:
        total.append(total[-1] + n * num_responses)

    def seconds(first: int, last: int, replicas: int) -> float:
        if first == last:
            return 0.0
        concurrency = (last - first) * num_responses / replicas
        step = step_s(max(concurrency, 1.0))
        return step * max((total[last] - total[first]) / replicas / max(concurrency, 1.0), tokens[first])

    best = Split(0, 0, seconds(0, len(tokens), num_replicas))
    for tail_replicas in range(1, num_replicas):
        for tail in range(1, len(tokens)):
            slowest = max(seconds(0, tail, tail_replicas), seconds(tail, len(tokens), num_replicas - tail_replicas))
            if slowest < best.seconds:
                best = Split(tail, tail_replicas, slowest)
    return best


class TailIsolationRouter(LaunchRouter):
    """Splits a launch as `best_split` says and balances predicted tokens within each pool."""

    def __init__(self, num_replicas: int, predict: Predict, *, step_s: Callable[[float], float]) -> None:
        """`step_s(batch)` is the time of a decode step of one replica."""
        super().__init__(num_replicas)
        self._predict = predict
        self._step_s = step_s

    def assign(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[int]:  # noqa: ARG002
        """The replica of each response, in launch order; the tail has the first replicas."""
        predicted = {p.key: self._predict(p) for p in prompts}
        longest_first = sorted(predicted, key=lambda key: -predicted[key])
        num_responses = max(len(prompts) // max(len(predicted), 1), 1)
        num_replicas = len(self._replicas)
        split = best_split([predicted[key] for key in longest_first], num_replicas, num_responses, self._step_s)
        tail = set(longest_first[: split.num_prompts])
        pools = [[i for i, p in enumerate(prompts) if (p.key in tail) is is_tail] for is_tail in (True, False)]
        replicas = [0] * len(prompts)
        first = 0
        for members, size in zip(pools, (split.num_replicas, num_replicas - split.num_replicas), strict=True):
            if members:
                members.sort(key=lambda i: -predicted[prompts[i].key])  # stable: longest first within the pool
                router = BalancedRouter(size, self._predict)
                for place, replica in zip(members, router.assign([prompts[i] for i in members]), strict=True):
                    replicas[place] = self._replicas[first + replica]
            first += size
        return replicas
