#!/usr/bin/env bash
# The part of launch.sh and launch_elastic.sh that runs on each host.
#
#   docker/on_host.sh check RUN HOST
#     print a checksum of this checkout's code and how many ranks of RUN run here
#   docker/on_host.sh end RUN HOST [SECONDS]
#     ask RUN's ranks here to save and end (SIGTERM), kill what is left after SECONDS
#     (0: at once; none given: neither wait nor kill), print how many there were
#
# RUN is what the ranks have as PERSEUS_BERT_RUN, or as PERSEUS_BERT_START, in their
# environment, HOST what they have as HOROVOD_HOSTNAME, or both are `any`. (One machine
# may be several hosts.)
set -euo pipefail
cd "$(dirname "$0")/.."

# The ids of the processes that are ranks of run $1 of host $2.
ranks() {
  local run=${1/#any/.*} host=${2/#any/.*}
  { grep -lszE "^PERSEUS_BERT_(RUN|START)=$run\$" /proc/[0-9]*/environ || true; } |
    { xargs -r grep -lsz "^HOROVOD_HOSTNAME=$host\$" || true; } | cut -d/ -f3
}

# Sends signal $1 to the processes $2..., of which some may be gone.
signal() {
  kill "-$1" "${@:2}" 2>/dev/null || true
}

case ${1:-} in
  check)
    sum=$(find . -path ./.venv -prune -o -path ./.build -prune -o -path ./runs \
      -prune -o -name '*.py' -print0 | LC_ALL=C sort -z | xargs -0 md5sum | md5sum)
    [ -x .venv/bin/python ] || {
      echo "$PWD has no .venv: run make env there" >&2
      exit 1
    }
    mapfile -t pids < <(ranks "$2" "$3")
    echo "${sum%% *} ${#pids[@]}"
    ;;
  end)
    mapfile -t pids < <(ranks "$2" "$3")
    echo "${#pids[@]}"
    [ ${#pids[@]} -gt 0 ] || exit 0
    if [ "${4:-}" != 0 ]; then signal TERM "${pids[@]}"; fi
    [ -n "${4:-}" ] || exit 0
    for ((waited = 0; waited < $4 * 2; waited++)); do
      [ -n "$(ranks "$2" "$3")" ] || exit 0
      sleep 0.5
    done
    mapfile -t pids < <(ranks "$2" "$3")
    [ ${#pids[@]} -eq 0 ] || signal KILL "${pids[@]}"
    ;;
  *)
    echo "usage: docker/on_host.sh check RUN HOST | end RUN HOST [SECONDS]" >&2
    exit 2
    ;;
esac
