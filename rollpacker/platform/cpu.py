"""CPU ranks: gloo, and the smallest set of patches that lets megatron-core run on a torch build without CUDA.

Megatron names the device "cuda" literally. Two pieces map those names to the CPU: stand-ins for `torch.cuda` functions,
installed before Megatron is imported, and a TorchFunctionMode around Megatron calls. Nothing here touches the numbers.
They can go when Megatron-core asks its platform for the device (0.16.1 does not).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.cuda.random as cuda_random
from torch.overrides import TorchFunctionMode


class _NoStream:
    """Stands for torch.cuda.Stream and Event: on the CPU everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _NoStream:
        return _NoStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class CudaNamesMeanCpu(TorchFunctionMode):
    """Inside this context `device="cuda"` means the CPU, and `tensor.type()` says torch.cuda.FloatTensor, which
    Megatron's optimizers assert.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Rewrite the device of one torch call."""
        kwargs = dict(kwargs) if kwargs else {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if any(isinstance(a, str) and a.startswith("cuda") for a in args):
            args = tuple("cpu" if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            result = result.replace("torch.", "torch.cuda.")
        return result


def _install_cuda_stand_ins() -> None:
    """Replace the functions of torch.cuda that Megatron calls at import, at construction and in its schedules."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _NoStream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = cuda_random.get_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[assignment]
    cuda.set_rng_state = cuda_random.set_rng_state = lambda s, *_, **__: torch.set_rng_state(s)  # type: ignore[assignment]
    cuda.manual_seed = torch.manual_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: 0
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]


class CpuPlatform:
    """One rank per core, one OpenMP thread per rank (with a busy core, two threads collapse)."""

    name = "cpu"
    torch_backend = "gloo"

    def prepare(self, local_rank: int) -> None:  # noqa: ARG002 (every rank sees the same device)
        """Install the stand-ins, then point Megatron's RNG accessors at the CPU generator."""
        torch.set_num_threads(1)
        _install_cuda_stand_ins()
        import megatron.core.tensor_parallel.random as megatron_random

        megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        megatron_random._set_cuda_rng_state = lambda s, *_, **__: torch.set_rng_state(s)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def megatron_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Read Megatron's device names as the CPU."""
        return CudaNamesMeanCpu()

    def prepare_engine_import(self, *, kv_cache_gib: int) -> None:
        """Keep the engine in this process, on the cores the launcher gave it; size its KV cache."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    def engine_options(self, *, gpu_memory_utilization: float, enforce_eager: bool) -> dict[str, Any]:  # noqa: ARG002
        """No CUDA graphs, no sleep mode."""
        return {"enforce_eager": True}

    def gpu_memory_gib(self) -> float | None:
        """There is no GPU."""
        return None

    def synchronize(self) -> None:
        """The CPU runs in order."""

    def release_cached_memory(self) -> None:
        """The CPU allocator needs no hint."""
