"""The memory estimate against arithmetic done by hand, and what must hold for any shape."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import Config, DataConfig, RolloutConfig, TrainingConfig
from rollpacker.memory_estimate import (
    CUDA_GRAPHS_BYTES,
    GIB,
    RUNTIME_BYTES,
    MemoryEstimate,
    activation_bytes,
    engine_weights_bytes,
    estimate_memory,
    layer_backward_bytes,
    layer_bytes,
    loss_bytes,
    micro_batch_tokens,
    parameter_sizes,
    trainer_state,
)
from rollpacker.model_shape import ModelShape, read_model_shape

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen import write_qwen_folder

# Parameters of Qwen2.5-7B by hand: attention 2 x 3584 x 3584 + 2 x 512 x 3584 + 3584 + 2 x 512 = 29,364,736; MLP
# 3 x 3584 x 18944 = 203,685,888; norms 7168; 28 such layers, 2 x 152064 x 3584 = 1,089,994,752 and one norm of 3584.
QWEN_7B = 28 * (29_364_736 + 203_685_888 + 7_168) + 1_089_994_752 + 3_584


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelShape]:
    root = tmp_path_factory.mktemp("models")
    return {name: read_model_shape(str(write_qwen_folder(root / name, name))) for name in ("7B", "14B", "32B")}


def config(tp: int = 2, pp: int = 1, cp: int = 1, rollout: dict[str, Any] | None = None, **training: Any) -> Config:
    """The shipped 7B config's lengths, one full sequence in a micro-batch, full recompute."""
    training = {"recompute_granularity": "full", "max_tokens_per_gpu": 9216, **training}
    return Config(
        data=DataConfig(max_prompt_length=1024, max_response_length=8192),
        rollout=RolloutConfig(**rollout or {}),
        training=TrainingConfig(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp, **training
        ),
    )


def test_parameters_add_up_to_the_model(shapes: dict[str, ModelShape]) -> None:
    assert shapes["7B"].num_parameters() == QWEN_7B == 7_615_616_512
    for shape in shapes.values():
        stages = [sum(parameter_sizes(shape, config(tp=1, pp=2).training, stage)) for stage in (0, 1)]
        assert sum(stages) == shape.num_parameters()
        assert stages[1] - stages[0] == shape.hidden_size  # the final norm: embedding and head are of one size


def test_a_tied_head_on_another_stage_is_a_second_embedding(shapes: dict[str, ModelShape]) -> None:
    tied = dataclasses.replace(shapes["7B"], tie_word_embeddings=True)
    assert sum(parameter_sizes(tied, config(tp=1).training, 0)) == tied.num_parameters()
    stages = [sum(parameter_sizes(tied, config(tp=1, pp=2).training, stage)) for stage in (0, 1)]
    assert sum(stages) == tied.num_parameters() + 152_064 * 3_584


def test_the_trainers_state_by_hand(shapes: dict[str, ModelShape]) -> None:
    """7B, TP 2, 8 replicas. Norms, 28 x 7168 + 3584 = 204,288 elements, are on both ranks, the rest on one of them."""
    elements = (QWEN_7B - 204_288) // 2 + 204_288
    assert elements == 3_807_910_400 == 29_749_300 * 128  # no padding
    state = trainer_state(shapes["7B"], config().training, 16, 0)
    assert state.weights_bytes == 2 * elements
    assert state.gradients_bytes == 4 * elements
    assert state.optimizer_bytes == 12 * elements // 8
    fp32 = trainer_state(shapes["7B"], config(dtype="fp32").training, 16, 0)
    assert (fp32.weights_bytes, fp32.optimizer_bytes) == (4 * elements, 8 * elements // 8)
    plain = trainer_state(shapes["7B"], config(use_distributed_optimizer=False).training, 16, 0)
    assert plain.optimizer_bytes == 12 * elements


def test_context_parallel_ranks_share_the_optimizer(shapes: dict[str, ModelShape]) -> None:
    """32B, TP 4, CP 4, 64 ranks: 16 ranks hold the same weights."""
    state = trainer_state(shapes["32B"], config(tp=4, cp=4).training, 64, 0)
    assert state.optimizer_bytes * 16 == state.gradients_bytes * 3


def test_buffers_are_padded_by_hand(shapes: dict[str, ModelShape]) -> None:
    """One layer, hidden 32, vocabulary 37, 3 replicas: parameters start at multiples of 64, the buffer ends at one of 384."""
    tiny = dataclasses.replace(
        shapes["7B"], num_layers=1, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_kv_heads=2,
        head_dim=8, vocab_size=37, tie_word_embeddings=True,
    )  # fmt: skip
    sizes = [32, 32, 64 * 32, 64, 32 * 32, 96 * 32, 48 * 32, 32, 37 * 32]
    assert sorted(parameter_sizes(tiny, config(tp=1).training, 0)) == sorted(sizes)
    padded = 64 + 64 + 2048 + 64 + 1024 + 3072 + 1536 + 64 + 1216  # 37 x 32 = 1184
    assert padded == 9152 and 24 * 384 == 9216
    assert trainer_state(tiny, config(tp=1).training, 3, 0).gradients_bytes == 4 * 9216


def test_activations_by_hand(shapes: dict[str, ModelShape]) -> None:
    """7B, TP 2, bf16, elements of a token in a layer: 4 x 3584 for the norms; 4608/2 QKV; (3584 + 512)/2 rotated q and k;
    4 x 128 cosines and sines; 3584/2 attention's output; 5 x 18944/2 in the MLP; 28/2 fp32 sums of the softmax."""
    training = config().training
    elements = 14_336 + 2_304 + 2_048 + 512 + 1_792 + 47_360
    assert layer_bytes(shapes["7B"], training, 1) == 2 * elements + 4 * 14
    assert layer_backward_bytes(shapes["7B"], training, 1) == 2 * (18_944 + 2 * 3_584)
    # The loss: 76,032 of 152,064 columns in bf16 and in fp32, and in fp32 the entropy's chunks or the gradient; final norm.
    assert loss_bytes(shapes["7B"], training, 1) == 76_032 * (2 + 4 + 8) + 2 * 3_584 * 2
    assert loss_bytes(shapes["7B"], training, 9_216) == 9_216 * (76_032 * (2 + 4 + 4) + 2 * 3_584 * 2)
    # With recompute 28 layer inputs of 9216 tokens; without, 28 layers in full.
    assert activation_bytes(config(), shapes["7B"], 0) == 28 * 9_216 * 3_584 * 2
    assert activation_bytes(config(recompute_granularity=None), shapes["7B"], 0) == 28 * 9_216 * (2 * elements + 56)
    # Two stages of 14 layers: the first holds two micro-batches, each with the output it sent on.
    assert activation_bytes(config(pp=2), shapes["7B"], 0) == 2 * (14 + 1) * 9_216 * 3_584 * 2
    assert activation_bytes(config(pp=2), shapes["7B"], 1) == 14 * 9_216 * 3_584 * 2


def test_micro_batches(shapes: dict[str, ModelShape]) -> None:
    assert micro_batch_tokens(config(max_tokens_per_gpu=20_000)) == 20_000
    assert micro_batch_tokens(config(max_tokens_per_gpu=20_000, micro_batch_size=1)) == 9_216
    assert micro_batch_tokens(config(max_tokens_per_gpu=20_001, cp=2)) == 10_001


def test_the_engine_by_hand(shapes: dict[str, ModelShape]) -> None:
    """2 (keys and values) x layers x KV heads x 128 x 2 bytes; with more ranks than KV heads each rank keeps one."""

    def kv_bytes_per_token(name: str, **rollout: object) -> int:
        return estimate_memory(config(rollout=rollout), shapes[name], 56, 80.0).kv_cache.bytes_per_token

    assert kv_bytes_per_token("7B") == 57_344
    assert kv_bytes_per_token("14B") == 196_608
    assert kv_bytes_per_token("32B", tensor_model_parallel_size=2) == 262_144 // 2
    assert kv_bytes_per_token("7B", tensor_model_parallel_size=28) == 57_344 // 4
    assert kv_bytes_per_token("7B", dtype="fp32") == 2 * 57_344
    assert engine_weights_bytes(config(), shapes["7B"]) == 2 * QWEN_7B
    # Norms, 204,288 elements, are on every rank. One KV head copied to 4 ranks is as large as 4 KV heads cut in 4.
    quarter = 2 * ((QWEN_7B - 204_288) // 4 + 204_288)
    assert engine_weights_bytes(config(rollout={"tensor_model_parallel_size": 4}), shapes["7B"]) == quarter
    one_head = dataclasses.replace(shapes["7B"], num_kv_heads=1)
    assert engine_weights_bytes(config(rollout={"tensor_model_parallel_size": 4}), one_head) == quarter


def test_both_phases_by_hand(shapes: dict[str, ModelShape]) -> None:
    """7B on 16 GPUs of 80 GiB, half of each for the engine."""
    estimate = estimate_memory(config(rollout={"gpu_memory_utilization": 0.5}), shapes["7B"], 16, 80.0)
    elements = 3_807_910_400
    state = elements * (2 + 4) + elements * 12 // 8
    loss = 9_216 * (76_032 * 10 + 2 * 3_584 * 2)
    assert estimate.training.num_bytes == state + 28 * 9_216 * 3_584 * 2 + loss + CUDA_GRAPHS_BYTES + RUNTIME_BYTES
    # vLLM takes half of the GPU, whatever the trainer holds.
    assert estimate.rollout.num_bytes == state + 40 * GIB + RUNTIME_BYTES
    work = 16_384 * (3 * 18_944 + 2 * 3_584) * 2 + 4 * 256 * 152_064 * 4 + CUDA_GRAPHS_BYTES
    assert estimate.kv_cache.num_tokens == (40 * GIB - 2 * QWEN_7B - work) // 57_344
    assert estimate.kv_cache.num_full_sequences == estimate.kv_cache.num_tokens // 9_216 == 46
    assert estimate.kv_cache.num_requests == 128 * 8 // 16
    assert estimate.host_bytes == 2 * QWEN_7B


def test_adams_step_can_be_the_peak(shapes: dict[str, ModelShape]) -> None:
    """Short sequences on one replica: one fp32 number per element, when the activations are gone."""
    short = dataclasses.replace(
        config(max_tokens_per_gpu=128), data=DataConfig(max_prompt_length=64, max_response_length=64)
    )
    estimate = estimate_memory(short, shapes["7B"], 2, 80.0)
    assert estimate.training.bytes_of("Adam's step") == 4 * 3_807_910_400
    assert estimate.training.bytes_of("activations kept") == 0


def peaks(estimate: MemoryEstimate) -> tuple[int, int]:
    return estimate.training.num_bytes, estimate.rollout.num_bytes


@given(
    name=st.sampled_from(["7B", "14B", "32B"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4, 8]),
    recompute=st.sampled_from([None, "full"]),
    distributed=st.booleans(),
)
def test_more_ranks_never_need_more_memory(
    shapes: dict[str, ModelShape], name: str, tp: int, pp: int, dp: int, recompute: str | None, distributed: bool
) -> None:
    keys: dict[str, Any] = {"recompute_granularity": recompute, "use_distributed_optimizer": distributed}
    before = estimate_memory(config(tp, pp, **keys), shapes[name], tp * pp * dp, 80.0)
    after_dp = estimate_memory(config(tp, pp, **keys), shapes[name], 2 * tp * pp * dp, 80.0)
    after_cp = estimate_memory(config(tp, pp, 2, **keys), shapes[name], 2 * tp * pp * dp, 80.0)
    assert all(b <= a for a, b in zip(peaks(before), peaks(after_dp), strict=True))
    assert after_cp.training.num_bytes <= before.training.num_bytes
    assert 2 * activation_bytes(config(tp, pp, 2, **keys), shapes[name], 0) == activation_bytes(
        config(tp, pp, **keys), shapes[name], 0
    )
    if tp < 4:
        after_tp = estimate_memory(config(2 * tp, pp, **keys), shapes[name], 2 * tp * pp * dp, 80.0)
        assert all(b < a for a, b in zip(peaks(before), peaks(after_tp), strict=True))
    for phase in (before.training, before.rollout):
        assert all(part.num_bytes >= 0 for part in phase.parts)
        assert len({part.name for part in phase.parts}) == len(phase.parts)


@given(utilization=st.floats(0.3, 0.8), rollout_tp=st.sampled_from([1, 2, 4]))
def test_the_engine_takes_its_share_and_no_more(
    shapes: dict[str, ModelShape], utilization: float, rollout_tp: int
) -> None:
    def estimate(utilization: float) -> MemoryEstimate:
        rollout = {"tensor_model_parallel_size": rollout_tp, "gpu_memory_utilization": utilization}
        return estimate_memory(config(rollout=rollout), shapes["7B"], 16, 80.0)

    small, large = estimate(utilization), estimate(utilization + 0.1)
    assert large.kv_cache.num_tokens > small.kv_cache.num_tokens
    assert large.training.num_bytes == small.training.num_bytes
    engine = sum(part.num_bytes for part in small.rollout.parts if part.name.startswith("engine"))
    assert engine == int(utilization * 80 * GIB)
