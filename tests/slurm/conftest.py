"""The fake cluster, once a session; without Slurm these tests skip and say what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing_programs
from jobs import Jobs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}; make test-slurm installs them where it may")
    with Cluster() as running:
        yield running


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Jobs:
    return Jobs(cluster, tmp_path)
