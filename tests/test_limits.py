"""The limits of style (the architecture, sections 4 to 6): sizes, exceptions, prints, names, paths, quoted commands.

A broken limit reads as file:line, what is wrong, the fix. The second half feeds small texts to the same checks.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

BANNED_WORDS = {"util", "utils", "helper", "helpers", "manager", "managers", "strategy", "strategies", "v2", "async"}
BANNED_PAIRS = {("meta", "info")}

# A path that exists on one machine only. After a name, a variable or a dot it does not start at the root: src/tmp/.
MACHINE_PATH = re.compile(r"(?<![\w.~$})*-])/(?:work|tmp|home|root)/")
NOQA_WITH_REASON = re.compile(r"#\s*noqa:\s*BLE001\s*\(\s*\S.*\)")


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def tracked_files() -> list[Path]:
    """Every file under version control (also where the checkout belongs to another user)."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def long_files(where: str, text: str) -> Iterator[str]:
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{where}:1: {num_lines} lines, at most {MAX_FILE_LINES}. Fix: split the file by idea."


def long_functions(where: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield (
                    f"{where}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}. "
                    "Fix: split the function by idea."
                )


def broad_excepts(where: str, text: str) -> Iterator[str]:
    """Handlers that swallow any error without saying why. One that ends by raising swallows nothing (ruff agrees)."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        is_broad = any(k is None or ast.unparse(k) in ("Exception", "BaseException") for k in kinds)
        if is_broad and not NOQA_WITH_REASON.search(lines[node.lineno - 1]):
            yield (
                f"{where}:{node.lineno}: a broad except. Fix: name the errors that are expected, or add "
                "`# noqa: BLE001 (the reason)`."
            )


def prints(where: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{where}:{node.lineno}: print() outside cli/. Fix: log it on rank 0, or return it to the CLI."


def banned_names(where: str, text: str) -> Iterator[str]:
    """Words that name no idea, in the name of the module, of its folders, or of a class."""
    names = [(1, part) for part in where.removesuffix(".py").split("/")]
    names += [(n.lineno, n.name) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)]
    for line, name in names:
        words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z0-9])|[A-Z]?[a-z0-9]+", name)]
        banned = BANNED_WORDS.intersection(words)
        banned |= {"_".join(pair) for pair in pairwise(words) if pair in BANNED_PAIRS}
        for word in sorted(banned):
            yield f"{where}:{line}: {name} holds the banned word {word}. Fix: name it after its main idea."


def machine_paths(where: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := MACHINE_PATH.search(line):
            yield (
                f"{where}:{number}: the absolute path {line[match.start() :].split()[0]} exists on one machine only. "
                "Fix: a path relative to the repository, a config key or an argument."
            )


def quoted_targets(markdown: str) -> Iterator[tuple[int, str]]:
    """Line and target of each `make TARGET` in code. `make a | b` in a code span lists alternatives, as the docs do."""
    in_block = False
    for number, line in enumerate(markdown.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            in_block = not in_block
            continue
        for code in [line] if in_block else re.findall(r"`([^`]+)`", line):
            command = re.sub(r"(?:^|\s)#.*", "", code)
            for match in re.finditer(r"(?:^|[;&|($]|\w=\S*)\s*make\s+([^;&]*)", command):
                first, *alternatives = match[1].split("|")
                yield from ((number, word) for word in first.split() if _is_target(word))
                if not in_block:
                    yield from ((number, a.strip()) for a in alternatives if _is_target(a.strip()))


def _is_target(word: str) -> bool:
    return re.fullmatch(r"[\w%.-]*\w", word) is not None and not word.startswith(("-", "."))


def unknown_targets(where: str, text: str, makefile: str) -> Iterator[str]:
    rules = re.findall(r"^([^\s:#=][^:=\n]*):(?!=)", makefile, re.MULTILINE)
    known = [re.escape(t).replace("%", ".+") for rule in rules for t in rule.split() if not t.startswith((".", "$"))]
    for number, target in quoted_targets(text):
        if not any(re.fullmatch(pattern, target) for pattern in known):
            yield f"{where}:{number}: the Makefile has no target {target}. Fix: quote one that exists, or add it."


@pytest.mark.parametrize(
    ("check", "folders"),
    [
        (long_files, ("rollpacker", "tools")),
        (long_functions, ("rollpacker", "tools")),
        (broad_excepts, ("rollpacker", "tools")),
        (banned_names, ("rollpacker", "tools", "tests")),
    ],
    ids=["long_files", "long_functions", "broad_excepts", "banned_names"],
)
def test_the_code_keeps_the_limit(check: Callable[[str, str], Iterator[str]], folders: tuple[str, ...]) -> None:
    found = [
        line
        for file in python_files(*folders)
        for line in check(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_only_the_cli_prints() -> None:
    files = [f for f in python_files("rollpacker") if f.relative_to(ROOT / "rollpacker").parts[0] != "cli"]
    found = [line for f in files for line in prints(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_no_file_names_a_path_of_one_machine() -> None:
    found: list[str] = []
    for file in tracked_files():
        where = file.relative_to(ROOT).as_posix()
        content = file.read_bytes()
        if not where.startswith("tests/") and b"\0" not in content:
            found += machine_paths(where, content.decode("utf-8", errors="replace"))
    assert not found, "\n" + "\n".join(found)


def test_the_docs_quote_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found: list[str] = []
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found += unknown_targets(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"), makefile)
    assert not found, "\n" + "\n".join(found)


def body(num_lines: int) -> str:
    return "    pass\n" * num_lines


@pytest.mark.parametrize(
    ("check", "text", "lines"),
    [
        (long_files, "x = 1\n" * 400, []),
        (long_files, "x = 1\n" * 401, [1]),
        (long_functions, "def f():\n" + body(59), []),
        (long_functions, "@cached\ndef f():\n" + body(60), [2]),
        (long_functions, "class A:\n  async def f():\n" + body(60), [2]),
        (broad_excepts, "try:\n    f()\nexcept OSError:\n    pass\n", []),
        (
            broad_excepts,
            "try:\n    f()\nexcept Exception:  # noqa: BLE001 (a plug-in may raise anything)\n    pass\n",
            [],
        ),
        (broad_excepts, "try:\n    f()\nexcept Exception as e:\n    raise ValueError from e\n", []),
        (broad_excepts, "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass\n", [3]),
        (broad_excepts, "try:\n    f()\nexcept Exception:  # noqa: BLE001 ()\n    pass\n", [3]),
        (broad_excepts, "try:\n    f()\nexcept (OSError, BaseException):\n    pass\n", [3]),
        (broad_excepts, "try:\n    f()\nexcept:\n    pass\n", [3]),
        (prints, "console.print(1)\nf = print\n", []),
        (prints, "def f():\n    print(1)\n", [2]),
        (banned_names, "class Resource:\n    pass\n", []),
        (banned_names, "class KVCacheManager:\n    pass\n", [1]),
        (banned_names, "x = 1\nclass EngineV2:\n    pass\n", [2]),
        (banned_names, "class MetaInfo:\n    pass\n", [1]),
        (banned_names, "class AsyncEngine:\n    pass\n", [1]),
        (machine_paths, "src/tmp/x ./tmp/x $DIR/tmp/x ${DIR:-/tmp/} ~/work/x https://a.org/home/x /usr/bin/env\n", []),
        (machine_paths, "a\n'/tmp/x'\n", [2]),
        (machine_paths, "#SBATCH --output=/home/me/%j.out\n", [1]),
        (machine_paths, "see file:///root/x\n/work/a\n", [1, 2]),
    ],
)
def test_each_limit_can_fail(check: Callable[[str, str], Iterator[str]], text: str, lines: list[int]) -> None:
    found = list(check("rollpacker/a.py", text))
    assert [line.split(": ")[0] for line in found] == [f"rollpacker/a.py:{n}" for n in lines]


@pytest.mark.parametrize("name", ["rollpacker/utils.py", "rollpacker/comm_helpers/a.py", "tools/engine_async.py"])
def test_module_names_are_checked_too(name: str) -> None:
    assert len(list(banned_names(name, ""))) == 1


def test_quoted_targets_are_found_and_checked() -> None:
    makefile = ".PHONY: demo test\nBIN := x\ndemo test: env\n\t$(RUN)\ntest-mpi-%: $(VENV)/.ready\n$(VENV)/.mpi:\n"
    markdown = (
        "`make demo` and make sure, `make test | bench`, `cmake build`\n"
        "```\n$ make -j2 RANKS=4 test-mpi-4 lint  # make noise\nmake demo | tee log && make test-mpi-\n```\n"
        "`make PYTHON=python3.12 ...`\n"
    )
    assert list(quoted_targets(markdown)) == [
        (1, "demo"),
        (1, "test"),
        (1, "bench"),
        (3, "test-mpi-4"),
        (3, "lint"),
        (4, "demo"),
    ]
    found = list(unknown_targets("README.md", markdown, makefile))
    assert [line.split(".")[1] for line in found] == [
        "md:1: the Makefile has no target bench",
        "md:3: the Makefile has no target lint",
    ]
