"""The fake cluster, once a session; without Slurm these tests skip and say what is missing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing_programs
from jobs import Jobs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}; make test-slurm installs them where it may")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the tests early ends the cluster with them
    with Cluster() as running:
        yield running


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Jobs:
    return Jobs(cluster, tmp_path)
