"""A row of a prompt file -> an Example: what is asked, in tokens, and what the answer is judged against.

Two steps, so that a new row format is one more `parse_*_row` and nothing else:
1. `parse_row` checks one row of one format and gives a `Row`, which no longer knows the format;
2. `encode_row` renders and tokenizes a `Row`.
Every mistake is a ConfigError that opens with `where`, the file and the line.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from rollpacker.config import ConfigError

_ROLES = ("system", "user", "assistant", "tool")
_EXPECTED_ROW = '{"prompt": text or chat messages, "answer": text or number, "domain": text, "id": text}'


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
    """Check a row `{"prompt", "answer", "domain"?, "id"?}`; `where` names its file and line in errors.

    Other keys are ignored, and an optional key that is null counts as absent (table exports fill gaps with null).
    Raises ConfigError for a missing or empty prompt, bad chat messages, a missing answer or values of a wrong type.
    """
    return Row(
        prompt=_prompt(row, where),
        ground_truth=_ground_truth(row, where),
        domain=_optional_text(row, "domain", where) or "default",
        prompt_id=_optional_text(row, "id", where),
    )


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


def _prompt(row: dict[str, Any], where: str) -> str | tuple[dict[str, Any], ...]:
    if "prompt" not in row:
        raise ConfigError(f"{where}: the row has no 'prompt'; it has {_keys(row)}. Expected {_EXPECTED_ROW}.")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where}: prompt={prompt!r} is empty; write a prompt or delete the row.")
        return _encodable(prompt, "prompt", where)
    if isinstance(prompt, list):
        return _messages(prompt, where)
    raise ConfigError(f"{where}: prompt={_short(prompt)}: expected text or a list of chat messages.")


def _messages(messages: list[Any], where: str) -> tuple[dict[str, Any], ...]:
    if not messages:
        raise ConfigError(f"{where}: prompt=[] is empty; write at least one chat message or delete the row.")
    for number, message in enumerate(messages, start=1):
        name = f"{where}: message {number} of the prompt"
        if not isinstance(message, dict):
            raise ConfigError(f'{name} is {_short(message)}: expected {{"role": "user", "content": text}}.')
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise ConfigError(f"{name} has role={_short(role)}: expected one of {', '.join(_ROLES)}.")
        if not isinstance(content, str):
            raise ConfigError(f"{name} has content={_short(content)}: expected text.")
        _encodable(content, f"message {number} of the prompt", where)
    if not messages[-1]["content"].strip():
        raise ConfigError(f"{where}: the last message of the prompt is empty; write one or delete the row.")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the last message of the prompt has role='assistant': expected the user's, for the model writes "
            "the assistant's. Is it the solution? Delete it and put the final answer under 'answer'."
        )
    return tuple(dict(message) for message in messages)


def _ground_truth(row: dict[str, Any], where: str) -> str:
    if row.get("answer") is None:
        raise ConfigError(f"{where}: the row has no 'answer'; it has {_keys(row)}. Expected {_EXPECTED_ROW}.")
    answer = row["answer"]
    if isinstance(answer, str) and answer.strip():
        return _encodable(answer, "answer", where)
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, float) and math.isfinite(answer):
        # Positional digits: a verifier of mathematics reads 1e-07 as e times one, minus seven.
        return format(Decimal(repr(answer)), "f")
    raise ConfigError(f"{where}: answer={_short(answer)}: expected text that is not empty, or a finite number.")


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
