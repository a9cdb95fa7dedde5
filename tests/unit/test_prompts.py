import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import ConfigError
from rollpacker.data.prompts import PromptDataset, PromptOrder, load_examples
from rollpacker.data.tasks import Example

BOS = 1


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


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def load(*files, max_prompt_length=100, tokenizer=None) -> PromptDataset:
    return load_examples(files, tokenizer or FakeTokenizer(), max_prompt_length=max_prompt_length)


# Reading


def test_string_prompt_is_encoded_as_is_with_special_tokens(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": " 2+2? ", "answer": 4})
    data = load(file)
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
    [(7, "7"), (-2.5, "-2.5"), (1e-7, "0.0000001"), (1e22, "10000000000000000000000"), (" a ", " a ")],
)
def test_answers_become_text(tmp_path, answer, expected):
    assert load(write(tmp_path / "a.jsonl", {"prompt": "p", "answer": answer})).examples[0].ground_truth == expected


def test_bom_blank_lines_crlf_and_line_separators_are_tolerated(tmp_path):
    file = tmp_path / "a.jsonl"
    line = '{"prompt": "p\u2028q", "answer": "1", "id": null, "domain": null, "other": 1}'
    file.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n  \n" + line.encode())
    data = load(file)
    assert [e.prompt_id for e in data.examples] == ["a:1", "a:4"]
    assert [e.domain for e in data.examples] == ["default", "default"]


def test_overlong_prompts_are_left_out_and_counted(tmp_path):
    file = write(tmp_path / "a.jsonl", *({"prompt": "x" * n, "answer": 1} for n in (3, 4, 5, 6)))
    data = load(str(file), max_prompt_length=5)
    assert [e.prompt_id for e in data.examples] == ["a:1", "a:2"]
    assert data.num_overlong == 2


def test_files_of_one_stem_get_distinct_ids(tmp_path):
    row = {"prompt": "p", "answer": 1}
    files = [write(tmp_path / name, row) for name in ("m/x/a.jsonl", "m/y/a.jsonl", "n/x/a.jsonl")]
    assert [e.prompt_id for e in load(*files[:2]).examples] == ["x/a.jsonl:1", "y/a.jsonl:1"]
    assert [e.prompt_id for e in load(*files).examples] == ["m/x/a.jsonl:1", "m/y/a.jsonl:1", "n/x/a.jsonl:1"]


# Mistakes: each message names file and line, the value and what was expected

GOOD = b'{"prompt": "p", "answer": "1"}\n'
BAD_ROWS = {
    "not UTF-8": (b'{"prompt": "\xe9"}', ["0xe9", "not UTF-8"]),
    "UTF-16": ('{"prompt": "p"}'.encode("utf-16"), ["0xff", "not UTF-8"]),
    "malformed": (b'{"prompt": "p", "answer"}', ["not valid JSON", "column 25", "one JSON object per line"]),
    "deep": (b"[" * 100_000, ["JSON that Python cannot hold"]),
    "many digits": (b'{"prompt": "p", "answer": ' + b"1" * 5000 + b"}", ["JSON that Python cannot hold"]),
    "list": (b'[{"prompt": "p"}]', ["one JSON object per line", "one element per line"]),
    "number": (b"3", ["found '3'"]),
    "no prompt": (b'{"question": "p", "answer": "1"}', ["no 'prompt'", "question, answer", "Expected"]),
    "null prompt": (b'{"prompt": null, "answer": "1"}', ["prompt=None", "expected text or a list"]),
    "number prompt": (b'{"prompt": 3, "answer": "1"}', ["prompt=3", "expected text or a list"]),
    "empty prompt": (b'{"prompt": " ", "answer": "1"}', ["prompt=' ' is empty"]),
    "no messages": (b'{"prompt": [], "answer": "1"}', ["prompt=[] is empty"]),
    "no answer": (b'{"prompt": "p", "solution": "1"}', ["no 'answer'", "prompt, solution"]),
    "null answer": (b'{"prompt": "p", "answer": null}', ["no 'answer'", "answer=null"]),
    "empty answer": (b'{"prompt": "p", "answer": ""}', ["answer=''", "not empty"]),
    "bool answer": (b'{"prompt": "p", "answer": true}', ["answer=True", "expected text"]),
    "NaN answer": (b'{"prompt": "p", "answer": NaN}', ["answer=nan", "finite"]),
    "list answer": (b'{"prompt": "p", "answer": ["1"]}', ["answer=['1']", "expected text"]),
    "bad id": (b'{"prompt": "p", "answer": "1", "id": 1.5}', ["id=1.5", "expected text"]),
    "bad domain": (b'{"prompt": "p", "answer": "1", "domain": ""}', ["domain=''", "expected text"]),
    "half a character": (b'{"prompt": "p\\ud800", "answer": "1"}', ["prompt holds '\\ud800' at character 1"]),
    "bad message": (b'{"prompt": ["hi"], "answer": "1"}', ["message 1 of the prompt is 'hi'", '"role"']),
    "unknown role": (b'{"prompt": [{"role": "human", "content": "p"}], "answer": "1"}', ["role='human'", "user"]),
    "no role": (b'{"prompt": [{"from": "user", "content": "p"}], "answer": "1"}', ["message 1", "role=None"]),
    "bad content": (b'{"prompt": [{"role": "user", "content": [1]}], "answer": "1"}', ["content=[1]", "expected text"]),
    "empty message": (b'{"prompt": [{"role": "user", "content": " "}], "answer": "1"}', ["last message", "empty"]),
    "solution in prompt": (
        b'{"prompt": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "1"}], "answer": "1"}',
        ["role='assistant'", "Delete it"],
    ),
    "refused by the template": (
        b'{"prompt": [{"role": "tool", "content": "p"}], "answer": "1"}',
        ["chat template refuses the messages with roles tool: a conversation cannot start with a tool"],
    ),
    "duplicate id": (
        b'{"prompt": "p", "answer": "1", "id": "a:1"}',
        ["id='a:1' already names the row at", "a.jsonl:1"],
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_names_file_line_value_and_expectation(tmp_path, name):
    line, fragments = BAD_ROWS[name]
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}:3: ")
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert len(str(caught.value)) < 400 + 2 * len(str(file))


def test_messages_without_a_chat_template_name_file_and_line(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "p"}], "answer": "1"})
    with pytest.raises(ConfigError, match=rf"^{file}:1: .* no chat template\. .*instruct"):
        load(file, tokenizer=FakeTokenizer(chat_template=None))


def test_jinja_errors_of_a_chat_template_name_file_and_line(tmp_path):
    jinja2 = pytest.importorskip("jinja2")

    class Raising(FakeTokenizer):
        def apply_chat_template(self, *_, **__):
            raise jinja2.TemplateError("roles must alternate")

    file = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "p"}], "answer": "1"})
    with pytest.raises(ConfigError, match=rf"^{file}:1: .*roles user: roles must alternate"):
        load(file, tokenizer=Raising())


def test_prompt_without_tokens_names_file_and_line(tmp_path):
    class Silent(FakeTokenizer):
        def encode(self, *_, **__):
            return []

    file = write(tmp_path / "a.jsonl", {"prompt": "p", "answer": "1"})
    with pytest.raises(ConfigError, match=rf"^{file}:1: the prompt 'p' gives no tokens"):
        load(file, tokenizer=Silent())


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: no such file\. .*working directory"):
        load(tmp_path / "none.jsonl")


def test_directory(tmp_path):
    with pytest.raises(ConfigError, match=rf"{tmp_path} is a directory: expected a \.jsonl file"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path, content):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{file} is empty: expected one JSON object per line"):
        load(file)


def test_one_file_listed_twice(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "p", "answer": "1"})
    with pytest.raises(ConfigError, match="is the same file as"):
        load(file, tmp_path / "." / ".." / tmp_path.name / "a.jsonl")


def test_no_prompt_left_after_the_length_filter(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "xxxxx", "answer": "1"}, {"prompt": "xxxx", "answer": "1"})
    with pytest.raises(ConfigError, match=r"all 2 prompts .*max_prompt_length=3 tokens; the shortest has 5\. Raise"):
        load(file, max_prompt_length=3)


def test_loading_needs_no_framework():
    code = "import sys, rollpacker.data.prompts as _; print({'torch', 'numpy', 'vllm', 'mpi4py'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# The order


def rows(n):
    return [(f"p{i}", (i, i + 1), "even" if i % 2 == 0 else "odd") for i in range(n)]


def order(n, seed=0, shuffle=True, total_epochs=None):
    return PromptOrder(rows(n), seed=seed, shuffle=shuffle, total_epochs=total_epochs)


def test_known_order_is_the_same_on_every_machine():
    assert "".join(p.prompt_id for p in order(5).draw(10)) == "p3p2p0p1p4p2p1p3p0p4"
    assert [p.prompt_id for p in order(3, shuffle=False).draw(5)] == ["p0", "p1", "p2", "p0", "p1"]


def test_drawn_prompts_carry_tokens_domain_and_epoch():
    examples = [Example("a", "text", (1, 2), "4", "maths")]
    prompts = PromptOrder(examples, seed=0, shuffle=True, total_epochs=2).draw(5)
    assert [(p.prompt_id, p.token_ids, p.domain, p.epoch) for p in prompts] == [
        ("a", (1, 2), "maths", 0),
        ("a", (1, 2), "maths", 1),
    ]


@given(n=st.integers(1, 12), seed=st.integers(0, 9), shuffle=st.booleans(), splits=st.lists(st.integers(0, 15)))
def test_no_prompt_lost_or_twice_in_an_epoch_however_draws_are_split(n, seed, shuffle, splits):
    split, whole = order(n, seed, shuffle), order(n, seed, shuffle)
    drawn = [p for size in splits for p in split.draw(size)]
    assert drawn == whole.draw(sum(splits))
    assert len(drawn) == sum(splits)
    for start in range(0, len(drawn), n):
        epoch = drawn[start : start + n]
        assert {p.epoch for p in epoch} == {start // n}
        assert len({p.prompt_id for p in epoch}) == len(epoch)


@given(n=st.integers(1, 8), total_epochs=st.integers(1, 3), sizes=st.lists(st.integers(0, 10)))
def test_fewer_come_only_when_total_epochs_are_used_up(n, total_epochs, sizes):
    prompts = order(n, total_epochs=total_epochs)
    left = n * total_epochs
    for size in sizes:
        assert prompts.num_left() == left
        got = prompts.draw(size)
        assert len(got) == min(size, left)
        left -= len(got)


def test_epochs_and_seeds_differ_in_order():
    ids = [p.prompt_id for p in order(20).draw(40)]
    assert ids[:20] != ids[20:]
    assert ids[:20] != [p.prompt_id for p in order(20, seed=1).draw(20)]


@st.composite
def histories(draw):
    """A list of ("draw", n) and ("push", indices of prompts drawn so far and not put back)."""
    return draw(st.lists(st.tuples(st.sampled_from(["draw", "push"]), st.integers(0, 7)), max_size=20))


def replay(prompts, history, held):
    """Carry out a history; `push k` puts the last k held prompts back. Returns what each draw gave."""
    given_out = []
    for name, k in history:
        if name == "draw":
            got = prompts.draw(k)
            held += got
            given_out.append(got)
        else:
            back = held[len(held) - k :] if k else []
            del held[len(held) - len(back) :]
            prompts.push_front(back)
    return given_out


@given(n=st.integers(1, 6), total_epochs=st.sampled_from([None, 1, 3]), history=histories())
def test_pushed_prompts_come_first_in_their_order(n, total_epochs, history):
    prompts, reference = order(n, total_epochs=total_epochs), order(n, total_epochs=total_epochs).draw(500)
    held = []
    replay(prompts, history, held)
    # What is held, plus all that is still to come, is the undisturbed sequence.
    assert held + prompts.draw(500 - len(held)) == reference


@given(n=st.integers(1, 6), total_epochs=st.sampled_from([None, 3]), before=histories(), after=histories())
def test_state_round_trip_is_exact(n, total_epochs, before, after):
    original, restored = order(n, total_epochs=total_epochs), order(n, total_epochs=total_epochs)
    held = []
    replay(original, before, held)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.state_dict() == original.state_dict()
    assert restored.num_left() == original.num_left()
    assert replay(restored, after, list(held)) == replay(original, after, list(held))


def test_state_of_other_prompts_is_refused():
    state = order(4).state_dict()
    changed = rows(4)
    changed[2] = ("p2", (9,), "even")
    for other in (changed, rows(3), rows(5), [(i + "x", t, d) for i, t, d in rows(4)], list(reversed(rows(4)))):
        with pytest.raises(ConfigError, match=r"prompts changed since the checkpoint: it was saved with 4 prompts"):
            PromptOrder(other, seed=0, shuffle=True, total_epochs=None).load_state_dict(state)


def test_state_of_another_order_is_refused():
    with pytest.raises(ConfigError, match=r"data\.seed=1, but the checkpoint was saved with 0"):
        order(4, seed=1).load_state_dict(order(4).state_dict())
    with pytest.raises(ConfigError, match=r"data\.shuffle=False, but the checkpoint was saved with True"):
        order(4, shuffle=False).load_state_dict(order(4).state_dict())


def test_resume_with_more_or_fewer_epochs():
    finished = order(3, total_epochs=2)
    finished.draw(6)
    longer, shorter = order(3, total_epochs=3), order(3, total_epochs=1)
    longer.load_state_dict(finished.state_dict())
    shorter.load_state_dict(finished.state_dict())
    assert (finished.num_left(), longer.num_left(), shorter.num_left()) == (0, 3, 0)
    assert [p.epoch for p in longer.draw(9)] == [2, 2, 2]
    assert shorter.draw(9) == []


def test_impossible_arguments():
    with pytest.raises(ValueError, match="at least one prompt"):
        order(0)
    with pytest.raises(ValueError, match="distinct ids"):
        PromptOrder(rows(2) + rows(1), seed=0, shuffle=True, total_epochs=None)
    with pytest.raises(ValueError, match="total_epochs=0"):
        order(2, total_epochs=0)
    with pytest.raises(ValueError, match="negative"):
        order(2).draw(-1)
    with pytest.raises(ValueError, match="'p2' was not drawn"):
        order(2).push_front(order(8, shuffle=False).draw(8))
