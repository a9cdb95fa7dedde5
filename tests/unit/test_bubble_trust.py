"""When the report is not to be believed, and how far the clocks of its files are apart (docs/profiling.md)."""

from __future__ import annotations

import sqlite3
import time
from functools import partial
from pathlib import Path

import pytest
from bubble_reports import make_report
from nsys_exports import Export, global_pid

from rollpacker.profiling.bubble_report.clocks import align_clocks
from rollpacker.profiling.bubble_report.model import Source

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"


def busy_export(path: Path, **options) -> Export:
    """One GPU that works from 0 to 1 s."""
    export = Export(path, **options)
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 1.0)
    return export


def test_dropped_events_and_warnings_are_not_trusted(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    for i in range(100):
        if i % 10 == 5:
            export.call(10, 0.01 * i - 1e-5, 0.01 * i)  # a launch whose kernel is gone
        else:
            export.kernel(10, 0.01 * i, 0.01 * i + 0.009)
    report = make_report(export.write())
    assert report.distrust == ["a.sqlite: dropped events: 10.0% of the kernel launches left no kernel in the file"]

    warned = Export(tmp_path / "b.sqlite")
    warned.process(10, {0: 0})
    warned.kernel(10, 0.0, 1.0)
    warned.diagnostic("Not all OpenGL events might have been collected.")
    warned.diagnostic("Not all NVTX events might have been collected.")
    warned.diagnostic("Number of CUDA events collected: 12.", severity=1)
    path = warned.write()
    assert make_report(path).is_trusted  # no stage of it comes from NVTX
    for number, text in enumerate(
        ("Not all CUDA events might have been collected.", "CUPTI: 17 records were dropped.")
    ):
        bad = Export(tmp_path / f"c{number}.sqlite")
        bad.process(10, {0: 0})
        bad.kernel(10, 0.0, 1.0)
        bad.diagnostic(text)
        assert text in make_report(bad.write()).distrust[0]


def test_launches_into_a_stream_capture_are_not_missed(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.1)
    export.call(10, 0.11, 0.111, "cudaStreamBeginCapture_v10000")
    for i in range(50):
        export.call(10, 0.12 + i * 1e-4, 0.12005 + i * 1e-4)
    export.call(10, 0.19, 0.191, "cudaStreamEndCapture_v10000")
    export.kernel(10, 0.2, 0.3)
    assert make_report(export.write()).is_trusted


def test_a_graph_row_without_timestamps_is_a_lost_graph(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.1)
    correlation = export.call(10, 0.2, 0.21, "cudaGraphLaunch_v10000")
    row = {"start": 0, "end": 0, "deviceId": 0, "globalPid": global_pid(10), "correlationId": correlation}
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **row)
    export.call(10, 0.22, 0.23, "cudaLaunchHostFunc_v10000")  # runs on the host: no kernel is missing
    export.kernel(10, 0.3, 0.4)
    (reason,) = make_report(export.write()).distrust
    assert "graph launches left no GPU rows" in reason


def test_low_coverage_of_launches_is_not_trusted_and_printed(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    for i in range(10):
        export.kernel(10, 0.1 * i, 0.1 * i + 0.05, correlation=None if i < 7 else 10_000 + i)
    report = make_report(export.write())
    assert "only 70% of the GPU operations have their launch" in report.distrust[0]


def test_an_error_of_the_profiler_is_not_trusted_whatever_it_says(tmp_path: Path) -> None:
    export = busy_export(tmp_path / "a.sqlite")
    export.diagnostic("The daemon went away.", severity=3)
    assert make_report(export.write()).distrust == ["a.sqlite: the profiler warned: The daemon went away."]


def test_launches_in_a_file_without_a_table_of_kernels_are_dropped_events(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.copy(10, 0.0, 1.0)
    assert make_report(export.write()).is_trusted  # nothing but copies
    export = Export(tmp_path / "b.sqlite")
    export.process(10, {0: 0})
    export.copy(10, 0.0, 1.0)
    export.call(10, 0.5, 0.6)
    (reason,) = make_report(export.write()).distrust
    assert "the file has no table of kernels" in reason


def test_launches_that_failed_leave_no_kernel_and_are_not_missed(tmp_path: Path) -> None:
    export = busy_export(tmp_path / "a.sqlite")
    for i in range(10):
        export.call(10, 0.1 + 0.01 * i, 0.105 + 0.01 * i)
        export.rows[RUNTIME][-1]["returnValue"] = 719
    export.kernel(10, 1.0, 2.0)
    assert make_report(export.write()).is_trusted


def test_a_file_without_a_clock_among_others_needs_an_offset(tmp_path: Path) -> None:
    paths = [busy_export(tmp_path / f"{name}.sqlite", host=name, gpus=(name,)).write() for name in "ab"]
    with sqlite3.connect(paths[1]) as database:
        database.execute("DROP TABLE TARGET_INFO_SESSION_START_TIME")
    assert make_report(paths[1]).is_trusted  # alone it needs none
    (reason,) = make_report(*paths).distrust
    assert reason == "b.sqlite carries no wall clock and is read with other files: give --offset b.sqlite=SEC"
    assert make_report(*paths, offsets=("b.sqlite=1.78e9",)).is_trusted


def test_an_export_with_shifted_times_says_so(tmp_path: Path) -> None:
    for value, num_notes in (("0", 0), ("1500000", 1)):
        export = busy_export(tmp_path / f"{value}.sqlite")
        export.add("META_DATA_EXPORT", name="EXPORT_PARAM_TIME_SHIFT", value=value)
        notes = make_report(export.write()).notes
        assert sum("exported with EXPORT_PARAM_TIME_SHIFT set" in note for note in notes) == len(notes) == num_notes


@pytest.mark.parametrize(("version", "error_ns"), [("2025.3", None), ("2026.2", 0)])
def test_files_of_one_host_agree_exactly_from_2026_on(version: str, error_ns: int | None, tmp_path: Path) -> None:
    paths = [busy_export(tmp_path / f"{name}.sqlite", version=version, gpus=(name,)).write() for name in "ab"]
    alignment = make_report(*paths).alignment
    assert alignment.error_ns == error_ns
    assert ("before nsys 2026" in (alignment.note or "")) is (error_ns is None)


def skewed_nodes(tmp_path: Path, skew_s: float) -> list[Path]:
    tmp_path.mkdir(exist_ok=True)
    paths = []
    for node in range(2):
        export = Export(tmp_path / f"n{node}.sqlite", host=f"node{node}", gpus=(f"u{node}",), system_ns=node * 77 + 1)
        export.utc_ns += round(skew_s * node * 1e9)
        export.process(10, {0: 0})
        for i in range(20):
            late = 0.004 * ((i + node) % 3)  # each arrives at its own time, all leave together
            export.kernel(10, 0.1 * i, 0.1 * i + 0.05 + late)
            end = 0.1 * i + 0.08 + (i * i % 7) * 1e-3
            export.kernel(10, 0.1 * i + 0.05 + late, end + node * (i % 2) * 2e-6, name="ncclDevKernel_AllReduce")
        if node:
            export.kernel(10, 2.5, 2.6, name="ncclDevKernel_AllReduce")  # one that the other file lacks
        paths.append(export.write())
    return paths


def test_clocks_of_two_nodes_are_aligned_by_collectives(tmp_path: Path) -> None:
    paths = skewed_nodes(tmp_path, 0.0375)
    raw = make_report(*paths)
    assert 0.037e9 < raw.alignment.error_ns < 0.038e9 and "--align nccl" in raw.alignment.note
    aligned = make_report(*paths, by_nccl=True)
    assert aligned.alignment.error_ns <= 2_000
    assert "residual error" in aligned.alignment.note
    starts = [t.work.compute.starts[0] for t in aligned.timelines]
    assert abs(starts[0] - starts[1]) <= 2_000
    again = make_report(*skewed_nodes(tmp_path / "synchronous", 0.0), by_nccl=True)
    assert again.alignment.error_ns <= 4_000 and "taken as they are" in again.alignment.note
    shifted = make_report(*paths, offsets=("n1.sqlite=-0.0375",))
    assert shifted.alignment.error_ns <= 4_000


def test_many_collectives_do_not_make_a_clock_dear() -> None:
    """20,000 on each of four hosts, which leave them within 1 us of each other; their clocks are 0.2 ms apart."""
    sources = []
    for node in range(4):
        ends = [100_000 * i + 200_000 * node + (i * 7919 * node) % 1000 for i in range(20_000)]
        clock = f"host {node}"
        sources.append(Source(clock, "nsys", clock, {}, [], clock_group=clock, collective_ends=partial(list, [ends])))
    start = time.process_time()
    alignment = align_clocks(sources, (), by_nccl=False)
    assert time.process_time() - start < 0.6  # seconds of CPU; 1.2 with all of them
    assert alignment.error_ns < 700_000


def test_clocks_without_common_collectives_cannot_be_aligned_by_them(tmp_path: Path) -> None:
    paths = [*skewed_nodes(tmp_path, 0.0), busy_export(tmp_path / "c.sqlite", host="c", gpus=("c",)).write()]
    plain = make_report(*paths)
    assert plain.is_trusted and plain.alignment.error_ns is None and "error unknown" in plain.alignment.note
    assert make_report(*paths, by_nccl=True).distrust == [
        "--align nccl found no matching collectives for 1 of 3 clocks"
    ]


def test_a_correction_smaller_than_its_own_error_is_not_made(tmp_path: Path) -> None:
    """Node 1 is 10 ms late. Node 2 leaves its collectives up to 2 ms before or after the others: 0.1 ms is nothing."""
    paths = []
    for node, (skew_s, spread_s) in enumerate(((0.0, 0.0), (0.010, 0.0), (0.0001, 0.002))):
        export = Export(tmp_path / f"n{node}.sqlite", host=f"node{node}", gpus=(f"u{node}",), system_ns=node * 77 + 1)
        export.process(10, {0: 0})
        for i in range(20):
            end = 0.1 * i + 0.08 + skew_s + spread_s * (7 * i % 20 - 9.5) / 9.5
            export.kernel(10, 0.1 * i, end, name="ncclDevKernel_AllReduce")
        paths.append(export.write())
    report = make_report(*paths, by_nccl=True)
    starts = [timeline.work.comm.starts[0] for timeline in report.timelines]
    assert [start - starts[0] for start in starts] == [0, -10_000_000, 0]
    assert report.alignment.error_ns == pytest.approx(2e6 * 5 / 9.5 + 1e5, abs=2)  # the median spread and what was left
