#!/usr/bin/env bash
# Trains on the hosts of a file that can be reached, as they come and go.
#
#   docker/launch_elastic.sh HOSTS_FILE --do_train --global_batch_size=4096 ...
#
# HOSTS_FILE has lines HOST:RANKS (RANKS: GPUs of the host) and is read again every
# second: add or remove lines while it trains. A host that ssh does not reach is as
# good as removed. The flags are those of run_pretraining.py. The folder of this
# checkout, the records and --output_dir are at the same place on all hosts.
#
#   MIN_NP=2   waits for so many ranks (default 1), at the start and after losses
#   MAX_NP=64  never has more (default: no limit)
#   NIC=eth0   the network interface, needed if there is one host only
#
# A host on which a rank failed is tried again after one to ten minutes.
set -euo pipefail

if [ "${1:-}" = --discover ]; then
  while IFS=: read -r host ranks; do
    case $host in
      '' | \#*) continue ;;
      localhost | 127.*) ;;
      *) ssh -o BatchMode=yes -o ConnectTimeout=2 "$host" true 2>/dev/null </dev/null ||
        continue ;;
    esac
    echo "$host:${ranks:-1}"
  done <"$2"
  exit
fi

hosts=$(realpath -e "${1:?usage: docker/launch_elastic.sh HOSTS_FILE FLAGS...}")
shift
cd "$(dirname "$0")/.."
discover=$(mktemp)
trap 'rm -f "$discover"' EXIT
printf '#!/usr/bin/env bash\nexec %q --discover %q\n' "$PWD/docker/launch_elastic.sh" "$hosts" >"$discover"
chmod +x "$discover"

.venv/bin/horovodrun -np "${MIN_NP:-1}" --min-np "${MIN_NP:-1}" --max-np "${MAX_NP:-1024}" \
  --host-discovery-script "$discover" --blacklist-cooldown-range 60 600 \
  ${NIC:+--network-interfaces "$NIC"} \
  .venv/bin/python run_pretraining.py "$@" &
horovodrun=$!
# SIGTERM and Ctrl-C go on to horovodrun, which passes them to the ranks.
passed=
trap 'passed=1; kill -TERM "$horovodrun" 2>/dev/null' TERM INT
while true; do
  status=0
  wait "$horovodrun" || status=$?
  [ -n "$passed" ] || break
  passed= # this wait was ended by the signal, the next one by horovodrun
done
exit "$status"
