"""Lengths follow the law that was asked for, or the file; a malformed file names its line."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulated import SETTINGS, setting, small

from rollpacker.config import Config, ConfigError
from rollpacker.policy.launch import request_seed
from rollpacker.simulator.law import coverage, own_coverage
from rollpacker.simulator.lengths_file import read_lengths
from rollpacker.simulator.workload import (
    PRESETS,
    LognormalLaw,
    LognormalWorkload,
    MeasuredWorkload,
    build_workload,
    intraclass_correlation,
)
from rollpacker.types import Prompt, Request


def requests(workload, n: int, step: int = 1, replica: int = 0) -> list[Request]:
    """`n` responses of each prompt."""
    asked = [(Prompt(prompt_id, tokens), i) for prompt_id, tokens, _ in workload.prompts for i in range(n)]
    return [
        Request(index, prompt, i, replica, request_seed(0, step, prompt, i), 10**9)
        for index, (prompt, i) in enumerate(asked)
    ]


def lognormal(law: LognormalLaw, num_prompts: int = 2000, cap: int = 10**6) -> LognormalWorkload:
    overrides = [f"workload.num_prompts={num_prompts}", f"data.max_response_length={cap}"]
    return LognormalWorkload(law, small(*overrides, f"training.max_tokens_per_gpu={cap + 2048}"))


def test_lengths_have_the_median_and_both_variances() -> None:
    workload = lognormal(LognormalLaw(1000, 0.7, 0.5))
    logs = np.log(workload.lengths(requests(workload, 16))).reshape(-1, 16)
    assert math.exp(np.median(logs)) == pytest.approx(1000, rel=0.04)
    assert math.sqrt(logs.var(1, ddof=1).mean()) == pytest.approx(0.7, rel=0.02)
    assert intraclass_correlation(np.exp(logs).tolist()) == pytest.approx(0.25 / (0.25 + 0.49), abs=0.02)


def test_hard_prompts_run_to_the_cap() -> None:
    workload = lognormal(LognormalLaw(100, 0.5, 0.5, hard_share=0.3, hard_cap_probability=0.2), cap=8192)
    at_cap = (workload.lengths(requests(workload, 16)) == 8192).reshape(-1, 16)
    assert at_cap.mean() == pytest.approx(0.06, abs=0.008)
    assert at_cap.any(1).mean() == pytest.approx(0.3 * (1 - 0.8**16), abs=0.03)


def test_a_length_is_a_function_of_its_request_alone() -> None:
    """The same whoever decodes it and in whatever company; another in another step."""
    workload = build_workload(small())
    batch = requests(workload, 4)
    alone = [int(workload.lengths([r])[0]) for r in batch[::37]]
    moved = workload.lengths(requests(workload, 4, replica=3))
    assert alone == workload.lengths(batch)[::37].tolist() == moved[::37].tolist()
    later = workload.lengths(requests(workload, 4, step=2))
    assert abs(np.corrcoef(np.log(later - 0.5), np.log(moved - 0.5))[0, 1]) < 0.5


# Table of the study that fitted them: ICC and mean of the capped lengths (docs/simulator.md).
@pytest.mark.parametrize(
    ("name", "icc", "mean", "at_cap"),
    [("7b_8k", 0.17, 1187, 0.023), ("14b_16k", 0.36, 1330, 0.022), ("32b_32k", 0.69, 1646, 0.032)],
)
def test_the_presets_are_those_of_the_fit(name: str, icc: float, mean: float, at_cap: float) -> None:
    config = setting(name)
    lengths = build_workload(config).reference(64)
    assert intraclass_correlation(lengths.tolist()) == pytest.approx(icc, abs=0.03)
    assert lengths.mean() == pytest.approx(mean, rel=0.05)
    assert (lengths == config.data.max_response_length).mean() == pytest.approx(at_cap, abs=0.004)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_true_law_is_that_of_the_samples(name: str) -> None:
    workload = build_workload(setting(name))
    lengths = workload.reference(200)
    which = np.repeat(np.arange(len(workload.prompts)), 200)
    for threshold in (50, 500, 5000, 10**5):
        share = workload.survival(which, np.full(len(which), threshold)).mean()
        assert share == pytest.approx((lengths > threshold).mean(), abs=0.002)
    assert coverage(workload, lengths.ravel(), 0.95) == pytest.approx(1, abs=0.02)
    assert own_coverage(workload, which, lengths.ravel(), 0.95) == pytest.approx(1, abs=0.02)


def test_coverages_see_each_race() -> None:
    """Without the longest quarter of each prompt's responses nothing of its own tail is left; without the longest quarter
    of the prompts, half of the pooled tail is, and all of the own."""
    workload = build_workload(setting("7b_8k"))
    lengths = np.sort(workload.reference(200), axis=1)
    which = np.repeat(np.arange(len(workload.prompts))[:, None], 200, axis=1)
    raced, own = lengths[:, :150], which[:, :150]
    assert own_coverage(workload, own.ravel(), raced.ravel(), 0.95) < 1e-4
    easy = np.argsort(lengths.mean(1))[: len(lengths) * 3 // 4]
    assert own_coverage(workload, which[easy].ravel(), lengths[easy].ravel(), 0.95) == pytest.approx(1, abs=0.03)
    assert 0.3 < coverage(workload, lengths[easy].ravel(), 0.95) < 0.7


def test_scores_have_the_accuracy_and_equal_groups() -> None:
    workload = build_workload(setting("7b_8k"))
    batch = requests(workload, 8)
    lengths = workload.lengths(batch)
    scores = workload.scores(batch, lengths).reshape(-1, 8)
    assert scores.mean() == pytest.approx(0.5, abs=0.03)
    assert (scores.std(1) == 0).mean() == pytest.approx(0.5, abs=0.08)
    assert not scores.ravel()[lengths == 8192].any()


CSV = "step,prompt_tokens,prompt,response_tokens,correct\n0,50,a,10 20 30,1 0 1\n1,60,b,400 500,1 1\n2,70,a,7,0\n"


def measured(
    tmp_path: Path, text: str = CSV, *overrides: str, name: str = "lengths.csv"
) -> tuple[MeasuredWorkload, Config]:
    (tmp_path / name).write_text(text, encoding="utf-8")
    config = small(f"workload.lengths_file={tmp_path / name}", *overrides)
    workload = build_workload(config)
    assert isinstance(workload, MeasuredWorkload)
    return workload, config


def test_a_file_is_resampled_by_prompt(tmp_path: Path) -> None:
    workload, _ = measured(tmp_path, CSV, "workload.num_prompts=7")
    names = [name for name, _, _ in workload.prompts]
    assert names[:6] == ["a", "b", "a~2", "a/1", "b/1", "a~2/1"] and names[6] in ("a/2", "b/2", "a~2/2")
    assert [len(tokens) for _, tokens, _ in workload.prompts[:3]] == [50, 60, 70]
    batch = requests(workload, 200)
    lengths = workload.lengths(batch).reshape(-1, 200)
    assert [set(row) for row in lengths[:6].tolist()] == [{10, 20, 30}, {400, 500}, {7}] * 2
    assert (lengths[0].tolist() != lengths[3].tolist()) and abs((lengths[0] == 10).mean() - 1 / 3) < 0.12
    scores = workload.scores(batch, lengths.ravel()).reshape(-1, 200)
    assert (scores[0] == (lengths[0] != 20)).all() and scores[1].all() and not scores[2].any()


def test_the_law_of_a_file_is_the_file(tmp_path: Path) -> None:
    workload, _ = measured(tmp_path, CSV, "workload.num_prompts=3")
    which = np.array([0, 0, 0, 0, 1, 2, 2])
    assert workload.survival(which, np.array([9, 10, 25, 30, 400, 6, 7])) == pytest.approx(
        [1, 2 / 3, 1 / 3, 0, 0.5, 1, 0]
    )


def test_a_file_without_prompt_lengths_and_scores_takes_those_of_the_config(tmp_path: Path) -> None:
    text = "response_tokens\n" + "100 200\n" * 300
    workload, config = measured(tmp_path, text, "workload.prompt_tokens=33", "workload.accuracy=0.25")
    assert len(workload.prompts) == 64 == config.workload.num_prompts and len(workload.prompts[0][1]) == 33
    batch = requests(workload, 64)
    assert workload.scores(batch, workload.lengths(batch)).mean() == pytest.approx(0.25, abs=0.1)


def test_lengths_above_the_cap_are_cut_and_counted(tmp_path: Path) -> None:
    workload, _ = measured(tmp_path, "response_tokens\n5 9000 9001\n")
    assert workload.num_over_cap == 2
    assert workload.reference(50).max() == 8192


def test_the_samples_of_a_run_are_a_file(tmp_path: Path) -> None:
    row = {"step": 1, "prompt_id": "p", "num_prompt_tokens": 9, "num_response_tokens": 4, "reward": 1.0}
    rows = [row, {**row, "num_response_tokens": 5, "reward": 0.5}, {**row, "step": 2}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    for path in (tmp_path, tmp_path / "samples.jsonl"):
        first, second = read_lengths(str(path))
        assert (first.name, first.response_tokens, first.prompt_tokens, first.correct) == (
            "p",
            (4, 5),
            9,
            (True, False),
        )
        assert (second.name, second.response_tokens) == ("p~2", (4,))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", r"line 1: the header \(empty\) has no column response_tokens"),
        ("a.csv", "prompt,tokens\na,1\n", "line 1: the header prompt,tokens has no column response_tokens"),
        ("a.csv", "response_tokens\n", "no prompt in it"),
        ("a.csv", CSV + "3,1,c,12 x,0 0\n", "line 5: response_tokens='12 x'"),
        ("a.csv", CSV + "3,1,c,,\n", "line 5: response_tokens=''"),
        ("a.csv", CSV + "3,1,c\n", "line 5: response_tokens=None"),
        ("a.csv", CSV + "3,1,c,0 5,0 0\n", "line 5: response_tokens='0 5'"),
        ("a.csv", CSV + "3,1,c,5 6,1\n", "line 5: correct='1' must hold 0 or 1 for each of the 2 responses"),
        ("a.csv", CSV + "3,1,c,5 6,1 2\n", "line 5: correct='1 2'"),
        ("a.csv", CSV + "3,-1,c,5 6,1 1\n", "line 5: prompt_tokens='-1'"),
        ("a.csv", CSV + "3, ,c,5 6,1 1\n", "line 5: prompt_tokens=' '"),
        ("a.csv", CSV + "3,12 99,c,5 6,1 1\n", "line 5: prompt_tokens='12 99'.*a prompt has one length"),
        ("a.csv", CSV + "3,1,c,5,6,1 1\n", "line 5: more cells than the header has columns"),
        ("a.jsonl", '{"step": 1}\n', "line 1: not a row of samples.jsonl .KeyError: 'num_response_tokens'"),
        ("a.jsonl", "\n", "line 1: not a row of samples.jsonl"),
    ],
)
def test_a_malformed_file_names_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_lengths(str(tmp_path / name))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*samples\.jsonl \(No such file"):
        read_lengths(str(tmp_path))


def test_the_law_must_be_named() -> None:
    with pytest.raises(
        ConfigError, match=r"set workload\.preset \(7b_8k, .* or workload\.median_tokens, workload\.sigma"
    ):
        build_workload(small("workload.preset=null"))
    workload = build_workload(
        small(
            "workload.preset=null", "workload.median_tokens=50", "workload.sigma_within=0", "workload.sigma_between=0"
        )
    )
    assert set(workload.reference(4).ravel().tolist()) <= {50, 51}


def test_keys_override_the_preset() -> None:
    base, longer = (build_workload(setting("7b_8k", *o)).reference(8) for o in ([], ["workload.median_tokens=1082"]))
    assert np.median(longer) == pytest.approx(2 * np.median(base), rel=0.01)
    assert PRESETS["7b_8k"].median_tokens == 541
