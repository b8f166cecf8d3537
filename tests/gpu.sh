#!/usr/bin/env bash
# GPU tests, sanitizers and benchmarks in one go, on a machine with one GPU (about 5 minutes).
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
step tests-dispatch 90 bash -c "pytest tests/dispatch"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/gpu.txt"
exit $failed
