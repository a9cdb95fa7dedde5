"""KV cache arithmetic: the peak that running requests will reach."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.policy.routing import RunningRequest


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
