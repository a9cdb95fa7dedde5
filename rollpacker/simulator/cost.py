"""How long an engine step takes: a roofline, or a measured table; as a curve over the mean context of the batch.

Between two events every running request gains one token a step, so the mean context of a batch grows by exactly one, and
both cost models are piecewise linear in it. So any number of steps is summed, and any time is turned into steps, in
closed form: nothing here loops over tokens.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollpacker.config import ConfigError
from rollpacker.model_shape import ModelShape
from rollpacker.policy.planner import DecodeTable
from rollpacker.simulator import constants as k
from rollpacker.simulator.constants import GpuFacts

_BYTES = 2  # of a bf16 value


class StepCurve:
    """Seconds of one decode step of a batch of fixed size, over its mean context in tokens.

    `pieces` are (end, base, slope): below `end` tokens a step takes base + slope x context; the last end is infinite.
    """

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[tuple[float, float, float]]) -> None:
        self.pieces = tuple(pieces)

    def total_s(self, context: float, num_steps: int) -> float:
        """Seconds of `num_steps` steps, the first at `context`, each one token further."""
        total = 0.0
        for end, base, slope in self.pieces:
            if context >= end:
                continue
            n = num_steps if context + num_steps <= end else min(num_steps, math.ceil(end - context))
            total += n * (base + slope * (context + 0.5 * (n - 1)))
            num_steps -= n
            if num_steps <= 0:
                break
            context += n
        return total

    def steps_to_cover(self, context: float, seconds: float) -> int:
        """The fewest steps, from `context` on, that take at least `seconds`."""
        num_steps = 0
        for end, base, slope in self.pieces:
            if context >= end:
                continue
            first = base + slope * (context - 0.5)  # n steps take first x n + slope / 2 x n^2
            if end < math.inf:
                n = math.ceil(end - context)
                total = n * first + 0.5 * slope * n * n
                if total < seconds:
                    seconds -= total
                    num_steps += n
                    context += n
                    continue
            root = seconds / first if slope == 0 else 2 * seconds / (first + math.sqrt(first**2 + 2 * slope * seconds))
            return num_steps + max(math.ceil(root - 1e-9), 0)
        raise ValueError("the last piece of a curve has no end")


class EngineCost(Protocol):
    """What a replica of one tensor-parallel size needs to know of its own speed."""

    prefill_tokens_per_s: float

    def curve(self, batch: int) -> StepCurve:
        """The decode step of `batch` requests."""


class Roofline:
    """Decode is bound by memory (weights and KV) or by FLOPs, plus all-reduces and an overhead that does not shrink.

    step = overhead + max((weights + batch x context x KV) / bandwidth, 2 P batch / FLOPs) + 2 layers x all-reduce
    """

    def __init__(
        self, shape: ModelShape, gpu: GpuFacts, tensor_model_parallel_size: int, step_overhead_s: float
    ) -> None:
        tp, parameters = tensor_model_parallel_size, shape.num_parameters()
        bandwidth = k.MEMORY_EFFICIENCY * gpu.memory_bandwidth
        self._weights_s = _BYTES * parameters / tp / bandwidth
        self._kv_token_s = shape.kv_bytes_per_token(tp, _BYTES) / bandwidth
        self._flops_s = 2 * parameters / (tp * k.DECODE_MFU * gpu.flops)
        num_all_reduces = 2 * shape.num_layers if tp > 1 else 0
        self._fixed_s = step_overhead_s + num_all_reduces * k.ALL_REDUCE_LATENCY_S
        # a ring moves 2 (tp - 1) / tp of the data
        moved = 2 * (tp - 1) / tp * _BYTES * shape.hidden_size
        self._all_reduce_s = num_all_reduces * moved / gpu.nvlink_bandwidth
        self.prefill_tokens_per_s = k.PREFILL_MFU * gpu.flops * tp / (2 * parameters)
        self._curves: dict[int, StepCurve] = {}

    def curve(self, batch: int) -> StepCurve:
        """The decode step of `batch` requests: flat while FLOPs bind it, then rising with the KV to read."""
        found = self._curves.get(batch)
        if found is None:
            fixed, slope = self._fixed_s + self._all_reduce_s * batch, self._kv_token_s * batch
            knee = (self._flops_s * batch - self._weights_s) / slope
            pieces = [(math.inf, fixed + self._weights_s, slope)]
            if knee > 0:
                pieces.insert(0, (knee, fixed + self._flops_s * batch, 0.0))
            found = self._curves[batch] = StepCurve(pieces)
        return found


class MeasuredCost:
    """Decode times from a table, interpolated as `DecodeTable` does."""

    def __init__(self, table: DecodeTable, tensor_model_parallel_size: int, prefill_tokens_per_s: float) -> None:
        self._table, self._size = table, tensor_model_parallel_size
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._contexts = sorted({context for _, context in table.tpot_ms[tensor_model_parallel_size]})
        self._curves: dict[int, StepCurve] = {}

    def curve(self, batch: int) -> StepCurve:
        """The decode step of `batch` requests: linear between the contexts of the table."""
        found = self._curves.get(batch)
        if found is None:
            found = self._curves[batch] = StepCurve(self._pieces(batch))
        return found

    def _pieces(self, batch: int) -> list[tuple[float, float, float]]:
        at = [self._table.milliseconds(self._size, batch, c) / 1e3 for c in self._contexts]
        pieces = [(float(self._contexts[0]), at[0], 0.0)]
        for i in range(1, len(at)):
            slope = (at[i] - at[i - 1]) / (self._contexts[i] - self._contexts[i - 1])
            end = float(self._contexts[i]) if i < len(at) - 1 else math.inf
            pieces.append((end, at[i] - slope * self._contexts[i], slope))
        if len(at) == 1:
            pieces = [(math.inf, at[0], 0.0)]
        return pieces


TABLE_COLUMNS = ("tensor_model_parallel_size", "batch", "context_tokens", "decode_ms")


def read_decode_table(path: str) -> DecodeTable:
    """A table of measured decode steps: CSV with a header that names TABLE_COLUMNS, one cell of the grid a row.

    Every TP size has a full grid of batch x context. Raises ConfigError that names the line.
    """
    cells: dict[int, dict[tuple[int, int], float]] = {}
    try:
        with Path(path).open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [c for c in TABLE_COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"cluster.decode_table={path}, line 1: the header lacks {', '.join(missing)}. Expected "
                    f"{','.join(TABLE_COLUMNS)}."
                )
            for row in reader:
                try:
                    tp, batch, context = (int(row[c]) for c in TABLE_COLUMNS[:3])
                    milliseconds = float(row["decode_ms"])
                    if min(tp, batch, context) < 1 or not 0 < milliseconds < math.inf:
                        raise ValueError
                except (TypeError, ValueError):
                    raise ConfigError(
                        f"cluster.decode_table={path}, line {reader.line_num}: expected three whole numbers from 1 and a "
                        f"time in ms, found {dict(row)}."
                    ) from None
                cells.setdefault(tp, {})[batch, context] = milliseconds
    except OSError as error:
        raise ConfigError(f"cluster.decode_table={path}: cannot read it ({error.strerror}).") from error
    try:
        return DecodeTable(cells)
    except ValueError as error:
        raise ConfigError(f"cluster.decode_table={path}: {error}") from error
