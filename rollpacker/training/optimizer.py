"""Megatron's Adam (plain or distributed) and learning-rate schedule for a DDP-wrapped model."""

from __future__ import annotations

from typing import Any

import torch

from rollpacker.config import TrainingConfig
from rollpacker.platform.device import Platform


def build_optimizer(model: Any, training: TrainingConfig, platform: Platform) -> Any:
    """Adam with decoupled weight decay; its state is sharded over data-parallel ranks with the DistributedOptimizer."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_bf16 = training.dtype == "bf16"
    with platform.megatron_calls():
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=training.lr,
                min_lr=training.min_lr,
                weight_decay=training.weight_decay,
                adam_beta1=training.adam_beta1,
                adam_beta2=training.adam_beta2,
                adam_eps=training.adam_eps,
                bf16=is_bf16,
                params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
                use_distributed_optimizer=training.use_distributed_optimizer,
                clip_grad=training.clip_grad,
            ),
            [model],
        )


def build_lr_schedule(optimizer: Any, training: TrainingConfig, total_steps: int) -> Any:
    """Linear warm-up, then the decay over the run's steps (one rollout and its updates each)."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.lr_warmup_steps,
        lr_decay_steps=total_steps,
        lr_decay_style=training.lr_decay_style,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
