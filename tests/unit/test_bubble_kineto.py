"""torch.profiler traces written by hand, whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bubble_reports import make_report

from rollpacker.profiling.bubble_report.report import Times

US = 1_000


class Trace:
    """Events of one process on device 0; times in microseconds. The file's name gives the host, as torch names it."""

    def __init__(self, folder: Path, *, pid: int = 1, device: int = 0) -> None:
        self.path = folder / f"node0_{pid}.1.pt.trace.json"
        self._device = device
        self._events: list[dict] = []

    def add(self, category: str, start: float, end: float, name: str, **args: object) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args}
        self._events.append(event)

    def call(self, start: float, end: float, correlation: int, name: str = "cudaLaunchKernel") -> None:
        self.add("cuda_runtime", start, end, name, correlation=correlation)

    def kernel(self, start: float, end: float, correlation: int, name: str = "gemm", stream: int = 7) -> None:
        self.add("kernel", start, end, name, device=self._device, stream=stream, correlation=correlation)

    def write(self) -> Path:
        document = {"baseTimeNanoseconds": 1_780_000_000_000_000_000, "traceEvents": self._events}
        self.path.write_text(json.dumps(document))
        return self.path


def two_stages(folder: Path) -> Trace:
    """The host runs ahead: gen's operations run until 500 us, when update_actor has long launched its own.

    | range        | host      | operations                                                                       |
    | gen          | 0-100     | compute 50-250 and 200-400 on two streams, NCCL 380-500                          |
    | update_actor | 100-1100  | compute 800-950, launched at 450; a copy 950-1000                                |

    NCCL is launched before the compute on stream 8 and ends after it: what was launched by then counts, not the last launch.
    """
    trace = Trace(folder)
    trace.add("user_annotation", 0, 100, "gen")
    trace.add("user_annotation", 100, 1100, "update_actor")
    for number, launch in enumerate((10, 20, 30, 450, 455)):
        trace.call(launch, launch + 4, number)
    trace.kernel(50, 250, 0)
    trace.kernel(200, 400, 2, stream=8)
    trace.kernel(380, 500, 1, name="ncclDevKernel_AllGather", stream=9)
    trace.kernel(800, 950, 3)
    trace.add("gpu_memcpy", 950, 1000, "Memcpy HtoD", device=0, stream=7, correlation=4)
    return trace


def test_two_stages_with_known_times(tmp_path: Path) -> None:
    report = make_report(two_stages(tmp_path).write())
    assert report.is_trusted
    assert report.by_stage() == {
        "gen": Times(500 * US, compute=350 * US, comm=100 * US, idle=50 * US, leading=50 * US),
        "update_actor": Times(600 * US, compute=150 * US, copy=50 * US, idle=400 * US, leading=300 * US, tail=100 * US),
    }
    (gap,) = report.gaps
    assert (gap.end - gap.start, gap.cause.kind) == (300 * US, "device wait")


def test_a_gap_after_a_late_launch_is_the_hosts(tmp_path: Path) -> None:
    trace = two_stages(tmp_path)
    trace.call(1199, 1200, 9)
    trace.kernel(1200, 1300, 9)
    assert [gap.cause.kind for gap in make_report(trace.write()).gaps] == ["device wait", "nothing"]


def test_the_capture_ends_where_the_trace_says(tmp_path: Path) -> None:
    """Two processes of one host, the second recorded for longer: its last millisecond is not the first one's idle time."""
    first, second = two_stages(tmp_path), Trace(tmp_path, pid=2, device=1)
    first.add("Trace", 0, 1100, "PyTorch Profiler (0)")
    second.call(0, 1, 1)
    second.kernel(0, 2000, 1)
    report = make_report(first.write(), second.write())
    assert [times.window for _, times in report.gpus] == [1100 * US, 2000 * US]


@pytest.mark.parametrize(("num_unknown", "is_trusted"), [(1, True), (2, False)])
def test_operations_without_a_launch(num_unknown: int, is_trusted: bool, tmp_path: Path) -> None:
    trace = two_stages(tmp_path)
    for i in range(num_unknown):
        trace.kernel(1000 + 10 * i, 1010 + 10 * i, 100 + i)
    report = make_report(trace.write())
    assert report.is_trusted is is_trusted
    assert is_trusted or "only 71% of the GPU operations have their launch" in report.distrust[0]


@pytest.mark.parametrize("num_rows", [0, 1])
def test_graph_launches_without_rows_look_idle(num_rows: int, tmp_path: Path) -> None:
    trace = two_stages(tmp_path)
    trace.call(600, 610, 50, "cudaGraphLaunch")
    for _ in range(num_rows):
        trace.kernel(650, 700, 50)
    distrust = make_report(trace.write()).distrust
    assert len(distrust) == 1 - num_rows
    assert num_rows or "the CUDA graph launches left no GPU rows" in distrust[0]
