"""What no machine could run: values out of range, keys that contradict each other, parallel sizes that do not fit."""

from __future__ import annotations

import functools
import math
from typing import Any

from rollpacker.config import Config, ConfigError

# Values below these bounds are mistakes wherever they stand; everything else is checked in `validate`.
_AT_LEAST: dict[str, float] = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "rollout.val_kwargs.n": 1,
    "rollout.val_kwargs.temperature": 0,
    "rollout.val_kwargs.top_k": -1,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.max_num_seqs": 1,
    "rollout.quantum_ms": 1,
    "rollout.n": 1,
    "rollout.top_k": -1,
    "rollout.weight_noise": 0,
    "weights.bucket_mib": 1,
    "weights.check_freq": 0,
    "tail_batching.eta_prompts": 1,
    "tail_batching.eta_responses": 1,
    "tail_batching.audit_fraction": 0,
    "reward.num_workers": 1,
    "reward.timeout_s": 0.01,
    "reward.min_timeout_s": 0.01,
    "reward.timeout_factor": 1,
    "algorithm.clip_ratio_low": 0,
    "algorithm.clip_ratio_high": 0,
    "algorithm.clip_ratio_c": 1,
    "algorithm.ppo_mini_batch_size": 1,
    "algorithm.ppo_epochs": 1,
    "algorithm.entropy_coeff": 0,
    "algorithm.kl_loss_coef": 0,
    "algorithm.kl_reward_coef": 0,
    "algorithm.overlong_buffer_len": 1,
    "algorithm.overlong_penalty_factor": 0,
    "algorithm.mismatch_cap": 1,
    "filter.max_launched_ratio": 1,
    "workload.num_prompts": 1,
    "workload.prompt_tokens": 1,
    "workload.median_tokens": 1,
    "workload.reward_s": 0,
    "workload.sigma_within": 0,
    "workload.sigma_between": 0,
    "cluster.step_overhead_ms": 0,
    "cluster.train_gpu_s_per_sample": 0,
    "rollout.kv_cache_gib": 1,
    "rollout.max_num_batched_tokens": 1,
    "training.weight_decay": 0,
    "training.adam_eps": 0,
    "training.tensor_model_parallel_size": 1,
    "training.pipeline_model_parallel_size": 1,
    "training.context_parallel_size": 1,
    "training.micro_batch_size": 1,
    "training.max_tokens_per_gpu": 1,
    "training.lr": 0,
    "training.min_lr": 0,
    "training.lr_warmup_steps": 0,
    "training.clip_grad": 0,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "trainer.save_freq": -1,
    "trainer.keep_last": 1,
    "trainer.save_deadline": 0,
    "trainer.test_freq": -1,
    "trainer.collective_timeout_s": 1,
    "trainer.stall_timeout_s": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.gpu_memory_gib": 1,
}
_LOGGERS = ("console", "tensorboard", "wandb")


def value_of(config: Config, dotted: str) -> Any:
    """The value of a key by its dotted name, `rollout.val_kwargs.n` for example."""
    return functools.reduce(getattr, dotted.split("."), config)


def validate(config: Config, prompts: str | None = "data.train_files") -> None:
    """Refuse what no machine could run: values out of range and keys that contradict each other.

    `prompts` is the key of the files that the command cannot do without, None where it needs none.
    """
    for dotted, bound in _AT_LEAST.items():
        value = value_of(config, dotted)
        if value is not None and value < bound:
            raise ConfigError(f"{dotted}={value}: must be at least {bound:g}.")
    if not config.model.path:
        raise ConfigError("model.path is not set: name the Hugging Face folder of the model to train.")
    if prompts is not None and not value_of(config, prompts):
        raise ConfigError(
            f"{prompts} is empty: name at least one .jsonl or .parquet file of prompts, {prompts}=[prompts.jsonl]."
        )
    _validate_domains(config.data.domains)
    _validate_shares(config)
    for logger in config.trainer.logger:
        if logger not in _LOGGERS:
            raise ConfigError(f"trainer.logger holds {logger!r}: known loggers are {', '.join(_LOGGERS)}.")
    _validate_sampling(config)
    _validate_batching(config)
    _validate_rollout_policies(config)
    _validate_profiler(config)
    _validate_algorithm(config)
    _validate_resume(config)


def _validate_domains(weights: dict[str, float]) -> None:
    for domain, weight in weights.items():
        if weight < 0:
            raise ConfigError(f"data.domains gives {domain!r} the weight {weight:g}: must be at least 0.")
    if weights and not any(weights.values()):
        raise ConfigError("data.domains gives every domain the weight 0: no prompt is left. Give one a weight above 0.")


def _validate_profiler(config: Config) -> None:
    profiler = config.profiler
    for dotted, values, least in (("profiler.steps", profiler.steps, 1), ("profiler.ranks", profiler.ranks, 0)):
        if any(value < least for value in values):
            raise ConfigError(f"{dotted}={values}: must be at least {least}.")
    if (profiler.tool != "none") != bool(profiler.steps):
        raise ConfigError(
            f"profiler.tool={profiler.tool} with profiler.steps={profiler.steps}: a tool needs the steps to profile, and "
            "steps need a tool; set both, such as profiler.tool=torch profiler.steps=[2,3], or neither."
        )


def _validate_shares(config: Config) -> None:
    for dotted in (
        "tail_batching.audit_fraction",
        "workload.hard_share",
        "workload.hard_cap_probability",
        "workload.accuracy",
        "cluster.train_mfu",
    ):
        value = value_of(config, dotted)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{dotted}={value:g}: must be a share, 0 to 1.")
    if config.cluster.train_mfu == 0:
        raise ConfigError("cluster.train_mfu=0: must be above 0, or training would never end.")


def _validate_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature={rollout.temperature:g}: must be above 0. Greedy responses are all alike, so a "
            "group has no advantage to learn from; use a temperature near 1."
        )
    if rollout.val_kwargs.n > 1 and rollout.val_kwargs.temperature == 0:
        raise ConfigError(
            f"rollout.val_kwargs.n={rollout.val_kwargs.n} with temperature=0: greedy responses are all alike, so more "
            "than one says nothing new. Set rollout.val_kwargs.temperature above 0, or n=1."
        )
    for dotted, value in (
        ("rollout.top_p", rollout.top_p),
        ("rollout.val_kwargs.top_p", rollout.val_kwargs.top_p),
        ("rollout.gpu_memory_utilization", rollout.gpu_memory_utilization),
    ):
        if not 0 < value <= 1:
            raise ConfigError(f"{dotted}={value:g}: must be above 0 and at most 1.")
    if (rollout.top_p < 1 or rollout.top_k > 0) and config.algorithm.mismatch_correction == "none":
        raise ConfigError(
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: truncated sampling draws from another law "
            "than the one trained. Set algorithm.mismatch_correction=tis (or mis), or top_p=1 and top_k=-1."
        )
    if config.rollout.n < 2 and config.algorithm.adv_estimator != "reinforce_plus_plus":
        raise ConfigError(
            f"rollout.n={rollout.n} with algorithm.adv_estimator={config.algorithm.adv_estimator}: a group of one "
            "has no advantage (it is compared with itself); set rollout.n to 2 or more."
        )


def _validate_batching(config: Config) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    if config.training.max_tokens_per_gpu < longest:
        raise ConfigError(
            f"training.max_tokens_per_gpu={config.training.max_tokens_per_gpu} is below data.max_prompt_length + "
            f"data.max_response_length = {config.data.max_prompt_length} + {config.data.max_response_length} = "
            f"{longest}: one full sequence would not fit a micro-batch. Raise it, or lower the lengths."
        )
    if config.training.context_parallel_size > 1 and longest % (2 * config.training.context_parallel_size):
        raise ConfigError(
            f"training.context_parallel_size={config.training.context_parallel_size} cuts a sequence into "
            f"{2 * config.training.context_parallel_size} equal pieces (two for each rank, so that all have the same work "
            f"under a causal mask), but data.max_prompt_length + data.max_response_length = {longest} is not a multiple "
            "of that. Change one of the lengths."
        )
    if config.training.sequence_parallel:
        raise ConfigError("training.sequence_parallel=true is not in this version; set it to false.")
    if config.training.min_lr > config.training.lr:
        raise ConfigError(f"training.min_lr={config.training.min_lr:g} is above training.lr={config.training.lr:g}.")


def _validate_rollout_policies(config: Config) -> None:
    planner, reward, stream = config.planner, config.reward, config.stream
    if (planner.policy == "schedule") != bool(planner.schedule) or any(size < 1 for size in planner.schedule):
        raise ConfigError(
            f"planner.policy={planner.policy} with planner.schedule={planner.schedule}: a schedule is a list of "
            "tensor-parallel sizes from 1 on, such as planner.policy=schedule planner.schedule=[1,2,1], and no other "
            "policy reads one."
        )
    if reward.adaptive_timeout and reward.min_timeout_s > reward.timeout_s:
        raise ConfigError(
            f"reward.min_timeout_s={reward.min_timeout_s:g} is above reward.timeout_s={reward.timeout_s:g}, the highest "
            "limit. Lower it, or raise the other."
        )
    if stream.scale_down_at is not None and not 0 < stream.scale_down_at < 1:
        raise ConfigError(f"stream.scale_down_at={stream.scale_down_at:g}: must be a share between 0 and 1, or null.")
    if config.rollout.routing == "isolate_tail" and config.tail_batching.mode != "off":
        raise ConfigError(
            f"rollout.routing=isolate_tail with tail_batching.mode={config.tail_batching.mode}: a race ends what that "
            "routing sets apart. Use one of them."
        )


def _validate_algorithm(config: Config) -> None:
    algorithm, data = config.algorithm, config.data
    if (algorithm.ppo_mini_batch_size or 1) > data.train_batch_size:
        raise ConfigError(
            f"algorithm.ppo_mini_batch_size={algorithm.ppo_mini_batch_size} is above data.train_batch_size="
            f"{data.train_batch_size}: a step has no more prompts than that. Lower it, or leave it null."
        )
    if algorithm.overlong == "soft_penalty" and algorithm.overlong_buffer_len > data.max_response_length:
        raise ConfigError(
            f"algorithm.overlong_buffer_len={algorithm.overlong_buffer_len} is above data.max_response_length="
            f"{data.max_response_length}: even an empty response would be punished. Lower it."
        )
    if config.reward.on_error == "drop_group" and config.tail_batching.mode == "off":
        raise ConfigError(
            "reward.on_error=drop_group with tail_batching.mode=off: a plain round trains every group. Set "
            "reward.on_error=score_zero, or tail_batching.mode=paper."
        )
    if config.filter.mode != "off" and config.rollout.n < 2:
        raise ConfigError(
            f"filter.mode={config.filter.mode} with rollout.n={config.rollout.n}: the scores of a group of one are always "
            "equal, so every group would be replaced. Set rollout.n to 2 or more, or filter.mode=off."
        )
    if config.filter.mode != "off" and algorithm.adv_estimator == "reinforce_plus_plus":
        raise ConfigError(
            f"filter.mode={config.filter.mode} with algorithm.adv_estimator=reinforce_plus_plus: that estimator compares "
            "with the whole step, so a group whose scores are all equal still teaches. Set filter.mode=off."
        )
    decays = config.training.lr_decay_style != "constant" or config.training.lr_warmup_steps
    if config.filter.mode != "off" and decays and config.trainer.total_training_steps is None:
        raise ConfigError(
            f"training.lr_decay_style={config.training.lr_decay_style}, lr_warmup_steps={config.training.lr_warmup_steps} "
            f"with filter.mode={config.filter.mode}: how many steps the prompts last is not known, so the schedule has no "
            "end. Set trainer.total_training_steps, or a constant rate without warm-up."
        )
    if config.model.reference_path is not None and not algorithm.needs_reference:
        raise ConfigError(
            f"model.reference_path={config.model.reference_path} has no use: nothing refers to it. Set "
            "algorithm.use_kl_loss or use_kl_in_reward, or leave it null."
        )
    if data.train_batch_size % (algorithm.ppo_mini_batch_size or data.train_batch_size):
        raise ConfigError(
            f"algorithm.ppo_mini_batch_size={algorithm.ppo_mini_batch_size} does not divide data.train_batch_size="
            f"{data.train_batch_size}: a small last mini-batch would move the policy as far as the others. Use a divisor."
        )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config.training, name) < 1:
            raise ConfigError(f"training.{name}={getattr(config.training, name):g}: must be at least 0 and below 1.")
    if (config.trainer.nnodes is None) != (config.trainer.n_gpus_per_node is None) and config.trainer.nnodes:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} without trainer.n_gpus_per_node says no size of the job: set both."
        )


def _validate_resume(config: Config) -> None:
    trainer = config.trainer
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        raise ConfigError(
            f"trainer.resume_mode={trainer.resume_mode} with trainer.resume_from_path={trainer.resume_from_path}: the path "
            "of a checkpoint goes with resume_mode=resume_path, and with no other. Set both, or leave the path null."
        )


def job_size(config: Config, num_ranks: int, *, is_dry_run: bool) -> int:
    """Ranks to check the config for: those of this job, or for a dry run on one rank those that it plans.

    Refuses a job that is not of the planned size.
    """
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes is None or per_node is None or nodes * per_node == num_ranks:
        return num_ranks
    if is_dry_run and num_ranks == 1:
        return nodes * per_node
    cause = (
        "Every rank seems to be alone in a world of its own: srun without --mpi=pmix, or an mpirun that belongs to "
        "another MPI than mpi4py was built for. Fix the launch, or set both keys to null for a job of one rank."
        if num_ranks == 1
        else f"Start {nodes * per_node} ranks, one for each GPU, or change the keys to the job you want."
    )
    raise ConfigError(
        f"trainer.nnodes x trainer.n_gpus_per_node = {nodes} x {per_node} = {nodes * per_node}, but this MPI world has "
        f"{num_ranks} rank(s). {cause}"
    )


def missing_features(config: Config) -> list[str]:
    """What the config asks for and this version does not have, a paragraph each; a dry run checks all the rest."""
    missing = []
    if config.training.context_parallel_size > 1:
        missing.append(
            f"training.context_parallel_size={config.training.context_parallel_size}: this version trains with 1; a dry "
            "run checks the shape and the memory of more. Set it to 1, and raise training.tensor_model_parallel_size or "
            "training.pipeline_model_parallel_size if the activations then do not fit."
        )
    simulated = {
        "planner.policy": (config.planner.policy, "fixed"),
        "stream.enabled": (config.stream.enabled, "off"),
        "rollout.routing": (config.rollout.routing, "even"),
        "reward.adaptive_timeout": (config.reward.adaptive_timeout, False),
    }
    for dotted, (value, built) in simulated.items():
        if value != built:
            missing.append(
                f"{dotted}={str(value).lower()}: this version trains with {str(built).lower()}; `rollpacker simulate` "
                "shows what it would do."
            )
    return missing


def check_parallel_shape(config: Config, world_size: int) -> None:
    """Refuse parallel sizes that do not tile `world_size` ranks, with the equation that fails."""
    training, rollout = config.training, config.rollout
    sizes = {
        "training.tensor_model_parallel_size": training.tensor_model_parallel_size,
        "pipeline_model_parallel_size": training.pipeline_model_parallel_size,
    }
    if training.context_parallel_size > 1:
        sizes["context_parallel_size"] = training.context_parallel_size
    model_ranks = math.prod(sizes.values())
    equation = f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))} = {model_ranks}"
    if world_size % model_ranks:
        raise ConfigError(
            f"{equation} does not divide the {world_size} rank(s) of this job. Start the job with a multiple of "
            f"{model_ranks} ranks (mpirun -n {model_ranks} ...), or lower the training sizes."
        )
    if world_size % rollout.tensor_model_parallel_size:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide the {world_size} "
            f"rank(s) of this job. Start it with a multiple of {rollout.tensor_model_parallel_size} ranks, or lower it."
        )
    per_node = config.trainer.n_gpus_per_node
    for section, size in (
        ("training", training.tensor_model_parallel_size),
        ("rollout", rollout.tensor_model_parallel_size),
    ):
        if per_node is not None and per_node % size:
            raise ConfigError(
                f"{section}.tensor_model_parallel_size={size} does not divide trainer.n_gpus_per_node={per_node}: a "
                "tensor-parallel group would cross nodes, where each of its all-reduces is many times as slow. Use a "
                f"divisor of {per_node}."
            )
