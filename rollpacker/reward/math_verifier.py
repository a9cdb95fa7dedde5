r"""Mathematical equality of a response's answer and the ground truth, on top of math-verify (SymPy).

The answer is what the last complete \boxed{...} holds, or without a box the last expression that math-verify finds.
math-verify's own time limits are off: they need SIGALRM, and the reward scheduler already kills a score that is late.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from rollpacker.config import ConfigError

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_DELIMITED = re.compile(r"\$\$?([^$]+)\$?\$|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\[(\[]", re.DOTALL)
_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d+)?[eE][+-]?\d{1,3}")


def score(response: str, *, ground_truth: str, **_: Any) -> float:
    """Give 1.0 where the response's answer equals the ground truth (a number, LaTeX, boxed or bare), else 0.0.

    May run for long or take much memory on answers such as 9^{9^{9^9}}: run it where it can be killed.
    """
    parse, verify = _math_verify()
    expected = _bare(ground_truth)
    boxed = last_boxed(response)
    answer = _bare(response if boxed is None else boxed)
    if answer == expected:
        return 1.0  # most right answers, without the cost of a parse
    gold = parse(_as_box(expected))
    target = parse(response if boxed is None else _as_box(answer))
    return float(verify(gold, target))


def extract_answer(response: str) -> str:
    """Give the response's answer as text: what its last box holds, or without a box all of it. No algebra is done."""
    return _bare(response)


def last_boxed(text: str) -> str | None:
    r"""Give what the last complete \boxed{...} or \fbox{...} holds, or None; braces inside may nest or be escaped."""
    open_braces: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"] or match["open"]:
            open_braces.append((match.end(), match["box"] is not None))
        elif match["close"] and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)]


def warm_up() -> None:
    """Import math-verify and its grammar (about 1 s), so that the first score does not pay for it."""
    parse, verify = _math_verify()
    verify(parse(_as_box(r"\frac{1}{2}")), parse("$x+1$"))


def _bare(text: str) -> str:
    r"""Take an answer out of its box, its $...$ or \(...\), and its power of ten (e reads as Euler's number)."""
    text = text.strip()
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed.strip()
    if match := _DELIMITED.fullmatch(text):
        text = next(group for group in match.groups() if group is not None).strip()
    return format(Decimal(text), "f") if _SCIENTIFIC.fullmatch(text) else text


def _as_box(text: str) -> str:
    r"""Mark all of `text` as one expression: bare, 2\pi reads as 2 and \sqrt{2} as nothing.

    Text with $...$ or \(...\) left in it is prose around mathematics, which math-verify reads best as it is.
    """
    return text if _PROSE.search(text) else rf"\boxed{{{text}}}"


@functools.cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[Any, Any], bool]]:
    """Import math-verify on first use: it costs about 1 s, which only the workers that need it should pay."""
    try:
        import math_verify
    except ImportError as error:
        raise ConfigError(
            f"reward.verifier=math needs the package math-verify, which does not import here ({error}): install it, "
            "or set reward.verifier=exact or reward.function."
        ) from error
    # It warns once that its time limits are off; that is on purpose here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse = functools.partial(math_verify.parse, parsing_timeout=None)
    verify = functools.partial(math_verify.verify, timeout_seconds=None)
    return parse, verify
