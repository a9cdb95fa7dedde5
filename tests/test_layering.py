"""The dependency rules of the architecture (its section 3): an `ast` walk over rollpacker/, then a fresh interpreter.

Imports inside functions count. A broken rule reads as file:line, what is imported, the rule, the fix. The second half
feeds small fake trees to the same checks: every rule can fail.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rollpacker"

# Standard library only, so that a login node without torch or MPI can run them.
PURE = (
    "types.py",
    "messages.py",
    "config.py",
    "config_checks.py",
    "config_file.py",
    "config_key.py",
    "config_simulator.py",
    "model_shape.py",
    "user_function.py",
    "memory_estimate.py",
    "loop.py",
    "policy/*.py",
    "data/domains.py",
    "data/files.py",
    "data/packing.py",
    "data/prompts.py",
    "data/tasks.py",
    "doctor/facts.py",
    "doctor/verdict.py",
    "launch/*.py",
    "profiling/bubble_report/*.py",
    "profiling/bubbles.py",
    "profiling/trace.py",
    "runtime/checkpoint_folder.py",
    "runtime/val_core.py",
    "weights/layout.py",
    "weights/plan.py",
    "weights/rounds.py",
)
# pyarrow only when a parquet file is named: it is in HEAVY, so importing data/files.py must not load it. numpy: looked
# for at run time and done without; it makes the arithmetic on millions of intervals faster.
PURE_THIRD_PARTY = {
    "config_file.py": {"yaml"},
    "data/files.py": {"pyarrow"},
    "profiling/bubble_report/intervals.py": {"numpy"},
}
HEAVY = ("torch", "vllm", "megatron", "mpi4py", "numpy", "transformers", "pyarrow")

FACTS = {
    "types", "messages", "config", "config_checks", "config_file", "config_simulator", "model_shape", "memory_estimate",
    "user_function",
}  # fmt: skip
BASE = {"comm", "platform", "profiling", "data"}
MECHANISMS = {"rollout", "reward", "training", "weights"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "messages": {"types"},
    "config_key": set(),
    "config_simulator": {"config_key"},
    "config": {"config_key", "config_simulator"},
    "config_checks": {"config"},
    "config_file": {"config", "config_checks"},
    "model_shape": {"config", "config_checks"},
    "user_function": {"config"},
    "memory_estimate": {"config", "model_shape"},
    "policy": FACTS,
    "loop": FACTS | {"policy"},
    **dict.fromkeys(BASE, FACTS | BASE),
    **dict.fromkeys(MECHANISMS, FACTS | BASE),
    "runtime": FACTS | BASE | MECHANISMS | {"policy", "loop"},
    "simulator": FACTS | BASE | {"policy", "loop"},
    "launch": FACTS,
    "doctor": FACTS | {"comm", "weights"},
    "cli": FACTS | BASE | MECHANISMS | {"loop", "runtime", "simulator", "launch", "doctor"},
    "__main__": {"cli"},
}
OWNERS = {
    "vllm": ("rollout/",),
    "megatron": ("training/", "weights/refit.py"),
    "mpi4py": ("comm/",),
    "pyarrow": ("data/files.py",),
}
OWNER_EXCEPTIONS = {
    (
        "platform/cpu.py",
        "megatron",
    ): "the stand-ins that let Megatron-core run without CUDA replace two of its functions",
}


@dataclass(frozen=True)
class Import:
    """One imported module: where (path below the package), what, and whether only a type checker sees it."""

    path: str
    line: int
    target: str
    is_for_typing: bool

    @property
    def part(self) -> str:
        """The folder, or the module at the top, that the importing file belongs to."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def root(self) -> str:
        return self.target.split(".")[0]

    @property
    def target_part(self) -> str | None:
        """The part of this package that is imported; None for other packages and for the top `__init__`."""
        names = self.target.split(".")
        return names[1] if names[0] == "rollpacker" and len(names) > 1 else None

    def breaks(self, rule: str, fix: str) -> str:
        return f"rollpacker/{self.path}:{self.line}: imports {self.target}. Rule: {rule}. Fix: {fix}."


class Tree:
    """The modules of a package folder and their imports."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.files = {p.relative_to(package).as_posix(): p for p in sorted(package.rglob("*.py"))}
        self.module_paths = {_dotted(path): path for path in self.files}
        self.imports = [i for path, file in self.files.items() for i in self._read(path, file)]

    def is_pure(self, target: str) -> bool:
        """Whether a dotted name is a pure module of this package, or the package itself, which imports nothing."""
        path = self.module_paths.get(target)
        return path is not None and (path == "__init__.py" or _is_pure_path(path))

    def _read(self, path: str, file: Path) -> Iterator[Import]:
        tree = ast.parse(file.read_text(encoding="utf-8"), path)
        for_typing = {
            id(node)
            for branch in ast.walk(tree)
            if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
            if not isinstance(branch.test, ast.UnaryOp)
            for statement in branch.body
            for node in ast.walk(statement)
        }
        for node in ast.walk(tree):
            for target in self._targets(node, path):
                yield Import(path, node.lineno, target, id(node) in for_typing)  # type: ignore[attr-defined]

    def _targets(self, node: ast.AST, path: str) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["rollpacker", *path.split("/")][: -node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in self.module_paths else base
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", None))
            if function in ("import_module", "__import__"):
                yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _dotted(path: str) -> str:
    return "rollpacker." + path.removesuffix(".py").replace("/", ".") if path != "__init__.py" else "rollpacker"


def _is_pure_path(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in PURE)


def pure_modules_stay_pure(tree: Tree) -> Iterator[str]:
    for i in tree.imports:
        is_allowed = (
            i.root in sys.stdlib_module_names or i.root in PURE_THIRD_PARTY.get(i.path, set()) or tree.is_pure(i.target)
        )
        if _is_pure_path(i.path) and not is_allowed:
            yield i.breaks(
                "pure modules import the standard library and pure modules only",
                "take what it computes as an argument, or move this code to the module that owns the dependency",
            )


def imports_point_down(tree: Tree) -> Iterator[str]:
    for i in tree.imports:
        if i.target_part in (None, i.part) or i.path == "__init__.py":
            continue
        # A mechanism that names a policy's type takes policy objects, so that stays forbidden even for a type checker.
        is_harmless = i.is_for_typing and tree.is_pure(i.target) and i.target_part != "policy"
        if i.part not in MAY_IMPORT:
            rule = f"every part of the package has its place, and {i.part} has none"
            yield i.breaks(rule, f"add {i.part} to MAY_IMPORT here and to section 3 of the architecture")
        elif i.target_part not in MAY_IMPORT[i.part] and not is_harmless:
            yield i.breaks(*_why_not(i))


def _why_not(i: Import) -> tuple[str, str]:
    """The rule that forbids this import, and the fix."""
    if {i.part, i.target_part} <= MECHANISMS:
        return (
            "rollout, reward, training and weights are siblings and never import each other",
            "let runtime/ pass it as an argument, or move what both need to data/ or comm/",
        )
    if i.target_part == "policy":
        return (
            "only loop, runtime and simulator import policy",
            "take the decision as a plain argument (timeout_s, tensor_parallel_size), never a policy object",
        )
    if i.part in BASE:
        return (
            "comm, platform, profiling and data do not import from the layers above them",
            "move the shared definition down, or pass it in from above",
        )
    allowed = ", ".join(sorted(MAY_IMPORT[i.part])) or "nothing of this package"
    return f"{i.part} may import {allowed}", "move the shared definition down, or pass it in from above"


def third_parties_have_one_owner(tree: Tree) -> Iterator[str]:
    for i in tree.imports:
        owners = OWNERS.get(i.root)
        if owners and not i.path.startswith(owners) and (i.path, i.root) not in OWNER_EXCEPTIONS:
            yield i.breaks(
                f"{i.root} is imported in {' and '.join(owners)} only",
                f"call it through {owners[0]}, or pass its result in",
            )


def init_files_stay_empty(tree: Tree) -> Iterator[str]:
    for path, file in tree.files.items():
        if path.endswith("/__init__.py") and file.read_text(encoding="utf-8").strip():
            yield (
                f"rollpacker/{path}:1: is not empty. Rule: __init__.py files stay empty, since what they import loads "
                "with every module of the folder. Fix: move its content to a module and import that."
            )


def the_top_init_imports_nothing(tree: Tree) -> Iterator[str]:
    for i in tree.imports:
        if i.path == "__init__.py":
            yield i.breaks("the top __init__.py holds the version and imports nothing", "import it where it is used")


RULES = [
    pure_modules_stay_pure,
    imports_point_down,
    third_parties_have_one_owner,
    init_files_stay_empty,
    the_top_init_imports_nothing,
]

_IMPORT_ALL = """
import importlib, json, sys
heavy, loaded_by = sys.argv[1].split(","), {}
for module in sys.argv[2:]:
    importlib.import_module(module)
    for name in heavy:
        if name in sys.modules:
            loaded_by.setdefault(name, module)
print(json.dumps(loaded_by))
"""


def pure_imports_load_nothing_heavy(tree: Tree) -> Iterator[str]:
    """Import every pure module in one fresh interpreter and look at sys.modules: what the ast walk cannot see."""
    modules = [module for module, path in tree.module_paths.items() if _is_pure_path(path)]
    command = [sys.executable, "-c", _IMPORT_ALL, ",".join(HEAVY), "rollpacker", *modules]
    done = subprocess.run(command, cwd=tree.package.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"a pure module cannot be imported:\n{done.stderr}"
    for name, module in json.loads(done.stdout).items():
        path = tree.module_paths[module]
        yield (
            f"rollpacker/{path}:1: importing {module} loads {name}. Rule: pure modules run without {name}. "
            f"Fix: find the chain (python -X importtime -c 'import {module}') and cut it where this package starts it."
        )


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(PACKAGE)


@pytest.mark.parametrize("rule", [*RULES, pure_imports_load_nothing_heavy], ids=lambda rule: rule.__name__)
def test_the_package_obeys(tree: Tree, rule: Callable[[Tree], Iterator[str]]) -> None:
    broken = list(rule(tree))
    assert not broken, "\n" + "\n".join(broken)


def test_the_lists_above_are_not_stale(tree: Tree) -> None:
    for pattern in PURE:
        assert any(fnmatch(path, pattern) for path in tree.files), f"PURE names {pattern}, which is gone: remove it"
    used = {(i.path, i.root) for i in tree.imports}
    for exception in OWNER_EXCEPTIONS:
        assert exception in used, f"OWNER_EXCEPTIONS holds {exception}, which nothing needs: remove it"


def fake_tree(folder: Path, files: dict[str, str]) -> Tree:
    """A package `rollpacker` of the given files below `folder`."""
    package = folder / "rollpacker"
    for path, text in {"__init__.py": "", **files}.items():
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return Tree(package)


def broken_rules(tree: Tree) -> list[str]:
    return [line for rule in RULES for line in rule(tree)]


@pytest.mark.parametrize(
    ("files", "where", "rule"),
    [
        ({"types.py": "import os\nimport numpy as np\n"}, "types.py:2: imports numpy", "pure modules import"),
        ({"config.py": "import yaml\n"}, "config.py:1: imports yaml", "pure modules import"),
        ({"policy/plain.py": "def f():\n    from torch import Tensor\n"}, "plain.py:2: imports torch", "pure modules"),
        (
            {"data/prompts.py": "from rollpacker.data import io\n", "data/io.py": ""},
            "data/prompts.py:1: imports rollpacker.data.io",
            "pure modules import",
        ),
        (
            {"loop.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"},
            "loop.py:3: imports torch",
            "pure modules import",
        ),
        ({"rollout/engine.py": "import rollpacker.training.loss\n"}, "engine.py:1", "siblings and never import"),
        ({"weights/refit.py": "from ..training import loss\n"}, "refit.py:1: imports rollpacker.training", "siblings"),
        (
            {"reward/scheduler.py": "def f():\n    from rollpacker.policy.timeout import AdaptiveTimeout\n"},
            "reward/scheduler.py:2: imports rollpacker.policy.timeout",
            "only loop, runtime and simulator import policy",
        ),
        (
            {
                "training/a.py": "import typing\nif typing.TYPE_CHECKING:\n    import rollpacker.policy.b\n",
                "policy/b.py": "",
            },
            "training/a.py:3",
            "only loop, runtime and simulator import policy",
        ),
        ({"cli/train.py": "from rollpacker.policy import plain\n"}, "cli/train.py:1", "simulator import policy"),
        (
            {"comm/world.py": "import rollpacker.runtime.worker\n"},
            "comm/world.py:1",
            "comm, platform, profiling and data",
        ),
        ({"profiling/nvtx.py": "import rollpacker.training.loss\n"}, "nvtx.py:1", "comm, platform, profiling and data"),
        (
            {"messages.py": "from rollpacker import config\n", "config.py": ""},
            "messages.py:1",
            "messages may import types",
        ),
        ({"policy/a.py": "import rollpacker.loop\n", "loop.py": ""}, "policy/a.py:1", "policy may import config"),
        ({"runtime/a.py": "import rollpacker.cli.main\n"}, "runtime/a.py:1", "runtime may import comm"),
        (
            {"runtime/a.py": "if not TYPE_CHECKING:\n    import rollpacker.cli.main\n"},
            "runtime/a.py:2",
            "runtime may import",
        ),
        ({"storage/a.py": "import rollpacker.config\n"}, "storage/a.py:1", "every part of the package has its place"),
        ({"runtime/worker.py": "from vllm import LLM\n"}, "worker.py:1: imports vllm", "in rollout/ only"),
        (
            {"weights/hf.py": "import megatron.core\n"},
            "hf.py:1: imports megatron.core",
            "training/ and weights/refit.py",
        ),
        ({"platform/cuda.py": "import megatron.core\n"}, "cuda.py:1: imports megatron.core", "training/ and weights/"),
        ({"runtime/a.py": "import importlib\nimportlib.import_module('mpi4py.MPI')\n"}, "a.py:2", "in comm/ only"),
        ({"comm/__init__.py": "from rollpacker.comm.world import World\n"}, "comm/__init__.py:1", "stay empty"),
        ({"__init__.py": '"""Doc."""\nimport os\n'}, "__init__.py:2: imports os", "imports nothing"),
    ],
)
def test_each_rule_can_fail(tmp_path: Path, files: dict[str, str], where: str, rule: str) -> None:
    (line,) = broken_rules(fake_tree(tmp_path, files))
    assert where in line
    assert rule in line
    assert "Fix: " in line


def test_what_the_rules_allow(tmp_path: Path) -> None:
    files = {
        "__init__.py": '"""Doc."""\n\n__version__ = "1"\n',
        "types.py": "from __future__ import annotations\nimport enum\n",
        "config.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollpacker.types import Prompt\n",
        "config_file.py": "import yaml\nfrom rollpacker import __version__\nfrom rollpacker.config import Config\n",
        "policy/__init__.py": "",
        "policy/plain.py": "from rollpacker.policy import routing\n",
        "policy/routing.py": "from ..types import Prompt\n",
        "loop.py": "import rollpacker.policy.plain\n",
        "platform/cpu.py": "def prepare():\n    import megatron.core\n",
        "training/model.py": "import megatron.core\nfrom rollpacker.platform.cpu import prepare\n",
        "weights/refit.py": "import megatron.core\n",
        "rollout/engine.py": "import vllm\nimport torch\n",
        "comm/world.py": "from mpi4py import MPI\n",
        "runtime/worker.py": "import rollpacker.rollout.engine, rollpacker.training.model, rollpacker.policy.plain\n",
        "cli/main.py": "def main():\n    from rollpacker.runtime import worker\n    from rollpacker import loop\n",
        "__main__.py": "from rollpacker.cli.main import main\n",
    }
    assert broken_rules(fake_tree(tmp_path, files)) == []


def test_a_hidden_heavy_import_is_found(tmp_path: Path) -> None:
    """A name that only exists at run time escapes the ast walk, not the interpreter."""
    hidden = "import importlib\nimportlib.import_module('num' + 'py')\n"
    tree = fake_tree(tmp_path, {"types.py": "", "config.py": hidden, "loop.py": "import rollpacker.config\n"})
    (tmp_path / "numpy.py").write_text("", encoding="utf-8")
    assert broken_rules(tree) == []
    (line,) = pure_imports_load_nothing_heavy(tree)
    assert "rollpacker/config.py:1: importing rollpacker.config loads numpy" in line
