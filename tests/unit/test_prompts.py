"""Prompt files -> a dataset: ids over files, the length filter, the tokenizer's mistakes, domains left out."""

import subprocess
import sys
import time

import pytest
from prompt_files import PLAIN, ROLL, USER, VERL, FakeTokenizer, load, write, write_parquet

from rollpacker.config import ConfigError


def test_files_of_all_formats_and_kinds_in_one_run(tmp_path):
    files = [
        write(tmp_path / "a.jsonl", PLAIN, PLAIN | {"id": "x"}),
        write_parquet(tmp_path / "b.parquet", VERL, VERL),
        write(tmp_path / "c.jsonl", ROLL, PLAIN, VERL),
    ]
    data = load(*files)
    assert [e.prompt_id for e in data.examples] == ["a:1", "x", "b:1", "b:2", "c:1", "c:2", "c:3"]
    assert data.num_by_domain == {"default": 3, "gsm8k": 3, "deepmath": 1}
    assert list(data.by_id.values()) == data.examples


def test_files_of_one_stem_get_distinct_ids(tmp_path):
    files = [write(tmp_path / name, PLAIN) for name in ("m/x/a.jsonl", "m/y/a.jsonl", "n/x/a.jsonl")]
    assert [e.prompt_id for e in load(*files[:2]).examples] == ["x/a.jsonl:1", "y/a.jsonl:1"]
    assert [e.prompt_id for e in load(*files).examples] == ["m/x/a.jsonl:1", "m/y/a.jsonl:1", "n/x/a.jsonl:1"]
    files = [write(tmp_path / "a.jsonl", PLAIN), write_parquet(tmp_path / "a.parquet", PLAIN)]
    assert [e.prompt_id for e in load(*files).examples] == ["a.jsonl:1", "a.parquet:1"]


def test_an_id_that_stands_in_two_files_names_both_rows(tmp_path):
    first = write(tmp_path / "a.jsonl", PLAIN, PLAIN | {"id": "7"})
    second = write_parquet(tmp_path / "b.parquet", PLAIN | {"id": 6}, PLAIN | {"id": 7})
    with pytest.raises(ConfigError, match=rf"^{second}: row 2: id='7' already names the row at {first}:2: "):
        load(first, second)


def test_training_and_validation_may_share_ids(tmp_path):
    files = [write(tmp_path / name, PLAIN | {"id": "7"}) for name in ("a.jsonl", "b.jsonl")]
    train, validation = load(files[0]), load(files[1], key="data.val_files")
    assert list(train.by_id) == list(validation.by_id) == ["7"]


def test_one_file_listed_twice(tmp_path):
    file = write(tmp_path / "a.jsonl", PLAIN)
    with pytest.raises(ConfigError, match=r"^data\.val_files: .* is the same file as"):
        load(file, tmp_path / "." / ".." / tmp_path.name / "a.jsonl", key="data.val_files")


def test_overlong_prompts_are_left_out_and_counted(tmp_path):
    file = write(tmp_path / "a.jsonl", *({"prompt": "x" * n, "answer": 1} for n in (3, 4, 5, 6)))
    data = load(str(file), max_prompt_length=5)
    assert [e.prompt_id for e in data.examples] == ["a:1", "a:2"]
    assert data.num_overlong == 2


def test_a_hundred_prompts_of_100k_tokens_are_left_out_quickly(tmp_path):
    long = VERL | {"prompt": [{"role": "user", "content": "x" * 100_000}]}
    file = write_parquet(tmp_path / "a.parquet", VERL, *[long] * 100, VERL)
    start = time.process_time()
    data = load(file)
    assert time.process_time() - start < 10  # about 1 s; a filter that is quadratic in the length would take hours
    assert ([e.prompt_id for e in data.examples], data.num_overlong) == (["a:1", "a:102"], 100)


def test_no_prompt_left_after_the_length_filter(tmp_path):
    file = write(tmp_path / "a.jsonl", PLAIN | {"prompt": "xxxxx"}, PLAIN | {"prompt": "xxxx"})
    with pytest.raises(
        ConfigError, match=r"^data\.val_files: all 2 prompts .*max_prompt_length=3 tokens; the shortest has 5\. Raise"
    ):
        load(file, max_prompt_length=3, key="data.val_files")


def test_messages_without_a_chat_template_name_file_and_line(tmp_path):
    file = write(tmp_path / "a.jsonl", PLAIN | {"prompt": USER})
    with pytest.raises(ConfigError, match=rf"^{file}:1: .* no chat template\. .*instruct"):
        load(file, tokenizer=FakeTokenizer(chat_template=None))


def test_jinja_errors_of_a_chat_template_name_file_and_line(tmp_path):
    jinja2 = pytest.importorskip("jinja2")

    class Raising(FakeTokenizer):
        def apply_chat_template(self, *_, **__):
            raise jinja2.TemplateError("roles must alternate")

    file = write(tmp_path / "a.jsonl", PLAIN | {"prompt": USER})
    with pytest.raises(ConfigError, match=rf"^{file}:1: .*roles user: roles must alternate"):
        load(file, tokenizer=Raising())


def test_prompt_without_tokens_names_file_and_line(tmp_path):
    class Silent(FakeTokenizer):
        def encode(self, *_, **__):
            return []

    file = write(tmp_path / "a.jsonl", PLAIN)
    with pytest.raises(ConfigError, match=rf"^{file}:1: the prompt 'p' gives no tokens"):
        load(file, tokenizer=Silent())


def test_loading_needs_no_framework():
    heavy = "{'torch', 'numpy', 'vllm', 'mpi4py', 'pyarrow'}"
    code = f"import sys, rollpacker.data.prompts as _; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
