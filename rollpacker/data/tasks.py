"""A row of a prompt file -> an Example: what is asked, in tokens, and what the answer is judged against.

Two steps, so that a new row format is one more entry of `_FORMATS` and nothing else:
1. `parse_row` tells a row's format by its columns, checks it and gives a `Row`, which no longer knows the format;
2. `encode_row` renders and tokenizes a `Row`.
Every mistake is a ConfigError that opens with `where`, the file and the row.

docs/data.md shows each format. Sources: verl's docs/preparation/prepare_data.rst; for ROLL `update_dataset_domain` and
`get_encode_function` in its roll/pipeline/rlvr/rlvr_pipeline.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from rollpacker.config import ConfigError
from rollpacker.data.files import parse_json

_ROLES = ("system", "user", "assistant", "tool")
_DEFAULT_DOMAIN = "default"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Give the token ids of `text`."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Render chat messages as the text that the model was taught to continue."""


@dataclass(frozen=True)
class Row:
    """A checked row of any format. `prompt` is text, or chat messages; `prompt_id` is None where the row has none."""

    prompt: str | tuple[dict[str, Any], ...]
    ground_truth: str
    domain: str
    prompt_id: str | None


@dataclass(frozen=True)
class Example:
    """One prompt as the run uses it: `text` is the prompt after the chat template, `token_ids` what the engine gets."""

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    domain: str


def parse_row(row: dict[str, Any], where: str) -> Row:
    """Tell the format of a row by its columns and check it; `where` names its file and row in errors.

    Columns that the format does not know are ignored, and one that is null counts as absent (table exports fill gaps
    with null). Raises ConfigError for a row of no format or of two, a missing or empty prompt, bad chat messages, an
    answer that no verifier can compare with, and values of a wrong type.
    """
    fitting = [f for f in _FORMATS if all(row.get(column) is not None for column in f.required)]
    if len(fitting) != 1:
        reason = f"fits the formats {' and '.join(f.name for f in fitting)}" if fitting else "fits no format"
        expected = "; ".join(f"{f.name} {f.example}" for f in fitting or _FORMATS)
        raise ConfigError(f"{where}: the row {reason}: it has {_keys(row)}. Expected just one of: {expected}.")
    return fitting[0].parse(row, where)


def _parse_plain_row(row: dict[str, Any], where: str) -> Row:
    return Row(
        prompt=_prompt(row["prompt"], "prompt", where),
        ground_truth=_ground_truth(row["answer"], "answer", where),
        domain=_optional_text(row, "domain", where) or _DEFAULT_DOMAIN,
        prompt_id=_optional_text(row, "id", where),
    )


def _parse_verl_row(row: dict[str, Any], where: str) -> Row:
    """Leave `extra_info.index` alone, which is no id: it starts anew in each file and split."""
    reward_model = row["reward_model"]
    if not isinstance(reward_model, dict):
        raise ConfigError(
            f'{where}: reward_model={_short(reward_model)}: expected {{"style": text, "ground_truth": text or number}}.'
        )
    return Row(
        prompt=_prompt(row["prompt"], "prompt", where),
        ground_truth=_ground_truth(reward_model.get("ground_truth"), "reward_model.ground_truth", where),
        domain=_optional_text(row, "data_source", where) or _DEFAULT_DOMAIN,
        prompt_id=None,
    )


def _parse_roll_row(row: dict[str, Any], where: str) -> Row:
    """A row's own `domain` goes before its `tag`, as in ROLL."""
    messages = row["messages"]
    if isinstance(messages, str):
        messages = parse_json(messages, f"{where}: messages", expected='a JSON list of {"role", "content"}')
    if not isinstance(messages, list):
        raise ConfigError(
            f"{where}: messages={_short(messages)}: expected a list of chat messages, or one as JSON text."
        )
    return Row(
        prompt=_messages(messages, "messages", where),
        ground_truth=_ground_truth(row["ground_truth"], "ground_truth", where),
        domain=_optional_text(row, "domain", where) or _optional_text(row, "tag", where) or _DEFAULT_DOMAIN,
        prompt_id=_optional_text(row, "id", where),
    )


@dataclass(frozen=True)
class _Format:
    """A row format: `required` are the columns that tell it from the others, `optional` the rest that it reads."""

    name: str
    example: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[dict[str, Any], str], Row]


_FORMATS = (
    _Format(
        "plain",
        '{"prompt": text or chat messages, "answer": text or number, "domain": text, "id": text}',
        ("prompt", "answer"),
        ("domain", "id"),
        _parse_plain_row,
    ),
    _Format(
        "verl",
        '{"prompt": chat messages, "reward_model": {"ground_truth": text or number}, "data_source": text}',
        ("prompt", "reward_model"),
        ("data_source",),
        _parse_verl_row,
    ),
    _Format(
        "ROLL",
        '{"messages": chat messages or their JSON text, "ground_truth": text or number, "tag": text, "id": text}',
        ("messages", "ground_truth"),
        ("domain", "tag", "id"),
        _parse_roll_row,
    ),
)
COLUMNS = frozenset(column for f in _FORMATS for column in (*f.required, *f.optional))
"""Every column that some format reads; a file's others need not be read."""


def encode_row(row: Row, tokenizer: Tokenizer, *, prompt_id: str, where: str) -> Example:
    """Render and tokenize a row; raises ConfigError where the chat template is missing or refuses the messages."""
    if isinstance(row.prompt, str):
        text, add_special_tokens = row.prompt, True
    else:
        # The template writes the special tokens itself; encoding must not add a second BOS.
        text, add_special_tokens = _render(row.prompt, tokenizer, where), False
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    if not token_ids:
        raise ConfigError(f"{where}: the prompt {_short(text)} gives no tokens with the tokenizer of model.path.")
    return Example(prompt_id, text, token_ids, row.ground_truth, row.domain)


def _prompt(prompt: Any, name: str, where: str) -> str | tuple[dict[str, Any], ...]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where}: {name}={_short(prompt)} is empty; write a prompt or delete the row.")
        return _encodable(prompt, name, where)
    if isinstance(prompt, list):
        return _messages(prompt, name, where)
    raise ConfigError(f"{where}: {name}={_short(prompt)}: expected text or a list of chat messages.")


def _messages(messages: list[Any], name: str, where: str) -> tuple[dict[str, Any], ...]:
    """Check chat messages. A key that is null goes: in parquet each message has the keys of all."""
    if not messages:
        raise ConfigError(f"{where}: {name}=[] is empty; write at least one chat message or delete the row.")
    for number, message in enumerate(messages, start=1):
        place = f"message {number} of {name}"
        if not isinstance(message, dict):
            raise ConfigError(f'{where}: {place} is {_short(message)}: expected {{"role": "user", "content": text}}.')
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise ConfigError(f"{where}: {place} has role={_short(role)}: expected one of {', '.join(_ROLES)}.")
        if not isinstance(content, str):
            raise ConfigError(f"{where}: {place} has content={_short(content)}: expected text.")
        _encodable(content, place, where)
    if not messages[-1]["content"].strip():
        raise ConfigError(f"{where}: the last message of {name} is empty; write one or delete the row.")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the last message of {name} has role='assistant': expected the user's, for the model writes "
            "the assistant's. Is it the solution? Delete it and keep the final answer in its own column."
        )
    return tuple({k: v for k, v in message.items() if v is not None} for message in messages)


def _ground_truth(answer: Any, name: str, where: str) -> str:
    """Give the answer as the one text that verifiers and reward functions take."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, str) and answer.strip():
        return _encodable(answer, name, where)
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, float | Decimal) and math.isfinite(answer):
        # Positional digits: a verifier of mathematics reads 1e-07 as e times one, minus seven.
        return format(Decimal(repr(answer)) if isinstance(answer, float) else answer, "f")
    if isinstance(answer, list | dict) and answer:
        raise ConfigError(
            f"{where}: {name}={_short(answer)}: expected one text or number, for a verifier compares with one answer. "
            "Keep one, or store it as JSON text and take that apart in a reward.function of your own."
        )
    raise ConfigError(f"{where}: {name}={_short(answer)}: expected text that is not empty, or a finite number.")


def _optional_text(row: dict[str, Any], key: str, where: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {key}={_short(value)}: expected text that is not empty; or leave the key out.")
    return _encodable(value, key, where)


def _encodable(text: str, name: str, where: str) -> str:
    """Refuse half of a UTF-16 pair, which JSON can spell and no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {name} holds {text[error.start]!r} at character {error.start}, half of a character: "
            "write both halves, or the character itself."
        ) from error
    return text


def _render(messages: tuple[dict[str, Any], ...], tokenizer: Tokenizer, where: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{where}: the prompt is a list of chat messages, but the tokenizer of model.path has no chat template. "
            "Take the tokenizer of an instruct model, or write the prompt as one text."
        )
    conversation = [dict(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except _template_errors() as error:
        raise ConfigError(
            f"{where}: the tokenizer's chat template refuses the messages with roles "
            f"{', '.join(m['role'] for m in messages)}: {error}. Rewrite the messages as the template wants them."
        ) from error


def _template_errors() -> tuple[type[Exception], ...]:
    """What rendering may raise; templates are Jinja programs, and only a tokenizer that renders one imports jinja2."""
    jinja2 = sys.modules.get("jinja2")
    own = (jinja2.TemplateError,) if jinja2 is not None else ()
    return (ValueError, TypeError, LookupError, AttributeError, *own)


def _keys(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}=null" if value is None else key for key, value in row.items()) or "no keys"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
