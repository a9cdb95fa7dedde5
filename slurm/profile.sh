#!/bin/bash
# Profile steps 2 and 3 of a training job with Nsight Systems and say where the GPU time went.
#   sbatch -N 2 slurm/profile.sh CONFIG.yaml [section.key=value ...]
# One report per rank and step lands in $PROFILE_DIR (default: profile/<job id>), the table and the page beside them.
#SBATCH --job-name=rollpacker-profile
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

config=${1:?usage: sbatch -N NODES slurm/profile.sh CONFIG.yaml [section.key=value ...]}
shift
folder=${PROFILE_DIR:-profile/$SLURM_JOB_ID}
mkdir -p "$folder"

# The capture range is opened by profiler.tool=nsys around each chosen step; "repeat" makes one report of each. Graph nodes
# cost more than whole graphs, but show every kernel; change node to graph when the overhead hurts.
srun --mpi=pmix nsys profile \
  --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none \
  --capture-range=cudaProfilerApi --capture-range-end=repeat --kill=none \
  --output="$folder/%h.rank%q{SLURM_PROCID}.%p" --force-overwrite=true \
  .venv/bin/rollpacker train "$config" profiler.tool=nsys "profiler.steps=[2,3]" trainer.total_training_steps=3 "$@"

for report in "$folder"/*.nsys-rep; do
  nsys export -t sqlite --force-overwrite=true -o "${report%.nsys-rep}.sqlite" "$report"
done

# Exit code 4 means "not to be trusted": the output says why, and is there all the same.
.venv/bin/python tools/profile_bubbles.py "$folder" --align nccl \
  --json "$folder/bubbles.json" --csv "$folder/bubbles.csv" --svg "$folder/bubbles.svg" --html "$folder/bubbles.html"
