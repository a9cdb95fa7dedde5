from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from rollpacker.runtime.console import ProgressDisplay, _duration

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def visible(stream: io.StringIO) -> str:
    # Everything that was ever shown; what overwrote the panel starts on a new line.
    return CONTROL.sub("", stream.getvalue().replace("\r", "\n"))


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def row(step: int, reward: float | None) -> dict:
    return {
        "training/global_step": step,
        "critic/rewards/mean": reward,
        "response_length/p50": 8.0,
        "response_length/p95": 31.4,
        "response_length/max": 1112,
        "perf/total_num_tokens": 8000,
        "perf/time_per_step": 1.9,
        "timing_s/step": 1.9,
    }


def build(total: int | None = 60, *, is_terminal: bool, width: int | None = 80) -> tuple:
    stream, clock = io.StringIO(), FakeClock()
    return ProgressDisplay(total, is_terminal=is_terminal, width=width, stream=stream, clock=clock), stream, clock


def test_plain_display_is_one_line_per_step_without_control_codes() -> None:
    display, stream, clock = build(is_terminal=False)
    display.start()
    for step in range(1, 13):
        display.stage(step, "gen")
        display.progress(3, 8, 100)
        clock.now += 2.0
        display.stage(step, "update_actor")
        display.step_done(row(step, step / 100))
    display.note("a note")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 13 and lines[-1] == "a note"
    assert lines[11] == "step  12/60  reward 0.12 (mean10 0.07)  len 8/31/1112  4,211 tok/s  1.9 s  ETA 1m36s"
    assert not CONTROL.search(stream.getvalue()) and stream.getvalue().isascii()


def test_missing_numbers_are_dashes_and_do_not_enter_the_mean() -> None:
    display, stream, _ = build(None, is_terminal=False)
    display.step_done(row(1, 0.5))
    display.step_done({"training/global_step": 2, "critic/rewards/mean": float("nan")})
    first, second = stream.getvalue().splitlines()
    assert first == "step   1  reward 0.50 (mean10 0.50)  len 8/31/1112  4,211 tok/s  1.9 s"
    assert second == "step   2  reward - (mean10 0.50)  len -/-/-  - tok/s  - s"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_closing_summary_compares_the_ends_and_names_the_paths_whole(is_terminal: bool) -> None:
    display, stream, _ = build(is_terminal=is_terminal, width=40)
    display.start()
    for step in range(1, 31):
        display.step_done(row(step, 0.1 if step <= 10 else 0.2 if step <= 20 else 0.9))
    path = "/a/very/long/path" * 6
    display.finish({"metrics": path, "steps": "30 in 5 s"})
    text = visible(stream)
    assert re.search(r"reward, first 10 -> last 10 steps +0\.10 -> 0\.90\n", text)
    assert re.search(rf"metrics +{path}\n", text)
    assert re.search(r"steps +30 in 5 s\n", text)


def test_short_run_compares_halves() -> None:
    display, stream, _ = build(is_terminal=False)
    for step, reward in enumerate([0.0, 0.2, 0.4, 0.8, 1.0], start=1):
        display.step_done(row(step, reward))
    display.finish({})
    assert re.search(r"first 2 -> last 2 steps +0\.10 -> 0\.90", stream.getvalue())


def test_terminal_shows_panel_lines_and_gives_the_terminal_back() -> None:
    display, stream, clock = build(is_terminal=True)
    display.note("before the start")
    display.start()
    display.stage(13, "gen")
    clock.now += 2.0
    display.progress(412, 1024, 38_000)
    panel = visible(stream)
    assert "step  13/60" in panel and "gen  412/1,024 responses  38,000 tok  19,000 tok/s" in panel
    clock.now += 1.0
    display.step_done(row(13, 0.5))
    drawn_with_its_line = visible(stream).rstrip().splitlines()[-2]
    assert drawn_with_its_line.startswith("\u2502 reward 0.50 (mean10 0.50)")
    display.note("[bold]not markup[/bold] \x1b[31m")
    display.stop()
    display.stop()
    text = visible(stream)
    assert text.index("before the start") < text.index("step  13/60")
    line = "step  13/60  reward 0.50 (mean10 0.50)  len 8/31/1112  4,211 tok/s  1.9 s"
    assert sum(shown.rstrip() == line for shown in text.splitlines()) == 1
    assert "[bold]not markup[/bold] ?[31m" in text
    # The cursor is visible also while the panel is: a killed job must not leave the terminal without one.
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
    assert stream.getvalue().index("\x1b[?25h") < stream.getvalue().index("gen")


def validated(step: int, *core: tuple[str, float], prompts: int = 64) -> dict:
    values = {f"val-core/{name}": value for name, value in core}
    return {"step": step, **values, "num_prompts": prompts, "timing_s/testing": 2.13}


def test_a_validation_is_one_line() -> None:
    display, stream, _ = build(is_terminal=False)
    display.validation_done(validated(0, *((f"default/{m}@1", 0.5) for m in ("avg", "maj", "pass"))))
    sampled = [("avg@4", 0.25), ("maj@4", 0.5), ("pass@1", 0.25), ("pass@2", 0.6), ("pass@4", 0.75)]
    display.validation_done(validated(20, *((f"maths/{name}", value) for name, value in sampled), prompts=1234))
    mixed = [(f"{domain}/{name}", value) for domain in ("code", "maths", "all") for name, value in sampled]
    display.validation_done(validated(60, *mixed))
    assert stream.getvalue().splitlines() == [
        "val    0/60  avg@1 0.50  64 prompts  2.1 s",
        "val   20/60  avg@4 0.25  maj@4 0.50  pass@4 0.75  1,234 prompts  2.1 s",
        "val   60/60  avg@4 0.25 (code 0.25, maths 0.25)  maj@4 0.50  pass@4 0.75  64 prompts  2.1 s",
    ]


def test_the_panel_follows_a_validation_and_the_first_step_does_not_pay_for_one() -> None:
    display, stream, clock = build(10, is_terminal=True)
    display.start()
    display.stage(0, "testing")
    clock.now += 100.0
    display.progress(3, 64, 500)
    assert "testing  3/64 responses  500 tok  5 tok/s" in visible(stream)
    display.validation_done(validated(0, *((f"default/{m}@1", 0.5) for m in ("avg", "maj", "pass"))))
    display.stage(1, "gen")
    clock.now += 1.0
    display.progress(8, 8, 80)
    display.stage(1, "testing")
    clock.now += 1.0
    shown = len(visible(stream))
    display.progress(1, 64, 10)
    assert "testing  1/64 responses  10 tok  10 tok/s" in visible(stream)[shown:]
    display.step_done(row(1, 0.5))
    assert "ETA 18s" in visible(stream)  # nine steps of two seconds
    display.stop()


def test_terminal_lines_stay_one_line_on_a_narrow_terminal() -> None:
    display, stream, _ = build(is_terminal=True, width=30)
    with display:
        display.step_done(row(1, 0.5))
    lines = visible(stream).splitlines()
    assert "step   1/60  reward 0.50 (mean" in lines
    assert max(map(len, lines)) == 30


def refreshes(stream: io.StringIO) -> int:
    return stream.getvalue().count("\u256d")  # the panel's corner


def test_at_most_four_redraws_a_second_however_many_calls() -> None:
    display, stream, clock = build(is_terminal=True)
    display.start()
    before = refreshes(stream)
    for tick in range(1000):  # ten seconds
        clock.now += 0.01
        display.stage(tick // 100, ("gen", "exchange", "update_actor")[tick % 3])
        display.progress(tick, 1000, tick)
        if tick % 20 == 0:
            display.step_done(row(tick, 0.0))
    assert refreshes(stream) - before <= 4 * 10
    display.stop()
    assert visible(stream).count("len 8/31/1112  4,211 tok/s  1.9 s") == 50


def test_a_new_stage_does_not_wait_behind_progress() -> None:
    display, stream, clock = build(is_terminal=True)
    display.start()
    display.stage(1, "gen")
    for _ in range(300):
        clock.now += 0.01
        display.progress(1, 2, 3)
    display.stage(1, "exchange")
    display.stage(1, "update_actor")
    assert "update_actor" in stream.getvalue()
    display.stop()


def test_ascii_streams_get_no_character_they_cannot_encode() -> None:
    for is_terminal in (False, True):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="ascii")
        with ProgressDisplay(3, is_terminal=is_terminal, width=80, stream=stream) as display:
            display.note("caf\u00e9")
            display.step_done(row(1, 0.5))
        stream.flush()
        assert b"caf?" in raw.getvalue()


def test_duration() -> None:
    seconds = [0.4, 59.6, 92, 3600, 7505, 273_600, None]
    assert [_duration(s) for s in seconds] == ["0s", "1m00s", "1m32s", "1h00m", "2h05m", "3d04h", "-"]


def test_ranks_without_a_display_do_not_import_rich() -> None:
    code = "import sys, rollpacker.runtime.console; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
