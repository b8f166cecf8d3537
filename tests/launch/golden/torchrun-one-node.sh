#!/usr/bin/env bash
# On the machine:
torchrun --standalone --nproc-per-node 4 -m crossdock.launch run configs/laptop.yaml run.seed=3
