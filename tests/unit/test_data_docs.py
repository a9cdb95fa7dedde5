"""The examples of docs/data.md are rows that load."""

import json
import re
from pathlib import Path

from rollpacker.data.tasks import Row, parse_row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_the_examples_of_the_page_are_one_question_in_three_formats():
    examples = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    rows = [parse_row(json.loads(text), "docs/data.md") for text in examples]
    question = ({"role": "user", "content": "What is 2 + 2?"},)
    assert rows == [
        Row("What is 2 + 2?", "4", domain="math", prompt_id="easy-1"),
        Row(question, "4", domain="gsm8k", prompt_id=None),
        Row(question, "4", domain="deepmath_103k", prompt_id="4982"),
    ]
