"""torch.profiler around a step leaves a trace that tools/profile_bubbles.py understands."""

from __future__ import annotations

from pathlib import Path

import torch

from rollpacker.profiling.bubble_report.inputs import read_sources
from rollpacker.profiling.bubble_report.stage_names import StageNamer
from rollpacker.profiling.capture import build_capture
from rollpacker.profiling.nvtx import StageTimer


def test_a_trace_a_step_with_its_ranges(tmp_path: Path) -> None:
    timer = StageTimer(3, lambda: 0.0, capture=build_capture("torch", [2, 3], [3], 3, tmp_path / "torch_profile"))
    for step in (1, 2, 3, 4):
        timer.begin_step(step)
        with timer.stage("update_actor"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        timer.take()
    sources = read_sources([str(tmp_path)], StageNamer())
    assert [source.kind for source in sources] == ["torch.profiler"] * 2
    for step, source in zip((2, 3), sources, strict=True):
        assert sorted(r.name for r in source.ranges) == [f"rollpacker/step_{step}", "rollpacker/update_actor"]
        assert source.host and not source.work  # no GPU here
