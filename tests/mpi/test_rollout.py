"""The engine inside the rank: refit, seeds, aborts. One engine for the module: TP 1 on one rank, else TP 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grid import Grid
from tiny_models import write_model

from rollpacker.comm.world import World
from rollpacker.config import TrainingConfig
from rollpacker.platform.device import Platform
from rollpacker.rollout.engine import EngineOptions, RolloutEngine, SamplingLaw
from rollpacker.types import Prompt, Request, Response
from rollpacker.weights.hf import write_hf_folder
from rollpacker.weights.reshard import bind_engine

VOCAB = 64
LENGTH = 24
LAW = SamplingLaw(1.0, 1.0, -1, (2,))
PROMPTS = [(5, 6, 7), (9,), (11, 12, 13, 14, 15), (20, 3)]

# What an engine of vLLM's own makes of the exported folders, in a process that knows nothing of ours.
_FRESH_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
prompts, length, folders = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
law = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)
engines = []  # kept: one that is dropped takes vLLM's process groups with it
for folder in folders:
    engines.append(LLM(model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=128))
    outputs = engines[-1].generate([{"prompt_token_ids": p} for p in prompts], law, use_tqdm=False)
    print("TOKENS" + json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""


@pytest.fixture(scope="module")
def tp(world: World) -> int:
    return min(world.size, 2)


@pytest.fixture(scope="module")
def model_folder(world: World, shared_tmp: Path) -> Path:
    folder = shared_tmp / "rollout_model"
    if world.rank == 0:
        write_model(folder, tied=True, vocab_size=VOCAB, hidden_size=128, seed=7)
    world.comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def engine(platform: Platform, model_folder: Path, tp: int) -> RolloutEngine:
    return build_engine(platform, model_folder, tp)


def build_engine(platform: Platform, model_folder: Path, tp: int) -> RolloutEngine:
    options = EngineOptions(
        model_path=str(model_folder),
        tensor_model_parallel_size=tp,
        max_model_len=128,
        max_num_seqs=32,
        max_num_batched_tokens=None,
        dtype="fp32",
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        kv_cache_gib=1,
    )
    return RolloutEngine(options, platform, seed=0)


def decode(engine: RolloutEngine, requests: list[Request], law: SamplingLaw = LAW) -> dict[int, Response]:
    for request in requests:
        engine.add(request, law)
    finished: dict[int, Response] = {}
    while engine.num_requests:
        finished.update({r.request.index: r for r in engine.step()})
    return finished


def requests(seeds: list[int], *, first_index: int = 0, max_tokens: int = LENGTH) -> list[Request]:
    return [
        Request(first_index + i, Prompt(f"p{i}", PROMPTS[i % len(PROMPTS)]), 0, 0, seed, max_tokens)
        for i, seed in enumerate(seeds)
    ]


def load_from_megatron(engine: RolloutEngine, platform: Platform, folder: Path, tp: int, version: int) -> Grid:
    grid = Grid.get(folder, platform, TrainingConfig(tensor_model_parallel_size=tp, dtype="fp32"))
    grid.weights.import_hf(str(folder))
    engine.load_weights(grid.weights.export_hf(), version)
    return grid


def test_greedy_after_refit_equals_a_fresh_engine(
    world: World, platform: Platform, engine: RolloutEngine, model_folder: Path, shared_tmp: Path, tp: int
) -> None:
    """The engine has decoded with other weights before; then Megatron's weights go in, and are exported as well."""
    other = shared_tmp / "other_model"
    if world.rank == 0:
        write_model(other, tied=True, vocab_size=VOCAB, hidden_size=128, seed=8)
    world.comm.Barrier()
    load_from_megatron(engine, platform, other, tp, 0)
    decode(engine, requests([1, 2, 3, 4]))
    grid = load_from_megatron(engine, platform, model_folder, tp, 1)
    export_model(world, grid, model_folder, shared_tmp / "refit_export")
    expected = world.comm.bcast(fresh_engine_tokens(shared_tmp / "refit_export")[0] if world.rank == 0 else None)
    check_greedy(engine, expected, weight_version=1)


def export_model(world: World, grid: Grid, source: Path, target: Path) -> None:
    tensors = grid.weights.export_hf()
    if world.rank == 0:
        write_hf_folder(target, source, tensors)
    else:
        for _ in tensors:
            pass


def check_greedy(engine: RolloutEngine, expected: list[list[int]], *, weight_version: int) -> None:
    got = decode(engine, requests([0, 0, 0, 0]), SamplingLaw(0.0, 1.0, -1, ()))
    tokens = [list(got[i].token_ids) for i in range(len(PROMPTS))]
    for ours, theirs in zip(tokens, expected, strict=True):
        stop = theirs.index(2) + 1 if 2 in theirs else len(theirs)  # generation_config's EOS ends ours
        assert ours == theirs[:stop]
    assert all(r.weight_version == weight_version for r in got.values())


def fresh_engine_tokens(*folders: Path) -> list[list[list[int]]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMIX", "RANK", "WORLD", "LOCAL"))}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    result = subprocess.run(
        [sys.executable, "-c", _FRESH_ENGINE, json.dumps(PROMPTS), str(LENGTH), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("TOKENS")]
    assert len(lines) == len(folders), result.stderr[-3000:]
    return [json.loads(line.removeprefix("TOKENS")) for line in lines]


def test_tokens_depend_on_the_seed_alone(
    world: World, platform: Platform, engine: RolloutEngine, model_folder: Path, tp: int
) -> None:
    """Same request, other company in the batch: same tokens and log-probs; another seed: others. All ranks agree."""
    load_from_megatron(engine, platform, model_folder, tp, 2)
    alone = decode(engine, requests([101]))
    crowd = decode(engine, requests([101, 102, 103, 104, 105, 106, 107, 108]))
    assert crowd[0].token_ids == alone[0].token_ids
    assert max(abs(a - b) for a, b in zip(crowd[0].rollout_logprobs, alone[0].rollout_logprobs, strict=True)) < 1e-5
    assert crowd[4].token_ids != crowd[0].token_ids  # the same prompt with another seed
    everywhere = world.comm.allgather({i: r.token_ids for i, r in crowd.items()})
    assert all(other == everywhere[0] for other in everywhere)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, -1), (0.7, 1.0, -1), (1.0, 0.8, -1), (1.0, 1.0, 5), (1.3, 0.9, 12)],
)
def test_rollout_logprobs_are_those_of_the_law_that_was_sampled(
    world: World, platform: Platform, engine: RolloutEngine, model_folder: Path, tp: int, temperature: float,
    top_p: float, top_k: int,
) -> None:  # fmt: skip
    """Against transformers on the same tokens, temperature and truncation applied: within 1e-4, as everywhere.

    So exp(train - rollout), the importance weight of a truncated law, is the share of the model's probability that was kept.
    """
    from transformers import AutoModelForCausalLM

    load_from_megatron(engine, platform, model_folder, tp, 3)
    responses = decode(engine, requests([7, 8, 9, 10]), SamplingLaw(temperature, top_p, top_k, (2,)))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for response in responses.values():
        prompt = response.request.prompt.token_ids
        tokens = torch.tensor([*prompt, *response.token_ids])
        with torch.no_grad():
            full = (model(tokens[None]).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        targets = tokens[len(prompt) :, None]
        kept = torch.zeros(full.shape, dtype=torch.bool)
        for row, logprobs in enumerate(full):
            order = logprobs.argsort(descending=True)[: top_k if top_k > 0 else None]
            probs = logprobs[order].softmax(-1)
            kept[row, order[probs.cumsum(-1) - probs < top_p]] = True  # up to and with the one that reaches top_p
        law = full.masked_fill(~kept, float("-inf")).log_softmax(-1).gather(1, targets)[:, 0]
        rollout = torch.tensor(response.rollout_logprobs)
        assert (law - rollout).abs().max() <= 1e-4
        share = full.masked_fill(~kept, float("-inf")).exp().sum(-1)
        assert ((full.gather(1, targets)[:, 0] - rollout).exp() - share).abs().max() <= 1e-4


def test_an_abort_leaves_nothing_behind(
    world: World, platform: Platform, engine: RolloutEngine, model_folder: Path, tp: int
) -> None:
    """Aborted requests free their blocks at once, yield nothing, and do not disturb the others."""
    load_from_megatron(engine, platform, model_folder, tp, 4)
    expected = decode(engine, requests([31, 32, 33, 34], max_tokens=60))
    engine.take_counts()
    all_requests = requests([31, 32, 33, 34], max_tokens=60)
    for request in all_requests:
        engine.add(request, LAW)
    finished = {r.request.index: r for _ in range(3) for r in engine.step()}
    engine.abort([r for r in all_requests if r.index % 2])
    while engine.num_requests:
        finished.update({r.request.index: r for r in engine.step()})
    kept = {i for i in expected if i % 2 == 0 or len(expected[i].token_ids) <= 3}
    assert finished.keys() == kept
    assert all(finished[i].token_ids == expected[i].token_ids for i in kept)
    assert not engine._scheduler.requests
    assert engine.kv_cache_usage == 0.0


def test_a_refit_with_requests_in_flight_is_refused(engine: RolloutEngine) -> None:
    request = requests([1])[0]
    engine.add(request, LAW)
    with pytest.raises(RuntimeError, match="would mix weight versions"):
        engine.load_weights([], 5)
    engine.abort([request])


def test_each_family_decodes_like_a_fresh_engine(world: World, platform: Platform, shared_tmp: Path, tp: int) -> None:
    """The other families' weights reach vLLM under the right names: greedy tokens after a refit, rollout TP 2.
    Last in this file, since engines that go take vLLM's process groups with them."""
    if world.size != 2:
        pytest.skip("an engine for each family is dear; two ranks are enough")
    exports, engines = [], []
    for family in ("qwen3", "llama3"):
        folder = shared_tmp / f"rollout_{family}"
        if world.rank == 0:
            write_model(folder, family=family, tied=False, vocab_size=VOCAB, hidden_size=128, seed=11)
        world.comm.Barrier()
        engines.append(build_engine(platform, folder, tp))
        exports.append(shared_tmp / f"export_{family}")
        export_model(world, load_from_megatron(engines[-1], platform, folder, tp, 1), folder, exports[-1])
    tokens = world.comm.bcast(fresh_engine_tokens(*exports) if world.rank == 0 else None)
    assert tokens[0] != tokens[1]
    for engine, expected in zip(engines, tokens, strict=True):
        check_greedy(engine, expected, weight_version=1)


def test_a_refit_in_place_equals_the_golden_one(
    world: World, platform: Platform, engine: RolloutEngine, model_folder: Path, tp: int
) -> None:
    """Every parameter of vLLM bit for bit, where it was rubbish before; no request while the weights are half written."""
    grid = load_from_megatron(engine, platform, model_folder, tp, 3)
    golden = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    with torch.no_grad():
        for tensor in engine.parameters().values():
            tensor.fill_(0.5)
    resharder = bind_engine(grid.weights, engine.parameters(), tp, world, bucket_bytes=4096)
    with engine.rewriting(4):
        with pytest.raises(RuntimeError, match="an engine without weights"):
            engine.add(requests([1])[0], LAW)
        resharder.run()
    resharder.check()
    assert engine.weight_version == 4
    for name, tensor in engine.parameters().items():
        assert torch.equal(tensor, golden[name]), name
    norm = engine.parameters()["model.norm.weight"]
    norm.data = torch.full_like(norm, 0.5)  # other memory, as from a loader that replaces a parameter's
    with pytest.raises(RuntimeError, match=r"1 of \d+ blocks .*model\.norm\.weight"):
        resharder.check()
    with engine.rewriting(5):
        resharder.run()
    resharder.check()
    assert torch.equal(engine.parameters()["model.norm.weight"], golden["model.norm.weight"])
