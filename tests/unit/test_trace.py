from __future__ import annotations

import itertools
import json
import sys
import tempfile
import types
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.profiling.nvtx import STAGES, TIMING_STAGES, StageTimer
from rollpacker.profiling.trace import LanePacker, Span, TraceWriter


def load(path: Path) -> list[dict]:
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    return document["traceEvents"]


def threads(events: list[dict]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


intervals = st.lists(
    st.tuples(st.integers(0, 1_000), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=40
)


@given(st.lists(intervals, max_size=4), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_requests_of_one_lane_never_overlap_and_none_is_lost(batches: list[list[tuple[int, int]]], ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, written = Path(folder) / "trace.json", []
        with TraceWriter(path) as trace:
            for batch in batches:
                spans = [
                    Span(f"r{i}", i % ranks, "request", start / 1e3, end / 1e3) for i, (start, end) in enumerate(batch)
                ]
                trace.add(spans)
                written += [(s.rank, round(s.start_s * 1e6), round(s.end_s * 1e6)) for s in spans]
                load(path)  # valid after every flush
        bars = defaultdict(list)
        read = []
        for event in load(path):
            if event["ph"] == "X":
                bars[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
                read.append((event["pid"], event["ts"], event["ts"] + event["dur"]))
    assert sorted(read) == sorted(written)
    for lane in bars.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(lane)):
            assert end <= start


@given(intervals)
def test_a_batch_needs_no_more_lanes_than_its_deepest_overlap(batch: list[tuple[int, int]]) -> None:
    packer = LanePacker()
    batch = [(start, end) for start, end in batch if start < end]
    lanes = [packer.place(start, end) for start, end in sorted(batch)]
    depth = max((sum(s <= t < e for s, e in batch) for t, _ in batch), default=0)
    assert len(set(lanes)) == depth


def test_lanes_are_reused_over_steps(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t.json")
    for step in range(50):
        trace.add([Span(f"s{step}/{i}", 0, "request", step, step + 0.5 + i / 10) for i in range(4)])
    trace.close()
    names = set(threads(load(tmp_path / "t.json")).values())
    assert names == {f"requests {i}" for i in range(4)}
    assert len(trace._tids) == 4  # memory does not grow with the spans


def test_a_trace_goes_back_to_an_earlier_size_and_on(tmp_path: Path) -> None:
    """As it was when a checkpoint was written, with and without spans in it; what came after is gone, and it opens."""
    path = tmp_path / "t.json"
    sizes = []
    with TraceWriter(path) as trace:
        for step in range(3):
            sizes.append(path.stat().st_size)
            trace.add([Span(f"step {step}", 0, "stage", step, step + 1)])
    for size, kept in ((sizes[2], ["step 0", "step 1"]), (sizes[0], [])):
        with TraceWriter(path, resume_at=size) as trace:
            trace.add([Span("again", 0, "stage", 9.0, 10.0)])
        assert [e["name"] for e in load(path) if e["ph"] == "X"] == [*kept, "again"]
    with TraceWriter(tmp_path / "gone.json", resume_at=sizes[2]):
        assert load(tmp_path / "gone.json") == []


def test_layout_names_order_and_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with TraceWriter(path) as trace:
        trace.add([Span("p1/0", 3, "request", 1.0, 2.5, {"tokens": 7, "reward": float("nan")})])
        trace.add([Span("judge", 3, "my lane", 1.0, 1.1), Span("score", 3, "reward", 1.0, 1.1)])
        trace.add([Span("decode", 3, "engine", 1.0, 2.0), Span("gen", 3, "stage", 0.5, 2.0)])
        trace.add([Span("gen", 0, "stage", 0.5, 2.0)])
        trace.add_counter(3, "tokens/s", 1.5, 42)
    events = load(path)
    assert {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"} == {
        (3, "rank 3"),
        (0, "rank 0"),
    }
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index" and e["pid"] == 3}
    names = threads(events)
    top_down = [names[tid] for tid in sorted(order, key=lambda tid: order[tid])]
    assert top_down == ["stage", "engine", "reward", "my lane", "requests 0"]
    # Perfetto tells threads apart by tid alone and takes tid == pid for the main thread.
    assert len(names) == 6 and not set(names) & {0, 3}
    request = next(e for e in events if e["name"] == "p1/0")
    assert (request["ts"], request["dur"]) == (1_000_000, 1_500_000)
    assert request["args"] == {"tokens": 7, "reward": "nan"}
    counter = next(e for e in events if e["ph"] == "C")
    assert (counter["pid"], counter["name"], counter["ts"]) == (3, "tokens/s", 1_500_000)
    assert counter["args"] == {"value": 42}


def test_outer_bar_comes_before_inner_bar_of_the_same_start(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with TraceWriter(path) as trace:
        trace.add([Span("gen", 0, "stage", 1.0, 2.0), Span("step_1", 0, "stage", 1.0, 3.0)])
    assert [e["name"] for e in load(path) if e["ph"] == "X"] == ["step_1", "gen"]


def test_file_is_valid_from_the_first_moment_and_close_may_come_twice(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t.json")
    assert load(tmp_path / "t.json") == []
    trace.add([])
    assert load(tmp_path / "t.json") == []
    trace.add_counter(0, "running requests", 0.0, 1)
    trace.close()
    trace.close()
    assert load(tmp_path / "t.json")[-1]["ph"] == "C"


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_impossible_span_is_refused_and_leaves_the_file_valid(tmp_path: Path, start: float, end: float) -> None:
    with TraceWriter(tmp_path / "t.json") as trace:
        with pytest.raises(ValueError, match="span"):
            trace.add([Span("x", 0, "stage", start, end)])
        with pytest.raises(ValueError, match="finite"):
            trace.add_counter(0, "tokens/s", 0.0, float("nan"))
    assert load(tmp_path / "t.json") == []


# StageTimer


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_stage_timer_counts_nested_stages_and_gives_them_in_order() -> None:
    clock = FakeClock()
    timer = StageTimer(2, clock)
    timer.begin_step(7)
    for seconds in (1.0, 2.0):
        with timer.stage("gen"):
            clock.now += seconds
            with timer.stage("reward"):
                clock.now += 0.5
    seconds, spans = timer.take()
    assert seconds == {"step": 4.0, "gen": 4.0, "reward": 1.0}
    assert [s.name for s in spans] == ["step_7", "gen", "reward", "gen", "reward"]
    assert {(s.rank, s.lane) for s in spans} == {(2, "stage")}
    assert all(s.args == {"step": 7} for s in spans)
    assert timer.take() == ({}, [])
    with timer.stage("testing"):
        clock.now += 3.0
    seconds, spans = timer.take()
    assert seconds == {"testing": 3.0} and spans[0].args is None


def test_stage_timer_keeps_the_time_of_a_stage_that_raised() -> None:
    clock = FakeClock()
    timer = StageTimer(0, clock)
    with pytest.raises(KeyError), timer.stage("ref"):
        clock.now += 1.0
        raise KeyError
    assert timer.take()[0] == {"ref": 1.0}


def test_stage_timer_refuses_what_would_miscount() -> None:
    timer = StageTimer(0, FakeClock())
    with pytest.raises(ValueError, match="'update_actor'"), timer.stage("update_actr"):
        pass
    with pytest.raises(ValueError, match="begin_step"), timer.stage("step"):
        pass
    with timer.stage("gen"):
        with pytest.raises(ValueError, match="twice"), timer.stage("gen"):
            pass
        with pytest.raises(ValueError, match="inside stage 'gen'"):
            timer.take()
        with pytest.raises(ValueError, match="inside stage 'gen'"):
            timer.begin_step(1)


def test_stage_names_are_those_of_the_metrics() -> None:
    from rollpacker.runtime.metrics import METRIC_NAMES

    assert [n for n in METRIC_NAMES if n.startswith("timing_s/")] == [f"timing_s/{s}" for s in TIMING_STAGES]
    assert set(STAGES) - set(TIMING_STAGES) == {"exchange"}


def fake_torch(log: list[str], has_cuda: bool) -> dict[str, types.ModuleType]:
    torch, cuda, nvtx = (types.ModuleType(n) for n in ("torch", "torch.cuda", "torch.cuda.nvtx"))
    torch.cuda, cuda.nvtx, cuda.is_available = cuda, nvtx, lambda: has_cuda
    nvtx.range_push, nvtx.range_pop = log.append, lambda: log.append("pop")
    return {"torch": torch, "torch.cuda": cuda, "torch.cuda.nvtx": nvtx}


def test_nvtx_ranges_have_stable_names_and_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    for name, module in fake_torch(log, has_cuda=True).items():
        monkeypatch.setitem(sys.modules, name, module)
    timer = StageTimer(0, FakeClock(), nvtx=True)
    timer.begin_step(3)
    with timer.stage("update_weights"):
        pass
    timer.take()
    assert log == ["rollpacker/step_3", "rollpacker/update_weights", "pop", "pop"]


def test_nvtx_without_cuda_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_torch([], has_cuda=False).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ValueError, match=r"profiler\.nvtx"):
        StageTimer(0, FakeClock(), nvtx=True)
