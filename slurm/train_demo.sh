#!/bin/bash
# The demo of `make demo` as a Slurm job: 4 CPU ranks on 2 nodes, no GPU; to see that a cluster works. A minute or two.
#   sbatch slurm/train_demo.sh                                          # needs `make env` first
#   sbatch --nodes=1 --ntasks-per-node=2 slurm/train_demo.sh trainer.total_training_steps=10
# Variables and exit codes: slurm/common.sh.
#SBATCH --job-name=rollpacker-demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail
# shellcheck source=slurm/common.sh
source "${SLURM_SUBMIT_DIR:?start this with sbatch, from the root of the repository}/slurm/common.sh"

run_job configs/demo_cpu.yaml "$@"
