#!/bin/sh
# Runs google/bert's own unit tests against this project's modules.
#
#   tests/google_bert_tests.sh DIR
#
# DIR is a checkout of https://github.com/google-research/bert. Its three test
# files are copied to a temporary folder, where one line changes in each that
# imports TensorFlow; the changed lines are printed. PYTHON names another
# interpreter than .venv's.
set -eu

if [ $# -ne 1 ] || [ ! -f "$1/modeling_test.py" ]; then
  echo "usage: $0 DIR (a checkout of google-research/bert)" >&2
  exit 2
fi
bert=$(cd "$1" && pwd)
project=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$project/.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

failed=""
for module in modeling optimization tokenization; do
  test=${module}_test.py
  sed 's/^import tensorflow as tf$/import tensorflow.compat.v1 as tf/' \
    "$bert/$test" >"$folder/$test"
  echo "== $test: changed lines"
  diff "$bert/$test" "$folder/$test" || true
  if [ ! -f "$project/$module.py" ]; then
    echo "== $test: FAILED, the project has no $module.py"
    failed="$failed $test"
    continue
  fi
  # PYTHONSAFEPATH keeps the test's own folder off the path, so that modules can
  # come from nowhere but the project.
  if (cd "$folder" && PYTHONSAFEPATH=1 PYTHONPATH="$project" "$python" "$test")
  then
    echo "== $test: passed"
  else
    echo "== $test: FAILED"
    failed="$failed $test"
  fi
done
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
