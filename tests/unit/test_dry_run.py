"""What a dry run says about memory: by how much a phase does not fit, and advice that works when it is followed."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cli.dry_run import check_inputs_exist, memory_problems, problems
from rollpacker.config import Config, ConfigError, DataConfig, ModelConfig
from rollpacker.config_file import load_config
from rollpacker.memory_estimate import GIB, estimate_memory
from rollpacker.model_shape import read_model_shape

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen import write_qwen_folder

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = {"7B": "qwen2.5_7b_8k.yaml", "14B": "qwen2.5_14b_16k.yaml", "32B": "qwen2.5_32b_32k.yaml"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in FILES:
        write_qwen_folder(root / name, name)
    return root


def shipped(name: str, *overrides: str) -> Config:
    return load_config(str(CONFIGS / FILES[name]), list(overrides))


def found(models: Path, name: str, *overrides: str) -> list[str]:
    config = shipped(name, *overrides)
    ranks = (config.trainer.nnodes or 0) * (config.trainer.n_gpus_per_node or 0)
    shape = read_model_shape(str(models / name))
    return memory_problems(config, estimate_memory(config, shape, ranks, config.trainer.gpu_memory_gib or 79.0))


def number_in(text: str, pattern: str) -> float:
    match = re.search(pattern, text)
    assert match, text
    return float(match[1])


@pytest.mark.parametrize("name", ["7B", "14B"])
def test_the_engine_may_have_what_the_trainer_leaves(models: Path, name: str) -> None:
    """Too large a share is refused with the largest that fits, to a percent."""
    assert found(models, name, "training.context_parallel_size=1") == []
    (text,) = found(models, name, "training.context_parallel_size=1", "rollout.gpu_memory_utilization=0.9")
    assert text.startswith("the rollout phase does not fit by ")
    fits = number_in(text, r"rollout\.gpu_memory_utilization=([\d.]+), the most that the trainer leaves")
    assert found(models, name, "training.context_parallel_size=1", f"rollout.gpu_memory_utilization={fits}") == []
    assert found(models, name, "training.context_parallel_size=1", f"rollout.gpu_memory_utilization={fits + 0.01}")


def test_an_engine_that_cannot_fit_beside_the_trainer(models: Path) -> None:
    """32B at the paper's shape: no share of the GPU helps, and the text says why."""
    (text,) = found(models, "32B")
    # The trainer: 15.3 + 30.5 + 5.7 GiB; CUDA 2.0; the engine's share 0.7 x 79 = 55.3; together 108.8 of 79.
    assert number_in(text, r"does not fit by ([\d.]+) GiB of 79\.0") == pytest.approx(29.8, abs=0.05)
    assert "The trainer leaves the engine 32% of the GPU" in text
    assert "its weights, work space and one sequence of full length need 47%" in text
    assert "raise training.tensor_model_parallel_size" in text
    assert all(found(models, "32B", f"rollout.gpu_memory_utilization={share}") for share in (0.1, 0.32, 0.47, 0.9))


def test_the_32b_shape_that_fits(models: Path) -> None:
    shape = ("training.tensor_model_parallel_size=8", "training.pipeline_model_parallel_size=2")
    assert found(models, "32B", *shape, "training.context_parallel_size=1") == []


def test_training_that_does_not_fit(models: Path) -> None:
    """The text names what helps; done together it makes the job fit."""
    bad = ("training.recompute_granularity=null", "training.max_tokens_per_gpu=36864")
    text, _ = found(models, "7B", *bad, "training.use_distributed_optimizer=false")
    assert text.startswith("the training phase does not fit by ")
    for advice in (
        "set training.recompute_granularity=full",
        "lower training.max_tokens_per_gpu=36864 (at least 9216)",
        "set training.use_distributed_optimizer=true",
        "raise training.tensor_model_parallel_size or training.pipeline_model_parallel_size",
    ):
        assert advice in text
    assert found(models, "7B", "training.max_tokens_per_gpu=9216") == []


def test_a_cache_smaller_than_one_sequence(models: Path) -> None:
    (text,) = found(models, "7B", "rollout.gpu_memory_utilization=0.22")
    assert number_in(text.replace(",", ""), r"a KV cache of (\d+) tokens") < 9216
    assert "less than one sequence of 9,216: vLLM would not start" in text


def test_a_replay_has_no_engine(models: Path) -> None:
    assert found(models, "7B", "rollout.gpu_memory_utilization=0.9", "rollout.replay=dump") == []


def test_planned_gpus_may_be_larger(models: Path) -> None:
    assert found(models, "32B", "trainer.gpu_memory_gib=139", "rollout.gpu_memory_utilization=0.5") == []


def test_missing_features_come_after_memory(models: Path) -> None:
    config = shipped("32B")
    estimate = estimate_memory(config, read_model_shape(str(models / "32B")), 64, 79.0)
    memory, context = problems(config, estimate)
    assert estimate.gpu_bytes == 79 * GIB
    assert memory.startswith("the rollout phase")
    assert context.startswith("training.context_parallel_size=4: this version trains with 1;")
    without = dataclasses.replace(config, training=dataclasses.replace(config.training, context_parallel_size=1))
    assert problems(without, None) == []


def inputs(**keys: Any) -> Config:
    return Config(model=ModelConfig(path=keys["model"]), data=DataConfig(train_files=keys["files"]))


def test_all_missing_inputs_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    present = str(tmp_path / "a.jsonl")
    check_inputs_exist(inputs(model=str(tmp_path), files=[present]))
    with pytest.raises(ConfigError) as error:
        check_inputs_exist(inputs(model="models/none", files=["b.jsonl", present, "c.jsonl"]))
    text = str(error.value)
    assert f"seen from {Path.cwd()}: model.path=models/none (a folder: config.json" in text
    assert "data.train_files=b.jsonl; data.train_files=c.jsonl." in text
    assert present not in text
