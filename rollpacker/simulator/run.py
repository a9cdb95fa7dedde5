"""A simulated run: the main loop over a SimulatedBackend."""

from __future__ import annotations

from rollpacker.config import Config, ConfigError
from rollpacker.data.prompts import PromptOrder
from rollpacker.loop import run
from rollpacker.policy.assembly import build_controller, rollout_sizes
from rollpacker.policy.controller import StepController
from rollpacker.profiling.trace import TraceWriter
from rollpacker.simulator.cluster import Cluster
from rollpacker.simulator.core import SimulatedBackend
from rollpacker.simulator.record import Recorder, RowWriter, StepSink
from rollpacker.simulator.reward import JudgeCost
from rollpacker.simulator.workload import Workload, build_workload


class Simulation:
    """Cluster, workload and controller of a config. Raises ConfigError where they cannot be."""

    def __init__(self, config: Config) -> None:
        if config.rollout.replay is not None:
            raise ConfigError("rollout.replay has no engines to simulate; set it to null.")
        self.config = config
        self.cluster = Cluster(config)
        if config.workload.reward == "judge":
            for size in rollout_sizes(config, self.cluster.machine):
                JudgeCost(config, self.cluster, size)  # a judge that fits nowhere is refused before anything is written
        self.workload: Workload = build_workload(config)
        self.controller: StepController = build_controller(
            config, PromptOrder.from_config(self.workload.prompts, config), self.cluster.machine
        )

    def run(self, rows: RowWriter | None = None, trace: TraceWriter | None = None) -> Recorder:
        """Simulate the whole run; its rows and bars go where they are given."""
        recorder = Recorder(self.config, self.cluster.num_gpus, rows, trace)
        self.run_into(recorder)
        return recorder

    def run_into(self, sink: StepSink) -> None:
        """The same, for whoever wants to see each step."""
        backend = SimulatedBackend(self.config, self.cluster, self.workload, sink)
        run(self.config.trainer.total_training_steps, self.controller, backend)
