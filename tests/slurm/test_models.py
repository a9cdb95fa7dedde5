"""The scripts for the paper's three models: accepted by Slurm as they are, and good by the program's own check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import REPOSITORY, Ended, Jobs, shim

sys.path.insert(0, str(REPOSITORY / "tests"))

from qwen import write_qwen_folder

DEMO = REPOSITORY / "assets" / "demo"
SIZES = {"7B": 2, "14B": 4, "32B": 8}


@pytest.fixture(scope="module")
def ended(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Path]]:
    """Each script with a folder of the model's real sizes; srun is played, since there are no GPUs to go on with."""
    running = {}
    for name in SIZES:
        folder = tmp_path_factory.mktemp(name)
        model = write_qwen_folder(folder / "model", name, tokenizer_of=DEMO / "model")
        inputs = [f"model.path={model}", f"data.train_files={DEMO / 'train.jsonl'}"]
        path = shim(folder, "srun", "exit 0")
        running[name] = (
            Jobs(cluster, folder).submit(f"slurm/train_qwen2.5_{name.lower()}.sh", *inputs, PATH=path),
            folder,
        )
    return {name: (job.wait(timeout_s=150), folder) for name, (job, folder) in running.items()}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("7B", "TP 2 x PP 1 x DP 8"), ("14B", "TP 2 x PP 2 x DP 8"), ("32B", "TP 8 x PP 2 x DP 4")],
)
def test_the_papers_jobs(ended: dict[str, tuple[Ended, Path]], name: str, shape: str) -> None:
    job, folder = ended[name]
    num_nodes = SIZES[name]
    assert job.code == 0, job.log
    assert f"ranks     {8 * num_nodes} on cuda, {num_nodes} node(s) of 8" in job.log
    assert shape in job.log and "The config is good" in job.log
    (srun,) = (folder / "srun.log").read_text().splitlines()
    assert srun.startswith("--kill-on-bad-exit=1 --mpi=pmix --export=ALL --cpus-per-task=2 --distribution=block:block")
    assert f"python3 -m rollpacker train configs/qwen2.5_{name.lower()}_" in srun
