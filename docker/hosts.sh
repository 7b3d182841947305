# shellcheck shell=bash
# What launch.sh and launch_elastic.sh share; they source it in the checkout.
#
# HOSTS is a file with lines `host:8` or, as MPI has it, `host slots=8`; a script
# (its first line begins with #!) that prints such lines; or a list `a:8,b:8`. Lines
# without ranks have SLOTS of them.

# A host may be lost while ssh is connected, which then waits for ever: so it asks
# every 5 seconds, and `timeout` is for what comes before it may.
ssh_options=(-o BatchMode=yes -o StrictHostKeyChecking=no -o LogLevel=ERROR
  -o ServerAliveInterval=5 ${SSH_PORT:+-p "$SSH_PORT"})

fail() {
  printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# horovodrun does not quote it for the shells of other hosts.
[[ $PWD != *[[:space:]]* ]] ||
  fail "$PWD has a space in its name: several hosts need a path without one"

# Prints HOST:RANKS for each host of HOSTS=$1.
list_hosts() {
  local word line rest lines first=''
  if [ -f "$1" ]; then
    read -r -n 2 first <"$1" || true
    if [ "$first" = '#!' ]; then lines=$("$1"); else lines=$(<"$1"); fi
  else
    lines=${1//,/$'\n'}
  fi
  while read -r word rest; do
    line=${word%%#*}
    [ -n "$line" ] || continue
    if [[ $rest =~ ^slots=([0-9]+) ]]; then
      line=$line:${BASH_REMATCH[1]}
    elif [[ $line != *:* ]]; then
      line=$line:${SLOTS:-1}
    fi
    [[ $line =~ ^[A-Za-z0-9_.-]+:[1-9][0-9]*$ ]] ||
      fail "$1: '$word' is not HOST:RANKS (and no file has that name)"
    echo "$line"
  done <<<"$lines"
}

# Whether horovodrun takes host $1 for this machine, and does without ssh.
is_here() {
  local address
  address=$(getent ahostsv4 "$1" | sed -n '1s/ .*//p')
  [[ -n $address && " 127.0.0.1 $(hostname -I) " = *" $address "* ]]
}

# Runs docker/on_host.sh $2 with run $3, host $1 and $4 on that host.
on_host() {
  if is_here "$1"; then
    docker/on_host.sh "$2" "$3" "$1" ${4:+"$4"}
  else
    timeout $((${4:-0} + 60)) ssh "${ssh_options[@]}" -o ConnectTimeout=5 "$1" \
      "cd $(printf %q "$PWD") && docker/on_host.sh $2 $3 $1 ${4:-}" </dev/null
  fi
}

# Adds up the last words of its lines that are numbers: a shell there may print more.
add_up() {
  local line sum=0
  while read -r line; do
    [[ ! ${line##* } =~ ^[0-9]+$ ]] || sum=$((sum + ${line##* }))
  done
  echo "$sum"
}

# Asks all ranks of run or start $1 on the hosts $2 to end; $3: the seconds, see
# on_host.sh. Prints how many there were.
end_ranks() {
  local host
  for host in $2; do
    on_host "${host%:*}" end "$1" "${3:-}" 2>/dev/null | tail -n 1 &
  done | add_up
}

# How many ranks of this run there are on the hosts $1 that answer.
count_ranks() {
  local host
  for host in $1; do
    on_host "${host%:*}" check "$PERSEUS_BERT_RUN" 2>/dev/null | tail -n 1 &
  done | add_up
}

# What all starts of one command have in common, $@: its flags. Environment
# variables tell its ranks from others', and those of this start from an earlier one's.
name_run() {
  export PERSEUS_BERT_RUN PERSEUS_BERT_START
  PERSEUS_BERT_START=$(hostname)-$$-$(date +%s%N)
  PERSEUS_BERT_RUN=$(printf '%s\0' "$PWD" "$@" | md5sum | cut -c1-16)
}

# Runs horovodrun with $3... over HOSTS=$1 and ends with its status.
#
# horovodrun would pass SIGTERM and Ctrl-C to its ssh clients only, and ranks behind
# them would not hear of it. So they get it here, and end as they do by themselves:
# saved, with status 75. $2=first: those of one host, which tell the others; a signal
# that comes later could meet ranks that are ending. $2=all: those of all hosts, without
# which an elastic run would go on. A terminal that is closed sends several SIGHUPs: the
# first one asks, and the others are no second request.
train() {
  local hosts=$1 whom=$2 status horovodrun asked=''
  shift 2
  # A session of its own, or a terminal would send Ctrl-C to horovodrun, too.
  setsid .venv/bin/horovodrun ${SSH_PORT:+-p "$SSH_PORT"} "$@" &
  horovodrun=$!
  trap 'trap "" HUP; asked=1; ask_to_end "$hosts" "$whom" "$horovodrun"' TERM INT HUP
  while true; do
    status=0
    wait "$horovodrun" || status=$?
    [ -n "$asked" ] || break
    asked= # this wait was ended by the signal, the next one by horovodrun
  done
  trap '' TERM INT HUP
  if [ "$status" != 0 ]; then
    # A rank that hangs outlives the ssh client that horovodrun kills.
    local left
    left=$(end_ranks "$PERSEUS_BERT_START" "$(list_hosts "$hosts")" 0)
    [ "$left" = 0 ] || echo "$(basename "$0"): $left ranks left over were killed" >&2
  fi
  exit "$status"
}

# Asks the ranks on HOSTS=$1 to save and end, $2 as for `train`; $3 is horovodrun.
ask_to_end() {
  local slots host told=0
  slots=$(list_hosts "$1")
  if [ "$2" = all ]; then
    told=$(end_ranks "$PERSEUS_BERT_START" "$slots")
  else
    for host in $slots; do
      told=$(end_ranks "$PERSEUS_BERT_START" "$host")
      [ "$told" = 0 ] || break
    done
  fi
  echo "$(basename "$0"): asked $told ranks to save and end" >&2
  # None has begun yet, so nothing is there to be saved.
  [ "$told" != 0 ] || kill -TERM "$3" 2>/dev/null || true
}
