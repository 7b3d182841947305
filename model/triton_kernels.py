"""What XLA calls on GPUs in place of its own kernels, with --triton.

- Attention of whole sequences without its scores in memory. A row's softmax is
  computed in blocks of keys, from the highest score and the sum so far
  (FlashAttention, https://arxiv.org/abs/2205.14135). What stays for the
  backward pass are the heads, the result, and a number for each row.
- `kernels.add_and_norm` and its gradient, each in one pass over memory, of
  which XLA makes several.

Triton makes intermediate code of `triton_source`, for which it needs no GPU,
and XLA compiles that with its program. Without a GPU TensorFlow's ops compute
the same attention in blocks, so that both can be tested.
"""

import functools
import math
from typing import NamedTuple

from common.errors import UserError
from common.tensorflow_v1 import gen_xla_ops, tf
from model import kernels
from xla_patches import jit

MASKED_SCORE = -10000.0  # is added to the scores of other groups

_TYPES = {
  tf.bfloat16: "bf16", tf.float16: "fp16", tf.float32: "fp32", tf.int32: "i32",
  tf.uint32: "u32",
}  # fmt: skip
_SIZES = (16, 32, 64, 128)  # of heads: matrix units' least, and what fits


# Of attention's programs: rows and columns of their blocks, warps, stages.
# Chosen by the registers that they take on Hopper, not by a measurement.
_FORWARD = dict(QUERIES=128, KEYS=64), 8, 3
_BACKWARD = dict(BLOCK=128, STEP=32), 8, 2
_BLOCK = 64  # keys, without a GPU
_NORM_WARPS = 4
_NORM_ROWS = 16  # of a program of the gradient


def check_size(size_per_head: int) -> None:
  """UserError for heads that the kernels cannot have."""
  if size_per_head not in _SIZES:
    raise UserError(
      "--triton needs attention heads of 16, 32, 64 or 128 numbers, not of "
      f"{size_per_head}: leave it out"
    )


def check_installed() -> None:
  """UserError if a GPU is not one of Triton's, or lacks the package."""
  jit.check_gpus("--triton")
  if jit.on_gpu():
    _source()


def norms(config) -> bool:
  """Whether layer norms have kernels, too; `config` is a run's or a layer's."""
  plain = "layer_norm" not in config.recompute
  in_float32 = config.policy.layer_norm == tf.float32
  bert = config.bert
  is_post_layer_norm = bert.norm == "layer" and not bert.pre_layer_norm
  return plain and in_float32 and is_post_layer_norm


def _source():
  try:
    from model import triton_source  # a CPU needs no Triton
  except ImportError as e:
    raise UserError(
      f"--triton needs the package triton of requirements/gpu.txt: {e}"
    ) from e
  return triton_source


def groups(input_mask, shape, packed: bool) -> tuple:
  """int32 [B, S] of queries and of keys: equal numbers attend to each other.

  `input_mask` is `modeling.BertModel`'s, or None; `shape` is (B, S).
  """
  ones = tf.ones(shape, tf.int32)
  if input_mask is None:
    return ones, ones
  own = tf.cast(input_mask, tf.int32)
  return (own if packed else ones), own


class _Shape(NamedTuple):
  """Of attention, and what else a program of it knows."""

  batch: int
  length: int
  heads: int
  size: int  # of a head
  keep_prob: float
  part: tuple | None  # (first, count) if the heads are some of `count`

  @property
  def scale(self) -> float:
    return 1.0 / math.sqrt(self.size)

  @property
  def rows(self) -> list:
    return [self.batch, self.heads, self.length]


@kernels.Kernel
def attention(product, bias, query_groups, key_groups, seed, *, shape):
  """The context, [B * S, N * D], from one matmul's product for all heads.

  `product` is [B * S, 3 * N * D], queries, keys and values without their
  `bias`, float32 [3 * N * D]; groups as of `groups`; `seed` as in
  `kernels.keep_mask`.
  """
  run = _forward_on_gpu if jit.on_gpu() else _forward
  row = tf.cast(bias, product.dtype)
  context, log_totals = run(product, row, query_groups, key_groups, seed, shape)
  return context, {"log_totals": log_totals}


@attention.gradient
def attention_gradient(
  product, bias, query_groups, key_groups, seed, result, log_totals, dy, *,
  shape,
):  # fmt: skip
  by_head = [shape.batch, shape.length, shape.heads, shape.size]
  along = tf.cast(result, tf.float32) * tf.cast(dy, tf.float32)
  along = tf.reduce_sum(tf.reshape(along, by_head), axis=-1)
  along = tf.transpose(along, [0, 2, 1])  # sum_j dy_j probs_j of each row
  run = _backward_on_gpu if jit.on_gpu() else _backward
  row = tf.cast(bias, product.dtype)
  d_product = run(
    product, row, query_groups, key_groups, seed, log_totals, along, dy, shape
  )
  d_bias = tf.reduce_sum(tf.cast(d_product, bias.dtype), axis=0)
  return {"product": d_product, "bias": d_bias}


def attend(product, bias, of_tokens, seed, *, shape, keep_prob, part):
  """`attention` with `groups` in `of_tokens`; `shape` is (B, S, N)."""
  batch, length, heads = shape
  size = product.shape.as_list()[-1] // (3 * heads)
  known = _Shape(batch, length, heads, size, keep_prob, part)
  return attention(product, bias, *of_tokens, seed, shape=known)


def _forward_on_gpu(*tensors_and_shape):
  *tensors, shape = tensors_and_shape
  context = [shape.batch * shape.length, shape.heads * shape.size]
  results = [(context, tensors[0].dtype), (shape.rows, tf.float32)]
  return _call_attention("attention", tensors, results, shape, *_FORWARD)


def _backward_on_gpu(*tensors_and_shape):
  *tensors, shape = tensors_and_shape
  results = [(tensors[0].shape.as_list(), tensors[0].dtype)]
  return _call_attention(
    "attention_gradient", tensors, results, shape, *_BACKWARD
  )[0]


def _call_attention(name, operands, results, shape, blocks, warps, stages):
  most = max(_SIZES[0], _power_of_two(shape.length))
  blocks = {key: min(n, most) for key, n in blocks.items()}
  first, count = shape.part or (0, shape.heads)
  constants = {
    "S": shape.length,
    "N": shape.heads,
    "D": shape.size,
    "SCALE": shape.scale,
    "MASKED": MASKED_SCORE,
    **_dropout(shape.keep_prob),
    "FIRST_HEAD": first,
    "ALL_HEADS": count,
    **blocks,
  }
  rows, *_ = blocks.values()
  grid = (-(-shape.length // rows), shape.heads, shape.batch)
  return _call(name, operands, results, constants, grid, warps, stages)


def _power_of_two(n: int) -> int:
  """The least that is not below n."""
  return 1 << (n - 1).bit_length()


def _dropout(keep_prob) -> dict:
  threshold = kernels.keep_threshold(keep_prob)
  return {"KEEP_PROB": keep_prob, "THRESHOLD": threshold}


def _call(name, operands, results, constants, grid, warps, stages=1) -> list:
  """What XLA's call of a kernel of `triton_source` gives.

  `results` are [(shape, dtype)]; `constants` the arguments after them.
  """
  types = tuple(_TYPES[t.dtype] for t in operands)
  types += tuple(_TYPES[dtype] for _, dtype in results)
  code = _code(name, types, tuple(constants.items()), warps, stages)
  numbers = {"num_warps": warps, "num_stages": stages}
  grid = [*grid, 1, 1][:3]
  numbers |= dict(zip(("grid_x", "grid_y", "grid_z"), grid, strict=True))
  fields = [f'name = "{name}"', f'ir = "{code}"', "debug = false"]
  fields += [f"{key} = {number} : i32" for key, number in numbers.items()]
  return gen_xla_ops.xla_custom_call_v2(
    operands=operands,
    call_target_name="__gpu$xla.gpu.triton",
    backend_config=f"{{{', '.join(fields)}}}",
    has_side_effect=False,
    result_dtypes=[dtype for _, dtype in results],
    result_shapes=[dims for dims, _ in results],
  )


@functools.cache
def _code(name, types, constants, warps, stages) -> str:
  """A kernel's intermediate code, as a string of MLIR's."""
  source = _source()
  code = source.intermediate_code(
    getattr(source, name), types, dict(constants), warps, stages
  )
  for character in '\\"\n':
    code = code.replace(character, f"\\{ord(character):02X}")
  return code


@kernels.Kernel
def _add_and_norm(
  x, residual, gamma, beta, seed, bias, *, keep_prob, epsilon, store
):
  rows, width = x.shape.as_list()
  column = ([rows, 1], tf.float32)
  y, mean, rstd = _call(
    "add_and_norm",
    [x, residual, tf.cast(bias, x.dtype), gamma, beta, seed],
    [([rows, width], store), column, column],
    {
      "R": rows,
      "H": width,
      "EPSILON": epsilon,
      **_dropout(keep_prob),
      "WIDTH": _power_of_two(width),
    },
    [rows],
    _NORM_WARPS,
  )
  return y, {"mean": mean, "rstd": rstd}


@_add_and_norm.gradient
def _add_and_norm_gradient(
  x, residual, gamma, mean, rstd, seed, bias, dy, dy_2=None, *, keep_prob
):
  rows, width = x.shape.as_list()
  row = tf.cast(bias, x.dtype)
  count = -(-rows // _NORM_ROWS)
  second = dy if dy_2 is None else dy_2
  dx, d_residual, sums = _call(
    "add_and_norm_gradient",
    [x, residual, row, gamma, mean, rstd, seed, dy, second],
    [
      ([rows, width], x.dtype),
      ([rows, width], residual.dtype),
      ([count, 3, width], tf.float32),
    ],
    {
      "R": rows,
      "H": width,
      **_dropout(keep_prob),
      "WIDTH": _power_of_two(width),
      "TWICE": dy_2 is not None,
      "ROWS": _NORM_ROWS,
    },
    [count],
    _NORM_WARPS,
  )
  d_gamma, d_beta, d_bias = tf.unstack(tf.reduce_sum(sums, axis=0))
  return {
    "x": dx,
    "residual": d_residual,
    "gamma": d_gamma,
    "beta": d_beta,
    "bias": d_bias,
  }


def add_and_norm(*tensors, dtype, **arguments):
  """`kernels.add_and_norm` of [R, H] in float32."""
  if jit.on_gpu():
    return _add_and_norm(*tensors, **arguments)
  return kernels.add_and_norm(*tensors, dtype=dtype, **arguments)


# Attention with TensorFlow's ops.


def _split(heads, shape):
  """[B, N, S, D] of queries, keys and values, which are side by side."""
  parts = heads.shape.as_list()[-1] // (shape.heads * shape.size)
  apart = [shape.batch, shape.length, parts, shape.heads, shape.size]
  return tf.unstack(tf.transpose(tf.reshape(heads, apart), [2, 0, 3, 1, 4]))


def _side_by_side(tensors, shape):
  """[B * S, ...] of `_split`'s."""
  joined = tf.transpose(tf.stack(tensors), [1, 3, 0, 2, 4])
  return tf.reshape(joined, [shape.batch * shape.length, -1])


def _blocks(shape):
  ends = [*range(0, shape.length, _BLOCK), shape.length]
  return [slice(*ends[i : i + 2]) for i in range(len(ends) - 1)]


def _scores(query, key, query_groups, key_groups, shape):
  """float32 [B, N, S, keys]"""
  product = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32)
  same = tf.equal(query_groups[:, :, tf.newaxis], key_groups[:, tf.newaxis])
  bias = (1.0 - tf.cast(same, tf.float32)) * MASKED_SCORE
  return product * shape.scale + bias[:, tf.newaxis]


def _drops(seed, shape):
  """A function of [B, N, S, keys] and the block of keys."""
  if shape.keep_prob == 1.0:
    return lambda x, block: x
  kept = kernels.keep_mask(
    [*shape.rows, shape.length], shape.keep_prob, seed, shape.part
  )
  scale = 1.0 / shape.keep_prob
  return lambda x, block: tf.where(
    kept[..., block], x * scale, tf.zeros_like(x)
  )


def _forward(product, bias, query_groups, key_groups, seed, shape):
  heads = product + bias
  query, keys, values = _split(heads, shape)
  drop = _drops(seed, shape)
  highest = tf.fill([*shape.rows, 1], tf.float32.min)
  total = tf.zeros_like(highest)
  output = tf.zeros([*shape.rows, shape.size])
  for block in _blocks(shape):
    scores = _scores(
      query, keys[:, :, block], query_groups, key_groups[:, block], shape
    )
    higher = tf.maximum(highest, tf.reduce_max(scores, -1, keepdims=True))
    probs, shrink = tf.exp(scores - higher), tf.exp(highest - higher)
    total = total * shrink + tf.reduce_sum(probs, -1, keepdims=True)
    probs = tf.cast(drop(probs, block), heads.dtype)
    more = tf.matmul(probs, values[:, :, block])
    output = output * shrink + tf.cast(more, tf.float32)
    highest = higher
  context = _side_by_side([tf.cast(output / total, heads.dtype)], shape)
  return context, tf.squeeze(highest + tf.math.log(total), -1)


def _backward(
  product, bias, query_groups, key_groups, seed, log_totals, along, d_context,
  shape,
):  # fmt: skip
  heads = product + bias
  query, keys, values = _split(heads, shape)
  (dy,) = _split(d_context, shape)
  drop = _drops(seed, shape)
  d_query, d_keys, d_values = tf.zeros([*shape.rows, shape.size]), [], []
  for block in _blocks(shape):
    key, value = keys[:, :, block], values[:, :, block]
    scores = _scores(query, key, query_groups, key_groups[:, block], shape)
    probs = tf.exp(scores - log_totals[..., tf.newaxis])
    dropped = tf.cast(drop(probs, block), heads.dtype)
    d_values.append(tf.matmul(dropped, dy, transpose_a=True))
    d_probs = tf.cast(tf.matmul(dy, value, transpose_b=True), tf.float32)
    d_scores = probs * (drop(d_probs, block) - along[..., tf.newaxis])
    d_scores = tf.cast(d_scores * shape.scale, heads.dtype)
    d_keys.append(tf.matmul(d_scores, query, transpose_a=True))
    d_query += tf.cast(tf.matmul(d_scores, key), tf.float32)
  d_query = tf.cast(d_query, heads.dtype)
  d_keys, d_values = tf.concat(d_keys, axis=2), tf.concat(d_values, axis=2)
  return _side_by_side([d_query, d_keys, d_values], shape)
