#!/usr/bin/env bash
# On every node, with HEAD_ADDR one of them:
: "${HEAD_ADDR:?one of the nodes}"
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id crossdock-two-node-16gpu --rdzv-endpoint "$HEAD_ADDR:29500" -m crossdock.launch run configs/two-node-16gpu.yaml run.seed=3
