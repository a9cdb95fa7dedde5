"""Do two forms of a checkpoint compute the same? transformers on the one side, Megatron-core on the other, one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker.config import TrainingConfig
from rollpacker.model_shape import ModelShape, read_model_shape
from rollpacker.platform.cpu import CpuPlatform
from rollpacker.training.model import build_module, init_parallel_groups, load_megatron_checkpoint

TOLERANCE = 1e-4
"""Of max|a - b| / max|b| over all logits, in fp32: rounding of some tens of layers stays well below."""
_SEQUENCES, _TOKENS = 4, 64


@dataclass(frozen=True)
class Comparison:
    """Logits of a Megatron checkpoint against those of a Hugging Face folder."""

    max_difference: float
    max_logit: float
    num_logits: int

    @property
    def is_equal(self) -> bool:
        """Whether they agree to rounding; a NaN does not."""
        return self.max_difference <= TOLERANCE * self.max_logit


def compare_logits(hf_folder: str, megatron_folder: str) -> Comparison:
    """Run random tokens through both models in fp32 on the CPU, one model at a time."""
    shape = read_model_shape(hf_folder)
    length = min(_TOKENS, shape.max_position_embeddings)
    ids = torch.randint(0, shape.vocab_size, (_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    theirs = _transformers_logits(hf_folder, ids)
    ours = _megatron_logits(megatron_folder, shape, ids)
    return Comparison(
        max_difference=float((ours - theirs).abs().max()),
        max_logit=float(theirs.abs().max()),
        num_logits=ours.numel(),
    )


@torch.no_grad()
def _transformers_logits(folder: str, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model(ids).logits


@torch.no_grad()
def _megatron_logits(folder: str, shape: ModelShape, ids: Tensor) -> Tensor:
    platform = CpuPlatform()
    platform.prepare(0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        training = TrainingConfig(dtype="fp32", use_distributed_optimizer=False)
        module = build_module(shape, training, platform, init_parallel_groups(training, platform, seed=0))
        load_megatron_checkpoint(module, folder, platform)
        with platform.megatron_calls():
            return module(ids, torch.arange(ids.shape[1]).expand_as(ids), None)[..., : shape.vocab_size]
    finally:
        torch.distributed.destroy_process_group()
