"""A build of the extension that fails leaves no earlier module behind, and fails the command where it was demanded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("cuda", ["AUTO", "ON"])
def test_a_failed_build_leaves_no_old_module(tmp_path: Path, cuda: str) -> None:
    """Without csrc/ no CMake succeeds. Both places of an earlier build: the sources and setuptools' own copy."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    library = f"build/lib.{sysconfig.get_platform()}-cpython-{python.replace('.', '')}"
    for root in (tmp_path, tmp_path / library):
        module = root / "rollpacker" / "weights" / f"_reshard{sysconfig.get_config_var('EXT_SUFFIX')}"
        module.parent.mkdir(parents=True)
        module.write_bytes(b"an earlier build")
    for package in ("rollpacker", "rollpacker/weights"):
        (tmp_path / package / "__init__.py").write_text("__version__ = '0'\n")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"ROLLPACKER_CUDA": cuda}, capture_output=True, text=True, check=False
    )
    assert "rollpacker.weights._reshard" in result.stderr
    assert list(tmp_path.rglob("*.so")) == []
    assert (result.returncode == 0) == (cuda == "AUTO"), result.stderr


def test_the_package_carries_what_its_batch_scripts_source(tmp_path: Path) -> None:
    """A link in a checkout, a file once installed."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    installed = tmp_path / "rollpacker" / "launch" / "common.sh"
    assert not installed.is_symlink()
    assert installed.read_text() == (REPOSITORY / "slurm" / "common.sh").read_text()
