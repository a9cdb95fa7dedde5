"""Print docs/configuration.md, made from the metadata of rollpacker/config.py.

    python tools/describe_config.py > docs/configuration.md

Keys, defaults, meanings, choices and bounds come from config.py and config_checks.py. What `validate` refuses beyond them
is told here, in NARROWER and ACROSS_KEYS, each with a value that breaks it, so that a test can show that it is still refused.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from rollpacker import config, config_checks

_HEAD = """# Configuration

Made from `rollpacker/config.py` by `python tools/describe_config.py > docs/configuration.md`; do not edit this page.

`rollpacker train CONFIG.yaml [section.key=value ...]` reads a YAML file with one mapping for each section below; what
the command line overrides comes last. A word that ends in `.yaml` is a file to lay on top (`configs/recipes/`); `base:
FILE` at the top of a file names the one it builds on. An unknown key is an error that names the nearest known one.
With `--dry-run` the command checks everything, prints the resolved config and stops. A run writes it to `config.yaml`
in its run directory.
"""

_TYPES = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    list[str]: "list of text",
    list[int]: "list of whole numbers",
}

# The values a key really takes where its type and bound say too much, and one that is refused.
NARROWER: dict[str, tuple[str, Any]] = {
    "model.path": ("text", ""),
    "data.train_files": ("list of text, not empty", []),
    "rollout.n": ("whole number, at least 2", 1),
    "rollout.temperature": ("number above 0", 0.0),
    "rollout.top_p": ("number above 0, at most 1", 0.0),
    "training.sequence_parallel": ("`false`", True),
    "profiler.steps": ("list of whole numbers, at least 1", [0]),
    "profiler.ranks": ("list of whole numbers, at least 0", [-1]),
    "trainer.logger": ("list of `console`, `tensorboard`", ["paper"]),
}
ACROSS_KEYS: tuple[tuple[str, str, Any], ...] = (
    (
        "`training.max_tokens_per_gpu` is at least `data.max_prompt_length` + `data.max_response_length`.",
        "training.max_tokens_per_gpu",
        1024 + 8192 - 1,
    ),
    (
        "`rollout.top_p` < 1 or `rollout.top_k` > 0 needs `algorithm.mismatch_correction` `tis` or `mis`.",
        "rollout.top_k",
        5,
    ),
    ("`algorithm.ppo_mini_batch_size` is at most `data.train_batch_size`.", "algorithm.ppo_mini_batch_size", 129),
    ("`profiler.tool` nsys or torch goes with `profiler.steps`.", "profiler.steps", [1]),
    ("`training.min_lr` is at most `training.lr`.", "training.min_lr", 1.0),
)

_WITH_JOB_AND_MODEL = (
    "The job's ranks are a multiple of `training.tensor_model_parallel_size` x `training.pipeline_model_parallel_size`.",
    "The job's ranks are a multiple of `rollout.tensor_model_parallel_size`.",
    "`training.tensor_model_parallel_size` divides the model's attention heads, its KV heads and its MLP width.",
    "`training.pipeline_model_parallel_size` divides its layers.",
    "`rollout.tensor_model_parallel_size` divides its attention heads; of it and the KV heads, one divides the other.",
    "`model.reference_path`, if any, is a model of the same shape.",
    "`data.max_prompt_length` + `data.max_response_length` is at most its number of positions.",
    "`training.lr_warmup_steps`, if any, are fewer than the steps of the run.",
)


def page() -> str:
    """The whole page."""
    hints = typing.get_type_hints(config.Config)
    parts = [_HEAD]
    parts += ["\n".join(_section(section.name, hints[section.name])) for section in dataclasses.fields(config.Config)]
    rules = [text for text, _, _ in ACROSS_KEYS] + list(_WITH_JOB_AND_MODEL)
    parts += ["## What must hold across keys, for the job and for the model\n"]
    return "\n".join(parts + [f"- {rule}" for rule in rules]) + "\n"


def _section(name: str, section: type) -> Iterator[str]:
    hints = typing.get_type_hints(section)
    yield f"## {name}\n"
    yield f"{section.__doc__}\n"
    yield "| key | default | meaning | allowed values |"
    yield "|---|---|---|---|"
    for key in dataclasses.fields(section):
        cells = (f"`{name}.{key.name}`", _default(key), key.metadata["help"], _allowed(name, key, hints[key.name]))
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    yield ""


def _default(key: dataclasses.Field[Any]) -> str:
    value = key.default if key.default_factory is dataclasses.MISSING else key.default_factory()
    return "(must be set)" if value in ("", []) else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    """A value as one writes it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _allowed(section: str, key: dataclasses.Field[Any], hint: Any) -> str:
    if f"{section}.{key.name}" in NARROWER:
        return NARROWER[f"{section}.{key.name}"][0]
    if key.metadata["choices"] is not None:
        return ", ".join(f"`{_yaml(choice)}`" for choice in key.metadata["choices"])
    arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    text = next(_TYPES[arm] for arm in arms if arm is not type(None))
    bound = config_checks._AT_LEAST.get(f"{section}.{key.name}")
    if bound is not None:
        text += f", at least {bound:g}"
    return text + (", or null" if type(None) in arms else "")


if __name__ == "__main__":
    print(page(), end="")
