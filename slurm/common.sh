# shellcheck shell=bash
# What the Slurm scripts share: the environment of a job, its check, its start, its restart. A script sources this file and calls
#   run_job CONFIG.yaml [section.key=value ...]      check, train on all ranks, requeue and go on where that helps
#   run_ranks COMMAND [ARGUMENT ...]                 start one rank a task: rollpacker COMMAND ARGUMENT ...
#
# Give sbatch its own options (--account, --partition, --nodes, --time) before the script, the program's after it:
#   sbatch --account=me --time=12:00:00 slurm/train_qwen2.5_7b.sh model.path=/data/Qwen2.5-7B data.train_files=[/data/train.jsonl]
# Submit from the root of the repository: Slurm runs a copy of the script, so SLURM_SUBMIT_DIR tells where this file is.
#
# Variables (all optional; exported before sbatch, or by sbatch --export=ALL,NAME=VALUE):
#   MODULES="openmpi/5.0 cuda/13.0"   modules to load
#   VENV=DIR                          virtual environment, default .venv where there is one, else python of the PATH
#   SLURM_CONTAINER=IMAGE             pyxis and enroot: image or .sqsh file to run in; CONTAINER_MOUNTS=/data:/data,... more of the
#   APPTAINER_IMAGE=FILE              Apptainer: the same                              host to see (the working folder always is)
#   INTERFACE=ib0                     network interface for what does not use InfiniBand verbs, where the default is wrong
#   SRUN_OPTIONS="--cpu-bind=none"    more options for srun; later ones win
#   MAX_RESTARTS=5                    restarts after crashes; those after the time limit or a preemption do not count
#
# Exit codes of a job: 0 trained to the end. 2 the config, the arguments or the set-up are wrong; nothing was started. 3 stopped by a
# signal after saving, and could not be requeued: submit it again, it goes on. Others: the program crashed; it is restarted if it had
# saved a checkpoint since its start, else the code (1, 137, 143, ...) is given on and the log says why. docs/slurm.md has more.

note() { echo "[$(date +%H:%M:%S) job $SLURM_JOB_ID] $*"; }

give_up() { # MESSAGE: a mistake of the set-up
    note "$*" >&2
    exit 2
}

prepare_job() {
    local end
    ranks_per_node=${SLURM_NTASKS_PER_NODE:-}
    [[ -n $ranks_per_node ]] || give_up "ask for --ntasks-per-node, one task a GPU: the ranks of a node are counted by it"
    if [[ -n ${MODULES:-} ]]; then
        # shellcheck disable=SC2086  # a list of modules
        module load $MODULES || give_up "MODULES=$MODULES could not be loaded"
    fi
    if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then # Slurm sets it from 23.02 on; trainer.save_deadline counts back from it
        end=$(squeue -h -j "$SLURM_JOB_ID" -o %e)
        SLURM_JOB_END_TIME=$(date -d "${end:-unknown}" +%s 2>/dev/null) && export SLURM_JOB_END_TIME
    fi
    # Sockets and pipes to every rank and reward worker want more than the usual 1,024 files; srun hands limits on to the ranks.
    ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
    ulimit -Sc 0 # a crash of 64 ranks would write 64 core files as large as their memory
    prepare_libraries
    prepare_program
}

prepare_libraries() {
    export PYTHONFAULTHANDLER=1 # a segmentation fault says in which line of Python
    export HF_HUB_OFFLINE=1     # models are folders; without this, nodes that have no internet wait for it
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # NCCL's reasons when it fails; INFO also says which network it uses
    if ((ranks_per_node > $(nproc))); then
        export OMPI_MCA_mpi_yield_when_idle=1 # ranks share cores: one that waits must not keep another from working
    fi
    if [[ -n ${INTERFACE:-} ]]; then # NCCL and gloo would guess; a guess may be a network that other nodes do not reach
        export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
        export OMPI_MCA_btl_tcp_if_include=$INTERFACE OMPI_MCA_oob_tcp_if_include=$INTERFACE
    fi
    if [[ -n ${SLURM_CONTAINER:-}${APPTAINER_IMAGE:-} ]]; then
        # Ranks in user namespaces of their own may not read each other's memory, which Open MPI 4 and 5 would try.
        export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_smsc=^cma
    fi
}

prepare_program() { # sets `program`, and `srun_options` for every srun
    local mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS} gpus=()
    program=(python3 -m rollpacker) # from the working folder if it holds the package, else as installed
    srun_options=(--mpi=pmix --export=ALL)
    if [[ -n ${SLURM_CONTAINER:-} ]]; then
        srun_options+=("--container-image=$SLURM_CONTAINER" "--container-mounts=$mounts" "--container-workdir=$PWD")
        unset SLURM_CONTAINER # srun would take it for its own --container, an OCI bundle
        check=(srun --nodes=1 --ntasks=1 "${srun_options[@]}")
    elif [[ -n ${APPTAINER_IMAGE:-} ]]; then
        if [[ ${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}} != 0 ]]; then gpus=(--nv); fi
        program=(apptainer exec "${gpus[@]}" --bind "$mounts" --pwd "$PWD" "$APPTAINER_IMAGE" "${program[@]}")
    elif [[ -n ${VENV:-} || -d .venv ]]; then
        VENV=$(realpath "${VENV:-.venv}")
        [[ -x $VENV/bin/python3 ]] || give_up "VENV=$VENV has no bin/python3, seen from $(hostname)"
        export PATH=$VENV/bin:$PATH
    fi
    # All cores of the node, an equal share for each rank, neighbours in rank on neighbouring cores: Slurm would deal ranks out
    # to the sockets in turn, while GPUs 0 to 3 hang on the first. Memory follows the core that touches it first.
    local cpus=${SLURM_JOB_CPUS_PER_NODE%%[(,]*} # "64(x2)" for two nodes
    srun_options+=("--cpus-per-task=$((cpus / ranks_per_node))" --distribution=block:block)
    if [[ $(scontrol show config) == *task/affinity* ]]; then srun_options+=(--cpu-bind=cores); fi
    # No --gpu-bind: with --gpus-per-node each rank sees all GPUs of its node, which NCCL's peer-to-peer copies need, and takes the
    # one of its local rank. (--gpu-bind=none would unset CUDA_VISIBLE_DEVICES, and show the GPUs of other jobs as well.)
    local more
    read -ra more <<<"${SRUN_OPTIONS:-}"
    srun_options+=("${more[@]}")
}

run_ranks() { # COMMAND [ARGUMENT ...]; an array `wrapper`, if set, stands before the program (a profiler)
    srun --kill-on-bad-exit=1 "${srun_options[@]}" "${wrapper[@]}" "${program[@]}" "$@"
}

# The job's arguments: its size, that it resumes, the caller's own; a restart goes on from the last checkpoint whatever they say.
set_arguments() { # CONFIG [section.key=value ...]; sets `arguments`
    local config=$1
    shift
    arguments=("$config" "trainer.nnodes=$SLURM_JOB_NUM_NODES" "trainer.n_gpus_per_node=$ranks_per_node" trainer.resume_mode=auto "$@")
    if ((${SLURM_RESTART_COUNT:-0})); then arguments+=(trainer.resume_mode=auto); fi
}

check_job() { # a dry run of `arguments` on this node, before anything is started; sets `run_dir`, or ends the job
    local report code=0
    report=$("${check[@]}" "${program[@]}" train "${arguments[@]}" --dry-run) || code=$?
    echo "$report"
    run_dir=$(sed -n 's/^output  *//p' <<<"$report")
    if ((code)); then
        note "the check failed (exit code $code): nothing was started"
        exit "$code"
    fi
}

latest_checkpoint() { cat "$run_dir/checkpoints/latest" 2>/dev/null || echo none; }

requeue() { # REASON CODE: put this job back into the queue, where it keeps its id and its log; does not return
    note "$1: requeueing; the job goes on from $(latest_checkpoint)"
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 120; fi # Slurm ends this script meanwhile
    note "could not be requeued (does the partition allow --requeue?). Submit it again, with the same arguments: it goes on."
    exit "$2"
}

run_job() { # CONFIG [section.key=value ...]
    local before after code=0
    note "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NUM_NODES node(s), $SLURM_JOB_NODELIST, $ranks_per_node rank(s) each"
    set_arguments "$@"
    check_job
    before=$(latest_checkpoint)
    run_ranks train "${arguments[@]}" || code=$?
    after=$(latest_checkpoint)
    case $code in
        0 | 2) exit "$code" ;;
        3) if [[ $after != "$before" ]]; then requeue "stopped by a signal after saving" 3; fi ;;
        *) if [[ $after == "$before" ]]; then
            note "exit code $code, and no checkpoint newer than at its start ($before): not restarted"
            exit "$code"
        fi ;;
    esac
    count_restart "$code" "$after"
    requeue "exit code $code" "$code"
}

count_restart() { # CODE CHECKPOINT: note a restart that may not help, or end the job if there have been too many
    local restarts=$SLURM_JOB_NAME-$SLURM_JOB_ID.restarts # beside the log; the run directory may not be there yet
    echo "$(date -Is) exit code $1, checkpoint $2" >>"$restarts"
    if (($(wc -l <"$restarts") > ${MAX_RESTARTS:-5})); then
        note "exit code $1, and restarted ${MAX_RESTARTS:-5} times already ($restarts): not again"
        exit "$1"
    fi
}

check=() wrapper=()
prepare_job
