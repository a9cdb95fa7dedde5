"""`rollpacker doctor` alone and under mpirun; a folder that ranks do not share."""

from __future__ import annotations

import sys
from pathlib import Path

from commands import run

PROGRAM = [sys.executable, "-m", "rollpacker", "doctor"]


def test_alone() -> None:
    done = run(PROGRAM, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rank(s) on 1 node(s)" in done.stdout and "one rank: nothing to measure" in done.stdout
    assert "A run can start here" in done.stdout


def test_two_ranks_with_a_folder_of_their_own_each(tmp_path: Path) -> None:
    """`.` of two working folders: rank 1 looks for rank 0's file in vain."""
    folders = [tmp_path / "a", tmp_path / "b"]
    command = ["mpirun", "--oversubscribe", "--bind-to", "none"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        command += [*([":"] if number else []), "-n", "1", "--wdir", str(folder), *PROGRAM]
    done = run(command, timeout_s=90)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 rank(s) on 1 node(s)" in done.stdout and "gloo all-reduce   ok" in done.stdout
    assert "rank 1: a file of rank 0 was not seen within 15 s" in " ".join(done.stdout.split())
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
