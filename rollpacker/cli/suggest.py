"""`rollpacker suggest`: from a model and a cluster a config that fits and is fast, by simulation; no torch, no MPI.

The report says what the choice rests on: memory against the GPU, predicted seconds, what the race drops, and why not the
next best. The config goes to --out, or to standard output with the report on standard error.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollpacker.cli.dry_run import memory_table
from rollpacker.cli.simulate import describe_workload
from rollpacker.cli.terminal import columns, open_console
from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import missing_features, value_of
from rollpacker.config_file import build_config, to_short_yaml
from rollpacker.config_simulator import WorkloadConfig
from rollpacker.memory_estimate import GIB
from rollpacker.simulator.cluster import model_shape
from rollpacker.simulator.constants import GPUS, MODELS
from rollpacker.simulator.shapes import MAX_NODES, RESERVE, fewest_nodes, num_gpus
from rollpacker.simulator.suggest import (
    TOLERANCE,
    Prediction,
    Suggestion,
    describe_shape,
    describe_training,
    race_of,
    suggest,
    with_job_length,
)
from rollpacker.simulator.workload import PRESET_CAPS, build_workload

HELP = "Suggest a config for a model and a cluster (under a minute on one core; no GPU, no MPI): shapes, race, memory."

_DECIDED = (
    "training.tensor_model_parallel_size", "training.pipeline_model_parallel_size", "training.context_parallel_size",
    "training.recompute_granularity", "training.max_tokens_per_gpu", "rollout.tensor_model_parallel_size",
    "rollout.gpu_memory_utilization", "rollout.max_num_seqs", "tail_batching.eta_prompts", "tail_batching.eta_responses",
)  # fmt: skip
_OPTIONS = {
    "model.path": "--model",
    "trainer.nnodes": "--gpus",
    "trainer.n_gpus_per_node": "--gpus-per-node",
    "trainer.gpu_memory_gib": "--gpu-memory-gib",
    "cluster.gpu": "--gpu",
    "data.max_prompt_length": "--max-prompt-length",
    "data.max_response_length": "--max-response-length",
    "data.train_batch_size": "--train-batch-size",
    "rollout.n": "--n",
    "tail_batching.mode": "--mode",
    "workload.preset": "--preset",
    "workload.lengths_file": "--lengths-file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add = parser.add_argument
    add("--model", required=True, help=f"Hugging Face folder (config.json is enough), or {', '.join(MODELS)}")
    add("--gpus", type=int, required=True, metavar="N", help="GPUs of the job")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (8)")
    add("--gpu", choices=list(GPUS), default="h800", help="which GPU (h800)")
    add("--gpu-memory-gib", type=float, metavar="GIB", help="memory of a GPU as torch reports it (by --gpu)")
    add("--max-prompt-length", type=int, default=1024, metavar="TOKENS", help="longest prompt (1024)")
    add("--max-response-length", type=int, default=8192, metavar="TOKENS", help="length cap of a response (8192)")
    add("--train-batch-size", type=int, default=128, metavar="P0", help="prompts of a step (128)")
    add("--n", type=int, default=8, metavar="R0", help="responses of a prompt (8)")
    law = parser.add_mutually_exclusive_group().add_argument
    law("--preset", choices=list(PRESET_CAPS), help="law of the response lengths (the one fitted to the nearest cap)")
    law("--lengths-file", metavar="FILE", help="measured lengths instead: a CSV, a run directory or its samples.jsonl")
    add(
        "--mode",
        choices=("paper", "off"),
        default="paper",
        help="paper: tail batching may be suggested, its coverage is told (default); off: without it",
    )
    add("--out", metavar="FILE", help="write the config there (default: standard output, the report on standard error)")
    add(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        help="keys of the job that are not searched (cluster.train_mfu=0.4), or a recipe to lay on it (.yaml)",
    )
    add("--debug", action="store_true", help="show a traceback for configuration errors too")


def run(arguments: argparse.Namespace) -> int:
    """Search, report, write; the exit code."""
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and (out.exists() or not out.parent.is_dir()):
        problem = "it is there already" if out.exists() else f"there is no folder {out.parent}"
        raise ConfigError(f"--out {out}: {problem}. Name a file that is new, in a folder that is there.")
    base = _job(arguments)
    model = model_shape(base.model.path)
    console = open_console(sys.stderr if out is None else sys.stdout)
    console.print(_describe(base, arguments), end="", soft_wrap=True)
    with Console(stderr=True).status("") as status:  # nothing where standard error is no terminal
        found = suggest(base, model, progress=status.update)
    _report(console, found)
    text = _header(found, out) + to_short_yaml(found.best[0].config, _comments(found))
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")
        console.print(f"written to {out}; rollpacker simulate {out} repeats the prediction", soft_wrap=True)
    return 0


def _job(arguments: argparse.Namespace) -> Config:
    """What the command line fixes, with placeholders for what is searched."""
    gpus, per_node = arguments.gpus, min(arguments.gpus, arguments.gpus_per_node)
    if per_node < 1 or gpus % per_node:
        raise ConfigError(
            f"--gpus {gpus} --gpus-per-node {arguments.gpus_per_node}: a job has whole nodes; give a multiple of "
            f"{max(per_node, 1)} GPUs, or other nodes."
        )
    name = f"{Path(arguments.model).name.lower()}_{gpus}_gpus"
    prompt, response = arguments.max_prompt_length, arguments.max_response_length
    memory_gib = GPUS[arguments.gpu].memory_gib if arguments.gpu_memory_gib is None else arguments.gpu_memory_gib
    tree: dict[str, Any] = {
        "model": {"path": arguments.model},
        "data": {
            "train_files": ["data/train.jsonl"],
            "train_batch_size": arguments.train_batch_size,
            "max_prompt_length": prompt,
            "max_response_length": response,
        },
        "rollout": {"n": arguments.n},
        "tail_batching": {"mode": arguments.mode},
        "training": {"max_tokens_per_gpu": max(prompt + response, 1)},
        "trainer": {
            "device": "cuda",
            "nnodes": gpus // per_node,
            "n_gpus_per_node": per_node,
            "gpu_memory_gib": memory_gib,
            "experiment_name": name,
            "default_local_dir": f"outputs/{name}",
        },
        "workload": {
            "preset": None if arguments.lengths_file else arguments.preset or _nearest_preset(response),
            "lengths_file": arguments.lengths_file,
            "prompt_tokens": min(WorkloadConfig().prompt_tokens, max(prompt, 1)),
        },
        "cluster": {"gpu": arguments.gpu},
    }
    plain = build_config(tree, [], prompts=None)
    config = with_job_length(build_config(tree, arguments.overrides, prompts=None))
    words = {word.partition("=")[0].strip() for word in arguments.overrides}
    for key in (*_DECIDED, *_OPTIONS):
        value = value_of(config, key)
        if key in words or value != value_of(plain, key):  # a recipe may hold it, too
            if key in _OPTIONS:
                raise ConfigError(f"{key}={value}: say it with {_OPTIONS[key]}.")
            raise ConfigError(
                f"{key}={value}: suggest chooses {key}; leave it out, and change it in the config it writes."
            )
    if missing := missing_features(config):
        raise ConfigError(missing[0])
    if config.cluster.offload_trainer:
        raise ConfigError("cluster.offload_trainer=true: this version trains without; `rollpacker simulate` has it.")
    return config


def _nearest_preset(max_response_length: int) -> str:
    """The preset whose cap is nearest, by ratio."""
    return min(PRESET_CAPS, key=lambda name: abs(math.log(PRESET_CAPS[name] / max(max_response_length, 1))))


def _describe(base: Config, arguments: argparse.Namespace) -> str:
    """The job: what the suggestion is for."""
    lines = [
        f"model     {base.model.path}, {model_shape(base.model.path).num_parameters() / 1e9:.1f} B parameters",
        f"cluster   {num_gpus(base)} x {base.cluster.gpu} of {base.trainer.gpu_memory_gib:.1f} GiB, "
        f"{base.trainer.n_gpus_per_node} a node",
        *describe_workload(base, build_workload(base)),
        f"steps     {base.data.train_batch_size} prompts x {base.rollout.n} responses of up to "
        f"{base.data.max_response_length:,} tokens",
    ]
    if base.workload.preset is not None and not arguments.preset:
        cap = PRESET_CAPS[base.workload.preset]
        lines.insert(
            3, f"          the preset fitted to the nearest cap, {cap:,}; --lengths-file takes lengths of your own"
        )
    return "\n".join(lines) + "\n"


def _report(console: Console, found: Suggestion) -> None:
    best, *others = found.best
    console.print(
        f"searched  {found.num_fitting + len(found.rejected)} shapes: {found.num_fitting} fit with {RESERVE:.0%} of the GPU "
        f"to spare, {found.num_simulations} simulations",
        soft_wrap=True,
    )
    console.print(_shapes_table(found))
    for rank, other in zip(("2nd", "3rd"), others, strict=False):
        console.print(f"Why not the {rank}: {why_not(other, best)}", soft_wrap=True)
    if len(found.races) > 1:
        console.print(_race_table(found))
        console.print(
            "c(.95): trained share of the longest 5 % of all responses, of what is due; o(.95): of each prompt's own. 1 is "
            f"unbiased.\nOf races within {TOLERANCE:.0%} of the fastest the least biased is suggested; --mode off has none.",
            soft_wrap=True,
        )
    console.print(f"\n{memory_table(best.candidate.estimate)}\n", soft_wrap=True)
    if best.config.training.context_parallel_size > 1:
        console.print(f"{_cannot_train(best.config)}\n", soft_wrap=True)


def _cannot_train(config: Config) -> str:
    nodes = fewest_nodes(config, model_shape(config.model.path))
    gpus = f"{'at least' if nodes else 'more than'} {(nodes or MAX_NODES) * (config.trainer.n_gpus_per_node or 1)}"
    return (
        f"Warning: {num_gpus(config)} GPUs hold it with context parallelism alone, which this version checks but does not "
        f"train with. Without, it needs {gpus} GPUs."
    )


def _shapes_table(found: Suggestion) -> Table:
    table = columns("", *("suggested", "2nd", "3rd")[: len(found.best)])
    rows = [_facts(prediction) for prediction in found.best]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _facts(prediction: Prediction) -> dict[str, str]:
    config, estimate, summary = prediction.config, prediction.candidate.estimate, prediction.summary
    training, rollout = config.training, config.rollout
    size, total = rollout.tensor_model_parallel_size, estimate.gpu_bytes / GIB
    return {
        "training": describe_training(config),
        "recompute": training.recompute_granularity or "none",
        "rollout": f"TP {size} x {num_gpus(config) // size} replicas",
        "race": _race_name(prediction),
        "memory, training": f"{estimate.training.num_bytes / GIB:.1f} of {total:.1f} GiB",
        "memory, rollout": f"{estimate.rollout.num_bytes / GIB:.1f} of {total:.1f} GiB",
        "KV cache of a replica": f"{estimate.kv_cache.num_tokens:,} tokens",
        "rollout s": f"{summary.rollout_s_per_step:,.1f}",
        "training s": f"{prediction.training_s:,.1f}",
        "step s": f"{prediction.step_s:,.1f}",
        "ms per trained sample": f"{1e3 * prediction.step_s / (config.data.train_batch_size * rollout.n):,.1f}",
        "rollout bubble": f"{summary.bubble_ratio:.1%}",
        "c(.95), o(.95)": f"{summary.coverage_p95:.2f}, {summary.own_coverage_p95:.2f}",
    }


def _race_name(prediction: Prediction) -> str:
    eta = race_of(prediction.config)
    return "off" if eta is None else f"eta {eta:g}"


def _race_table(found: Suggestion) -> Table:
    """What each race costs and buys on the suggested shape."""
    table = columns("race", "rollout s", "training s", "step s", "wasted tokens", "c(.95)", "o(.95)", "")
    for prediction in found.races:
        summary = prediction.summary
        table.add_row(
            _race_name(prediction),
            f"{summary.rollout_s_per_step:,.1f}",
            f"{prediction.training_s:,.1f}",
            f"{prediction.step_s:,.1f}",
            f"{summary.wasted_token_ratio:.1%}",
            f"{summary.coverage_p95:.2f}",
            f"{summary.own_coverage_p95:.2f}",
            "suggested" if race_of(prediction.config) == race_of(found.best[0].config) else "",
        )
    return table


def why_not(other: Prediction, best: Prediction) -> str:
    """By how much a shape is slower, in which phase most, and what in it is slower."""
    rollout_s = other.summary.rollout_s_per_step - best.summary.rollout_s_per_step
    training_s = other.training_s - best.training_s
    between_s = other.step_s - best.step_s - rollout_s - training_s
    most = max(rollout_s, training_s, between_s)
    if most == rollout_s:
        seconds = other.summary.rollout_s_per_step, best.summary.rollout_s_per_step
        slower = "rollout {:,.2f} s instead of {:,.2f}: ".format(*seconds) + _why_rollout(other, best)
    elif most == training_s:
        seconds = other.training_s, best.training_s
        slower = "training {:,.2f} s instead of {:,.2f}: ".format(*seconds) + _why_training(other.config, best.config)
    else:
        slower = f"refit {between_s:,.2f} s longer: each GPU takes more weights"
    return (
        f"{describe_shape(other.config)}: {other.step_s:,.1f} s a step instead of {best.step_s:,.1f} "
        f"({other.step_s / best.step_s - 1:+.1%}); {slower}."
    )


def _why_rollout(other: Prediction, best: Prediction) -> str:
    size, best_size = (p.config.rollout.tensor_model_parallel_size for p in (other, best))
    if size != best_size:
        replicas = num_gpus(other.config) // size
        if size > best_size:
            return f"{replicas} replicas share out the requests, and all-reduces do not shrink"
        return f"each GPU reads 1/{size} of the weights for every token, instead of 1/{best_size}"
    tokens = (p.candidate.estimate.kv_cache.num_tokens for p in (other, best))
    return "KV cache of {:,} tokens instead of {:,}, ".format(*tokens) + (
        f"{other.num_preemptions:,} preemptions instead of {best.num_preemptions:,}"
    )


def _why_training(other: Config, best: Config) -> str:
    mine, its = other.training, best.training
    if mine.recompute_granularity and not its.recompute_granularity:
        return "it recomputes activations, which do not fit otherwise"
    if mine.pipeline_model_parallel_size > its.pipeline_model_parallel_size:
        return f"a pipeline of {mine.pipeline_model_parallel_size} stages fills and drains"
    if mine.tensor_model_parallel_size > its.tensor_model_parallel_size:
        return f"all-reduces among {mine.tensor_model_parallel_size} ranks in every layer"
    return f"{num_gpus(other) // mine.replica_size} replicas share out the sequences less evenly, and exchange more"


def _header(found: Suggestion, out: Path | None) -> str:
    best, config = found.best[0], found.best[0].config
    name, lengths = out or "FILE.yaml", config.workload.lengths_file or config.workload.preset or "a law of their own"
    return (
        f"# {config.model.path} on {num_gpus(config)} x {config.cluster.gpu}, by rollpacker suggest: {best.step_s:,.1f} s a "
        f"step\n# (rollout {best.summary.rollout_s_per_step:,.1f}, training {best.training_s:,.1f}), simulated with response "
        f"lengths of {lengths}; not measured.\n"
        f"#   rollpacker simulate {name}           # repeats the prediction\n"
        f"#   rollpacker train {name} --dry-run    # checks files, shapes and memory, without a GPU\n"
        f"#   mpirun -n {num_gpus(config)} rollpacker train {name}    # or srun\n"
    )


def _comments(found: Suggestion) -> dict[str, str]:
    """The keys that the file shows whatever their value, and why they have it."""
    best = found.best[0]
    estimate, summary = best.candidate.estimate, best.summary
    free_gib = (estimate.gpu_bytes - estimate.rollout.num_bytes) / GIB
    trainer_gib = sum(p.num_bytes for p in estimate.rollout.parts if p.name.startswith("trainer")) / GIB
    race = f"trains {summary.coverage_p95:.2f} of its due of the longest 5 % of responses, {summary.own_coverage_p95:.2f} of "
    return {
        "model.path": "the folder with its weights and tokenizer",
        "data.train_files": "your prompts (docs/data.md)",
        "data.train_batch_size": "",
        "data.max_prompt_length": "",
        "data.max_response_length": "",
        "rollout.n": "",
        "rollout.tensor_model_parallel_size": "",
        "rollout.gpu_memory_utilization": f"beside the trainer's {trainer_gib:.1f} GiB; {free_gib:.1f} stay free",
        "rollout.max_num_seqs": "for the race of most requests that was tried, rounded up; at most 512",
        "tail_batching.mode": "" if race_of(best.config) is None else f"{race}each prompt's own",
        **(
            {} if race_of(best.config) is None else {"tail_batching.eta_prompts": "", "tail_batching.eta_responses": ""}
        ),
        "training.tensor_model_parallel_size": "",
        "training.pipeline_model_parallel_size": "",
        "training.dtype": "",
        "training.max_tokens_per_gpu": "",
        "training.recompute_granularity": "",
        "training.lr": "not searched",
        "workload.num_prompts": "read by rollpacker simulate alone, as is the rest of this section",
        "cluster.gpu": "likewise",
    }
