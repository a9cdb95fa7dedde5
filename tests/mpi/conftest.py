"""Every test here runs on all ranks of one world at once: `mpiexec -n N python -m pytest tests/mpi` (make test-mpi-N).

A rank that fails says so and ends the job, or the others would wait for it in a collective.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rollpacker.comm.world import World, init_torch_distributed, join_world
from rollpacker.platform.device import Platform, select_platform

sys.path.insert(0, str(Path(__file__).parents[1]))

_WORLD = join_world()


@pytest.fixture(scope="session")
def world() -> World:
    return _WORLD


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="what the ranks compute on")
    parser.addoption("--rounds", type=int, default=10, help="rounds of tests/mpi/test_tail_batching.py")
    parser.addoption("--rollout-tp", type=int, help="rollout TP of test_tail_batching.py (default: 2 where it fits)")


@pytest.fixture(scope="session")
def platform(world: World, request: pytest.FixtureRequest) -> Platform:
    """The platform of --device with torch.distributed up."""
    platform = select_platform(request.config.getoption("--device"))
    platform.prepare(world.local_rank)
    init_torch_distributed(world, platform.torch_backend, 120.0)
    return platform


@pytest.fixture(scope="session")
def shared_tmp(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One temporary folder for all ranks."""
    mine = str(tmp_path_factory.mktemp("shared")) if world.rank == 0 else None
    return Path(world.comm.bcast(mine))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        sys.stderr.write(f"\n=== rank {_WORLD.rank} of {_WORLD.size} failed {item.nodeid}\n{report.longreprtext}\n")
        sys.stderr.flush()
        _WORLD.comm.Abort(1)


def pytest_internalerror(excrepr: object) -> None:
    sys.stderr.write(f"\n=== rank {_WORLD.rank} of {_WORLD.size}: {excrepr}\n")
    sys.stderr.flush()
    _WORLD.comm.Abort(1)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if _WORLD.rank > 0:  # one report is enough; failures print themselves
        config.pluginmanager.unregister(name="terminalreporter")
