"""Writes which ops of this TensorFlow have GPU kernels; it needs no GPU.

  python -m venv .build/tensorflow_gpu
  .build/tensorflow_gpu/bin/pip install tensorflow==2.21.0
  .build/tensorflow_gpu/bin/python benchmarks/gpu/write_kernels.py \\
    > benchmarks/gpu/kernels.txt

PyPI's `tensorflow` for Linux on x86 has the kernels of CUDA; `tensorflow-cpu`,
this project's environment without a GPU, has not. A line is an op, the
arguments that its kernel has in the host's memory after "host=", and the types
that its attributes may have. Types that training does not use are left out.
"""

import collections

import tensorflow as tf
from tensorflow.python.framework import kernels  # tf has no public way to them

TYPES = {
  getattr(tf, name).as_datatype_enum: name
  for name in "bfloat16 bool float16 float32 float64 int32 int64 resource "
  "string uint32 uint64 uint8 variant".split()
}


def signatures(registered) -> set:
  """(host arguments, {(attribute, types), ...}) of an op's kernels."""
  found = set()
  for kernel in registered:
    limits = {}
    for c in kernel.constraint:
      names = {TYPES.get(t) for t in c.allowed_values.list.type} - {None}
      limits[c.name] = frozenset(names)
    if all(limits.values()):
      host = tuple(sorted(set(kernel.host_memory_arg)))
      found.add((host, frozenset(limits.items())))
  return found


def merged(found: set, attribute: str) -> set:
  """Kernels that differ only in the types of `attribute` as one."""
  groups = collections.defaultdict(set)
  for host, limits in found:
    types = dict(limits).get(attribute, frozenset())
    rest = frozenset((a, t) for a, t in limits if a != attribute)
    groups[host, rest, bool(types)].add(types)
  return {
    (host, rest | {(attribute, frozenset().union(*types))} if some else rest)
    for (host, rest, some), types in groups.items()
  }


def lines(op: str, registered: list) -> list:
  found = signatures(registered)
  for attribute in sorted({a for _, limits in found for a, _ in limits}):
    found = merged(found, attribute)
  return sorted(
    " ".join(
      [op]
      + ([f"host={','.join(host)}"] if host else [])
      + [f"{a}={','.join(sorted(types))}" for a, types in sorted(limits)]
    )
    for host, limits in found
  )


def main() -> None:
  by_op = collections.defaultdict(lambda: collections.defaultdict(list))
  for kernel in kernels.get_all_registered_kernels().kernel:
    if not kernel.label:
      by_op[kernel.op][kernel.device_type].append(kernel)
  print("# TensorFlow", tf.__version__)
  for op, registered in sorted(by_op.items()):
    # Those for any device count where a device's own do not fit.
    found = lines(op, registered["GPU"]) + lines(op, registered["DEFAULT"])
    for line in dict.fromkeys(found):
      print(line)


if __name__ == "__main__":
  main()
