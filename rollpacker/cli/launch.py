"""`rollpacker launch`: checks a config for the nodes it is to run on, then submits the Slurm job. No torch, no MPI."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from rollpacker.cli import dry_run
from rollpacker.cli.terminal import add_config_arguments
from rollpacker.config import Config, ConfigError
from rollpacker.config_checks import check_parallel_shape, job_size, missing_features
from rollpacker.config_file import load_config
from rollpacker.launch.slurm import Request, batch_script, submit
from rollpacker.launch.topology import Topology, describe_groups
from rollpacker.memory_estimate import DEFAULT_GPU_MEMORY_GIB, GIB, estimate_memory
from rollpacker.model_shape import check_shapes

HELP = "Submit a training job to Slurm, checked first (docs/slurm.md)."
_GPUS_PER_NODE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser, example="configs/qwen2.5_7b_8k.yaml", override="model.path=/data/Qwen2.5-7B")
    parser.add_argument("--nodes", type=_count, required=True, metavar="N", help="nodes of the job")
    parser.add_argument(
        "--gpus-per-node",
        type=_count,
        metavar="G",
        help="ranks of a node, with a GPU each unless trainer.device=cpu; default: trainer.n_gpus_per_node, else "
        f"{_GPUS_PER_NODE}",
    )
    parser.add_argument("--account", metavar="A", help="as sbatch's, like the next three")
    parser.add_argument("--partition", metavar="P")
    parser.add_argument("--qos", metavar="Q")
    parser.add_argument("--time", metavar="T", help="12:00:00 or 2-0; default: the partition's")
    parser.add_argument("--job-name", metavar="NAME", help="default: trainer.experiment_name")
    parser.add_argument("--share-nodes", action="store_true", help="take only the GPUs, not whole nodes")
    parser.add_argument(
        "--sbatch", metavar="OPTIONS", default="", help='others: --sbatch="--constraint=h100 --mail-type=END"'
    )
    parser.add_argument("--container", metavar="IMAGE", help="run in it, by pyxis and enroot")
    parser.add_argument("--apptainer", metavar="FILE", help="run in it, by Apptainer")
    parser.add_argument(
        "--mounts", metavar="A:B,...", help="folders of the host that the container sees beside this one"
    )
    parser.add_argument("--modules", metavar="LIST", help='modules to load: "openmpi/5.0 cuda/13.0"')
    parser.add_argument("--dry-run", action="store_true", help="check, print the script, submit nothing")


def run(arguments: argparse.Namespace) -> int:
    """Check, then print the script or submit it; the exit code."""
    config = load_config(arguments.config, [*arguments.overrides, "trainer.nnodes=null"])
    per_node = arguments.gpus_per_node or config.trainer.n_gpus_per_node or _GPUS_PER_NODE
    topology = Topology(arguments.nodes, per_node)
    config = load_config(arguments.config, [*topology.overrides, *arguments.overrides])
    notes = _check(config, topology, has_container=bool(arguments.container or arguments.apptainer))
    request = _request(arguments, config)
    script = batch_script(topology, request, [arguments.config, *arguments.overrides], _variables(arguments))
    if arguments.dry_run:
        sys.stdout.write(script)
        sys.stderr.write("".join(f"# {note}\n" for note in notes) + "# nothing was submitted\n")
        return 0
    number = submit(script)
    _report(number, request.job_name, topology, config, notes)
    return 0


def _check(config: Config, topology: Topology, *, has_container: bool) -> list[str]:
    """Refuse what `rollpacker train --dry-run` would refuse, as far as it can be told without torch; what is worth a note."""
    job_size(config, topology.num_ranks, is_dry_run=False)
    if missing := missing_features(config):
        raise ConfigError(missing[0])
    if has_container and not Path(config.model.path).is_dir():
        check_parallel_shape(config, topology.num_ranks)
        return [
            f"model.path={config.model.path} is not seen from here: the job checks model, data and memory at its start"
        ]
    dry_run.check_inputs_exist(config)
    shape = check_shapes(config, topology.num_ranks)
    if config.trainer.device == "cpu":
        return []
    gib = config.trainer.gpu_memory_gib or DEFAULT_GPU_MEMORY_GIB
    estimate = estimate_memory(config, shape, topology.num_ranks, gib)
    if problems := dry_run.memory_problems(config, estimate):
        raise ConfigError(" ".join(problems))
    used = max(estimate.training.num_bytes, estimate.rollout.num_bytes) / GIB
    return [f"memory: {used:.1f} of {gib:g} GiB of each GPU (an estimate)"]


def _request(arguments: argparse.Namespace, config: Config) -> Request:
    name = arguments.job_name or config.trainer.experiment_name
    return Request(
        job_name=re.sub(r"[^\w.+-]+", "_", name),
        has_gpus=config.trainer.device != "cpu",
        shares_nodes=arguments.share_nodes,
        account=arguments.account,
        partition=arguments.partition,
        qos=arguments.qos,
        time=arguments.time,
        more=tuple(shlex.split(arguments.sbatch)),
    )


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    """What slurm/common.sh reads. Without a container the job runs with this command's own Python."""
    if arguments.container and arguments.apptainer:
        raise ConfigError("--container and --apptainer: a job runs in one of them.")
    variables = {
        "MODULES": arguments.modules,
        "SLURM_CONTAINER": arguments.container,
        "APPTAINER_IMAGE": arguments.apptainer,
        "CONTAINER_MOUNTS": arguments.mounts,
        "VENV": None if arguments.container or arguments.apptainer else sys.prefix,
    }
    return {name: value for name, value in variables.items() if value is not None}


def _report(number: str, job_name: str, topology: Topology, config: Config, notes: list[str]) -> None:
    log = f"{job_name}-{number}.out"
    unit = "ranks" if config.trainer.device == "cpu" else "GPUs"
    groups = describe_groups(config, topology)
    facts = [
        f"job       {number}: {topology.num_nodes} node(s) of {topology.ranks_per_node} {unit}",
        *(f"{name:<9} {text}" for name, text in groups.items()),
        *(f"note      {note}" for note in notes),
        f"output    {config.trainer.default_local_dir}",
        f"log       {log}, from its start on: tail -F {log}",
        f"watch     squeue --job {number}",
        f"stop      scancel {number}    # at once; the last checkpoint stays",
        f"          scontrol update JobId={number} Requeue=0 && scancel --signal=TERM {number}    # saves first",
    ]
    print("\n".join(facts))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1 on")
    return int(text)
