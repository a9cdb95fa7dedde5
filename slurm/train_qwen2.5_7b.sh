#!/bin/bash
# Qwen2.5-7B, responses of up to 8k tokens, 16 GPUs of 80 GB: the paper's smallest setting.
#   sbatch --account=me slurm/train_qwen2.5_7b.sh model.path=/data/Qwen2.5-7B data.train_files=[/data/train.jsonl]
# Check it on a login node first: rollpacker train configs/qwen2.5_7b_8k.yaml --dry-run model.path=... data.train_files=[...]
# Variables and exit codes: slurm/common.sh. Not yet run on GPUs (docs/status.md).
#SBATCH --job-name=qwen2.5-7b
#SBATCH --nodes=2
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
run_job configs/qwen2.5_7b_8k.yaml "${saves[@]}" "$@"
