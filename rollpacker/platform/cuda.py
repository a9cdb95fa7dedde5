"""GPU ranks: CUDA, NCCL, vLLM with CUDA graphs and sleep mode. docs/status.md says what of it has run on a GPU."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from rollpacker.config import ConfigError


class CudaPlatform:
    """One GPU per rank, picked by local rank (with `--gpus-per-node` every task sees all devices)."""

    name = "cuda"
    torch_backend = "nccl"

    def prepare(self, local_rank: int) -> None:
        """Bind this rank to its GPU."""
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            raise ConfigError(
                "PYTORCH_CUDA_ALLOC_CONF holds expandable_segments:True, which breaks vLLM's sleep mode: the engine's "
                "memory would silently stay allocated during training. Unset it."
            )
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {local_rank} of this node has no GPU: torch sees {torch.cuda.device_count()}. Start one rank per "
                "GPU (srun --ntasks-per-node = --gpus-per-node)."
            )
        torch.cuda.set_device(local_rank)
        # Megatron's sequence of compute and communication kernels relies on one hardware queue.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    @property
    def device(self) -> torch.device:
        """The current CUDA device."""
        return torch.device("cuda", torch.cuda.current_device())

    def megatron_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Megatron needs nothing special on CUDA."""
        return contextlib.nullcontext()

    def prepare_engine_import(self, *, kv_cache_gib: int) -> None:  # noqa: ARG002 (CUDA sizes the cache by share)
        """Keep the engine in this process."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    def engine_options(self, *, gpu_memory_utilization: float, enforce_eager: bool) -> dict[str, Any]:
        """Sleep mode frees weights and KV cache while the rank trains."""
        return {
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": enforce_eager,
            "enable_sleep_mode": True,
        }

    def gpu_memory_gib(self) -> float | None:
        """What torch reports of the current device; None in a dry run on a machine without a GPU."""
        if not torch.cuda.is_available():
            return None
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) / (1 << 30)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def release_cached_memory(self) -> None:
        """Empty torch's caching allocator so that vLLM can map its own memory."""
        torch.cuda.empty_cache()
