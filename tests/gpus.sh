#!/usr/bin/env bash
# Tests, then benchmarks, between all GPUs of this machine (2, 4 or 8), in less than 10 minutes.
#   tests/gpus.sh [FOLDER]     logs, JSON and tables go to FOLDER (default: gpus-results)
# One GPU: what four ranks that share it can do (needs CUDA MPS). None: gloo and shared memory
# stand in, which tries the suite itself. Needs crossdock with its extras test and cu13 (or cu12)
# and nvshmem4py; every step ends by itself.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-gpus-results}
mkdir -p "$out"
failed=0

# NVLink multicast stays off: not every host lets a process have it, and nothing here needs it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export NVSHMEM_REMOTE_TRANSPORT=none OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

step() {  # step NAME LIMIT_SECONDS COMMAND...: log to FOLDER/NAME.log, show the end
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "FAILED ($?)"; }
  tail -n "${TAIL:-25}" "$out/$name.log"
  echo "== $name took $((SECONDS - began)) s"
}

tests() {  # tests NAME LIMIT_SECONDS MARKERS [PYTEST ARGUMENTS...]
  local name=$1 limit=$2 markers=$3
  shift 3
  step "$name" "$limit" python3 -m pytest -q -p no:cacheprovider --durations=8 \
    --session-timeout=$((limit - 20)) --junitxml="$out/$name.xml" -m "$markers" "$@" tests/gpus
}

present=$(python3 -c 'import torch; print(torch.cuda.device_count())')
gpus=0
for size in 1 2 4 8; do [ "$present" -ge "$size" ] && gpus=$size; done
bench=crossdock.launch.bench.gpus
torchrun="python3 -m torch.distributed.run --standalone --local-addr 127.0.0.1"
echo "$present GPUs, of which $gpus are used"
case $gpus in
  0)
    tests tests 400 "not gpu and (slow or not slow)"
    step bench 90 $torchrun --nproc-per-node 4 -m $bench --device cpu \
      --json "$out/gpus-cpu.json" --rounds 4 --seconds 20
    ;;
  1)
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/gpu.txt"
    step compile 60 python3 -m tests.nvshmem.compile_all
    tests tests 200 "gpu and (slow or not slow)"
    step bench 100 python3 -m crossdock.launch.rig 4 90 -m $bench --json "$out/gpus-rig.json" \
      --rounds 10 --seconds 50
    ;;
  *)
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/gpu.txt"
    nvidia-smi topo -m >"$out/topology.txt" 2>&1
    step compile 60 python3 -m tests.nvshmem.compile_all
    tests tests 320 "gpu_$gpus and (slow or not slow)"
    step bench 140 $torchrun --nproc-per-node "$gpus" -m $bench --json "$out/gpus-$gpus.json" \
      --seconds 90
    # Fewer GPUs of the same machine, while there is time.
    for size in 4 2; do
      if [ "$size" -lt "$gpus" ] && [ "$SECONDS" -lt 480 ]; then
        tests "tests-$size" $((580 - SECONDS)) "gpu_$size"
      fi
    done
    ;;
esac
exit $failed
