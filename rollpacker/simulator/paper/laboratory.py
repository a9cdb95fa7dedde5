"""Laboratory: one simulated run for each set of overrides, kept, so that tables share their runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import rollpacker
from rollpacker.config import Config, ConfigError
from rollpacker.config_file import load_config
from rollpacker.messages import UpdatePlan
from rollpacker.simulator.record import StepFacts
from rollpacker.simulator.run import Simulation
from rollpacker.types import RoundKind

SETTINGS = {"7B/8k": "7b_8k", "14B/16k": "14b_16k", "32B/32k": "32b_32k"}
"""The paper's three settings: row name -> configs/sim/*.yaml."""


@dataclass(frozen=True)
class Round:
    """One step of a run, in seconds."""

    kind: RoundKind
    num_samples: int
    num_preemptions: int
    rollout_s: float
    reward_s: float
    training_s: float
    step_s: float


@dataclass
class Measured:
    """A whole run: its rounds, and means over them for each P0 x R0 trained samples."""

    samples_per_step: int
    rounds: list[Round] = field(default_factory=list)

    def end_step(self, update: UpdatePlan, facts: StepFacts) -> None:
        """Take a step down (StepSink)."""
        self.rounds.append(
            Round(
                update.stats.kind,
                update.num_sequences,
                update.stats.num_preemptions,
                facts.round.wall_s - facts.round.reward_wait_s,
                facts.round.reward_wait_s,
                facts.times.total_s,
                facts.end_s - facts.start_s,
            )
        )

    def mean(self, of: Callable[[Round], float], kind: RoundKind | None = None) -> float:
        """Mean of a quantity per P0 x R0 samples, over all rounds or those of a kind. ValueError where there is none."""
        rounds = [r for r in self.rounds if kind in (None, r.kind)]
        if not rounds:
            raise ValueError(f"no {kind.value if kind else ''} round was run")
        return sum(map(of, rounds)) * self.samples_per_step / sum(r.num_samples for r in rounds)

    @property
    def step_s(self) -> float:
        """A step."""
        return self.mean(lambda r: r.step_s)

    @property
    def rollout_s(self) -> float:
        """A rollout, until its last response is complete."""
        return self.mean(lambda r: r.rollout_s)


class Laboratory:
    """Runs configs/sim settings with overrides; `on_run` hears of each new run before it starts."""

    def __init__(self, seed: int = 0, on_run: Callable[[str], None] = lambda what: None) -> None:  # noqa: ARG005
        self._seed = seed
        self._on_run = on_run
        self._done: dict[tuple[str, ...], Measured] = {}

    def config(self, setting: str, *overrides: str) -> Config:
        """One of SETTINGS, changed."""
        path = Path(rollpacker.__file__).parents[1] / "configs" / "sim" / f"{SETTINGS[setting]}.yaml"
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing: the paper's settings are in the repository, not in the installed package. Run "
                "`rollpacker paper` from a checkout (pip install -e .)."
            )
        return load_config(str(path), [f"trainer.seed={self._seed}", *overrides], prompts=None)

    def run(self, setting: str, *overrides: str) -> Measured:
        """The run of a setting; once."""
        key = (setting, *overrides)
        if key not in self._done:
            self._on_run(f"{setting} {' '.join(overrides)}".strip())
            config = self.config(setting, *overrides)
            measured = Measured(config.data.train_batch_size * config.rollout.n)
            Simulation(config).run_into(measured)
            self._done[key] = measured
        return self._done[key]
