"""An Nsight Systems SQLite export, opened read-only: which tables and columns this version has, whose GPUs, which clock.

Tables are created lazily, so any may be absent; META tables were renamed in 2023; 2025 and 2026 added columns. The
environment of the profiled process (DeviceEnvironment) is never read: it holds tokens.
Schema by version: 2023.1 (3.1.2) to 2026.2 (3.25.0).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.profiling.bubble_report.model import BadTrace, GpuId

_SQLITE_MAGIC = b"SQLite format 3\0"
PROCESS_MASK = ~0xFFFFFF
"""globalTid & PROCESS_MASK = globalPid; the pid sits in bits 24 to 47."""
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPH_TRACE = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"


def pid_of(process: int) -> int:
    """The operating system's process id within a globalPid or globalTid."""
    return (process >> 24) & 0xFFFFFF


@dataclass(frozen=True)
class _Gpu:
    """A GPU that the report's host has."""

    index: int
    uuid: str
    ordinal: int | None
    is_mig: bool


class NsysFile:
    """The export at `path`. Raises BadTrace when it is not a readable export."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = open_database(path)
        try:
            tables = self.database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
            self._columns = {str(name): self._columns_of(str(name)) for (name,) in tables}
            self._check_is_export()
            self.metadata = self._read_metadata()
            self.environment = self._read_environment()
            self._gpus = self._read_gpus()
            self._cuda_devices = self._read_cuda_devices()
        except sqlite3.Error as error:
            self.database.close()
            raise unreadable(path, error) from error

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table exists and has these columns."""
        return set(columns) <= self._columns.get(table, set()) and table in self._columns

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        """The rows of a query. Raises BadTrace where the file is damaged."""
        try:
            yield from self.database.execute(sql, parameters)
        except (sqlite3.Error, OverflowError) as error:
            raise unreadable(self.path, error) from error

    def rows_with_bytes(self, sql: str) -> Iterator[Any]:
        """The rows of a query with text as bytes: for millions of rows whose text is mostly thrown away."""
        factory, self.database.text_factory = self.database.text_factory, bytes
        try:
            yield from self.rows(sql)
        finally:
            self.database.text_factory = factory

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """The first row of a query, or None."""
        return next(self.rows(sql, parameters), None)

    def string_ids(self, like: Sequence[str]) -> list[int]:
        """Ids of the strings that match any of the LIKE patterns (in lower case)."""
        if not self.has("StringIds", "id", "value"):
            return []
        where = " OR ".join("lower(value) LIKE ?" for _ in like)
        return [int(row[0]) for row in self.rows(f"SELECT id FROM StringIds WHERE {where}", like)]

    @property
    def version(self) -> str:
        """The version of Nsight Systems that exported the file, or "unknown"."""
        return self.metadata.get("EXPORT_PRODUCT_VERSION", "unknown")

    @property
    def host(self) -> str:
        """The host's name, or "" where the file does not tell."""
        return self.environment.get("Hostname", "")

    def wall_clock(self) -> tuple[int, int | None] | None:
        """(UTC ns at time 0, the host's monotonic ns at time 0 or None), or None where the file has no clock."""
        if not self.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
            return None
        has_system = self.has("TARGET_INFO_SESSION_START_TIME", "systemClockNs")
        column = "systemClockNs" if has_system else "NULL"
        row = self.one(f"SELECT utcEpochNs, {column} FROM TARGET_INFO_SESSION_START_TIME")
        if row is None or not isinstance(row[0], int):
            return None
        return row[0], row[1] if isinstance(row[1], int) else None

    def duration_ns(self) -> int | None:
        """How long the capture lasted, from time 0."""
        if not self.has("ANALYSIS_DETAILS", "duration"):
            return None
        row = self.one("SELECT max(duration) FROM ANALYSIS_DETAILS")
        return row[0] if row and isinstance(row[0], int) and row[0] > 0 else None

    def gpu_of(self, host: str, process: int, device: int, num_processes_on_device: int) -> tuple[GpuId, str | None]:
        """The physical GPU behind a process's device ordinal, and a note where that had to be guessed.

        In this order: the CUDA uuid (a MIG instance has its own), the gpuId of (pid, ordinal), and, only where one
        process uses that ordinal or the host has a single GPU, the driver's ordinal. Else the GPU stays apart.
        """
        pid = pid_of(process)
        known = self._cuda_devices.get((pid, device))
        gpu = None
        if known is not None:
            gpu_index, uuid = known
            gpu = next((g for g in self._gpus if g.index == gpu_index), None)
            if uuid and (gpu is None or gpu.is_mig or uuid.startswith("mig")):
                return GpuId(host, uuid, str(gpu_index)), None
        elif len(self._gpus) == 1:
            gpu = self._gpus[0]
        elif num_processes_on_device == 1:
            gpu = next((g for g in self._gpus if g.ordinal == device), None)
        apart = GpuId(host, f"{self.path}:{process}:{device}", f"pid {pid} device {device}")
        if gpu is None:
            return apart, f"GPU identity unknown for pid {pid}, CUDA device {device}: it counts as a GPU of its own"
        if gpu.is_mig:
            return apart, f"MIG instance of pid {pid} on GPU {gpu.index} has no uuid: it is kept apart"
        return GpuId(host, gpu.uuid or f"gpu {gpu.index}", str(gpu.index)), None

    def gpus_of_host(self, host: str) -> list[GpuId]:
        """Every GPU the host is known to have; MIG parents are left out, their instances are not listed anywhere."""
        return [GpuId(host, g.uuid or f"gpu {g.index}", str(g.index)) for g in self._gpus if not g.is_mig]

    def _columns_of(self, table: str) -> set[str]:
        quoted = table.replace('"', '""')
        return {str(row[1]) for row in self.database.execute(f'PRAGMA table_info("{quoted}")')}

    def _check_is_export(self) -> None:
        known = {"StringIds", "META_DATA_EXPORT", "EXPORT_META_DATA", "NVTX_EVENTS", KERNEL, RUNTIME, GRAPH_TRACE}
        if not known & self._columns.keys():
            raise BadTrace(
                f"{self.path}: an SQLite file, but no export of Nsight Systems (none of its tables is there). Make one "
                "with: nsys export -t sqlite REPORT.nsys-rep"
            )
        for table in (KERNEL, GRAPH_TRACE, MEMCPY, MEMSET):
            needed = {"start", "end", "deviceId", "globalPid"}
            if table in self._columns and not needed <= self._columns[table]:
                missing = ", ".join(sorted(needed - self._columns[table]))
                raise BadTrace(
                    f"{self.path}: table {table} lacks the column(s) {missing}: a version of the export that is not known "
                    "here (known: 2023.1 to 2026.2). Export it again with such a version."
                )

    def _read_metadata(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for table in ("EXPORT_META_DATA", "META_DATA_EXPORT", "META_DATA_CAPTURE"):
            if self.has(table, "name", "value"):
                found.update((str(n), str(v)) for n, v in self.rows(f"SELECT name, value FROM {table}"))
        return found

    def _read_environment(self) -> dict[str, str]:
        """Host name and GPU list only: the same table holds the environment with its secrets."""
        if not self.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
            return {}
        sql = "SELECT name, value FROM TARGET_INFO_SYSTEM_ENV WHERE name IN ('Hostname', 'GpuInfo')"
        return {str(name): str(value) for name, value in self.rows(sql) if value is not None}

    def _read_gpus(self) -> list[_Gpu]:
        listed = _gpus_of_json(self.environment.get("GpuInfo", ""))
        if not self.has("TARGET_INFO_GPU", "id"):
            return listed
        is_mig = {g.uuid: g.is_mig for g in listed}
        uuid, ordinal = (c if self.has("TARGET_INFO_GPU", c) else "NULL" for c in ("uuid", "cuDevice"))
        return [
            _Gpu(int(row[0]), _plain(row[1]), row[2], is_mig.get(_plain(row[1]), False))
            for row in self.rows(f"SELECT id, {uuid}, {ordinal} FROM TARGET_INFO_GPU ORDER BY id")
            if row[0] is not None
        ] or listed

    def _read_cuda_devices(self) -> dict[tuple[int, int], tuple[int, str]]:
        if not self.has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
            return {}
        uuid = "uuid" if self.has("TARGET_INFO_CUDA_DEVICE", "uuid") else "NULL"
        sql = f"SELECT pid, cudaId, gpuId, {uuid} FROM TARGET_INFO_CUDA_DEVICE WHERE gpuId IS NOT NULL"
        return {(int(row[0]), int(row[1])): (int(row[2]), _plain(row[3])) for row in self.rows(sql)}


def unreadable(path: Path, error: Exception) -> BadTrace:
    """The one line for a damaged file."""
    return BadTrace(
        f"{path}: not readable as SQLite ({error}); the file is damaged or cut short. Export or copy it again."
    )


def open_database(path: Path) -> sqlite3.Connection:
    """The file, read-only. Raises BadTrace when it is no SQLite file, OSError when it cannot be opened."""
    with path.open("rb") as file:
        head = file.read(16)
    if head != _SQLITE_MAGIC:
        raise BadTrace(
            f"{path}: no SQLite file (it starts with {head[:8]!r}). Make one with: nsys export -t sqlite REPORT.nsys-rep"
        )
    # immutable: no lock, no journal, nothing is ever written beside the user's file. A pending journal needs the locks.
    is_quiet = not any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal"))
    uri = path.absolute().as_uri() + ("?mode=ro&immutable=1" if is_quiet else "?mode=ro")
    try:
        database = sqlite3.connect(uri, uri=True)
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        database.execute("PRAGMA query_only = 1")
    except sqlite3.Error as error:
        raise unreadable(path, error) from error
    return database


def _plain(uuid: object) -> str:
    """A uuid as the tables of all versions would write it: lower case, without the GPU- of nvidia-smi."""
    return str(uuid).lower().removeprefix("gpu-") if uuid else ""


def _gpus_of_json(text: str) -> list[_Gpu]:
    try:
        found = json.loads(text or "{}")
        gpus = found.get("Gpus", []) if isinstance(found, dict) else []
        return [
            _Gpu(int(g["Id"]), _plain(g.get("Uuid")), g.get("CuDevice"), bool(g.get("MigEnabled")))
            for g in gpus
            if isinstance(g, dict) and "Id" in g
        ]
    except (ValueError, TypeError):
        return []
