"""ScaleDownPolicy: when half of the rollout's GPUs can begin to train (paper section 4.4).

At milestones of the share of finished requests it asks once whether the rest of the round fits on half of the GPUs, and
takes the first yes. The halves are contiguous ranks, cut so that neither a rollout TP group nor a training replica is split.

Invariants: at most one scale-down a round; it is decided from events and history alone; the projected peak of every
replica that stays is within its KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollpacker.messages import Action, ScaleDown
from rollpacker.policy.controller import RoundState
from rollpacker.policy.kv_cache import projected_peak_tokens
from rollpacker.policy.routing import RunningRequest, plan_migration
from rollpacker.types import RoundKind

MILESTONES = (0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50)


def scale_down_refusal(
    num_gpus: int, tensor_model_parallel_size: int, training_replica_size: int, *, is_moe: bool = False
) -> str | None:
    """Why no half of the GPUs can leave; None where it can. `training_replica_size` is training TP x PP x CP."""
    if is_moe:
        return "a mixture of experts spreads its experts over all ranks, so no half can train alone: no scale-down."
    for name, size in (("rollout replicas", tensor_model_parallel_size), ("training replicas", training_replica_size)):
        if num_gpus % (2 * size):
            return (
                f"{num_gpus} GPUs make {num_gpus / size:g} {name} of {size}: no half of the GPUs is a whole number of them, "
                "so there is no scale-down. Choose sizes that give an even number."
            )
    return None


class ScaleDownPolicy:
    """Watches a round and frees half of its GPUs once."""

    def __init__(
        self,
        *,
        num_gpus: int,
        training_replica_size: int,
        capacity_tokens: Callable[[int], int],
        expect: Callable[[int], float],
        is_moe: bool = False,
        all_rounds: bool = False,
        milestones: Sequence[float] = MILESTONES,
        must_fit: bool = True,
    ) -> None:
        """`capacity_tokens(tp)` is the KV cache of a rollout replica, `expect(n)` the length of a response that has
        n tokens; `all_rounds` lets SHORT rounds scale down too.

        Without `must_fit` the first milestone decides, whatever the rest will need: what is too much is preempted.
        """
        self._num_gpus = num_gpus
        self._training_replica_size = training_replica_size
        self._capacity_tokens = capacity_tokens
        self._expect = expect
        self._is_moe = is_moe
        self._all_rounds = all_rounds
        self._milestones = tuple(milestones)
        self._must_fit = must_fit
        self._next = 0
        self._step: int | None = None

    def on_finished(self, state: RoundState) -> Sequence[Action]:
        """A request has finished: at a milestone, ask; ScaleDown at the first yes of the round."""
        if self._step != state.plan.step:
            self._step, self._next = state.plan.step, 0
        if state.scale_down_progress is not None or not (self._all_rounds or state.plan.kind is RoundKind.LONG):
            return ()
        progress = len(state.finished) / len(state.requests)
        passed = self._next
        while passed < len(self._milestones) and progress >= self._milestones[passed] - 1e-9:
            passed += 1
        if passed == self._next:
            return ()
        self._next = passed
        found = self.plan(state.plan.tensor_model_parallel_size, state.running(self._expect))
        return () if found is None else (found,)

    def plan(self, tensor_model_parallel_size: int, running: Sequence[RunningRequest]) -> ScaleDown | None:
        """The half to free, the one with less to move; None where the rest would not fit or cannot be cut."""
        size = tensor_model_parallel_size
        if scale_down_refusal(self._num_gpus, size, self._training_replica_size, is_moe=self._is_moe):
            return None
        num_replicas = self._num_gpus // size
        halves = range(num_replicas // 2), range(num_replicas // 2, num_replicas)
        to_move = [sum(r.num_tokens for r in running if r.replica in half) for half in halves]
        freed, staying = halves if to_move[0] < to_move[1] else halves[::-1]
        targets = plan_migration(running, staying)
        held: dict[int, list[RunningRequest]] = {replica: [] for replica in staying}
        for request in running:
            held[targets.get(request.index, request.replica)].append(request)
        capacity = self._capacity_tokens(size)
        if self._must_fit and any(projected_peak_tokens(requests) > capacity for requests in held.values()):
            return None
        return ScaleDown(tuple(freed), tuple(sorted(targets.items())))
