"""Layers with google/bert's variable names; `kernels` has the arithmetic."""

import functools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import mixed_precision
from common.tensorflow_v1 import tf
from config.bert_config import ACTIVATION_NAMES, BertConfig
from model import kernels
from model.tensor_parallel import WHOLE, Slices
from xla_patches import jit

# float16 knows no number much smaller: a smaller epsilon would be 0.
_LEAST_EPSILON = {tf.float16: 1e-7}


def hashed_seed(dropout_seed):
  """The uint32 [2] that a model's sites share, of an int32 or int64 [2] seed.

  Without it seeds that count (seed, update) would share masks between
  neighbouring sites. None stays None.
  """
  if dropout_seed is None:
    return None
  drawn = tf.random.stateless_uniform(
    [2], dropout_seed, minval=None, maxval=None, dtype=tf.int32
  )
  # int32 would be added in a GPU's host, and copied to it for every site.
  return tf.bitcast(drawn, tf.uint32)


def dropout_site_seed(hashed, site):
  """The uint32 [2] seed of a dropout call site.

  `hashed` is `hashed_seed`'s; one that is not is hashed here.
  """
  if hashed is None:
    return None
  if hashed.dtype != tf.uint32:
    hashed = hashed_seed(hashed)
  return hashed + tf.constant([0, site % 2**32], tf.uint32)


def site_seeds(hashed, first, count) -> list:
  """`dropout_site_seed` of `count` sites from number `first` on."""
  if hashed is None:
    return [None] * count

  def seeds(hashed):
    return [dropout_site_seed(hashed, first + i) for i in range(count)]

  return jit.compiled(seeds)(hashed)


def dropout_arguments(dropout_prob, seed):
  """A kernel's uint32 [2] seed, a random one for None, and its keep_prob."""
  if not dropout_prob:
    return tf.zeros([2], tf.uint32), 1.0
  if seed is None:
    lowest, highest = tf.int32.limits
    seed = tf.random.uniform([2], lowest, highest, tf.int32)
  if seed.dtype != tf.uint32:
    seed = tf.bitcast(tf.cast(seed, tf.int32), tf.uint32)
  return seed, 1.0 - dropout_prob


def activated(tensor, bias, activation, dtype):
  """`activation` of tensor + bias or tensor, computed in `dtype`."""
  function = get_activation(activation)
  if isinstance(function, kernels.Kernel):  # adds the bias itself
    return function(tensor, bias, dtype=dtype)
  if bias is not None:
    tensor = kernels.add_bias(tensor, bias)
  if function is None:
    return tensor
  return tf.cast(function(tf.cast(tensor, dtype)), tensor.dtype)


def get_activation(activation_string):
  """The function of one of `ACTIVATION_NAMES`; ValueError for another name.

  It is None for "linear" and ""; what is not a string is returned as it is.
  """
  if not isinstance(activation_string, str):
    return activation_string
  gelu, gelu_erf, silu = kernels.gelu, kernels.gelu_erf, kernels.silu
  known = (None, None, tf.nn.relu, gelu, tf.tanh, gelu_erf, silu)
  functions = dict(zip(ACTIVATION_NAMES, known, strict=True))
  name = activation_string.lower()
  if name not in functions:
    raise ValueError(
      f"Unsupported activation: {name!r}, not one of {ACTIVATION_NAMES}"
    )
  return functions[name]


def create_initializer(initializer_range=0.02, draw=tf.random.truncated_normal):
  """A normal initializer with stddev `initializer_range`, cut at two of it.

  `draw` may be another of tf.random's functions that have a `stddev`.
  Values depend on the graph's seed and the variable's name. TensorFlow's own
  depend on what else is in the graph, too.
  """

  def initializer(shape, dtype=tf.float32, partition_info=None):
    scope = tf.get_default_graph().get_name_scope()  # NAME/Initializer
    seed = zlib.crc32(scope.encode())
    return draw(shape, stddev=initializer_range, dtype=dtype, seed=seed)

  return initializer


class Weights(NamedTuple):
  """A dense layer's variables: float32 [K, units], and [units] or None."""

  kernel: tf.Variable
  bias: tf.Variable | None


def dense_weights(
  name, width, units, initializer, slices=WHOLE, cut=None, has_bias=True
):
  """`Weights` named as tf.layers.dense's, for inputs of this `width`.

  With `cut` "units" a slice has its part of them; with "inputs" its part of
  those, and the whole bias.
  """
  axes = {None: (None, None), "units": (1, 0), "inputs": (0, None)}
  kernel_axis, bias_axis = axes[cut]
  shape, zeros = [width, units], tf.zeros_initializer()
  with tf.variable_scope(name, default_name="dense"):
    kernel = slices.get_variable("kernel", shape, initializer, kernel_axis)
    bias = None
    if has_bias:
      bias = slices.get_variable("bias", [units], zeros, bias_axis)
    return Weights(kernel, bias)


def dense(
  input_tensor,
  units,
  activation=None,
  kernel_initializer=None,
  name=None,
  dtype=None,
  has_bias=True,
  activation_dtype=tf.float32,
):
  """activation(input_tensor [..., K] x kernel + bias), by `dense_weights`.

  It computes in and returns `dtype`, the input's without it; see `activated`.
  """
  shape = get_shape_list(input_tensor)
  dtype = dtype or input_tensor.dtype
  weights = dense_weights(
    name, shape[-1], units, kernel_initializer, has_bias=has_bias
  )
  matrix = tf.cast(reshape_to_matrix(input_tensor), dtype)
  output = tf.matmul(matrix, tf.cast(weights.kernel, dtype))
  output = activated(output, weights.bias, activation, activation_dtype)
  return reshape_from_matrix(output, shape)


def dropout(input_tensor, dropout_prob, seed=None):
  """Drops with `dropout_prob`, by an integer [2] `seed` or at random."""
  if not dropout_prob:
    return input_tensor
  seed, keep_prob = dropout_arguments(dropout_prob, seed)
  return kernels.dropout(input_tensor, seed, keep_prob=keep_prob)


class Norm(NamedTuple):
  """How a model normalizes."""

  # tf.contrib.layers.layer_norm's, with which published models were trained.
  epsilon: float = 1e-12
  has_bias: bool = True
  centred: bool = True  # else by the root mean square

  @classmethod
  def of(cls, config: BertConfig) -> "Norm":
    """The norm that a config describes."""
    return cls(config.norm_eps, config.norm_bias, config.norm == "layer")

  def computed_in(self, dtype) -> dict:
    """A kernel's arguments."""
    epsilon = max(self.epsilon, _LEAST_EPSILON.get(dtype, 0.0))
    return dict(epsilon=epsilon, centred=self.centred, dtype=dtype)


BERTS_NORM = Norm()


def norm_weights(width: int, norm=BERTS_NORM, name=None) -> tuple:
  """(gamma, beta) of a layer norm, float32 [width]; 0 without a bias."""
  # google/bert's order of variables: beta comes before gamma.
  with tf.variable_scope(name, default_name="LayerNorm"):
    if norm.has_bias:
      zeros = tf.zeros_initializer()
      beta = tf.get_variable("beta", [width], initializer=zeros)
    else:
      beta = tf.zeros([width])
    gamma = tf.get_variable("gamma", [width], initializer=tf.ones_initializer())
  return tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)


def layer_norm(
  input_tensor, name=None, dtype=tf.float32, store_dtype=None, norm=BERTS_NORM
):
  """Normalizes over the last axis in `dtype`; the result is `store_dtype`."""
  variables = norm_weights(get_shape_list(input_tensor)[-1], norm, name)
  store = store_dtype or input_tensor.dtype
  return kernels.layer_norm(
    input_tensor, *variables, **norm.computed_in(dtype), store=store
  )


def recomputed(function, *arguments):
  """function(*arguments), a tensor or list, computed again in the gradient.

  Only tensors of `arguments`, which may be None, stay in memory. They and
  variables have gradients, other tensors in the function's closure have none.
  As tf.recompute_grad, for functions that use tf.get_variable.
  """
  scope, used = tf.get_variable_scope(), []
  # A gradient takes tensors only, so what is None is left out and put back.
  tensors = [a for a in arguments if a is not None]

  def of_tensors(*present):
    rest = iter(present)
    return function(*[a if a is None else next(rest) for a in arguments])

  def record(getter, *args, **kwargs):
    used.append(getter(*args, **kwargs))
    return used[-1]

  # The gradient must name every variable that the function reads, so those
  # that it asks for are written down.
  with tf.variable_scope(scope, custom_getter=record):
    results = of_tensors(*tensors)
  single = isinstance(results, tf.Tensor)
  results = [results] if single else list(results)
  values = [tf.convert_to_tensor(variable) for variable in used]

  def gradient(op, *d_results):
    d_results = d_results[: len(results)]
    # Not before the backward pass has come here, or all would be in memory.
    with tf.control_dependencies(d_results):
      again = [tf.identity(tensor) for tensor in tensors]
      with tf.variable_scope(scope, reuse=True, auxiliary_name_scope=False):
        recomputed_results = of_tensors(*again)
    gradients = tf.gradients(
      recomputed_results, [*again, *used], grad_ys=list(d_results)
    )
    return [*[None] * len(results), *gradients]

  outputs = kernels.with_gradient([*results, *tensors, *values], gradient)
  return outputs[0] if single else outputs[: len(results)]


class LayerConfig(NamedTuple):
  """A layer, and how this run computes it; a slice has N / slices heads."""

  bert: BertConfig
  policy: mixed_precision.Policy = mixed_precision.FP32
  recompute: tuple = ()  # names of `execution.RECOMPUTE`
  slices: Slices = WHOLE

  def recomputing(self, name: str, function: Callable) -> Callable:
    """`function`, computed again in the backward pass if `recompute` says so.

    Its arguments are tensors, of which some may be None.
    """
    if name not in self.recompute:
      return function
    return functools.partial(recomputed, function)


def layer_norm_and_dropout(input_tensor, dropout_prob, name=None, seed=None):
  """`layer_norm`, then `dropout`."""
  return dropout(layer_norm(input_tensor, name), dropout_prob, seed)


def get_shape_list(tensor, expected_rank=None, name=None):
  """Ints where the shape is known, else int32 scalars; see `assert_rank`."""
  if expected_rank is not None:
    assert_rank(tensor, expected_rank, name)
  shape = tensor.shape.as_list()
  if None in shape:
    dynamic = tf.shape(tensor)
    shape = [dynamic[i] if dim is None else dim for i, dim in enumerate(shape)]
  return shape


def means_of(members, outputs):
  """float [B, E, H]: the means of some tokens of the outputs, [B, S, H].

  `members`, [B, E, S], are 1 for those of a mean, else 0. A mean of none is 0.
  """
  counts = tf.reduce_sum(members, axis=2, keepdims=True)
  return tf.matmul(members, outputs) / tf.maximum(counts, 1.0)


def gather_indexes(sequence_tensor, positions):
  """float [B * P, H]: a [B, S, H] tensor's vectors at int [B, P] positions."""
  batch_size, seq_length, width = get_shape_list(sequence_tensor, 3)
  # A constant where sizes are known, so that no op computes it.
  if isinstance(batch_size, int) and isinstance(seq_length, int):
    starts = np.arange(batch_size, dtype=positions.dtype.as_numpy_dtype)
  else:
    starts = tf.range(batch_size, dtype=positions.dtype)
  rows = tf.reshape(positions + (starts * seq_length)[:, None], [-1])
  return kernels.gather_rows(tf.reshape(sequence_tensor, [-1, width]), rows)


def reshape_to_matrix(input_tensor):
  """[..., K] -> [n, K]; ValueError for a rank below 2."""
  rank = input_tensor.shape.ndims
  if rank < 2:
    raise ValueError(
      f"A matrix needs rank 2 or more; the shape is {input_tensor.shape}"
    )
  if rank == 2:
    return input_tensor
  return tf.reshape(input_tensor, [-1, input_tensor.shape[-1]])


def reshape_from_matrix(output_tensor, orig_shape_list):
  """[n, K] -> [..., K], with the other dimensions of `orig_shape_list`."""
  if len(orig_shape_list) == 2:
    return output_tensor
  width = get_shape_list(output_tensor)[-1]
  return tf.reshape(output_tensor, [*list(orig_shape_list[:-1]), width])


def assert_rank(tensor, expected_rank, name=None):
  """ValueError unless the rank is `expected_rank`, or one of them."""
  allowed = [expected_rank] if isinstance(expected_rank, int) else expected_rank
  if tensor.shape.ndims not in allowed:
    raise ValueError(
      f"Tensor {name or tensor.name} in scope "
      f"'{tf.get_variable_scope().name}' is of rank {tensor.shape.ndims} "
      f"(shape {tensor.shape}), not {expected_rank}"
    )
