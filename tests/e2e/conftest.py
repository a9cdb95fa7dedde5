"""Options of the end-to-end tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="kills of tests/e2e/test_chaos.py (make chaos: 20)")
    parser.addoption("--chaos-seed", type=int, default=0, help="of their moments and victims")
