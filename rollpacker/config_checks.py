"""What no machine could run: values out of range, keys that contradict each other, parallel sizes that do not fit."""

from __future__ import annotations

from rollpacker.config import Config, ConfigError

# Values below these bounds are mistakes wherever they stand; everything else is checked in `validate`.
_AT_LEAST: dict[str, float] = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.max_num_seqs": 1,
    "rollout.quantum_ms": 1,
    "rollout.weight_noise": 0,
    "reward.num_workers": 1,
    "reward.timeout_s": 0.01,
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
    "rollout.kv_cache_gib": 1,
    "rollout.max_num_batched_tokens": 1,
    "training.weight_decay": 0,
    "training.adam_eps": 0,
    "training.tensor_model_parallel_size": 1,
    "training.pipeline_model_parallel_size": 1,
    "training.micro_batch_size": 1,
    "training.max_tokens_per_gpu": 1,
    "training.lr": 0,
    "training.min_lr": 0,
    "training.lr_warmup_steps": 0,
    "training.clip_grad": 0,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "trainer.save_freq": -1,
    "trainer.collective_timeout_s": 1,
}
_LOGGERS = ("console", "tensorboard")


def validate(config: Config) -> None:
    """Refuse what no machine could run: values out of range and keys that contradict each other."""
    for dotted, bound in _AT_LEAST.items():
        section, leaf = dotted.split(".")
        value = getattr(getattr(config, section), leaf)
        if value is not None and value < bound:
            raise ConfigError(f"{dotted}={value}: must be at least {bound:g}.")
    if not config.model.path:
        raise ConfigError("model.path is not set: name the Hugging Face folder of the model to train.")
    if not config.data.train_files:
        raise ConfigError("data.train_files is empty: name at least one .jsonl file of prompts.")
    for logger in config.trainer.logger:
        if logger not in _LOGGERS:
            raise ConfigError(f"trainer.logger holds {logger!r}: known loggers are {', '.join(_LOGGERS)}.")
    _validate_sampling(config)
    _validate_batching(config)
    _validate_profiler(config)
    _validate_algorithm(config)


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


def _validate_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature={rollout.temperature:g}: must be above 0. Greedy responses are all alike, so a "
            "group has no advantage to learn from; use a temperature near 1."
        )
    for dotted, value in (
        ("rollout.top_p", rollout.top_p),
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
    if config.training.sequence_parallel:
        raise ConfigError("training.sequence_parallel=true is not in this version; set it to false.")
    if config.training.min_lr > config.training.lr:
        raise ConfigError(f"training.min_lr={config.training.min_lr:g} is above training.lr={config.training.lr:g}.")


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
    if config.filter.mode != "off" and config.rollout.n < 2:
        raise ConfigError(
            f"filter.mode={config.filter.mode} with rollout.n={config.rollout.n}: the scores of a group of one are always "
            "equal, so every group would be replaced. Set rollout.n to 2 or more, or filter.mode=off."
        )


def check_parallel_shape(config: Config, world_size: int) -> None:
    """Refuse parallel sizes that do not tile `world_size` ranks, with the equation that fails."""
    training, rollout = config.training, config.rollout
    model_ranks = training.tensor_model_parallel_size * training.pipeline_model_parallel_size
    equation = (
        f"training.tensor_model_parallel_size x pipeline_model_parallel_size = "
        f"{training.tensor_model_parallel_size} x {training.pipeline_model_parallel_size} = {model_ranks}"
    )
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
