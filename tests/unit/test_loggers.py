"""TensorBoard and Weights & Biases, for real: what was written is read back from their files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.config import Config, ConfigError, DataConfig, ModelConfig, TrainerConfig
from rollpacker.runtime.loggers import TensorBoardFile, WandbRun, check_loggers, open_loggers

sys.path.insert(0, str(Path(__file__).parents[1]))

from logger_files import tensorboard_steps, wandb_config, wandb_steps

# A server that is not there, and a key that is none: nothing leaves this machine.
NO_SERVER = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}


def config_of(folder: Path, logger: list[str], wandb_mode: str = "offline") -> Config:
    trainer = TrainerConfig(
        default_local_dir=str(folder), logger=logger, wandb_mode=wandb_mode, project_name="p", experiment_name="e"
    )
    return Config(model=ModelConfig(path="m"), data=DataConfig(train_files=["a.jsonl"]), trainer=trainer)


def test_tensorboard_values_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (logger,) = open_loggers(config_of(tmp_path, ["console", "tensorboard"]), pytest.fail)
    assert isinstance(logger, TensorBoardFile)
    logger.write(0, {"val-core/x/avg@1": 0.5})
    logger.write(1, {"training/global_step": 1, "actor/lr": 0.25})
    assert tensorboard_steps(tmp_path) == {  # read before close: flushed at each step
        0: {"val-core/x/avg@1": 0.5},
        1: {"training/global_step": 1, "actor/lr": 0.25},
    }
    logger.close()


def test_tensorboard_forgets_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    """TensorBoard's own reader, over the file of the killed run and that of the run that went on from step 2."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, ["tensorboard"])
    (killed,) = open_loggers(config, pytest.fail)
    for step in (1, 2, 3, 4):
        killed.write(step, {"actor/lr": 1.0})
    killed.close()
    (first,) = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name(first.name.replace("tfevents.", "tfevents.0")))  # a start takes longer than this test
    (resumed,) = open_loggers(config, pytest.fail, first_step=3)
    resumed.write(3, {"actor/lr": 2.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/lr")] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_an_offline_wandb_run_holds_values_and_config(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = config_of(tmp_path, ["wandb"])
    check_loggers(config)
    (logger,) = open_loggers(config, pytest.fail)
    logger.write(0, {"val-core/x/avg@1": 0.25})
    logger.write(1, {"val-core/x/avg@1": 0.5})  # a step's validation comes before its metrics
    logger.write(1, {"actor/lr": 0.125})
    logger.write(2, {"actor/lr": 0.0625})
    logger.close()
    logger.close()
    assert wandb_steps(tmp_path) == {
        0: {"val-core/x/avg@1": 0.25},
        1: {"val-core/x/avg@1": 0.5, "actor/lr": 0.125},
        2: {"actor/lr": 0.0625},
    }
    run = wandb_config(tmp_path)
    assert (run["project"], run["name"]) == ("p", "e")
    assert run["config"]["rollout"]["val_kwargs"] == {"n": 1, "temperature": 0, "top_p": 1, "top_k": -1}


def in_a_process(code: str, folder: Path, **environment: str) -> str:
    """What `code` prints, in a process without the user's wandb key; wandb keeps global state in ours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    head = "import sys; sys.path.insert(0, 'tests/unit'); from test_loggers import *; folder = Path(sys.argv[1])\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code, str(folder)],
        env={**clean, "HOME": str(folder), "NETRC": str(folder / "netrc"), **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_server_the_run_is_kept_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = """
config = config_of(folder, ["wandb"], "online")
check_loggers(config)
logger = WandbRun(config, folder, print, init_timeout_s=2.0)
logger.write(1, {"actor/lr": 0.5})
logger.close()
print(wandb_steps(folder))
"""
    output = in_a_process(code, tmp_path, **NO_SERVER)
    assert "wandb did not start online" in output and "wandb sync" in output
    assert output.splitlines()[-1] == "{1: {'actor/lr': 0.5}}"


def test_an_online_run_needs_a_key_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = """
try:
    check_loggers(config_of(folder, ["wandb"], "online"))
except ConfigError as error:
    print(error)
"""
    output = in_a_process(code, tmp_path)
    assert "no API key" in output and "wandb login" in output and "trainer.wandb_mode=offline" in output
    assert not (tmp_path / "wandb").exists()


def test_an_error_of_wandbs_ends_the_logging_alone(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    said: list[str] = []
    logger = WandbRun(config_of(tmp_path, ["wandb"]), tmp_path, said.append)
    logger.write(1, {"actor/lr": 0.5})
    logger._run.finish()  # as wandb itself does when its process is gone
    logger.write(2, {"actor/lr": 0.5})
    logger.write(3, {"actor/lr": 0.5})
    logger.close()
    assert len(said) == 1 and said[0].startswith("wandb stopped")


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    code = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("wandb", "tensorboard") else find_spec(name, *rest)
for logger in ("wandb", "tensorboard", "console"):
    try:
        check_loggers(config_of(folder, [logger]))
        print(logger, "is fine")
    except ConfigError as error:
        print(error)
"""
    lines = in_a_process(code, tmp_path).splitlines()
    assert "wandb is not installed: install it with `pip install wandb`, or take wandb out" in lines[0]
    assert "tensorboard is not installed" in lines[1] and lines[2] == "console is fine"


def test_loggers_load_nothing_that_is_not_asked_for(tmp_path: Path) -> None:
    code = """
check_loggers(config_of(folder, ["console"]))
assert open_loggers(config_of(folder, ["console"]), print) == []
print(sorted({"tensorboard", "wandb", "torch", "rich"} & sys.modules.keys()))
"""
    assert in_a_process(code, tmp_path).strip() == "[]"


def test_unknown_loggers_are_refused(tmp_path: Path) -> None:
    from rollpacker.config_checks import validate

    with pytest.raises(ConfigError, match="known loggers are console, tensorboard, wandb"):
        validate(config_of(tmp_path, ["wanbd"]))
