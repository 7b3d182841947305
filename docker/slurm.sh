#!/usr/bin/env bash
#SBATCH --job-name=perseus-bert
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Trains on a Slurm allocation, over its time limit as often as it takes.
#
#   sbatch [--nodes=4 ...] docker/slurm.sh --do_train --output_dir=... ...
#
# To be submitted in the checkout, which with its .venv, the records and --output_dir is
# on a file system that all nodes share.
#
#   LAUNCH=srun       srun starts the ranks. Default: ssh, by which horovodrun starts
#                     them, and which the cluster must allow between the nodes of a job
#                     (pam_slurm_adopt)
#   RANKS_PER_HOST=2  default: the node's GPUs
#   NIC=ib0           the network interface, see launch.sh and launch_srun.sh
#
# --signal: five minutes before the limit the run is asked to end. It saves and ends
# with status 75, the job goes back into the queue, and the same command resumes.
set -euo pipefail

# Slurm runs a copy of this file from elsewhere.
cd "${SLURM_SUBMIT_DIR:?start it by sbatch in the checkout: sbatch docker/slurm.sh FLAGS}"
[ -x docker/launch.sh ] || {
  echo "slurm.sh: error: $PWD has no docker/launch.sh: submit in the checkout" >&2
  exit 1
}
case ${LAUNCH:-ssh} in
  ssh) script=docker/launch.sh ;;
  srun) script=docker/launch_srun.sh ;;
  *)
    echo "slurm.sh: error: LAUNCH=$LAUNCH is unknown: give ssh or srun" >&2
    exit 1
    ;;
esac

ranks=${RANKS_PER_HOST:-${SLURM_GPUS_ON_NODE:-}}
[ -n "$ranks" ] || {
  echo "slurm.sh: error: the job has no GPUs: sbatch --gpus-per-node=8, or" \
    "RANKS_PER_HOST=2 to train on CPUs" >&2
  exit 1
}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$ranks/" | paste -sd,)

TAKE_OVER=1 "$script" "$hosts" "$@" &
launch=$!
passed='' asked=''
trap 'passed=1; asked=1; kill -TERM "$launch" 2>/dev/null' TERM
while true; do
  status=0
  wait "$launch" || status=$?
  [ -n "$passed" ] || break
  passed= # this wait was ended by the signal, the next one by the script
done

# A job that was cancelled is no longer RUNNING, and stays so.
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T || true)
if [ "$state" = RUNNING ] && { [ "$status" = 75 ] ||
  { [ "$status" != 0 ] && [ -n "$asked" ]; }; }; then
  echo "slurm.sh: status $status, back into the queue to resume"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
