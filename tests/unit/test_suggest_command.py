"""`rollpacker suggest` as a user starts it: a config that works, a report that agrees with it, errors in one paragraph."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen import write_qwen_folder
from simulated import ROOT

from rollpacker.cli.dry_run import problems
from rollpacker.cli.main import main
from rollpacker.config_file import load_config
from rollpacker.memory_estimate import estimate_memory
from rollpacker.model_shape import check_shapes
from rollpacker.simulator.run import Simulation

SMALL = ["--train-batch-size", "8", "--n", "4", "--max-response-length", "3072", "workload.num_prompts=64"]


def run_cli(*arguments: str, model: str = "Qwen/Qwen2.5-7B", gpus: int = 4) -> int:
    return main(["suggest", "--model", model, "--gpus", str(gpus), *SMALL, *arguments])


def number_after(text: str, row: str) -> float:
    match = re.search(rf"^ *{re.escape(row)} +([\d.,]+)", text, re.MULTILINE)
    assert match, text
    return float(match[1].replace(",", ""))


@pytest.mark.parametrize("mode", ["paper", "off"])
def test_the_file_passes_the_checks_of_a_dry_run_and_simulates_to_what_was_said(
    tmp_path: Path, capsys: Any, mode: str
) -> None:
    """The dry run itself, which loads torch, is in tests/e2e/test_gpu_configs.py."""
    model, out = write_qwen_folder(tmp_path / "Qwen2.5-7B", "7B"), tmp_path / "suggested.yaml"
    assert run_cli("--mode", mode, "--out", str(out), model=str(model)) == 0
    report = capsys.readouterr().out
    config = load_config(str(out))
    ranks = (config.trainer.nnodes or 0) * (config.trainer.n_gpus_per_node or 0)
    assert ranks == 4
    estimate = estimate_memory(config, check_shapes(config, ranks), ranks, config.trainer.gpu_memory_gib or 0)
    assert problems(config, estimate) == []
    assert main(["simulate", str(out)]) == 0
    simulated = capsys.readouterr().out
    assert number_after(simulated, "step") == number_after(report, "step s")
    assert number_after(simulated, "rollout") == number_after(report, "rollout s")
    assert f"by rollpacker suggest: {number_after(report, 'step s'):,.1f} s a step" in out.read_text(encoding="utf-8")
    assert f"{estimate.training.num_bytes / 2**30:.1f} of 79.0 GiB" in report
    assert f"written to {out}" in report
    assert ("eta 1.125" in report) == (mode == "paper")
    assert config.tail_batching.mode == "off" or mode == "paper"


def test_the_other_shapes_are_told_why_not(capsys: Any) -> None:
    assert run_cli("--mode", "off") == 0
    report = capsys.readouterr().err
    best, second, third = (float(x) for x in re.search(r"step s +([\d.]+) +([\d.]+) +([\d.]+)", report).groups())  # type: ignore[union-attr]
    assert best <= second <= third
    for rank, seconds in (("2nd", second), ("3rd", third)):
        assert re.search(rf"Why not the {rank}: training TP .* {seconds:.1f} s a step instead of {best:.1f} ", report)


def test_without_a_file_standard_output_is_the_config_alone(tmp_path: Path, capsys: Any) -> None:
    assert run_cli("--mode", "off", "--gpu", "h200", "--gpus-per-node", "2", "cluster.train_mfu=0.5") == 0
    printed = capsys.readouterr()
    file = tmp_path / "stdout.yaml"
    file.write_text(printed.out, encoding="utf-8")
    config = load_config(str(file))
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.gpu_memory_gib) == (2, 2, 139.0)
    assert (config.cluster.gpu, config.cluster.train_mfu, config.data.train_batch_size) == ("h200", 0.5, 8)
    assert (config.rollout.n, config.data.max_response_length, config.trainer.device) == (4, 3072, "cuda")
    assert "memory of the fullest rank" in printed.err and "memory of" not in printed.out
    Simulation(config)


@pytest.mark.parametrize(
    ("cap", "preset"),
    [("512", "7b_8k"), ("8192", "7b_8k"), ("12000", "14b_16k"), ("20000", "14b_16k"), ("30000", "32b_32k")],
)
def test_the_preset_of_the_nearest_cap_is_taken_and_named(capsys: Any, cap: str, preset: str) -> None:
    assert run_cli("--mode", "off", "--max-response-length", cap, "--gpu", "h200") == 0
    printed = capsys.readouterr()
    assert f"preset: {preset}" in printed.out
    assert f"workload  preset {preset}: 64 prompts" in printed.err and "nearest cap" in printed.err


def test_measured_lengths_go_before_a_preset(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("response_tokens\n100 200 300\n1000 50 20\n", encoding="utf-8")
    assert run_cli("--mode", "off", "--lengths-file", str(file), "--out", str(tmp_path / "out.yaml")) == 0
    config = load_config(str(tmp_path / "out.yaml"))
    assert (config.workload.preset, config.workload.lengths_file) == (None, str(file))
    assert "nearest cap" not in capsys.readouterr().out


def test_context_parallelism_comes_with_a_warning(capsys: Any) -> None:
    assert run_cli("--mode", "off", "--max-response-length", "130048", gpus=8) == 0
    report = capsys.readouterr().err
    assert "Warning: 8 GPUs hold it with context parallelism alone" in report
    assert "it needs at least 16 GPUs" in report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "12"], "--gpus 12 --gpus-per-node 8: a job has whole nodes"),
        (["--gpus", "0"], "a job has whole nodes"),
        (["--gpus", "1"], "It needs at least 4 GPUs (4 nodes of 1)"),
        (["--model", "none"], "model.path=none: no such folder"),
        (["--n", "1"], "a group of one has no advantage"),
        (["--max-response-length", "200000"], "exceeds max_position_embeddings=131072"),
        (["--max-response-length", "0"], "data.max_response_length=0: must be at least 1"),
        (["--gpu-memory-gib", "10"], "in any of 6 shapes"),
        (["--lengths-file", "none.csv"], "cannot read none.csv"),
        (["rollout.tensor_model_parallel_size=2"], "suggest chooses rollout.tensor_model_parallel_size"),
        (["rollout.n=4"], "say it with --n"),
        (["--gpu-memory-gib", "0"], "trainer.gpu_memory_gib=0"),
        (["cluster.offload_trainer=true"], "this version trains without"),
        (["stream.enabled=on"], "this version trains with off"),
        (["--out", "none/out.yaml"], "there is no folder none"),
    ],
)
def test_bad_input_is_a_paragraph(capsys: Any, arguments: list[str], message: str) -> None:
    assert run_cli(*arguments) == 2
    error = capsys.readouterr().err
    (line,) = [text for text in error.splitlines() if text.startswith("rollpacker suggest: ")]
    assert message in line
    assert error.endswith(f"{line}\n")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("data: {train_batch_size: 4}", "data.train_batch_size=4: say it with --train-batch-size"),
        ("rollout: {tensor_model_parallel_size: 4}", "suggest chooses rollout.tensor_model_parallel_size"),
        ("workload: {preset: null, median_tokens: 400}", "workload.preset=None: say it with --preset"),
    ],
)
def test_a_recipe_may_not_hold_what_has_an_option_or_is_searched(
    tmp_path: Path, capsys: Any, recipe: str, message: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe + "\n", encoding="utf-8")
    assert run_cli(str(tmp_path / "recipe.yaml")) == 2
    assert message in capsys.readouterr().err


def test_two_laws_of_the_lengths_are_one_too_many(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_cli("--preset", "7b_8k", "--lengths-file", "mine.csv")
    assert "not allowed with argument --preset" in capsys.readouterr().err


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# edited\n", encoding="utf-8")
    assert run_cli("--out", str(file)) == 2
    assert "it is there already" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "# edited\n"


def test_neither_torch_nor_mpi_is_loaded() -> None:
    code = (
        "import sys; from rollpacker.cli.main import main; "
        f"main(['suggest', '--model', 'Qwen/Qwen2.5-7B', '--gpus', '4', '--mode', 'off', *{SMALL!r}]); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'mpi4py', 'vllm', 'megatron', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
