"""What the user sees of a run, on rank 0: a live panel on a terminal, one plain line per step elsewhere.

The caller says whether the stream is a terminal and how wide it is: under mpirun stdout is a pseudo terminal or a pipe
of the launcher, so nothing that could be detected here would be true. Nothing runs in the background, because the cores
are busy: the panel is redrawn from within the calls, at most four times a second (1 to 2 ms each).
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rollpacker.profiling.nvtx import GEN, TESTING
from rollpacker.runtime.metrics import STEP_KEY, Metric

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_WINDOW = 10
"""Steps of the moving mean, of the time left, and of the comparison at the end."""
_DECODING = (GEN, TESTING)
_REFRESHES_PER_S = 4
_MAX_DOMAINS = 4
"""Of validation prompts that are named in its line."""
_PROGRESS_EVERY_S = 0.5
"""Progress takes half of the refreshes, so that a new stage never has to wait for its turn."""
_DEFAULT_WIDTH = 80
_HEIGHT = 25
"""rich would ask the terminal for its height; the panel needs five lines of it."""


@dataclass
class _Status:
    """What is known now; the panel is drawn from it."""

    total_steps: int | None
    num_steps_done: int = 0
    step: int = 0
    stage: str = "starting"
    num_finished: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    rollout_started_s: float | None = None
    last: Mapping[str, Metric] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def mean_reward(self) -> float | None:
        return _mean(self.rewards[-_WINDOW:])

    def eta_s(self) -> float | None:
        pace_s = _mean(list(self.step_seconds))
        if pace_s is None or self.total_steps is None:
            return None
        return pace_s * max(self.total_steps - self.num_steps_done, 0)


class _Output(Protocol):
    """Where the display goes. `note` and `step_line` may hold text back until the next `refresh`."""

    def start(self, status: _Status) -> None: ...

    def note(self, text: str) -> None: ...

    def step_line(self, status: _Status) -> None: ...

    def refresh(self, status: _Status, now_s: float) -> None: ...

    def table(self, rows: Mapping[str, str]) -> None: ...

    def stop(self) -> None: ...


class ProgressDisplay:
    """The display of a run of `total_steps` steps (None: as many as the data give). Used by one thread of rank 0.

    `width` is in columns. `clock` returns seconds and serves the pace of the steps and of the redraws. `stop` must be
    called where `finish` is not, or the panel stays on the screen: use it as a context manager.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        is_terminal: bool,
        width: int | None,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status = _Status(total_steps)
        self._clock = clock
        self._output: _Output = _LivePanel(stream, width or _DEFAULT_WIDTH) if is_terminal else _PlainLines(stream)
        self._refreshed_s: deque[float] = deque(maxlen=_REFRESHES_PER_S)
        self._step_began_s: float | None = None

    def __enter__(self) -> ProgressDisplay:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Show the panel."""
        self._output.start(self._status)

    def stage(self, step: int, name: str) -> None:
        """Step `step` is now in stage `name`. Cheap; may be called often."""
        status = self._status
        is_new = (step, name) != (status.step, status.stage)
        if step != status.step or (is_new and name in _DECODING):
            status.num_finished = status.num_requests = status.num_tokens = 0
            status.rollout_started_s = self._clock() if name in _DECODING else None
        status.step, status.stage = step, name
        if self._step_began_s is None:
            self._step_began_s = self._clock()  # the first step: what came before it was loading
        self._refresh(_PROGRESS_EVERY_S if not is_new else 0.0)

    def progress(self, num_finished: int, num_requests: int, num_tokens: int) -> None:
        """The rollout so far: responses finished, responses asked for, tokens generated. Cheap; may be called often."""
        status = self._status
        status.num_finished, status.num_requests, status.num_tokens = num_finished, num_requests, num_tokens
        self._refresh(_PROGRESS_EVERY_S)

    def step_done(self, metrics: Mapping[str, Metric]) -> None:
        """A step is over: its line is printed. `metrics` is the row of metrics.jsonl."""
        status, now_s = self._status, self._clock()
        if self._step_began_s is not None:
            status.step_seconds.append(now_s - self._step_began_s)
        self._step_began_s = now_s
        status.last = metrics
        status.step = int(metrics.get(STEP_KEY) or status.step)
        status.num_steps_done = status.step
        reward = _number(metrics, "critic/rewards/mean")
        if reward is not None:
            status.rewards.append(reward)
        self._output.step_line(status)
        self._refresh(0.0)

    def validation_done(self, row: Mapping[str, Any]) -> None:
        """A validation is over: its line is printed. `row` is that of validation.jsonl."""
        if self._status.step == 0:
            self._step_began_s = None  # before the first step: it counts as loading
        self.note(_validation_line(row, self._status.total_steps))

    def note(self, text: str) -> None:
        """Print a line of text above the panel."""
        self._output.note(text)
        self._refresh(0.0)

    def finish(self, summary: Mapping[str, str]) -> None:
        """Take the panel away and print what was reached and where it lies: `summary` maps a name to a path."""
        rows = {"steps": str(self._status.num_steps_done)}
        rewards = self._status.rewards
        if rewards:
            # Fewer than twice the window: halves, so that no step is on both sides of the arrow.
            span = min(_WINDOW, max(len(rewards) // 2, 1))
            label = f"reward, first {span} -> last {span} steps" if span > 1 else "reward, first -> last step"
            rows[label] = f"{_decimal(_mean(rewards[:span]))} -> {_decimal(_mean(rewards[-span:]))}"
        self._output.stop()
        self._output.table({**rows, **summary})

    def stop(self) -> None:
        """Take the panel away and give the terminal back; allowed at any time, more than once."""
        self._output.stop()

    def _refresh(self, gap_s: float) -> None:
        """Redraw, unless the last redraw is less than `gap_s` old or there were four within the last second."""
        now_s, recent = self._clock(), self._refreshed_s
        if recent and (now_s - recent[-1] < gap_s or (len(recent) == recent.maxlen and now_s - recent[0] < 1.0)):
            return
        recent.append(now_s)
        self._output.refresh(self._status, now_s)


class _PlainLines:
    """Lines of text without control codes: a log file, a pipe, a batch job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, status: _Status) -> None:
        """Nothing: a log starts with its first line."""

    def note(self, text: str) -> None:
        self._stream.write(_printable(text, self._stream) + "\n")
        self._stream.flush()

    def step_line(self, status: _Status) -> None:
        eta = f"  ETA {_duration(status.eta_s())}" if status.total_steps is not None else ""
        self.note(_step_line(status) + eta)

    def refresh(self, status: _Status, now_s: float) -> None:
        """Nothing: a log has no place that could change."""

    def table(self, rows: Mapping[str, str]) -> None:
        for name, value in _aligned(rows).items():
            self.note(name + value)

    def stop(self) -> None:
        """Nothing is held back."""


class _LivePanel:
    """A panel that stays at the bottom of the terminal while lines scroll away above it."""

    def __init__(self, stream: TextIO, width: int) -> None:
        # Imported here: the other ranks and batch jobs need no rich.
        from rich.console import Console
        from rich.live import Live

        self._stream = stream
        self._console = Console(
            file=stream, force_terminal=True, width=width, height=_HEIGHT, markup=False, emoji=False, highlight=False
        )
        # A stray print() appears above the panel instead of tearing it. Not so stderr: a user who sends it to a file
        # wants it there, and not in the panel's stream.
        self._live = Live(
            self,  # whatever makes rich draw, a refresh or a printed line, draws what is known then
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=False,
        )
        self._lines: list[Text] = []
        self._status, self._now_s = _Status(None), 0.0

    def __rich__(self) -> RenderableType:
        return _panel(self._status, self._now_s)

    def start(self, status: _Status) -> None:
        self._status = status
        self._live.start()
        # rich hides the cursor, and only a regular end would bring it back; a job can also be killed.
        self._console.show_cursor(True)
        self._live.refresh()

    def note(self, text: str) -> None:
        from rich.text import Text

        self._lines.append(Text(_printable(text, self._stream), overflow="fold"))

    def step_line(self, status: _Status) -> None:
        from rich.text import Text

        # One line whatever the width; the panel shows the time left.
        self._lines.append(Text(_step_line(status), no_wrap=True, overflow="crop"))

    def refresh(self, status: _Status, now_s: float) -> None:
        self._status, self._now_s = status, now_s
        if self._lines:
            self._print_lines()  # all at once, because each print draws the panel too
        else:
            self._live.refresh()

    def table(self, rows: Mapping[str, str]) -> None:
        from rich.text import Text

        for name, value in _aligned(rows).items():
            row = Text(_printable(name, self._stream), "bold").append(_printable(value, self._stream), "not bold")
            self._console.print(row, soft_wrap=True)  # the terminal wraps a long path and still copies it whole

    def stop(self) -> None:
        self._print_lines()
        self._live.stop()

    def _print_lines(self) -> None:
        from rich.console import Group

        if self._lines:
            self._console.print(Group(*self._lines))
            self._lines.clear()


def _panel(status: _Status, now_s: float) -> RenderableType:
    """The panel: the steps done and the stage, the rollout if there is one, the numbers of the last step."""
    from rich.box import ROUNDED
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    top = Table.grid(padding=(0, 1), expand=True)
    top.add_column(no_wrap=True)
    top.add_column(ratio=1)
    top.add_column(no_wrap=True, justify="right")
    total = status.total_steps
    bar: RenderableType = ProgressBar(total=total, completed=status.num_steps_done) if total else Text("")
    top.add_row(Text(f"step {_of_total(status.step, total)}", "bold"), bar, Text(f"ETA {_duration(status.eta_s())}"))
    stage = Text(status.stage, "cyan", no_wrap=True, overflow="crop")
    stage.append(_rollout_text(status, now_s), "default")
    last = Text(_numbers(status) if status.last else "no step finished yet", no_wrap=True, overflow="crop")
    return Panel(Group(top, stage, last), box=ROUNDED, border_style="dim", padding=(0, 1))


def _rollout_text(status: _Status, now_s: float) -> str:
    if not status.num_requests:
        return ""
    text = f"  {status.num_finished:,}/{status.num_requests:,} responses  {status.num_tokens:,} tok"
    if status.stage in _DECODING and status.rollout_started_s is not None:
        seconds = now_s - status.rollout_started_s
        if seconds > 0:
            text += f"  {status.num_tokens / seconds:,.0f} tok/s"
    return text


def _aligned(rows: Mapping[str, str]) -> dict[str, str]:
    """The names as a column: padded to the longest."""
    width = max(len(name) for name in rows)
    return {f"  {name:<{width}}  ": value for name, value in rows.items()}


def _step_line(status: _Status) -> str:
    """`step  12/60  reward 0.61 (mean10 0.58)  len 8/31/112  4,210 tok/s  1.9 s`."""
    seconds = _number(status.last, "timing_s/step")
    took = "- s" if seconds is None else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"step {_of_total(status.step, status.total_steps)}  {_numbers(status)}  {took}"


def _validation_line(row: Mapping[str, Any], total: int | None) -> str:
    """`val   20/60  avg@4 0.61 (code 0.50, maths 0.72)  maj@4 0.70  pass@4 0.83  64 prompts  2.1 s`.

    Over all prompts, and the mean score of each domain where there are a few; of single responses avg@1 says it all.
    """
    by_metric: dict[str, dict[str, float]] = {}
    for name, value in row.items():
        if name.startswith("val-core/"):
            domain, _, metric = name.removeprefix("val-core/").rpartition("/")
            by_metric.setdefault(metric, {})[domain] = value
    n = max(int(metric.partition("@")[2]) for metric in by_metric)
    parts = [f"{m}@{n} {_decimal(list(by_metric[f'{m}@{n}'].values())[-1])}" for m in ("avg", "maj", "pass")]
    domains = list(by_metric[f"avg@{n}"].items())[:-1]  # the last is over all prompts
    if 0 < len(domains) <= _MAX_DOMAINS:
        parts[0] += f" ({', '.join(f'{domain} {_decimal(value)}' for domain, value in domains)})"
    size = f"{row['num_prompts']:,} prompts  {row['timing_s/testing']:.1f} s"
    return f"val  {_of_total(row['step'], total)}  {'  '.join(parts[: 1 if n == 1 else 3])}  {size}"


def _numbers(status: _Status) -> str:
    """Reward, response lengths (p50/p95/max, tokens) and the whole job's tokens per second of the last step."""
    row = status.last
    lengths = "/".join(_whole(_number(row, f"response_length/{name}"), "") for name in ("p50", "p95", "max"))
    tokens, seconds = _number(row, "perf/total_num_tokens"), _number(row, "perf/time_per_step")
    pace = tokens / seconds if tokens is not None and seconds else None
    reward, mean = _decimal(_number(row, "critic/rewards/mean")), _decimal(status.mean_reward())
    return f"reward {reward} (mean{_WINDOW} {mean})  len {lengths}  {_whole(pace)} tok/s"


def _of_total(step: int, total: int | None) -> str:
    return f"{step:>3}" if total is None else f"{step:>{max(3, len(str(total)))}}/{total}"


def _number(row: Mapping[str, Metric], name: str) -> float | None:
    value = row.get(name)
    return float(value) if value is not None and math.isfinite(value) else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _whole(value: float | None, separator: str = ",") -> str:
    return "-" if value is None else f"{value:{separator}.0f}"


def _duration(seconds: float | None) -> str:
    """45s, 1m32s, 2h05m, 3d04h."""
    if seconds is None:
        return "-"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{hours}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


def _printable(text: str, stream: TextIO) -> str:
    """The text without control codes, in what the stream can encode.

    A note may quote what a model wrote; it must neither steer the terminal nor end a run whose log is ASCII.
    """
    visible = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return visible.encode(encoding, "replace").decode(encoding)
