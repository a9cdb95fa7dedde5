"""From what stands on the command line to `Source`s: files, folders, reports that need converting, names of hosts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rollpacker.profiling.bubble_report.chrome import read_chrome
from rollpacker.profiling.bubble_report.model import BadTrace, Source
from rollpacker.profiling.bubble_report.nsys_source import read_nsys
from rollpacker.profiling.bubble_report.stage_names import StageNamer

_REPORT_MAGIC = b"NVIDIA Tegra Profiler Report"
_SQLITE, _REPORT, _JSON = (".sqlite", ".sqlite3", ".db"), (".nsys-rep", ".qdrep"), (".json", ".json.gz")
_PEEK = 1 << 16


def read_sources(paths: Sequence[str], namer: StageNamer, nodes: Sequence[str] = ()) -> list[Source]:
    """Every trace below `paths`, in a fixed order; `nodes` are NAME (for all files) or FILE=NAME.

    Raises BadTrace for a file that is missing, damaged or no trace, and for paths without any trace.
    """
    files = find_files(paths)
    hosts = match_files(files, [node for node in nodes if "=" in node], "--node")
    for_all = [node for node in nodes if "=" not in node]
    return [_read(file, namer, hosts.get(file, for_all[-1] if for_all else None)) for file in files]


def find_files(paths: Sequence[str]) -> list[Path]:
    """The trace files among and below `paths`, each once, sorted. A report beside its own export is left out."""
    found: set[Path] = set()
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = [p for p in path.rglob("*") if p.is_file() and _is_trace_name(p)]
            inside = [p for p in inside if not (p.name.endswith(_JSON) and not _looks_like_trace(p))]
            if not inside:
                raise BadTrace(
                    f"{path}: a folder without traces; expected .sqlite, .nsys-rep, .json or .json.gz files."
                )
            found.update(inside)
        elif path.is_file():
            found.add(path)
        else:
            raise BadTrace(f"{path}: no such file or folder.")
    resolved = {path.resolve(): path for path in sorted(found)}
    reports = {p.with_suffix("") for p in resolved if p.name.endswith(_SQLITE)}
    kept = [p for p in resolved if not (p.name.endswith(_REPORT) and p.with_suffix("") in reports)]
    return sorted(resolved[p] for p in kept)


def match_files(files: Sequence[Path], settings: Sequence[str], option: str) -> dict[Path, str]:
    """`FILE=VALUE` settings by file. FILE is a path, a file's name, or a folder above it. Raises BadTrace."""
    matched: dict[Path, str] = {}
    for setting in settings:
        name, separator, value = setting.rpartition("=")
        if not separator or not name or not value:
            raise BadTrace(f"{option} {setting!r}: expected FILE=VALUE.")
        target = Path(name).resolve()
        chosen = [f for f in files if f.name == name or f.resolve() == target or target in f.resolve().parents]
        if not chosen:
            known = ", ".join(sorted({f.name for f in files})[:5])
            raise BadTrace(f"{option} {setting!r}: none of the traces is called {name}; they are {known}.")
        matched.update(dict.fromkeys(chosen, value))
    return matched


def _read(path: Path, namer: StageNamer, host: str | None) -> Source:
    try:
        with path.open("rb") as file:
            head = file.read(64)
        if not head:
            raise BadTrace(f"{path}: an empty file. Copy or record it again.")
        if head.startswith(b"SQLite format 3") or path.name.endswith(_SQLITE):
            return read_nsys(path, namer, host)
        if head.startswith(_REPORT_MAGIC) or path.name.endswith(_REPORT):
            source = read_nsys(_converted(path), namer, host)
            source.path = str(path)  # what the user named, not its export in the cache
            return source
        if head[:2] == b"\x1f\x8b" or path.name.endswith(_JSON) or head.lstrip()[:1] in (b"{", b"["):
            if head.strip(b"\0") == b"":
                raise BadTrace(f"{path}: nothing but zeros at its start; the file was never written in full.")
            return read_chrome(path, namer, host)
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "not enough memory"
        raise BadTrace(f"{path}: cannot be read ({reason}).") from error
    except (TypeError, OverflowError, AttributeError) as error:  # text where a number belongs, and the like
        raise BadTrace(f"{path}: holds values that make no sense ({error}); the file is damaged.") from error
    raise BadTrace(f"{path}: neither an nsys export (.sqlite), a report (.nsys-rep) nor a trace (.json, .json.gz).")


def _converted(path: Path) -> Path:
    """The export of a report, made with the nsys command and kept in the user's cache."""
    command = shutil.which("nsys")
    if command is None:
        raise BadTrace(
            f"{path}: a report of Nsight Systems, which only its own `nsys` command reads, and that is not on the PATH. "
            f"Where it is installed run: nsys export -t sqlite {path.name}   and give the .sqlite file."
        )
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollpacker" / "nsys"
    target = cache / f"{path.name.removesuffix('.nsys-rep')}.{key}.sqlite"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    arguments = [command, "export", "-t", "sqlite", "--force-overwrite=true", "-o", str(partial), str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not partial.exists():
        partial.unlink(missing_ok=True)
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise BadTrace(f"{path}: nsys export failed (exit {done.returncode}): {said}")
    partial.replace(target)
    return target


def _is_trace_name(path: Path) -> bool:
    return path.name.endswith((*_SQLITE, *_REPORT, *_JSON))


def _looks_like_trace(path: Path) -> bool:
    """Whether a JSON file in a folder is meant as a trace: other JSON (configs, results) lies beside it."""
    if path.name.endswith((".gz", ".trace.json")):
        return True
    with path.open("rb") as file:
        head = file.read(_PEEK)
        size = path.stat().st_size
        file.seek(max(size - _PEEK, 0))
        tail = file.read(_PEEK)
    if b'"traceEvents"' in head or b'"traceEvents"' in tail:
        return True
    try:
        return size <= _PEEK and isinstance(json.loads(head), list) and b'"ph"' in head
    except ValueError:
        return False
