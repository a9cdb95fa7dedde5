"""The row formats: what each gives, and what is said of a row that is none, or a wrong one."""

import json
from pathlib import Path

import pytest
from prompt_files import BOS, PLAIN, ROLL, USER, VERL, FakeTokenizer, load, write, write_parquet

from rollpacker.config import ConfigError
from rollpacker.data.tasks import Example, Row, parse_row

DEEPMATH = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "prompts" / "deepmath_roll.jsonl"


def parse(**columns) -> Row:
    return parse_row(columns, "a.jsonl:1")


# Plain


def test_string_prompt_is_encoded_as_is_with_special_tokens(tmp_path):
    data = load(write(tmp_path / "a.jsonl", {"prompt": " 2+2? ", "answer": 4}))
    tokens = (BOS, *map(ord, " 2+2? "))
    assert data.examples == [Example("a:1", " 2+2? ", tokens, ground_truth="4", domain="default")]
    assert data.by_id == {"a:1": data.examples[0]}
    assert data.num_overlong == 0


def test_messages_go_through_the_chat_template_without_a_second_bos(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = {"prompt": messages, "answer": "x", "id": "q", "domain": "maths"}
    text = "<system>s<user>u<assistant>"
    assert load(write(tmp_path / "a.jsonl", row)).examples == [Example("q", text, tuple(map(ord, text)), "x", "maths")]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (7, "7"),
        (-2.5, "-2.5"),
        (1e-7, "0.0000001"),
        (1e22, "10000000000000000000000"),
        (" a ", " a "),
        ('{"inputs": ["1"]}', '{"inputs": ["1"]}'),  # JSON text is text: a reward function may take it apart
        (["x"], "x"),  # a list of one accepted answer
        ([3], "3"),
    ],
)
def test_answers_become_text_in_every_format(answer, expected):
    assert parse(**PLAIN | {"answer": answer}).ground_truth == expected
    assert parse(**VERL | {"reward_model": {"ground_truth": answer}}).ground_truth == expected
    assert parse(**ROLL | {"ground_truth": answer}).ground_truth == expected


# verl


def test_verl_row():
    row = parse(**VERL, ability="math", extra_info={"index": 3, "split": "train"}, id=9, domain="unread")
    assert row == Row(({"role": "user", "content": "p"},), "1", domain="gsm8k", prompt_id=None)
    assert parse(prompt="p", reward_model={"ground_truth": 1}) == Row("p", "1", domain="default", prompt_id=None)


def test_verl_parquet_messages_lose_the_keys_that_the_table_made_up(tmp_path):
    """In a struct column each message has the keys of all; a template may ask whether a key is there."""
    seen = []

    class Recording(FakeTokenizer):
        def apply_chat_template(self, conversation, **options):
            seen.append(conversation)
            return super().apply_chat_template(conversation, **options)

    system, named = {"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "Ann"}
    file = write_parquet(tmp_path / "a.parquet", VERL | {"prompt": [system, named]}, VERL)
    assert [e.prompt_id for e in load(file, tokenizer=Recording()).examples] == ["a:1", "a:2"]
    assert seen == [[system, named], USER]


# ROLL


def test_roll_row():
    expected = Row(({"role": "user", "content": "p"},), "1", domain="deepmath", prompt_id="7")
    assert parse(**ROLL, id=7, prompt="not used", difficulty="2.0") == expected
    assert parse(**ROLL | {"messages": USER}, id="7") == expected
    assert parse(**ROLL, domain="math_rule").domain == "math_rule"  # ROLL asks for the tag only where there is none
    assert parse(messages=USER, ground_truth="1").domain == "default"


@pytest.mark.skipif(not DEEPMATH.is_file(), reason="the shared data are not beside this checkout")
def test_a_real_roll_file():
    data = load(DEEPMATH, max_prompt_length=2000)
    assert len(data.examples) + data.num_overlong == 1980
    assert data.num_by_domain == {"math_rule": len(data.examples)}
    for example, line in zip(data.examples, filter(_is_short, DEEPMATH.open(encoding="utf-8")), strict=True):
        row = json.loads(line)
        assert (example.prompt_id, example.ground_truth) == (row["id"], row["ground_truth"])
        assert example.text.endswith(f"<user>{row['prompt']}<assistant>")
        assert example.text.startswith("<system>Please reason step by step")


def _is_short(line: str) -> bool:
    return sum(len(m["role"]) + len(m["content"]) + 2 for m in json.loads(json.loads(line)["messages"])) + 11 <= 2000


# Mistakes: each message names file and line, the value and what was expected

BAD_ROWS = {
    "no format": (
        {"question": "p", "solution": "1"},
        ["fits no format: it has question, solution", "plain", "verl", "ROLL"],
    ),
    "no prompt": ({"question": "p", "answer": "1"}, ["fits no format: it has question, answer. Expected"]),
    "null prompt": ({"prompt": None, "answer": "1"}, ["it has prompt=null, answer"]),
    "no answer": ({"prompt": "p", "solution": "1"}, ["it has prompt, solution"]),
    "null answer": ({"prompt": "p", "answer": None}, ["it has prompt, answer=null"]),
    "nothing": ({}, ["it has no keys"]),
    "plain and verl": (PLAIN | VERL, ["fits the formats plain and verl", "reward_model"]),
    "verl and ROLL": (VERL | ROLL, ["fits the formats verl and ROLL", "messages, ground_truth"]),
    "number prompt": (PLAIN | {"prompt": 3}, ["prompt=3", "expected text or a list"]),
    "empty prompt": (PLAIN | {"prompt": " "}, ["prompt=' ' is empty"]),
    "no messages": (PLAIN | {"prompt": []}, ["prompt=[] is empty"]),
    "empty answer": (PLAIN | {"answer": ""}, ["answer=''", "not empty"]),
    "bool answer": (PLAIN | {"answer": True}, ["answer=True", "expected text"]),
    "NaN answer": (PLAIN | {"answer": float("nan")}, ["answer=nan", "finite"]),
    "list answer": (PLAIN | {"answer": ["1", "2"]}, ["answer=['1', '2']", "one answer", "reward.function"]),
    "empty list answer": (PLAIN | {"answer": []}, ["answer=[]", "not empty"]),
    "bad id": (PLAIN | {"id": 1.5}, ["id=1.5", "expected text"]),
    "bad domain": (PLAIN | {"domain": ""}, ["domain=''", "expected text"]),
    "half a character": (PLAIN | {"prompt": "p\ud800"}, ["prompt holds '\\ud800' at character 1"]),
    "half in a message": (
        PLAIN | {"prompt": [{"role": "user", "content": "\udc00"}]},
        ["message 1 of prompt holds '\\udc00' at character 0"],
    ),
    "bad message": (PLAIN | {"prompt": ["hi"]}, ["message 1 of prompt is 'hi'", '"role"']),
    "unknown role": (PLAIN | {"prompt": [{"role": "human", "content": "p"}]}, ["role='human'", "user"]),
    "no role": (PLAIN | {"prompt": [{"from": "user", "content": "p"}]}, ["message 1", "role=None"]),
    "bad content": (PLAIN | {"prompt": [{"role": "user", "content": [1]}]}, ["content=[1]", "expected text"]),
    "empty message": (PLAIN | {"prompt": [{"role": "user", "content": " "}]}, ["last message", "empty"]),
    "solution in prompt": (
        PLAIN | {"prompt": [*USER, {"role": "assistant", "content": "1"}]},
        ["role='assistant'", "Delete it"],
    ),
    "refused by the template": (
        PLAIN | {"prompt": [{"role": "tool", "content": "p"}]},
        ["chat template refuses the messages with roles tool: a conversation cannot start with a tool"],
    ),
    "verl without a struct": (VERL | {"reward_model": "rule"}, ["reward_model='rule'", '"ground_truth"']),
    "verl without an answer": (VERL | {"reward_model": {"style": "model"}}, ["reward_model.ground_truth=None"]),
    "verl with an empty answer": (VERL | {"reward_model": {"ground_truth": ""}}, ["reward_model.ground_truth=''"]),
    "verl with a structure": (
        VERL | {"reward_model": {"ground_truth": {"target": ["1"]}}},
        ["one answer", "JSON text"],
    ),
    "verl with a bad source": (VERL | {"data_source": ["x"]}, ["data_source=['x']"]),
    "ROLL with no JSON": (ROLL | {"messages": "[{'role'"}, ["messages: not valid JSON", "column 3", "JSON list of"]),
    "ROLL with other JSON": (ROLL | {"messages": "3"}, ["messages=3: expected a list of chat messages"]),
    "ROLL without messages": (ROLL | {"messages": "[]"}, ["messages=[] is empty"]),
    "ROLL, half a character": (
        ROLL | {"messages": json.dumps([{"role": "user", "content": "\ud800"}])},
        ["message 1 of messages holds '\\ud800'"],
    ),
    "ROLL with a bad tag": (ROLL | {"tag": 1.5}, ["tag=1.5"]),
    "duplicate id": (PLAIN | {"id": "a:1"}, ["id='a:1' already names the row at", "a.jsonl:1"]),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_names_file_line_value_and_expectation(tmp_path, name):
    row, fragments = BAD_ROWS[name]
    file = write(tmp_path / "a.jsonl", PLAIN, "", row, PLAIN)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}:3: ")
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert len(str(caught.value)) < 500 + 2 * len(str(file))
