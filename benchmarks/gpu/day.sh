#!/usr/bin/env bash
# The first day with a GPU: makes the environment, then checks and measures for
# 40 minutes at most. Continues where it was cut. See benchmarks/gpu/day.py.
#
#   benchmarks/gpu/day.sh --output=gpu_day.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
make env
exec .venv/bin/python -m benchmarks.gpu.day "$@"
