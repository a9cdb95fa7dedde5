"""How many layers of the judge stay in GPU memory while the rest stream in from the host (paper section 4.3)."""

from __future__ import annotations

NUM_STREAM_BUFFERS = 2  # one layer computes while the next is copied


def plan_resident_layers(num_layers: int, layer_bytes: int, input_bytes: int, free_bytes: int) -> int:
    """The most layers that can stay resident.

    `input_bytes` is what the longest input needs beside the weights (KV cache and activations), `free_bytes` what the
    actor leaves. All layers stay if they fit; otherwise two buffers of a layer each are set aside for the others. Raises
    ValueError with the arithmetic where not even those fit.
    """
    left = free_bytes - input_bytes
    if num_layers * layer_bytes <= left:
        return num_layers
    resident = left // layer_bytes - NUM_STREAM_BUFFERS
    if resident < 0:
        raise ValueError(
            f"the judge does not fit: {free_bytes:,} bytes are free, its longest input takes {input_bytes:,}, and "
            f"{NUM_STREAM_BUFFERS} layer buffers of {layer_bytes:,} are needed. Lower rollout.gpu_memory_utilization or "
            "the longest input, or give the judge GPUs of its own."
        )
    # With all but a few layers resident, buffers would hold more than what is streamed.
    return min(resident, num_layers - 1)
