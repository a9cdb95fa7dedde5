"""Qwen2.5 as published: the numbers of its config.json files, and folders that hold them without the weights."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

# hidden_size, intermediate_size, layers, heads, KV heads, rms_norm_eps of Qwen/Qwen2.5-{7B,14B,32B} (the base models).
_SIZES = {
    "7B": (3584, 18944, 28, 28, 4, 1e-6),
    "14B": (5120, 13824, 48, 40, 8, 1e-5),
    "32B": (5120, 27648, 64, 40, 8, 1e-5),
}


def qwen_config(name: str) -> dict[str, Any]:
    """config.json of a base model, as far as it matters."""
    hidden, ffn, layers, heads, kv_heads, eps = _SIZES[name]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 131072,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": eps,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    }


def write_qwen_folder(folder: Path, name: str, *, tokenizer_of: Path | None = None) -> Path:
    """A model folder with the real sizes, a safetensors file without tensors, and the tokenizer of another model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(qwen_config(name)), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")  # the length of the header, the header
    if tokenizer_of is not None:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer_of / file, folder / file)
    return folder
