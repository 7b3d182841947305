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

  The dict has what else to save for the gradient; None there means the result
  itself, which a compiled function would copy. `@NAME.gradient` decorates
  backward(..., dy, ...) -> {tensor of forward: its gradient}. It takes by name
  what it needs of forward's arguments, the dict, and `result`; nothing else
  stays in memory. Tensors are given by position, static arguments, which are
  hashable, by name. A GradientTape ignores backward and differentiates forward.
  """

  def __init__(self, forward, compile=True):
    functools.update_wrapper(self, forward)
    self._forward = forward
    self._modes = ("layers",) if compile else ()

  def gradient(self, backward):
    self._backward = backward
    return self

  def _run(self, function, values, static):
    names = inspect.signature(function).parameters
    static = {n: value for n, value in static.items() if n in names}
    tensors = [values[n] for n in names if n in values]
    return jit.compiled(function, self._modes, **static)(*tensors)

  def __call__(self, *tensors, **static):
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    names = list(inspect.signature(self._forward).parameters)[: len(tensors)]
    values = dict(zip(names, tensors, strict=True))
    result = self._run(self._forward, values, static)
    if isinstance(result, tuple):
      result, saved = result
      values |= {n: result if t is None else t for n, t in saved.items()}
    values["result"] = result

    def gradient(op, dy, *_):
      # Not before the backward pass, or all would be in memory at once.
      with tf.control_dependencies([dy]):
        got = self._run(self._backward, {**values, "dy": dy}, static)
      return [None, *[got.get(n) for n in names]]

    return with_gradient([result, *tensors], gradient)[0]


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
  *leading, width = shape or [1]
  whole = [leading[0], part[1], *leading[2:]] if part else leading
  total = math.prod([*whole, width])
  large = not isinstance(total, int) or total > 2**31
  row = tf.range(math.prod(leading), dtype=tf.int64 if large else tf.int32)
  if part:
    inner = math.prod(leading[2:])  # rows of a place along axis 1
    row += row // (shape[1] * inner) * ((part[1] - shape[1]) * inner)
    row += part[0] * inner
  high = 0
  if large:
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
  number = low + tf.cast(tf.range(shape[-1] if shape else 1), tf.uint32)
  if not isinstance(high, int):
    # Sites differ by small numbers in this half of the seed.
    key[1] += high * tf.constant(0x9E3779B1, tf.uint32)
  x = tf.bitwise.bitwise_xor(number, key[0])
  x = _mix(_mix(x, 0x7FEB352D, 15), 0x846CA68B, 16) + key[1]
  x = _mix(_mix(x, 0x9E3779B1, 15), 0x846CA68B, 16)
  threshold = min(round(keep_prob * 2**32), 2**32 - 1)
  return tf.reshape(x < tf.constant(threshold, tf.uint32), shape)


def _drop(x, keep_prob, seed, part=None):
  if keep_prob == 1.0:
    return x
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
def dropout(seed, dy, keep_prob):
  return {"x": _drop(dy, keep_prob, seed)}


@Kernel
def gelu(x, dtype):
  """GELU's tanh approximation, https://arxiv.org/abs/1606.08415, in `dtype`."""
  wide = tf.cast(x, dtype)
  gate = tf.sigmoid(wide * (_GELU_A + _GELU_B * tf.square(wide)))
  return tf.cast(wide * gate, x.dtype)


@gelu.gradient
def gelu(x, dy, dtype):
  wide = tf.cast(x, dtype)
  square = tf.square(wide)
  gate = tf.sigmoid(wide * (_GELU_A + _GELU_B * square))
  slope = wide * gate * (1.0 - gate) * (_GELU_A + (3.0 * _GELU_B) * square)
  return {"x": tf.cast(tf.cast(dy, dtype) * (gate + slope), x.dtype)}


@Kernel
def gelu_erf(x, dtype):
  """Exact GELU, x (1 + erf(x / sqrt(2))) / 2, of the same paper."""
  wide = tf.cast(x, dtype)
  return tf.cast(wide * _normal_cdf(wide), x.dtype)


@gelu_erf.gradient
def gelu_erf(x, dy, dtype):
  wide = tf.cast(x, dtype)
  density = tf.exp(-0.5 * tf.square(wide)) * (1.0 / math.sqrt(2.0 * math.pi))
  slope = _normal_cdf(wide) + wide * density
  return {"x": tf.cast(tf.cast(dy, dtype) * slope, x.dtype)}


def _normal_cdf(x):
  return 0.5 * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


@Kernel
def attention_probs(scores, bias, seed, scale, keep_prob, dtype, heads=None):
  """dropout(softmax(scale * scores + bias)) over the last axis, in `dtype`.

  Scores are float [B, N, F, T], the result has their type; `bias` is of `dtype`
  and broadcast. `heads` is (first, count) if the N heads are some of `count`.
  """
  probs = tf.nn.softmax(tf.cast(scores, dtype) * scale + bias)
  stored = tf.cast(probs, scores.dtype)
  if keep_prob == 1.0:
    return stored, {"probs": None}
  dropped = _drop(probs, keep_prob, seed, heads)
  return tf.cast(dropped, scores.dtype), {"probs": stored}


@attention_probs.gradient
def attention_probs(probs, seed, dy, scale, keep_prob, dtype, heads=None):
  wide = tf.cast(probs, dtype)
  dy = _drop(tf.cast(dy, dtype), keep_prob, seed, heads)
  # sum_j dy_j probs_j of each row
  along = tf.reduce_sum(dy * wide, axis=-1, keepdims=True)
  return {"scores": tf.cast((dy - along) * wide * scale, probs.dtype)}


def _normalize(x, gamma, beta, epsilon):
  mean = tf.reduce_mean(x, axis=-1, keepdims=True)
  centred = x - mean
  variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
  rstd = tf.math.rsqrt(variance + epsilon)
  return centred * rstd * gamma + beta, mean, rstd


def _normalize_gradient(x, gamma, mean, rstd, dy):
  x_hat = (x - mean) * rstd
  d_x_hat = dy * tf.cast(gamma, dy.dtype)
  # The part of d_x_hat along the constant and along x_hat cannot change y.
  along_one = tf.reduce_mean(d_x_hat, axis=-1, keepdims=True)
  along_x_hat = tf.reduce_mean(d_x_hat * x_hat, axis=-1, keepdims=True)
  dx = (d_x_hat - along_one - x_hat * along_x_hat) * rstd
  rows = list(range(x.shape.ndims - 1))
  return dx, {
    "gamma": tf.cast(tf.reduce_sum(dy * x_hat, axis=rows), gamma.dtype),
    "beta": tf.cast(tf.reduce_sum(dy, axis=rows), gamma.dtype),
  }


@Kernel
def layer_norm(x, gamma, beta, epsilon, dtype, store):
  """gamma * (x - mean) / sqrt(variance + epsilon) + beta over the last axis.

  https://arxiv.org/abs/1607.06450; gamma and beta are float32 [H].
  """
  wide, g, b = (tf.cast(t, dtype) for t in (x, gamma, beta))
  y, mean, rstd = _normalize(wide, g, b, epsilon)
  return tf.cast(y, store), {"mean": mean, "rstd": rstd}


@layer_norm.gradient
def layer_norm(x, gamma, mean, rstd, dy, dtype):
  wide, dy = tf.cast(x, dtype), tf.cast(dy, dtype)
  dx, d_variables = _normalize_gradient(wide, gamma, mean, rstd, dy)
  return {"x": tf.cast(dx, x.dtype), **d_variables}


@Kernel
def add_and_norm(
  x, residual, gamma, beta, seed, keep_prob, epsilon, dtype, store
):
  """layer_norm(dropout(x) + residual)"""
  wide, g, b = (tf.cast(t, dtype) for t in (x, gamma, beta))
  total = _drop(wide, keep_prob, seed) + tf.cast(residual, dtype)
  y, mean, rstd = _normalize(total, g, b, epsilon)
  return tf.cast(y, store), {"mean": mean, "rstd": rstd}


@add_and_norm.gradient
def add_and_norm(x, residual, gamma, mean, rstd, seed, dy, keep_prob, dtype):
  wide, dy = tf.cast(x, dtype), tf.cast(dy, dtype)
  total = _drop(wide, keep_prob, seed) + tf.cast(residual, dtype)
  d_total, d_variables = _normalize_gradient(total, gamma, mean, rstd, dy)
  return {
    "x": tf.cast(_drop(d_total, keep_prob, seed), x.dtype),
    "residual": tf.cast(d_total, residual.dtype),
    **d_variables,
  }


@Kernel
def invertible_add_and_norm(
  x, residual, gamma, beta, seed, keep_prob, epsilon, dtype, store
):
  """`add_and_norm` that keeps its result, which the next matmul reads anyway.

  The gradient computes (x - mean) / sqrt() as (y - beta) / gamma: as exact as
  `store` is, and 0 where gamma is 0. The static argument `types` is those of x
  and of residual, for their gradients.
  """
  wide, g, b = (tf.cast(t, dtype) for t in (x, gamma, beta))
  total = _drop(wide, keep_prob, seed) + tf.cast(residual, dtype)
  y, _, rstd = _normalize(total, g, b, epsilon)
  return tf.cast(y, store), {"rstd": rstd}


@invertible_add_and_norm.gradient
def invertible_add_and_norm(
  result, gamma, beta, rstd, seed, dy, keep_prob, dtype, types
):
  y, g, b, dy = (tf.cast(t, dtype) for t in (result, gamma, beta, dy))
  x_hat = tf.math.divide_no_nan(y - b, g)
  # As _normalize_gradient of x with mean 0, which only (x - mean) enters.
  d_total, d_variables = _normalize_gradient(
    x_hat / rstd, gamma, tf.zeros_like(rstd), rstd, dy
  )
  x_type, residual_type = types
  return {
    "x": tf.cast(_drop(d_total, keep_prob, seed), x_type),
    "residual": tf.cast(d_total, residual_type),
    **d_variables,
  }


@Kernel
def dropout_and_add(x, residual, seed, keep_prob, dtype):
  """dropout(x) + residual in `dtype`; static `types` as above."""
  return _drop(tf.cast(x, dtype), keep_prob, seed) + tf.cast(residual, dtype)


@dropout_and_add.gradient
def dropout_and_add(seed, dy, keep_prob, types):
  x_type, residual_type = types
  return {
    "x": tf.cast(_drop(dy, keep_prob, seed), x_type),
    "residual": tf.cast(dy, residual_type),
  }


@Kernel
def cross_entropy(logits, bias, labels, dtype):
  """float32 [2, n]: -log softmax(logits + bias)[label], and 1 if it is right.

  Logits are float [n, classes], labels int32 [n] in [0, classes). A label is
  right if no class is likelier. No probabilities are kept: the gradient,
  softmax - 1 at the label, computes them again.
  """
  biased = lambda x, b: tf.cast(x, dtype) + tf.cast(b, dtype)
  own = biased(tf.gather(logits, labels, batch_dims=1), tf.gather(bias, labels))
  wide = biased(logits, bias)
  highest = tf.reduce_max(wide, axis=-1)
  total = tf.reduce_sum(tf.exp(wide - highest[:, tf.newaxis]), axis=-1)
  log_total = highest + tf.math.log(total)
  result = tf.stack([log_total - own, tf.cast(own >= highest, dtype)])
  return tf.cast(result, tf.float32), {"log_total": log_total}


def _cross_entropy_gradient(logits, bias, labels, log_total, dy, dtype):
  """A label of -1 is none of these classes."""
  wide = tf.cast(logits, dtype) + tf.cast(bias, dtype)
  probs = tf.exp(wide - log_total[:, tf.newaxis])
  classes = logits.shape[-1]
  is_label = tf.equal(tf.range(classes)[tf.newaxis], labels[:, tf.newaxis])
  d_losses = tf.cast(dy[0], dtype)
  d_logits = (probs - tf.cast(is_label, dtype)) * d_losses[:, tf.newaxis]
  # The sum of d_logits' rows; as a matmul it needs no copy of d_logits.
  d_bias = tf.linalg.matvec(probs, d_losses, transpose_a=True)
  d_bias -= tf.math.unsorted_segment_sum(d_losses, labels, classes)
  return {
    "logits": tf.cast(d_logits, logits.dtype),
    "bias": tf.cast(d_bias, bias.dtype),
  }


cross_entropy.gradient(_cross_entropy_gradient)


@functools.partial(Kernel, compile=False)
def sliced_cross_entropy(logits, bias, labels, dtype, first, stack):
  """`cross_entropy` where a slice has some of the classes, from `first` on.

  `labels` number all classes; `stack` makes [slices, 3, n] of the slices'
  [3, n].
  """
  own = labels - first
  own = tf.where(
    (own >= 0) & (own < tf.shape(bias)[0]), own, -tf.ones_like(own)
  )
  part = jit.compiled(_cross_entropy_part, dtype=dtype)(logits, bias, own)
  log_totals, at_label, highest = tf.unstack(stack(part), num=3, axis=1)
  log_total = tf.reduce_logsumexp(log_totals, axis=0)
  at_label = tf.reduce_max(at_label, axis=0)
  right = tf.cast(at_label >= tf.reduce_max(highest, axis=0), tf.float32)
  result = tf.stack([log_total - at_label, right])
  return result, {"own": own, "log_total": log_total}


def _cross_entropy_part(logits, bias, labels, dtype):
  """float32 [3, n]: log sum exp, the label's (or the least), the highest."""
  wide = tf.cast(logits, dtype) + tf.cast(bias, dtype)
  own = tf.gather(wide, tf.maximum(labels, 0), batch_dims=1)
  own = tf.where(labels >= 0, own, own.dtype.min * tf.ones_like(own))
  highest = tf.reduce_max(wide, axis=-1)
  total = tf.reduce_sum(tf.exp(wide - highest[:, tf.newaxis]), axis=-1)
  parts = [highest + tf.math.log(total), own, highest]
  return tf.cast(tf.stack(parts), tf.float32)


@sliced_cross_entropy.gradient
def sliced_cross_entropy(logits, bias, own, log_total, dy, dtype):
  return jit.compiled(_cross_entropy_gradient, dtype=dtype)(
    logits, bias, own, tf.cast(log_total, dtype), dy
  )


@functools.partial(Kernel, compile=False)
def gather_rows(table, row_ids):
  """float [n, H]: rows of a table [V, H], with a dense gradient.

  `tf.gather`'s is a `tf.IndexedSlices`, which ranks gather instead of adding it
  up, and which tied output weights make dense anyway. An id outside [0, V) is
  an error on a CPU.
  """
  return tf.gather(table, row_ids)


@gather_rows.gradient
def gather_rows(table, row_ids, dy):
  rows = tf.shape(table)[0]
  return {"table": tf.math.unsorted_segment_sum(dy, row_ids, rows)}
