#!/usr/bin/env bash
# Makes the virtual environment that `make env` installs into, or mends it.
#
#   make_venv.sh PYTHON VENV [VARIANT]
#
# An empty PYTHON is the newest of python3.13 to python3.11 and python3 that runs and is
# one of these versions. A VENV that has pip, PYTHON's version and packages of VARIANT is
# kept. Any other is made again if `make env` made it, which marks it first; what may be
# somebody else's is left alone.
set -euo pipefail

python=$1
venv=$2
variant=${3:-cpu}
variant_script="$(dirname "$0")/variant.sh"
marker="$venv/.made-by-make-env"

fail() {
  echo "make env: error: $*" >&2
  exit 1
}

version='import sys; print("%d.%d" % sys.version_info[:2])'

for candidate in python3.13 python3.12 python3.11 python3; do
  [ -z "$python" ] || break
  case $("$candidate" -c "$version" 2>/dev/null || true) in
    3.11 | 3.12 | 3.13) python=$candidate ;;
  esac
done
[ -n "$python" ] ||
  fail "no Python 3.11, 3.12 or 3.13 found: give make env PYTHON=/path/to/python3.12"
wanted=$("$python" -c "$version" 2>/dev/null) ||
  fail "PYTHON=$python is no Python that runs: give make env PYTHON=/path/to/python3.12"
case $wanted in
  3.11 | 3.12 | 3.13) ;;
  *) fail "PYTHON=$python is Python $wanted, and 3.11, 3.12 or 3.13 is needed" ;;
esac

own='import os, pip, sys
sys.exit(os.path.realpath(sys.prefix) != os.path.realpath(sys.argv[1]))'

usable() {
  local installed
  installed=$("$variant_script" installed "$venv") # packages of both kinds share files
  [ "$("$venv/bin/python" -c "$version" 2>/dev/null)" = "$wanted" ] &&
    "$venv/bin/python" -c "$own" "$venv" 2>/dev/null &&
    [ "${installed:-$variant}" = "$variant" ]
}

rmdir "$venv" 2>/dev/null || true # an empty one is nobody's
if [ -e "$venv" ] || [ -L "$venv" ]; then
  ! usable || exit 0
  wrong="$venv is no environment of Python $wanted with pip and packages for $variant"
  # What is not marked may be somebody else's; a link leads out of the checkout.
  [ ! -L "$venv" ] && [ -e "$marker" ] ||
    fail "$wrong, and make env did not make it: move it away, or remove it"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "PYTHON=$python cannot make environments: install its venv module" \
    "(on Debian and Ubuntu: apt install python$wanted-venv)"
if [ -n "${wrong:-}" ]; then
  echo "environment: $wrong: it is made again"
  rm -rf "$venv"
fi
mkdir -p "$venv"
touch "$marker"
"$python" -m venv "$venv" || {
  rm -rf "$venv"
  fail "$python -m venv failed, see above"
}
