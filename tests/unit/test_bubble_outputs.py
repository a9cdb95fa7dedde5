"""What the outputs say and draw, for reports whose truth is known: the three sentences, the comparison, the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from bubble_reports import make_report
from nsys_exports import Export

from rollpacker.profiling.bubble_report.compare import compare_text
from rollpacker.profiling.bubble_report.conclusions import conclusions
from rollpacker.profiling.bubble_report.model import CAUSES
from rollpacker.profiling.bubble_report.picture import COLOURS, svg_picture
from rollpacker.profiling.bubble_report.tables import json_report

SVG = "{http://www.w3.org/2000/svg}"


def export_of(path: Path, *kernels: tuple, ranges: tuple = (), **options) -> Export:
    """One GPU; kernels are (start, end) or (start, end, name), ranges (start, end, name)."""
    export = Export(path, **options)
    export.process(10, {0: 0})
    for start, end, *name in kernels:
        export.kernel(10, start, end, **dict(zip(("name",), name, strict=False)))
    for start, end, name in ranges:
        export.range(10, start, end, name)
    return export


@pytest.mark.parametrize(
    ("kernels", "ranges", "where", "what"),
    [
        (
            [(0.0, 0.2), (0.2, 0.9, "ncclAllReduce"), (0.95, 1.0)],
            [(0.0, 1.0, "gen")],
            "100.0 % of the idle time lies in gen, most of it between operations or without any (100.0 %).",
            "Most of the loss hides in communication (700 ms of GPU time): GPUs that wait inside collectives",
        ),
        (
            [(0.3, 0.5), (0.6, 1.0)],
            [(0.0, 0.5, "gen"), (0.5, 1.0, "update_actor")],
            "75.0 % of the idle time lies in gen, most of it before a GPU's first operation (100.0 %).",
            "Act first on a late start:",
        ),
        (
            [(0.0, 0.2), (0.55, 1.0)],
            [(0.0, 0.5, "gen"), (0.5, 1.0, "update_actor")],
            "85.7 % of the idle time lies in gen, most of it after a GPU's last operation (100.0 %).",
            "Act first on the long tail:",
        ),
        (
            [(0.0, 0.2), (0.8, 1.0)],
            [(0.0, 0.2, "gen"), (0.8, 1.0, "update_actor")],
            "100.0 % of the idle time lies outside all stages.",
            "Act first on time between the stages:",
        ),
        (
            [(0.0, 1.0)],
            [(0.0, 1.0, "gen")],
            "There is no idle time to explain.",
            "Look at the time per operation next.",
        ),
        (
            [(i * 1e-4, i * 1e-4 + 4e-5) for i in range(100)],
            [],
            "The ranges in the files name no stage (name them with --stages REGEX=NAME); 0 gaps of 1 ms or more hold 0.0 %",
            "All gaps are shorter than 0.1 ms",
        ),
    ],
    ids=["communication", "leading", "tail", "between", "nothing idle", "short gaps"],
)
def test_where_the_time_went_and_what_to_do(kernels: list, ranges: list, where: str, what: str, tmp_path: Path) -> None:
    _, second, third = conclusions(make_report(export_of(tmp_path / "a.sqlite", *kernels, ranges=ranges).write()))
    assert second.startswith(where) and third.startswith(what)


def test_the_cause_of_most_idle_time_comes_first(tmp_path: Path) -> None:
    export = export_of(tmp_path / "a.sqlite", (0.0, 0.1), (0.4, 0.5), (0.6, 1.0))
    export.call(10, 0.1, 0.39, "cudaStreamSynchronize_v3020")  # 0.3 s of 0.4; the other gap is the host's own
    first, second, third = conclusions(make_report(export.write()))
    assert first.startswith("1 GPU was idle for 40.0 % of the time (400 ms of 1 s GPU time; compute 60.0 %")
    assert "2 gaps of 1 ms or more hold 100.0 % of the idle time, and the largest is 300 ms" in second
    assert third.startswith("Act first on blocking CUDA calls") and "(behind 75% of the 2 largest gaps)" in third


def test_the_last_gpu_is_named(tmp_path: Path) -> None:
    paths = []
    for rank, stop in enumerate((0.25, 1.0)):
        export = export_of(tmp_path / f"{rank}.sqlite", (0.0, stop), ranges=((0.0, stop, "gen"),), gpus=("u0", "u1"))
        export.rows["TARGET_INFO_CUDA_DEVICE"][0]["gpuId"] = rank
        paths.append(export.write())
    first, second, third = conclusions(make_report(*paths))
    assert first.endswith("; the idlest is node0/0 with 75.0 %.")
    assert second.endswith("; in gen node0/1 was last, and the others waited 750 ms of GPU time for it.")
    assert third.startswith("Act first on the long tail:")


def test_a_comparison_warns_of_untrusted_reports_and_other_numbers_of_steps(tmp_path: Path) -> None:
    one = export_of(tmp_path / "a.sqlite", (0.0, 0.5), (0.9, 1.0), ranges=((0.0, 1.0, "step 1"),))
    two = export_of(tmp_path / "b.sqlite", (0.0, 0.5), (0.7, 1.0), ranges=((0.0, 0.5, "step 1"), (0.5, 1.0, "step 2")))
    two.diagnostic("Not all CUDA events might have been collected.")
    before, after = make_report(one.write()), make_report(two.write())
    sentence = compare_text(before, after).splitlines()[0]
    assert sentence == (
        "Compared: the bubble fell by 20.0 points, from 40.0 % to 20.0 %. One of the two is untrusted, so read this with "
        "care. The traces hold 1 and 2 steps: compare shares, not seconds."
    )
    assert compare_text(before, before).splitlines()[0] == "Compared: the bubble did not change, it is 40.0 %."
    slight = make_report(export_of(tmp_path / "c.sqlite", (0.0, 0.501), (0.9, 1.0)).write())
    assert "the bubble fell by 0.1 points, from 40.0 % to 39.9 %" in compare_text(before, slight)


def test_the_docs_name_every_cause_and_every_key_of_the_json(tmp_path: Path) -> None:
    docs = (Path(__file__).resolve().parents[2] / "docs" / "profiling.md").read_text(encoding="utf-8")
    words, keys = docs.split("## To read it")[1].split("## Stages")[0], docs.split("## JSON")[1]
    assert [cause for cause in CAUSES if f"`{cause}`" not in words] == []
    document = json_report(
        make_report(export_of(tmp_path / "a.sqlite", (0.0, 1.0), ranges=((0, 1, "step 1"),)).write())
    )
    rows = {key for name in ("gpus", "stages", "steps") for key in document[name][0]}
    assert [key for key in sorted({*document, *rows}) if not re.search(rf"\b{key}\b", keys)] == []


def drawn(picture: str, tag: str, **attributes: str) -> list[dict[str, str]]:
    """The elements of a picture with this tag and these attributes."""
    elements = ElementTree.fromstring(picture).iter(SVG + tag)
    return [e.attrib for e in elements if attributes.items() <= e.attrib.items()]


def test_lanes_and_bars_are_as_long_as_what_they_show(tmp_path: Path) -> None:
    """0.9 s, so that a bin is a millisecond: compute for 0.5 s, NCCL alone for 0.1 s, idle for 0.1 s, compute for 0.2 s."""
    kernels = (0.0, 0.5), (0.5, 0.6, "ncclAllReduce"), (0.7, 0.9)
    picture = svg_picture(make_report(export_of(tmp_path / "a.sqlite", *kernels, ranges=((0, 0.9, "gen"),)).write()))
    (lane,) = drawn(picture, "rect", fill="url(#missing)", height="22")
    left, width = float(lane["x"]), float(lane["width"])

    def steps(kind: str) -> list[float]:
        """The moments at which a kind's part of the lane starts and ends, in seconds."""
        (path,) = drawn(picture, "path", fill=COLOURS[kind])
        return [0.9 * (float(x) - left) / width for x in re.findall(r"[MH]([\d.]+)", path["d"])]

    assert steps("compute") == pytest.approx([0.0, 0.5, 0.7, 0.9], abs=1e-3)
    assert steps("comm") == pytest.approx([0.0, 0.6, 0.7, 0.9], abs=1e-3)  # what compute leaves of it is seen
    for kind, seconds in (("compute", 0.7), ("comm", 0.1), ("idle", 0.1)):
        bars = drawn(picture, "rect", fill=COLOURS[kind], height="18")
        assert [float(bar["width"]) for bar in bars] == pytest.approx([width * seconds / 0.9] * 2, abs=0.1)  # all, gen
    assert not drawn(picture, "rect", fill=COLOURS["copy"], height="18")
    assert "cut out here" not in picture


def test_time_without_a_capture_is_cut_out_of_the_picture(tmp_path: Path) -> None:
    paths = []
    for number in range(3):
        export = export_of(tmp_path / f"{number}.sqlite", (0.0, 1.0))
        export.utc_ns += number * 7_200 * 10**9
        export.system_ns += number * 7_200 * 10**9
        paths.append(export.write())
    assert svg_picture(make_report(*paths)).count("time without any capture is cut out here") == 2
