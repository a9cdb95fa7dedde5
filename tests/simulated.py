"""Configs for the simulator's tests: small clusters with the real models and constants."""

from __future__ import annotations

from pathlib import Path

from rollpacker.config import Config
from rollpacker.config_file import load_config

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("7b_8k", "14b_16k", "32b_32k")


def setting(name: str = "7b_8k", *overrides: str) -> Config:
    """One of the shipped configs."""
    return load_config(str(ROOT / "configs" / "sim" / f"{name}.yaml"), list(overrides), prompts=None)


SMALL = [
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=8",
    "rollout.n=4",
    "workload.num_prompts=64",
]


def small(*overrides: str) -> Config:
    """7B on 4 GPUs, 8 prompts x 4 responses a step, 8 steps an epoch."""
    return setting("7b_8k", *SMALL, *overrides)
