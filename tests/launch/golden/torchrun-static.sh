#!/usr/bin/env bash
# On every node, with NODE_RANK 0 to 1 and MASTER_ADDR node 0:
: "${NODE_RANK:?0 on the first node}" "${MASTER_ADDR:?the first node}"
torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500 -m crossdock.launch run configs/two-node-16gpu.yaml run.seed=3
