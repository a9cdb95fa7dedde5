"""The configuration: nested dataclasses whose field metadata explain every key. Section and leaf names follow verl.

Standard library only, so that a login node without torch or MPI can check a config. Reading and writing files is
`config_file.py`; what a value may be, alone and with others, is `config_checks.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollpacker.config_key import key
from rollpacker.config_simulator import ClusterConfig, WorkloadConfig


class ConfigError(ValueError):
    """A user's mistake: shown as one paragraph, exit code 2, no traceback."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    path: str = key("", "Hugging Face model folder: config.json, safetensors, tokenizer.")
    reference_path: str | None = key(None, "Model that a KL term refers to, of the same shape; null = model.path.")


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they are, how many a step takes, how long they and their responses may be."""

    train_files: list[str] = key([], "Prompt files (.jsonl, .parquet); relative paths start at the working directory.")
    val_files: list[str] = key([], "Prompt files for validation and `rollpacker eval`; empty = no validation.")
    domains: dict[str, float] = key({}, "Weights by which prompts are drawn, domain: weight; {} = as they come.")
    train_batch_size: int = key(128, "Prompts per step, one rollout and its updates (P0 of the paper).")
    max_prompt_length: int = key(1024, "Longest prompt, in tokens; longer ones are left out and counted.")
    max_response_length: int = key(8192, "Length cap of a response, in tokens.")
    shuffle: bool = key(True, "Shuffle the prompts anew in each epoch.")
    seed: int | None = key(None, "Seed of the prompt order; null = trainer.seed.")


@dataclass(frozen=True)
class ValKwargsConfig:
    """How validation samples; lengths and engines are those of the rollout."""

    n: int = key(1, "Responses per validation prompt: the k of avg@k and maj@k.")
    temperature: float = key(0.0, "Sampling temperature of validation; 0 = greedy.")
    top_p: float = key(1.0, "Nucleus sampling of validation.")
    top_k: int = key(-1, "Top-k sampling of validation; -1 = off.")


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled, and the vLLM engines that do it."""

    n: int = key(8, "Responses per prompt (R0 of the paper): the group size.")
    temperature: float = key(1.0, "Sampling temperature; the train log-probs use the same.")
    top_p: float = key(1.0, "Nucleus sampling; below 1 needs a mismatch correction.")
    top_k: int = key(-1, "Top-k sampling; -1 = off; above 0 needs a mismatch correction.")
    tensor_model_parallel_size: int = key(1, "Tensor-parallel ranks of one vLLM engine; the rest are replicas.")
    gpu_memory_utilization: float = key(0.5, "Share of the GPU's memory that vLLM may fill (CUDA only).")
    kv_cache_gib: int = key(1, "Size of the KV cache in GiB (CPU only).")
    max_num_seqs: int = key(256, "Most requests that one engine decodes at a time.")
    max_num_batched_tokens: int | None = key(None, "Most tokens in one engine step; null = vLLM's choice.")
    enforce_eager: bool = key(False, "Do not capture CUDA graphs (CPU runs never do).")
    routing: str = key(
        "even",
        "Which replica decodes which response: even = as many each, by predicted tokens where there is a race; "
        "isolate_tail = the predicted longest on a few replicas of their own (only simulated yet, without a race).",
        ("even", "isolate_tail"),
    )
    dtype: str = key("auto", "Engine weights and activations; auto = training.dtype.", ("auto", "fp32", "bf16"))
    weight_noise: float = key(
        0.0, "Relative noise put on the engine's weights at each refit, to study mismatch_correction; 0 = none."
    )
    quantum_ms: float = key(50.0, "Time between two event exchanges, in milliseconds.")
    replay: str | None = key(None, "Train on this dump (trainer.rollout_data_dir of a run) instead of generating.")
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)


@dataclass(frozen=True)
class TailBatchingConfig:
    """Which responses a step waits for (paper section 4.1; docs/spec.md)."""

    mode: str = key(
        "off",
        "off = plain synchronous rollout; paper = launch more prompts and responses, keep the first to finish.",
        ("off", "paper"),
    )
    eta_prompts: float = key(1.25, "Prompts that a SHORT round launches, as a multiple of data.train_batch_size.")
    eta_responses: float = key(1.25, "Responses that a SHORT round launches, as a multiple of rollout.n.")
    audit_fraction: float = key(
        0.02, "Share of the prompts that never race, to measure what the race does to the rest."
    )
    drain: str = key(
        "training",
        "When LONG rounds empty the queue of slow prompts: at the end of the training, of each epoch, or not at all.",
        ("training", "epoch", "none"),
    )


@dataclass(frozen=True)
class PlannerConfig:
    """The rollout tensor-parallel size of a step (paper section 4.2)."""

    policy: str = key(
        "fixed",
        "fixed = rollout.tensor_model_parallel_size in every step; preemption = the paper's rule, up when KV memory is "
        "short; profile = the fastest by decode times; schedule = a list. Only fixed trains in this version.",
        ("fixed", "preemption", "profile", "schedule"),
    )
    schedule: list[int] = key([], "schedule: the sizes of steps 1, 2, ...; the last one stays.")
    literal: bool = key(False, "preemption: halve after four quiet rounds always, as the paper does.")


@dataclass(frozen=True)
class RewardConfig:
    """How responses are scored."""

    verifier: str = key("math", "exact = the answer as text; math = math-verify.", ("exact", "math"))
    function: str | None = key(None, "A reward function of your own, path.py:name; replaces the verifier.")
    num_workers: int = key(1, "Processes per replica that score responses while the rollout goes on.")
    timeout_s: float = key(2.0, "Longest time one score may take, in seconds; more costs that sample (score 0).")
    adaptive_timeout: bool = key(
        False, "Limit each test case by the longest run of a right answer (code sandboxes; only simulated yet)."
    )
    min_timeout_s: float = key(2.0, "Adaptive: no limit falls below this, in seconds; timeout_s is the highest.")
    timeout_factor: float = key(1.5, "Adaptive: the limit as a multiple of the longest run of a right answer.")
    on_error: str = key(
        "score_zero",
        "A reward that fails or is late: score_zero = 0 for that response, drop_group = its prompt is not trained.",
        ("score_zero", "drop_group"),
    )


@dataclass(frozen=True)
class StreamConfig:
    """Training on finished groups while the rest decodes (paper section 4.4); only simulated in this version."""

    enabled: str = key(
        "off",
        "on = stream, or refuse to start; auto = stream where estimator, updates and sizes admit it.",
        ("auto", "on", "off"),
    )
    rounds: str = key("long", "Rounds that free half of their GPUs for training.", ("long", "all"))
    scale_down_at: float | None = key(
        None, "Share of finished requests at which they are freed; null = the first of .20, .25, ... .50 that fits."
    )
    fetch: str = key(
        "stream",
        "What the freed GPUs train during the rollout: each group once it is complete, or once = only those complete "
        "at that moment.",
        ("stream", "once"),
    )


@dataclass(frozen=True)
class WeightsConfig:
    """How trained weights get into the engines."""

    refit: str = key(
        "golden",
        "Train to rollout weights: golden = gather whole tensors, load by Hugging Face names; csrc = the extension copies "
        "shards into shards (docs/refit.md).",
        ("golden", "csrc"),
    )
    bucket_mib: int = key(256, "csrc: size of a round's send buffer and of its receive buffer; two of each are used.")
    check_freq: int = key(
        16, "csrc: compare checksums of trainer and engine in every so many refits, the first included; 0 = never."
    )


@dataclass(frozen=True)
class FilterConfig:
    """Which groups are worth training (dynamic sampling, DAPO)."""

    mode: str = key(
        "off", "zero_variance = replace a group whose scores are all equal by a fresh prompt.", ("off", "zero_variance")
    )
    max_launched_ratio: float = key(4.0, "A round launches at most this many times data.train_batch_size prompts.")


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and loss (docs/algorithms.md has the formulas)."""

    adv_estimator: str = key("grpo", "Advantage estimator.", ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus"))
    norm_adv_by_std_in_grpo: bool = key(True, "Divide GRPO's advantages by the group's standard deviation.")
    loss: str = key("ppo_clip", "Per-token policy loss: ppo_clip, gspo, or one of your own, path.py:name.")
    loss_agg_mode: str = key(
        "token-mean",
        "How per-token losses become one number, over the whole step's counts.",
        ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    )
    clip_ratio_low: float = key(0.2, "The ratio is clipped below at 1 - this.")
    clip_ratio_high: float = key(0.2, "The ratio is clipped above at 1 + this.")
    clip_ratio_c: float | None = key(3.0, "Dual clip: bound of the loss where the advantage is negative; null = off.")
    ppo_mini_batch_size: int | None = key(
        None, "Prompts per optimizer update, dividing data.train_batch_size; null = all, one update."
    )
    ppo_epochs: int = key(1, "Passes of updates over the samples of a step.")
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus in the loss.")
    use_kl_loss: bool = key(False, "Add the KL to the reference model to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of the KL in the loss.")
    kl_loss_type: str = key("k3", "Estimator of the KL in the loss; k3 is verl's low_var_kl.", ("k1", "k2", "k3"))
    use_kl_in_reward: bool = key(False, "Take the KL to the reference model off the reward.")
    kl_reward_coef: float = key(0.001, "Weight of the KL in the reward.")
    kl_penalty: str = key("k1", "Estimator of the KL in the reward.", ("k1", "k2", "k3"))
    overlong: str = key(
        "keep",
        "Responses cut at the cap: keep = train them, mask = leave them out of the loss, soft_penalty = DAPO's.",
        ("keep", "mask", "soft_penalty"),
    )
    overlong_buffer_len: int = key(4096, "Soft penalty: it grows over this many tokens before the cap.")
    overlong_penalty_factor: float = key(1.0, "Soft penalty: what a response at the cap loses.")
    mismatch_correction: str = key(
        "none",
        "Weigh samples by train over rollout probability: tis = truncated at the cap, mis = dropped above it.",
        ("none", "tis", "mis"),
    )
    mismatch_level: str = key("token", "One weight for each token, or for each response.", ("token", "sequence"))
    mismatch_cap: float = key(2.0, "Cap of the weight.")

    @property
    def needs_reference(self) -> bool:
        """Whether anything refers to the reference model."""
        return self.use_kl_loss or self.use_kl_in_reward

    def needs_old_logprobs(self, num_mini_batches: int) -> bool:
        """Whether the policy that sampled must be asked once more: it moves between the updates, or is part of a reward."""
        return num_mini_batches * self.ppo_epochs > 1 or self.use_kl_in_reward


@dataclass(frozen=True)
class TrainingConfig:
    """Megatron: parallel shape, precision, batching, optimizer."""

    tensor_model_parallel_size: int = key(1, "Tensor-parallel ranks of one training replica.")
    pipeline_model_parallel_size: int = key(1, "Pipeline stages of one training replica.")
    context_parallel_size: int = key(1, "Context-parallel ranks; above 1 only --dry-run checks it in this version.")
    sequence_parallel: bool = key(False, "Megatron's sequence parallelism (needs transformer-engine).")
    attention_backend: str = key("auto", "auto = sdpa = torch's attention kernels.", ("auto", "sdpa"))
    use_distributed_optimizer: bool = key(True, "Shard the optimizer state over the data-parallel ranks.")
    dtype: str = key("bf16", "Parameters and activations; gradients and optimizer stay fp32.", ("fp32", "bf16"))
    micro_batch_size: int | None = key(None, "Sequences per micro-batch; null = as many as the token budget admits.")
    max_tokens_per_gpu: int = key(16384, "Padded tokens in one micro-batch.")
    recompute_granularity: str | None = key(None, "Activation recompute; full = every layer.", (None, "full"))
    lr: float = key(1e-6, "Peak learning rate.")
    min_lr: float = key(0.0, "Learning rate at the end of the decay.")
    lr_decay_style: str = key("constant", "Shape of the decay.", ("constant", "linear", "cosine"))
    lr_warmup_steps: int = key(0, "Steps of linear warm-up.")
    weight_decay: float = key(0.01, "Decoupled weight decay.")
    adam_beta1: float = key(0.9, "Adam's first-moment decay.")
    adam_beta2: float = key(0.999, "Adam's second-moment decay.")
    adam_eps: float = key(1e-8, "Adam's epsilon.")
    clip_grad: float = key(1.0, "Global gradient norm is clipped to this; 0 = off.")

    @property
    def replica_size(self) -> int:
        """Ranks of one training replica."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(frozen=True)
class TrainerConfig:
    """The run: its length, seed, device and files."""

    total_epochs: int = key(1, "Passes over the prompts.")
    total_training_steps: int | None = key(None, "Hard cap on steps; overrides total_epochs.")
    default_local_dir: str = key(
        "outputs/run", "Run directory; an earlier run there is gone on with (resume_mode), or else moved aside."
    )
    rollout_data_dir: str | None = key(None, "Dump each round's samples here, for rollout.replay.")
    save_freq: int = key(
        -1,
        "Save a checkpoint every so many steps and at the end, where the model is exported, too; -1 = at the end only, 0 = "
        "never. A run that is stopped by a signal saves in any case.",
    )
    keep_last: int | None = key(None, "Checkpoints to keep, the newest ones; null = all. Exported models stay.")
    resume_mode: str = key(
        "auto",
        "auto = go on from the newest whole checkpoint in the run directory, if there is one; disable = start anew; "
        "resume_path = start in a new run directory from resume_from_path.",
        ("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(None, "resume_path: a folder checkpoints/step_N of another run.")
    save_deadline: float = key(
        120.0,
        "Seconds before the end of the job's time (SLURM_JOB_END_TIME, where it is set) at which the run is stopped and "
        "saved; no step is begun that would not end before.",
    )
    test_freq: int = key(-1, "Validate on data.val_files every so many steps and at the end; -1 and 0 = never.")
    val_before_train: bool = key(True, "Validate once more before the first step, where data.val_files are given.")
    validation_data_dir: str | None = key(None, "Dump each validation's responses here, one .jsonl per validation.")
    logger: list[str] = key(["console", "tensorboard"], "Where metrics go besides metrics.jsonl.")
    wandb_mode: str = key(
        "online",
        "offline = only to files in the run directory, for `wandb sync`; so, too, where no server answers at the start.",
        ("online", "offline"),
    )
    project_name: str = key("rollpacker", "Project of the run, shown at its start and given to wandb.")
    experiment_name: str = key("run", "Name of the run, shown at its start and given to wandb.")
    seed: int = key(0, "Seed of everything that is drawn.")
    deterministic: bool = key(False, "Virtual time, fixed quanta: the same metrics twice for the same seed.")
    device: str = key("auto", "What the ranks run on.", ("auto", "cpu", "cuda"))
    nnodes: int | None = key(
        None, "Nodes of the job, checked at start; with --dry-run on one rank, the job to plan for."
    )
    n_gpus_per_node: int | None = key(None, "Ranks per node, likewise; a tensor-parallel group never crosses a node.")
    gpu_memory_gib: float | None = key(None, "Memory of a GPU, in GiB, to plan with; null = what the GPU has, else 79.")
    stall_timeout_s: float = key(
        1200.0,
        "Nothing happens on any rank for so long (no token, no reward, no new stage): every rank writes its stacks to stall/ "
        "in the run directory, and the job ends with the name of the suspect.",
    )
    collective_timeout_s: float = key(1800.0, "A collective that waits longer ends the job.")


@dataclass(frozen=True)
class ProfilerConfig:
    """What is recorded for profilers."""

    trace: bool = key(True, "Write events.trace.json (open it in Perfetto).")
    nvtx: bool = key(False, "Mark stages with NVTX ranges for Nsight Systems (CUDA only).")
    tool: str = key(
        "none",
        "Profile the steps below: nsys = open its capture range (start the job under nsys profile), torch = write a "
        "torch.profiler trace to torch_profile/ in the run directory.",
        ("none", "nsys", "torch"),
    )
    steps: list[int] = key([], "Steps to profile, counted from 1.")
    ranks: list[int] = key([], "Ranks that profile; empty = all.")


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def rollout_dtype(self) -> str:
        """Of the engine's weights and activations: fp32 or bf16."""
        return self.training.dtype if self.rollout.dtype == "auto" else self.rollout.dtype


def every_key(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Each key's dotted name, its field and its type, in the order of declaration, however deep it stands."""
    hints = typing.get_type_hints(cls)
    for declared in dataclasses.fields(cls):
        hint = hints[declared.name]
        if dataclasses.is_dataclass(hint):
            yield from every_key(typing.cast(type, hint), f"{prefix}{declared.name}.")
        else:
            yield f"{prefix}{declared.name}", declared, hint
