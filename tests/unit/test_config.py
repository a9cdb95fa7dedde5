"""The configuration: what is accepted, and what a user reads when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.config import Config, ConfigError, ValKwargsConfig, every_key
from rollpacker.config_checks import check_parallel_shape
from rollpacker.config_file import load_config, to_yaml

GOOD = "model: {path: m}\ndata: {train_files: [a.jsonl], max_response_length: 100}\n"


def load(tmp_path: Path, text: str = GOOD, *overrides: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(str(path), list(overrides))


def test_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "training.lr=1e-4", "rollout.n=4", "trainer.total_training_steps=7")
    assert config.training.lr == 1e-4
    assert load(tmp_path, to_yaml(config)) == config


def test_yaml_off_is_a_mode(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + "tail_batching: {mode: off}\n").tail_batching.mode == "off"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rolout.n=4", "unknown key rolout. Did you mean rollout?"),
        ("rollout.temprature=1", "Did you mean rollout.temperature?"),
        ("trainer.lr=1", "Did you mean training.lr?"),
        ("rollout.n=many", "rollout.n='many': expected a whole number."),
        ("rollout.n=2.5", "expected a whole number"),
        ("rollout.n=true", "expected a whole number"),
        ("training.lr=.nan", "expected a number"),
        ("training.lr=.inf", "expected a number"),
        ("trainer.deterministic=1", "expected true or false"),
        ("training.dtype=fp16", "expected one of fp32, bf16"),
        ("tail_batching.mode=paper", "expected one of off"),
        ("rollout.n=1", "a group of one has no advantage"),
        ("rollout.temperature=0", "must be above 0"),
        ("rollout.top_p=0.9", "needs a mismatch correction"),
        ("data.train_batch_size=0", "data.train_batch_size=0: must be at least 1."),
        ("training.max_tokens_per_gpu=50", "1024 + 100 = 1124"),
        ("trainer.logger=wanbd", "known loggers are console, tensorboard, wandb"),
        ("trainer.wandb_mode=dryrun", "expected one of online, offline"),
        ("rollout.val_kwargs.temprature=1", "Did you mean rollout.val_kwargs.temperature?"),
        ("rollout.val_kwarg.n=1", "Did you mean rollout.val_kwargs?"),
        ("val_kwargs.n=1", "unknown key val_kwargs. Did you mean rollout.val_kwargs?"),
        ("rollout.val_kwargs=4", "rollout.val_kwargs: expected keys below it, found 4"),
        ("rollout.n.k=4", "rollout.n={'k': 4}: expected a whole number"),
        ("rollout.val_kwargs.n=0", "rollout.val_kwargs.n=0: must be at least 1."),
        ("rollout.val_kwargs.temperature=-1", "rollout.val_kwargs.temperature=-1.0: must be at least 0."),
        ("rollout.val_kwargs.n=4", "greedy responses are all alike"),
        ("rollout.val_kwargs.top_p=1.5", "rollout.val_kwargs.top_p=1.5: must be above 0 and at most 1"),
        ("rollout=3", "write section.key=value"),
        ("rollout.n", "write section.key=value"),
        ("data.train_files=[1]", "expected a list of strings"),
        ("training.min_lr=1", "above training.lr"),
    ],
)
def test_bad_values_are_explained(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD, override)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not valid YAML"),
        ("- a\n", "expected sections"),
        ("model: 3\n", "model: expected keys below it, found 3"),
        ("model: {path: a}\nmodel: {path: b}\n", "'model' stands twice, in lines 1 and 2"),
        ("data: {train_files: [a]}\n", "model.path is not set"),
        ("model: {path: m}\n", "data.train_files is empty"),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert message in str(error.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(str(tmp_path / "absent.yaml"))
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(str(binary))


def test_parallel_shapes_come_with_their_equation(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "training.tensor_model_parallel_size=2", "training.pipeline_model_parallel_size=2")
    check_parallel_shape(config, 8)
    with pytest.raises(ConfigError, match=r"2 x 2 = 4 does not divide the 6 rank"):
        check_parallel_shape(config, 6)
    with pytest.raises(ConfigError, match=r"rollout\.tensor_model_parallel_size=3 does not divide the 4"):
        check_parallel_shape(load(tmp_path, GOOD, "rollout.tensor_model_parallel_size=3"), 4)


def test_every_key_has_a_help_sentence() -> None:
    for dotted, field, _ in every_key():
        assert field.metadata["help"].endswith("."), dotted


def test_keys_may_stand_three_deep(tmp_path: Path) -> None:
    text = GOOD + "rollout: {n: 4, val_kwargs: {n: 2, temperature: 0.6}}\n"
    config = load(tmp_path, text, "rollout.val_kwargs.n=16", "rollout.val_kwargs.top_p=0.95")
    assert (config.rollout.n, config.rollout.val_kwargs) == (4, ValKwargsConfig(16, 0.6, 0.95, -1))
    assert load(tmp_path, to_yaml(config)) == config
    assert load(tmp_path, GOOD).rollout.val_kwargs == ValKwargsConfig(1, 0.0, 1.0, -1)  # verl's defaults


def test_a_command_names_the_files_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\n")
    config = load_config(str(path), ["data.val_files=v.jsonl"], prompts="data.val_files")
    assert config.data.val_files == ["v.jsonl"]
    with pytest.raises(ConfigError, match=r"data\.val_files is empty.*data\.val_files=\[prompts\.jsonl\]"):
        load_config(str(path), prompts="data.val_files")
