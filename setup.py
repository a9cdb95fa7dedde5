"""Builds the module rollpacker.weights._reshard from csrc/ with CMake; everything declarative is in pyproject.toml.

Environment: ROLLPACKER_CUDA=AUTO|ON|OFF (default AUTO: CUDA kernels where nvcc works), CMAKE_ARGS, MAX_JOBS. Without CMake,
nanobind or a compiler the package still installs, unless ROLLPACKER_CUDA=ON; then only weights.refit=golden runs. A build
that fails leaves no module of an earlier one behind.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
MODULE = "rollpacker.weights._reshard"


class CMakeBuild(build_ext):
    """Runs CMake in build/cmake-<python tag>, which is kept, and puts the module where setuptools expects it."""

    def run(self) -> None:
        """Build; a module among the sources is replaced by this build's or by none."""
        if self.inplace:
            Path(self.get_ext_fullpath(MODULE)).unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Configure, build and copy; CompileError, which an optional extension survives, if anything fails."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)
        build = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}"
        options = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DROLLPACKER_CUDA={os.environ.get('ROLLPACKER_CUDA', 'AUTO')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        if ninja := shutil.which("ninja", path=self._path()):
            # Named each time: the one that an isolated build cached is gone.
            options += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        self._cmake("-S", str(ROOT / "csrc"), "-B", str(build), *options)
        self._cmake("--build", str(build), "--target", "_reshard", "-j", jobs)
        built = next(build.glob("_reshard*.so"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)

    def _cmake(self, *arguments: str) -> None:
        cmake = shutil.which("cmake", path=self._path())
        if cmake is None:
            raise CompileError(f"{MODULE} needs cmake, which is not there: pip install cmake")
        try:
            subprocess.run([cmake, *arguments], check=True)
        except subprocess.CalledProcessError as error:
            raise CompileError(f"{MODULE}: {shlex.join(error.cmd)} failed") from error

    def _path(self) -> str:
        """Programs of this Python's environment first, whether or not it has been activated."""
        return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


is_optional = os.environ.get("ROLLPACKER_CUDA") != "ON"
setup(ext_modules=[Extension(MODULE, sources=[], optional=is_optional)], cmdclass={"build_ext": CMakeBuild})
