"""ParallelismPlanner: the tensor-parallel size of a round's rollout.

Four policies behind one interface. `fixed` never changes it. `preemption` is the paper's (section 4.2): preemptions
say that KV memory is short, so TP doubles; long enough without any, it halves. `profile` reads a measured table of
milliseconds per token: decoding a few long responses is bound by latency, which more TP lowers even where memory is
ample. `schedule` plays a list.

Invariant: a size is a power-of-two step away from the last one (save `profile` and `schedule`), within the bounds, and
in `sizes`: it divides the GPUs of a node, so that no TP group crosses a node, and fits the model's heads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollpacker.types import RoundKind


@dataclass(frozen=True)
class RoundForecast:
    """What is known of a round before its launch; tokens are those of a response, prompts left out."""

    step: int
    kind: RoundKind
    num_requests: int
    mean_tokens: float
    max_tokens: float
    prompt_tokens: float = 0.0


class ParallelismPlanner(Protocol):
    """Chooses a size before a round and learns from it after."""

    def choose(self, forecast: RoundForecast) -> int:
        """Rollout tensor-parallel size of the round."""

    def observe(self, kind: RoundKind, num_preemptions: int) -> None:
        """The round is over."""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""


def allowed_sizes(num_gpus: int, gpus_per_node: int, num_attention_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Tensor-parallel sizes that a rollout may use, in rising order.

    A size divides the GPUs and those of a node (TP groups never cross a node), divides the attention heads, and divides
    the KV heads or is a multiple of them (then KV heads are replicated).
    """
    per_node = min(num_gpus, gpus_per_node)
    return tuple(
        tp
        for tp in range(1, per_node + 1)
        if num_gpus % tp == 0
        and per_node % tp == 0
        and num_attention_heads % tp == 0
        and (num_kv_heads % tp == 0 or tp % num_kv_heads == 0)
    )


class _Stateless:
    """A planner that learns nothing."""

    def observe(self, kind: RoundKind, num_preemptions: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


class FixedPlanner(_Stateless):
    """The same size in every round."""

    def __init__(self, tensor_model_parallel_size: int) -> None:
        self._size = tensor_model_parallel_size

    def choose(self, forecast: RoundForecast) -> int:  # noqa: ARG002
        """The size."""
        return self._size


class SchedulePlanner(_Stateless):
    """Plays a list of sizes, one a step, from step 1 on; the last one stays."""

    def __init__(self, schedule: Sequence[int]) -> None:
        if not schedule:
            raise ValueError("planner.schedule is empty: expected at least one tensor-parallel size.")
        self._schedule = tuple(schedule)

    def choose(self, forecast: RoundForecast) -> int:
        """The size of this step."""
        return self._schedule[min(forecast.step, len(self._schedule)) - 1]


@dataclass
class _KindState:
    """What the preemption rule remembers of one kind of round."""

    size: int
    last_preemptions: int | None = None
    num_quiet: int = 0
    window: int = 4
    was_halved: bool = False


class PreemptionPlanner:
    """Doubles on growing preemptions, halves after quiet rounds; SHORT and LONG rounds are counted apart.

    Growth is more than 1.05 times the last round's of the same kind (from 0: any). Quiet are `window` rounds in a row
    without a preemption: 4, and twice as many (up to 32) after each halving that was followed by growth, so that it does
    not swing for ever. `literal` keeps the window at 4, as the paper does.
    """

    _GROWTH = 1.05
    _MAX_WINDOW = 32

    def __init__(self, sizes: Sequence[int], start: int, *, literal: bool = False) -> None:
        """`sizes` are those allowed, rising (`allowed_sizes`); `start` is one of them."""
        if start not in sizes:
            raise ValueError(f"tensor_model_parallel_size={start}: expected one of {tuple(sizes)}.")
        self._sizes = tuple(sizes)
        self._literal = literal
        self._kinds = {kind: _KindState(start) for kind in RoundKind}

    def choose(self, forecast: RoundForecast) -> int:
        """The size that the past rounds of this kind ask for."""
        return self._kinds[forecast.kind].size

    def observe(self, kind: RoundKind, num_preemptions: int) -> None:
        """Compare with the last round of this kind, and move."""
        state = self._kinds[kind]
        last, state.last_preemptions = state.last_preemptions, num_preemptions
        if last is not None and num_preemptions > self._GROWTH * last:
            if state.was_halved and not self._literal:
                state.window = min(2 * state.window, self._MAX_WINDOW)
            state.was_halved = False
            state.num_quiet = 0
            self._move(state, 2 * state.size)
            return
        state.num_quiet = 0 if num_preemptions else state.num_quiet + 1
        if state.num_quiet >= state.window:
            state.num_quiet = 0
            state.was_halved |= self._move(state, state.size // 2)

    def _move(self, state: _KindState, size: int) -> bool:
        """Take the size if it is allowed; whether it was."""
        if size not in self._sizes:
            return False
        state.size = size
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {kind.value: vars(state).copy() for kind, state in self._kinds.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state; a size that is no longer allowed becomes the nearest below, else the smallest."""
        for kind in RoundKind:
            saved = _KindState(**state[kind.value])
            saved.size = max((s for s in self._sizes if s <= saved.size), default=self._sizes[0])
            self._kinds[kind] = saved


@dataclass(frozen=True)
class DecodeTable:
    """Measured milliseconds per token: `tpot_ms[tp]` maps (batch, context tokens) to it, on a full grid.

    Between grid points it interpolates linearly in both axes, above the last it goes on as the last two do, below the
    first it holds.
    """

    tpot_ms: Mapping[int, Mapping[tuple[int, int], float]]
    _axes: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for tp, cells in self.tpot_ms.items():
            axes = sorted({b for b, _ in cells}), sorted({c for _, c in cells})
            missing = [(b, c) for b in axes[0] for c in axes[1] if (b, c) not in cells]
            if not cells or missing:
                raise ValueError(f"TP {tp}: the table lacks (batch, context) {missing[:3] or 'altogether'}.")
            self._axes[tp] = axes

    def milliseconds(self, tp: int, batch: float, context: float) -> float:
        """One decode step of a replica with `batch` requests of `context` tokens."""
        batches, contexts = self._axes[tp]
        cells = self.tpot_ms[tp]
        b0, b1, b = _bracket(batches, max(batch, batches[0]))
        c0, c1, c = _bracket(contexts, max(context, contexts[0]))
        low = cells[b0, c0] + (cells[b0, c1] - cells[b0, c0]) * c
        high = cells[b1, c0] + (cells[b1, c1] - cells[b1, c0]) * c
        return low + (high - low) * b


def _bracket(axis: Sequence[int], x: float) -> tuple[int, int, float]:
    """The two grid points around x and where x lies between them (beyond 1 past the end)."""
    if len(axis) == 1:
        return axis[0], axis[0], 0.0
    i = min(max(bisect_left(axis, x), 1), len(axis) - 1)
    return axis[i - 1], axis[i], (x - axis[i - 1]) / (axis[i] - axis[i - 1])


class ProfilePlanner(_Stateless):
    """The size with the shortest predicted round.

    A round is modelled as its bulk, all requests of a replica for the mean length (in turns, where its KV cache holds
    fewer at once), then the tail: the longest response alone for the rest of its length.
    """

    def __init__(self, table: DecodeTable, num_gpus: int, capacity_tokens: Callable[[int], int]) -> None:
        """`capacity_tokens(tp)` is the KV cache of a rollout replica."""
        self._table = table
        self._num_gpus = num_gpus
        self._capacity_tokens = capacity_tokens

    def choose(self, forecast: RoundForecast) -> int:
        """The fastest size; ties go to the smallest."""
        return min(sorted(self._table.tpot_ms), key=lambda tp: self.round_ms(tp, forecast))

    def round_ms(self, tp: int, forecast: RoundForecast) -> float:
        """Predicted milliseconds of the round at this size."""
        batch = max(forecast.num_requests * tp / self._num_gpus, 1.0)
        context = forecast.prompt_tokens + forecast.mean_tokens
        at_once = max(min(batch, self._capacity_tokens(tp) / max(context, 1.0)), 1.0)
        middle = forecast.prompt_tokens + forecast.mean_tokens / 2
        bulk = batch / at_once * forecast.mean_tokens * self._table.milliseconds(tp, at_once, middle)
        tail_tokens = max(forecast.max_tokens - forecast.mean_tokens, 0.0)
        tail_context = forecast.prompt_tokens + (forecast.mean_tokens + forecast.max_tokens) / 2
        return bulk + tail_tokens * self._table.milliseconds(tp, 1.0, tail_context)
