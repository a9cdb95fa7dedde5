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

`rollpacker train CONFIG.yaml [section.key=value ...]` reads a YAML file with one mapping for each section below, and so does
`rollpacker eval`; what the command line overrides comes last. A word that ends in `.yaml` is a file to lay on top
(`configs/recipes/`); `base: FILE` at the top of a file names the one it builds on. An unknown key is an error that names
the nearest known one. With `--dry-run` the commands check everything and stop; that of `train` estimates the GPU memory
([memory](memory.md)) and needs neither the GPUs nor the ranks of the job. `rollpacker simulate` reads the same files; the
sections `workload` and `cluster` are for it alone ([simulator](simulator.md)). A run writes its resolved config to
`config.yaml` in its run directory.
"""

_TYPES = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    list[str]: "list of text",
    list[int]: "list of whole numbers",
    dict[str, float]: "mapping of text to numbers",
}

_MUST_BE_SET = ("model.path", "data.train_files")

# The values a key really takes where its type and bound say too much, and one that is refused.
NARROWER: dict[str, tuple[str, Any]] = {
    "model.path": ("text", ""),
    "data.train_files": ("list of text, not empty", []),
    "data.domains": ("mapping of text to numbers, at least 0 and not all 0", {"math": 0.0}),
    "rollout.n": ("whole number, at least 2 (1 with reinforce_plus_plus)", 1),
    "rollout.temperature": ("number above 0", 0.0),
    "rollout.top_p": ("number above 0, at most 1", 0.0),
    "training.sequence_parallel": ("`false`", True),
    "rollout.val_kwargs.top_p": ("number above 0, at most 1", 0.0),
    "profiler.steps": ("list of whole numbers, at least 1", [0]),
    "profiler.ranks": ("list of whole numbers, at least 0", [-1]),
    "tail_batching.audit_fraction": ("number, 0 to 1", 1.5),
    "workload.hard_share": ("number, 0 to 1, or null", -0.1),
    "workload.hard_cap_probability": ("number, 0 to 1, or null", 2.0),
    "workload.accuracy": ("number, 0 to 1", 1.1),
    "cluster.train_mfu": ("number above 0, at most 1", 0.0),
    "trainer.logger": ("list of `console`, `tensorboard`, `wandb`", ["paper"]),
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
    (
        "With context parallelism, `data.max_prompt_length` + `data.max_response_length` is a multiple of 2 x "
        "`training.context_parallel_size`.",
        "training.context_parallel_size",
        5,
    ),
    ("`rollout.val_kwargs.n` is 1 where `rollout.val_kwargs.temperature` is 0 (greedy).", "rollout.val_kwargs.n", 4),
    ("`profiler.tool` nsys or torch goes with `profiler.steps`.", "profiler.steps", [1]),
    ("`training.min_lr` is at most `training.lr`.", "training.min_lr", 1.0),
)

_WITH_JOB_AND_MODEL = (
    "`trainer.nnodes` x `trainer.n_gpus_per_node`, where both are set, is the number of the job's ranks.",
    "The job's ranks are a multiple of `training.tensor_model_parallel_size` x `training.pipeline_model_parallel_size` x "
    "`training.context_parallel_size`.",
    "The job's ranks are a multiple of `rollout.tensor_model_parallel_size`.",
    "`trainer.n_gpus_per_node`, where it is set, is a multiple of both tensor-parallel sizes.",
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
    yield f"## {name}\n"
    yield f"{section.__doc__}\n"
    yield "| key | default | meaning | allowed values |"
    yield "|---|---|---|---|"
    for dotted, key, hint in config.every_key(section, f"{name}."):
        cells = (f"`{dotted}`", _default(dotted, key), key.metadata["help"], _allowed(dotted, key, hint))
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    yield ""


def _default(dotted: str, key: dataclasses.Field[Any]) -> str:
    value = key.default if key.default_factory is dataclasses.MISSING else key.default_factory()
    return "(must be set)" if dotted in _MUST_BE_SET else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    """A value as one writes it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _allowed(dotted: str, key: dataclasses.Field[Any], hint: Any) -> str:
    if dotted in NARROWER:
        return NARROWER[dotted][0]
    if key.metadata["choices"] is not None:
        return ", ".join(f"`{_yaml(choice)}`" for choice in key.metadata["choices"])
    arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    text = next(_TYPES[arm] for arm in arms if arm is not type(None))
    bound = config_checks._AT_LEAST.get(dotted)
    if bound is not None:
        text += f", at least {bound:g}"
    return text + (", or null" if type(None) in arms else "")


if __name__ == "__main__":
    print(page(), end="")
