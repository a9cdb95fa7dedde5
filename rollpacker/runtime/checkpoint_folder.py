"""The folder of a run's checkpoints: which there are, whether they are whole, and how one appears (all at once) and goes.

    checkpoints/latest             the name of the newest one, renamed into place last of all
    checkpoints/step_12/           manifest.json (size and checksum of every other file), run.json (what rank 0 knows of the
                                   run), megatron/ (weights and optimizer), and at a run's end huggingface/
    checkpoints/step_13.partial/   one that is being written, or whose run was killed in between

Invariants: a folder without ".partial" was whole when it got its name; `latest` names a whole one. Files are written, flushed
to the disk and then renamed, so a kill at any moment leaves the checkpoint before.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RUN_STATE = "run.json"
MEGATRON = "megatron"
EXPORTED = "huggingface"
"""Weights for others to read; no part of a checkpoint, and outlives it."""
_LATEST = "latest"
_PARTIAL = ".partial"
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class FileFacts:
    """What a file must be to be the one that was written."""

    num_bytes: int
    crc32: int


def read_facts(path: Path) -> FileFacts:
    """Size and checksum of a file. Raises OSError."""
    num_bytes, checksum = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            num_bytes += len(block)
            checksum = zlib.crc32(block, checksum)
    return FileFacts(num_bytes, checksum)


class CheckpointFolder:
    """`<run directory>/checkpoints`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps lies."""
        return self.root / f"step_{step}"

    def partial(self, step: int) -> Path:
        """Where it is written."""
        return self.root / f"step_{step}{_PARTIAL}"

    def prepare(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` to; what was never finished goes. Raises OSError."""
        folder = self.partial(step)
        self._remove_partial()
        (folder / MEGATRON).mkdir(parents=True)
        return folder

    def complete(self, step: int, facts: Mapping[str, FileFacts], about: Mapping[str, Any]) -> None:
        """Give the partial checkpoint its manifest and its name; `about` goes into the manifest. Raises OSError."""
        folder, target = self.partial(step), self.path(step)
        files = {name: [f.num_bytes, f.crc32] for name, f in sorted(facts.items())}
        write_durably(folder / MANIFEST, json.dumps({**about, "step": step, "files": files}, indent=1))
        for inner in (folder / MEGATRON, folder):
            _flush_folder(inner)
        if target.exists():  # it was found damaged, and its step was done again
            if (target / EXPORTED).exists():
                (target / EXPORTED).rename(folder / EXPORTED)
            target.rename(target.with_name(f"{target.name}.damaged{_PARTIAL}"))
        folder.rename(target)
        _flush_folder(self.root)
        write_durably(self.root / _LATEST, target.name + "\n")

    def prune(self, keep_last: int | None) -> None:
        """Remove all but the newest `keep_last` checkpoints (None keeps all), and what was never finished.

        Exported weights stay.
        """
        self._remove_partial()
        for step in self.steps()[keep_last:] if keep_last else []:
            folder = self.path(step)
            (folder / MANIFEST).unlink(missing_ok=True)  # first: what is half removed counts as none
            for inner in folder.iterdir():
                if inner.name != EXPORTED:
                    shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()

    def _remove_partial(self) -> None:
        for folder in self.root.glob(f"step_*{_PARTIAL}"):
            shutil.rmtree(folder, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first; the one that `latest` names foremost."""
        found = []
        for manifest in self.root.glob(f"step_*/{MANIFEST}"):
            number = manifest.parent.name.removeprefix("step_")
            if number.isdecimal():
                found.append(int(number))
        found.sort(reverse=True)
        try:
            latest = (self.root / _LATEST).read_text(encoding="utf-8").strip().removeprefix("step_")
        except OSError:
            return found
        if latest.isdecimal():  # named, but no longer there: it is looked at all the same, and reported
            found = [int(latest), *(step for step in found if step != int(latest))]
        return found


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """What rank 0 knew of the run. Raises OSError and ValueError."""
    state: dict[str, Any] = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
    return state


def damage(checkpoint: Path, part: int = 0, num_parts: int = 1, *, reads: bool = True) -> str | None:
    """What is wrong with a checkpoint, None if nothing is: each of `num_parts` callers reads a share of the files.

    Without `reads` only their sizes are compared.
    """
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: FileFacts(*facts) for name, facts in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name in sorted(expected, key=lambda name: expected[name].num_bytes)[part::num_parts]:
        wrong = _wrong(checkpoint / name, expected[name], reads=reads)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _wrong(path: Path, expected: FileFacts, *, reads: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"{size:,} bytes, expected {expected.num_bytes:,}"
        return None if not reads or read_facts(path) == expected else "its checksum differs from the manifest's"
    except OSError as error:
        return error.strerror or str(error)


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that after a crash it holds the old text or the new one. Raises OSError."""
    aside = path.with_name(path.name + _PARTIAL)
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _flush_folder(path.parent)


def flush(paths: Iterable[Path]) -> None:
    """Wait until files are on the disk. Raises OSError."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
