"""What the model is made of: activations, dropout, layer norm, dense, shapes.

The first half are plain functions of tensors. A gradient is written by hand
where that saves passes over memory, or memory itself, against what automatic
differentiation builds; such a function takes a variable's value as an argument,
so that it works with reference and with resource variables alike. The second
half creates variables, under google/bert's names.
"""

import functools
import itertools
import math

from bert_config import ACTIVATION_NAMES
from tensorflow_v1 import tf

# tf.contrib.layers.layer_norm's, with which published checkpoints were trained.
_LAYER_NORM_EPSILON = 1e-12
_LAYER_NORM_EPSILONS = {tf.float16: 1e-7}  # knows no number much smaller

# Random bits per kept-or-dropped decision. A draw costs more than all other
# work of a dropout on a CPU, and 16 bits set the rate to within 1/65536.
_DROPOUT_BITS = 16
_DROPOUT_LEVELS = 1 << _DROPOUT_BITS

# gelu(x) = x * sigmoid(x * (A + B * x^2)), which equals the tanh form of
# https://arxiv.org/abs/1606.08415 since (1 + tanh(u)) / 2 = sigmoid(2 u).
_GELU_A = 2.0 * math.sqrt(2.0 / math.pi)
_GELU_B = _GELU_A * 0.044715

_gradient_numbers = itertools.count()


def _with_gradient(function):
  """Decorates f(*tensors) -> (y, gradient), gradient(dy) -> list of gradients.

  As tf.custom_gradient, which leaves an Identity behind that nothing uses and
  searches the whole graph for variables. For graph mode and tf.gradients; a
  GradientTape differentiates the body instead.
  """

  @functools.wraps(function)
  def call(*tensors):
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    y, gradient = function(*tensors)
    name = f"PerseusGradient{next(_gradient_numbers)}"
    tf.RegisterGradient(name)(lambda op, dy, *_: [None, *gradient(dy)])
    with tf.get_default_graph().gradient_override_map({"IdentityN": name}):
      return tf.identity_n([y, *tensors])[0]

  return call


def _gelu_gate(x):
  """The sigmoid that x is multiplied with."""
  return tf.sigmoid(x * (_GELU_A + _GELU_B * tf.square(x)))


@_with_gradient
def _gelu(stored):
  """GELU in float32 of a tensor that is stored in any type.

  Kept for the gradient: the tensor, and the sigmoid where that is stored in
  float32 too; of 16 bits it is computed again.
  """
  x = tf.cast(stored, tf.float32)
  gate = _gelu_gate(x)

  def gradient(dy):
    wide, again = x, gate
    if stored.dtype != tf.float32:
      with tf.control_dependencies([dy]):  # not before the backward pass
        wide = tf.cast(tf.identity(stored), tf.float32)
      again = _gelu_gate(wide)
    dy = tf.cast(dy, tf.float32)
    slope = _GELU_A + (3.0 * _GELU_B) * tf.square(wide)
    # SigmoidGrad(gate, t) is t * gate * (1 - gate) in one pass.
    through_gate = tf.raw_ops.SigmoidGrad(y=again, dy=dy * wide)
    return [tf.cast(dy * again + through_gate * slope, stored.dtype)]

  return tf.cast(x * gate, stored.dtype), gradient


def softmax(logits, dtype=tf.float32, store_dtype=None):
  """Softmax over the last axis, kept for the gradient as it is stored.

  Args:
    logits: float tensor.
    dtype: the type to compute in.
    store_dtype: (optional) the result's type, `dtype` without it.
  """
  store_dtype = store_dtype or dtype

  @_with_gradient
  def compute(x):
    y = tf.cast(tf.nn.softmax(tf.cast(x, dtype)), store_dtype)

    def gradient(dy):
      wide, dy = tf.cast(y, dtype), tf.cast(dy, dtype)
      # sum_j dy_j y_j of each row
      along = tf.reduce_sum(dy * wide, axis=-1, keepdims=True)
      return [tf.cast((dy - along) * wide, x.dtype)]

    return y, gradient

  if store_dtype == dtype == logits.dtype:
    return tf.nn.softmax(logits)  # its own gradient does as well
  return compute(logits)


@_with_gradient
def layer_normalization(x, gamma, beta, epsilon):
  """gamma * (x - mean) / sqrt(variance + epsilon) + beta over the last axis.

  Source: https://arxiv.org/abs/1607.06450.

  Args:
    x: float [..., H].
    gamma: float [H], of x's type, as the others.
    beta: float [H].
    epsilon: scalar tensor.

  Returns:
    float [..., H].
  """
  # mean, rstd = [..., 1]
  mean = tf.reduce_mean(x, axis=-1, keepdims=True)
  centred = x - mean
  variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
  rstd = tf.math.rsqrt(variance + epsilon)
  # x_hat = [..., H]
  x_hat = centred * rstd

  def gradient(dy):
    rows = list(range(x.shape.ndims - 1))
    dy_x_hat = dy * x_hat
    d_x_hat = dy * gamma
    # The part of d_x_hat along the constant and along x_hat cannot change y.
    along_one = tf.reduce_mean(d_x_hat, axis=-1, keepdims=True)
    along_x_hat = tf.reduce_mean(dy_x_hat * gamma, axis=-1, keepdims=True)
    dx = (d_x_hat - along_one - x_hat * along_x_hat) * rstd
    d_gamma = tf.reduce_sum(dy_x_hat, axis=rows)
    d_beta = tf.reduce_sum(dy, axis=rows)
    return dx, d_gamma, d_beta, None

  return x_hat * gamma + beta, gradient


@_with_gradient
def gather_rows(table, row_ids):
  """Rows of a table, with a dense gradient.

  `tf.gather`'s own gradient is a `tf.IndexedSlices`, which an all-reduce has to
  gather from all ranks instead of adding it up, and which the dense gradient of
  tied output weights would turn into a dense one anyway.

  Args:
    table: float [V, H].
    row_ids: int32 or int64 [n]; an id outside [0, V) is an error on a CPU.

  Returns:
    float [n, H].
  """

  def gradient(dy):
    return tf.math.unsorted_segment_sum(dy, row_ids, tf.shape(table)[0]), None

  return tf.gather(table, row_ids), gradient


def dropout_site_seed(dropout_seed, site):
  """The seed of one dropout call site, a pure function of both arguments.

  The pair is drawn from `dropout_seed` before the site is added, so that seeds
  that count (seed, update) do not share masks between neighbouring sites.

  Args:
    dropout_seed: int32 or int64 [2], or None.
    site: int, the number of the call site in the model.

  Returns:
    int32 [2], or None without a dropout_seed.
  """
  if dropout_seed is None:
    return None
  drawn = tf.random.stateless_uniform(
    [2], dropout_seed, minval=None, maxval=None, dtype=tf.int32
  )
  return drawn + tf.constant([0, site], tf.int32)


def keep_mask(shape, keep_prob, seed):
  """Which elements a dropout keeps, and the probability that it realises.

  Args:
    shape: list of ints and int32 scalar tensors.
    keep_prob: float, realised to the nearest 1/65536.
    seed: int32 or int64 [2]; the same seed gives the same mask.

  Returns:
    mask: bool, of shape `shape`.
    kept: float, the exact probability with which an element is kept.
  """
  threshold = round(keep_prob * _DROPOUT_LEVELS)
  threshold = min(max(threshold, 1), _DROPOUT_LEVELS - 1)
  size = 1
  for dim in shape:
    size = size * dim
  words = (size + 1) // 2
  # draws = [size / 2] of 32 random bits; bits = [size / 2, 2] of 16
  draws = tf.random.stateless_uniform(
    [words], seed, minval=None, maxval=None, dtype=tf.int32
  )
  bits = tf.bitcast(draws, tf.int16)
  if isinstance(size, int) and size % 2 == 0:
    bits = tf.reshape(bits, shape)
  else:
    bits = tf.reshape(tf.reshape(bits, [-1])[:size], shape)
  # int16 counts from -2^15.
  mask = bits < tf.constant(threshold - _DROPOUT_LEVELS // 2, tf.int16)
  return mask, threshold / _DROPOUT_LEVELS


@_with_gradient
def masked_scale(x, mask, scale):
  """x * scale where `mask` holds, else 0; keeps one byte an element.

  Args:
    x: float tensor.
    mask: bool, of x's shape.
    scale: scalar of x's dtype.

  Returns:
    A tensor of x's shape and dtype.
  """

  def gradient(dy):
    return tf.where(mask, dy * scale, tf.zeros_like(dy)), None, None

  return tf.where(mask, x * scale, tf.zeros_like(x)), gradient


# -----------------------------------------------------------------------------
# Layers
# -----------------------------------------------------------------------------


def gelu(x, dtype=tf.float32):
  """GELU of a float tensor of any shape, stored in its type.

  The tanh approximation, https://arxiv.org/abs/1606.08415 section 2.

  Args:
    x: float tensor.
    dtype: the type to compute in.
  """
  if dtype == tf.float32:
    return _gelu(x)
  wide = tf.cast(x, dtype)
  return tf.cast(wide * _gelu_gate(wide), x.dtype)


def get_activation(activation_string):
  """The function of an activation's name: linear, relu, gelu or tanh.

  None for "linear", "" and None; what is not a string is returned as it is.

  Raises:
    ValueError: the name is unknown.
  """
  if not isinstance(activation_string, str):
    return activation_string
  functions = dict(
    zip(ACTIVATION_NAMES, (None, None, tf.nn.relu, gelu, tf.tanh), strict=True)
  )
  name = activation_string.lower()
  if name not in functions:
    raise ValueError(
      f"Unsupported activation: {name!r}, not one of {ACTIVATION_NAMES}"
    )
  return functions[name]


def create_initializer(initializer_range=0.02):
  """A truncated normal initializer with stddev `initializer_range`."""
  return tf.truncated_normal_initializer(stddev=initializer_range)


def dense(
  input_tensor,
  units,
  activation=None,
  kernel_initializer=None,
  name=None,
  dtype=None,
):
  """input_tensor x kernel + bias, as tf.layers.dense names its variables.

  Args:
    input_tensor: float [..., K].
    units: int.
    activation: (optional) function of a tensor.
    kernel_initializer: (optional) initializer; the bias starts at 0.
    name: (optional) variable scope, "dense" without it.
    dtype: (optional) the type to compute in, input_tensor's without it; the
      variables are float32.

  Returns:
    `dtype` [..., units].
  """
  shape = get_shape_list(input_tensor)
  dtype = dtype or input_tensor.dtype
  with tf.variable_scope(name, default_name="dense"):
    kernel = tf.get_variable(
      "kernel", [shape[-1], units], initializer=kernel_initializer
    )
    bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
    matrix = tf.cast(reshape_to_matrix(input_tensor), dtype)
    output = tf.matmul(matrix, tf.cast(kernel, dtype))
    output = tf.nn.bias_add(output, tf.cast(bias, dtype))
    if activation is not None:
      output = activation(output)
    return reshape_from_matrix(output, shape)


def dropout(input_tensor, dropout_prob, seed=None):
  """Sets elements to 0 and scales the others up, so that the mean stays.

  Args:
    input_tensor: float tensor.
    dropout_prob: float, the probability of an element to be dropped (not to be
      kept); nothing is done for 0 or None.
    seed: (optional) int32 or int64 [2]; the mask is a pure function of it and
      its probability exact to 1/65536. Stateful random numbers without it.

  Returns:
    A tensor of input_tensor's shape and dtype.
  """
  if not dropout_prob:
    return input_tensor
  if seed is None:
    return tf.nn.dropout(input_tensor, rate=dropout_prob)
  mask, kept = keep_mask(get_shape_list(input_tensor), 1.0 - dropout_prob, seed)
  scale = tf.constant(1.0 / kept, input_tensor.dtype)
  return masked_scale(input_tensor, mask, scale)


def layer_norm(input_tensor, name=None, dtype=tf.float32, store_dtype=None):
  """Layer normalization over the last axis.

  Args:
    input_tensor: float [..., H].
    name: (optional) variable scope, "LayerNorm" without it.
    dtype: the type to compute in.
    store_dtype: (optional) the result's type, input_tensor's without it.

  Returns:
    `store_dtype` [..., H].
  """
  width = get_shape_list(input_tensor)[-1]
  with tf.variable_scope(name, default_name="LayerNorm"):
    beta = tf.get_variable("beta", [width], initializer=tf.zeros_initializer())
    gamma = tf.get_variable("gamma", [width], initializer=tf.ones_initializer())
    output = layer_normalization(
      tf.cast(input_tensor, dtype),
      tf.cast(gamma, dtype),
      tf.cast(beta, dtype),
      tf.constant(_LAYER_NORM_EPSILONS.get(dtype, _LAYER_NORM_EPSILON), dtype),
    )
    return tf.cast(output, store_dtype or input_tensor.dtype)


def layer_norm_and_dropout(input_tensor, dropout_prob, name=None, seed=None):
  """`layer_norm`, then `dropout`."""
  return dropout(layer_norm(input_tensor, name), dropout_prob, seed)


# -----------------------------------------------------------------------------
# Shapes
# -----------------------------------------------------------------------------


def get_shape_list(tensor, expected_rank=None, name=None):
  """A tensor's shape: ints where known, int32 scalar tensors elsewhere.

  Args:
    tensor: tensor of known rank.
    expected_rank: (optional) int or list of ints, see `assert_rank`.
    name: (optional) str, the tensor's name in an error message.

  Raises:
    ValueError: the rank is not the expected one.
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
  """Undoes `reshape_to_matrix`, for a matrix of any width.

  Args:
    output_tensor: [n, K].
    orig_shape_list: the shape before, from `get_shape_list`.

  Returns:
    A tensor of shape orig_shape_list with K in the last place.
  """
  if len(orig_shape_list) == 2:
    return output_tensor
  width = get_shape_list(output_tensor)[-1]
  return tf.reshape(output_tensor, list(orig_shape_list[:-1]) + [width])


def assert_rank(tensor, expected_rank, name=None):
  """Checks a tensor's rank while the graph is built.

  Args:
    tensor: tensor.
    expected_rank: int, or list of the ints that are allowed.
    name: (optional) str, the tensor's name in an error message.

  Raises:
    ValueError: the rank is another.
  """
  allowed = [expected_rank] if isinstance(expected_rank, int) else expected_rank
  if tensor.shape.ndims not in allowed:
    raise ValueError(
      f"Tensor {name or tensor.name} in scope "
      f"'{tf.get_variable_scope().name}' is of rank {tensor.shape.ndims} "
      f"(shape {tensor.shape}), not {expected_rank}"
    )
