"""docs/configuration.md is what tools/describe_config.py makes of the config, and what it says is refused is refused."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from rollpacker.config import Config, ConfigError, DataConfig, ModelConfig, every_key
from rollpacker.config_checks import validate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import describe_config  # noqa: E402

GOOD = Config(model=ModelConfig(path="m"), data=DataConfig(train_files=["a.jsonl"]))


def changed(config: Any, dotted: str, value: Any) -> Any:
    name, _, below = dotted.partition(".")
    return dataclasses.replace(config, **{name: changed(getattr(config, name), below, value) if below else value})


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    if written != describe_config.page():
        pytest.fail("docs/configuration.md is stale: run `python tools/describe_config.py > docs/configuration.md`")


def test_every_key_has_one_row() -> None:
    rows = [line.split("`")[1] for line in describe_config.page().splitlines() if line.startswith("| `")]
    assert rows == [dotted for dotted, _, _ in every_key()]
    assert "rollout.val_kwargs.n" in rows


def test_the_default_config_is_good_once_model_and_data_are_named() -> None:
    validate(GOOD)


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        *((dotted, value) for dotted, (_, value) in describe_config.NARROWER.items()),
        *((dotted, value) for _, dotted, value in describe_config.ACROSS_KEYS),
    ],
)
def test_what_the_page_rules_out_is_refused(dotted: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=dotted.replace(".", r"\.")):
        validate(changed(GOOD, dotted, value))
