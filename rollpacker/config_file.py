"""YAML and `section.key=value` in, a `Config` out, and back: typed, with the nearest key named for a misspelt one."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollpacker.config import Config, ConfigError, RolloutConfig, every_key
from rollpacker.config_checks import validate

_BASE = "base"
_RACE = "tail_batching"
_RACE_ALIASES = {"max_prompts_ratio": "eta_prompts", "max_num_return_sequences": "eta_responses"}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice; YAML would silently keep the last."""


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue  # no name; construct_mapping refuses it where it cannot be a key
        name = loader.construct_object(key_node)
        if name in seen:
            raise ConfigError(f"key {name!r} stands twice, in lines {seen[name]} and {key_node.start_mark.line + 1}.")
        seen[name] = key_node.start_mark.line + 1
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def load_config(path: str, overrides: list[str] | None = None, *, prompts: str | None = "data.train_files") -> Config:
    """Read a YAML file, lay further files and `section.key=value` overrides on it, check what needs no machine.

    A word of `overrides` that ends in .yaml is a file to lay on top: a recipe, for example. `prompts` is the key of the files
    that the command cannot do without, None where it needs none.
    """
    return build_config(_read_with_base(Path(path), ()), overrides, prompts=prompts)


def build_config(tree: dict[str, Any], overrides: list[str] | None = None, *, prompts: str | None) -> Config:
    """The config of a tree of sections and keys, as a YAML file holds it; `overrides` and `prompts` as in `load_config`."""
    for word in overrides or []:
        if is_overlay(word):
            overlay = _read_tree(Path(word))
            overlay.pop(_BASE, None)  # what it builds on when it is started by itself
            _lay_on(tree, overlay)
        else:
            _apply_override(tree, word)
    _resolve_aliases(tree)
    config: Config = _build(Config, tree, "")
    validate(config, prompts)
    return config


def _resolve_aliases(tree: dict[str, Any]) -> None:
    """ROLL's names of the race: max_prompts_ratio, and max_num_return_sequences in responses instead of a factor."""
    section = tree.get(_RACE)
    if not isinstance(section, dict):
        return
    for alias, name in _RACE_ALIASES.items():
        if alias not in section:
            continue
        if name in section:
            raise ConfigError(f"{_RACE}.{alias} and {_RACE}.{name} are one key: set one of them.")
        value = _scalar(f"{_RACE}.{alias}", section.pop(alias), float)
        if name == "eta_responses":
            rollout = tree.get("rollout")
            n = rollout.get("n") if isinstance(rollout, dict) else None
            num_responses = RolloutConfig().n if n is None else _scalar("rollout.n", n, int)
            if value < num_responses:
                raise ConfigError(
                    f"{_RACE}.{alias}={value:g}: must be at least rollout.n={num_responses}, the responses to train."
                )
            value /= num_responses
        section[name] = value


def _forget_other_names(tree: dict[str, Any], names: Iterable[str]) -> None:
    """A key that is about to be set under one of its names in the section of the race: the other one counts no more."""
    section = tree.get(_RACE)
    if isinstance(section, dict):
        for alias, name in _RACE_ALIASES.items():
            for given, other in ((alias, name), (name, alias)):
                if given in names:
                    section.pop(other, None)


def is_overlay(word: str) -> bool:
    """Whether a word of the command line names a config file rather than an override."""
    return "=" not in word and Path(word).suffix in (".yaml", ".yml")


def _read_with_base(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The tree of a file, laid on that of the file which it names as its `base`, relative to itself."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: its {_BASE} leads back to itself.")
    tree = _read_tree(path)
    base = tree.pop(_BASE, None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {_BASE}={base!r}: expected the path of one config file, relative to this one.")
    below = _read_with_base(path.parent / base, (*seen, path.resolve()))
    _lay_on(below, tree)
    return below


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error.reason} at byte {error.start}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections (model:, data:, ...), found a {type(tree).__name__}.")
    return tree


def _lay_on(tree: dict[str, Any], overlay: dict[str, Any]) -> None:
    """Write the keys of `overlay` over those of `tree`, section by section."""
    if isinstance(overlay.get(_RACE), dict):
        _forget_other_names(tree, overlay[_RACE])
    for name, value in overlay.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _lay_on(tree[name], value)
        else:
            tree[name] = value


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"override {override!r}: write section.key=value, for example rollout.n=4.")
    try:
        value = yaml.load(text, _StrictLoader) if text else None
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML.") from error
    if parts[0] == _RACE:
        _forget_other_names(tree, parts[1:2])
    for depth, name in enumerate(parts[:-1], start=1):
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ConfigError(f"{'.'.join(parts[:depth])}: expected keys below it, found {tree!r}.")
    tree[parts[-1]] = value


def _build(cls: type, tree: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in fields:
            raise ConfigError(_unknown_key(f"{prefix}{name}", prefix, list(fields)))
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{name}: expected keys below it, found {value!r}.")
            values[name] = _build(typing.cast(type, hints[name]), value, f"{prefix}{name}.")
        else:
            values[name] = _coerce(f"{prefix}{name}", value, hints[name], fields[name].metadata.get("choices"))
    return cls(**values)


def _unknown_key(dotted: str, prefix: str, known: list[str]) -> str:
    everything = {name for key, _, _ in every_key() for name in (key, key.rpartition(".")[0])}
    near = difflib.get_close_matches(dotted.rsplit(".", 1)[-1], known, n=1, cutoff=0.6)
    same_leaf = [k for k in sorted(everything) if k.rsplit(".", 1)[-1] == dotted.rsplit(".", 1)[-1]]
    if near:
        hint = f"Did you mean {prefix}{near[0]}?"
    elif same_leaf:
        hint = f"Did you mean {same_leaf[0]}?"
    else:
        hint = f"Known here: {', '.join(known)}."
    return f"unknown key {dotted}. {hint}"


_LIST_ITEMS = {str: "strings", int: "whole numbers"}


def _coerce(dotted: str, value: Any, hint: Any, choices: tuple[Any, ...] | None) -> Any:
    """Turn a YAML value into the declared type, or say what was expected."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        items = value if isinstance(value, list) else [value]
        if not all(type(i) is item for i in items):
            raise ConfigError(f"{dotted}={value!r}: expected a list of {_LIST_ITEMS[item]}.")
        return items
    if typing.get_origin(hint) is dict:
        return _mapping(dotted, value, typing.get_args(hint)[1])
    if isinstance(value, bool) and choices is not None:  # YAML 1.1 reads a bare `on` or `off` as a boolean
        word = "on" if value else "off"
        value = word if word in choices else value
    result = _scalar(dotted, value, hint)
    if choices is not None and result not in choices:
        names = ", ".join("null" if c is None else str(c) for c in choices)
        raise ConfigError(f"{dotted}={value}: expected one of {names}.")
    return result


def _mapping(dotted: str, value: Any, item_hint: type) -> dict[str, Any]:
    """Text keys to scalars; a whole number may stand as a key, but what YAML 1.1 reads as true or false may not."""
    if not isinstance(value, dict):
        raise ConfigError(f"{dotted}={value!r}: expected a mapping, {{name: value}}.")
    for name in value:
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise ConfigError(f"{dotted}={value!r}: {name!r} is no name; put it in quotes.")
        if isinstance(name, int) and str(name) in value:
            raise ConfigError(f"{dotted}={value!r}: the name {name} stands twice.")
    return {str(name): _scalar(f"{dotted}.{name}", item, item_hint) for name, item in value.items()}


def _scalar(dotted: str, value: Any, hint: type) -> Any:
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)  # YAML 1.1 reads 1e-4 as text
        except (TypeError, ValueError):
            number = float("nan")
        if hint is float and number == number and abs(number) != float("inf"):
            return number
        if hint is int and number == number and abs(number) != float("inf") and number == int(number):
            return int(number)
    raise ConfigError(f"{dotted}={value!r}: expected {wanted}.")


def to_yaml(config: Config) -> str:
    """The resolved config, as it is written beside each run."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def to_short_yaml(config: Config, comments: Mapping[str, str]) -> str:
    """What differs from the defaults, and the keys in `comments` (dotted name: text, which may be empty), as a file that a
    person goes on with; `load_config` makes the same config of it.
    """
    return "\n".join(f"{name}:\n{body}" for name, body in _sections(config, Config(), "", comments))


def _sections(value: Any, default: Any, prefix: str, comments: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and indented lines of each section that has any."""
    for section in dataclasses.fields(value):
        if dataclasses.is_dataclass(getattr(value, section.name)):
            lines = _lines(
                getattr(value, section.name), getattr(default, section.name), f"{prefix}{section.name}.", comments
            )
            if lines:
                yield section.name, "".join(f"  {line}\n" for line in lines)


def _lines(section: Any, default: Any, prefix: str, comments: Mapping[str, str]) -> list[str]:
    lines = []
    for leaf in dataclasses.fields(section):
        item, dotted = getattr(section, leaf.name), f"{prefix}{leaf.name}"
        if not dataclasses.is_dataclass(item) and (dotted in comments or item != getattr(default, leaf.name)):
            value = yaml.safe_dump(item, default_flow_style=True, width=1 << 16).removesuffix("...\n").rstrip()
            text = f"{leaf.name}: {value}"
            lines.append(f"{text}  # {comments[dotted]}" if comments.get(dotted) else text)
    for name, body in _sections(section, default, prefix, comments):
        lines += [f"{name}:", *body.splitlines()]
    return lines
