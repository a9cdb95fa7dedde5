"""What judges a response: the built-in verifiers and the user's own reward function.

This module is imported in every reward worker and stays light: standard library only, math-verify when asked for.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rollpacker.config import ConfigError

_SIGNATURE = "(response, *, prompt, ground_truth, finish_reason, **extra)"
_MODULE_NAME = "rollpacker_reward_function"


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
    file, colon, name = spec.rpartition(":")
    if not (file and colon and name.isidentifier()):
        raise ConfigError(f"reward.function={spec}: expected path.py:name, for example rewards.py:score.")
    path = Path(file).absolute()  # as tracebacks name it
    if not path.is_file():
        raise ConfigError(
            f"reward.function={spec}: there is no file {path}. Relative paths start at the working directory."
        )
    module = _run_file(path, spec)
    if not hasattr(module, name):
        defined = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == _MODULE_NAME]
        near = difflib.get_close_matches(name, defined, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"It defines: {', '.join(defined) or 'no functions'}."
        raise ConfigError(f"reward.function={spec}: {path} has no {name}. {hint}")
    reward: RewardFunction = getattr(module, name)
    _check_callable(reward, name, spec)
    extract_answer = getattr(module, "extract_answer", whole_text)
    if not callable(extract_answer):
        raise ConfigError(
            f"reward.function={spec}: extract_answer is a {type(extract_answer).__name__}, expected a function that reads "
            "the answer out of a response for maj@k: def extract_answer(response) -> str | None. Rename it otherwise."
        )
    return Verifier(reward, extract_answer)


def _run_file(path: Path, spec: str) -> ModuleType:
    """Import the user's file as a module; the files beside it can be imported from it, as from a script."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module_spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"reward.function={spec}: {path} is not a Python file; expected path.py:name.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickle look their module up here
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything, and stop the process too
        raise ConfigError(f"reward.function={spec}: importing {describe_error(error, path)}") from error
    return module


def _check_callable(reward: Any, name: str, spec: str) -> None:
    if not callable(reward):
        raise ConfigError(
            f"reward.function={spec}: {name} is a {type(reward).__name__}, expected a function: def {name}{_SIGNATURE}."
        )
    if inspect.iscoroutinefunction(reward):
        raise ConfigError(f"reward.function={spec}: {name} is async, expected a plain function; each worker runs one.")
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


def describe_error(error: BaseException, path: Path | None = None) -> str:
    """Put an exception of the user's code in one line: file and line (the innermost one in `path`), type, message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and frame.filename == str(path)]
    where = f"{(own or frames)[-1].filename} line {(own or frames)[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename} line {error.lineno}"
    # Not str(error): an exception class of the user's may fail at that too, and this one says so instead.
    lines = traceback.format_exception_only(error)
    text = " ".join(lines[-1 if isinstance(error, SyntaxError) else 0].split())
    return f"{where} raised {text if len(text) <= 500 else text[:497] + '...'}"
