"""tools/profile_bubbles.py as a user runs it: outputs, exit codes, bad files, real files, speed."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import os
import re
import sqlite3
import stat
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from nsys_exports import SECRET, Export

from rollpacker.profiling.trace import Span, TraceWriter

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "profile_bubbles.py"
REAL = ROOT.parent / "shared" / "data" / "traces"


def load_tool():
    spec = importlib.util.spec_from_file_location("profile_bubbles", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL_MODULE = load_tool()


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    try:
        code = TOOL_MODULE.main([str(a) for a in arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    output = capsys.readouterr()
    return code, output.out, output.err


def simple_export(path: Path, busy: float = 0.5, **options) -> Export:
    """One GPU that works from 0 to `busy` and from 0.9 to 1 s."""
    export = Export(path, **options)
    export.process(10, {0: 0})
    export.range(10, 0.0, 1.0, "rollpacker/step_1")
    export.range(10, 0.0, 1.0, "rollpacker/gen")
    export.kernel(10, 0.0, busy)
    export.kernel(10, 0.9, 1.0)
    return export


def test_all_outputs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace = simple_export(tmp_path / "a<b>&.sqlite").write()
    before = simple_export(tmp_path / "before.sqlite", busy=0.3).write()
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "svg", "html")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", path)]
    code, out, err = run(capsys, trace, "--compare", before, *options)
    assert (code, err) == (0, "")
    assert out.startswith("1. 1 GPU was idle for 40.0 % of the time")
    assert "the bubble fell by 20.0 points, from 60.0 % to 40.0 %" in out and "-20.0 points" in out

    document = json.loads(files["json"].read_text())
    assert document["trusted"] is True and document["notes"] == []
    (gpu,) = document["gpus"]
    assert gpu["host"] == "node0" and gpu["gpu"] == "0"
    expected = {"window_s": 1.0, "compute_s": 0.6, "comm_s": 0, "copy_s": 0, "idle_s": 0.4, "bubble_ratio": 0.4}
    for rows in (document["gpus"], document["stages"], document["steps"]):
        assert {key: rows[0][key] for key in expected} == pytest.approx(expected)
    assert (document["stages"][0]["stage"], document["stages"][0]["step"]) == ("gen", 1)
    assert document["steps"][0]["step"] == 1
    assert document["compare"][0]["bubble_ratio"] == pytest.approx([0.6, 0.4, -0.2])
    assert len(document["summary"]) == 3
    assert "the bubble did not change, it is 40.0 %." in run(capsys, trace, "--compare", trace)[1]

    (row,) = csv.DictReader(io.StringIO(files["csv"].read_text()))
    assert (row["step"], row["stage"], float(row["idle_s"])) == ("1", "gen", pytest.approx(0.4))
    picture = ElementTree.parse(files["svg"]).getroot()
    assert picture.tag.endswith("svg") and "gen" in "".join(picture.itertext())
    page = files["html"].read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded from elsewhere"
    assert "<svg" in page and "the bubble fell" in page and "a<b>" not in page


def test_the_environment_of_the_process_is_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace = simple_export(tmp_path / "a.sqlite").write()
    files = [tmp_path / f"o.{kind}" for kind in ("json", "csv", "svg", "html")]
    _, out, err = run(capsys, trace, *[t for f in files for t in (f"--{f.suffix[1:]}", f)])
    assert SECRET in trace.read_bytes().decode("latin-1")  # it is there to be found
    for text in (out, err, *(f.read_text() for f in files)):
        assert "SECRET" not in text and "hf_do_not" not in text


def stand_in_for_nsys(folder: Path, export: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nsys command on the PATH that copies `export` and notes each run in `runs`; returns a report to convert."""
    (folder / "bin").mkdir()
    nsys = folder / "bin" / "nsys"
    nsys.write_text(f'#!/bin/sh\necho run >> {folder}/runs\n[ "$1 $2 $3" = "export -t sqlite" ] && cp {export} "$6"\n')
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    report = folder / "job.nsys-rep"
    report.write_bytes(b"NVIDIA Tegra Profiler Report \x00")
    return report


def test_the_traces_are_only_read(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    trace = simple_export(tmp_path / "in" / "a.sqlite").write()
    content = trace.read_bytes()
    trace.chmod(stat.S_IRUSR)
    assert run(capsys, trace)[0] == 0
    assert trace.read_bytes() == content and [p.name for p in trace.parent.iterdir()] == ["a.sqlite"]
    before = simple_export(tmp_path / "before.sqlite", busy=0.3).write()
    report = stand_in_for_nsys(tmp_path, before, monkeypatch)
    for arguments in (
        (trace, "--json", trace),
        (trace, "--compare", before, "--csv", before),
        (report, "--svg", report),
    ):
        content = arguments[-1].read_bytes()
        code, _, err = run(capsys, *arguments)
        assert code == 2 and "would be overwritten" in err and arguments[-1].read_bytes() == content


def test_untrusted_is_exit_4_and_still_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    export = simple_export(tmp_path / "a.sqlite")
    export.diagnostic("Not all CUDA events might have been collected.")
    code, out, err = run(capsys, export.write(), "--json", tmp_path / "o.json", "--svg", tmp_path / "o.svg")
    assert code == 4
    assert out.startswith("UNTRUSTED") and "Not all CUDA events" in out and "Not all CUDA events" in err
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["trusted"] is False and document["gpus"][0]["idle_s"] == pytest.approx(0.4)
    assert "UNTRUSTED" in (tmp_path / "o.svg").read_text()


def test_a_file_without_gpu_work_is_not_captured_rather_than_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.call(10, 0.0, 0.1, "cuInit")
    code, out, _ = run(
        capsys, export.write(), "--json", tmp_path / "o.json", "--svg", tmp_path / "o.svg", "--html", tmp_path / "h"
    )
    assert code == 4 and "not captured" in out and "100.0 %" not in out
    assert json.loads((tmp_path / "o.json").read_text())["gpus"] == []


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    good = simple_export(folder / "good.sqlite")
    for i in range(2_000):
        good.kernel(10, 2 + i * 1e-3, 2 + i * 1e-3 + 1e-4)
    whole = good.write().read_bytes()
    cases: dict[str, tuple[Path, str]] = {}

    def case(name: str, content: bytes, message: str) -> None:
        path = folder / name
        path.write_bytes(content)
        cases[name] = path, message

    case("truncated.sqlite", whole[: len(whole) // 2], "damaged or cut short")
    case("header.sqlite", whole[:100], "damaged or cut short")
    middle = len(whole) // 2
    case("corrupt.sqlite", whole[:4096] + os.urandom(middle) + whole[4096 + middle :], "damaged")
    schema = b"CREATE TABLE StringIds ("
    case("schema.sqlite", whole.replace(schema, b"CREATE \x01\nBLE StringIds ("), "damaged or cut short")
    case("empty.sqlite", b"", "an empty file")
    case("text.sqlite", b"hello, world\n" * 100, "no SQLite file")
    case("report.nsys-rep", b"NVIDIA Tegra Profiler Report \x00\x01", "nsys export -t sqlite")
    case("cut.json", b'{"traceEvents": [{"ph": "X", "ts": 1', "not valid JSON")
    case("other.json", b'{"a": 1}', "no trace")
    case("deep.json", b"[" * 200_000, "not valid JSON")
    case("nonsense.json", b'{"traceEvents": [{"ph":"X","cat":"kernel","ts":1,"dur":"x","args":{}}]}', "makes no sense")
    case("cut.json.gz", gzip.compress(b'{"traceEvents": []}' * 500)[:40], "gzip")
    case("noise.json.gz", b"\x1f\x8b" + os.urandom(500), "gzip")
    case("noise.bin", os.urandom(500), "neither an nsys export")
    foreign = folder / "foreign.sqlite"
    database = sqlite3.connect(foreign)
    database.execute("CREATE TABLE t (a)")
    database.commit()
    database.close()
    cases["foreign.sqlite"] = foreign, "no export of Nsight Systems"
    old = folder / "old.sqlite"
    database = sqlite3.connect(old)
    database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, name)")
    database.commit()
    database.close()
    cases["old.sqlite"] = old, "lacks the column(s) deviceId, globalPid"
    for name in ("sparse.sqlite", "sparse.json", "sparse.json.gz"):
        with (folder / name).open("wb") as file:
            file.truncate(10 << 30)
        cases[name] = folder / name, "no SQLite file" if name.endswith("sqlite") else ""
    with (folder / "sparse2.json").open("wb") as file:
        file.write(b'{"traceEvents": [')
        file.truncate(10 << 30)
    cases["sparse2.json"] = folder / "sparse2.json", "too large"
    (folder / "empty").mkdir()
    cases["a folder"] = folder / "empty", "a folder without traces"
    cases["nothing"] = folder / "missing.sqlite", "no such file"
    return cases


def test_bad_files_are_one_clear_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nsys here
    for name, (path, message) in bad_files(tmp_path).items():
        start = time.monotonic()
        code, out, err = run(capsys, path, "--json", tmp_path / "o.json")
        assert code == 2, name
        assert message in err and path.name in err and len(err.splitlines()) == 1 and out == "", (name, err)
        assert not (tmp_path / "o.json").exists(), name
        assert time.monotonic() - start < 20, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "x"], "expected REGEX=NAME"),
        (["--stages", "(=x"], "regular expression"),
        (["--offset", "b.sqlite=1"], "none of the traces is called b.sqlite"),
        (["--offset", "a.sqlite=soon"], "expected seconds"),
        (["--offset", "1"], "expected FILE=VALUE"),
        (["--window", "all"], "invalid choice"),
        (["--align", "ptp"], "invalid choice"),
        (["--json", "no/such/folder/o.json"], "no/such/folder"),
        (["--compare", "gone.sqlite"], "no such file"),
    ],
)
def test_usage_errors_are_exit_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code, out, err = run(capsys, simple_export(tmp_path / "a.sqlite").write(), *arguments)
    assert code == 2 and message in err and "Traceback" not in err and out == ""


def test_reports_are_converted_with_the_nsys_command(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds the first one's export in the cache; a report keeps its own name throughout."""
    report = stand_in_for_nsys(tmp_path, simple_export(tmp_path / "real.sqlite").write(), monkeypatch)
    for name in (report.name, report.parent):
        code, out, _ = run(capsys, report, "--offset", f"{name}=1")
        assert code == 0 and "40.0 %" in out
    run(capsys, report, "--json", tmp_path / "o.json")
    assert [file["path"] for file in json.loads((tmp_path / "o.json").read_text())["files"]] == [str(report)]
    assert (tmp_path / "runs").read_text() == "run\n"
    (tmp_path / "bin" / "nsys").write_text("#!/bin/sh\necho bad version >&2; exit 3\n")
    report.write_bytes(b"NVIDIA Tegra Profiler Report \x00\x00")
    code, _, err = run(capsys, report)
    assert code == 2 and "bad version" in err


def test_folders_and_other_json_beside_traces(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    simple_export(tmp_path / "a.sqlite").write()
    (tmp_path / "a.nsys-rep").write_bytes(b"NVIDIA Tegra Profiler Report \x00")  # beside its own export
    (tmp_path / "config.json").write_text('{"lr": 1}')
    (tmp_path / "notes.txt").write_text("x")
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "40.0 %" in out


def test_the_name_of_a_host_for_all_files_or_for_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    traces = [simple_export(tmp_path / f"{name}.sqlite", gpus=(name,)).write() for name in "ab"]
    nodes = ("--node", "all", "--node", "b.sqlite=box")
    run(capsys, *traces, *nodes, "--json", tmp_path / "o.json")
    gpus = json.loads((tmp_path / "o.json").read_text())["gpus"]
    assert [(gpu["host"], gpu["gpu_uuid"]) for gpu in gpus] == [("all", "a"), ("box", "b")]


def test_our_own_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Two ranks: gen 0-4 s (rank 1's engine is done at 2), exchange, update_actor to 6, update_weights to 6.5."""
    with TraceWriter(tmp_path / "events.trace.json") as trace:
        for rank, stop in ((0, 4.0), (1, 2.0)):
            trace.add(
                [
                    Span("step_1", rank, "stage", 0.0, 6.5, {"step": 1}),
                    Span("gen", rank, "stage", 0.0, 4.0),
                    Span("decode", rank, "engine", 0.0, stop),
                    Span("exchange", rank, "stage", 4.0, 4.1),
                    Span("update_actor", rank, "stage", 4.1, 6.0),
                    Span("update_weights", rank, "stage", 6.0, 6.5),
                    Span("train:1/0", rank, "request", 0.0, stop),
                ]
            )
    code, _, _ = run(capsys, tmp_path, "--json", tmp_path / "o.json")
    assert code == 0
    document = json.loads((tmp_path / "o.json").read_text())
    assert [g["gpu"] for g in document["gpus"]] == ["rank 0", "rank 1"]
    assert [g["idle_s"] for g in document["gpus"]] == pytest.approx([0.0, 2.0])
    assert [g["comm_s"] for g in document["gpus"]] == pytest.approx([0.6, 0.6])
    (wait,) = [w for w in document["waits"] if w["stage"] == "gen"]
    assert (wait["gpu"], wait["waited_gpu_s"], wait["step"]) == ("rank 0", 2.0, 1)


def real(name: str) -> Path:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"the real trace {name} is not here")
    return path


@pytest.mark.parametrize(
    ("name", "bubbles"),
    [
        ("nsys/mfu_2gpu_before.sqlite", [8.7, 10.5]),
        ("nsys/mfu_2gpu_after.sqlite", [19.8, 15.1]),
        ("nsys/t4_steps_textid.sqlite", [36.8]),
        ("kineto/hta_sampled_rank-0.json.gz", [55.2]),
        ("kineto/hta_sampled_rank-1.json.gz", [52.9]),
        ("kineto/hta_nccl_data.json.gz", [76.2]),
        ("kineto/tracelens_vllm_decode_full.json.gz", [0.2]),
        ("kineto/tracelens_sglang_decode.json.gz", [97.9]),
    ],
)
def test_real_files_give_their_measured_values(
    name: str, bubbles: list[float], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code, _, _ = run(capsys, real(name), "--window", "span", "--json", tmp_path / "o.json")
    document = json.loads((tmp_path / "o.json").read_text())
    assert [100 * gpu["bubble_ratio"] for gpu in document["gpus"]] == pytest.approx(bubbles, abs=0.1)
    assert code == (4 if "t4" in name else 0)  # its profiler warned that CUDA events may be missing


def test_real_details(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(capsys, real("nsys/t4_steps_textid.sqlite"), "--window", "span", "--json", tmp_path / "o.json")
    document = json.loads((tmp_path / "o.json").read_text())
    (gpu,) = document["gpus"]
    assert gpu["num_gaps_over_1ms"] == 44 and gpu["window_s"] == pytest.approx(1.791, abs=5e-4)
    steps = [row["step"] for row in document["steps"]]
    assert steps == [f"{n}-{n + 10}" for n in range(0, 440, 10)]
    run(capsys, real("kineto/tracelens_sglang_decode.json.gz"), "--json", tmp_path / "o.json")
    gap = json.loads((tmp_path / "o.json").read_text())["gaps"][0]
    assert gap["duration_s"] == pytest.approx(0.463, abs=5e-4) and gap["cause"] == "sync call"
    code, out, _ = run(capsys, real("nsys/no_gpu_work_2025.1.sqlite"))
    assert code == 4 and "GPU 0: not captured" in out
    code, out, _ = run(capsys, real("kineto/hta_cupti.json.gz"))
    assert code == 4 and "100% of the launches left no GPU work" in out
    both = [real(f"nsys/mfu_2gpu_{word}.sqlite") for word in ("after", "before")]
    code, out, _ = run(capsys, both[0], "--compare", both[1], "--window", "span")
    assert code == 0 and "the bubble rose by 7.9 points" in out


def test_every_real_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Years and hosts apart: each GPU keeps its own short window instead of years of idle time."""
    code, _, _ = run(capsys, real("nsys").parent, "--json", tmp_path / "o.json", "--svg", tmp_path / "o.svg")
    document = json.loads((tmp_path / "o.json").read_text())
    assert code == 4 and len(document["gpus"]) == 11
    assert max(gpu["window_s"] for gpu in document["gpus"]) < 10


def write_many_kernels(path: Path, number: int) -> Path:
    """Back-to-back kernels with a gap after each, every tenth one NCCL, the columns a real export has."""
    export = simple_export(path)
    export.kernel(10, 1.0, 1.1, name="ncclDevKernel_AllReduce")
    export.write()
    database = sqlite3.connect(path)
    columns = [row[1] for row in database.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)")]
    process, gemm = database.execute("SELECT globalPid, shortName FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    nccl = export.string("ncclDevKernel_AllReduce")
    row = dict.fromkeys(columns, 1) | {"deviceId": 0, "globalPid": process, "correlationId": 10**6}
    fixed = [row[c] for c in columns]
    where = {c: columns.index(c) for c in ("start", "end", "shortName")}

    def rows():
        for i in range(number):
            fixed[where["start"]] = 2_000_000_000 + i * 12_000
            fixed[where["end"]] = fixed[where["start"]] + 9_000
            fixed[where["shortName"]] = nccl if i % 10 == 0 else gemm
            yield tuple(fixed)

    database.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * len(columns))})", rows())
    database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME")
    database.commit()
    database.close()
    return path


def test_a_large_table_is_read_by_several_processes_with_the_same_result(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollpacker.profiling.bubble_report import intervals, nsys_work

    path = write_many_kernels(tmp_path / "a.sqlite", 20_000)
    documents = []
    for rows_per_worker, is_pure in ((10**9, False), (5_000, False), (10**9, True), (5_000, True)):
        monkeypatch.setattr(nsys_work, "_ROWS_PER_WORKER", rows_per_worker)
        monkeypatch.setattr(nsys_work, "_num_cpus", lambda: 3)
        if is_pure:
            for module in (nsys_work, intervals):
                monkeypatch.setattr(module, "numpy_or_none", lambda: None)
        assert run(capsys, path, "--json", tmp_path / "o.json")[0] == 0
        documents.append(json.loads((tmp_path / "o.json").read_text()))
    assert documents[0] == documents[1] == documents[2] == documents[3]
    gpu = documents[0]["gpus"][0]
    assert gpu["comm_s"] == pytest.approx(0.1 + 2_000 * 9e-6) and gpu["compute_s"] == pytest.approx(0.6 + 18_000 * 9e-6)


def test_reading_costs_little_more_than_a_bare_select(tmp_path: Path) -> None:
    """CPU time of reading and merging 400,000 kernels against the stream of the same columns (docs/status.md has 3 M)."""
    from rollpacker.profiling.bubble_report.nsys_file import NsysFile
    from rollpacker.profiling.bubble_report.nsys_work import read_work

    pytest.importorskip("numpy")
    path = write_many_kernels(tmp_path / "a.sqlite", 400_000)

    def bare() -> None:
        with sqlite3.connect(path) as database:
            for _ in database.execute(
                "SELECT start, end, deviceId, globalPid, shortName FROM CUPTI_ACTIVITY_KIND_KERNEL"
            ):
                pass

    def ours() -> None:
        (work,) = read_work(NsysFile(path)).values()
        assert len(work.compute) > 350_000

    def cpu_seconds(function) -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    ours()  # numpy is loaded once
    ratio = min(cpu_seconds(ours) for _ in range(4)) / min(cpu_seconds(bare) for _ in range(4))
    assert ratio < 1.6, f"{ratio:.2f} x a bare SELECT"


def test_the_command_runs_alone_without_numpy_or_an_installation(tmp_path: Path) -> None:
    trace = simple_export(tmp_path / "a.sqlite").write()
    done = subprocess.run(
        [sys.executable, "-S", "-E", TOOL, trace], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0 and "40.0 %" in done.stdout, done.stderr
    shown = subprocess.run(
        [sys.executable, "-S", TOOL, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    for option in (
        "--compare",
        "--json",
        "--csv",
        "--svg",
        "--html",
        "--window",
        "--node",
        "--offset",
        "--align",
        "--stages",
    ):
        assert option in shown.stdout
    assert re.search(r"TRACE \[TRACE \.\.\.\]", shown.stdout)
