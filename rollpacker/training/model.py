"""The Megatron-core model of this rank: parallel groups, GPTModel, DDP. The only owner of Megatron's parallel state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rollpacker.comm.groups import ParallelRanks
from rollpacker.config import TrainingConfig
from rollpacker.model_shape import ModelShape
from rollpacker.platform.device import Platform
from rollpacker.training.rope import llama3_inverse_frequencies

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def init_parallel_groups(training: TrainingConfig, platform: Platform, seed: int) -> ParallelRanks:
    """Create Megatron's process groups over the whole world."""
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    with platform.megatron_calls():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=training.tensor_model_parallel_size,
            pipeline_model_parallel_size=training.pipeline_model_parallel_size,
            order="tp-cp-ep-pp-dp",
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelRanks(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        dp_group=mpu.get_data_parallel_group(),
    )


def build_model(shape: ModelShape, training: TrainingConfig, platform: Platform, ranks: ParallelRanks) -> Any:
    """GPTModel of this stage, wrapped in Megatron's DDP with unscaled gradient sums (docs/design/001)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    module = build_module(shape, training, platform, ranks)
    with platform.megatron_calls():
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=training.use_distributed_optimizer,
        )
        return DistributedDataParallel(module.config, ddp, module)


def build_module(shape: ModelShape, training: TrainingConfig, platform: Platform, ranks: ParallelRanks) -> Any:
    """The bare GPTModel of this stage, without gradient buffers."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    with platform.megatron_calls():
        module = GPTModel(
            _transformer_config(shape, training, is_cpu=platform.name == "cpu"),
            _layer_spec(shape),
            vocab_size=shape.padded_vocab_size(ranks.tp_size),
            max_sequence_length=shape.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,  # type: ignore[arg-type]
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            pre_process=ranks.pp_rank == 0,
            post_process=ranks.is_last_stage,
        )
        if shape.rope_scaling is not None:
            module.rotary_pos_emb.inv_freq = llama3_inverse_frequencies(
                shape.head_dim, shape.rope_theta, shape.rope_scaling
            )
        return module.to(device=platform.device, dtype=_DTYPES[training.dtype])


def load_megatron_checkpoint(module: Any, folder: str, platform: Platform) -> None:
    """Fill this rank's shards from a Megatron distributed checkpoint that was written at any TP x PP. Collective.

    Raises Megatron's CheckpointingException if the checkpoint lacks a parameter of the model, or holds one more.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with platform.megatron_calls():
        loaded = dist_checkpointing.load(module.sharded_state_dict(), folder, strict=StrictHandling.RAISE_ALL)
        module.load_state_dict(loaded)


def _layer_spec(shape: ModelShape) -> Any:
    """Megatron's own layer with our core attention; transformer-engine's layer names its norms differently (layout)."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from rollpacker.training.attention import SdpaAttention

    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.has_qk_norm)
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _transformer_config(shape: ModelShape, training: TrainingConfig, *, is_cpu: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_bf16 = training.dtype == "bf16"
    recompute: dict[str, Any] = {}
    if training.recompute_granularity:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.has_qk_norm,  # also has Megatron sum their gradients over the TP group, which splits the heads
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=training.tensor_model_parallel_size,
        pipeline_model_parallel_size=training.pipeline_model_parallel_size,
        params_dtype=_DTYPES[training.dtype],
        pipeline_dtype=_DTYPES[training.dtype],
        bf16=is_bf16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron checks it for dense models too: allgather has no varying lengths
        calculate_per_token_loss=True,  # else DDP would pre-scale gradients by 1/DP
        use_cpu_initialization=is_cpu,
        # Every weight is imported, but Megatron marks the sharded ones (for the gradient norm) only where it initialises.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=None,  # the trainer finalizes once per optimizer step, not once per chunk
        **recompute,
    )
