"""The arithmetic between a network's matmuls, with gradients by hand.

Each kernel is a pair of pure functions, forward and backward. Backward gets
tensors that are in memory anyway and computes the rest again, dropout masks
too, because a pass over memory costs more than arithmetic. `jit` compiles each
function to one pass or a few; op by op it gives the same numbers. A kernel
computes in `dtype` and stores its result as `store`.
"""

import functools
import inspect
import math

from common.tensorflow_v1 import tf
from config import execution
from xla_patches import jit

# gelu(x) = x * sigmoid(x * (A + B * x^2)), which equals the tanh form of
# https://arxiv.org/abs/1606.08415 since (1 + tanh(u)) / 2 = sigmoid(2 u).
_GELU_A = 2.0 * math.sqrt(2.0 / math.pi)
_GELU_B = _GELU_A * 0.044715

# TensorFlow's registry lasts as long as the process, so what is in it must not
# refer to a graph; each op carries its own gradient.
_GRADIENT_NAME = "PerseusGradient"


@tf.RegisterGradient(_GRADIENT_NAME)
def _own_gradient(op, *d_tensors):
  return op.perseus_gradient(op, *d_tensors)


def with_gradient(tensors, gradient) -> list:
  """`tensors`, with gradient(op, *d_tensors) for all of them.

  tf.custom_gradient would leave an unused Identity behind, search the whole
  graph for variables, and keep the graph as long as the process.
  """
  overridden = {"IdentityN": _GRADIENT_NAME}
  with tf.get_default_graph().gradient_override_map(overridden):
    tensors = tf.identity_n(tensors)
  tensors[0].op.perseus_gradient = gradient
  return tensors


class Kernel:
  """Decorates forward(tensors..., static...) -> result, or result and a dict.

  The dict has what else to save for the gradient. `@NAME.gradient` decorates
  backward(..., dy, ...) -> {tensor of forward: its gradient}. THE NAMES of its
  parameters pair it with forward: each is one of forward's parameters, a key of
  the dict, `result`, or `dy`; nothing else stays in memory. Tensors are given
  by position, and None, or leaving out the last, gives forward's default;
  static arguments, which are hashable, by name. With `twice` the result is
  given twice, for two readers, whose gradients backward adds up: `dy`, `dy_2`.
  If the result is a list, so is `dy`.
  A GradientTape ignores backward and differentiates forward.
  """

  def __init__(self, forward, compile=True):
    functools.update_wrapper(self, forward)
    self.forward = forward
    self._modes = execution.KERNELS if compile else ()

  def gradient(self, backward):
    self._backward = backward
    return backward

  def _run(self, function, values, static):
    """function(), with those of `values` and `static` that it names."""
    # The parameters' names say what the function reads; only that is kept.
    names = inspect.signature(function).parameters
    static = {n: value for n, value in static.items() if n in names}
    tensors = {n: values[n] for n in names if n in values}
    return jit.compiled(function, self._modes, **static)(**tensors)

  def __call__(self, *tensors, twice=False, **static):
    names = inspect.signature(self.forward).parameters
    inputs = {}
    for name, tensor in zip(names, tensors, strict=False):
      if tensor is not None:
        inputs[name] = tf.convert_to_tensor(tensor)
    result, values = self._run(self.forward, inputs, static), dict(inputs)
    if isinstance(result, tuple):
      result, saved = result
      values |= saved
    values["result"] = result
    # The gradients of two readers are added in the kernel, not by an op more.
    results = [result, result] if twice else [result]
    has_parts = isinstance(result, list)
    if has_parts:
      results = result
    count = len(results)

    def gradient(op, *d_tensors):
      d_results = d_tensors[:count]
      d_values = [d_results] if has_parts else d_results
      from_readers = dict(zip(("dy", "dy_2"), d_values, strict=False))
      # Not before the backward pass, or all would be in memory at once.
      with tf.control_dependencies(d_results):
        got = self._run(self._backward, values | from_readers, static)
      return [*[None] * count, *[got.get(name) for name in inputs]]

    outputs = with_gradient([*results, *inputs.values()], gradient)[:count]
    return outputs if twice or has_parts else outputs[0]


def _mix(x, multiplier, shift):
  x *= tf.constant(multiplier, tf.uint32)
  high = tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32))
  return tf.bitwise.bitwise_xor(x, high)


def row_numbers(shape, part=None) -> tuple:
  """uint32 [rows, 1]: low and high words of each row's first element's number.

  A row is along the last axis. High words are the int 0 if the shape shows that
  all are 0. Beyond 2^32 elements, all of a row have the same high word. `part`
  as in `keep_mask`.
  """
  shape = [n if isinstance(n, int) else tf.cast(n, tf.int64) for n in shape]
  # `whole` is the shape of all slices together, `leading` this one's rows.
  *leading, width = shape or [1]
  whole = [leading[0], part[1], *leading[2:]] if part else leading
  total = math.prod([*whole, width])
  large = not isinstance(total, int) or total > 2**31
  row = tf.range(math.prod(leading), dtype=tf.int64 if large else tf.int32)
  if part:
    inner = math.prod(leading[2:])  # rows of an index along axis 1
    row += row // (shape[1] * inner) * ((part[1] - shape[1]) * inner)
    row += part[0] * inner
  high = 0
  if large:
    # The low word would wrap around within 2^32 / width rows.
    rows_of_word = 2**32 // width
    high = tf.cast(row // rows_of_word, tf.uint32)[:, tf.newaxis]
    row %= rows_of_word
  return tf.cast(row * width, tf.uint32)[:, tf.newaxis], high


def keep_mask(shape, keep_prob: float, seed, part=None):
  """Which elements a dropout keeps: bool of `shape`.

  Element i is kept where hash(i, seed) < keep_prob * 2^32. The hash is
  lowbias32 of https://nullprogram.com/blog/2018/07/31/, keyed by one half of
  the seed before it and by the other, with i's high word, inside. So it needs
  no memory and is cheap enough to draw twice.

  `shape` has ints and int32 scalar tensors, `seed` is [2], of 32 bits. With
  `part`, (first, count), `shape` is the part from `first` on of a mask with
  `count` elements along axis 1, which is not the last.
  """
  bits = tf.bitcast(seed, tf.uint32)
  key = [bits[0], bits[1]]  # tf.unstack has no GPU kernel for them
  low, high = row_numbers(shape, part)
  # Of the mask's shape from here on, so that XLA computes it where it is read.
  low = tf.reshape(low, [*shape[:-1], 1])
  number = low + tf.cast(tf.range(shape[-1] if shape else 1), tf.uint32)
  if not isinstance(high, int):
    high = tf.reshape(high, [*shape[:-1], 1])
    # Sites differ by small numbers in this half of the seed.
    key[1] += high * tf.constant(0x9E3779B1, tf.uint32)
  # Two rounds of lowbias32: multiply by odd constants, xor with high bits.
  x = tf.bitwise.bitwise_xor(number, key[0])
  x = _mix(_mix(x, 0x7FEB352D, 15), 0x846CA68B, 16) + key[1]
  x = _mix(_mix(x, 0x9E3779B1, 15), 0x846CA68B, 16)
  # A bound of 2^32 would not fit into 32 bits.
  threshold = min(round(keep_prob * 2**32), 2**32 - 1)
  return tf.reshape(x < tf.constant(threshold, tf.uint32), shape)


def _drop(x, keep_prob, seed, part=None):
  if keep_prob == 1.0:
    return x
  # A shape that is known when the graph is built costs no op.
  shape = x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x)
  if not isinstance(shape, list):
    shape = tf.unstack(shape, num=x.shape.ndims)
  mask = keep_mask(shape, keep_prob, seed, part)
  return tf.where(mask, x * (1.0 / keep_prob), tf.zeros_like(x))


@Kernel
def dropout(x, seed, keep_prob):
  """Zeroes elements and scales the rest to keep the mean; see `keep_mask`."""
  return _drop(x, keep_prob, seed)


@dropout.gradient
def dropout_gradient(seed, dy, keep_prob):
  return {"x": _drop(dy, keep_prob, seed)}


def _biased(x, bias, dtype):
  """x, or x + bias in x's type, as `dtype`."""
  return tf.cast(x if bias is None else x + tf.cast(bias, x.dtype), dtype)


def _with_bias(gradients, bias):
  """`gradients`, with that of the bias if x has one: the sum of x's rows."""
  if bias is None:
    return gradients
  dx = gradients["x"]
  rows = list(range(dx.shape.ndims - 1))
  return {**gradients, "bias": tf.reduce_sum(tf.cast(dx, bias.dtype), rows)}


@Kernel
def add_bias(x, bias):
  """x + bias in x's type; the bias has the sum of rows as the others' have.

  The gradient of TensorFlow's BiasAdd adds up rows in 16 bits if x has them,
  which a GPU does slowly.
  """
  return _biased(x, bias, x.dtype)


@add_bias.gradient
def add_bias_gradient(bias, dy):
  return _with_bias({"x": dy}, bias)


def _activation(value, slope) -> Kernel:
  """The kernel of value(x + bias), whose derivative is `slope`, in `dtype`."""

  @Kernel
  def activation(x, bias=None, *, dtype=tf.float32):
    return tf.cast(value(_biased(x, bias, dtype)), x.dtype)

  @activation.gradient
  def gradient(x, dy, bias=None, *, dtype=tf.float32):
    wide_dy = tf.cast(dy, dtype) * slope(_biased(x, bias, dtype))
    return _with_bias({"x": tf.cast(wide_dy, x.dtype)}, bias)

  functools.update_wrapper(activation, value)
  return activation


def _gelu(x):
  """GELU's tanh approximation, https://arxiv.org/abs/1606.08415."""
  return x * tf.sigmoid(x * (_GELU_A + _GELU_B * tf.square(x)))


def _gelu_slope(x):
  if x.dtype == tf.float16:  # beyond, the slope is 0, and the square overflows
    x = tf.clip_by_value(x, -16.0, 16.0)
  # d/dx [x s(u)] = s(u) + x s(u) (1 - s(u)) du/dx, where s is the sigmoid.
  square = tf.square(x)
  gate = tf.sigmoid(x * (_GELU_A + _GELU_B * square))
  return gate + x * gate * (1.0 - gate) * (_GELU_A + (3.0 * _GELU_B) * square)


def _normal_cdf(x):
  return 0.5 * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


def _gelu_erf(x):
  """Exact GELU, x (1 + erf(x / sqrt(2))) / 2."""
  return x * _normal_cdf(x)


def _gelu_erf_slope(x):
  # d/dx [x F(x)] = F(x) + x f(x), of the normal distribution.
  density = tf.exp(-0.5 * tf.square(x)) * (1.0 / math.sqrt(2.0 * math.pi))
  return _normal_cdf(x) + x * density


def _silu(x):
  """x * sigmoid(x), https://arxiv.org/abs/1702.03118."""
  return x * tf.sigmoid(x)


def _silu_slope(x):
  gate = tf.sigmoid(x)
  return gate * (1.0 + x * (1.0 - gate))


gelu = _activation(_gelu, _gelu_slope)
gelu_erf = _activation(_gelu_erf, _gelu_erf_slope)
silu = _activation(_silu, _silu_slope)


@Kernel
def rotate(x, cos, sin):
  """x [..., L, D], whose halves are parts of complex numbers, by an angle.

  `cos` and `sin` are [..., L, D / 2] and broadcast; it computes in their type.
  """
  real, imaginary = tf.split(tf.cast(x, cos.dtype), 2, axis=-1)
  parts = [real * cos - imaginary * sin, imaginary * cos + real * sin]
  return tf.cast(tf.concat(parts, axis=-1), x.dtype)


@rotate.gradient
def rotate_gradient(dy, cos, sin):
  # The transpose of a rotation is the rotation by the negative angle.
  return {"x": rotate.forward(dy, cos, -sin)}


@Kernel
def with_neighbours(blocks):
  """[B, N, blocks, block, D] as [..., 3 * block, D]: with those beside each.

  The first block has zeros before it, the last one after it.
  """
  nothing = tf.zeros_like(blocks[:, :, :1])
  before = tf.concat([nothing, blocks[:, :, :-1]], axis=2)
  after = tf.concat([blocks[:, :, 1:], nothing], axis=2)
  return tf.concat([before, blocks, after], axis=3)


@with_neighbours.gradient
def with_neighbours_gradient(dy):
  # A block was read as itself, as the one before the next, and as the one
  # after the last: three gradients.
  before, own, after = tf.split(dy, 3, axis=3)
  nothing = tf.zeros_like(own[:, :, :1])
  of_next = tf.concat([before[:, :, 1:], nothing], axis=2)
  of_last = tf.concat([nothing, after[:, :, :-1]], axis=2)
  return {"blocks": own + of_next + of_last}


@Kernel
def split_heads(x, bias=None, *, parts, shape):
  """float [B, N, length, D], `parts` of them, of what a matmul gave for all.

  `x` is [B * length, parts * N * D], without the `bias` of its columns; `shape`
  is (B, length, N).
  """
  (batch, length, heads), width = shape, x.shape.as_list()[-1]
  biased = tf.reshape(
    _biased(x, bias, x.dtype),
    [batch, length, parts, heads, width // (parts * heads)],
  )
  return tf.unstack(tf.transpose(biased, [2, 0, 3, 1, 4]))


@split_heads.gradient
def split_heads_gradient(dy, bias=None):
  # [parts, B, N, length, D] -> [B, length, parts, N, D]
  joined = tf.transpose(tf.stack(dy), [1, 3, 0, 2, 4])
  *_, parts, heads, width = joined.shape.as_list()
  dx = tf.reshape(joined, [-1, parts * heads * width])
  return _with_bias({"x": dx}, bias)


def side_by_side(*groups) -> list:
  """Joins the tensors of each (tensors, dtype) along the last axis, as `dtype`.

  One tensor that has its dtype is left as it is.
  """
  results = [tensors[0] for tensors, _ in groups]
  changing: dict = {}
  inputs, widths = [], []
  for number, (tensors, dtype) in enumerate(groups):
    if len(tensors) > 1 or tensors[0].dtype != dtype:
      changing[number] = tensors, dtype
      inputs += tensors
      widths.append(tuple(tensor.shape.as_list()[-1] for tensor in tensors))
  if not changing:
    return results
  lists, dtypes = zip(*changing.values(), strict=True)
  # For a GPU one program makes all of them, and one all their gradients: each
  # would be a launch.
  compiling = execution.KERNELS if jit.saves_launches() else ()
  joined = jit.compiled(_join, compiling, dtypes=dtypes)(*lists)

  def gradient(op, *d_tensors):
    static = dict(widths=tuple(widths), dtype=inputs[0].dtype)
    apart = jit.compiled(_part, compiling, **static)
    return [*[None] * len(joined), *apart(*d_tensors[: len(joined)])]

  outputs = with_gradient([*joined, *inputs], gradient)
  for number, tensor in zip(changing, outputs, strict=False):
    results[number] = tensor
  return results


def _join(*lists, dtypes):
  joined = []
  for tensors, dtype in zip(lists, dtypes, strict=True):
    group = [tf.cast(tensor, dtype) for tensor in tensors]
    joined.append(tf.concat(group, axis=-1) if len(group) > 1 else group[0])
  return joined


def _part(*joined, widths, dtype):
  parts: list = []
  for tensor, group in zip(joined, widths, strict=True):
    tensor = tf.cast(tensor, dtype)
    parts += tf.split(tensor, group, axis=-1) if len(group) > 1 else [tensor]
  return parts


def attention_probs(scores, bias, seed, scale, keep_prob, dtype, heads=None):
  """dropout(softmax(scale * scores + bias)) over the last axis, in `dtype`.

  Scores are float [B, N, F, T], the result has their type; `bias` is of `dtype`
  and broadcast. `heads` is (first, count) if the N heads are some of `count`.
  """
  static = dict(scale=scale, dtype=dtype)
  # With dropout the result is no softmax, so the gradient needs the scores;
  # without it the result is enough.
  if keep_prob == 1.0:
    return probs(scores, bias, **static)
  static |= dict(keep_prob=keep_prob, heads=heads)
  return dropped_probs(scores, bias, seed, **static)


def _probs_gradient(probs, dy, scale):
  # sum_j dy_j probs_j of each row
  along = tf.reduce_sum(dy * probs, axis=-1, keepdims=True)
  return (dy - along) * probs * scale


@Kernel
def probs(scores, bias, scale, dtype):
  """`attention_probs` without dropout; keeps its result."""
  wide = tf.nn.softmax(tf.cast(scores, dtype) * scale + bias)
  return tf.cast(wide, scores.dtype)


@probs.gradient
def probs_gradient(result, dy, scale, dtype):
  wide, dy = tf.cast(result, dtype), tf.cast(dy, dtype)
  return {"scores": tf.cast(_probs_gradient(wide, dy, scale), result.dtype)}


@Kernel
def dropped_probs(scores, bias, seed, scale, keep_prob, dtype, heads):
  """`attention_probs` with dropout; keeps scores, which are in memory."""
  wide = tf.nn.softmax(tf.cast(scores, dtype) * scale + bias)
  return tf.cast(_drop(wide, keep_prob, seed, heads), scores.dtype)


@dropped_probs.gradient
def dropped_probs_gradient(
  scores, bias, seed, dy, scale, keep_prob, dtype, heads
):
  wide = tf.nn.softmax(tf.cast(scores, dtype) * scale + bias)
  dy = _drop(tf.cast(dy, dtype), keep_prob, seed, heads)
  return {"scores": tf.cast(_probs_gradient(wide, dy, scale), scores.dtype)}


def _normalize(x, gamma, beta, epsilon, centred):
  gamma, beta = tf.cast(gamma, x.dtype), tf.cast(beta, x.dtype)
  mean = tf.reduce_mean(x, axis=-1, keepdims=True)
  if not centred:
    mean = tf.zeros_like(mean)  # of which only the shape is computed
  deviation = x - mean
  variance = tf.reduce_mean(tf.square(deviation), axis=-1, keepdims=True)
  rstd = tf.math.rsqrt(variance + epsilon)
  return deviation * rstd * gamma + beta, mean, rstd


def _normalize_gradient(x, gamma, mean, rstd, dy, centred):
  x_hat = (x - mean) * rstd
  d_x_hat = dy * tf.cast(gamma, dy.dtype)
  # The part of d_x_hat along x_hat cannot change y, nor, if y is centred, that
  # along the constant.
  along_one = 0.0
  if centred:
    along_one = tf.reduce_mean(d_x_hat, axis=-1, keepdims=True)
  along_x_hat = tf.reduce_mean(d_x_hat * x_hat, axis=-1, keepdims=True)
  dx = (d_x_hat - along_one - x_hat * along_x_hat) * rstd
  rows = list(range(x.shape.ndims - 1))
  return dx, {
    "gamma": tf.cast(tf.reduce_sum(dy * x_hat, axis=rows), gamma.dtype),
    "beta": tf.cast(tf.reduce_sum(dy, axis=rows), gamma.dtype),
  }


@Kernel
def layer_norm(x, gamma, beta, epsilon, centred, dtype, store):
  """gamma * (x - mean) / sqrt(variance + epsilon) + beta over the last axis.

  https://arxiv.org/abs/1607.06450; gamma and beta are float32 [H]. Without
  `centred` the mean is taken for 0: https://arxiv.org/abs/1910.07467.
  """
  y, mean, rstd = _normalize(tf.cast(x, dtype), gamma, beta, epsilon, centred)
  return tf.cast(y, store), {"mean": mean, "rstd": rstd}


@layer_norm.gradient
def layer_norm_gradient(x, gamma, mean, rstd, dy, centred, dtype):
  wide, dy = tf.cast(x, dtype), tf.cast(dy, dtype)
  dx, d_variables = _normalize_gradient(wide, gamma, mean, rstd, dy, centred)
  return {"x": tf.cast(dx, x.dtype), **d_variables}


def _dropped_sum(x, bias, residual, seed, keep_prob, dtype):
  dropped = _drop(_biased(x, bias, dtype), keep_prob, seed)
  return dropped + tf.cast(residual, dtype)


def _total_dy(dy, dy_2, dtype):
  """The gradient of a result with one reader or two."""
  dy = tf.cast(dy, dtype)
  return dy if dy_2 is None else dy + tf.cast(dy_2, dtype)


@Kernel
def add_and_norm(
  x, residual, gamma, beta, seed, bias=None, *, keep_prob, epsilon, centred,
  dtype, store,
):  # fmt: skip
  """layer_norm(dropout(x + bias) + residual)"""
  total = _dropped_sum(x, bias, residual, seed, keep_prob, dtype)
  y, mean, rstd = _normalize(total, gamma, beta, epsilon, centred)
  return tf.cast(y, store), {"mean": mean, "rstd": rstd}


@add_and_norm.gradient
def add_and_norm_gradient(
  x, residual, gamma, mean, rstd, seed, dy, dy_2=None, bias=None, *, keep_prob,
  centred, dtype,
):  # fmt: skip
  total = _dropped_sum(x, bias, residual, seed, keep_prob, dtype)
  dy = _total_dy(dy, dy_2, dtype)
  d_total, d_variables = _normalize_gradient(
    total, gamma, mean, rstd, dy, centred
  )
  dx = tf.cast(_drop(d_total, keep_prob, seed), x.dtype)
  residual = tf.cast(d_total, residual.dtype)
  return _with_bias({"x": dx, "residual": residual, **d_variables}, bias)


# `add_and_norm` that keeps its result, which the next matmul reads anyway. The
# gradient computes (x - mean) / sqrt() as (y - beta) / gamma: as exact as
# `store` is, and 0 where gamma is 0. The static argument `types` is those of x
# and of residual, for their gradients.
invertible_add_and_norm = Kernel(add_and_norm.forward)


@invertible_add_and_norm.gradient
def invertible_add_and_norm_gradient(
  result, gamma, beta, rstd, seed, dy, dy_2=None, bias=None, *, keep_prob,
  centred, dtype, types,
):  # fmt: skip
  y, g, b = (tf.cast(t, dtype) for t in (result, gamma, beta))
  # The normalized input; where gamma is 0 it is lost, and its gradient is 0.
  x_hat = tf.math.divide_no_nan(y - b, g)
  # As _normalize_gradient of x with mean 0, which only (x - mean) enters.
  dy = _total_dy(dy, dy_2, dtype)
  d_total, d_variables = _normalize_gradient(
    x_hat / rstd, gamma, tf.zeros_like(rstd), rstd, dy, centred
  )
  x_type, residual_type = types
  dx = tf.cast(_drop(d_total, keep_prob, seed), x_type)
  residual = tf.cast(d_total, residual_type)
  return _with_bias({"x": dx, "residual": residual, **d_variables}, bias)


@Kernel
def dropout_and_add(x, residual, seed, bias=None, *, keep_prob, dtype):
  """dropout(x + bias) + residual in `dtype`; static `types` as above."""
  return _dropped_sum(x, bias, residual, seed, keep_prob, dtype)


@dropout_and_add.gradient
def dropout_and_add_gradient(
  seed, dy, dy_2=None, bias=None, *, keep_prob, types
):
  x_type, residual_type = types
  dy = _total_dy(dy, dy_2, dy.dtype)
  dx = tf.cast(_drop(dy, keep_prob, seed), x_type)
  return _with_bias({"x": dx, "residual": tf.cast(dy, residual_type)}, bias)


@Kernel
def aligned_rows(table, rows, dtype):
  """A table [V, H] as [rows, H] of `dtype`, with rows of 0 after its own."""
  more = rows - table.shape.as_list()[0]
  return tf.pad(tf.cast(table, dtype), [[0, more], [0, 0]])


@aligned_rows.gradient
def aligned_rows_gradient(table, dy):
  return {"table": tf.cast(dy[: table.shape.as_list()[0]], table.dtype)}


def _class_logits(logits, bias, dtype):
  """logits + bias as `dtype`; columns without a class have no probability."""
  bias, more = tf.cast(bias, dtype), logits.shape[-1] - bias.shape[0]
  if more:
    bias = tf.pad(bias, [[0, more]], constant_values=-1e4)
  return tf.cast(logits, dtype) + bias


def _log_sum_exp(wide):
  """The highest of each row, and the log of the sum of its exponentials."""
  # Subtracted, so that no exponential overflows.
  highest = tf.reduce_max(wide, axis=-1)
  total = tf.reduce_sum(tf.exp(wide - highest[:, tf.newaxis]), axis=-1)
  return highest, highest + tf.math.log(total)


@Kernel
def cross_entropy(logits, bias, labels, dtype):
  """float32 [2, n]: -log softmax(logits + bias)[label], and 1 if it is right.

  Logits are float [n, classes], and columns that are no class, if there are
  more than biases; labels int32 [n] in [0, classes). A label is right if no
  class is likelier. No probabilities are kept: the gradient,
  softmax - 1 at the label, computes them again.
  """
  own = tf.cast(tf.gather(logits, labels, batch_dims=1), dtype)
  own += tf.cast(tf.gather(bias, labels), dtype)
  highest, log_total = _log_sum_exp(_class_logits(logits, bias, dtype))
  result = tf.stack([log_total - own, tf.cast(own >= highest, dtype)])
  return tf.cast(result, tf.float32), {"log_total": log_total}


def _cross_entropy_gradient(logits, bias, labels, log_total, dy, dtype):
  """A label of -1 is none of these classes."""
  probs = tf.exp(_class_logits(logits, bias, dtype) - log_total[:, tf.newaxis])
  classes = logits.shape[-1]
  is_label = tf.equal(tf.range(classes)[tf.newaxis], labels[:, tf.newaxis])
  d_losses = tf.cast(dy[0], dtype)
  d_logits = (probs - tf.cast(is_label, dtype)) * d_losses[:, tf.newaxis]
  # The sum of d_logits' rows; as a matmul it needs no copy of d_logits.
  d_bias = tf.linalg.matvec(probs, d_losses, transpose_a=True)
  d_bias -= tf.math.unsorted_segment_sum(d_losses, labels, classes)
  return {
    "logits": tf.cast(d_logits, logits.dtype),
    "bias": tf.cast(d_bias[: bias.shape.as_list()[0]], bias.dtype),
  }


cross_entropy.gradient(_cross_entropy_gradient)


@functools.partial(Kernel, compile=False)
def sliced_cross_entropy(logits, bias, labels, dtype, first, stack):
  """`cross_entropy` where a slice has some of the classes, from `first` on.

  `labels` number all classes; `stack` makes [slices, 3, n] of the slices'
  [3, n].
  """
  # Labels of other slices become -1.
  own = labels - first
  is_own = (own >= 0) & (own < tf.shape(bias)[0])
  own = tf.where(is_own, own, -tf.ones_like(own))
  part = jit.compiled(_cross_entropy_part, dtype=dtype)(logits, bias, own)
  log_totals, at_label, highest = tf.unstack(stack(part), num=3, axis=1)
  # Each slice knows its own sum; the label's logit is the least number in all
  # slices but one.
  log_total = tf.reduce_logsumexp(log_totals, axis=0)
  at_label = tf.reduce_max(at_label, axis=0)
  right = tf.cast(at_label >= tf.reduce_max(highest, axis=0), tf.float32)
  result = tf.stack([log_total - at_label, right])
  return result, {"own": own, "log_total": log_total}


def _cross_entropy_part(logits, bias, labels, dtype):
  """float32 [3, n]: log sum exp, the label's (or the least), the highest."""
  wide = _class_logits(logits, bias, dtype)
  own = tf.gather(wide, tf.maximum(labels, 0), batch_dims=1)
  own = tf.where(labels >= 0, own, own.dtype.min * tf.ones_like(own))
  highest, log_total = _log_sum_exp(wide)
  return tf.cast(tf.stack([log_total, own, highest]), tf.float32)


@sliced_cross_entropy.gradient
def sliced_cross_entropy_gradient(logits, bias, own, log_total, dy, dtype):
  return jit.compiled(_cross_entropy_gradient, dtype=dtype)(
    logits, bias, own, tf.cast(log_total, dtype), dy
  )


@Kernel
def sampled_cross_entropy(others, bias, own, classes, labels, dtype):
  """float32 [2, n]: `cross_entropy` of `own` [n] beside `others` [n, k].

  The bias, [k], has the log of how many classes each of `classes`, int32 [k],
  stands for; a label is right if none, times that number, is likelier. A label,
  int32 [n], among them counts once, as `own`.
  """
  wide = _all_but_labels(others, bias, classes, labels, dtype)
  own = tf.cast(own, dtype)
  highest = tf.maximum(tf.reduce_max(wide, axis=-1), own)
  total = tf.reduce_sum(tf.exp(wide - highest[:, tf.newaxis]), axis=-1)
  log_total = highest + tf.math.log(total + tf.exp(own - highest))
  result = tf.stack([log_total - own, tf.cast(own >= highest, dtype)])
  return tf.cast(result, tf.float32), {"log_total": log_total}


def _all_but_labels(others, bias, classes, labels, dtype):
  wide = tf.cast(others, dtype) + tf.cast(bias, dtype)
  is_label = tf.equal(classes[tf.newaxis], labels[:, tf.newaxis])
  return tf.where(is_label, -1e4 * tf.ones_like(wide), wide)


@sampled_cross_entropy.gradient
def sampled_cross_entropy_gradient(
  others, bias, own, classes, labels, log_total, dy, dtype
):
  wide = _all_but_labels(others, bias, classes, labels, dtype)
  probs = tf.exp(wide - log_total[:, tf.newaxis])
  d_losses = tf.cast(dy[0], dtype)
  # The label's own probability, less 1.
  d_own = (tf.exp(tf.cast(own, dtype) - log_total) - 1.0) * d_losses
  d_bias = tf.linalg.matvec(probs, d_losses, transpose_a=True)
  return {
    "others": tf.cast(probs * d_losses[:, tf.newaxis], others.dtype),
    "bias": tf.cast(d_bias, bias.dtype),
    "own": tf.cast(d_own, own.dtype),
  }


@functools.partial(Kernel, compile=False)
def gather_rows(table, row_ids):
  """float [n, H]: rows of a table [V, H], with a dense gradient.

  `tf.gather`'s is a `tf.IndexedSlices`, which ranks gather instead of adding it
  up, and which tied output weights make dense anyway. An id outside [0, V) is
  an error on a CPU.
  """
  return tf.gather(table, row_ids)


@gather_rows.gradient
def gather_rows_gradient(table, row_ids, dy):
  rows = tf.shape(table)[0]
  return {"table": tf.math.unsorted_segment_sum(dy, row_ids, rows)}
