#!/usr/bin/env bash
# On the first node; ranks meet through mpi4py (pip install 'crossdock[mpi]').
cat > hosts <<'END'
gpu01 slots=8
gpu02 slots=8
END
mpirun -n 16 --hostfile hosts --map-by slot --bind-to none -x PATH -x LD_LIBRARY_PATH python -m crossdock.launch run configs/two-node-16gpu.yaml run.seed=3
# MPICH, hosts as lines of node:ranks:
# mpirun -n 16 -ppn 8 -f hosts python -m crossdock.launch run configs/two-node-16gpu.yaml run.seed=3
