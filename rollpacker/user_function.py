"""Functions that a user names as `path.py:name`: a reward function, a policy loss. Standard library only.

The file is run in this process; whatever it does wrong is a ConfigError that names its file and line.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollpacker.config import ConfigError


def load_user_function(key: str, spec: str, signature: str) -> Callable[..., Any]:
    """Load `spec`, "path.py:name", that the config has under `key`; `signature` is shown where it is no function."""
    file, colon, name = spec.rpartition(":")
    if not (file and colon and name.isidentifier()):
        raise ConfigError(f"{key}={spec}: expected path.py:name, for example my_functions.py:score.")
    path = Path(file).absolute()  # as tracebacks name it
    if not path.is_file():
        raise ConfigError(f"{key}={spec}: there is no file {path}. Relative paths start at the working directory.")
    module = _run_file(path, key, spec)
    if not hasattr(module, name):
        defined = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        near = difflib.get_close_matches(name, defined, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"It defines: {', '.join(defined) or 'no functions'}."
        raise ConfigError(f"{key}={spec}: {path} has no {name}. {hint}")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise ConfigError(
            f"{key}={spec}: {name} is a {type(function).__name__}, expected a function: def {name}{signature}."
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{key}={spec}: {name} is async, expected a plain function.")
    return function


def user_module_name(key: str) -> str:
    """The name in `sys.modules` of the file that was loaded for `key`: what else it defines can be found there."""
    return "rollpacker_" + key.replace(".", "_")


def _run_file(path: Path, key: str, spec: str) -> ModuleType:
    """Import the user's file as a module; the files beside it can be imported from it, as from a script."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module_name = user_module_name(key)
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{key}={spec}: {path} is not a Python file; expected path.py:name.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up here
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything, and stop the process too
        raise ConfigError(f"{key}={spec}: importing {describe_error(error, path)}") from error
    return module


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
