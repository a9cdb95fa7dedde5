"""The machine and the models in numbers that no config gives, each with its source; the laws of the presets are in
workload.py.

"[RP]" is the RollPacker paper (arXiv 2509.21009); "fit" says that a number was chosen so that a published one comes out,
and which; "ours" marks an assumption without a source. docs/simulator.md repeats this list for users.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.model_shape import ModelShape


@dataclass(frozen=True)
class GpuFacts:
    """A GPU and its links; bf16 dense FLOP/s and bytes/s."""

    flops: float
    memory_bandwidth: float
    nvlink_bandwidth: float  # usable by an all-reduce, one direction, per GPU
    memory_gib: float  # as torch reports it


# Data sheets, save: H800 NVLink, 160 GB/s usable of 400 (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2);
# the others scaled by their nominal NVLink (A100 600, H100 and H200 900 GB/s) at the same efficiency.
GPUS = {
    "h800": GpuFacts(989e12, 3.35e12, 160e9, 79.0),
    "h100": GpuFacts(989e12, 3.35e12, 360e9, 79.0),
    "h200": GpuFacts(989e12, 4.8e12, 360e9, 139.0),
    "a100": GpuFacts(312e12, 2.0e12, 240e9, 79.0),
}
NETWORK_BANDWIDTH = 50e9
"""Bytes/s of a GPU to other nodes: one 400 Gbps InfiniBand port for each GPU ([RP], section 6)."""

# Decode. With 2 ms of overhead a step, these meet the three baselines of [RP] Fig. 11 over their caps, on H800 with vLLM
# 0.8.4: 10.0 ms a token (7B, TP 1, 64 requests), 16.9 (14B, TP 2, 64), 20.5 (32B, TP 2, 32), within 13 % (fit).
MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that reading weights and KV reaches."""
DECODE_MFU = 0.65
"""Share of the FLOP/s of a decode batch that is large enough to be bound by them."""
ALL_REDUCE_LATENCY_S = 22e-6
"""Of one all-reduce within a node; two in each layer."""
STEP_OVERHEAD_S = 2.0e-3
"""Kernel launches, scheduler and sampler of one engine step."""
PREFILL_MFU = 0.4
"""40 to 60 % are reported: 25,000 to 35,000 tokens/s for 7B on one H800 (2 FLOP per parameter and token)."""

# Training. The config's default of `cluster.train_mfu`, 0.35: 30 to 40 % of the FLOP/s in RL with variable lengths (verl's
# log of a 7B actor: 0.50 with packing; NeMo-RL's Qwen3-32B runs: 540 tokens/s a GPU in all), up to 47 % in Megatron-LM's
# pretraining on H100.
FORWARD_FLOPS_PER_PARAMETER = 2
BACKWARD_FLOPS_PER_PARAMETER = 4
OPTIMIZER_BYTES_PER_PARAMETER = 32
"""Adam reads gradient, two moments and master weight in fp32 and writes three of them and the bf16 weight (ours)."""

# Between the phases.
REFIT_BANDWIDTH = 8.75e9
"""Bytes/s of a GPU into its engine's weights: 60 to 75 GB/s a node of 8 (checkpoint-engine: GLM-4.5-Air 3.5 s, Qwen3-235B
6.2 s on 8 x H800)."""
REFIT_FIXED_S = 0.2
"""Metadata and launches of a refit: 0.1 to 0.3 s."""
PHASE_SWITCH_S = 1.7
"""Engine to sleep and awake again: a warm switch (RollMux, arXiv 2512.11306)."""
OFFLOAD_BANDWIDTH = 25e9
"""Bytes/s of a GPU to host memory, for a trainer that leaves the GPU during the rollout: PCIe 5 x16 at about half (ours)."""
ENGINE_START_S = 36.0
"""vLLM V1 engine without graphs: 34 to 39 s (its issues)."""
CUDA_GRAPHS_S = 14.0
"""Capture: 10 to 17 s (vLLM's issues). Both are paid at start and by the first round of each other TP size."""

# Rewards.
MATH_MEDIAN_S, MATH_SIGMA = 0.02, 1.0
"""A lognormal time of math-verify (ours); the cap of 2 s is the config's."""
CODE_MEDIAN_S, CODE_SIGMA = 1.5, 0.8
"""A lognormal time of a code task's tests (ours: seconds, as [RP] Fig. 4 shows)."""
CODE_HANG_SHARE = 0.05
"""Share of the prompts whose wrong responses run into the time limit ([RP], section 4.3: 5 % reach 30 s)."""
JUDGE_PARAMETERS = 7.6e9
JUDGE_VERDICT_TOKENS = 32
JUDGE_LAYERS = 28
JUDGE_KV_BYTES_PER_TOKEN = 57_344
"""The judge of [RP] is a 7B model (here as Qwen2.5-7B); its verdict is short (ours). While layers stream in from the host its
verdict is the first token after the response, so that they pass once (ours)."""
GPU_SHARING = {"mps": (1.15, 1.25), "time_slicing": (2.0, 2.0)}
"""How many times as long a decode step, and the judge, take while both are on a GPU. Time slices give each half of the
time. Under MPS they run together: decoding is bound by memory, reading a response by FLOPs, so little is lost (ours)."""
BETA_ACCURACY = 0.35
"""A prompt's success rate is Beta(a, a (1 - p) / p) for a mean p: with a = .35 and p = .5 half of the groups of 8 score
all alike, as 52 to 54 % do in a public log of DAPO-Math training (PKU-DAIR/DARTS), of 16 (fit)."""


def qwen2_5(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, eps: float) -> ModelShape:
    """A Qwen2.5 base model as its config.json describes it."""
    return ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=152064,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rms_norm_eps=eps,
        tie_word_embeddings=False,
        has_qkv_bias=True,
    )


MODELS = {
    "Qwen/Qwen2.5-7B": qwen2_5(3584, 18944, 28, 28, 4, 1e-6),
    "Qwen/Qwen2.5-14B": qwen2_5(5120, 13824, 48, 40, 8, 1e-5),
    "Qwen/Qwen2.5-32B": qwen2_5(5120, 27648, 64, 40, 8, 1e-5),
    "Qwen/Qwen3-8B": ModelShape(
        architecture="Qwen3ForCausalLM",
        num_layers=36,
        hidden_size=4096,
        ffn_hidden_size=12288,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        has_qkv_bias=False,
    ),
}
"""Models that need no folder: `model.path` may be one of these names (their config.json on the Hugging Face hub)."""
