"""--xla: which parts of the training step XLA compiles.

  off     none
  auto    what TensorFlow's own clustering finds
  layers  each layer's work between its matmuls, one program forward and one
          backward, so that gradients leave early; and the update
  step    forward and backward pass of a micro-batch as one program; the update

With `layers` no matmul is compiled: XLA runs them no faster than oneDNN and
cuBLAS, which it would call anyway, and on CPUs it runs bfloat16 at float32's
rate. But a GPU waits while each kernel and program is launched. The all-reduce
is in no program.
"""

import contextlib
import contextvars
import functools

from common.console import say
from common.tensorflow_v1 import tf
from config.execution import KERNELS, VARIED

# The mode, the graph's programs, and whether shapes may vary between updates.
_current: contextvars.ContextVar = contextvars.ContextVar(
  "xla", default=("off", {}, True)
)


@contextlib.contextmanager
def mode(name: str, fixed_shapes: bool = False):
  """Compiles the graph that is built inside by one of `MODES`."""
  token = _current.set((name, {}, name in VARIED and not fixed_shapes))
  try:
    yield
  finally:
    _current.reset(token)


def tell_compiling(comm, what: str) -> None:
  """Says on rank 0 that `what` takes time at first, if the graph compiles."""
  if _current.get()[0] != "off":
    say(comm, f"compiling {what} ...")


def on_gpu() -> bool:
  """Whether this process computes on a GPU."""
  return bool(tf.config.list_physical_devices("GPU"))


def saves_launches(modes=KERNELS) -> bool:
  """Whether a GPU would be given few large programs, in one of these `modes`.

  A CPU launches nothing, and casts and adds up faster by TensorFlow's ops.
  """
  return on_gpu() and _current.get()[0] in modes


def takes_dynamic_shapes() -> bool:
  """Whether shapes may vary between updates."""
  return _current.get()[2]


def compiled(function, modes=KERNELS, **static):
  """`function` of tensors, as one program if the mode is one of `modes`.

  It is pure or assigns to variables; `static` arguments are hashable. A graph
  has one program for each function, static arguments and shapes.
  """
  if _current.get()[0] not in modes:
    return functools.partial(function, **static)
  graph = tf.get_default_graph()

  # Variables belong to the graph around the program.
  def outside(getter, *args, **kwargs):
    with graph.as_default(), tf.control_dependencies(None):
      return getter(*args, **kwargs)

  def traced(*tensors, **named):
    with tf.variable_scope(tf.get_variable_scope(), custom_getter=outside):
      return function(*tensors, **named, **static)

  # All layers of one kind share a program: a deep model compiles no longer
  # than a shallow one.
  programs = _current.get()[1]
  key = function, *sorted(static.items())
  if key not in programs:
    programs[key] = tf.function(traced, autograph=False, jit_compile=True)
  return programs[key]
