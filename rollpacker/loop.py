"""The main loop, the only one: the paper's Figure 5. The same loop runs on a cluster and in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rollpacker.messages import Action, Event, RoundPlan, UpdatePlan
from rollpacker.policy.controller import StepController


class RunStopped(Exception):
    """All ranks have agreed to end the run here, for the reason given; an open round is dropped."""


class Round(Protocol):
    """What carries a rollout out: engines and rewards, real or simulated; for training and for validation."""

    def launch(self, plan: RoundPlan) -> None:
        """Hand the round's requests to the engines."""

    def events(self) -> Iterator[Event]:
        """What happens during the round, in the common order, until EndRound has been applied."""

    def apply(self, action: Action) -> None:
        """Carry out one action."""


class Backend(Round, Protocol):
    """What carries a whole step out: a rollout, then gradients and weights."""

    def between_steps(self) -> None:
        """Called before each step; a run that is stopped in the step comes back to here. May raise RunStopped."""

    def apply_update(self, update: UpdatePlan) -> None:
        """Train on the step's groups: one optimizer step, one global normaliser."""

    def sync_weights(self) -> None:
        """Refit: training shards to rollout shards."""


def run_round(step: int, controller: StepController, backend: Round) -> bool:
    """Run the rollout of a step; False when no prompt is left."""
    plan = controller.begin_step(step)  # (1) short or long round, which prompts   (2) rollout TP size
    if plan is None:
        return False
    backend.launch(plan)
    for event in backend.events():  # (3) rewards   (4) scale-down   (5) streamed training
        for action in controller.on(event):
            backend.apply(action)
    return True


def run_step(step: int, controller: StepController, backend: Backend) -> bool:
    """Run one step; False when nothing is left to train."""
    if not run_round(step, controller, backend):
        return False
    backend.apply_update(controller.finish_step())  # (6) one optimizer step, one global normaliser
    backend.sync_weights()  # (7) refit: Megatron shards -> vLLM shards
    return True


def run(num_steps: int | None, controller: StepController, backend: Backend, *, num_done: int = 0) -> int:
    """Run steps until `num_steps` are done or no prompt is left; the number of steps done, `num_done` earlier ones included.

    Raises RunStopped where the backend does.
    """
    while num_steps is None or num_done < num_steps:
        backend.between_steps()
        if not run_step(num_done + 1, controller, backend):
            break
        num_done += 1
    return num_done
