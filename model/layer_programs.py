"""--xla=whole_layers: a layer as a program of XLA, and its gradient as another.

The gradient that tf.function makes of a compiled function hands over more than
it reads: a tensor once for each reader, arguments, tensors of which only the
shape is read, and constants, for which a host waits. Here what lies between the
two programs is in memory once.
"""

from common.tensorflow_v1 import tf
from model import kernels
from xla_patches import jit

# Ops that give on what they get.
_ALIASES = ("Identity", "IdentityN", "StopGradient", "PreventGradient")


def whole_layer(function, *arguments, **static):
  """function(*arguments, **static), as programs in the mode whole_layers.

  `arguments` may be nested; what is no tensor in them is hashable, as `static`
  is. Layers of one structure have the same programs.
  """
  if not jit.is_mode("whole_layers"):
    return function(*arguments, **static)
  leaves = tf.nest.flatten(arguments)
  # A tensor that is given twice stays one, of which kernels ask.
  numbers = {}
  for leaf in filter(tf.is_tensor, leaves):
    numbers.setdefault(leaf.ref(), len(numbers))
  places = [numbers[x.ref()] if tf.is_tensor(x) else None for x in leaves]
  others = [None if tf.is_tensor(leaf) else leaf for leaf in leaves]
  structure = repr(tf.nest.map_structure(tf.is_tensor, arguments))
  tensors = [reference.deref() for reference in numbers]

  def layer(*tensors):
    filled = [
      other if place is None else tensors[place]
      for place, other in zip(places, others, strict=True)
    ]
    return function(*tf.nest.pack_sequence_as(arguments, filled), **static)

  key = (function, structure, *places, *others, *sorted(static.items()))
  programs = jit.shared(key, lambda: _LayerPrograms(layer, tensors))
  return programs(*tensors)


class _LayerPrograms:
  """A pure function of tensors of fixed shapes, and its gradient.

  Both programs are parts of one graph; `str`s are names of its tensors.
  """

  def __init__(self, function, tensors):
    # What the function would compile is part of these programs.
    with tf.Graph().as_default() as self._graph, jit.mode("step"):
      inputs = _placeholders(tensors)
      results = function(*inputs)
      outputs = [*{t.ref(): t for t in tf.nest.flatten(results)}.values()]
      forward = frozenset(self._graph.get_operations())
      d_outputs = _placeholders(outputs)
      d_inputs = [
        None if gradient is None else _source(tf.convert_to_tensor(gradient))
        for gradient in tf.gradients(outputs, inputs, d_outputs)
      ]
    self._results = tf.nest.map_structure(lambda tensor: tensor.name, results)
    self._distinct_results = _names(outputs)
    self._outputs = _names(map(_source, outputs))
    self._inputs, self._d_outputs = _names(inputs), _names(d_outputs)
    self._d_inputs = [None if t is None else t.name for t in d_inputs]
    self._gradients = [*dict.fromkeys(filter(None, self._d_inputs))]
    # A constant is in both programs.
    made = {t.name for op in forward if op.type != "Const" for t in op.outputs}
    read = _read(self._ops_between(made, self._gradients))
    self._read = sorted(made & read)
    self._kept = sorted((made & read).difference(self._inputs, self._outputs))
    program = {"autograph": False, "jit_compile": True}
    self._forward = tf.function(self._trace_forward, **program)
    self._backward = tf.function(self._trace_backward, **program)

  def __call__(self, *tensors):
    """What the function returns."""
    names = [*self._outputs, *self._kept]
    values = dict(zip(names, self._forward(*tensors), strict=True))
    outputs = [values[name] for name in self._outputs]
    values |= zip(self._inputs, tensors, strict=True)

    def gradient(op, *d_tensors):
      read = [values[name] for name in self._read]
      computed = self._backward(*read, *d_tensors[: len(outputs)])
      of_inputs = dict(zip(self._gradients, computed, strict=True))
      return [*[None] * len(outputs), *map(of_inputs.get, self._d_inputs)]

    tensors = kernels.with_gradient([*outputs, *tensors], gradient)
    by_name = dict(zip(self._distinct_results, tensors, strict=False))
    return tf.nest.map_structure(by_name.get, self._results)

  def _trace_forward(self, *tensors):
    values = dict(zip(self._inputs, tensors, strict=True))
    return self._part(values, [*self._outputs, *self._kept])

  def _trace_backward(self, *tensors):
    names = [*self._read, *self._d_outputs]
    values = dict(zip(names, tensors, strict=True))
    return self._part(values, self._gradients)

  def _part(self, values: dict, wanted: list[str]) -> list:
    """The tensors `wanted`, computed from these `values`."""
    computed = [name for name in wanted if name not in values]
    ops = self._ops_between(values, computed)
    part = tf.GraphDef()
    part.node.extend(map(_node, ops))
    read = _read(ops)
    given = {name: value for name, value in values.items() if name in read}
    tensors = tf.import_graph_def(part, given, computed, name="")
    values = values | dict(zip(computed, tensors, strict=True))
    return [values[name] for name in wanted]

  def _ops_between(self, given, wanted: list[str]) -> list:
    """The ops that compute the tensors `wanted` from those `given`."""
    ops: dict = {}  # in an order that is the same in every process
    pending = [self._graph.get_tensor_by_name(name) for name in wanted]
    while pending:
      tensor = pending.pop()
      if tensor.name not in given and tensor.op not in ops:
        ops[tensor.op] = None
        pending += _inputs(tensor.op)
    return [*ops]


def _source(tensor):
  """The tensor that aliases give on as this one."""
  while tensor.op.type in _ALIASES:
    tensor = tensor.op.inputs[tensor.value_index]
  return tensor


def _inputs(op) -> list:
  return [*map(_source, op.inputs)]


def _read(ops: list) -> set[str]:
  return {tensor.name for op in ops for tensor in _inputs(op)}


def _node(op) -> tf.NodeDef:
  """It reads what `_inputs` has; XLA itself orders and places its program."""
  node = op.node_def
  del node.input[:]
  node.input.extend(_names(_inputs(op)))
  node.attr.pop("_class", None)
  return node


def _names(tensors) -> list[str]:
  return [tensor.name for tensor in tensors]


def _placeholders(tensors) -> list:
  return [tf.placeholder(tensor.dtype, tensor.shape) for tensor in tensors]
