"""KV cache arithmetic: bytes per token, what fits, and the peak that running requests will reach."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.model_shape import ModelShape
from rollpacker.policy.routing import RunningRequest


def kv_bytes_per_token(shape: ModelShape, *, tensor_model_parallel_size: int = 1, bytes_per_value: int = 2) -> int:
    """KV cache bytes of one token on one GPU: keys and values of all layers.

    With more GPUs than KV heads each GPU still holds one head: the heads are replicated.
    """
    heads = max(shape.num_kv_heads // tensor_model_parallel_size, 1)
    return 2 * shape.num_layers * heads * shape.head_dim * bytes_per_value


def kv_capacity_tokens(free_bytes: int, bytes_per_token: int, *, block_tokens: int = 16) -> int:
    """Tokens that `free_bytes` of one GPU hold, in whole blocks; it bounds its whole TP group."""
    return free_bytes // (bytes_per_token * block_tokens) * block_tokens


def projected_peak_tokens(requests: Sequence[RunningRequest]) -> float:
    """The most tokens that these requests will hold at once, if all decode at one pace to their predicted lengths.

    A request that has outlived its prediction ends now. The peak lies at an end of one of them: just before it, the
    requests still alive have all grown by the same number of tokens. O(n log n).
    """
    alive = sorted(requests, key=lambda r: r.peak_tokens - r.num_tokens)
    held = float(sum(r.num_tokens for r in alive))
    peak = held
    for num_ended, request in enumerate(alive):
        growth = request.peak_tokens - request.num_tokens
        peak = max(peak, held + growth * (len(alive) - num_ended))
        held -= request.num_tokens
    return peak
