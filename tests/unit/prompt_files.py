"""What the tests of the data share: a tokenizer without a framework, and prompt files written in one line."""

import json
from pathlib import Path

import pyarrow
from pyarrow import parquet

from rollpacker.data.prompts import PromptDataset, load_examples

BOS = 1
USER = [{"role": "user", "content": "p"}]
PLAIN = {"prompt": "p", "answer": "1"}
VERL = {"prompt": USER, "reward_model": {"style": "rule", "ground_truth": "1"}, "data_source": "gsm8k"}
ROLL = {"messages": json.dumps(USER), "ground_truth": "1", "tag": "deepmath"}


class FakeTokenizer:
    """One token a character, after a BOS; chat messages become <role>content<assistant>."""

    def __init__(self, chat_template="template"):
        self.chat_template = chat_template

    def encode(self, text, *, add_special_tokens):
        return [BOS] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        if conversation[0]["role"] == "tool":
            raise ValueError("a conversation cannot start with a tool")
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"


def write(path: Path, *rows) -> Path:
    """A .jsonl file of rows, each an object or the text of a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, *rows, schema=None, **options) -> Path:
    """A .parquet file of rows; a column that a row lacks is null there, as in any table."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([dict.fromkeys(names) | row for row in rows], schema=schema)
    parquet.write_table(table, path, **options)
    return path


def load(*files, max_prompt_length=100, tokenizer=None, **options) -> PromptDataset:
    return load_examples(files, tokenizer or FakeTokenizer(), max_prompt_length=max_prompt_length, **options)
