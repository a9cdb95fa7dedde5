"""RolloutEngine: one vLLM engine inside this rank, driven a step at a time.

Under vLLM's external launcher every rank of a tensor-parallel group runs its own scheduler, so all of them must see the
same requests, in the same order, and the same aborts between the same two steps; the caller sees to that. Log-probs are
those of the law that was sampled (`processed_logprobs`), and no batch is left in flight at an abort or a refit
(`async_scheduling=False`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.platform.device import Platform
from rollpacker.types import Request, Response

NO_WEIGHTS = -1
"""The version of an engine that has none yet, or whose last refit did not end: it takes no requests."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class SamplingLaw:
    """How tokens are drawn: what all requests of a round have in common. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine; lengths in tokens."""

    model_path: str
    tensor_model_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    dtype: str
    gpu_memory_utilization: float
    enforce_eager: bool
    kv_cache_gib: int


class RolloutEngine:
    """Add, abort, step, and take new weights. Starts with dummy weights: the first refit fills them."""

    def __init__(self, options: EngineOptions, platform: Platform, *, seed: int) -> None:
        platform.prepare_engine_import(kv_cache_gib=options.kv_cache_gib)
        if platform.name == "cpu":
            _adapt_cpu_vllm()
        from vllm import LLM

        extra: dict[str, Any] = platform.engine_options(
            gpu_memory_utilization=options.gpu_memory_utilization, enforce_eager=options.enforce_eager
        )
        if options.max_num_batched_tokens is not None:
            extra["max_num_batched_tokens"] = options.max_num_batched_tokens
        self._llm = LLM(
            model=options.model_path,
            tensor_parallel_size=options.tensor_model_parallel_size,
            distributed_executor_backend="external_launcher",
            dtype=_DTYPES[options.dtype],
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            seed=seed,
            skip_tokenizer_init=True,
            load_format="dummy",
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
            scheduling_policy="priority",
            disable_log_stats=True,
            **extra,
        )
        self._platform = platform
        self._engine = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._model_runner = core.model_executor.driver_worker.worker.model_runner
        self._requests: dict[str, Request] = {}
        self._unstarted: dict[str, Request] = {}
        self._ended_tokens = 0
        self._counted_tokens = 0
        self._num_preemptions = 0
        self._asleep: set[str] = set()
        self.weight_version = NO_WEIGHTS
        self._count_preemptions()

    @property
    def runner_name(self) -> str:
        """Class of vLLM's model runner (V1 on CPU; CUDA defaults to V2)."""
        return f"{type(self._model_runner).__module__}.{type(self._model_runner).__qualname__}"

    @property
    def num_requests(self) -> int:
        """Requests in the engine, waiting or running."""
        return len(self._requests)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return float(self._scheduler.kv_cache_manager.usage)

    def add(self, request: Request, law: SamplingLaw) -> None:
        """Queue a request; its launch order is its priority."""
        if self.weight_version == NO_WEIGHTS:
            raise RuntimeError("a request for an engine without weights: no refit has ended yet")
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=law.temperature,
            top_p=law.top_p,
            top_k=law.top_k,
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_token_ids=list(law.stop_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(request.index)
        self._requests[request_id] = self._unstarted[request_id] = request
        prompt = {"prompt_token_ids": list(request.prompt.token_ids)}
        self._engine.add_request(request_id, prompt, params, priority=request.index)

    def abort(self, requests: Sequence[Request]) -> None:
        """Delete requests at once: their KV blocks are free and nothing of them comes out of `step`."""
        request_ids = [str(r.index) for r in requests if str(r.index) in self._requests]
        before = self._unfinished_tokens()
        self._engine.abort_request(request_ids)
        self._ended_tokens += before - self._unfinished_tokens()
        for request_id in request_ids:
            del self._requests[request_id]
            self._unstarted.pop(request_id, None)

    def abort_all(self) -> None:
        """Delete every request."""
        self.abort(list(self._requests.values()))

    def step(self) -> list[Response]:
        """One engine step; the responses that ended in it."""
        finished = []
        for output in self._engine.step():
            completion = output.outputs[0]
            request = self._requests.pop(output.request_id)
            self._ended_tokens += len(completion.token_ids)
            finished.append(
                Response(
                    request=request,
                    token_ids=tuple(completion.token_ids),
                    rollout_logprobs=_sampled_logprobs(completion),
                    finish_reason=str(completion.finish_reason),
                    weight_version=self.weight_version,
                )
            )
        return finished

    def take_started(self) -> list[Request]:
        """The requests that got their first token since the last call, in launch order (those that ended at once, too)."""
        waiting = self._scheduler.requests
        started = [i for i in self._unstarted if i not in waiting or waiting[i].num_output_tokens > 0]
        return [self._unstarted.pop(request_id) for request_id in started]

    def take_counts(self) -> tuple[int, int]:
        """Tokens generated and preemptions since the last call."""
        total = self._ended_tokens + self._unfinished_tokens()
        new_tokens, self._counted_tokens = total - self._counted_tokens, total
        preemptions, self._num_preemptions = self._num_preemptions, 0
        return new_tokens, preemptions

    def _unfinished_tokens(self) -> int:
        return sum(r.num_output_tokens for r in self._scheduler.requests.values())

    @contextlib.contextmanager
    def rewriting(self, weight_version: int) -> Iterator[None]:
        """Around a refit: one that fails leaves no valid version. Drops cached prefixes."""
        if self._requests:
            raise RuntimeError(f"refit with {len(self._requests)} requests in the engine would mix weight versions")
        self.weight_version = NO_WEIGHTS
        yield
        self.forget_prefixes()
        self.weight_version = weight_version

    def parameters(self) -> dict[str, Any]:
        """This rank's shards by vLLM's names: the parameters themselves, whose memory may move."""
        return dict(self._model_runner.model.named_parameters())

    def load_weights(self, named_tensors: Iterable[tuple[str, Any]], weight_version: int) -> None:
        """Golden refit: full tensors by Hugging Face names; vLLM takes its shard."""
        with self.rewriting(weight_version):
            self._model_runner.reload_weights(weights_iterator=_on_device(named_tensors, self._platform.device))

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes, so that what was decoded so far leaves no trace in the numerics of what follows."""
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Release weights and KV cache while the rank trains (CUDA; the CPU keeps them).

        Level 1 keeps a copy in host memory: level 2 would drop buffers too, which a refit does not bring back.
        """
        if self._platform.name == "cuda":
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, tag: str) -> None:
        """Map "weights" before the refit and "kv_cache" after it; nothing to do for what is awake."""
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def _count_preemptions(self) -> None:
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted


def _adapt_cpu_vllm() -> None:
    """Two things of vLLM 0.32 on CPUs, where it counts on other launchers and on never changing weights."""
    import vllm._custom_ops
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

    # oneDNN's packed weights leave zero-sized parameters; plain tensors can be written in place, as on CUDA.
    vllm._custom_ops._supports_onednn = False
    # Under the external launcher the shared memory of a tensor-parallel group has the same name in every job: two jobs on
    # one host, or one after another that was killed, would meet in it. The rendezvous port tells them apart.
    group_name = SharedMemory.make_group_name
    if not hasattr(SharedMemory, "is_named_by_job"):
        SharedMemory.is_named_by_job = True
        SharedMemory.make_group_name = staticmethod(
            lambda communicator: f"{os.environ['MASTER_PORT']}{group_name(communicator).replace('/', '')}"
        )


def _sampled_logprobs(completion: Any) -> tuple[float, ...]:
    """Log-prob of each sampled token: with `logprobs=0` the sampled token is the first entry of its position."""
    flat = completion.logprobs
    return tuple(flat.logprobs[start] for start in flat.start_indices)


def _on_device(named_tensors: Iterable[tuple[str, Any]], device: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in named_tensors:
        yield name, tensor.to(device)
