#!/bin/bash
# Debug a config on real nodes, a command at a time: takes nodes and opens a shell, on this machine, in which
#   step [key=value ...]    runs one training step on all ranks, with tracebacks; rank 0 has your terminal
#   doctor                  runs rollpacker doctor on all ranks
#   exit                    gives the nodes back
# Usage, from the root of the repository; options of salloc come first, written --name=value:
#   slurm/interactive.sh --account=me --partition=debug configs/qwen2.5_7b_8k.yaml model.path=/data/Qwen2.5-7B   # one node, 8 GPUs
#   slurm/interactive.sh --ntasks-per-node=2 --gpus-per-node=0 configs/demo_cpu.yaml                           # the CPU demo
# Variables: slurm/common.sh.
set -euo pipefail
here=$(dirname "$(realpath "$0")")

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    options=(--job-name=rollpacker-debug --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --time=01:00:00)
    while [[ ${1:-} == -* ]]; do
        options+=("$1")
        shift
    done
    if [[ -z ${1:-} ]]; then
        sed -n '2,/^[^#]/s/^# \?//p' "$0" >&2
        exit 2
    fi
    exec salloc "${options[@]}" "$0" "$@"
fi

# This runs within the allocation. The shell reads what follows before its first prompt.
exec bash --rcfile <(
    cat <<RC
[ ! -f ~/.bashrc ] || source ~/.bashrc
source $(printf %q "$here/common.sh")
step() {
    set_arguments $(printf '%q ' "$@") trainer.total_training_steps=1 trainer.resume_mode=disable trainer.save_freq=0 \
        trainer.val_before_train=false trainer.test_freq=-1 trainer.default_local_dir=outputs/debug \
        trainer.stall_timeout_s=86400 trainer.collective_timeout_s=86400 "\$@" # time to think at a breakpoint
    local srun_options=("\${srun_options[@]}" --pty)
    run_ranks train "\${arguments[@]}" --debug
}
doctor() { run_ranks doctor; }
PS1='(job $SLURM_JOB_ID) \w \$ '
note "\$SLURM_JOB_NUM_NODES node(s), \$SLURM_JOB_NODELIST, \$ranks_per_node rank(s) each. Commands: step [key=value ...], doctor, exit"
RC
) -i
