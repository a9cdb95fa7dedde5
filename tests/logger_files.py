"""What TensorBoard and Weights & Biases would read in a run directory."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tensorboard_steps(run_dir: Path) -> dict[int, dict[str, float]]:
    """Scalars by step."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (path,) = (run_dir / "tensorboard").iterdir()
    first, *events = LegacyEventFileLoader(str(path)).Load()
    assert first.file_version == "brain.Event:2"
    steps: dict[int, dict[str, float]] = {}
    for event in events:
        steps.setdefault(event.step, {}).update({v.tag: v.simple_value for v in event.summary.value})
    return steps


def wandb_steps(run_dir: Path) -> dict[int, dict[str, float]]:
    """What an offline run logged, by step."""
    steps: dict[int, dict[str, float]] = {}
    for record in _wandb_records(run_dir):
        if record.HasField("history"):
            items = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            steps.setdefault(items["_step"], {}).update({k: v for k, v in items.items() if not k.startswith("_")})
    return steps


def wandb_config(run_dir: Path) -> dict[str, Any]:
    """Project, name and config of an offline run."""
    run = next(record.run for record in _wandb_records(run_dir) if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    return {"project": run.project, "name": run.display_name, "config": config}


def _wandb_records(run_dir: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (32 KiB blocks of crc, length, type), a protobuf in each."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    content, position, record = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""
