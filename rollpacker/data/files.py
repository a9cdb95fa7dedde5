"""Prompt files -> rows: JSON Lines and parquet, a dict of columns for each row.

A file is streamed: at no time is more of it in memory than a line, or some hundreds of rows of a parquet row group.
Each mistake is a ConfigError that names the file, and the row where one is to blame. pyarrow is imported when the first
parquet file is named, and nowhere else.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from rollpacker.config import ConfigError

_PARQUET_MAGIC = b"PAR1"
_ROWS_PER_BATCH = 256
_BUFFER_BYTES = 1 << 20  # of each column's compressed bytes at a time; without it a whole column chunk is read at once


class SourceRow(NamedTuple):
    """A row as its file has it.

    `number` counts lines (JSON Lines) or rows (parquet) from 1; `where` names file and row in errors. A parquet column
    that was not asked for is there by name, with the value `...`, so that an error can list what the row has.
    """

    number: int
    where: str
    columns: dict[str, Any]


def read_rows(path: Path, *, key: str, columns: Collection[str]) -> Iterator[SourceRow]:
    """Yield the rows of a file: parquet where its name ends in .parquet, else one JSON object a line.

    `columns` are those whose values matter; a parquet file's others are not read. `key` is the config key that named the
    file. Raises ConfigError for a file that is missing, empty, damaged or of another kind.
    """
    num_rows = 0
    try:
        with path.open("rb") as stream:
            is_parquet = path.suffix.lower() == ".parquet"
            rows = _parquet_rows(stream, path, key, columns) if is_parquet else _json_rows(stream, path, key)
            for row in rows:
                num_rows += 1
                yield row
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key}: {path}: no such file. Relative paths start at the working directory, {Path.cwd()}."
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(
            f"{key}: {path} is a directory: expected a .jsonl or .parquet file; list the files in it."
        ) from error
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}.") from error
    if num_rows == 0:
        expected = "at least one row" if is_parquet else "one JSON object per line"
        raise ConfigError(f"{key}: {path} is empty: expected {expected}.")


def parse_json(text: str, where: str, *, expected: str) -> Any:
    """Read JSON. Raises ConfigError, opened by `where`, for text that is not JSON or that Python cannot hold."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not valid JSON, {error.msg} at column {error.colno} of {_shortened(text)}: expected {expected}."
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, or brackets as deep
        raise ConfigError(f"{where}: JSON that Python cannot hold: {error}. Simplify or delete the row.") from error


def _json_rows(stream: IO[bytes], path: Path, key: str) -> Iterator[SourceRow]:
    """Yield the JSON object of each line that is not blank."""
    # Binary lines end at \n alone; text lines would also end at the line separators a JSON string may hold.
    for number, line in enumerate(stream, start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if number == 1 and content.startswith(_PARQUET_MAGIC):
            raise ConfigError(f"{key}: {path} is a parquet file: give it a name that ends in .parquet.")
        if content.strip():
            where = f"{path}:{number}"
            yield SourceRow(number, where, _parse_line(content, where))


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start} of the line, 0x{line[error.start]:02x}, is not UTF-8: expected a .jsonl text "
            "file. Convert it to UTF-8 (or to .jsonl, if it is a compressed or binary file)."
        ) from error
    row = parse_json(text, where, expected="one JSON object per line, on one line")
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: found {_shortened(text)}: expected one JSON object per line, {{...}}. "
            "A file that is one JSON list must be rewritten with one element per line."
        )
    return row


def _parquet_rows(stream: IO[bytes], path: Path, key: str, columns: Collection[str]) -> Iterator[SourceRow]:
    """Yield the rows of a parquet file, batch by batch."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{key}: {path} needs the package pyarrow, which does not import here ({error}): install it, or "
            "convert the file to .jsonl."
        ) from error
    number = 0
    try:
        file = parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        names = file.schema_arrow.names
        wanted = [name for name in names if name in columns] or names[:1]
        unread = dict.fromkeys((name for name in names if name not in wanted), ...)
        for batch in file.iter_batches(_ROWS_PER_BATCH, columns=wanted, use_threads=False):
            for values in _batch_rows(batch, path, number):
                number += 1
                yield SourceRow(number, _parquet_place(path, number), {**unread, **values})
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # damage may show as any of them
        raise ConfigError(
            f"{key}: {path} is not a parquet file, or damaged: {' '.join(str(error).split())} (after {number} good rows). "
            "Is the download or copy complete? A text file must not be named .parquet."
        ) from error


def _batch_rows(batch: Any, path: Path, num_before: int) -> list[dict[str, Any]]:
    """Turn an Arrow batch into Python values; where one cannot be turned, find its row."""
    try:
        return _to_python(batch)
    except (ValueError, KeyError):  # text that is not UTF-8, fields or map keys that stand twice
        for i in range(batch.num_rows):
            try:
                _to_python(batch.slice(i, 1))
            except (ValueError, KeyError) as error:
                where = _parquet_place(path, num_before + i + 1)
                raise ConfigError(
                    f"{where}: a value that cannot be read: {error}. Correct or delete the row."
                ) from error
        raise


def _to_python(batch: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    return rows


def _parquet_place(path: Path, number: int) -> str:
    return f"{path}: row {number}"


def _shortened(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
