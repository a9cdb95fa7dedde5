"""docs/spec.md names a test for each rule: each name must be that of a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_spec_names_exists() -> None:
    text = (TESTS.parent / "docs" / "spec.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+|\w+Machine)`", text))
    defined = {
        node.name
        for file in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert len(named) > 80
    assert not named - defined


def test_every_rule_of_the_spec_names_a_test() -> None:
    text = (TESTS.parent / "docs" / "spec.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| rule", "|---"))]
    assert len(rows) > 50
    assert not [row for row in rows if not re.search(r"\| `\w+`[^|]*\|$", row)]
