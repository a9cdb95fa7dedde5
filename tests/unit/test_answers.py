"""What is read out of a response for maj@k: beside each verifier, in the worker, within the time limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollpacker.config import ConfigError
from rollpacker.reward.scheduler import RewardResult, RewardScheduler
from rollpacker.reward.verifier import load_verifier

FUNCTIONS = """
import os, time
def score(response, **_): return 0.5
def extract_answer(response):
    kind = response.partition(":")[0]
    if kind == "raise": raise ValueError("no answer here")
    if kind == "number": return 3
    if kind == "late": time.sleep(5)
    if kind == "die": os._exit(4)
    return None if kind == "none" else response.partition(":")[2]
"""


def judged(scheduler: RewardScheduler, *responses: str, wants_answer: bool = True) -> list[RewardResult]:
    for index, response in enumerate(responses):
        scheduler.submit(
            index,
            response=response,
            prompt="P",
            ground_truth="1",
            finish_reason="stop",
            domain="D",
            prompt_id="q",
            timeout_s=0.5,
            wants_answer=wants_answer,
        )
    return scheduler.wait()


@pytest.fixture
def user_scheduler(tmp_path: Path) -> Iterator[RewardScheduler]:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    scheduler = RewardScheduler("exact", f"{tmp_path / 'functions.py'}:score", 1)
    yield scheduler
    scheduler.close()


@pytest.mark.parametrize(
    ("verifier", "response", "answer"),
    [
        ("exact", "  41,35#5\n", "41,35#5"),
        ("exact", " \n", ""),
        ("math", r"so \boxed{3}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("math", r"\boxed{$x^{2}$}", "x^{2}"),
        ("math", " $12$ ", "12"),
        ("math", "it is 12", "it is 12"),  # no box: all of it
    ],
)
def test_the_answers_of_the_built_in_verifiers(verifier: str, response: str, answer: str) -> None:
    assert load_verifier(verifier, None).extract_answer(response) == answer


def test_a_right_answer_votes_with_its_like() -> None:
    """What math scores 1 by its fast path has the ground truth as its answer."""
    math = load_verifier("math", None)
    for response in (r"\boxed{7}", r"thus $\boxed{ 7 }$", "7", "$7$", r"\(7\)"):
        assert math.score(response, prompt="", ground_truth="7", finish_reason="stop") == 1.0
        assert math.extract_answer(response) == "7"


def test_the_users_own_extractor_runs_in_the_worker(user_scheduler: RewardScheduler) -> None:
    results = judged(user_scheduler, "text:42", "none:", "text:", "raise:", "number:", "late:", "die:", "text:43")
    assert [r.answer for r in results] == ["42", None, "", None, None, None, None, "43"]
    assert [r.is_error for r in results] == [False, False, False, True, True, True, True, False]
    assert [r.score for r in results] == [0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5]
    assert "raised ValueError: no answer here" in results[3].message
    assert "extract_answer returned 3, expected text or None" in results[4].message


def test_training_rewards_extract_nothing(user_scheduler: RewardScheduler) -> None:
    results = judged(user_scheduler, "raise:", "text:42", wants_answer=False)
    assert [(r.score, r.is_error, r.answer) for r in results] == [(0.5, False, None)] * 2


def test_a_function_without_an_extractor_gives_the_whole_response(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def score(response, **_): return 1.0\n")
    assert load_verifier("math", f"{tmp_path / 'f.py'}:score").extract_answer(" a b \n") == "a b"
    (tmp_path / "g.py").write_text("def score(response, **_): return 1.0\nextract_answer = 3\n")
    with pytest.raises(ConfigError, match="extract_answer is a int, expected a function"):
        load_verifier("math", f"{tmp_path / 'g.py'}:score")
