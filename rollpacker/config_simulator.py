"""The sections that only `rollpacker simulate` and its kin read: what prompts ask for, and the machine that is assumed."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.config_key import key


@dataclass(frozen=True)
class WorkloadConfig:
    """What `rollpacker simulate` lets the model say: how long responses are, and what scoring them takes."""

    preset: str | None = key(
        None,
        "Law of the lengths, fitted to the paper's setting of that name; null = lengths_file, or the keys below.",
        (None, "7b_8k", "14b_16k", "32b_32k"),
    )
    lengths_file: str | None = key(
        None, "Measured lengths by prompt instead: a CSV (docs/simulator.md), or a run directory or its samples.jsonl."
    )
    num_prompts: int | None = key(
        None, "Prompts of an epoch; null = 40 steps of them, or all of lengths_file if it has more."
    )
    prompt_tokens: int = key(300, "Length of a prompt, in tokens, where lengths_file does not say.")
    median_tokens: float | None = key(None, "Median response of the median prompt; null = the preset's, as below.")
    sigma_within: float | None = key(None, "Standard deviation of log length within a prompt.")
    sigma_between: float | None = key(None, "Standard deviation of the prompts' mean log lengths.")
    hard_share: float | None = key(None, "Share of the prompts, the longest, that are hard.")
    hard_cap_probability: float | None = key(None, "Probability that a response of a hard prompt runs to the cap.")
    accuracy: float = key(0.5, "Mean share of right responses, where lengths_file does not say.")
    reward: str = key(
        "math",
        "What scores: math = a verifier, code = a sandbox, judge = a 7B model on the rollout's GPUs.",
        ("math", "code", "judge"),
    )
    reward_s: float | None = key(
        None, "Seconds that each score takes, whatever the response; null = the law of workload.reward."
    )


@dataclass(frozen=True)
class ClusterConfig:
    """The machine that `rollpacker simulate` assumes; its size is trainer.nnodes x trainer.n_gpus_per_node."""

    gpu: str = key("h800", "Which GPU.", ("h800", "h100", "h200", "a100"))
    decode_table: str | None = key(
        None, "CSV of measured decode times (docs/simulator.md); null = a roofline of the GPU and the model."
    )
    step_overhead_ms: float = key(2.0, "Part of each decode step that no GPU makes shorter, in ms (not with a table).")
    train_mfu: float = key(0.35, "Share of the GPU's FLOP/s that training reaches.")
    train_gpu_s_per_sample: float | None = key(
        None, "GPU-seconds that training one response takes, whatever its length; null = from FLOPs and train_mfu."
    )
    judge_mps: bool = key(
        True, "A judge and the engine on one GPU run together (CUDA MPS) instead of in turn (time slices)."
    )
    judge_offload: str = key(
        "none",
        "Layers of the judge that do not fit beside the engine come from host memory: blocking = one after another is "
        "copied, then computed; pipelined = copied while the last one computes; none = all are assumed to fit.",
        ("none", "blocking", "pipelined"),
    )
    rewards_after_rollout: bool = key(
        False, "Score only once every response is complete (verl's way) instead of while others decode."
    )
    offload_trainer: bool = key(
        False, "The trainer leaves the GPUs during the rollout (verl's way), which takes time and frees memory for KV."
    )
