"""Nsight Systems exports with known truth, in the schema of 2023.1, 2025.3 or 2026.2, for what no public file holds.

Tables and columns are those seen in real exports; like the real exporter, a table without rows is not made. Times are
seconds from the start of the capture.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

VM = 1 << 48
_KERNEL = (
    "start end deviceId contextId {green} streamId correlationId globalPid demangledName shortName mangledName launchType "
    "cacheConfig registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory "
    "localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig"
)
_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": _KERNEL,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end deviceId contextId {green} streamId correlationId globalPid graphId "
    "graphExecId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId contextId {green} streamId correlationId globalPid bytes copyKind "
    "srcKind dstKind srcDeviceId srcContextId dstDeviceId dstContextId migrationCause graphNodeId virtualAddress",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId contextId {green} streamId correlationId globalPid value bytes "
    "graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "NVTX_EVENTS": "start end eventType rangeId category color text:TEXT globalTid endGlobalTid textId domainId uint64Value "
    "int64Value doubleValue:REAL uint32Value int32Value floatValue:REAL jsonTextId jsonText:TEXT {binary}",
    "StringIds": "id value:TEXT",
    "TARGET_INFO_GPU": "vmId id name:TEXT busLocation:TEXT uuid:TEXT cuDevice smCount",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid {uuid}",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime:TEXT localTime:TEXT {system}",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName:TEXT name:TEXT nameEnum value:TEXT",
    "ANALYSIS_DETAILS": "globalVid duration startTime stopTime",
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text:TEXT globalPid",
    "META_DATA_EXPORT": "name:TEXT value:TEXT",
    "EXPORT_META_DATA": "name:TEXT value:TEXT",
}
_OPTIONAL = {  # column -> the versions that have it
    "green": ("greenContextId", ("2025.3", "2026.2")),
    "binary": ("binaryData:TEXT", ("2025.3", "2026.2")),
    "uuid": ("uuid:TEXT", ("2026.2",)),
    "system": ("systemClockNs", ("2026.2",)),
}
SECRET = "SECRET_TOKEN=hf_do_not_print_me"


def global_pid(pid: int) -> int:
    return VM | pid << 24


@dataclass
class Export:
    """Collects rows; `write` makes the file. GPUs are uuids in order of their index on the host."""

    path: Path
    host: str = "node0"
    gpus: tuple[str, ...] = ("uuid-0",)
    version: str = "2026.2"
    utc_ns: int = 1_780_000_000_000_000_000
    system_ns: int | None = 5_000_000_000
    duration_s: float | None = None
    is_mig: bool = False
    rows: dict[str, list[dict]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)
    correlation: int = 0

    def add(self, table: str, **columns: object) -> None:
        self.rows.setdefault(table, []).append(columns)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, 100 + len(self.strings))

    def process(self, pid: int, devices: dict[int, int] | None = None, uuids: dict[int, str] | None = None) -> None:
        """A process whose CUDA device i is GPU devices[i] of the host; 2023 exports do not tell."""
        for ordinal, gpu in (devices or {}).items():
            if self.version != "2023.1":
                self.add("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=ordinal, pid=pid, uuid=(uuids or {}).get(ordinal))

    def call(self, pid: int, start: float, end: float, name: str = "cudaLaunchKernel_v7000", tid: int = 1) -> int:
        """A CUDA call; returns its correlation id."""
        self.correlation += 1
        columns = {"start": ns(start), "end": ns(end), "eventClass": 0, "returnValue": 0}
        columns |= {"globalTid": global_pid(pid) | tid, "correlationId": self.correlation, "nameId": self.string(name)}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", **columns)
        return self.correlation

    def kernel(
        self,
        pid: int,
        start: float,
        end: float,
        *,
        device: int = 0,
        name: str = "gemm",
        launch: float | None = None,
        correlation: int | None = None,
        stream: int = 7,
    ) -> None:
        """A kernel; it starts at once when launched unless `launch` says otherwise."""
        at = start if launch is None else launch
        if correlation is None:
            correlation = self.call(pid, at, at + 4e-6)
        self._operation("CUPTI_ACTIVITY_KIND_KERNEL", pid, start, end, device, stream, correlation, name)

    def copy(self, pid: int, start: float, end: float, *, device: int = 0) -> None:
        correlation = self.call(pid, start, start + 4e-6, "cudaMemcpyAsync_v3020")
        self._operation("CUPTI_ACTIVITY_KIND_MEMCPY", pid, start, end, device, 7, correlation, None)

    def memset(self, pid: int, start: float, end: float, *, device: int = 0) -> None:
        correlation = self.call(pid, start, start + 4e-6, "cudaMemsetAsync_v3020")
        self._operation("CUPTI_ACTIVITY_KIND_MEMSET", pid, start, end, device, 7, correlation, None)

    def graph(self, pid: int, start: float, end: float, *, device: int = 0, has_row: bool = True) -> None:
        """A CUDA graph launch in graph mode: one row in GRAPH_TRACE, or none when the trace lost it."""
        correlation = self.call(pid, start, start + 4e-6, "cudaGraphLaunch_v10000")
        if has_row:
            self._operation("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", pid, start, end, device, 7, correlation, None)

    def range(
        self,
        pid: int,
        start: float,
        end: float | None,
        name: str,
        *,
        kind: int = 59,
        registered: bool = False,
        tid: int = 1,
    ) -> None:
        columns: dict[str, object] = {"start": ns(start), "end": None if end is None else ns(end), "eventType": kind}
        columns |= {"globalTid": global_pid(pid) | tid, "domainId": 0}
        columns |= {"textId": self.string(name)} if registered else {"text": name}
        if kind == 60:
            columns["endGlobalTid"] = global_pid(pid) | (tid + 1)
        self.add("NVTX_EVENTS", **columns)

    def diagnostic(self, text: str, severity: int = 2) -> None:
        self.add("DIAGNOSTIC_EVENT", timestamp=0, timestampType=1, source=3, severity=severity, text=text, globalPid=0)

    def write(self, shuffle: int | None = None) -> Path:
        """Make the file; rows in order of time like the exporter, or in a random order."""
        self._describe()
        database = sqlite3.connect(self.path)
        for table, template in _TABLES.items():
            rows = self.rows.get(table, [])
            if not rows:
                continue
            columns = template.format(
                **{k: name if self.version in v else "" for k, (name, v) in _OPTIONAL.items()}
            ).split()
            names = [column.split(":")[0] for column in columns]
            types = ", ".join(f'"{c.split(":")[0]}" {[*c.split(":"), "INTEGER"][1]}' for c in columns)
            database.execute(f"CREATE TABLE {table} ({types})")
            rows = sorted(rows, key=lambda row: row.get("start", 0) or 0)
            if shuffle is not None:
                Random(shuffle).shuffle(rows)
            marks = ",".join("?" * len(names))
            database.executemany(f"INSERT INTO {table} VALUES ({marks})", [[r.get(n) for n in names] for r in rows])
        database.commit()
        database.close()
        return self.path

    def _operation(
        self,
        table: str,
        pid: int,
        start: float,
        end: float,
        device: int,
        stream: int,
        correlation: int | None,
        name: str | None,
    ) -> None:
        columns: dict[str, object] = {
            "start": ns(start),
            "end": ns(end),
            "deviceId": device,
            "contextId": 1,
            "streamId": stream,
        }
        columns |= {"correlationId": correlation, "globalPid": global_pid(pid)}
        if name is not None:
            columns |= {"shortName": self.string(name), "demangledName": self.string(name + "<float>(int)")}
        self.add(table, **columns)

    def _describe(self) -> None:
        meta = "EXPORT_META_DATA" if self.version == "2023.1" else "META_DATA_EXPORT"
        self.add(meta, name="EXPORT_PRODUCT_VERSION", value=f"{self.version}.1.1")
        for text, index in self.strings.items():
            self.add("StringIds", id=index, value=text)
        self.add(
            "TARGET_INFO_SESSION_START_TIME",
            utcEpochNs=self.utc_ns,
            utcTime="",
            localTime="",
            systemClockNs=self.system_ns,
        )
        if self.duration_s is not None:
            self.add(
                "ANALYSIS_DETAILS",
                globalVid=VM,
                duration=ns(self.duration_s),
                startTime=0,
                stopTime=ns(self.duration_s),
            )
        listed = [{"Id": i, "Uuid": u, "CuDevice": i, "MigEnabled": self.is_mig} for i, u in enumerate(self.gpus)]
        for name, value in (
            ("Hostname", self.host),
            ("DeviceEnvironment", SECRET),
            ("GpuInfo", json.dumps({"Gpus": listed} if self.gpus else {})),
        ):
            self.add(
                "TARGET_INFO_SYSTEM_ENV", globalVid=VM, devStateName="Local (CLI)", name=name, nameEnum=0, value=value
            )
        for index, uuid in enumerate(self.gpus):
            self.add("TARGET_INFO_GPU", vmId=VM, id=index, name="GPU", uuid=uuid, cuDevice=index)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
