#!/bin/sh
# Tests and measurements of the nvshmem transport with several ranks on one GPU.
#   tests/gpu_rig.sh [FOLDER]     JSON and logs go to FOLDER (default: .)
# Needs a CUDA GPU, MPS, and crossdock[cu13] with nvshmem4py; every step ends by itself.
set -u
out=${1:-.}
rig="python3 -m crossdock.launch.rig"
python3 -m tests.nvshmem.compile_all
status=0
RIG_HANG_S=110 $rig 1+2+4 120 -m tests.nvshmem.ranks > "$out/rig.log" 2>&1 || status=$?
tail -n 70 "$out/rig.log"
# As if ranks had no address for each other's memory: all of them, and those of two nodes.
for puts in all 2; do
  CROSSDOCK_NVSHMEM_PUTS=$puts RIG_HANG_S=110 $rig 4 120 -m tests.nvshmem.ranks \
    > "$out/rig-puts-$puts.log" 2>&1 || status=$?
  tail -n 30 "$out/rig-puts-$puts.log"
done
$rig 4 120 -m crossdock.launch.bench.onesided "$out/onesided-4.json" > "$out/bench-4.log" 2>&1 || status=$?
tail -n 40 "$out/bench-4.log"
$rig 4 120 -m crossdock.launch.bench.layouts "$out/layouts-4.json" > "$out/layouts-4.log" 2>&1 || status=$?
tail -n 10 "$out/layouts-4.log"
exit $status
