#!/usr/bin/env bash
# Trains on the GPUs of several hosts.
#
#   docker/launch.sh HOSTS --do_train --global_batch_size=4096 ...
#
# HOSTS is a list `host1:8,host2:8`, a file of such lines or of MPI's (`host1 slots=8`),
# or a script that prints them; the numbers are the hosts' GPUs. The flags are those of
# run_pretraining.py. This checkout with its .venv, the records and --output_dir
# are at the same place on all hosts, and ssh asks for no password. The environment goes
# along to all ranks, except CUDA_VISIBLE_DEVICES, which ranks of this host alone have.
#
#   NIC=eth0          the network interface (default: horovodrun finds one)
#   SSH_PORT=2222     where sshd listens (default: ssh's own)
#   WAIT_SECONDS=600  waits so long for hosts that are not there yet (default 0)
#   TAKE_OVER=1       ends ranks that an earlier start of the same command left
#
# SIGTERM, SIGHUP (but for nohup) and Ctrl-C end the run after the current
# micro-batch; whole updates are saved. Its status is 75; the same command resumes it. A second one ends it at once.
set -euo pipefail

hosts=${1:?usage: docker/launch.sh HOSTS FLAGS...}
shift
# Not through links: Kubernetes changes mounted files by changing one.
[ ! -f "$hosts" ] || hosts=$(realpath -s "$hosts")
cd "$(dirname "$0")/.."
# shellcheck source=docker/hosts.sh
. docker/hosts.sh

name_run "$@"
slots=$(list_hosts "$hosts")
[ -n "$slots" ] || fail "$hosts: no hosts"

# Says what is wrong with host $1, if anything, ending left-over ranks if it may.
look_at() {
  local answer code ranks
  if ! answer=$(on_host "$1" check "$PERSEUS_BERT_RUN" 2>&1); then
    echo "$1: not ready: $(tail -n 1 <<<"${answer:-it does not answer}")"
    return
  fi
  read -r code ranks <<<"$(tail -n 1 <<<"$answer")"
  if [ "$code" != "$own" ]; then
    echo "$1: $PWD has other code there than here"
  elif [ "$ranks" != 0 ] && [ -z "${TAKE_OVER:-}" ]; then
    echo "$1: $ranks ranks of an earlier start of this command run there;" \
      "TAKE_OVER=1 asks them to save and end first"
  elif [ "$ranks" != 0 ]; then
    on_host "$1" end "$PERSEUS_BERT_RUN" 60 >/dev/null || echo "$1: went away"
  fi
}

read -r own _ <<<"$(docker/on_host.sh check "$PERSEUS_BERT_RUN" here)"
[ -n "$own" ] || exit 1
trap 'exit 75' TERM INT HUP # nothing has begun
until=$((SECONDS + ${WAIT_SECONDS:-0}))
while true; do
  wrong=$(
    for host in $slots; do look_at "${host%:*}" & done
    wait
  )
  [ -n "$wrong" ] || break
  ((SECONDS < until)) || fail "not all hosts can be used"$'\n'"$wrong"
  sleep 5
done

total=0 nic=''
for host in $slots; do
  total=$((total + ${host#*:}))
  # Ranks of this machine alone have its loopback interface, or Horovod fails.
  is_here "${host%:*}" || nic=${NIC:-}
done
# --disable-cache: what horovodrun found out an hour ago of other pods or
# machines under these names says nothing.
train "$hosts" first -np "$total" -H "$(paste -sd, <<<"$slots")" --disable-cache \
  ${nic:+--network-interfaces "$nic"} .venv/bin/python run_pretraining.py "$@"
