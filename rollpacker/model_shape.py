"""What a Hugging Face config.json says about a model, as the one description that every other module builds on.

Pure: a login node reads it to check a config; training builds Megatron from it, weights/layout.py lays parameters out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import check_parallel_shape


@dataclass(frozen=True)
class ModelFamily:
    """What an architecture implies beyond the numbers of its config.json.

    `default_head_dim` is what transformers takes where config.json names none (None: hidden_size / heads);
    `has_free_head_dim` is False where vLLM computes hidden_size / heads whatever config.json says. `refused` are the
    switches of config.json that would change the model's formula.
    """

    title: str
    has_qkv_bias: bool
    has_qk_norm: bool
    has_free_head_dim: bool
    default_head_dim: int | None
    rope_types: tuple[str, ...]
    refused: tuple[str, ...]


FAMILIES = {
    "Qwen2ForCausalLM": ModelFamily(
        title="Qwen2, Qwen2.5",
        has_qkv_bias=True,
        has_qk_norm=False,
        has_free_head_dim=False,
        default_head_dim=None,
        rope_types=("default",),
        refused=("use_sliding_window",),
    ),
    "Qwen3ForCausalLM": ModelFamily(
        title="Qwen3, dense",
        has_qkv_bias=False,
        has_qk_norm=True,
        has_free_head_dim=True,
        default_head_dim=128,
        rope_types=("default",),
        refused=("use_sliding_window", "attention_bias"),
    ),
    "LlamaForCausalLM": ModelFamily(
        title="Llama 2 and 3, SmolLM2",
        has_qkv_bias=False,
        has_qk_norm=False,
        has_free_head_dim=True,
        default_head_dim=None,
        rope_types=("default", "llama3"),
        refused=("attention_bias", "mlp_bias"),
    ),
}
_LLAMA3_ENTRIES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
_OPTIONAL = ("num_key_value_heads", "head_dim", "rope_theta")


@dataclass(frozen=True)
class Llama3RopeScaling:
    """How Llama 3.x stretches its rotary frequencies over a longer context (`rope_type: llama3` of config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder-only model with RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool = False
    rope_scaling: Llama3RopeScaling | None = None

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding so that every tensor-parallel rank holds the same number."""
        return -(-self.vocab_size // tensor_model_parallel_size) * tensor_model_parallel_size

    def num_parameters(self) -> int:
        """Number of trained parameters (tied embeddings counted once)."""
        attention_rows = (self.num_attention_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = attention_rows * (self.hidden_size + self.has_qkv_bias)
        attention += self.num_attention_heads * self.head_dim * self.hidden_size
        attention += 2 * self.head_dim * self.has_qk_norm
        layer = attention + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, tensor_model_parallel_size: int, bytes_per_value: int) -> int:
        """KV cache bytes of one token on one GPU: keys and values of all layers.

        With more GPUs than KV heads each GPU still holds one head: the heads are replicated.
        """
        heads = max(self.num_kv_heads // tensor_model_parallel_size, 1)
        return 2 * self.num_layers * heads * self.head_dim * bytes_per_value


def read_model_shape(model_path: str, key: str = "model.path=") -> ModelShape:
    """Read `model_path`/config.json, or say why that folder is not a model this program trains; `key` opens the message."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(
            f"{key}{model_path}: there is no such folder. Give a local Hugging Face folder (config.json, "
            "*.safetensors, tokenizer files); for the demo, `make env` creates it."
        )
    shape = read_model_config(folder, key)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}{model_path}: no *.safetensors file there; other weight formats are not read.")
    return shape


def read_model_config(folder: Path, key: str = "") -> ModelShape:
    """Read config.json alone; the weights may lie elsewhere, or be there only later."""
    config_json = folder / "config.json"
    if not config_json.is_file():
        raise ConfigError(f"{key}{folder}: not a Hugging Face model folder, it has no config.json.")
    try:
        raw = json.loads(config_json.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config_json} is not valid JSON: {error}.") from error
    architecture = (raw.get("architectures") or ["unknown"])[0] if isinstance(raw, dict) else "unknown"
    if architecture not in FAMILIES:
        supported = ", ".join(f"{name} ({family.title})" for name, family in FAMILIES.items())
        raise ConfigError(f"{config_json}: the architecture {architecture} is not supported. Supported: {supported}.")
    return _parse(raw, architecture, config_json)


def _parse(raw: dict[str, Any], architecture: str, where: Path) -> ModelShape:
    family = FAMILIES[architecture]
    for name in family.refused:
        if raw.get(name):
            raise ConfigError(f"{where}: {name}=true is not supported.")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ConfigError(f"{where}: layer_types other than full_attention are not supported.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act={raw['hidden_act']} is not supported; only silu (SwiGLU) is.")
    _check_numbers(raw, _REQUIRED, where, required=True)
    _check_numbers(raw, _OPTIONAL, where, required=False)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    return ModelShape(
        architecture=architecture,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_hidden_size=int(raw["intermediate_size"]),
        num_attention_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=_head_dim(raw, family, hidden, heads, where),
        vocab_size=int(raw["vocab_size"]),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=family.has_qkv_bias,
        has_qk_norm=family.has_qk_norm,
        rope_scaling=_rope_scaling(rope, family, where),
    )


def _check_numbers(entries: dict[str, Any], names: tuple[str, ...], where: Path, *, required: bool) -> None:
    """Refuse an entry that is no number above 0, or that is missing although it is required."""
    for name in names:
        value = entries.get(name)
        if value is None:
            if required:
                raise ConfigError(f"{where}: the entry {name} is missing.")
        elif not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{where}: {name}={value!r} is not a number above 0.")


def _head_dim(raw: dict[str, Any], family: ModelFamily, hidden: int, heads: int, where: Path) -> int:
    head_dim = int(raw.get("head_dim") or family.default_head_dim or hidden // heads)
    if not family.has_free_head_dim and head_dim * heads != hidden:
        raise ConfigError(
            f"{where}: head_dim={head_dim} x num_attention_heads={heads} is not hidden_size={hidden}. vLLM takes "
            f"hidden_size / num_attention_heads for {family.title}, so the rollout would use another model."
        )
    return head_dim


def _rope_scaling(rope: dict[str, Any], family: ModelFamily, where: Path) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in family.rope_types or rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(
            f"{where}: RoPE scaling {rope} is not supported. Supported for {family.title}: rope_type "
            f"{' and '.join(family.rope_types)}, over the whole head."
        )
    if kind == "default":
        return None
    _check_numbers(rope, _LLAMA3_ENTRIES, where, required=True)
    scaling = Llama3RopeScaling(**{k: float(rope[k]) for k in _LLAMA3_ENTRIES})
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ConfigError(f"{where}: RoPE scaling {rope}: low_freq_factor must be below high_freq_factor.")
    return scaling


def check_shapes(config: Config, world_size: int) -> ModelShape:
    """The model's shape, once the parallel sizes have been found to fit both it and the job's ranks."""
    check_parallel_shape(config, world_size)
    shape = read_model_shape(config.model.path)
    check_model_shape(config, shape)
    return shape


def check_model_shape(config: Config, shape: ModelShape) -> None:
    """Refuse parallel sizes that do not divide the model, and lengths beyond its positions."""
    training, rollout = config.training, config.rollout
    tp, pp = training.tensor_model_parallel_size, training.pipeline_model_parallel_size
    divisions = (
        ("training.tensor_model_parallel_size", tp, "num_attention_heads", shape.num_attention_heads),
        ("training.tensor_model_parallel_size", tp, "num_key_value_heads", shape.num_kv_heads),
        ("training.tensor_model_parallel_size", tp, "intermediate_size", shape.ffn_hidden_size),
        ("training.pipeline_model_parallel_size", pp, "num_hidden_layers", shape.num_layers),
        (
            "rollout.tensor_model_parallel_size",
            rollout.tensor_model_parallel_size,
            "num_attention_heads",
            shape.num_attention_heads,
        ),
    )
    for dotted, size, what, count in divisions:
        if count % size:
            raise ConfigError(
                f"{dotted}={size} does not divide {what}={count} of {config.model.path} "
                f"({count} / {size} = {count / size:.2f}). Use a divisor of {count}."
            )
    larger, smaller = sorted((rollout.tensor_model_parallel_size, shape.num_kv_heads), reverse=True)
    if larger % smaller:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} and "
            f"num_key_value_heads={shape.num_kv_heads} of {config.model.path}: one must divide the other."
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > shape.max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {longest} exceeds max_position_embeddings="
            f"{shape.max_position_embeddings} of {config.model.path}. Lower the lengths."
        )
