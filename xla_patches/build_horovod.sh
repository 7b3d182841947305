#!/usr/bin/env bash
# Builds Horovod's pinned source release with the patches in horovod/.
#
#   build_horovod.sh cpu PYTHON           install into PYTHON's environment (Gloo)
#   build_horovod.sh gpu PYTHON           the same with CUDA and NCCL
#   build_horovod.sh cpu-wheel PYTHON DIR write a wheel into DIR, install nothing
#   build_horovod.sh gpu-wheel PYTHON DIR the same with CUDA and NCCL
#   build_horovod.sh check-cpu PYTHON     only say what the machine lacks for it
#   build_horovod.sh check-gpu PYTHON     the same with CUDA and NCCL
#
# PYTHON's environment needs TensorFlow, packaging (requirements.txt) and what
# requirements/horovod.txt has. The GPU variants need nvcc (CUDA_HOME, or nvcc on the
# PATH) but no GPU; NCCL's headers and library come from its wheel.
set -euo pipefail

variant=${1#check-}
python=$2
here=$(cd "$(dirname "$0")" && pwd)
progress="$here/../tools/progress.sh"
bin=$(cd "$(dirname "$python")" && pwd)
version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

if [ "${variant%-wheel}" != cpu ]; then
  cuda_home=${CUDA_HOME:-$(dirname "$(dirname "$(command -v nvcc || true)")")}
  # nvcc may be a wrapper outside the toolkit's folder.
  [ -x "$cuda_home/bin/nvcc" ] && [ -f "$cuda_home/include/cuda.h" ] ||
    cuda_home=/usr/local/cuda
fi

# Prints what the build needs of the machine and does not find, a line for each.
lacking() {
  local headers
  "${CXX:-c++}" -x c++ -fsyntax-only - <<<'#include <vector>' 2>/dev/null ||
    echo "a C++ compiler (apt install g++)"
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -f "$headers/Python.h" ] ||
    echo "Python's headers (apt install $(basename "$headers")-dev)"
  command -v git >/dev/null || echo "git (apt install git)"
  [ -z "${cuda_home:-}" ] || [ -x "$cuda_home/bin/nvcc" ] ||
    echo "nvcc (CUDA_HOME names its toolkit, which needs no driver)"
}

lacks=$(lacking)
if [ -n "$lacks" ]; then
  echo "horovod: this machine lacks ${lacks//$'\n'/, }: runs have one rank until" \
    "that is installed and make horovod has built it" >&2
  exit 1
fi
[ "$variant" = "$1" ] || exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Horovod's CMake files cut TensorFlow's paths at spaces: the build sees the
# environment under a name that has none.
ln -s "$(dirname "$bin")" "$work/environment"
bin="$work/environment/bin"
builder="$bin/$(basename "$python")"
export PATH="$bin:$PATH"

echo "horovod: fetching the $version source release"
# pip runs setup.py egg_info on an sdist it downloads, hence no build isolation: the
# environment's own setuptools is the one that still has what setup.py wants.
echo "horovod==$version --hash=sha256:$sha256" >"$work/requirements.txt"
"$builder" -m pip download --quiet --no-deps --no-binary horovod \
  --no-build-isolation --require-hashes --dest "$work" -r "$work/requirements.txt"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source_dir="$work/horovod-$version"

for patch in "$here"/horovod/horovod-$version-*.patch; do
  echo "horovod: applying $(basename "$patch")"
  # GIT_CEILING_DIRECTORIES: git apply silently skips files when it finds itself in
  # some other repository, and the temporary folder may lie inside one.
  (cd "$source_dir" && GIT_CEILING_DIRECTORIES="$work" git apply --whitespace=nowarn "$patch")
done

export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export MAKEFLAGS="-j$(nproc)"
export HOROVOD_CMAKE="$bin/cmake"

if [ "${variant%-wheel}" != cpu ]; then
  major=$("$cuda_home/bin/nvcc" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
  # "12.5.1"; nothing for a TensorFlow without CUDA.
  wanted=$(TF_CPP_MIN_LOG_LEVEL=3 "$builder" -c 'import tensorflow as tf
print(tf.sysconfig.get_build_info().get("cuda_version", ""))')
  if [ -n "$wanted" ] && [ "${wanted%%.*}" != "$major" ]; then
    echo "horovod: CUDA $major in $cuda_home, but this TensorFlow runs with CUDA" \
      "$wanted: set CUDA_HOME to a toolkit of CUDA ${wanted%%.*}" >&2
    exit 1
  fi
  # NCCL 2.27.7 is the newest with wheels for both CUDA 12 and 13.
  echo "horovod: CUDA $major from $cuda_home, NCCL from nvidia-nccl-cu$major"
  "$progress" nccl "$python" -m pip install --no-deps --target "$work/nccl" \
    "nvidia-nccl-cu$major==2.27.7"
  nccl="$work/nccl/nvidia/nccl"
  ln -sf libnccl.so.2 "$nccl/lib/libnccl.so"
  export HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME="$cuda_home"
  export HOROVOD_NCCL_HOME="$nccl" HOROVOD_NCCL_LINK=SHARED
  # Volta to Hopper where the compiler still knows them (CUDA 13 dropped 70).
  if [ "$major" -ge 13 ]; then archs=80,90; else archs=70,80,90; fi
  export HOROVOD_BUILD_CUDA_CC_LIST=${HOROVOD_BUILD_CUDA_CC_LIST:-$archs}
  export CUDACXX="$cuda_home/bin/nvcc" PATH="$cuda_home/bin:$PATH"
  # Where pip puts the nvidia-nccl that TensorFlow brings, seen from
  # horovod/tensorflow/: the folder of this build is gone when it runs.
  # shellcheck disable=SC2016
  export LDFLAGS='-Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib'
fi

echo "horovod: compiling ($variant, 1 to 4 minutes on two cores)"
# -v: the compiler's lines, with the share that is done.
"$progress" horovod "$builder" -m pip wheel -v --no-deps --no-build-isolation \
  --wheel-dir "$work/wheels" "$source_dir" || {
  echo "horovod: runs have one rank until make horovod has built it" >&2
  exit 1
}

if [ "$variant" != "${variant%-wheel}" ]; then
  mkdir -p "$3"
  cp "$work"/wheels/horovod-*.whl "$3"
  ls "$3"/horovod-*.whl
else
  "$python" -m pip install --quiet --no-deps --force-reinstall "$work"/wheels/horovod-*.whl
fi
