"""What a model folder must hold, and what a user reads when it does not. The folders here hold only a config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollpacker.config import Config, ConfigError, DataConfig, ModelConfig, RolloutConfig, TrainingConfig
from rollpacker.model_shape import Llama3RopeScaling, ModelShape, check_model_shape, read_model_shape

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 180,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 99,
}
REQUIRED_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM",
    num_layers=6,
    hidden_size=96,
    ffn_hidden_size=180,
    num_attention_heads=12,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=99,
    max_position_embeddings=512,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    has_qkv_bias=True,
)
QWEN3 = QWEN | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
LLAMA = {k: v for k, v in QWEN.items() if k != "use_sliding_window"} | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA3_ROPE = {  # Llama 3.2
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_folder(folder: Path, config_json: dict[str, Any] | str | bytes = QWEN) -> str:
    """A model folder as far as this module looks: config.json, and a file with the name of the weights."""
    if isinstance(config_json, dict):
        config_json = json.dumps(config_json)
    if isinstance(config_json, str):
        config_json = config_json.encode()
    (folder / "config.json").write_bytes(config_json)
    (folder / "model.safetensors").touch()
    return str(folder)


def without(*keys: str) -> dict[str, Any]:
    return {k: v for k, v in QWEN.items() if k not in keys}


def refusal(model_path: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_model_shape(model_path)
    return str(error.value)


def test_a_config_json_is_read(tmp_path: Path) -> None:
    assert read_model_shape(write_folder(tmp_path)) == SHAPE


@pytest.mark.parametrize(
    ("config_json", "expected"),
    [
        (without("num_key_value_heads"), {"num_kv_heads": 12}),
        (QWEN | {"num_key_value_heads": None}, {"num_kv_heads": 12}),
        (QWEN | {"head_dim": None}, {"head_dim": 8}),
        (without("tie_word_embeddings"), {"tie_word_embeddings": False}),
        (without("rope_theta"), {"rope_theta": 10000.0}),
        (without("hidden_act", "use_sliding_window"), {}),
        (QWEN | {"rope_scaling": None}, {}),
        (QWEN | {"rope_scaling": {"type": "default"}}, {}),
        (without("rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
    ],
)
def test_what_may_be_left_out(tmp_path: Path, config_json: dict[str, Any], expected: dict[str, Any]) -> None:
    """Entries that Hugging Face may omit or rename (transformers 5 moves rope_theta into rope_parameters)."""
    assert read_model_shape(write_folder(tmp_path, config_json)) == replace(SHAPE, **expected)


@pytest.mark.parametrize(
    ("config_json", "expected"),
    [
        (QWEN3, {"head_dim": 128, "has_qk_norm": True}),  # transformers' Qwen3Config takes 128 where none is given
        (QWEN3 | {"head_dim": 16}, {"head_dim": 16, "has_qk_norm": True}),
        (LLAMA, {}),
        (LLAMA | {"head_dim": 16}, {"head_dim": 16}),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE}, {"rope_scaling": Llama3RopeScaling(32, 1, 4, 8192)}),
        (
            LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
            {"rope_scaling": Llama3RopeScaling(32, 1, 4, 8192), "rope_theta": 5e5},
        ),
    ],
)
def test_the_other_families(tmp_path: Path, config_json: dict[str, Any], expected: dict[str, Any]) -> None:
    (architecture,) = config_json["architectures"]
    base = replace(SHAPE, architecture=architecture, has_qkv_bias=False)
    assert read_model_shape(write_folder(tmp_path, config_json)) == replace(base, **expected)


@pytest.mark.parametrize(
    ("config_json", "message"),
    [
        (QWEN3 | {"attention_bias": True}, "attention_bias=true is not supported"),
        (QWEN3 | {"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        (LLAMA | {"attention_bias": True}, "attention_bias=true is not supported"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias=true is not supported"),
        (QWEN | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than full_attention"),
        (QWEN | {"head_dim": 16}, "head_dim=16 x num_attention_heads=12 is not hidden_size=96. vLLM takes"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "the entry low_freq_factor is missing"),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE | {"factor": "8"}}, "factor='8' is not a number above 0"),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "must be below high_freq_factor"),
        (QWEN | {"rope_scaling": LLAMA3_ROPE}, "Supported for Qwen2, Qwen2.5: rope_type default, over the whole head"),
        (LLAMA | {"rope_scaling": {"type": "dynamic"}}, "Supported for Llama 2 and 3, SmolLM2: rope_type default and"),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "over the whole head"),
    ],
)
def test_what_a_family_does_not_have(tmp_path: Path, config_json: dict[str, Any], message: str) -> None:
    text = refusal(write_folder(tmp_path, config_json))
    assert message in text
    assert text.startswith(str(tmp_path / "config.json"))


def test_a_folder_that_is_absent(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    text = refusal(str(missing))
    assert f"model.path={missing}: there is no such folder" in text
    assert "config.json, *.safetensors, tokenizer files" in text
    assert "make env" in text


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path)
    assert "there is no such folder" in refusal(str(tmp_path / "model.safetensors"))


def test_a_folder_without_config_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert refusal(str(tmp_path)) == (f"model.path={tmp_path}: not a Hugging Face model folder, it has no config.json.")


@pytest.mark.parametrize(
    ("content", "why"),
    [("{", "line 1 column 2"), ("", "line 1 column 1"), (b"\xff\xfe{}", "utf-8")],
    ids=["cut", "empty", "binary"],
)
def test_a_config_json_that_is_no_json(tmp_path: Path, content: str | bytes, why: str) -> None:
    text = refusal(write_folder(tmp_path, content))
    assert f"{tmp_path / 'config.json'} is not valid JSON: " in text
    assert why in text


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    text = refusal(str(tmp_path))
    assert text == f"model.path={tmp_path}: no *.safetensors file there; other weight formats are not read."


@pytest.mark.parametrize(
    ("config_json", "architecture"),
    [
        (QWEN | {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        (without("architectures"), "unknown"),
        (QWEN | {"architectures": []}, "unknown"),
        ("[1, 2]", "unknown"),
    ],
)
def test_another_architecture(tmp_path: Path, config_json: dict[str, Any] | str, architecture: str) -> None:
    text = refusal(write_folder(tmp_path, config_json))
    assert f"the architecture {architecture} is not supported. Supported: " in text
    for supported in ("Qwen2ForCausalLM (Qwen2, Qwen2.5)", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        assert supported in text
    assert str(tmp_path / "config.json") in text


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
    ],
)
def test_scaled_rope(tmp_path: Path, rope: dict[str, Any]) -> None:
    text = refusal(write_folder(tmp_path, QWEN | rope))
    (scaling,) = rope.values()
    assert f"RoPE scaling {scaling} is not supported." in text


def test_a_sliding_window(tmp_path: Path) -> None:
    text = refusal(write_folder(tmp_path, QWEN | {"use_sliding_window": True}))
    assert text == f"{tmp_path / 'config.json'}: use_sliding_window=true is not supported."


def test_another_activation(tmp_path: Path) -> None:
    text = refusal(write_folder(tmp_path, QWEN | {"hidden_act": "gelu"}))
    assert "hidden_act=gelu is not supported; only silu (SwiGLU) is." in text


@pytest.mark.parametrize("key", REQUIRED_NUMBERS)
def test_a_number_that_is_missing(tmp_path: Path, key: str) -> None:
    text = refusal(write_folder(tmp_path, without(key)))
    assert text == f"{tmp_path / 'config.json'}: the entry {key} is missing."


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "wide"), ("head_dim", -1), ("num_hidden_layers", [6]), ("rms_norm_eps", "1e")],
)
def test_an_entry_that_is_no_number(tmp_path: Path, key: str, value: object) -> None:
    """The text names the entry: "invalid literal for int()" alone sends a user nowhere."""
    text = refusal(write_folder(tmp_path, QWEN | {key: value}))
    assert "not a number" in text
    assert key in text


def test_zero_heads(tmp_path: Path) -> None:
    """A user's mistake is a ConfigError, never a ZeroDivisionError with a traceback."""
    assert "num_attention_heads" in refusal(write_folder(tmp_path, QWEN | {"num_attention_heads": 0}))


def config(
    *,
    training_tp: int = 1,
    training_pp: int = 1,
    rollout_tp: int = 1,
    max_prompt_length: int = 100,
    max_response_length: int = 412,
) -> Config:
    return Config(
        model=ModelConfig(path="models/qwen"),
        data=DataConfig(max_prompt_length=max_prompt_length, max_response_length=max_response_length),
        rollout=RolloutConfig(tensor_model_parallel_size=rollout_tp),
        training=TrainingConfig(tensor_model_parallel_size=training_tp, pipeline_model_parallel_size=training_pp),
    )


@pytest.mark.parametrize(
    ("training_tp", "training_pp", "rollout_tp"), [(1, 1, 1), (2, 3, 4), (4, 6, 12), (4, 2, 2), (1, 1, 4)]
)
def test_shapes_that_fit(training_tp: int, training_pp: int, rollout_tp: int) -> None:
    """Rollout TP 12 over 4 KV heads is fine: vLLM copies each of them to 3 ranks."""
    check_model_shape(config(training_tp=training_tp, training_pp=training_pp, rollout_tp=rollout_tp), SHAPE)


@pytest.mark.parametrize(
    ("sizes", "shape", "key", "equation"),
    [
        ({"training_tp": 5}, SHAPE, "training.tensor", "=5 does not divide num_attention_heads=12|(12 / 5 = 2.40)"),
        ({"training_tp": 3}, SHAPE, "training.tensor", "=3 does not divide num_key_value_heads=4|(4 / 3 = 1.33)"),
        (
            {"training_tp": 4},
            replace(SHAPE, ffn_hidden_size=182),
            "training.tensor",
            "=4 does not divide intermediate_size=182|(182 / 4 = 45.50)",
        ),
        ({"training_pp": 4}, SHAPE, "training.pipeline", "=4 does not divide num_hidden_layers=6|(6 / 4 = 1.50)"),
        ({"training_pp": 12}, SHAPE, "training.pipeline", "=12 does not divide num_hidden_layers=6|(6 / 12 = 0.50)"),
        ({"rollout_tp": 8}, SHAPE, "rollout.tensor", "=8 does not divide num_attention_heads=12|(12 / 8 = 1.50)"),
    ],
)
def test_sizes_that_do_not_divide_come_with_their_equation(
    sizes: dict[str, int], shape: ModelShape, key: str, equation: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_model_shape(config(**sizes), shape)
    text = str(error.value)
    division, quotient = equation.split("|")
    assert text.startswith(f"{key}_model_parallel_size{division} of models/qwen {quotient}")
    assert text.endswith(f"Use a divisor of {quotient.split()[0][1:]}.")


@pytest.mark.parametrize(("rollout_tp", "num_kv_heads"), [(6, 4), (4, 6)])
def test_rollout_ranks_and_kv_heads_divide_one_another(rollout_tp: int, num_kv_heads: int) -> None:
    shape = replace(SHAPE, num_kv_heads=num_kv_heads)
    with pytest.raises(ConfigError) as error:
        check_model_shape(config(rollout_tp=rollout_tp), shape)
    assert str(error.value) == (
        f"rollout.tensor_model_parallel_size={rollout_tp} and num_key_value_heads={num_kv_heads} of models/qwen: "
        "one must divide the other."
    )


def test_lengths_beyond_the_positions() -> None:
    """512 positions hold 100 + 412 tokens and not one more."""
    check_model_shape(config(max_response_length=412), SHAPE)
    with pytest.raises(ConfigError) as error:
        check_model_shape(config(max_response_length=413), SHAPE)
    assert str(error.value) == (
        "data.max_prompt_length + data.max_response_length = 513 exceeds max_position_embeddings=512 of models/qwen. "
        "Lower the lengths."
    )


@pytest.mark.parametrize(("tp", "rows"), [(1, 99), (2, 100), (4, 100), (3, 99), (8, 104)])
def test_padded_vocabulary(tp: int, rows: int) -> None:
    assert SHAPE.padded_vocab_size(tp) == rows
