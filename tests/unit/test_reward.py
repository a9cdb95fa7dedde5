import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rollpacker.config import ConfigError
from rollpacker.reward import math_verifier
from rollpacker.reward.scheduler import RewardScheduler
from rollpacker.reward.verifier import load_verifier

FUNCTIONS = """import ctypes, os, subprocess, sys, time
from pathlib import Path
HEAVY = {"torch", "vllm", "mpi4py", "numpy", "megatron", "transformers", "sympy", "pytest"}
def misbehave(response, *, prompt, ground_truth, finish_reason, **extra):
    what, _, argument = response.partition(":")
    if what == "raise": raise KeyError("no such thing")
    while what == "hang": pass
    if what == "exit": os._exit(7)
    if what == "sys.exit": sys.exit("enough")
    if what == "segfault": ctypes.string_at(0)
    if what == "sleep": time.sleep(float(argument))
    if what == "child":
        child = subprocess.Popen(["sleep", "60"])
        Path(argument).write_text(str(child.pid))
        child.wait()
    if what == "facts":
        facts = (prompt, ground_truth, finish_reason, extra)
        return float(facts == ("P", "G", "length", {"domain": "D", "prompt_id": "q0"}))
    if what == "light": return float(not HEAVY & set(sys.modules))
    if what == "length": return len(argument)
    if what == "pid": return os.getpid()
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "true": True}.get(what, 1)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def scheduler(functions):
    scheduler = RewardScheduler("exact", f"{functions}:misbehave", 2)
    scheduler.start()
    yield scheduler
    scheduler.close()


def submit(scheduler, index, response, timeout_s=30.0, ground_truth="G"):
    facts = {"prompt": "P", "ground_truth": ground_truth, "finish_reason": "length", "domain": "D"}
    scheduler.submit(index, response=response, prompt_id=f"q{index}", timeout_s=timeout_s, **facts)


def only(scheduler, response, timeout_s=30.0):
    submit(scheduler, 0, response, timeout_s)
    (result,) = scheduler.wait()
    assert (result.request_index, scheduler.num_outstanding) == (0, 0)
    return result


def stat(pid):
    """State and parent of a process."""
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def is_running(pid):
    """Whether the process runs; one that its parent has not reaped yet is a zombie, and does not."""
    try:
        return stat(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, timeout_s=20.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.005)


# Verifiers


def test_built_in_verifiers():
    exact_match = load_verifier("exact", None).score
    assert exact_match(" 42\n", prompt="", ground_truth="42", finish_reason="stop") == 1.0
    assert exact_match("the answer is 42", prompt="", ground_truth="42", finish_reason="stop") == 0.0
    assert load_verifier("math", None).score is math_verifier.score
    with pytest.raises(ConfigError, match=r"reward\.verifier=judge: expected exact or math"):
        load_verifier("judge", None)


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        (r"so \boxed{42}", "42", 1),
        (r"first \boxed{1}, no: \boxed{42}, which is 7 more", "42", 1),
        (r"\boxed{42}, no: \boxed{1}", "42", 0),
        (r"\boxed{42} and then \boxed{43", "42", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{0.5}", r"\dfrac{1}{2}", 1),
        (r"\boxed{2\pi}", r"2\pi", 1),
        (r"\boxed{2}", r"2\pi", 0),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1),
        (r"\boxed{ (1, 2) }", "(1,2)", 1),
        (r"\boxed{\left\{1, 2\right\}}", r"\boxed{\{2, 1\}}", 1),
        (r"\boxed{$x^2 + 2x + 1$}", r"\((x+1)^2\)", 1),
        (r"\boxed{1{,}000}", "1000", 1),
        (r"\boxed{0.00001}", "1e-5", 1),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1),
        (r"\fbox{3}", "3", 1),
        (r"\boxed{\boxed{3}}", "3", 1),
        (r"{ { \boxed {\frac{1}{2}} } }", "0.5", 1),
        (r"\boxed{}", "3", 0),
        ("the answer is 42.", "42", 1),
        ("The result is $x = 5$.", "5", 1),
        ("3 then 4", "3", 0),
        ("", "42", 0),
        ("}{" * 100 + r"\boxed{", "42", 0),
    ],
)
def test_math_score(response, ground_truth, expected):
    score = math_verifier.score(response, prompt="", ground_truth=ground_truth, finish_reason="stop", domain="")
    assert score == float(expected)


def test_math_score_sets_no_alarm():
    # math-verify's own time limits are alarm signals, which Python refuses to set outside of the main thread.
    scores = []
    thread = threading.Thread(target=lambda: scores.append(math_verifier.score(r"\boxed{x+1}", ground_truth="1+x")))
    thread.start()
    thread.join()
    assert scores == [1.0]


# Loading a user's function


@pytest.mark.parametrize(
    ("content", "spec", "fragments"),
    [
        (None, "{file}:f", ["there is no file {file}"]),
        ("f = 1\n", "{file}", ["expected path.py:name"]),
        ("f = 1\n", "{file}:", ["expected path.py:name"]),
        ("def scores(response, **k): ...\n", "{file}:score", ["has no score", "Did you mean scores?"]),
        ("import os\n", "{file}:score", ["has no score", "no functions"]),
        ("f = 1\n", "{file}:f", ["f is a int, expected a function", "def f(response, *, prompt"]),
        (
            "def f(response): ...\n",
            "{file}:f",
            ["f(response) cannot be called", "'prompt'", "Write def f(response, *,"],
        ),
        ("def f(*, response, **k): ...\n", "{file}:f", ["cannot be called", "too many positional"]),
        ("def f(response, tokenizer, **k): ...\n", "{file}:f", ["missing a required argument: 'tokenizer'"]),
        ("async def f(response, **k): ...\n", "{file}:f", ["f is async"]),
        ("\n\nx = 1 / 0\n", "{file}:f", ["{file} line 3 raised ZeroDivisionError: division by zero"]),
        ("\nimport no_such_thing\n", "{file}:f", ["{file} line 2 raised ModuleNotFoundError", "no_such_thing"]),
        ("x = 1\ndef f(:\n", "{file}:f", ["{file} line 2 raised SyntaxError: invalid syntax"]),
        ("import sys\nsys.exit(3)\n", "{file}:f", ["{file} line 2 raised SystemExit: 3"]),
        ("raise ValueError('a\\nb')\n", "{file}:f", ["{file} line 1 raised ValueError: a b"]),
    ],
)
def test_bad_function_is_named_with_its_mistake(tmp_path, monkeypatch, content, spec, fragments):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "rewards.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_verifier("exact", spec.format(file=file))
    for fragment in ["reward.function=", *fragments]:
        assert fragment.format(file=file) in str(caught.value)


def test_function_by_relative_path_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("neighbour_of_rewards.py").write_text("SCORE = 0.25\n")
    Path("rewards.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_rewards import SCORE\n"
        "@dataclass\nclass Scorer:\n    x: 'float' = SCORE\n"
        "    def __call__(self, response, *, prompt, ground_truth, finish_reason, domain, prompt_id): return self.x\n"
        "f = Scorer()\n"
    )
    reward = load_verifier("math", "rewards.py:f").score
    assert reward("", prompt="", ground_truth="", finish_reason="stop", domain="", prompt_id="") == 0.25


# The scheduler


def test_facts_reach_a_light_worker_and_its_score_comes_back(scheduler):
    result = only(scheduler, "facts")
    assert (result.score, result.is_error, result.message) == (1.0, False, "")
    assert 0 <= result.execution_s < 1
    assert [repr(only(scheduler, response).score) for response in ("true", "one", "light")] == ["1.0"] * 3


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", "functions.py line 6 raised KeyError: 'no such thing'"),
        ("sys.exit", "functions.py line 9 raised SystemExit: enough"),
        ("nan", "returned nan, expected a finite number"),
        ("inf", "returned inf, expected a finite number"),
        ("text", "returned '1.0', expected a number"),
        ("none", "returned None, expected a number"),
        ("exit", "ended its process (exit code 7)"),
        ("segfault", "ended its process (signal 11, Segmentation fault)"),
    ],
)
def test_failure_costs_that_sample(scheduler, response, message):
    result = only(scheduler, response)
    assert (result.score, result.is_error) == (0.0, True)
    assert message in result.message
    assert result.message.startswith("prompt q0: ")
    assert only(scheduler, "one").score == 1.0


def test_timeout_kills_the_worker_and_what_it_started(scheduler, tmp_path):
    file = tmp_path / "pid"
    result = only(scheduler, f"child:{file}", timeout_s=0.6)
    assert (result.score, result.is_error) == (0.0, True)
    assert 0.6 <= result.execution_s < 10
    assert "stopped after" in result.message
    assert "its limit is 0.6 s" in result.message
    until(lambda: not is_running(int(file.read_text())))
    assert only(scheduler, "one").score == 1.0


def test_result_that_comes_late_is_late_even_if_nobody_polled(scheduler):
    submit(scheduler, 0, "sleep:0.05", timeout_s=0.01)
    time.sleep(0.3)
    (result,) = scheduler.wait()
    assert (result.score, result.is_error) == (0.0, True)
    assert "its limit is 0.01 s" in result.message


def test_time_in_the_queue_does_not_count(scheduler):
    for index in range(8):
        submit(scheduler, index, "sleep:0.3", timeout_s=1.0)
    assert [r.is_error for r in scheduler.wait()] == [False] * 8


def test_nothing_lost_or_doubled_among_failures(scheduler):
    kinds = ["one", "exit", "raise", "hang", "one", "segfault", "nan", "one"]
    for index in range(48):
        submit(scheduler, index, kinds[index % 8], timeout_s=0.05 if kinds[index % 8] == "hang" else 30.0)
    assert scheduler.num_outstanding == 48
    results = []
    while scheduler.num_outstanding:
        results += scheduler.poll()
        time.sleep(0.002)
    assert sorted(r.request_index for r in results) == list(range(48))
    for result in results:
        is_good = kinds[result.request_index % 8] == "one"
        assert (result.score, result.is_error) == (float(is_good), not is_good)
        assert is_good or f"prompt q{result.request_index}:" in result.message
    assert (scheduler.poll(), scheduler.wait()) == ([], [])


def test_wait_gives_results_in_the_order_of_submission(scheduler):
    for index, response in enumerate(["sleep:0.1", "one", "exit", "sleep:0.05", "one"]):
        submit(scheduler, 10 - index, response)
    assert [r.request_index for r in scheduler.wait()] == [10, 9, 8, 7, 6]


def test_hanging_reward_holds_up_neither_the_others_nor_the_owner(functions):
    with closing(RewardScheduler("exact", f"{functions}:misbehave", 2)) as scheduler:
        submit(scheduler, 0, "hang", timeout_s=600.0)
        for index in range(1, 5):
            submit(scheduler, index, "one")
        got = []
        until(lambda: got.extend(r.request_index for r in scheduler.poll()) or len(got) == 4)
        assert sorted(got) == [1, 2, 3, 4]
        for index in range(5, 35):  # far more than the sockets hold: a submit that writes it all would wait for ever
            submit(scheduler, index, "hang:" + "x" * 300_000, timeout_s=600.0)
        assert (scheduler.poll(), scheduler.num_outstanding) == ([], 31)


def test_long_responses_arrive_whole(scheduler):
    for index in range(30):
        submit(scheduler, index, "length:" + "x" * (100_000 * index))
    assert [r.score for r in scheduler.wait()] == [1e5 * index for index in range(30)]


def test_backlog_behind_a_late_reward_is_scored_elsewhere(scheduler):
    for index in range(40):
        submit(
            scheduler, index, "hang" if index in (0, 1, 20) else "one", timeout_s=0.2 if index in (0, 1, 20) else 30.0
        )
    results = scheduler.wait()
    assert [r.request_index for r in results if r.is_error] == [0, 1, 20]
    assert len(results) == 40


def test_owner_decides_about_signals(scheduler):
    pid = int(only(scheduler, "pid").score)
    processes = [pid, stat(pid)[1]]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        for process in processes:
            os.kill(process, number)
    time.sleep(0.2)  # nothing is to happen, so there is nothing else to wait for
    assert all(map(is_running, processes))
    assert only(scheduler, "one").score == 1.0


def test_idle_workers_and_fork_server_that_die_are_replaced(scheduler):
    pid = int(only(scheduler, "pid").score)
    os.kill(stat(pid)[1], signal.SIGKILL)  # the fork server takes its workers along
    until(lambda: not is_running(pid))
    for index in range(6):
        submit(scheduler, index, "one")
    assert [(r.request_index, r.score) for r in scheduler.wait()] == [(i, 1.0) for i in range(6)]


def test_function_that_does_not_load_stops_start(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("import os\n\n1 / 0\n")
    with pytest.raises(ConfigError, match=r"rewards\.py line 3 raised ZeroDivisionError"):
        RewardScheduler("exact", f"{file}:f", 2).start()
    file.write_text("import os\nos._exit(5)\n")
    with pytest.raises(ConfigError, match=r"did not load: the reward function ended its process \(exit code 5\)"):
        RewardScheduler("exact", f"{file}:f", 1).start()


def test_function_that_no_longer_loads_stops_the_run(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("import os\ndef f(response, **_): os._exit(1)\n")
    scheduler = RewardScheduler("exact", f"{file}:f", 1)
    scheduler.start()
    file.write_text("1 / 0\n")
    submit(scheduler, 0, "")
    submit(scheduler, 1, "")
    with pytest.raises(RuntimeError, match=r"died 4 times in a row .*ZeroDivisionError"):
        scheduler.wait()


def test_closed_scheduler(functions):
    scheduler = RewardScheduler("exact", f"{functions}:misbehave", 1)
    pid = int(only(scheduler, "pid").score)
    submit(scheduler, 0, "hang")
    scheduler.close()
    scheduler.close()
    assert not is_running(pid)
    assert (scheduler.num_outstanding, scheduler.poll(), scheduler.wait()) == (0, [], [])
    with pytest.raises(RuntimeError, match="closed"):
        submit(scheduler, 0, "one")


def test_math_in_a_worker_is_warm_after_start():
    scheduler = RewardScheduler("math", None, 1)
    scheduler.start()
    for index, response in enumerate([r"\boxed{4}", r"\boxed{\frac{8}{2}}", r"\boxed{5}"]):
        submit(scheduler, index, response, timeout_s=10.0, ground_truth="4")
    results = scheduler.wait()
    scheduler.close()
    assert [(r.score, r.is_error) for r in results] == [(1.0, False), (1.0, False), (0.0, False)]
    assert math.fsum(r.execution_s for r in results) < 2.0


# No `if __name__ == "__main__"`, on purpose: a worker that ran the owner's main module again would write a second line.
OWNER = """
import multiprocessing, sys, time
from rollpacker.reward.scheduler import RewardScheduler, start_forkserver
print("main ran", file=open(sys.argv[2], "a"), flush=True)
start_forkserver()
scheduler = RewardScheduler("exact", sys.argv[1], 2)
scheduler.start()
facts = dict(prompt="", ground_truth="", finish_reason="stop", domain="", prompt_id="q")
scheduler.submit(0, response="hang", timeout_s=600.0, **facts)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_do_not_outlive_the_owner(functions, tmp_path, is_killed):
    script, log = tmp_path / "owner.py", tmp_path / "log"
    script.write_text(OWNER + ("time.sleep(600)" if is_killed else "raise SystemExit(3)"))
    command = [sys.executable, str(script), f"{functions}:misbehave", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        if is_killed:
            pids.append(stat(pids[0])[1])
            assert all(is_running(pid) for pid in pids)
            owner.kill()
        assert owner.wait(timeout=20) == (-9 if is_killed else 3)
        until(lambda: not any(is_running(pid) for pid in pids))
    assert log.read_text() == "main ran\n"
