"""The event exchange: every rank sees every event once, in one order, whatever the pace of the others."""

from __future__ import annotations

import random
import time

import pytest

from rollpacker.comm.exchange import NUM_SLOTS, EventExchange, QuantumReport
from rollpacker.comm.world import World
from rollpacker.messages import EngineProgress, Event, RequestFinished, RewardDone


def report(world: World, digest: int = 7, k: int = 1, is_leader: bool = True) -> QuantumReport:
    return QuantumReport(digest, is_leader, k, EngineProgress(0.5, world.rank, world.rank + 1, 2, 0.25))


def finished(world: World, time_s: float, index: int) -> RequestFinished:
    return RequestFinished(time_s, world.rank, index, 10 + index, "length" if index % 2 else "stop")


def run_quanta(world: World, exchange: EventExchange, num_quanta: int, seed: int) -> list[Event]:
    """Random events and random pauses, as a rollout would post them; all events as this rank saw them."""
    pace = random.Random(seed * 1000 + world.rank)
    seen: list[Event] = []
    for quantum in range(num_quanta):
        for i in range(pace.randrange(4)):
            exchange.add(finished(world, quantum + pace.random(), 100 * quantum + i))
            exchange.add(RewardDone(quantum + pace.random(), world.rank, i, 0.5, bool(i % 2), 0.125))
        time.sleep(pace.random() * 2e-3)
        exchange.post(report(world))
        exchange.progress()
        if exchange.num_outstanding == 2:
            seen.extend(exchange.complete().events)
    while exchange.num_outstanding:
        seen.extend(exchange.complete().events)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_see_the_same_events_in_the_same_order(world: World, seed: int) -> None:
    exchange = EventExchange(world.comm, timeout_s=60)
    seen = run_quanta(world, exchange, 50, seed)
    everyone = world.comm.allgather(seen)
    assert all(other == seen for other in everyone)
    mine = [e for e in seen if e.rank == world.rank and isinstance(e, EngineProgress)]
    assert len(mine) == 50 and all(e.num_new_tokens == world.rank + 1 for e in mine)
    exchange.close()


def test_events_survive_the_record_exactly(world: World) -> None:
    exchange = EventExchange(world.comm, timeout_s=60)
    sent: list[RequestFinished | RewardDone] = [
        finished(world, 0.1, 3),
        finished(world, 0.2, 4),
        RewardDone(0.3, world.rank, 3, -1.25, True, 2.5),
    ]
    for event in sent:
        exchange.add(event)
    exchange.post(report(world, k=world.rank + 5))
    quantum = exchange.complete()
    assert [e for e in quantum.events if e.rank == world.rank and not isinstance(e, EngineProgress)] == sent
    assert quantum.next_num_steps == [r + 5 for r in range(world.size)]
    exchange.close()


def test_what_overflows_a_record_comes_with_the_next(world: World) -> None:
    exchange = EventExchange(world.comm, timeout_s=60)
    for i in range(NUM_SLOTS + 5):
        exchange.add(finished(world, float(i), i))
    counts = []
    for _ in range(2):
        exchange.post(report(world))
        counts.append(sum(isinstance(e, RequestFinished) for e in exchange.complete().events))
    assert counts == [NUM_SLOTS * world.size, 5 * world.size]
    exchange.close()


def test_only_leaders_report_progress(world: World) -> None:
    exchange = EventExchange(world.comm, timeout_s=60)
    exchange.post(report(world, is_leader=world.rank == 0))
    assert [e.rank for e in exchange.complete().events] == [0]
    exchange.close()


def test_a_stray_controller_is_named(world: World) -> None:
    if world.size == 1:
        pytest.skip("one rank cannot differ from itself")
    exchange = EventExchange(world.comm, timeout_s=60)
    stray = world.size - 1
    exchange.post(report(world, digest=8 if world.rank == stray else 7))
    with pytest.raises(RuntimeError, match="differ from the others") as error:
        exchange.complete()
    if world.size > 2:
        assert f"[{stray}]" in str(error.value)
    exchange.close()


def test_a_rank_runs_at_most_one_quantum_ahead(world: World) -> None:
    exchange = EventExchange(world.comm, timeout_s=60)
    exchange.post(report(world))
    exchange.post(report(world))
    with pytest.raises(RuntimeError, match="complete"):
        exchange.post(report(world))
    exchange.complete()
    exchange.complete()
    exchange.close()


def test_waiting_for_a_rank_that_is_gone_ends_with_a_reason(world: World) -> None:
    if world.size == 1:
        pytest.skip("nobody to wait for")
    exchange = EventExchange(world.comm, timeout_s=0.2 if world.rank == 0 else 60)
    if world.rank == 0:
        exchange.post(report(world))
        with pytest.raises(RuntimeError, match="waited 0 s for the event exchange"):
            exchange.complete()
        world.comm.Barrier()
        exchange._timeout_s = 60
    else:
        world.comm.Barrier()
        exchange.post(report(world))  # late: rank 0 has complained by now
    exchange.complete()  # MPI writes into the buffers until then
    exchange.close()
