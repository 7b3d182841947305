#!/usr/bin/env bash
# Trains on the GPUs of a Slurm job's nodes with ranks that srun starts: without ssh.
#
#   docker/launch_srun.sh HOSTS --do_train --global_batch_size=4096 ...
#
# HOSTS is a list `node1:8,node2:8` of the job's nodes, in Slurm's order, each with as
# many ranks. slurm.sh makes it. The flags are those of run_pretraining.py. This
# checkout with its .venv, the records and --output_dir are at the same place on all
# nodes, and the environment goes along to all ranks.
#
#   NIC=ib0           the network interface (default: the one to the first node)
#
# SIGTERM, SIGHUP and Ctrl-C end the run after the current micro-batch; whole updates
# are saved. Its status is 75; the same command resumes it. A second one ends it at once.
set -euo pipefail

hosts=${1:?usage: docker/launch_srun.sh HOSTS FLAGS...}
shift
cd "$(dirname "$0")/.."

fail() {
  echo "launch_srun.sh: error: $*" >&2
  exit 1
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is no job of Slurm: start it by slurm.sh"
per_host=$(tr , '\n' <<<"$hosts" | sed 's/.*://' | sort -u)
[[ $per_host =~ ^[1-9][0-9]*$ ]] ||
  fail "$hosts is no list HOST:RANKS,HOST:RANKS with as many ranks on each host"

trap 'exit 75' TERM INT HUP # nothing has begun
# Ranks find each other through it. It ends with this script, which has its input.
coproc server { exec .venv/bin/python -m tools.srun_ranks "$hosts"; }
read -r address port nodes ranks <&"${server[0]}" || exit 1 # it said why

# block: consecutive ranks are on one node. none: a rank takes its share of the node's
# cores by itself. Ranks that are asked to stop wait for each other, and a rank that
# lost another ends by itself; srun ends what is left two minutes later.
setsid srun --nodes="$nodes" --ntasks="$ranks" --ntasks-per-node="$per_host" \
  --distribution=block --cpu-bind=none --mpi=none --export=ALL --label \
  --kill-on-bad-exit=0 --wait=120 \
  .venv/bin/python -m tools.srun_ranks "$hosts" "$address" "$port" -- "$@" &
srun=$!

# srun itself kills the ranks when it gets SIGTERM, so that comes to them from Slurm.
asked=''
ask_to_end() {
  asked=1
  trap 'asked=1; kill -TERM "$srun" 2>/dev/null' TERM INT
  trap '' HUP # a terminal that is closed sends several
  scancel --signal=TERM "$SLURM_JOB_ID" || true
  echo "launch_srun.sh: asked the ranks to save and end" >&2
}
trap ask_to_end TERM INT HUP
while true; do
  status=0
  wait "$srun" || status=$?
  [ -n "$asked" ] || break
  asked= # this wait was ended by the signal, the next one by srun
done
exit "$status"
