#!/usr/bin/env bash
# Runs a command that says little for minutes, and shows that it moves.
#
#   progress.sh TITLE COMMAND...
#
# A line has the title, the time and the last line of what the command printed. A
# terminal has one such line, which is written over; elsewhere one comes every ten
# seconds. Of a command that failed the last 60 lines are shown.
set -euo pipefail

title=$1
shift
log=$(mktemp)

# Shows a line, its last word what the command printed last.
tell() {
  local seconds=$SECONDS line
  line=$(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c 1-100)
  printf -v line '%s  %d:%02d  %s' "$title" $((seconds / 60)) $((seconds % 60)) "$line"
  if [ -t 1 ]; then
    printf '\r\033[K%s' "${line:0:$(($(tput cols 2>/dev/null || echo 80) - 1))}"
  else
    echo "$line"
  fi
}

watch() {
  local every=10
  [ ! -t 1 ] || every=0.5
  while true; do
    tell
    # Without our outputs: a reader of these is not to wait for it.
    sleep "$every" >/dev/null 2>&1
  done
}

watch &
watcher=$!
end() {
  kill "$watcher" 2>/dev/null || true
  rm -f "$log"
}
trap end EXIT

status=0
"$@" >"$log" 2>&1 || status=$?
kill "$watcher" 2>/dev/null || true
tell
[ ! -t 1 ] || echo
if [ "$status" != 0 ]; then
  tail -n 60 "$log" >&2
  echo "$title: it failed; its last lines are above" >&2
fi
exit "$status"
