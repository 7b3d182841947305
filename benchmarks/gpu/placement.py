"""Where a training graph's ops run beside one GPU, and what crosses the bus.

TensorFlow's placer decides this when a session starts, from the kernels that
are registered. `kernels.txt` has those of its GPU wheel, so that the same can
be known without that wheel or a GPU:

- an op runs on the GPU if it has a kernel there for its types. With it go, or
  stay, the ops that share its variable or are colocated with it;
- a GPU kernel may want or give some tensors in the host's memory: shapes and
  indices, and nearly everything that is int32;
- a tensor that is made in one memory and read in the other is copied, once for
  all of its readers.
"""

import collections
import functools
import pathlib
import re
from typing import NamedTuple

from common.tensorflow_v1 import tf

TABLE = pathlib.Path(__file__).with_name("kernels.txt")

# Horovod's ops, with HOROVOD_GPU_OPERATIONS=NCCL as in build_horovod.sh.
_HOROVOD = (
  "HorovodAllgather", "HorovodAllreduce", "HorovodBroadcast",
  "HorovodGroupedAllreduce", "HorovodReducescatter",
)  # fmt: skip

# These hand their input on, or give what stays in memory: nothing is launched.
_FREE = frozenset(
  "Bitcast Const ExpandDims Identity IdentityN Merge NoOp Placeholder "
  "PreventGradient ReadVariableOp Reshape Squeeze StopGradient Switch "
  "VarHandleOp".split()
)

# Ops of a layer: with one of these in the wrong place every layer waits.
PER_LAYER = re.compile(r"/layer_\d+/")


class _Kernel(NamedTuple):
  host: frozenset  # names of arguments in the host's memory
  types: dict  # attribute -> names of types


@functools.cache
def _table() -> dict:
  """Op's type -> its GPU kernels."""
  found = collections.defaultdict(list)
  for line in TABLE.read_text(encoding="ascii").splitlines()[1:]:
    op, *words = line.split()
    fields = {
      k: frozenset(v.split(",")) for k, v in (w.split("=") for w in words)
    }
    host = fields.pop("host", frozenset())
    found[op].append(_Kernel(host, fields))
  for op in _HOROVOD:
    found[op].append(_Kernel(frozenset(), {}))
  return found


def is_program(op) -> bool:
  """Whether XLA compiles what `op` calls."""
  return op.type.endswith("PartitionedCall") and op.get_attr("_XlaMustCompile")


def _gpu_kernel(op) -> _Kernel | None:
  if is_program(op):  # int32 arguments, too, are in the device's memory
    return _Kernel(frozenset(), {})
  for kernel in _table().get(op.type, ()):
    if all(
      {t.name for t in _as_list(op.get_attr(attribute))} <= types
      for attribute, types in kernel.types.items()
    ):
      return kernel
  return None


def _as_list(value) -> list:
  return value if isinstance(value, list) else [value]


def _argument_names(op, arguments):
  """The name of each tensor's argument, which may be a list of tensors."""
  for argument in arguments:
    count = 1
    if argument.number_attr:
      count = op.get_attr(argument.number_attr)
    elif argument.type_list_attr:
      count = len(op.get_attr(argument.type_list_attr))
    yield from [argument.name] * count


def reachable(fetches) -> list:
  """All ops that must run for the tensors and ops `fetches`."""
  stack = [getattr(fetch, "op", fetch) for fetch in fetches]
  seen = dict.fromkeys(stack)
  while stack:
    op = stack.pop()
    for before in (*(t.op for t in op.inputs), *op.control_inputs):
      if before not in seen:
        seen[before] = None
        stack.append(before)
  return list(seen)


class Placement:
  """The ops that `fetches` need, and where they run.

  Attributes:
    ops: all of them, by TensorFlow's operations.
    without_kernel: those without a kernel for the GPU, but for those that are
      put on the host on purpose.
    launched: those that the GPU works on.
    to_device, to_host: the tensors that cross the bus.
  """

  def __init__(self, fetches):
    self.ops = reachable(fetches)
    self._kernels = {op: _gpu_kernel(op) for op in self.ops}
    self._find_homes()
    self.without_kernel = [
      op
      for op, kernel in self._kernels.items()
      if not kernel and not _is_held(op)
    ]
    self._find_crossings(fetches)
    self.launched = []
    for op in self.ops:
      in_memory = self._in_device_memory(op, True)
      in_memory += self._in_device_memory(op, False)
      if self._on_gpu[op] and op.type not in _FREE and any(in_memory):
        self.launched.append(op)

  def _find_homes(self) -> None:
    """Ops that share a variable or are colocated have one home."""
    parent = {}

    def root(key):
      while (above := parent.setdefault(key, key)) != key:
        key = above
      return key

    for op in self.ops:
      with_it = [name.decode() for name in op.colocation_groups()]
      with_it += [
        f"loc:@{t.op.name}"
        for t in op.inputs
        if t.dtype.base_dtype == tf.resource and not is_program(op)
      ]
      for name in (f"loc:@{op.name}", *with_it):
        parent[root(name)] = root(f"loc:@{op.name}")
    homes = {op: root(f"loc:@{op.name}") for op in self.ops}
    on_host = {
      homes[op] for op in self.ops if not self._kernels[op] or _is_held(op)
    }
    self._on_gpu = {op: home not in on_host for op, home in homes.items()}
    # A constant goes where it is read.
    readers = collections.defaultdict(set)
    for op in self.ops:
      for tensor in op.inputs:
        readers[tensor.op].add(self._on_gpu[op])
    for op, where in readers.items():
      if op.type == "Const" and not any(where):
        self._on_gpu[op] = False

  def _in_device_memory(self, op, outputs: bool) -> list:
    """For each input or output of `op`."""
    definition = op.op_def
    tensors = op.outputs if outputs else op.inputs
    arguments = definition.output_arg if outputs else definition.input_arg
    if not self._on_gpu[op]:
      return [False] * len(tensors)
    host = self._kernels[op].host
    return [
      name not in host and tensor.dtype.base_dtype != tf.resource
      for tensor, name in zip(
        tensors, _argument_names(op, arguments), strict=True
      )
    ]

  def _find_crossings(self, fetches) -> None:
    made = {}
    for op in self.ops:
      made.update(
        (t.ref(), on_device)
        for t, on_device in zip(
          op.outputs, self._in_device_memory(op, True), strict=True
        )
      )
    to_device, to_host = {}, {}
    for op in self.ops:
      wanted = self._in_device_memory(op, False)
      for tensor, on_device in zip(op.inputs, wanted, strict=True):
        if tensor.dtype.base_dtype == tf.resource:
          continue
        if on_device != made[tensor.ref()]:
          (to_device if on_device else to_host)[tensor.ref()] = tensor
    for tensor in fetches:  # the program reads them
      if isinstance(tensor, tf.Tensor) and made[tensor.ref()]:
        to_host[tensor.ref()] = tensor
    self.to_device, self.to_host = [*to_device.values()], [*to_host.values()]


def _is_held(op) -> bool:
  """Whether the graph itself puts `op` on the host."""
  return "CPU" in op.device.upper()


def size(tensor) -> int:
  """Bytes; 0 for a handle, or where the shape is not known."""
  kind = tensor.dtype.base_dtype
  if kind == tf.resource or not tensor.shape.is_fully_defined():
    return 0
  return tensor.shape.num_elements() * kind.size
