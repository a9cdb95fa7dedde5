"""The world: agreement on errors, one clock, samples that arrive where they should."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rollpacker.comm.samples import Sample, exchange_samples
from rollpacker.comm.world import World
from rollpacker.config import ConfigError


def test_an_error_on_one_rank_is_raised_on_all(world: World) -> None:
    def check() -> int:
        if world.rank == world.size - 1:
            raise ConfigError("the file is not on this node")
        return 1

    with pytest.raises(ConfigError, match="the file is not on this node"):
        world.agree(check)
    assert world.agree(lambda: world.rank) == world.rank


def test_clocks_agree(world: World) -> None:
    """After a barrier all ranks read the same time, to the few milliseconds that a shared core costs."""
    world.comm.Barrier()
    times = world.comm.allgather(world.now())
    assert max(times) - min(times) < 0.25


def test_a_clock_that_goes_on_is_one_clock(world: World) -> None:
    """However late a rank takes it up."""
    time.sleep(0.3 * world.rank)
    later = world.continued(1000.0)
    world.comm.Barrier()
    times = world.comm.allgather(later.now())
    assert max(times) - min(times) < 0.25
    assert 1000 <= min(times) < 1010


def make_sample(index: int) -> Sample:
    random = np.random.default_rng(index)
    prompt = random.integers(0, 99, index % 3 + 1).astype(np.int32)
    response = random.integers(0, 99, index % 5).astype(np.int32)
    return Sample(index, prompt, response, random.normal(size=len(response)).astype(np.float32))


def test_samples_arrive_bit_for_bit_and_in_order(world: World) -> None:
    """Rank r holds the samples congruent to r and sends each to two ranks; empty responses travel too."""
    n = world.size
    outgoing: dict[int, list[Sample]] = {}
    for index in range(world.rank, 17, n):
        for destination in {index % n, (index + 1) % n}:
            outgoing.setdefault(destination, []).append(make_sample(index))
    arrived = exchange_samples(world.comm, outgoing)
    expected = [i for i in range(17) if world.rank in {i % n, (i + 1) % n}]
    assert [s.request_index for s in arrived] == expected
    for s in arrived:
        e = make_sample(s.request_index)
        assert np.array_equal(s.prompt_ids, e.prompt_ids) and np.array_equal(s.response_ids, e.response_ids)
        assert np.array_equal(s.rollout_logprobs.view(np.int32), e.rollout_logprobs.view(np.int32))


def test_nothing_to_send_is_fine(world: World) -> None:
    assert exchange_samples(world.comm, {}) == []
