"""The run directory as tools read it: config.yaml, metrics.jsonl, samples.jsonl, validation.jsonl.

The names are frozen (docs/metrics.md): other tools rely on them.
Invariants: metrics.jsonl has one row for each step, with every key in each row; each row is on disk when
`write` returns, so a killed run loses nothing that was reported; an earlier run is moved aside, never overwritten.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollpacker.config import ConfigError
from rollpacker.runtime.loggers import Logger

Metric = float | int | None

STEP_KEY = "training/global_step"

# `val-core/*` is not here: its keys depend on the validation files, and validation.jsonl holds them.
METRIC_NAMES: tuple[str, ...] = (
    STEP_KEY,
    "training/epoch",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_s/save_checkpoint",
    "timing_s/testing",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/p50",
    "response_length/p95",
    "response_length/p99",
    "response_length/clip_ratio",
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "critic/rewards/mean",
    "critic/rewards/max",
    "critic/rewards/min",
    "critic/advantages/mean",
    "critic/advantages/max",
    "critic/advantages/min",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "actor/num_updates",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_logprobs_diff_mean",
    "training/rollout_logprobs_diff_max",
    "mismatch/kl",
    "mismatch/k3_kl",
    "mismatch/weight_mean",
    "mismatch/effective_sample_size",
    "mismatch/masked_ratio",
    "perf/throughput",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "rollout/is_long_round",
    "rollout/long_queue_len",
    "rollout/aborted_prompts",
    "rollout/aborted_responses",
    "rollout/wasted_token_ratio",
    "rollout/num_preemptions",
    "rollout/tensor_model_parallel_size",
    "filter/num_launched",
    "filter/num_rejected",
    "bubble/rollout_ratio",
    "bubble/reward_ratio",
    "bubble/train_ratio",
    "bubble/sync_ratio",
    "stream/num_groups_streamed",
    "stream/scale_down_progress",
    "stream/overlap_s",
    "planner/tp",
    "planner/switched",
    "reward/timeout_count",
    "reward/error_count",
    "reward/timeout_budget_s",
    "audit/icc",
    "audit/coverage_p50",
    "audit/coverage_p90",
    "audit/coverage_p95",
    "audit/coverage_p99",
    "audit/own_coverage_p95",
    "audit/num_groups",
    "exact/num_copies",
    "exact/num_rejected",
    "exact/num_forced",
)

SAMPLE_FIELDS: tuple[str, ...] = (
    "step",
    "epoch",
    "round",
    "prompt_id",
    "response_index",
    "domain",
    "num_prompt_tokens",
    "num_response_tokens",
    "finish_reason",
    "reward",
    "weight_version",
    "launch_s",
    "finish_s",
)

TRACE = "events.trace.json"
_GROWING = ("metrics.jsonl", "samples.jsonl", "validation.jsonl", TRACE)
_KNOWN = frozenset(METRIC_NAMES)


def prepare_run_dir(path: str | Path, resolved_yaml: str, key: str = "trainer.default_local_dir=") -> Path | None:
    """Create the run directory and write config.yaml; on one rank only.

    A directory that holds a metrics.jsonl is a run: it is moved to `<path>.1`, `.2`, ... (the first free name). Returns
    where the earlier run has gone, None if there was none. Raises ConfigError, opened by `key`, when it cannot be written.
    """
    run_dir = Path(path).absolute()
    moved_to = None
    try:
        if (run_dir / "metrics.jsonl").exists():
            moved_to = _first_free(run_dir)
            run_dir.rename(moved_to)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(resolved_yaml, encoding="utf-8")
    except (FileExistsError, NotADirectoryError) as error:
        in_the_way = next((p for p in (*reversed(run_dir.parents), run_dir) if p.exists() and not p.is_dir()), run_dir)
        raise ConfigError(
            f"{key}{path}: {in_the_way} is a file, expected a directory. Remove or rename the "
            "file, or choose another directory."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{key}{path}: cannot write there ({error.strerror}: {error.filename}). Choose a "
            "directory that you may write, or change its permissions."
        ) from error
    return moved_to


def file_sizes(run_dir: Path) -> dict[str, int]:
    """Bytes of the files that grow with a run, those that exist; `resume_run_dir` takes them back to it."""
    return {name: (run_dir / name).stat().st_size for name in _GROWING if (run_dir / name).exists()}


def resume_run_dir(run_dir: Path, resolved_yaml: str, sizes: Mapping[str, int]) -> None:
    """Cut what a killed run wrote after its checkpoint off the files, and write config.yaml. Raises ConfigError."""
    now = file_sizes(run_dir)
    for name in now:
        if now[name] < sizes.get(name, 0):
            raise ConfigError(
                f"{run_dir / name} has {now[name]:,} bytes, but {sizes[name]:,} when the checkpoint was written: rows are "
                "missing. Restore it, or start anew with trainer.resume_mode=disable."
            )
    try:
        for name in now.keys() - {TRACE}:  # which has an end of its own
            os.truncate(run_dir / name, sizes.get(name, 0))
        (run_dir / "config.yaml").write_text(resolved_yaml, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir}: cannot write there ({error.strerror}: {error.filename}). Change its "
            "permissions, or mend the disk."
        ) from error


def _first_free(run_dir: Path) -> Path:
    number = 1
    while (candidate := run_dir.with_name(f"{run_dir.name}.{number}")).exists() or candidate.is_symlink():
        number += 1
    return candidate


class MetricsWriter:
    """Writes the numbers of a run: metrics.jsonl, samples.jsonl, validation.jsonl, loggers. Used by rank 0 alone.

    It closes the loggers. Raises OSError when the disk refuses.
    """

    def __init__(self, run_dir: Path, loggers: Sequence[Logger] = ()) -> None:
        self._run_dir = run_dir
        self._loggers = loggers
        self._metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = (run_dir / "samples.jsonl").open("a", encoding="utf-8")
        self._last_step: int | None = None

    def write(self, metrics: Mapping[str, Metric]) -> None:
        """Append the row of one step. Keys not given, None, NaN and infinities become null.

        Raises ValueError for an unknown name and for a step that does not follow the last one, TypeError for a value
        that is not a number.
        """
        unknown = sorted(metrics.keys() - _KNOWN)
        if unknown:
            near = difflib.get_close_matches(unknown[0], METRIC_NAMES, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown metric(s) {', '.join(unknown)}: the list is frozen. Did you mean {near}?")
        row = {name: _finite(name, metrics.get(name)) for name in METRIC_NAMES}
        step = row[STEP_KEY]
        if not isinstance(step, int) or (self._last_step is not None and step <= self._last_step):
            raise ValueError(
                f"{STEP_KEY}={step}: expected a whole number after {self._last_step}, one row for each step."
            )
        self._last_step = step
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        self._log(step, row)

    def write_validation(self, row: Mapping[str, Metric | str]) -> None:
        """Append the row of one validation to validation.jsonl; the loggers get its val-core/* values."""
        plain = append_validation(self._run_dir, row)
        self._log(plain["step"], {name: value for name, value in plain.items() if name.startswith("val-core/")})

    def _log(self, step: Any, row: Mapping[str, Any]) -> None:
        values = {name: value for name, value in row.items() if value is not None}
        for logger in self._loggers:
            logger.write(step, values)

    def write_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one object for each trained sample; each row has exactly SAMPLE_FIELDS, else ValueError."""
        lines = []
        for row in rows:
            if row.keys() != set(SAMPLE_FIELDS):
                missing = [name for name in SAMPLE_FIELDS if name not in row]
                extra = sorted(row.keys() - set(SAMPLE_FIELDS))
                raise ValueError(f"sample row: missing {missing}, unknown {extra}; the fields are frozen.")
            lines.append(json.dumps({name: _plain(name, row[name]) for name in SAMPLE_FIELDS}) + "\n")
        self._samples.write("".join(lines))
        self._samples.flush()

    def close(self) -> None:
        """Close the files; everything is on disk already. Closing twice is allowed."""
        self._metrics.close()
        self._samples.close()
        for logger in self._loggers:
            logger.close()


def append_validation(run_dir: Path, row: Mapping[str, Metric | str]) -> dict[str, Metric | str]:
    """Append a row to the validation.jsonl of a run directory; the row as it stands there. Raises TypeError and OSError."""
    plain = {name: _plain(name, value) for name, value in row.items()}
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "validation.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(plain) + "\n")
    return plain


def _finite(name: str, value: Any) -> Metric:
    """A number as JSON knows it: NumPy's become Python's, what is not finite becomes null."""
    if value is None:
        return None
    if isinstance(value, (numbers.Integral, np.bool_)):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{name}={value!r}: expected a number or None, got {type(value).__name__}.")


def _plain(name: str, value: Any) -> Metric | str:
    if type(value) in (int, str):  # nearly all there are; the checks below take ten times as long
        return value
    return value if isinstance(value, str) else _finite(name, value)
