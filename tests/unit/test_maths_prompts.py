"""configs/prompts/maths_64.jsonl: every answer is what its `check` computes, with exact fractions."""

from __future__ import annotations

import ast
import json
import operator
from fractions import Fraction
from pathlib import Path

from rollpacker.data.tasks import parse_row
from rollpacker.reward.math_verifier import score

FILE = Path(__file__).parents[2] / "configs" / "prompts" / "maths_64.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)  # type: ignore[arg-type]
    assert isinstance(node, ast.BinOp)
    return Fraction(OPERATORS[type(node.op)](value(node.left), value(node.right)))


def test_answers_are_right() -> None:
    for row in ROWS:
        assert Fraction(row["answer"]) == value(ast.parse(row["check"], mode="eval").body), row["id"]


def test_rows_are_prompts_of_their_own() -> None:
    assert len(ROWS) == 64
    assert len({row["id"] for row in ROWS}) == 64
    assert len({row["prompt"][0]["content"] for row in ROWS}) == 64
    for row in ROWS:
        parsed = parse_row(row, row["id"])
        assert parsed.prompt_id == row["id"]
        assert row["prompt"][-1]["content"].endswith(r"\boxed{}.")


def test_the_verifier_takes_the_answers() -> None:
    for row in ROWS[:8] + ROWS[16:24]:
        assert score(rf"So it is \boxed{{{row['answer']}}}.", ground_truth=row["answer"]) == 1.0
        assert score(r"So it is \boxed{1234}.", ground_truth=row["answer"]) == 0.0
