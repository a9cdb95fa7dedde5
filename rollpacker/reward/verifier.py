"""What judges a response: the built-in verifiers and the user's own reward function.

This module is imported in every reward worker and stays light: standard library only, math-verify when asked for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollpacker.config import ConfigError
from rollpacker.user_function import load_user_function, user_module_name

_SIGNATURE = "(response, *, prompt, ground_truth, finish_reason, **extra)"


class RewardFunction(Protocol):
    """Scores one response; `extra` holds domain and prompt_id today, and more keywords tomorrow."""

    def __call__(self, response: str, *, prompt: str, ground_truth: str, finish_reason: str, **extra: Any) -> float:
        """Give a finite score. `finish_reason` is "stop", or "length" where the response was cut at the cap."""


@dataclass(frozen=True)
class Verifier:
    """A reward function, and what reads the answer out of a response for a majority vote (None: there is none)."""

    score: RewardFunction
    extract_answer: Callable[[str], str | None]


def exact_match(response: str, *, ground_truth: str, **_: Any) -> float:
    """Give 1.0 where response and ground truth are the same text, white space at the ends aside, else 0.0."""
    return float(response.strip() == ground_truth.strip())


def whole_text(response: str) -> str:
    """Give all of the response but the white space at its ends: what `exact_match` compares."""
    return response.strip()


def load_verifier(verifier: str, function: str | None) -> Verifier:
    """Load the user's `function`, "path.py:name", or else the built-in `verifier`, "exact" or "math".

    The answer is what the function `extract_answer(response)` beside the user's reward function gives, if there is one,
    else the whole response; "math" reads the last box. Loading does the slow part (imports, first parse), so that the
    first score is as quick as the others. The user's file is run in this process. Raises ConfigError for whatever is
    wrong with it.
    """
    if function is not None:
        return _load_user_function(function)
    if verifier == "exact":
        return Verifier(exact_match, whole_text)
    if verifier == "math":
        from rollpacker.reward import math_verifier

        math_verifier.warm_up()
        return Verifier(math_verifier.score, math_verifier.extract_answer)
    raise ConfigError(f"reward.verifier={verifier}: expected exact or math.")


def _load_user_function(spec: str) -> Verifier:
    reward: RewardFunction = load_user_function("reward.function", spec, _SIGNATURE)
    _check_signature(reward, spec)
    extract_answer = getattr(sys.modules[user_module_name("reward.function")], "extract_answer", whole_text)
    if not callable(extract_answer):
        raise ConfigError(
            f"reward.function={spec}: extract_answer is a {type(extract_answer).__name__}, expected a function that reads "
            "the answer out of a response for maj@k: def extract_answer(response) -> str | None. Rename it otherwise."
        )
    return Verifier(reward, extract_answer)


def _check_signature(reward: RewardFunction, spec: str) -> None:
    name = spec.rpartition(":")[2]
    try:
        signature = inspect.signature(reward)
    except ValueError:  # a function of a C extension need not tell its signature
        return
    try:
        signature.bind("", prompt="", ground_truth="", finish_reason="", domain="", prompt_id="")
    except TypeError as error:
        raise ConfigError(
            f"reward.function={spec}: {name}{signature} cannot be called as {name}(response, prompt=..., "
            f"ground_truth=..., finish_reason=..., domain=..., prompt_id=...): {error}. Write def {name}{_SIGNATURE}."
        ) from error
