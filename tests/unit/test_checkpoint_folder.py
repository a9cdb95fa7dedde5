"""How checkpoints appear, are found damaged, and go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollpacker.runtime.checkpoint_folder import (
    EXPORTED,
    MANIFEST,
    MEGATRON,
    CheckpointFolder,
    damage,
    read_facts,
    read_run_state,
)


def write(folders: CheckpointFolder, step: int) -> Path:
    """A checkpoint of two files."""
    partial = folders.prepare(step)
    (partial / MEGATRON / "weights").write_bytes(bytes(range(200)) * step)
    (partial / "run.json").write_text(json.dumps({"step": step}))
    names = (f"{MEGATRON}/weights", "run.json")
    folders.complete(step, {name: read_facts(partial / name) for name in names}, {"num_ranks": 2})
    return folders.path(step)


@pytest.fixture
def folders(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_a_whole_checkpoint_is_found_and_is_whole(folders: CheckpointFolder) -> None:
    assert folders.steps() == []
    for step in (2, 10):
        write(folders, step)
    assert folders.steps() == [10, 2]
    assert (folders.root / "latest").read_text() == "step_10\n"
    assert all(damage(folders.path(step)) is None for step in (2, 10))
    assert read_run_state(folders.path(10)) == {"step": 10}
    assert sorted(p.name for p in folders.root.iterdir()) == ["latest", "step_10", "step_2"]


def test_latest_comes_first_even_where_it_is_gone(folders: CheckpointFolder) -> None:
    """A newest checkpoint that somebody removed is reported, not passed over in silence."""
    for step in (1, 2):
        write(folders, step)
    (folders.root / "latest").write_text("step_3\n")
    assert folders.steps() == [3, 2, 1]
    assert "manifest.json cannot be read" in (damage(folders.path(3)) or "")
    (folders.root / "latest").write_text("nonsense")
    assert folders.steps() == [2, 1]


def test_one_that_is_being_written_counts_for_nothing(folders: CheckpointFolder) -> None:
    write(folders, 1)
    partial = folders.prepare(2)
    (partial / MANIFEST).write_text("{}")
    assert folders.steps() == [1]
    assert folders.prepare(2) == partial and not (partial / MANIFEST).exists()  # begun anew
    folders.prune(None)
    assert not partial.exists() and folders.steps() == [1]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / MEGATRON / "weights").unlink(), "megatron/weights: No such file"),
        (lambda f: (f / MEGATRON / "weights").write_bytes(b"short"), "megatron/weights: 5 bytes, expected 200"),
        (lambda f: (f / MEGATRON / "weights").write_bytes(bytes(200)), "megatron/weights: its checksum differs"),
        (lambda f: (f / MANIFEST).write_text("{"), "manifest.json cannot be read"),
        (lambda f: (f / MANIFEST).write_text('{"files": [1]}'), "manifest.json cannot be read"),
    ],
)
def test_damage_is_named(folders: CheckpointFolder, harm, words: str) -> None:  # type: ignore[no-untyped-def]
    folder = write(folders, 1)
    harm(folder)
    seen = [damage(folder, part, 3) for part in range(3)]  # however the files are shared out
    assert any(words in (text or "") for text in seen), seen


def test_sizes_alone_do_not_show_a_turned_bit(folders: CheckpointFolder) -> None:
    folder = write(folders, 1)
    (folder / MEGATRON / "weights").write_bytes(bytes(200))
    assert damage(folder, reads=False) is None and damage(folder) is not None


def test_the_newest_are_kept_and_exported_models_stay(folders: CheckpointFolder) -> None:
    for step in (1, 2, 3):
        write(folders, step)
    (folders.path(1) / EXPORTED).mkdir()
    (folders.path(1) / EXPORTED / "config.json").write_text("{}")
    folders.prune(keep_last=1)
    assert folders.steps() == [3]
    assert sorted(p.name for p in folders.root.iterdir()) == ["latest", "step_1", "step_3"]
    assert [p.name for p in folders.path(1).iterdir()] == [EXPORTED]


def test_a_step_done_again_replaces_its_damaged_checkpoint(folders: CheckpointFolder) -> None:
    folder = write(folders, 1)
    (folder / EXPORTED).mkdir()
    (folder / "run.json").write_text("damaged")
    write(folders, 1)
    assert damage(folders.path(1)) is None and (folder / EXPORTED).is_dir()
