"""`rollpacker eval`: the safetensors of model.path straight into the engine, one validation, one row. No Megatron.

It may run beside or after a training in the same run directory: it only ever appends to validation.jsonl there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rollpacker.comm.world import World, init_torch_distributed
from rollpacker.config import Config, ConfigError
from rollpacker.model_shape import ModelShape
from rollpacker.runtime.dump import EVAL_DUMP, check_validation_dump
from rollpacker.runtime.inference import InferenceInputs, build_engine, build_validator, check_inference
from rollpacker.runtime.metrics import append_validation
from rollpacker.runtime.validation import Row
from rollpacker.weights.hf import SafetensorsFolder
from rollpacker.weights.layout import megatron_layout


def check(config: Config, world: World, shape: ModelShape) -> InferenceInputs:
    """Everything that a user may have got wrong, on every rank. Raises ConfigError."""
    check_validation_dump(config.trainer.validation_data_dir, EVAL_DUMP)
    run_dir = Path(config.trainer.default_local_dir)
    in_the_way = next((p for p in (run_dir, *run_dir.parents) if p.exists()), run_dir)
    if not in_the_way.is_dir():
        raise ConfigError(
            f"trainer.default_local_dir={run_dir}: {in_the_way} is a file, expected a directory. Choose another directory."
        )
    return check_inference(config, world, shape)


def evaluate(
    config: Config, world: World, inputs: InferenceInputs, on_progress: Callable[[int, int, int], None]
) -> Row | None:
    """Decode and score data.val_files; the row that was appended to validation.jsonl, on rank 0. Collective."""
    platform = inputs.platform
    world.agree(lambda: platform.prepare(world.local_rank))
    init_torch_distributed(world, platform.torch_backend, config.trainer.collective_timeout_s)
    engine = build_engine(config, platform)
    world.agree(lambda: engine.load_weights(_read_weights(config.model.path, inputs.shape), 0))
    validator = build_validator(config, world, inputs, engine, on_progress)
    assert validator is not None, "load_config has seen to data.val_files"
    report = validator.run(None, None)
    return None if report is None else append_validation(Path(config.trainer.default_local_dir), report.row)


def _read_weights(folder: str, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that the config implies, whole, under its Hugging Face name; what else lies in the folder is left out."""
    with SafetensorsFolder(folder) as source:
        for layout in megatron_layout(shape, 1):
            for name in layout.hf_names:
                yield name, source.read(name)
