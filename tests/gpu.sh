#!/usr/bin/env bash
# GPU tests, sanitizers and benchmarks in one go, on a machine with one GPU (about 7 minutes).
#   tests/gpu.sh [FOLDER]     where logs and JSON go; default gpu-results
# crossdock must be importable (installed, or by PYTHONPATH), with its test extra.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-gpu-results}
mkdir -p "$out"
failed=0

step() {  # step NAME LIMIT_SECONDS COMMAND...: log to FOLDER/NAME.log, show the end
  local name=$1 limit=$2
  shift 2
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "FAILED ($?)"; }
  tail -n "${TAIL:-12}" "$out/$name.log"
}

pytest() { python3 -m pytest -q -p no:cacheprovider -m gpu "$@"; }
export -f pytest

step tests-scratch 90 bash -c "pytest tests/scratch"
step tests-experts 100 bash -c "pytest tests/experts"
step permute 60 python3 -m crossdock.launch bench permute --json "$out/permute.json"
step experts 60 python3 -m crossdock.launch bench experts --json "$out/experts.json"
for tool in memcheck racecheck initcheck; do
  step "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
    python3 -m tests.scratch.every_kernel
done
for tool in memcheck racecheck; do
  step "$tool-nvshmem" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" \
    --error-exitcode 9 --report-api-errors no python3 -m tests.nvshmem.alone \
    fp8_is_the_quantiser_s_bits a_handle_s_way_is_taken_again any_y_and_out_will_do
done
step memcheck-graphs 60 compute-sanitizer --tool memcheck --error-exitcode 9 \
  --report-api-errors no python3 -m tests.nvshmem.alone a_graph_refuses_what_does_not_fit
step mpi 60 python3 -m pytest -q -p no:cacheprovider -m gpu tests/transports/test_mpi.py
step tests-dispatch 90 bash -c "pytest tests/dispatch"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/gpu.txt"
exit $failed
