"""The report on made-up exports whose truth is known: identity, windows, stages, steps, waits, causes."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import pytest
from bubble_reports import make_report, ms, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from nsys_exports import Export, global_pid

from rollpacker.profiling import nvtx
from rollpacker.profiling.bubble_report import chrome, nsys_launches, nsys_work
from rollpacker.profiling.bubble_report.inputs import read_sources
from rollpacker.profiling.bubble_report.intervals import Intervals
from rollpacker.profiling.bubble_report.stage_names import StageName, StageNamer
from rollpacker.profiling.bubble_report.tables import json_report
from rollpacker.profiling.bubble_report.timeline import UNATTRIBUTED

VERSIONS = ("2023.1", "2025.3", "2026.2")


def test_kinds_are_split_and_streams_are_united(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.000, 0.040, stream=7)
    export.kernel(10, 0.020, 0.050, stream=8)  # overlaps on another stream: counts once
    export.kernel(10, 0.045, 0.070, name="ncclDevKernel_AllReduce_Sum_f32", stream=9)  # 20 ms of it alone
    export.copy(10, 0.060, 0.080)  # 10 ms of it alone
    export.memset(10, 0.090, 0.100)
    report = make_report(export.write())
    times = report.gpus[0][1]
    assert [ms(v) for v in (times.window, times.compute, times.comm, times.copy, times.idle)] == [100, 50, 20, 20, 10]
    assert report.is_trusted


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("kind", [59, 60, 70, 71])
def test_every_schema_and_every_kind_of_range(tmp_path: Path, version: str, registered: bool, kind: int) -> None:
    export = Export(tmp_path / "a.sqlite", version=version)
    export.process(10, {0: 0})
    export.add("NVTX_EVENTS", start=-2_000_000_000, end=None, eventType=75, text="domain", globalTid=global_pid(10))
    export.range(10, 0.0, 1.0, "rollpacker/step_3", kind=kind, registered=registered)
    export.range(10, 0.0, 0.6, "rollpacker/gen", kind=kind, registered=registered)
    export.range(10, 0.6, None, "rollpacker/update_actor", kind=kind, registered=registered)  # open at the end
    export.kernel(10, 0.1, 0.4)
    export.kernel(10, 0.7, 1.0)
    report = make_report(export.write())
    rows = rows_of(report)
    gen, train = rows[3, "gen", "0"], rows[3, "update_actor", "0"]
    assert [ms(v) for v in (gen.window, gen.idle, gen.leading, gen.inside, gen.tail)] == [600, 300, 100, 0, 200]
    assert [ms(v) for v in (train.window, train.idle, train.leading, train.tail)] == [400, 100, 100, 0]
    assert any("still open" in note for note in report.notes)


def test_a_controller_without_a_gpu_names_the_stages_of_workers_in_other_files(tmp_path: Path) -> None:
    """verl on Ray: start/end ranges on the controller, kernels in worker processes whose device is always 0."""
    controller = Export(tmp_path / "controller.sqlite", gpus=("u0", "u1"))
    for start, name in ((0.0, "step"), (10.0, "step")):
        controller.range(1, start, start + 10, name, kind=60)
        controller.range(1, start, start + 6, "gen", kind=60, registered=True)
        controller.range(1, start + 6, start + 7, "reward", kind=60)
        controller.range(1, start + 7, start + 10, "update_actor", kind=60)
    workers = []
    for index, stop in enumerate((2.0, 5.0)):
        worker = Export(
            tmp_path / f"worker_process_{index}.sqlite", gpus=("u0", "u1"), system_ns=5_000_000_000 + index * 10**9
        )
        worker.utc_ns += index * 10**9  # captured a second later: times start a second lower
        worker.process(100 + index, {0: index})
        for start in (0.0, 10.0):
            worker.kernel(100 + index, start + 1 - index, start + stop - index)
            worker.kernel(100 + index, start + 7.5 - index, start + 10 - index)
        workers.append(worker.write())
    report = make_report(controller.write(), *workers)
    rows = rows_of(report)
    for step in (1, 2):
        assert [round(ms(rows[step, "gen", g].tail)) for g in ("0", "1")] == [4000, 1000]
        assert [round(ms(rows[step, "gen", g].leading)) for g in ("0", "1")] == [1000, 1000]
        assert [round(ms(rows[step, "reward", g].idle)) for g in ("0", "1")] == [1000, 1000]
        assert [round(ms(rows[step, "update_actor", g].idle)) for g in ("0", "1")] == [500, 500]
    wait = next(w for w in report.waits if (w.stage, w.step) == ("gen", 1))
    assert (wait.last.name, round(ms(wait.waited))) == ("1", 3000)
    assert report.alignment.error_ns == 0  # one host, its monotonic clock is known


def test_own_ranges_follow_the_queue_of_the_gpu(tmp_path: Path) -> None:
    """The host runs ahead: what gen launched counts as gen although the host is in update_actor by then."""
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.range(10, 0.00, 0.10, "gen")
    export.range(10, 0.10, 1.00, "update_actor")
    for i in range(5):
        export.kernel(10, 0.1 * i + 0.01, 0.1 * i + 0.11, launch=0.005 + i * 0.01)
    export.kernel(10, 0.60, 1.00, launch=0.55)
    report = make_report(export.write())
    rows = rows_of(report)
    assert ms(rows[None, "gen", "0"].window) == pytest.approx(510, abs=0.1)
    assert ms(rows[None, "gen", "0"].compute) == pytest.approx(500, abs=0.1)
    assert ms(rows[None, "update_actor", "0"].compute) == pytest.approx(400, abs=0.1)
    assert ms(rows[None, "update_actor", "0"].leading) == pytest.approx(90, abs=0.1)


@pytest.mark.parametrize(("most", "num_left"), [(4000, 0), (700, 201), (100, 801)])
def test_many_ranges_follow_the_queue_or_a_note_says_how_many_do_not(
    most: int, num_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 rounds: gen's kernel starts when the host is in update_actor already; both run for half of the round."""
    assert most <= nsys_launches._MAX_DRAINED
    monkeypatch.setattr(nsys_launches, "_MAX_DRAINED", most)
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    for i in range(300):
        at = 0.01 * i
        export.range(10, at, at + 0.002, "gen")
        export.range(10, at + 0.002, at + 0.01, "update_actor")
        export.range(10, at, at + 0.001, "forward")  # a framework's: its 300 further ends come after the RL loop's 601
        export.kernel(10, at + 0.001, at + 0.006, launch=at + 0.0005)
        export.kernel(10, at + 0.006, at + 0.011, launch=at + 0.003)
    report = make_report(export.write())
    share = report.by_stage()["gen"].compute / report.total.window
    assert share == pytest.approx(0.5, abs=0.01) if num_left <= 300 else share < 0.4
    assert [f"{num_left} of 901 range ends" in note for note in report.notes] == [True] * bool(num_left)


def test_the_tail_of_a_stage_counts_for_those_who_finished_early(tmp_path: Path) -> None:
    """One file per rank, own ranges only: the common window of gen lasts until the last rank's end."""
    paths = []
    for rank, stop in enumerate((5.0, 6.0, 7.0, 10.0)):
        export = Export(tmp_path / f"rank{rank}.sqlite", gpus=("u0", "u1", "u2", "u3"), duration_s=10.0)
        export.process(100 + rank, {rank: rank})
        export.range(100 + rank, 0.0, stop, "rollpacker/gen")
        export.kernel(100 + rank, 0.0, stop, device=rank)
        paths.append(export.write())
    report = make_report(*paths)
    (wait,) = report.waits
    assert (wait.last.name, round(ms(wait.waited))) == ("3", 12_000)
    assert [round(ms(t.tail)) for _, t in report.gpus] == [5000, 4000, 3000, 0]
    assert report.total.bubble_ratio == pytest.approx(12 / 40)
    span = make_report(*paths, is_span=True)
    assert span.total.idle == 0 and [round(ms(t.window)) for _, t in span.gpus] == [5000, 6000, 7000, 10_000]


def test_a_gpu_without_work_in_a_stage_waited_since_it_began(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite", gpus=("u0", "u1"))
    export.kernel(10, 0.2, 0.7)
    for gpu in range(2):
        export.process(10 + gpu, {0: gpu})
        export.range(10 + gpu, 0.0, 1.0, "gen")
        export.kernel(10 + gpu, 1.0, 2.0)
    (wait,) = make_report(export.write()).waits
    assert (wait.last.name, ms(wait.waited)) == ("0", 700)


def test_a_gpu_without_compute_in_a_stage_was_done_with_its_last_work(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite", gpus=("u0", "u1"))
    export.kernel(10, 0.2, 0.7)
    export.kernel(11, 0.1, 0.4, name="ncclDevKernel_AllGather")
    for gpu in range(2):
        export.process(10 + gpu, {0: gpu})
        export.range(10 + gpu, 0.0, 1.0, "gen")
        export.kernel(10 + gpu, 1.0, 2.0)
    (wait,) = make_report(export.write()).waits
    assert (wait.last.name, ms(wait.waited)) == ("0", 300)


def test_graph_launches_are_busy_and_without_rows_they_are_not_trusted(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.1)
    export.graph(10, 0.1, 0.9)
    export.graph(10, 0.9, 1.0)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=0, end=0, deviceId=0, globalPid=global_pid(10))
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=5, end=10**12, deviceId=2**31 - 1, globalPid=global_pid(10))
    report = make_report(export.write())
    assert report.is_trusted and report.total.idle == 0 and ms(report.total.compute) == 1000

    lost = Export(tmp_path / "b.sqlite")
    lost.process(10, {0: 0})
    lost.kernel(10, 0.0, 0.1)
    lost.graph(10, 0.1, 0.9, has_row=False)
    lost.kernel(10, 0.9, 1.0)
    report = make_report(lost.write())
    assert not report.is_trusted and "graph launches left no GPU rows" in report.distrust[0]
    assert report.total.bubble_ratio == pytest.approx(0.8)


def test_identity_processes_share_a_gpu_and_ordinals_do_not(tmp_path: Path) -> None:
    """Ray: two workers see device 0, which is GPU 0 and GPU 1; a vLLM process shares GPU 1 with the trainer."""
    export = Export(tmp_path / "a.sqlite", gpus=("u0", "u1", "u2"))
    export.process(10, {0: 0})
    export.process(11, {0: 1})
    export.process(12, {0: 1})
    export.kernel(10, 0.0, 1.0)
    export.kernel(11, 0.0, 0.5)
    export.kernel(12, 0.5, 1.0)
    report = make_report(export.write())
    assert [(g.name, t.idle) for g, t in report.gpus] == [("0", 0), ("1", 0)]
    assert [g.name for g in report.not_captured] == ["2"]  # not 100 % idle: not captured
    assert any("GPU 2: not captured" in note for note in report.notes)


def test_identity_without_the_device_table_keeps_equal_ordinals_apart(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite", version="2023.1", gpus=("u0", "u1"))
    export.kernel(10, 0.0, 1.0)
    export.kernel(11, 0.0, 0.5)
    report = make_report(export.write())
    assert len(report.gpus) == 2 and sum("identity unknown" in note for note in report.notes) == 2


def test_identity_without_the_device_table_goes_by_the_ordinal_that_one_process_uses(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite", version="2023.1", gpus=("u0", "u1"))
    export.kernel(10, 0.0, 1.0, device=1)
    report = make_report(export.write())
    assert [gpu.key for gpu, _ in report.gpus] == ["u1"] and [gpu.key for gpu in report.not_captured] == ["u0"]


def test_a_process_in_the_middle_of_the_table_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_work, "_PEEK", 2)
    export = Export(tmp_path / "a.sqlite")
    for pid in (10, 11):
        export.process(pid, {0: 0})
    for i in range(10):
        export.kernel(11 if i == 5 else 10, 0.1 * i, 0.1 * i + 0.1)
    assert make_report(export.write()).total.idle == 0


def test_collectives_are_known_by_the_demangled_name_where_it_is_the_only_one(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.5)
    export.kernel(10, 0.5, 1.0, name="ncclDevKernel_AllReduce")
    path = export.write()
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN shortName")
    assert ms(make_report(path).total.comm) == 500
    (source,) = read_sources([str(path)], StageNamer())
    assert source.collective_ends() == [[1_000_000_000]]  # what --align nccl compares


def test_rows_that_are_still_in_the_write_ahead_log_are_read(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.5)
    export.kernel(10, 0.9, 1.0)
    path = export.write()
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 800000000 WHERE start = 0")
    database.commit()
    assert path.with_name("a.sqlite-wal").exists()
    assert ms(make_report(path).total.idle) == 100
    database.close()


def test_mig_instances_are_gpus_by_their_own_uuid(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite", gpus=("u0",), is_mig=True)
    export.process(10, {0: 0}, {0: "MIG-aaaaaaaa-1"})
    export.process(11, {0: 0}, {0: "MIG-bbbbbbbb-2"})
    export.process(12, {0: 0}, {0: "MIG-bbbbbbbb-2"})
    export.kernel(10, 0.0, 1.0)
    export.kernel(11, 0.0, 0.5)
    export.kernel(12, 0.5, 1.0)
    report = make_report(export.write())
    assert sorted(g.key for g, _ in report.gpus) == ["mig-aaaaaaaa-1", "mig-bbbbbbbb-2"]
    assert report.total.idle == 0

    unnamed = Export(tmp_path / "b.sqlite", gpus=("u0",), is_mig=True)
    for pid in (10, 11):
        unnamed.process(pid, {0: 0})
        unnamed.kernel(pid, 0.0, 1.0)
    report = make_report(unnamed.write())
    assert len(report.gpus) == 2 and any("MIG" in note for note in report.notes)


def test_pids_of_two_nodes_collide_without_harm(tmp_path: Path) -> None:
    paths = []
    for node in range(2):
        export = Export(tmp_path / f"n{node}.sqlite", host=f"node{node}", gpus=("same-uuid",))
        export.process(10, {0: 0})
        export.kernel(10, 0.0, 1.0 - 0.5 * node)
        export.range(10, 0.0, 1.0, "gen")
        paths.append(export.write())
    report = make_report(*paths)
    assert [(g.host, round(ms(t.idle))) for g, t in report.gpus] == [("node0", 0), ("node1", 500)]
    merged = make_report(*paths, nodes=("box",))
    assert [(g.host, t.idle) for g, t in merged.gpus] == [("box", 0)]


def test_the_causes_of_gaps(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.1)
    export.call(10, 0.05, 0.39, "cudaStreamSynchronize_v3020")
    export.kernel(10, 0.4, 0.5)
    for i in range(200):  # 0.2 s of calls back to back, none of which gives the GPU work
        export.call(10, 0.5 + i * 1e-3, 0.5 + i * 1e-3 + 0.95e-3, "cudaEventRecord_v3020")
    export.kernel(10, 0.7, 0.8)
    export.kernel(10, 0.9, 1.0)
    export.kernel(10, 1.05, 1.1, launch=0.85)
    report = make_report(export.write())
    found = [(round(ms(g.end - g.start)), g.cause.kind) for g in report.gaps]
    assert found == [(300, "sync call"), (200, "launch-bound"), (100, "nothing"), (50, "device wait")]
    assert "cudaStreamSynchronize" in report.gaps[0].cause.detail and report.long_gaps[report.gpus[0][0]][0] == 4


def test_a_launch_before_all_calls_that_are_looked_at_is_a_wait_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys_launches, "_LOOK_BACK", 2)
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.1)
    export.kernel(10, 0.9, 1.0, launch=0.01)
    for i in range(5):
        export.call(10, 0.02 + 0.01 * i, 0.021 + 0.01 * i, "cudaEventRecord_v3020")
    (gap,) = make_report(export.write()).gaps
    assert gap.cause.kind == "device wait"


def test_the_process_that_says_most_gives_the_cause(tmp_path: Path) -> None:
    """Two processes on one GPU: one did nothing with CUDA in the gap, the other waited in a call, whichever comes first."""
    for other in (9, 11):
        export = Export(tmp_path / f"{other}.sqlite")
        for pid in (10, other):
            export.process(pid, {0: 0})
        export.kernel(10, 0.0, 0.1)
        export.call(10, 0.1, 0.89, "cudaStreamSynchronize_v3020")
        export.kernel(10, 0.9, 1.0)
        export.kernel(other, 0.0, 0.1)
        export.kernel(other, 0.9, 1.0)
        (gap,) = make_report(export.write()).gaps
        assert gap.cause.kind == "sync call"


def test_a_gap_of_a_process_without_calls_has_no_known_cause(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.kernel(10, 0.0, 0.1, correlation=1000)
    export.kernel(10, 0.9, 1.0, correlation=1001)
    for pid in (None, 11):  # without any call in the file, and with another process's
        if pid:
            export.call(pid, 0.2, 0.8, "cudaDeviceSynchronize")
        export.path = tmp_path / f"{pid}.sqlite"
        (gap,) = make_report(export.write()).gaps
        assert gap.cause.kind == "unknown"


def test_an_export_keeps_its_capture_window_with_and_without_a_clock(tmp_path: Path) -> None:
    for has_clock in (True, False):
        export = Export(tmp_path / f"{has_clock}.sqlite", duration_s=2.0)
        export.process(10, {0: 0})
        export.kernel(10, 0.5, 1.0)
        export.range(10, 0.0, 2.0, "gen")
        path = export.write()
        if not has_clock:
            with sqlite3.connect(path) as database:
                database.execute("DROP TABLE TARGET_INFO_SESSION_START_TIME")
        (source,) = read_sources([str(path)], StageNamer())
        assert source.captured == (0, 2_000_000_000) and source.has_wall_clock is has_clock


def test_hours_between_captures_are_nobodys_idle_time(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        export = Export(tmp_path / f"worker.{number}.sqlite", gpus=("u0",), duration_s=1.0)
        export.utc_ns += number * 7_200 * 10**9
        export.system_ns += number * 7_200 * 10**9
        export.process(10, {0: 0})
        export.range(10, 0.0, 1.0, f"step {number + 5}")
        export.kernel(10, 0.0, 0.75)
        paths.append(export.write())
    report = make_report(*paths)
    assert ms(report.total.window) == 2000 and report.total.bubble_ratio == pytest.approx(0.25)
    assert list(report.by_step()) == [5, 6]
    assert not report.gaps and report.long_gaps[report.gpus[0][0]] == (
        1,
        250_000_000,
    )  # of the hole what is in the window


def test_a_gpu_counts_as_long_as_its_own_file_recorded(tmp_path: Path) -> None:
    """The second file's last two seconds are not the first one's idle time."""
    paths = []
    for index, seconds in enumerate((1.0, 3.0)):
        export = Export(tmp_path / f"{index}.sqlite", gpus=("u0", "u1"), duration_s=seconds)
        export.process(10 + index, {0: index})
        export.kernel(10 + index, 0.0, seconds - 0.5)
        export.range(10 + index, 0.0, seconds, "gen")
        paths.append(export.write())
    assert [ms(times.window) for _, times in make_report(*paths).gpus] == [1000, 3000]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("rollpacker/update_weights", "update_weights"),
        ("generate_sequences", "gen"),
        ("compute_ref_log_prob", "ref"),
        ("megatron_policy_worker/get_logprobs", "old_log_prob"),
        ("dtensor_policy_worker_v2/train", "update_actor"),
        ("vllm_internal_worker_extension/update_weights_via_ipc_zmq", "update_weights"),
        ("execute_32_context_0(sq0sk0)_generation_32(sq32)", "gen"),
        ("execute_context_1(20)_generation_3(3)", "gen"),
        ("gpu_model_runner: forward", "gen"),
        (
            "megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving.warmup",
            "forward_backward",
        ),
        ("## forward ##", "forward"),
        ("Optimizer.step#Adam.step", "optimizer"),
        ("aten::gen, op_id = 17", None),
        ("nccl:all_reduce", None),
        ("Loop", None),
    ],
)
def test_names_of_stages(name: str, stage: str | None) -> None:
    assert getattr(StageNamer().meaning(name), "stage", None) == stage


def test_our_own_stages_keep_their_names() -> None:
    """The readers of our traces are pure and do not import the names."""
    stages = set(nvtx.STAGES) - {nvtx.STEP}
    assert {stage for stage in stages if StageNamer().meaning(f"rollpacker/{stage}") == StageName(stage, 0)} == stages
    assert stages >= chrome.OUR_COMPUTE | chrome.OUR_COMM


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("rollpacker/step_12", 12),
        ("Step 0 to 10", "0-10"),
        ("ProfilerStep#551", 551),
        ("iteration 7", 7),
        ("train_step: 3", 3),
    ],
)
def test_names_of_steps(name: str, number: int | str) -> None:
    assert getattr(StageNamer().meaning(name), "number", None) == number


def test_the_ranges_of_a_framework_count_where_the_rl_loop_says_nothing(tmp_path: Path) -> None:
    """Between two decoding steps lies a little scheduling: still gen. Inside update_actor forward is no stage."""
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    for i in range(5):
        export.kernel(10, 0.1 * i, 0.1 * i + 0.06)
        export.range(10, 0.1 * i, 0.1 * i + 0.06, "execute_context_0(0)_generation_8(8)")
    export.range(10, 0.5, 1.0, "update_actor")
    export.range(10, 0.6, 0.9, "forward_step")
    export.kernel(10, 0.5, 1.0)
    stages = make_report(export.write()).by_stage()
    assert {stage: round(ms(times.window)) for stage, times in stages.items()} == {
        "gen": 460,
        UNATTRIBUTED: 40,
        "update_actor": 500,
    }


def test_short_breaks_between_the_ranges_of_a_framework_are_bridged(tmp_path: Path) -> None:
    """For the GPU that marks them, whatever others do in the break, and for one that marks nothing, between processes."""
    export = Export(tmp_path / "a.sqlite", gpus=("u0", "u1", "u2"))
    for gpu in range(3):
        export.process(10 + gpu, {0: gpu})
        export.kernel(10 + gpu, 0.0, 0.38, correlation=1)  # without calls: ranges stay where the host set them
    for pid, start, end, name in (
        (10, 0.00, 0.10, "execute_context_0(0)_generation_8(8)"),
        (11, 0.10, 0.14, "forward_step"),
        (10, 0.14, 0.24, "execute_context_0(0)_generation_8(8)"),
        (11, 0.28, 0.38, "execute_context_0(0)_generation_8(8)"),
    ):
        export.range(pid, start, end, name)
    rows = rows_of(make_report(export.write()))
    assert (None, "forward", "0") not in rows and ms(rows[None, "forward", "2"].window) == 40
    assert ms(rows[None, "gen", "0"].window) == 380 and ms(rows[None, "gen", "2"].window) == 340


def test_common_windows_are_united_once_for_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many GPUs, each with 50 ranges: twice as many intervals to unite, not four times."""
    unite, given = Intervals.of, []

    def counted(pairs) -> Intervals:
        given.append(list(pairs))
        return unite(given[-1])

    monkeypatch.setattr(Intervals, "of", counted)
    totals = []
    for num_gpus in (4, 8):
        export = Export(tmp_path / f"{num_gpus}.sqlite", gpus=tuple(f"u{gpu}" for gpu in range(num_gpus)))
        for gpu in range(num_gpus):
            export.process(10 + gpu, {0: gpu})
            export.kernel(10 + gpu, 0.0, 1.0)
            for i in range(50):
                export.range(10 + gpu, 0.02 * i, 0.02 * i + 0.01, "gen")
        given.clear()
        make_report(export.write())
        totals.append(sum(map(len, given)))
    assert totals[1] < 2.5 * totals[0]


def test_the_best_kind_of_step_name_counts_the_steps(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.range(10, 0.0, 1.0, "rollpacker/step_3")
    export.range(10, 0.0, 1.0, "ProfilerStep#7")
    export.kernel(10, 0.0, 1.0)
    assert list(make_report(export.write()).by_step()) == [3]


@pytest.mark.parametrize("rules", [(), ("^aten::mm=matmul",)])
def test_operators_are_only_looked_at_where_the_user_names_ranges(rules: tuple[str, ...], tmp_path: Path) -> None:
    asked: list[str] = []

    class Listener(StageNamer):
        def meaning(self, name: str):
            asked.append(name)
            return super().meaning(name)

    export = Export(tmp_path / "a.sqlite")
    export.range(10, 0.0, 1.0, "gen")
    export.range(10, 0.2, 0.4, "aten::mm, op_id = 12")
    (source,) = read_sources([str(export.write())], Listener(rules))
    assert [named.name for named in source.ranges] == ["gen", "aten::mm"][: 1 + len(rules)]
    assert ("aten::mm" in asked) is bool(rules)


def test_the_users_names_come_first(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.process(10, {0: 0})
    export.range(10, 0.0, 1.0, "MyRollout phase 3")
    export.kernel(10, 0.0, 1.0)
    report = make_report(export.write(), stages=("^MyRollout=gen",))
    assert [row.stage for row in report.rows] == ["gen"]
    for rule, word in (("gen", "expected REGEX=NAME"), ("(=gen", "not a regular expression")):
        with pytest.raises(ValueError, match=word):
            StageNamer([rule])


# A random job: ranks with own ranges, kernels on two streams, copies; nothing is aligned on purpose.
SPANS = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=6)
JOBS = st.lists(
    st.fixed_dictionaries({"kernels": SPANS, "nccl": SPANS, "copies": SPANS, "gen": SPANS, "train": SPANS}),
    min_size=1,
    max_size=3,
)


def write_job(
    folder: Path, job: list[dict], shuffle: int | None = None, names: tuple[str, ...] = ("a", "b", "c")
) -> list[Path]:
    paths = []
    for rank, parts in enumerate(job):
        export = Export(folder / f"{names[rank]}.sqlite", gpus=("u0", "u1", "u2"), duration_s=2.0)
        export.process(10 + rank, {0: rank})
        for start, length in parts["kernels"]:
            export.kernel(10 + rank, start / 1e3, (start + length) / 1e3)
        for start, length in parts["nccl"]:
            export.kernel(10 + rank, start / 1e3, (start + length) / 1e3, name="ncclDevKernel_SendRecv", stream=9)
        for start, length in parts["copies"]:
            export.copy(10 + rank, start / 1e3, (start + length) / 1e3)
        for stage, kind in (("gen", 59), ("train", 60)):
            for start, length in parts[stage]:
                export.range(
                    10 + rank,
                    start / 1e3,
                    (start + length) / 1e3,
                    "update_actor" if stage == "train" else stage,
                    kind=kind,
                )
        export.range(10 + rank, 0.0, 0.6, "rollpacker/step_1")
        export.range(10 + rank, 0.6, 1.3, "rollpacker/step_2")
        paths.append(export.write(shuffle))
    return paths


@given(JOBS, st.integers(0, 1000))
@settings(max_examples=25)
def test_sums_hold_and_the_order_of_rows_and_files_is_irrelevant(job: list[dict], seed: int) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        plain = make_report(*write_job(Path(one), job))
        other = make_report(*reversed(write_job(Path(two), job, shuffle=seed)))
    plain_rows, other_rows = ({(r.step, r.stage, r.gpu): r.times for r in report.rows} for report in (plain, other))
    assert plain_rows == other_rows
    assert plain.gpus == other.gpus and plain.waits == other.waits
    # And the kinds, against sets of milliseconds.
    for (_, times), parts in zip(plain.gpus, job, strict=True):
        compute, comm, copy = (
            {t for start, length in parts[k] for t in range(start, start + length)}
            for k in ("kernels", "nccl", "copies")
        )
        assert [ms(times.compute), ms(times.comm), ms(times.copy)] == [
            len(compute),
            len(comm - compute),
            len(copy - comm - compute),
        ]


@given(JOBS)
@settings(max_examples=20)
def test_merging_two_reports_of_one_gpu_never_raises_its_idle_time(job: list[dict]) -> None:
    """All ranks become processes on GPU 0; the window is held by the steps, which all of them mark."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for rank, parts in enumerate(job):
            export = Export(Path(folder) / f"{rank}.sqlite", gpus=("u0",), duration_s=2.0)
            export.process(10 + rank, {0: 0})
            export.range(10 + rank, 0.0, 1.5, "step 1")
            for start, length in parts["kernels"]:
                export.kernel(10 + rank, start / 1e3, (start + length) / 1e3)
            paths.append(export.write())
        alone = [make_report(path).total for path in paths]
        merged = make_report(*paths)
        assert len(merged.gpus) == 1
        assert merged.total.idle <= min(times.idle for times in alone)
        assert merged.total.window == alone[0].window


def test_sixty_four_gpus_on_eight_nodes(tmp_path: Path) -> None:
    paths = []
    for node in range(8):
        export = Export(
            tmp_path / f"n{node}.sqlite",
            host=f"node{node}",
            gpus=tuple(f"{node}-{g}" for g in range(8)),
            duration_s=10.0,
        )
        for gpu in range(8):
            export.process(100 + gpu, {0: gpu})
            export.range(100 + gpu, 0.0, 10.0, "rollpacker/step_1")
            export.range(100 + gpu, 0.0, 10.0, "rollpacker/gen")
            export.kernel(100 + gpu, 0.0, 1.0 + (8 * node + gpu) / 7)
        paths.append(export.write())
    report = make_report(*paths)
    assert len(report.gpus) == 64
    (wait,) = report.waits
    assert (wait.last.host, wait.last.name) == ("node7", "7")
    assert wait.waited == pytest.approx(sum((63 - i) / 7 for i in range(64)) * 1e9, rel=1e-6)
    document = json_report(report)
    assert len({(g["host"], g["gpu"]) for g in document["gpus"]}) == 64
    assert {row["stage"] for row in document["stages"]} == {"gen"}
    assert UNATTRIBUTED not in report.by_stage()
