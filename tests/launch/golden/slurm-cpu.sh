#!/usr/bin/env bash
#SBATCH --job-name=crossdock-laptop
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --distribution=block
set -euo pipefail
srun --distribution=block --kill-on-bad-exit=1 --export=ALL python -m crossdock.launch run configs/laptop.yaml run.seed=3
