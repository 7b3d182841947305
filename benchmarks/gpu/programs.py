"""The programs that XLA makes of a training graph, and what lies between."""

from tensorflow.python.eager import context  # tf.compat.v1 has no switch to it

from benchmarks.gpu import costs, export_hlo, placement
from common.tensorflow_v1 import tf

_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# They read as much of their first input as they write.
_READ_PART = frozenset(["GatherV2", "Slice", "StridedSlice"])


def export(placed: placement.Placement) -> dict:
  """The HLO modules of all programs, by their functions' names."""
  calls = {
    op.get_attr("f").name: op for op in placed.ops if placement.is_program(op)
  }
  library = placed.ops[0].graph.as_graph_def().library
  with context.eager_mode():
    for function in library.function:
      context.context().add_function_def(function)
    return {name: _module(name, op) for name, op in calls.items()}


def _module(name: str, op) -> bytes:
  variables = [
    tf.Variable(
      tf.zeros(t.op.get_attr("shape"), t.op.get_attr("dtype")),
      use_resource=True,
    )
    for t in op.inputs
    if t.dtype == tf.resource
  ]
  module = context.context().get_compiler_ir(
    device_name=None,
    platform_name="CPU",
    function_name=name,
    flat_args=[
      tf.TensorSpec(t.shape, t.dtype)
      for t in op.inputs
      if t.dtype != tf.resource
    ],
    captured_inputs=[v.handle for v in variables],
    stage="hlo_serialized",
  )
  return export_hlo.without_copies(module)


def kernels(placed: placement.Placement, modules: dict):
  """What a GPU runs in an update: those of `modules`, and TensorFlow's own.

  `modules`: function's name -> `costs.Module` that XLA compiled.
  """
  compiled = {name: [*module.kernels()] for name, module in modules.items()}
  for op in placed.launched:
    if placement.is_program(op):
      yield from compiled[op.get_attr("f").name]
    else:
      yield _kernel(op)


def _kernel(op) -> costs.Kernel:
  read, written = (
    [placement.size(t) for t in tensors] for tensors in (op.inputs, op.outputs)
  )
  if op.type in _READ_PART:
    read[0] = written[0]
  total = sum(read) + sum(written)
  if op.type in ("MatMul", "BatchMatMulV2"):
    left, out = op.inputs[0], op.outputs[0]
    across = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    depth = left.shape.as_list()[-2 if across else -1]
    flops = 2.0 * out.shape.num_elements() * depth
    return costs.Kernel(total, flops, _TYPES[left.dtype.name], "cublas")
  return costs.Kernel(total)
