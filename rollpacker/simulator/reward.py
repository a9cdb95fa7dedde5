"""Rewards in virtual time: a queue for each rollout replica, and how long a score takes.

math: a verifier, milliseconds. code: a sandbox, seconds; of 5 % of the prompts the wrong responses never end and run into
their time limit. judge: a 7B model that reads prompt and response on the replica's own GPUs, one after another; it slows the
engine there, and is slowed by it.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollpacker.config import Config, ConfigError
from rollpacker.messages import ScoreResponse
from rollpacker.policy.offload import plan_resident_layers
from rollpacker.simulator import constants as k
from rollpacker.simulator.cluster import Cluster
from rollpacker.simulator.noise import REWARD_TIME, Floats, normal
from rollpacker.types import Request


@dataclass(frozen=True)
class Outcome:
    """What a verifier says, and when; meanwhile it makes each decode step of the replica `slowdown` times as long."""

    begin_s: float
    done_s: float
    score: float
    is_error: bool
    execution_s: float
    case_execution_s: tuple[float, ...]
    slowdown: float = 1.0


class JudgeCost:
    """How long the judge takes for one response, alone on the GPUs of a replica (paper section 4.3).

    Raises ConfigError where its layers cannot even stream.
    """

    def __init__(self, config: Config, cluster: Cluster, tensor_model_parallel_size: int) -> None:
        tp, gpu = tensor_model_parallel_size, cluster.gpu
        layer_bytes = math.ceil(2 * k.JUDGE_PARAMETERS / k.JUDGE_LAYERS / tp)
        self._offload = config.cluster.judge_offload
        self._read_token_s = 2 * k.JUDGE_PARAMETERS / (k.PREFILL_MFU * gpu.flops * tp)
        write_token_s = 2 * k.JUDGE_PARAMETERS / tp / (k.MEMORY_EFFICIENCY * gpu.memory_bandwidth) + k.STEP_OVERHEAD_S
        self._write_s = k.JUDGE_VERDICT_TOKENS * write_token_s
        self._copy_layer_s = layer_bytes / k.OFFLOAD_BANDWIDTH
        self.num_streamed = 0
        if self._offload != "none":
            longest = config.data.max_prompt_length + config.data.max_response_length
            input_bytes = k.JUDGE_KV_BYTES_PER_TOKEN * longest // tp
            free_bytes = cluster.free_bytes(tp)
            try:
                resident = plan_resident_layers(k.JUDGE_LAYERS, layer_bytes, input_bytes, free_bytes)
            except ValueError as error:
                raise ConfigError(f"cluster.judge_offload={self._offload}: {error}") from error
            self.num_streamed = k.JUDGE_LAYERS - resident

    def seconds(self, num_tokens: int) -> float:
        """Read a prompt and its response and write the verdict."""
        read_s = num_tokens * self._read_token_s
        if not self.num_streamed:
            return read_s + self._write_s
        copy_s = self.num_streamed * self._copy_layer_s
        if self._offload == "blocking":
            return read_s + copy_s
        return max(read_s, copy_s) + self._copy_layer_s  # nothing computes while the first layer is copied


class RewardQueues:
    """The workers of each replica, first come first served; one object serves one round."""

    def __init__(self, config: Config, cluster: Cluster, num_replicas: int, tensor_model_parallel_size: int) -> None:
        self._kind = config.workload.reward
        workers = 1 if self._kind == "judge" else config.reward.num_workers
        self._free_s = [[0.0] * workers for _ in range(num_replicas)]
        self._reward_s = config.workload.reward_s
        self._judge = JudgeCost(config, cluster, tensor_model_parallel_size) if self._kind == "judge" else None
        sharing = k.GPU_SHARING["mps" if config.cluster.judge_mps else "time_slicing"]
        self._decode_slowdown, self._judge_slowdown = sharing
        self._execution_s: list[float] = []
        self._scores: list[float] = []

    def launch(self, requests: Sequence[Request], lengths: Sequence[int], scores: Floats) -> None:
        """Take note of more requests of the round: their scores, and how long each score would take without a limit."""
        self._scores += scores.tolist()
        self._execution_s += self._times(requests, lengths, scores)

    def submit(self, action: ScoreResponse, now_s: float, *, shares_gpu: bool) -> Outcome:
        """Score a finished response: when it is done, within its time limit or at it.

        `shares_gpu`: the replica decodes meanwhile, which a judge on its GPUs slows, and is slowed by.
        """
        index = action.request.index
        wanted_s, score = self._execution_s[index], self._scores[index]
        limit_s = min([action.timeout_s, *action.case_timeouts_s[:1]])
        workers = self._free_s[action.request.replica]
        is_late = wanted_s > limit_s
        execution_s = limit_s if is_late else wanted_s
        slowdown = 1.0
        if self._judge is not None and shares_gpu:
            slowdown, execution_s = self._decode_slowdown, self._judge_slowdown * execution_s
        begin_s = max(now_s, workers[0])
        heapq.heapreplace(workers, begin_s + execution_s)
        cases = (execution_s,) if self._kind == "code" else ()
        return Outcome(begin_s, begin_s + execution_s, 0.0 if is_late else score, is_late, execution_s, cases, slowdown)

    def _times(self, requests: Sequence[Request], lengths: Sequence[int], scores: Floats) -> list[float]:
        if self._reward_s is not None:
            return [self._reward_s] * len(requests)
        if self._judge is not None:
            return [self._judge.seconds(len(r.prompt.token_ids) + n) for r, n in zip(requests, lengths, strict=True)]
        seeds = np.fromiter((r.seed for r in requests), np.uint64, len(requests))
        median, sigma = (k.MATH_MEDIAN_S, k.MATH_SIGMA) if self._kind == "math" else (k.CODE_MEDIAN_S, k.CODE_SIGMA)
        times = median * np.exp(sigma * normal(seeds, REWARD_TIME))
        if self._kind == "code":
            hangs = np.fromiter((_hangs(r.prompt.prompt_id) for r in requests), bool, len(requests))
            times[hangs & (scores < 1)] = math.inf
        return list(map(float, times))


def _hangs(prompt_id: str) -> bool:
    return zlib.crc32(b"hangs/" + prompt_id.encode()) < k.CODE_HANG_SHARE * 2.0**32
