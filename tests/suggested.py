"""Jobs small enough to suggest a config for in a test: the real 7B model, few and short responses."""

from __future__ import annotations

from typing import Any

from rollpacker.config import Config
from rollpacker.config_file import build_config

STEPS = 5


def job(gpus: int = 4, *, mode: str = "off", gib: float = 139.0, cap: int = 3584, **sections: dict[str, Any]) -> Config:
    """8 prompts x 4 responses a step, 5 steps, on one node; a full sequence is 4,096 tokens unless `cap` says otherwise."""
    tree: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen2.5-7B"},
        "data": {"train_batch_size": 8, "max_response_length": cap, "max_prompt_length": 512},
        "rollout": {"n": 4},
        "tail_batching": {"mode": mode},
        "training": {"max_tokens_per_gpu": 1 << 20},
        "trainer": {"nnodes": 1, "n_gpus_per_node": gpus, "gpu_memory_gib": gib},
        "workload": {"preset": "7b_8k", "num_prompts": 8 * STEPS},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return build_config(tree, prompts=None)
