"""`rollpacker plan`: what it prints for the paper's models, and its arithmetic by hand."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from rollpacker.cli.main import main
from rollpacker.cli.plan import ElementSizes, predict
from rollpacker.simulator.constants import GpuFacts
from rollpacker.weights.plan import Traffic

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1 << 30
# Parameters by hand (tests/unit/test_memory_estimate.py) and the share of them that a GPU lacks of its rollout shard.
QWEN_7B = 7_615_616_512
NORMS_7B = (2 * 28 + 1) * 3584


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def row(text: str, name: str) -> tuple[float, ...]:
    """Mean, busiest and all GPUs, in GiB."""
    match = re.search(rf"{name} +([\d.,]+) +([\d.,]+) +([\d.,]+)", text)
    assert match, text
    return tuple(float(number.replace(",", "")) for number in match.groups())


def test_the_7b_model_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """TP 2 -> 1: half of the matrices comes from the neighbour, in bf16; norms are everywhere."""
    text = plan(capsys, str(CONFIGS / "qwen2.5_7b_8k.yaml"))
    travels = 2 * (QWEN_7B - NORMS_7B) / 2 / GIB
    for name in ("sent over NVLink", "received over NVLink"):
        assert row(text, name) == pytest.approx((travels, travels, 16 * travels), abs=0.06)
    stays = 2 * QWEN_7B / GIB - travels
    assert row(text, "stays on its GPU") == pytest.approx((stays, stays, 16 * stays), abs=0.06)
    assert row(text, "sent over InfiniBand") == (0.0, 0.0, 0.0)
    assert f"predicted {travels * GIB / 160e9:.2f} s" in text
    assert "models/Qwen2.5-7B is not there" in text


@pytest.mark.parametrize("name", ["7b_8k", "14b_16k", "32b_32k"])
def test_the_papers_models_take_under_five_seconds(capsys: pytest.CaptureFixture[str], name: str) -> None:
    start = time.process_time()
    plan(capsys, str(CONFIGS / f"qwen2.5_{name}.yaml"))
    assert time.process_time() - start < 5


def test_fp32_training_for_a_bf16_engine_sends_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = str(CONFIGS / "qwen2.5_7b_8k.yaml"), "training.dtype=fp32", "rollout.dtype=bf16"
    assert row(plan(capsys, *arguments), "sent over NVLink")[0] == pytest.approx(7.09, abs=0.01)
    assert row(plan(capsys, arguments[0], "training.dtype=fp32"), "sent over NVLink")[0] == pytest.approx(
        14.18, abs=0.01
    )


def test_the_busiest_resource_counts() -> None:
    """Rank 0 copies 10 elements (4 bytes in, 2 out), rank 1 sends 100 within its node and receives 20 from another."""
    traffic = [Traffic(local=10), Traffic(sent_in_node=100, received_between_nodes=20)]
    gpu = GpuFacts(flops=1.0, memory_bandwidth=100.0, nvlink_bandwidth=50.0, memory_gib=1.0)
    refit = predict(traffic, ElementSizes(training=4, rollout=2), gpu)
    assert refit.nvlink_s == 100 * 2 / 50
    assert refit.network_s == 20 * 2 / 50e9
    assert refit.memory_s == pytest.approx((100 * (4 + 2 * 2) + 20 * (2 * 2 + 2)) / (100 * 0.8))
    assert refit.total_s == refit.memory_s


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.nnodes=null"], "set trainer.nnodes and trainer.n_gpus_per_node"),
        (["model.path=models/unknown"], "model.path=models/unknown: no such folder"),
        (["training.tensor_model_parallel_size=3"], "does not divide the 16 rank(s)"),
    ],
)
def test_mistakes_are_one_paragraph(capsys: pytest.CaptureFixture[str], overrides: list[str], message: str) -> None:
    assert main(["plan", str(CONFIGS / "qwen2.5_7b_8k.yaml"), *overrides]) == 2
    assert message in capsys.readouterr().err
