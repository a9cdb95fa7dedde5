"""Samples on their way from the rollout replica that decoded them to the training ranks that need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

_HEADER_FIELDS = 3  # request index, prompt tokens, response tokens


@dataclass(frozen=True)
class Sample:
    """The tokens of one response: prompt_ids [P] int32, response_ids [T] int32, rollout_logprobs [T] float32."""

    request_index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    rollout_logprobs: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


def exchange_samples(comm: MPI.Comm, outgoing: Mapping[int, Sequence[Sample]]) -> list[Sample]:
    """Send `outgoing[rank]` to each rank; what arrived here, ordered by request index. Collective over `comm`."""
    packed = [_pack(outgoing.get(rank, ())) for rank in range(comm.size)]
    send_counts = np.array([p.size for p in packed], np.int64)
    receive_counts = np.empty_like(send_counts)
    comm.Alltoall([send_counts, MPI.INT64_T], [receive_counts, MPI.INT64_T])
    send = np.concatenate(packed)
    receive = np.empty(int(receive_counts.sum()), np.int32)
    comm.Alltoallv(
        [send, send_counts, _displacements(send_counts), MPI.INT32_T],
        [receive, receive_counts, _displacements(receive_counts), MPI.INT32_T],
    )
    return sorted(_unpack(receive), key=lambda s: s.request_index)


def _displacements(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)[:-1]])


def _pack(samples: Sequence[Sample]) -> np.ndarray:
    """One int32 stream: per sample a header, the tokens, and the bits of the log-probs."""
    parts = [np.empty(0, np.int32)]
    for s in samples:
        parts.append(np.array([s.request_index, len(s.prompt_ids), len(s.response_ids)], np.int32))
        parts.extend([s.prompt_ids, s.response_ids, s.rollout_logprobs.view(np.int32)])
    return np.concatenate(parts)


def _unpack(stream: np.ndarray) -> list[Sample]:
    samples, at = [], 0
    while at < len(stream):
        index, num_prompt, num_response = (int(x) for x in stream[at : at + _HEADER_FIELDS])
        prompt_at = at + _HEADER_FIELDS
        response_at = prompt_at + num_prompt
        logprobs_at = response_at + num_response
        at = logprobs_at + num_response
        samples.append(
            Sample(
                index,
                stream[prompt_at:response_at],
                stream[response_at:logprobs_at],
                stream[logprobs_at:at].view(np.float32),
            )
        )
    return samples
