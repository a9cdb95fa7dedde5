"""A real pretrained model on the same program: SmolLM2-135M-Instruct, chat prompts, math-verify (`make smollm2` made it)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import REPOSITORY, command_line, read_jsonl, run
from safetensors.torch import load_file

MODEL = REPOSITORY / "assets" / "smollm2"
END_OF_TURN = 2  # <|im_end|>
CAP = 128

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MODEL.exists(), reason="assets/smollm2 is not there: make smollm2"),
]


@pytest.fixture(scope="module")
def smollm2_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two ranks as configs/smollm2_cpu.yaml has them, the samples dumped; the run directory."""
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    arguments = [f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}.dump"]
    result = run(command_line("train", 2, *arguments, config="configs/smollm2_cpu.yaml"), timeout_s=800)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "134.5 M parameters" in result.stdout
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


def responses(dump: Path) -> list[tuple[dict[str, Any], list[int]]]:
    """Each sample's facts and its response's tokens, from the dump."""
    import json

    from safetensors import safe_open

    found = []
    for file in sorted(dump.glob("step_*/*.safetensors")):
        with safe_open(file, framework="np") as arrays:
            facts = json.loads(arrays.metadata()["samples"])
            ids, at = arrays.get_tensor("response_ids"), 0
            for fact, length in zip(facts, arrays.get_tensor("response_lengths"), strict=True):
                found.append((fact, ids[at : at + length].tolist()))
                at += length
    return found


def test_responses_end_at_the_end_of_the_turn(smollm2_run: Path) -> None:
    """<|im_end|> ends a response and is its last token; what never got there has exactly the length cap."""
    samples = responses(Path(f"{smollm2_run}.dump"))
    assert len(samples) == 2 * 4 * 4
    for facts, tokens in samples:
        if facts["finish_reason"] == "stop":
            assert tokens.index(END_OF_TURN) == len(tokens) - 1
        else:
            assert END_OF_TURN not in tokens and len(tokens) == CAP
    assert sum(facts["finish_reason"] == "stop" for facts, _ in samples) >= 8


def test_rollout_and_training_agree(smollm2_run: Path) -> None:
    """On the log-prob of every token, to 2e-4 in fp32 (30 layers, vocabulary of 49,152)."""
    rows = read_jsonl(smollm2_run / "metrics.jsonl")
    assert len(rows) == 2
    assert all(0 < row["training/rollout_logprobs_diff_max"] <= 2e-4 for row in rows)


def test_the_trained_model_is_another_one_and_loads(smollm2_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = read_jsonl(smollm2_run / "metrics.jsonl")
    assert sum(row["actor/grad_norm"] for row in rows) > 0  # some answers were right, and not all of a group
    folder = smollm2_run / "checkpoints" / "step_2" / "huggingface"
    before, after = weights_of(MODEL), weights_of(folder)
    assert before.keys() == after.keys()
    moved = max(float((before[n].float() - after[n]).abs().max()) for n in before)
    assert 1e-7 < moved < 1e-5  # two steps of Adam at 1e-6
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "25" in tokenizer.decode(answer)  # it still speaks of what it was asked


def test_smollm2_converts_there_and_back(tmp_path: Path) -> None:
    """Bit for bit in bf16, and Megatron computes the logits that transformers computes."""
    convert = [sys.executable, "-m", "rollpacker", "convert"]
    there = run([*convert, "hf-to-megatron", str(MODEL), str(tmp_path / "mg"), "--verify"], timeout_s=400)
    assert there.returncode == 0, there.stdout + there.stderr[-3000:]
    back = run([*convert, "megatron-to-hf", str(tmp_path / "mg"), str(tmp_path / "hf")])
    assert back.returncode == 0, back.stderr[-3000:]
    before, after = weights_of(MODEL), weights_of(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tail_batching_on_a_pretrained_model(tmp_path: Path, ranks: int) -> None:
    """Three steps in deterministic mode, on one replica and on two (its 9 heads do not make a TP group of two).

    Some of the prompts are audited, so there is a LONG round whatever the responses are.
    """
    settings = ["tail_batching.mode=paper", "tail_batching.audit_fraction=0.4", "trainer.deterministic=true"]
    settings += ["data.train_batch_size=2", "rollout.n=2", "data.max_response_length=64"]
    settings += ["trainer.total_training_steps=3", "trainer.save_freq=0", f"trainer.default_local_dir={tmp_path}/run"]
    result = run(command_line("train", ranks, *settings, config="configs/smollm2_cpu.yaml"), timeout_s=800)
    assert result.returncode == 0, result.stderr[-3000:]
    rows, samples = (read_jsonl(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "samples"))
    assert {row["rollout/is_long_round"] for row in rows} == {0, 1}
    for row in rows:
        mine = [s for s in samples if s["step"] == row["training/global_step"]]
        if row["rollout/is_long_round"]:
            assert row["filter/num_launched"] == len(mine)
            assert row["rollout/aborted_responses"] == 0
        else:
            assert (row["filter/num_launched"], len(mine)) == (3 * 3, 2 * 2)
            assert row["rollout/aborted_responses"] > 0
        assert 0 < row["training/rollout_logprobs_diff_max"] <= 2e-4
    assert len({(s["prompt_id"], s["response_index"]) for s in samples}) == len(samples)
