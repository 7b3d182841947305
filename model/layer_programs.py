"""--xla=whole_layers: a layer as a program of XLA, and its gradient as another.

The gradient that tf.function makes of a compiled function hands over more than
it reads: a tensor once for each reader, arguments, tensors of which only the
shape is read, and constants, for which a host waits. Here what lies between the
two programs is in memory once.
"""

from common.tensorflow_v1 import tf
from model import kernels
from xla_patches import jit

# Ops whose outputs are their inputs, unchanged.
_ALIASES = ("Identity", "IdentityN", "StopGradient", "PreventGradient")


def whole_layer(function, *arguments, trains: bool, **static):
  """function(*arguments, **static), as programs in the mode whole_layers.

  `arguments` may be nested; what is no tensor in them is hashable, as `static`
  is. Layers of one structure have the same programs. Of a layer that does not
  train nothing is kept.
  """
  if not jit.is_mode("whole_layers"):
    return function(*arguments, **static)
  leaves = tf.nest.flatten(arguments)
  # A tensor that is given twice stays one, of which kernels ask.
  numbers: dict = {}
  for leaf in filter(tf.is_tensor, leaves):
    numbers.setdefault(leaf.ref(), len(numbers))
  tensors = [reference.deref() for reference in numbers]
  pattern = [numbers[x.ref()] if tf.is_tensor(x) else None for x in leaves]
  others = [None if tf.is_tensor(leaf) else leaf for leaf in leaves]

  def layer(*tensors):
    filled = [
      other if number is None else tensors[number]
      for number, other in zip(pattern, others, strict=True)
    ]
    return function(*tf.nest.pack_sequence_as(arguments, filled), **static)

  structure = repr(tf.nest.map_structure(tf.is_tensor, arguments))
  types = [(tensor.dtype, str(tensor.shape)) for tensor in tensors]
  alike = (structure, *pattern, *others, *types, *sorted(static.items()))
  programs = jit.shared(
    (function, *alike), lambda: _LayerPrograms(layer, tensors)
  )
  return programs.train(tensors) if trains else programs.apply(tensors)


class _LayerPrograms:
  """A pure function of tensors of fixed types and shapes, and its gradient.

  The programs are parts of one graph; `str`s are names of its tensors.
  """

  def __init__(self, function, tensors):
    # What the function would compile is part of these programs.
    with tf.Graph().as_default() as self._graph, jit.mode("step"):
      inputs = _placeholders(tensors)
      results = function(*inputs)
      self._results = tf.nest.map_structure(lambda tensor: tensor.name, results)
      outputs = [*{t.name: t for t in tf.nest.flatten(results)}.values()]
      forward = frozenset(self._graph.get_operations())
      d_outputs = _placeholders(outputs)
      gradients = [
        None if gradient is None else tf.convert_to_tensor(gradient)
        for gradient in tf.gradients(outputs, inputs, d_outputs)
      ]
    self._inputs, self._outputs = _names(inputs), _names(outputs)
    self._d_inputs = [t if t is None else _source(t).name for t in gradients]
    self._d_inputs_once = [*dict.fromkeys(filter(None, self._d_inputs))]
    # The gradient computes constants itself.
    made = {t.name for op in forward if op.type != "Const" for t in op.outputs}
    after = self._ops_between(made, self._d_inputs_once)
    self._read = sorted(made & _names_read(after))
    # Of results that repeat a tensor this is the one that is kept.
    self._sources = [_source(tensor).name for tensor in outputs]
    known = {*self._inputs, *self._sources}
    self._kept = [name for name in self._read if name not in known]
    given = [*self._read, *_names(d_outputs)]
    self._apply = self._program(self._inputs, self._outputs)
    self._forward = self._program(self._inputs, [*self._outputs, *self._kept])
    self._backward = self._program(given, self._d_inputs_once)

  def apply(self, tensors: list):
    """What the function returns."""
    return self._packed(self._apply(*tensors))

  def train(self, tensors: list):
    """The same, with its gradient and what that reads."""
    computed = self._forward(*tensors)
    names = [*self._sources, *self._kept, *self._inputs]
    values = dict(zip(names, [*computed, *tensors], strict=True))
    count = len(self._outputs)

    def gradient(op, *d_tensors):
      read = [values[name] for name in self._read]
      d_inputs = self._backward(*read, *d_tensors[:count])
      by_name = dict(zip(self._d_inputs_once, d_inputs, strict=True))
      return [*[None] * count, *map(by_name.get, self._d_inputs)]

    outputs = [*computed[:count], *tensors]
    return self._packed(kernels.with_gradient(outputs, gradient)[:count])

  def _packed(self, outputs):
    by_name = dict(zip(self._outputs, outputs, strict=True))
    return tf.nest.map_structure(by_name.get, self._results)

  def _program(self, given: list[str], wanted: list[str]):
    """A compiled function from the tensors `given` to those `wanted`."""

    def part(*tensors):
      values = dict(zip(given, tensors, strict=True))
      computed = [name for name in wanted if name not in values]
      ops = self._ops_between(values, computed)
      graph_def = tf.GraphDef()
      graph_def.node.extend(map(_node, ops))
      names = _names_read(ops)
      read = {name: value for name, value in values.items() if name in names}
      tensors = tf.import_graph_def(graph_def, read, computed, name="")
      values |= zip(computed, tensors, strict=True)
      return [values[name] for name in wanted]

    return tf.function(part, autograph=False, jit_compile=True)

  def _ops_between(self, given, wanted: list[str]) -> list:
    """The ops that compute the tensors `wanted` from those `given`."""
    ops: dict = {}  # in an order that is the same in every process
    pending = [self._graph.get_tensor_by_name(name) for name in wanted]
    while pending:
      tensor = pending.pop()
      if tensor.name not in given and tensor.op not in ops:
        ops[tensor.op] = None
        pending += map(_source, tensor.op.inputs)
    return [*ops]


def _source(tensor):
  """What a tensor repeats: the first one that no op of `_ALIASES` made."""
  while tensor.op.type in _ALIASES:
    tensor = tensor.op.inputs[tensor.value_index]
  return tensor


def _names_read(ops: list) -> set[str]:
  return {_source(tensor).name for op in ops for tensor in op.inputs}


def _node(op) -> tf.NodeDef:
  """A copy that reads sources. XLA orders and places the ops of a program."""
  node = op.node_def
  del node.input[:]
  node.input.extend(_source(tensor).name for tensor in op.inputs)
  node.attr.pop("_class", None)
  return node


def _names(tensors) -> list[str]:
  return [tensor.name for tensor in tensors]


def _placeholders(tensors) -> list:
  return [tf.placeholder(tensor.dtype, tensor.shape) for tensor in tensors]
