"""What the model is made of: dense, layer norm, dropout, activations, shapes.

Variables have google/bert's names; the arithmetic is that of `kernels`.
"""

import zlib

from common.tensorflow_v1 import tf
from model import kernels
from model.bert_config import ACTIVATION_NAMES
from model.tensor_parallel import WHOLE

# tf.contrib.layers.layer_norm's, with which published checkpoints were trained.
_LAYER_NORM_EPSILON = 1e-12
_LAYER_NORM_EPSILONS = {tf.float16: 1e-7}  # knows no number much smaller


def dropout_site_seed(dropout_seed, site):
  """The seed of one dropout call site, a pure function of both arguments.

  The pair is drawn from `dropout_seed`, int32 or int64 [2], before the site is
  added, so that seeds that count (seed, update) do not share masks between
  neighbouring sites. None stays None.
  """
  if dropout_seed is None:
    return None
  drawn = tf.random.stateless_uniform(
    [2], dropout_seed, minval=None, maxval=None, dtype=tf.int32
  )
  return drawn + tf.constant([0, site], tf.int32)


def dropout_arguments(dropout_prob, seed):
  """What a kernel with a dropout takes: an int32 [2] seed, and keep_prob.

  Probabilities of 0 and None are no dropout; a seed of None is drawn from a
  stateful generator.
  """
  if not dropout_prob:
    return tf.zeros([2], tf.int32), 1.0
  if seed is None:
    lowest, highest = tf.int32.limits
    seed = tf.random.uniform([2], lowest, highest, tf.int32)
  return tf.cast(seed, tf.int32), 1.0 - dropout_prob


def gelu(x, dtype=tf.float32):
  """GELU of a float tensor, computed in `dtype`; see `kernels.gelu`."""
  return kernels.gelu(x, dtype=dtype)


def gelu_erf(x, dtype=tf.float32):
  """As `gelu`, without the approximation; see `kernels.gelu_erf`."""
  return kernels.gelu_erf(x, dtype=dtype)


def get_activation(activation_string):
  """The function of an activation's name, one of `ACTIVATION_NAMES`.

  None for "linear", "" and None; what is not a string is returned as it is.

  Raises:
    ValueError: the name is unknown.
  """
  if not isinstance(activation_string, str):
    return activation_string
  known = (None, None, tf.nn.relu, gelu, tf.tanh, gelu_erf)
  functions = dict(zip(ACTIVATION_NAMES, known, strict=True))
  name = activation_string.lower()
  if name not in functions:
    raise ValueError(
      f"Unsupported activation: {name!r}, not one of {ACTIVATION_NAMES}"
    )
  return functions[name]


def create_initializer(initializer_range=0.02):
  """A truncated normal initializer with stddev `initializer_range`.

  The values are a function of the graph's seed and the variable's name, not of
  what else is in the graph, as TensorFlow's own are.
  """

  def initializer(shape, dtype=tf.float32, partition_info=None):
    scope = tf.get_default_graph().get_name_scope()  # NAME/Initializer
    return tf.random.truncated_normal(
      shape,
      stddev=initializer_range,
      dtype=dtype,
      seed=zlib.crc32(scope.encode()),
    )

  return initializer


def dense(
  input_tensor,
  units,
  activation=None,
  kernel_initializer=None,
  name=None,
  dtype=None,
  slices=WHOLE,
  cut=None,
):
  """input_tensor [..., K] x kernel + bias, named as tf.layers.dense's.

  Args:
    dtype: (optional) the type to compute in and of the result, input_tensor's
      without it; the variables are float32.
    cut: (optional) what is cut over `slices`: "units", and each slice returns
      its part of them; or "inputs", and K is this slice's part of them and the
      result is whole.
  """
  shape = get_shape_list(input_tensor)
  dtype = dtype or input_tensor.dtype
  width = shape[-1] * (slices.size if cut == "inputs" else 1)
  axes = {None: (None, None), "units": (1, 0), "inputs": (0, None)}
  kernel_axis, bias_axis = axes[cut]
  with tf.variable_scope(name, default_name="dense"):
    kernel = slices.get_variable(
      "kernel", [width, units], kernel_initializer, kernel_axis
    )
    bias = slices.get_variable(
      "bias", [units], tf.zeros_initializer(), bias_axis
    )
    matrix = tf.cast(reshape_to_matrix(input_tensor), dtype)
    output = tf.matmul(matrix, tf.cast(kernel, dtype))
    if cut == "inputs":
      output = slices.reduce_from_group(output)
    output = tf.nn.bias_add(output, tf.cast(bias, dtype))
    if activation is not None:
      output = activation(output)
    return reshape_from_matrix(output, shape)


def dropout(input_tensor, dropout_prob, seed=None):
  """Sets elements to 0 and scales the others up, so that the mean stays.

  `dropout_prob` is that of dropping an element, not of keeping it; 0 and None
  do nothing. The mask is a pure function of `seed`, int32 or int64 [2], or
  without it of a stateful generator.
  """
  if not dropout_prob:
    return input_tensor
  seed, keep_prob = dropout_arguments(dropout_prob, seed)
  return kernels.dropout(input_tensor, seed, keep_prob=keep_prob)


def normalized(
  kernel, tensors, *seed, name=None, dtype, store_dtype=None, **static
):
  """A kernel with a layer norm, of tensors [..., H] and its own variables.

  It computes in `dtype`; `store_dtype` is the result's type, the first tensor's
  without it.
  """
  shape = [get_shape_list(tensors[0])[-1]]
  with tf.variable_scope(name, default_name="LayerNorm"):
    beta = tf.get_variable("beta", shape, initializer=tf.zeros_initializer())
    gamma = tf.get_variable("gamma", shape, initializer=tf.ones_initializer())
  return kernel(
    *tensors,
    gamma,
    beta,
    *seed,
    epsilon=_LAYER_NORM_EPSILONS.get(dtype, _LAYER_NORM_EPSILON),
    dtype=dtype,
    store=store_dtype or tensors[0].dtype,
    **static,
  )


def layer_norm(input_tensor, name=None, dtype=tf.float32, store_dtype=None):
  """Layer normalization over the last axis; types as in `normalized`."""
  return normalized(
    kernels.layer_norm,
    [input_tensor],
    name=name,
    dtype=dtype,
    store_dtype=store_dtype,
  )


def recomputed(function, *tensors):
  """function(*tensors), a tensor or list, computed again in the backward pass.

  Only `tensors` stay in memory for the gradient, nothing that is inside; the
  gradient is by them and by variables, not by what the function closes over. As
  tf.recompute_grad, for functions that make variables by tf.get_variable.
  """
  scope, used = tf.get_variable_scope(), []

  def record(getter, *args, **kwargs):
    used.append(getter(*args, **kwargs))
    return used[-1]

  with tf.variable_scope(scope, custom_getter=record):
    results = function(*tensors)
  single = isinstance(results, tf.Tensor)
  results = [results] if single else list(results)
  values = [tf.convert_to_tensor(variable) for variable in used]

  def gradient(op, *d_results):
    d_results = d_results[: len(results)]
    with tf.control_dependencies(d_results):
      again = [tf.identity(tensor) for tensor in tensors]
      with tf.variable_scope(scope, reuse=True, auxiliary_name_scope=False):
        recomputed_results = function(*again)
    gradients = tf.gradients(
      recomputed_results, [*again, *used], grad_ys=list(d_results)
    )
    return [*[None] * len(results), *gradients]

  outputs = kernels.with_gradient([*results, *tensors, *values], gradient)
  return outputs[0] if single else outputs[: len(results)]


def layer_norm_and_dropout(input_tensor, dropout_prob, name=None, seed=None):
  """`layer_norm`, then `dropout`."""
  return dropout(layer_norm(input_tensor, name), dropout_prob, seed)


def get_shape_list(tensor, expected_rank=None, name=None):
  """A tensor's shape: ints where known, int32 scalar tensors elsewhere.

  Raises:
    ValueError: the rank is not `expected_rank`, see `assert_rank`.
  """
  if expected_rank is not None:
    assert_rank(tensor, expected_rank, name)
  shape = tensor.shape.as_list()
  if None in shape:
    dynamic = tf.shape(tensor)
    shape = [dynamic[i] if dim is None else dim for i, dim in enumerate(shape)]
  return shape


def reshape_to_matrix(input_tensor):
  """[..., K] -> [product of the other dimensions, K].

  Raises:
    ValueError: the rank is less than 2.
  """
  rank = input_tensor.shape.ndims
  if rank < 2:
    raise ValueError(
      f"A matrix needs rank 2 or more; the shape is {input_tensor.shape}"
    )
  if rank == 2:
    return input_tensor
  return tf.reshape(input_tensor, [-1, input_tensor.shape[-1]])


def reshape_from_matrix(output_tensor, orig_shape_list):
  """Undoes `reshape_to_matrix`, for a matrix of any width, [n, K].

  `orig_shape_list` is the shape before, from `get_shape_list`; the result has
  K in its last place.
  """
  if len(orig_shape_list) == 2:
    return output_tensor
  width = get_shape_list(output_tensor)[-1]
  return tf.reshape(output_tensor, [*list(orig_shape_list[:-1]), width])


def assert_rank(tensor, expected_rank, name=None):
  """Checks while the graph is built that a tensor has the rank, or one of them.

  Raises:
    ValueError: it has another rank; `name` is the tensor's in the message.
  """
  allowed = [expected_rank] if isinstance(expected_rank, int) else expected_rank
  if tensor.shape.ndims not in allowed:
    raise ValueError(
      f"Tensor {name or tensor.name} in scope "
      f"'{tf.get_variable_scope().name}' is of rank {tensor.shape.ndims} "
      f"(shape {tensor.shape}), not {expected_rank}"
    )
