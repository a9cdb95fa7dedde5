"""What GPUs and times are called in the outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollpacker.profiling.bubble_report.model import SECOND, GpuId
from rollpacker.profiling.bubble_report.timeline import Label


def gpu_names(gpus: Sequence[GpuId]) -> dict[GpuId, str]:
    """A name for each GPU that is unique on its host: its index, with the start of its uuid where two share one."""
    used = Counter((gpu.host, gpu.name) for gpu in gpus)
    return {g: g.name if used[g.host, g.name] == 1 else f"{g.name} ({_short(g.key)})" for g in gpus}


def full_names(gpus: Sequence[GpuId]) -> dict[GpuId, str]:
    """host/GPU, or just the GPU where the host is unknown."""
    return {gpu: f"{gpu.host}/{name}" if gpu.host else name for gpu, name in gpu_names(gpus).items()}


def _short(key: str) -> str:
    """The telling part of a key: the start of a uuid, or the file and device."""
    return key[:8] if "/" not in key and ":" not in key else key.rsplit("/", 1)[-1]


def seconds(nanoseconds: int) -> float:
    """Nanoseconds as seconds."""
    return nanoseconds / SECOND


def duration(nanoseconds: float) -> str:
    """A duration for people: 12.3 s, 4.56 ms, 78 us."""
    for unit, size in (("s", SECOND), ("ms", 1e6)):
        if abs(nanoseconds) >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}"
                if abs(nanoseconds) < 1000 * size
                else f"{nanoseconds / size:,.0f} {unit}"
            )
    return f"{nanoseconds / 1e3:.3g} us"


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def step_name(step: Label | None) -> str:
    """The step for people; a dash outside all steps."""
    return "-" if step is None else str(step)
