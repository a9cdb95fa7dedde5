"""tools/make_tiny_model.py: a folder that transformers loads, complete or absent, alike for like settings."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import demo_task  # noqa: E402
import make_tiny_model  # noqa: E402

SMALL = ["--hidden", "32", "--layers", "2", "--train-rows", "20", "--val-rows", "5", "--eval-samples", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny") / "demo"
    make_tiny_model.main(["--out", str(out), "--no-warm-start"])
    return out


@pytest.fixture(scope="module", params=[AutoTokenizer, PreTrainedTokenizerFast])
def tokenizer(request, folder):
    return request.param.from_pretrained(folder / "model")


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def every_problem():
    for d in range(2, demo_task.MAX_DIVISOR + 1):
        for n in range(d, min(demo_task.DIVIDEND_BOUND, d * (demo_task.MAX_STEPS + 1))):
            yield n, d


def test_the_model_is_a_small_qwen2_that_two_ranks_can_share(model):
    config = model.config
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert 500_000 <= model.num_parameters() <= 1_500_000
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for count in ("hidden_layers", "attention_heads", "key_value_heads"):
        assert getattr(config, f"num_{count}") % 2 == 0, count
    assert config.intermediate_size % 2 == 0
    assert config.vocab_size == 32
    assert config.max_position_embeddings >= 6 + make_tiny_model.MAX_RESPONSE_TOKENS


def test_special_ids_agree(model, tokenizer):
    for ids in (model.config, model.generation_config, tokenizer):
        assert (ids.pad_token_id, ids.bos_token_id, ids.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == model.config.vocab_size


def test_the_tokenizer_gives_every_text_back(tokenizer):
    for n, d in every_problem():
        for text in (demo_task.prompt_text(n, d), demo_task.solution_text(n, d)):
            ids = tokenizer.encode(text)
            assert ids[0] == tokenizer.bos_token_id
            assert len(ids) == len(text) + 1  # a token a character
            assert ids[1:] == tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids[1:]) == text
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_every_id_can_be_decoded_and_unused_ones_are_seen(tokenizer):
    assert all(isinstance(tokenizer.decode([i]), str) for i in range(32))
    special_and_known = 3 + len(demo_task.CHARACTERS)
    for k, i in enumerate(range(special_and_known, 32)):
        assert tokenizer.decode([i], skip_special_tokens=True) == f"<unused{k}>"
    assert tokenizer.decode(range(3), skip_special_tokens=True) == ""
    assert tokenizer.decode(range(3, special_and_known)) == demo_task.CHARACTERS


def test_prompt_files_have_their_rows(folder):
    texts = {name: (folder / f"{name}.jsonl").read_text() for name in ("train", "val")}
    assert [len(text.splitlines()) for text in texts.values()] == [2048, 64]
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}
    assert all(set(row) == {"prompt", "answer"} for row in rows["train"])
    assert Counter(row["domain"] for row in rows["val"]) == {"seen": 48, "unseen": 16}
    # The rows on which every measured figure of the demo stands.
    assert hashlib.sha256(texts["train"].encode()).hexdigest().startswith("cc4e11a5a3116f8f")


def test_packed_batches_drop_nothing_and_keep_problems_apart(tokenizer):
    batches = make_tiny_model.packed_batches(tokenizer, random.Random(5))
    packed = []
    for batch in (next(batches) for _ in range(20)):
        ids, mask = batch["inputs"]["input_ids"], batch["inputs"]["attention_mask"][:, 0]
        begins = ids.eq(tokenizer.bos_token_id)
        assert torch.equal(begins, batch["inputs"]["position_ids"].eq(0) & ids.ne(tokenizer.pad_token_id))
        for row, begin in begins.nonzero().tolist():
            end = begin + int(mask[row, :, begin].sum())  # the tokens that see the first one
            tokens = ids[row, begin:end].tolist()
            assert tokens.index(tokenizer.eos_token_id) == len(tokens) - 1
            causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            assert torch.equal(mask[row, begin:end, begin:end], causal)
            assert not mask[row, begin:end, :begin].any()
            assert not mask[row, end:, begin:end].any()
            assert batch["labels"][row, begin + 5 : end - 1].tolist() == tokens[6:]
            packed.append(tuple(tokens))
        num_packed = int(begins.sum())
        assert batch["labels"].ne(-100).sum() == sum(map(len, packed[-num_packed:])) - 6 * num_packed
    again = random.Random(5)
    drawn = [tuple(make_tiny_model._encoded_example(tokenizer, again)[0]) for _ in range(len(packed) + 3)]
    # All that was drawn is there, but for the three that wait for the next batch.
    assert sum((Counter(drawn) - Counter(packed)).values()) == 3
    assert not Counter(packed) - Counter(drawn)


def test_the_longest_problem_fills_a_row(tokenizer):
    solutions = (demo_task.solution_text(*problem) for problem in every_problem())
    longest = max(len(tokenizer.encode(text, add_special_tokens=False)) for text in solutions)
    assert longest + len("<47%6=") + 1 == make_tiny_model.ROW_TOKENS


def test_generation_agrees_with_transformers(model, tokenizer):
    prompts = [tokenizer.encode(row["prompt"]) for row in demo_task.data_rows(3, 0)]
    ours = make_tiny_model.generate(model, prompts, is_greedy=True)
    for prompt, response in zip(prompts, ours, strict=True):
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        theirs = generated[0, len(prompt) :].tolist()
        assert response[: len(theirs)] == theirs[: len(response)]


def test_the_same_settings_give_the_same_bytes_and_return_at_once(tmp_path, capsys):
    arguments = ["--max-steps", "3", "--seed", "4", *SMALL]
    for name in ("a", "b"):
        make_tiny_model.main(["--out", str(tmp_path / name), *arguments])
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    reports = [json.loads(c.pop("demo_model.json")) for c in (a, b)]
    assert a == b
    for report in reports:
        del report["measured"]["warm_start_s"]
    assert reports[0] == reports[1]
    assert capsys.readouterr().out.splitlines()[-1].startswith("done: accuracy sampled 0.00, greedy 0.00")

    written = (tmp_path / "a" / "demo_model.json").stat().st_mtime_ns
    make_tiny_model.main(["--out", str(tmp_path / "a"), *arguments])
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "a" / "demo_model.json").stat().st_mtime_ns == written
    assert names(tmp_path) == ["a", "b"]


def test_other_settings_replace_the_folder(tmp_path):
    out = tmp_path / "demo"
    make_tiny_model.main(["--out", str(out), "--no-warm-start", *SMALL])
    before = contents(out)
    make_tiny_model.main(["--out", str(out), "--no-warm-start", *SMALL, "--seed", "1"])
    after = contents(out)
    assert set(before) == set(after)
    assert before["model/model.safetensors"] != after["model/model.safetensors"]
    assert before["train.jsonl"] != after["train.jsonl"]
    assert names(tmp_path) == ["demo"]


def test_a_failed_run_leaves_the_old_folder_and_nothing_else(tmp_path, monkeypatch):
    out = tmp_path / "demo"
    make_tiny_model.main(["--out", str(out), "--no-warm-start", *SMALL])
    before = contents(out)

    def fail(path, rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_task, "write_rows", fail)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model.main(["--out", str(out), "--no-warm-start", *SMALL, "--seed", "1"])
    assert contents(out) == before
    assert names(tmp_path) == ["demo"]


def test_a_terminated_run_leaves_nothing(tmp_path):
    command = [sys.executable, str(TOOLS / "make_tiny_model.py"), "--out", str(tmp_path / "x")]
    process = subprocess.Popen([*command, "--max-steps", "100000", *SMALL], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not names(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert names(tmp_path)  # the half-made folder, under another name
        assert not (tmp_path / "x").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert names(tmp_path) == []


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"notes\.txt"):
        make_tiny_model.main(["--out", str(tmp_path), "--no-warm-start", *SMALL])
    assert names(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--heads", "3"], "multiples"), (["--layers", "0"], "1 or more"), (["--max-steps", "-1"], "0 or more")],
)
def test_impossible_settings_are_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        make_tiny_model.main(["--out", str(tmp_path / "x"), *arguments])
    assert message in capsys.readouterr().err
