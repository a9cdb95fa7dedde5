#!/bin/bash
# Qwen2.5-14B, responses of up to 16k tokens, 32 GPUs of 80 GB: the paper's middle setting, without its context parallelism.
#   sbatch --account=me slurm/train_qwen2.5_14b.sh model.path=/data/Qwen2.5-14B data.train_files=[/data/train.jsonl]
# Variables and exit codes: slurm/common.sh. Not yet run on GPUs (docs/status.md).
#SBATCH --job-name=qwen2.5-14b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail
# shellcheck source=slurm/common.sh
source "${SLURM_SUBMIT_DIR:?start this with sbatch, from the root of the repository}/slurm/common.sh"

# A crash then costs a step at most; checkpoints are written while training goes on. A larger number spares the file system.
saves=(trainer.save_freq=1 trainer.keep_last=2)
# The paper's context parallelism of 2 is not in this version; without it twice the activations are on each GPU, and fit.
run_job configs/qwen2.5_14b_16k.yaml training.context_parallel_size=1 "${saves[@]}" "$@"
