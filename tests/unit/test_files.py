"""Prompt files as files: JSON Lines and parquet, whole and damaged, and what each costs in memory."""

import random
import re
import subprocess
import sys
import tracemalloc

import numpy
import pyarrow
import pytest
from prompt_files import PLAIN, VERL, load, write, write_parquet
from pyarrow import parquet

from rollpacker.config import ConfigError
from rollpacker.data.files import read_rows

# JSON Lines


def test_bom_blank_lines_crlf_and_line_separators_are_tolerated(tmp_path):
    file = tmp_path / "a.jsonl"
    line = '{"prompt": "p\u2028q", "answer": "1", "id": null, "domain": null, "other": 1}'
    file.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n  \n" + line.encode())
    data = load(file)
    assert [e.prompt_id for e in data.examples] == ["a:1", "a:4"]
    assert [e.domain for e in data.examples] == ["default", "default"]


BAD_LINES = {
    "not UTF-8": (b'{"prompt": "\xe9"}', ["0xe9", "not UTF-8"]),
    "UTF-16": ('{"prompt": "p"}'.encode("utf-16"), ["0xff", "not UTF-8"]),
    "malformed": (b'{"prompt": "p", "answer"}', ["not valid JSON", "column 25", "one JSON object per line"]),
    "deep": (b"[" * 100_000, ["JSON that Python cannot hold"]),
    "many digits": (b'{"prompt": "p", "answer": ' + b"1" * 5000 + b"}", ["JSON that Python cannot hold"]),
    "list": (b'[{"prompt": "p"}]', ["one JSON object per line", "one element per line"]),
    "number": (b"3", ["found '3'"]),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_names_file_line_and_expectation(tmp_path, name):
    line, fragments = BAD_LINES[name]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "p", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}:3: ")
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert len(str(caught.value)) < 400 + 2 * len(str(file))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path, content):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^data\.train_files: {file} is empty: expected one JSON object per line"):
        load(file)


# Files of any kind


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_missing_file(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"^data\.val_files: .*{name}: no such file\. .*working directory"):
        load(tmp_path / name, key="data.val_files")


@pytest.mark.parametrize("name", ["folder", "folder.parquet"])
def test_directory(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is a directory: expected a \.jsonl or \.parquet file"):
        load(tmp_path / name)


def test_a_name_that_promises_the_other_kind(tmp_path):
    binary = write_parquet(tmp_path / "a.parquet", PLAIN).rename(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=rf"^data\.val_files: {binary} is a parquet file: .* ends in \.parquet"):
        load(binary, key="data.val_files")
    text = write(tmp_path / "b.parquet", PLAIN)
    with pytest.raises(ConfigError, match=rf"^data\.val_files: {text} is not a parquet file.*A text file must not be"):
        load(text, key="data.val_files")


# Parquet


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_parquet_of_each_compression_and_of_many_row_groups(tmp_path, compression):
    rows = [PLAIN | {"prompt": f"p{i}", "answer": i} for i in range(1000)]
    file = write_parquet(tmp_path / "a.parquet", *rows, compression=compression, row_group_size=300)
    examples = load(file).examples
    assert [(e.prompt_id, e.text, e.ground_truth) for e in examples] == [
        (f"a:{i + 1}", f"p{i}", str(i)) for i in range(1000)
    ]


def test_parquet_and_jsonl_of_the_same_rows_give_the_same_prompts(tmp_path):
    texts = [" plain ", "\U0001d49c astral", "e\u0301 combining", "\u202e right to left", "nul \0 inside", "two\nlines"]
    plain = [PLAIN | {"prompt": text, "answer": text} for text in texts]
    verl = [VERL | {"extra_info": {"index": 7}}] * 2
    for rows in (plain, verl, [*verl, PLAIN | {"prompt": VERL["prompt"]}]):
        lines = load(write(tmp_path / "a.jsonl", *rows)).examples
        assert load(write_parquet(tmp_path / "a.parquet", *rows)).examples == lines
    assert [e.text for e in load(write(tmp_path / "a.jsonl", *plain)).examples] == texts


def test_column_types_that_tables_come_with(tmp_path):
    """Dictionary encoding, 64-bit offsets, maps, numpy arrays in cells, decimals; extra columns without a Python value."""
    message = pyarrow.map_(pyarrow.string(), pyarrow.string())
    tables = {
        "categories": {"prompt": pyarrow.array(["p", "p"]).dictionary_encode(), "answer": numpy.array([1, 2])},
        "large": {"prompt": pyarrow.array(["p"], pyarrow.large_string()), "answer": [1.5]},
        "decimal": {"prompt": ["p"], "answer": pyarrow.array([10**20], pyarrow.decimal128(38, 0))},
        "maps": {
            "prompt": pyarrow.array([[{"role": "user", "content": "p"}]], pyarrow.list_(message)),
            "reward_model": pyarrow.array([{"style": "rule", "ground_truth": "1"}], message),
        },
        "arrays": {
            "prompt": pyarrow.array([numpy.array([{"role": "user", "content": "p"}], dtype=object)]),
            "reward_model": [{"ground_truth": numpy.array(["1"])}],
        },
        "extra": {"prompt": ["p"], "answer": ["1"], "when": pyarrow.array([1], pyarrow.timestamp("ns"))},
    }
    answers = {}
    for name, table in tables.items():
        parquet.write_table(pyarrow.table(table), tmp_path / f"{name}.parquet")
        answers[name] = [e.ground_truth for e in load(tmp_path / f"{name}.parquet").examples]
    assert answers == {
        "categories": ["1", "2"],
        "large": ["1.5"],
        "decimal": ["100000000000000000000"],
        "maps": ["1"],
        "arrays": ["1"],
        "extra": ["1"],
    }


def test_a_column_of_a_wrong_type_names_file_and_row(tmp_path):
    for name, row, fragment in [
        ("bytes", PLAIN | {"prompt": b"p"}, "prompt=b'p': expected text or a list"),
        ("number", PLAIN | {"prompt": 3}, "prompt=3: expected text or a list"),
        ("texts", PLAIN | {"prompt": ["p"]}, "message 1 of prompt is 'p'"),
        ("flag", PLAIN | {"answer": True}, "answer=True: expected text"),
        ("struct", VERL | {"reward_model": "1"}, "reward_model='1': expected {"),
    ]:
        file = write_parquet(tmp_path / f"{name}.parquet", row)
        with pytest.raises(ConfigError) as caught:
            load(file)
        assert str(caught.value).startswith(f"{file}: row 1: {fragment}")


def test_nulls_name_file_and_row_unless_the_column_is_optional(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", PLAIN, PLAIN | {"id": None, "domain": None}, {"prompt": "p"})
    with pytest.raises(ConfigError, match=rf"^{file}: row 3: .*it has prompt, answer=null, id=null, domain=null\."):
        load(file)


def test_columns_that_are_not_read_are_named(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"question": "p", "solution": "1"})
    with pytest.raises(ConfigError, match=rf"^{file}: row 1: the row fits no format: it has .*solution"):
        load(file)


def test_text_that_is_not_utf8_names_its_row(tmp_path):
    """Half of a UTF-16 pair, as some writers leave it in a parquet file."""
    raw = pyarrow.array([b"ok"] * 700 + [b"\xed\xa0\x80"] + [b"ok"] * 9)
    prompts = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": prompts, "answer": ["1"] * len(raw)}), file, row_group_size=500)
    with pytest.raises(ConfigError, match=rf"^{file}: row 701: a value that cannot be read: .*0xed"):
        load(file)


def test_empty_parquet(tmp_path):
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.string())])
    for file in (write_parquet(tmp_path / "a.parquet", schema=schema), write_parquet(tmp_path / "b.parquet")):
        with pytest.raises(ConfigError, match=rf"^data\.train_files: {file} is empty: expected at least one row"):
            load(file)


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 8, 500, -1])
def test_truncated_parquet(tmp_path, num_bytes):
    file = write_parquet(tmp_path / "a.parquet", *[PLAIN] * 100)
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(
        ConfigError, match=rf"^data\.train_files: {file} is not a parquet file, or damaged: .*complete\?"
    ):
        load(file)


def test_damaged_page_says_how_far_the_file_is_good(tmp_path):
    rows = [PLAIN | {"prompt": f"{i} {random.Random(i).random()}"} for i in range(2000)]
    file = write_parquet(tmp_path / "a.parquet", *rows, row_group_size=1000, write_page_checksum=True)
    start = parquet.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[start + 200] ^= 255
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{file} is not a parquet file, or damaged: .*\(after 768 good rows\)"):
        load(file)


def test_any_flipped_bytes_load_or_are_refused(tmp_path):
    """300 damaged copies: what remains readable loads, and all else is a ConfigError, never another exception."""
    whole = write_parquet(tmp_path / "a.parquet", *[VERL | {"data_source": str(i)} for i in range(300)]).read_bytes()
    file, num_refused = tmp_path / "b.parquet", 0
    for seed in range(300):
        draw = random.Random(seed)
        content = bytearray(whole)
        for _ in range(draw.choice([1, 3, 30])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        file.write_bytes(content)
        try:
            assert load(file, max_prompt_length=10**6).examples
        except ConfigError as error:
            num_refused += 1
            assert str(file) in str(error)
    assert num_refused > 20


def test_a_big_row_group_is_not_held_in_memory(tmp_path):
    """64 MB of text in one row group, beside a column that is not read: at most 8 MB of it are held at a time."""
    letters = random.Random(0).randbytes(800).hex()
    rows = [{"prompt": f"{i} {letters}", "answer": "1", "unread": letters} for i in range(40_000)]
    file = write_parquet(tmp_path / "a.parquet", *rows, compression="none", use_dictionary=False)
    del rows
    assert parquet.ParquetFile(file).num_row_groups == 1
    assert file.stat().st_size > 120e6
    before, peak, num_rows = pyarrow.total_allocated_bytes(), 0, 0
    tracemalloc.start()  # bytes read from the file are Python's, what is decoded is Arrow's
    try:
        for row in read_rows(file, key="data.train_files", columns={"prompt", "answer"}):
            num_rows += 1
            assert row.columns["unread"] is ...
            if row.number % 64 == 0:
                held = tracemalloc.get_traced_memory()[0] + pyarrow.total_allocated_bytes() - before
                peak = max(peak, held)
    finally:
        tracemalloc.stop()
    assert num_rows == 40_000
    assert peak < 8e6


def test_pyarrow_is_loaded_for_parquet_alone(tmp_path):
    lines, table = write(tmp_path / "a.jsonl", PLAIN), write_parquet(tmp_path / "b.parquet", PLAIN)
    code = (
        "import sys; from pathlib import Path; from rollpacker.data.files import read_rows\n"
        "for file in sys.argv[1:]:\n"
        "    list(read_rows(Path(file), key='k', columns={'prompt'})); print('pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, lines, table], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", PLAIN)
    (tmp_path / "pyarrow.py").write_text("raise ImportError('not in this environment')\n", encoding="utf-8")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pathlib import Path\n"
        "from rollpacker.data.files import read_rows\n"
        "list(read_rows(Path(sys.argv[1]), key='data.train_files', columns={'prompt'}))"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=False)
    assert re.search(r"ConfigError: data\.train_files: .*a\.parquet needs the package pyarrow.*install it", done.stderr)
