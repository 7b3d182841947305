#!/usr/bin/env bash
# The two kinds of environment: for NVIDIA GPUs, and for CPUs.
#
#   variant.sh installed VENV  print the kind of VENV's packages: gpu, cpu, or nothing
#   variant.sh machine         print the kind that this machine wants: gpu or cpu
#   variant.sh advise VENV     print a line if VENV is for CPUs on a machine with a GPU
set -euo pipefail

installed() {
  if compgen -G "$1/lib/python*/site-packages/tensorflow_cpu-*.dist-info" >/dev/null; then
    echo cpu
  elif compgen -G "$1/lib/python*/site-packages/tensorflow-*.dist-info" >/dev/null; then
    echo gpu
  fi
}

machine() {
  # nvidia-smi is also found, and fails, on machines without a GPU. (No grep -q: it
  # would leave nvidia-smi writing into a closed pipe, which is a failure, too.)
  if nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null; then
    echo gpu
  else
    echo cpu
  fi
}

advise() {
  if [ "$(installed "$1")" = cpu ] && [ "$(machine)" = gpu ]; then
    echo "$1 is for CPUs, and this machine has a GPU: make env VARIANT=gpu replaces it"
  fi
}

"$@"
