"""Small random Hugging Face models: every parameter random, biases and norms too, so that no mapping error hides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.comm.samples import Sample
from rollpacker.training.batches import TrainSample

VOCAB = 37  # odd: tensor parallelism has to pad it

# An original context of 32 positions and this base put the four frequencies of a head of 8 into all three ranges of the
# scaling (kept, between, divided), so that a wrong one shows on sequences of a few tokens.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},  # heads x head_dim is not the hidden size, as in Qwen3-0.6B
    "llama": {},
    "llama3": {"rope_parameters": _LLAMA3_ROPE},
}


def write_model(
    folder: Path, *, tied: bool, family: str = "qwen2", seed: int = 0, vocab_size: int = VOCAB, hidden_size: int = 32
) -> Path:
    """Write a random model of 2 layers, 4 heads and 2 KV heads; the folder."""
    config = AutoConfig.for_model(
        family.removesuffix("3") if family == "llama3" else family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,  # transformers gives a padding row of the embedding no gradient
        **FAMILIES[family],
    )
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder)
    return folder


def random_samples(num: int, *, seed: int = 0, vocab_size: int = VOCAB) -> list[TrainSample]:
    """Ragged samples with both signs of advantage, one of them zero."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(num):
        prompt = random.integers(0, vocab_size, random.integers(1, 6)).astype(np.int32)
        response = random.integers(0, vocab_size, random.integers(1, 25)).astype(np.int32)
        sample = Sample(index, prompt, response, np.zeros(len(response), np.float32))
        advantage = 0.0 if index == 1 else float(random.normal())
        samples.append(TrainSample(sample, advantage, token_weight=1.0))
    return samples


def reference_gradients(
    folder: Path, samples: list[TrainSample], denominator: int, temperature: float = 1.0
) -> tuple[float, dict[str, torch.Tensor]]:
    """The same loss in plain PyTorch on the Hugging Face model, one sequence at a time: the oracle.

    Loss = sum over response tokens of -A x exp(logp - stop_gradient(logp)) x weight, over `denominator`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for s in samples:
        tokens = torch.from_numpy(np.concatenate([s.sample.prompt_ids, s.sample.response_ids]).astype(np.int64))
        logits = model(tokens[None]).logits[0, :-1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[len(s.sample.prompt_ids) - 1 :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        total = total + (-s.advantage * ratio * s.token_weight).sum() / denominator
    total.backward()
    return float(total), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
