#!/bin/bash
# Qwen2.5-32B, responses of up to 32k tokens, 64 GPUs of 80 GB: the paper's largest setting, in a shape that fits today.
#   sbatch --account=me slurm/train_qwen2.5_32b.sh model.path=/data/Qwen2.5-32B data.train_files=[/data/train.jsonl]
# Variables and exit codes: slurm/common.sh. Not yet run on GPUs (docs/status.md).
#SBATCH --job-name=qwen2.5-32b
#SBATCH --nodes=8
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
# The paper's TP 4, PP 1, CP 4 need context parallelism and a trainer that leaves the GPU during the rollout: not in this version.
run_job configs/qwen2.5_32b_32k.yaml training.tensor_model_parallel_size=8 training.pipeline_model_parallel_size=2 \
    training.context_parallel_size=1 "${saves[@]}" "$@"
