"""The demo's task: what a right response is, what the reward lets through, what the rows are drawn from."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import demo_task  # noqa: E402

problems = st.integers(0, 2**32).map(lambda seed: demo_task.draw_problem(random.Random(seed)))


def score(response, problem, finish_reason="stop"):
    return demo_task.score(
        response,
        prompt=demo_task.prompt_text(*problem),
        ground_truth=demo_task.answer_text(*problem),
        finish_reason=finish_reason,
        domain="demo",
        prompt_id="7",
    )


def test_texts_of_an_example():
    assert demo_task.prompt_text(47, 6) == "47%6="
    assert demo_task.solution_text(47, 6) == "41,35,29,23,17,11,05#5"
    assert demo_task.answer_text(47, 6) == "7#5"
    assert demo_task.prompt_text(7, 2) == "07%2="


@settings(deadline=None)  # a busy machine is no failure
@given(problems)
def test_a_problem_fits_its_texts(problem):
    quotient = problem.n // problem.d
    assert 1 <= quotient <= demo_task.MAX_STEPS
    assert 2 <= problem.d <= demo_task.MAX_DIVISOR
    assert problem.n < demo_task.DIVIDEND_BOUND
    prompt, solution = demo_task.prompt_text(*problem), demo_task.solution_text(*problem)
    assert len(prompt) == len("47%6=")
    assert set(prompt + solution) <= set(demo_task.CHARACTERS)


@settings(deadline=None)
@given(problems)
def test_right_answers_score_one(problem):
    assert score(demo_task.solution_text(*problem), problem) == 1.0


@settings(deadline=None)
@given(problems)
def test_an_unfinished_response_scores_zero(problem):
    assert score(demo_task.solution_text(*problem), problem, finish_reason="length") == 0.0


@settings(deadline=None)
@given(problems, st.data())
def test_a_cut_response_scores_zero(problem, data):
    solution = demo_task.solution_text(*problem)
    assert score(solution[: data.draw(st.integers(0, len(solution) - 1))], problem) == 0.0


@settings(deadline=None)
@given(problems)
def test_a_step_too_many_or_too_few_scores_zero(problem):
    steps, remainder = demo_task.solution_text(*problem).split("#")
    assert score(f"{steps},00#{remainder}", problem) == 0.0
    assert score(f"{steps[3:]}#{remainder}", problem) == 0.0  # with one step, none is left


@settings(deadline=None)
@given(problems, st.integers(1, 9))
def test_another_remainder_scores_zero(problem, off):
    steps, remainder = demo_task.solution_text(*problem).split("#")
    assert score(f"{steps}#{(int(remainder) + off) % 10}", problem) == 0.0


@settings(deadline=None)
@given(problems)
def test_separators_alone_are_no_steps(problem):
    quotient, remainder = demo_task.answer_text(*problem).split("#")
    assert score("," * (int(quotient) - 1) + f"#{remainder}", problem) == 0.0


@settings(deadline=None)
@given(problems, st.text(alphabet=st.sampled_from(demo_task.CHARACTERS + "<>x \n")) | st.text())
def test_garbage_never_raises(problem, response):
    assert score(response, problem) in (0.0, 1.0)
    assert score(response + "\n", problem) == 0.0


@settings(deadline=None)
@given(problems, st.integers())
def test_a_careless_teacher_keeps_the_form(problem, seed):
    solution = demo_task.solution_text(*problem, random.Random(seed), 1.0)
    assert len(solution) <= len(demo_task.solution_text(*problem))  # it only ever takes away too much
    steps, remainder = solution.split("#")
    assert int(steps.split(",")[-1]) == int(remainder) < problem.d
    assert demo_task.solution_text(*problem, random.Random(seed), 0.0) == demo_task.solution_text(*problem)


def test_a_careless_teacher_leaves_half_of_the_reward_to_gain():
    rng = random.Random(0)
    drawn = [demo_task.draw_problem(rng) for _ in range(4000)]
    rewards = [score(demo_task.solution_text(*p, rng, demo_task.CARELESS), p) for p in drawn]
    assert sum(rewards) / len(rewards) == pytest.approx(0.54, abs=0.03)


def test_lengths_have_a_long_tail():
    rng = random.Random(0)
    lengths = sorted(len(demo_task.solution_text(*demo_task.draw_problem(rng))) + 1 for _ in range(512))
    assert lengths[256] == 8
    assert lengths[-1] >= 10 * lengths[256]


def test_rows_are_those_of_the_seed(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        demo_task.write_rows(tmp_path / name, demo_task.data_rows(200, seed))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert rows == list(demo_task.data_rows(200, 3))
    assert rows[:50] == list(demo_task.data_rows(50, 3))


def test_rows_hold_the_answers_of_their_prompts():
    for row in demo_task.data_rows(300, 0):
        n, d = map(int, row["prompt"].removesuffix("=").split("%"))
        assert row == {"prompt": demo_task.prompt_text(n, d), "answer": demo_task.answer_text(n, d)}
    counts = Counter(row["prompt"] for row in demo_task.data_rows(2048, 0))
    assert len(counts) > 200


def test_unseen_problems_are_new_and_different():
    known = {row["prompt"] for row in demo_task.data_rows(2048, 0)}
    rows = list(demo_task.unseen_rows(64, 1, known))
    prompts = {row["prompt"] for row in rows}
    assert len(prompts) == 64 and not prompts & known
    assert rows == list(demo_task.unseen_rows(64, 1, known)) != list(demo_task.unseen_rows(64, 2, known))
    lengths = [len(demo_task.solution_text(*map(int, p.removesuffix("=").split("%")))) for p in prompts]
    assert min(lengths) > 8  # training has every problem of the median length
    with pytest.raises(ValueError, match="only 0 problems are not among the training prompts"):
        list(demo_task.unseen_rows(1, 1, {demo_task.prompt_text(n, d) for d in range(2, 6) for n in range(100)}))


def test_validation_files_say_what_training_has_seen(tmp_path):
    demo_task.write_files(tmp_path, 300, 40, seed=5)
    files = [tmp_path / f"{name}.jsonl" for name in ("train", "val")]
    train, val = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert train == list(demo_task.data_rows(300, 1_000_003 + 5))
    known = {row["prompt"] for row in train}
    assert Counter(row["domain"] for row in val) == {"seen": 30, "unseen": 10}
    assert all((row["prompt"] in known) == (row["domain"] == "seen") for row in val)


@settings(deadline=None)
@given(problems)
def test_the_answer_of_a_right_response_is_the_ground_truth(problem):
    assert demo_task.extract_answer(demo_task.solution_text(*problem)) == demo_task.answer_text(*problem)
    assert demo_task.extract_answer(demo_task.solution_text(*problem) + "#") is None


def test_the_task_needs_no_torch():
    code = "import sys, demo_task; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=TOOLS, check=False).returncode == 0
