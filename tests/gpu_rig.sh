#!/bin/sh
# Tests and measurements of the nvshmem transport with several ranks on one GPU.
#   tests/gpu_rig.sh [FOLDER]     JSON and logs go to FOLDER (default: .)
# Needs a CUDA GPU, MPS, and crossdock[cu13] with nvshmem4py; every step ends by itself.
set -u
out=${1:-.}
rig="python3 -m crossdock.launch.rig"
python3 - <<'PY'
from concurrent.futures import ProcessPoolExecutor
import torch
from crossdock.dispatch.nvshmem.launch import SOURCES, variants
from crossdock.launch.bench.onesided import CEILING_SHAPES
from crossdock.scratch.jit import compile_cuda
arch = "sm_%d%d" % torch.cuda.get_device_capability()
with ProcessPoolExecutor(16) as pool:  # so that ranks find every kernel compiled
    jobs = [
        pool.submit(compile_cuda, SOURCES / name, arch=arch, defines=defines)
        for name, defines in [*variants(), *(("ceiling.cu", s.macros()) for s in CEILING_SHAPES)]
    ]
    for job in jobs:
        job.result()
PY
status=0
RIG_HANG_S=110 $rig 1+2+4 120 -m tests.nvshmem.ranks > "$out/rig.log" 2>&1 || status=$?
tail -n 70 "$out/rig.log"
$rig 4 120 -m crossdock.launch.bench.onesided "$out/onesided-4.json" > "$out/bench-4.log" 2>&1 || status=$?
tail -n 40 "$out/bench-4.log"
exit $status
