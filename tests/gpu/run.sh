#!/usr/bin/env bash
# Everything that only a GPU can show, on one GPU in about five minutes: run it from the repository root in an
# environment with CUDA builds of torch, vllm, megatron-core and mpi4py.
#
#   tests/gpu/run.sh [OUT]      OUT: where logs and run directories go (default: outputs/gpu)
#
# Every check runs even if one before it fails; the summary at the end says which did. Exit code: the number that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
out=${1:-${OUT:-outputs/gpu}}
mkdir -p "$out"
python=${PYTHON:-python}
summary=()
failed=0

check() { # NAME SECONDS COMMAND...: run with a time limit, keep the log, note the result
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "=== $name"
    if timeout "$limit" "$@" 2>&1 | tee "$out/$name.log" | tail -n 25; then
        summary+=("ok      $name ($((SECONDS - start)) s)")
    else
        summary+=("FAILED  $name ($((SECONDS - start)) s): $out/$name.log")
        failed=$((failed + 1))
    fi
}

# shellcheck disable=SC2317  # called through bash -c
demo() { # OVERRIDE...: the demo on this GPU
    "$python" -m rollpacker train configs/demo_cpu.yaml trainer.device=cuda trainer.logger=console "$@"
}
export -f demo
export python

# shellcheck disable=SC2016  # expanded by the inner shell
check facts 30 bash -c 'nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv; "$python" - <<PY
import importlib.metadata as m
for name in ("torch", "vllm", "megatron-core", "mpi4py", "transformer-engine", "transformers"):
    try:
        print(name, m.version(name))
    except m.PackageNotFoundError:
        print(name, "not installed")
PY'
[ -d assets/demo/model ] || check model 120 "$python" tools/make_tiny_model.py --out assets/demo
nccl=$("$python" -c 'import nvidia.nccl; print(nvidia.nccl.__path__[0])' 2>/dev/null) # torch's, if it is a package of pip's
export nccl
# The extension: its kernels against the CPU's copy, a refit over NCCL with one rank, its speed against cudaMemcpy; then the same
# under compute-sanitizer where there is one; then the module itself.
# shellcheck disable=SC2016  # expanded by the inner shell, here and below
check csrc-build 150 bash -c 'cmake -S csrc -B build/gpu -DROLLPACKER_CUDA=ON -DROLLPACKER_PYTHON=OFF -DROLLPACKER_TESTS=ON \
    ${nccl:+-DROLLPACKER_NCCL_INCLUDE=$nccl/include} && cmake --build build/gpu -j \
    && ROLLPACKER_CUDA=ON "$python" setup.py build_ext --inplace'
# shellcheck disable=SC2016
check csrc-kernels 60 bash -c 'LD_LIBRARY_PATH=${nccl:+$nccl/lib:}${LD_LIBRARY_PATH:-} build/gpu/test_cuda'
if command -v compute-sanitizer >/dev/null; then
    check csrc-sanitizer 120 compute-sanitizer --error-exitcode 1 build/gpu/test_cuda --kernels-only
fi
check csrc-refit 60 "$python" -m pytest -q --device cuda tests/mpi/test_reshard.py
# Gradients, weights, refit and log-probs against the same oracles as on the CPU.
check exactness 100 "$python" -m pytest -q --device cuda tests/mpi/test_weights.py tests/mpi/test_gradients.py
check engine 100 "$python" -m pytest -q --device cuda tests/mpi/test_rollout.py
# The whole program: sleep and wake around training, CUDA graphs, NVTX ranges; then bf16; then a replay in fp32.
check demo-fp32 80 bash -c "demo training.dtype=fp32 trainer.total_training_steps=6 profiler.nvtx=true \
    trainer.default_local_dir=$out/fp32 trainer.rollout_data_dir=$out/dump"
check demo-bf16 60 bash -c "demo training.dtype=bf16 trainer.total_training_steps=6 trainer.default_local_dir=$out/bf16"
check replay 40 bash -c "demo training.dtype=fp32 trainer.total_training_steps=2 rollout.replay=$out/dump \
    trainer.default_local_dir=$out/replay"
check mismatch 10 "$python" - "$out" <<'PY'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
for name, limit in (("fp32", 1e-3), ("bf16", 0.5)):
    rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    worst = max(row["training/rollout_logprobs_diff_max"] for row in rows)
    rate = sum(r["perf/total_num_tokens"] for r in rows[1:]) / sum(r["timing_s/step"] for r in rows[1:])
    print(f"{name}: rollout_logprobs_diff_max {worst:.2e} (limit {limit}), {rate:.0f} tokens/s")
    assert worst <= limit
PY

printf '\n%s\n' "${summary[@]}"
exit "$failed"
