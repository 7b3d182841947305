#!/usr/bin/env bash
#SBATCH --job-name=records
#SBATCH --array=0-15%4
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=8:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log
# Makes records by an array of 16 workers, of which 4 run at a time.
#
#   sbatch [--array=0-15%4 ...] docker/slurm_records.sh create_pretraining_data.py \
#     --input_file='text/*.jsonl' --output_file=records/train.tfrecord ...
#
# To be submitted in the checkout, which with its .venv, the text and the records is on a
# file system that all nodes share. Each worker takes what is free, so those that come when
# all is done end at once. --requeue: a worker whose node fails starts again. After the time
# limit the same command resumes.
set -euo pipefail

# Slurm runs a copy of this file from elsewhere.
cd "${SLURM_SUBMIT_DIR:?start it by sbatch in the checkout: sbatch docker/slurm_records.sh SCRIPT FLAGS}"
[[ "$*" == *--num_workers* ]] || set -- "$@" "--num_workers=${SLURM_CPUS_PER_TASK:-1}"
exec .venv/bin/python "$@"
