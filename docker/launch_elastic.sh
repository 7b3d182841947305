#!/usr/bin/env bash
# Trains on the hosts of a file that can be reached, as they come and go.
#
#   docker/launch_elastic.sh HOSTS --do_train --global_batch_size=4096 ...
#
# HOSTS is a file with lines HOST:RANKS (RANKS: GPUs of the host) that is read again
# every second: add or remove lines while it trains. Or a script that prints them. A
# host that ssh does not reach is as good as removed. The flags are those of
# run_pretraining.py. The folder of this checkout, the records and --output_dir are
# at the same place on all hosts.
#
#   MIN_NP=2       waits for so many ranks (default 1), at the start and after losses
#   MAX_NP=64      never has more (default: no limit); at most an update's records
#   SLOTS=8        ranks of a host whose line has no number
#   NIC=eth0       the network interface, needed if there is one host only
#   SSH_PORT=2222  where sshd listens (default: ssh's own)
#   TAKE_OVER=1    ends ranks that an earlier start of the same command left
#
# A host on which a rank failed is tried again after one to ten minutes. SIGTERM,
# SIGHUP (but for nohup) and Ctrl-C end the run after the current micro-batch; whole
# updates are saved. Its status is 75.
set -euo pipefail

if [ "${1:-}" = --discover ]; then
  cd "$(dirname "$0")/.."
  # shellcheck source=docker/hosts.sh
  . docker/hosts.sh
  hosts=$(list_hosts "$2")
  for host in $hosts; do
    case $host in
      localhost:* | 127.*) ;;
      # All of Horovod's driver waits for this script.
      # What a shell there prints is no host.
      *) timeout 15 ssh "${ssh_options[@]}" -o ConnectTimeout=2 "${host%:*}" true \
        >/dev/null 2>&1 </dev/null || continue ;;
    esac
    echo "$host"
  done
  exit
fi

# Not through links: Kubernetes changes mounted files by changing one.
hosts=$(realpath -es "${1:?usage: docker/launch_elastic.sh HOSTS FLAGS...}")
shift
cd "$(dirname "$0")/.."
# shellcheck source=docker/hosts.sh
. docker/hosts.sh

name_run "$@"
if [ -n "${TAKE_OVER:-}" ]; then
  end_ranks "$PERSEUS_BERT_RUN" "$(list_hosts "$hosts")" 60 >/dev/null
else
  running=$(count_ranks "$(list_hosts "$hosts")")
  [ "$running" = 0 ] || fail "$running ranks of an earlier start of this command run;" \
    "TAKE_OVER=1 asks them to save and end first"
fi
discover=$(mktemp)
trap 'rm -f "$discover"' EXIT
printf '#!/usr/bin/env bash\nexec %q --discover %q\n' "$PWD/docker/launch_elastic.sh" "$hosts" >"$discover"
chmod +x "$discover"

train "$hosts" all -np "${MIN_NP:-1}" --min-np "${MIN_NP:-1}" --max-np "${MAX_NP:-1024}" \
  --host-discovery-script "$discover" --blacklist-cooldown-range 60 600 \
  ${NIC:+--network-interfaces "$NIC"} \
  .venv/bin/python run_pretraining.py "$@"
