#!/usr/bin/env bash
#SBATCH --job-name=crossdock-wide-ep-64
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --distribution=block
#SBATCH --gpus-per-node=8
set -euo pipefail
srun --distribution=block --kill-on-bad-exit=1 --export=ALL python -m crossdock.launch run configs/wide-ep-64.yaml run.seed=3
