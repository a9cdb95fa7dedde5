"""Which device the ranks run on, and all that depends on it: one `Platform`, chosen once at start.

Nothing outside this package asks whether it runs on a GPU; it asks the platform for a device, a backend, engine options.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from rollpacker.config import ConfigError


class Platform(Protocol):
    """What differs between a CPU rank and a GPU rank."""

    name: str
    torch_backend: str
    """Backend of torch.distributed: gloo or nccl."""

    def prepare(self, local_rank: int) -> None:
        """Patch and configure the process; called before Megatron or vLLM are imported."""

    @property
    def device(self) -> Any:
        """The torch.device of this rank."""

    def megatron_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Keep this around every call into Megatron; vLLM runs outside it."""

    def engine_options(self, *, gpu_memory_utilization: float, enforce_eager: bool) -> dict[str, Any]:
        """Device-dependent keyword arguments of `vllm.LLM`."""

    def prepare_engine_import(self, *, kv_cache_gib: int) -> None:
        """Set what vLLM reads at import; called before vLLM is imported."""

    def gpu_memory_gib(self) -> float | None:
        """Memory of this rank's GPU; None where there is none to ask."""

    def synchronize(self) -> None:
        """Wait until the device has finished what was launched, so that a clock reading means something."""

    def release_cached_memory(self) -> None:
        """Give memory that torch's allocator holds back to the device."""


def select_platform(device: str, *, is_plan: bool = False) -> Platform:
    """Return the platform for `trainer.device`: auto takes CUDA when torch sees a GPU.

    A dry run plans for another machine (`is_plan`): `cuda` then needs no GPU here.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda and not is_plan:
        raise ConfigError(
            "trainer.device=cuda, but torch sees no GPU on this machine "
            f"(torch {torch.__version__}). Run it on a GPU node, or try configs/demo_cpu.yaml with trainer.device=cpu."
        )
    if device == "cuda" or (device == "auto" and has_cuda):
        from rollpacker.platform.cuda import CudaPlatform

        return CudaPlatform()
    from rollpacker.platform.cpu import CpuPlatform

    return CpuPlatform()
