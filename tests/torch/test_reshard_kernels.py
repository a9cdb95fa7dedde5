"""The extension's copies against torch's own slicing and conversion, what it refuses, and the checksum of a refit."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from rollpacker.config import ConfigError
from rollpacker.weights import reshard
from rollpacker.weights.reshard import load_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
kernels = load_kernels()
CODES = dict(zip(DTYPES, (kernels.FLOAT32, kernels.BFLOAT16, kernels.FLOAT16), strict=True))
WAYS = {"threads": {"threads": 2}, "past the cache": {"threads": 2, "past_cache": True}, "kernel": {"lanes": 256}}


def table(source: torch.Tensor, destination: torch.Tensor, segments: list[tuple[int, ...]], num_rounds: int = 1) -> Any:
    """Segments as csrc/copy.h has them, offsets in elements."""
    rows = [
        (
            source.data_ptr() + s[0] * source.element_size(),
            destination.data_ptr() + s[1] * destination.element_size(),
            *s[2:],
        )
        for s in segments
    ]
    bounds = np.linspace(0, len(rows), num_rounds + 1).astype(np.int64)
    return kernels.Table(np.array(rows, np.int64).reshape(-1, 7), bounds, CODES[source.dtype], CODES[destination.dtype])


def random_numbers(*size: int, dtype: torch.dtype) -> torch.Tensor:
    """Over all magnitudes that fp16 has, subnormal ones and some beyond its ends."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-30, 18, size, generator=generator)
    return (torch.randn(size, generator=generator) * 2.0**exponents).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("source", "destination"), itertools.product(DTYPES, DTYPES))
def test_columns_are_copied_and_converted_as_torch_does(
    source: torch.dtype, destination: torch.dtype, way: str
) -> None:
    """Columns 8 to 8 + n of a matrix into columns 16 to 16 + n of a wider one, n aligned and not; the rest stays."""
    for n in (64, 61, 3):
        numbers = random_numbers(300, 80, dtype=source)
        copied = torch.full((300, 96), -1.0, dtype=destination)
        expected = copied.clone()
        expected[:, 16 : 16 + n] = numbers[:, 8 : 8 + n].to(destination)
        kernels.copy(table(numbers, copied, [(8, 16, n, 80, 96, 0, 300 * n)]), **WAYS[way])
        assert torch.equal(copied, expected)


def test_nan_and_infinity_survive() -> None:
    for source, destination in itertools.product(DTYPES, DTYPES):
        numbers = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=source)
        copied = torch.zeros(4, dtype=destination)
        kernels.copy(table(numbers, copied, [(0, 0, 4, 4, 4, 0, 4)]))
        assert copied[0].isnan()
        assert torch.equal(copied[1:], numbers[1:].to(destination))
        assert torch.signbit(copied[3])


def test_a_part_of_the_runs_is_copied() -> None:
    """Elements 5 to 17 of runs of 4 at a pitch of 10, in two segments, two rounds."""
    numbers = torch.arange(60.0)
    copied = torch.full((24,), -1.0)
    runs = [(0, 0, 4, 10, 4, 5, 11), (0, 0, 4, 10, 4, 11, 17)]
    kernels.copy(table(numbers, copied, runs, num_rounds=2))
    expected = torch.full((24,), -1.0)
    expected[5:17] = numbers.view(6, 10)[:, :4].reshape(-1)[5:17]
    assert torch.equal(copied, expected)


def test_tables_that_no_copy_could_carry_out_are_refused() -> None:
    row = np.array([[0, 0, 4, 4, 4, 0, 4]], np.int64)
    whole = np.array([0, 1], np.int64)
    for segments, bounds, codes, message in (
        (row, np.array([0, 2], np.int64), (0, 0), "bounds must run from 0"),
        (np.repeat(row, 2, 0), np.array([0, 2, 1, 2], np.int64), (0, 0), "bounds must not fall"),
        (row * np.array([1, 1, 0, 1, 1, 1, 1]), whole, (0, 0), "segment 0 has no elements"),
        (row, whole, (0, 9), "unknown destination dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.Table(segments, bounds, *codes)


def test_strided_tables_are_refused_not_copied() -> None:
    """A temporary copy would be freed while the table still points at it."""
    wide = np.zeros((2, 14), np.int64)
    with pytest.raises(TypeError):
        kernels.Table(wide[:, ::2], np.array([0, 2], np.int64), 0, 0)
    with pytest.raises(TypeError):
        kernels.Table(np.zeros((1, 7), np.int32), np.array([0, 1], np.int64), 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 4096, 4099, 20001])
def test_a_checksum_weighs_each_word_by_its_place(size: int, dtype: torch.dtype) -> None:
    """Against Python's integers; starts at an odd element, so that words of eight bytes are not aligned."""
    numbers = random_numbers(size + 1, dtype=dtype)[1:]
    in_word = 8 // numbers.element_size()
    num_words = size // in_word * in_word
    halves = torch.int16 if in_word == 4 else torch.int32
    words = numbers[:num_words].clone().view(torch.int64).tolist() + numbers[num_words:].clone().view(halves).tolist()
    expected = sum(word * (2 * i + 1) for i, word in enumerate(words))
    assert (int(reshard._checksum(numbers)) - expected) % 2**64 == 0


def test_python_runs_while_threads_copy() -> None:
    numbers, copied = torch.ones(1 << 26), torch.zeros(1 << 26)
    copy = table(numbers, copied, [(0, 0, 1 << 26, 1 << 26, 1 << 26, 0, 1 << 26)])
    ticks: list[float] = []
    has_ended = threading.Event()

    def tick() -> None:
        while not has_ended.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    for _ in range(3):
        kernels.copy(copy)
    end = time.perf_counter()
    has_ended.set()
    thread.join()
    assert sum(start < t < end for t in ticks) > 5


def test_a_missing_extension_is_a_mistake_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rollpacker.weights._reshard", None)
    monkeypatch.delattr("rollpacker.weights._reshard")
    with pytest.raises(ConfigError, match=r"weights.refit=csrc needs the extension.*--no-build-isolation.*golden"):
        reshard.load_kernels()
