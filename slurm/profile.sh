#!/bin/bash
# Profile steps 2 and 3 of a training job with Nsight Systems and say where the GPU time went (docs/profiling.md).
#   sbatch --nodes=2 slurm/profile.sh CONFIG.yaml [section.key=value ...]
# One report per rank and step lands in $PROFILE_DIR (default: profile/<job id>), the table and the page beside them.
# Variables and exit codes: slurm/common.sh; 4: the numbers are not to be trusted, profile_bubbles.py says why. Not requeued.
#SBATCH --job-name=rollpacker-profile
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --no-requeue
#SBATCH --output=%x-%j.out
set -euo pipefail
# shellcheck source=slurm/common.sh
source "${SLURM_SUBMIT_DIR:?start this with sbatch, from the root of the repository}/slurm/common.sh"

folder=${PROFILE_DIR:-profile/$SLURM_JOB_ID}
mkdir -p "$folder"
set_arguments "${1:?usage: sbatch --nodes=N slurm/profile.sh CONFIG.yaml [section.key=value ...]}" \
    profiler.tool=nsys "profiler.steps=[2,3]" trainer.total_training_steps=3 trainer.resume_mode=disable trainer.save_freq=0 \
    trainer.val_before_train=false "trainer.default_local_dir=$folder/run" "${@:2}"
check_job

# The capture range is opened by profiler.tool=nsys around each chosen step; "repeat" makes one report of each. Graph nodes
# cost more than whole graphs, but show every kernel; change node to graph when the overhead hurts.
# shellcheck disable=SC2054  # the comma is nsys's
wrapper=(nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none
    --capture-range=cudaProfilerApi --capture-range-end=repeat --kill=none
    --output="$folder/%h.rank%q{SLURM_PROCID}.%p" --force-overwrite=true)
run_ranks train "${arguments[@]}"

for report in "$folder"/*.nsys-rep; do
    nsys export -t sqlite --force-overwrite=true -o "${report%.nsys-rep}.sqlite" "$report"
done
python3 tools/profile_bubbles.py "$folder" --align nccl \
    --json "$folder/bubbles.json" --csv "$folder/bubbles.csv" --svg "$folder/bubbles.svg" --html "$folder/bubbles.html"
