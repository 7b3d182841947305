"""Attention of whole sequences, without its scores in memory.

A row's softmax is computed in blocks of keys, from the highest score and the
sum so far (FlashAttention, https://arxiv.org/abs/2205.14135). What stays for
the backward pass are the heads, the result, and a number for each row. On a GPU
`flash_kernels` does it: Triton makes intermediate code of it here, which XLA
compiles with its program. Without a GPU TensorFlow's ops do the same, so that
both can be tested.
"""

import functools
import math
from typing import NamedTuple

from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # tf has no name for it

from common.errors import UserError
from common.tensorflow_v1 import tf
from model import kernels
from xla_patches import jit

MASKED_SCORE = -10000.0  # is added to the scores of other groups

_TYPES = {
  tf.bfloat16: "bf16", tf.float16: "fp16", tf.float32: "fp32", tf.int32: "i32",
  tf.uint32: "u32",
}  # fmt: skip
_LEAST = 16  # of a matrix unit's factors


class _Blocks(NamedTuple):
  """How a kernel divides the work. Chosen by registers, without a GPU."""

  rows: int  # a program's
  columns: int  # at once
  warps: int
  stages: int


_FORWARD = _Blocks(128, 64, warps=8, stages=3)
_BACKWARD = _Blocks(128, 32, warps=8, stages=2)


def check_size(size_per_head: int) -> None:
  """UserError for heads that the kernels cannot have."""
  if size_per_head < _LEAST or size_per_head & (size_per_head - 1):
    raise UserError(
      f"--attention=flash needs heads of 16, 32, 64, ... numbers, not of "
      f"{size_per_head}: give --attention=plain"
    )


def check_installed() -> None:
  """UserError if a GPU would need Triton and it is missing."""
  if jit.on_gpu():
    try:
      import triton  # noqa: F401
    except ImportError as e:
      raise UserError(
        "--attention=flash needs Triton on GPUs: pip install -r "
        "requirements/gpu.txt"
      ) from e


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
  heads = product + tf.cast(bias, product.dtype)
  run = _forward_on_gpu if jit.on_gpu() else _forward
  context, log_totals = run(heads, query_groups, key_groups, seed, shape)
  return context, {"heads": heads, "log_totals": log_totals}


@attention.gradient
def attention(
  heads, bias, query_groups, key_groups, seed, result, log_totals, dy, *, shape
):
  by_head = [shape.batch, shape.length, shape.heads, shape.size]
  along = tf.cast(result, tf.float32) * tf.cast(dy, tf.float32)
  along = tf.reduce_sum(tf.reshape(along, by_head), axis=-1)
  along = tf.transpose(along, [0, 2, 1])  # sum_j dy_j probs_j of each row
  run = _backward_on_gpu if jit.on_gpu() else _backward
  d_heads = run(
    heads, query_groups, key_groups, seed, log_totals, along, dy, shape
  )
  d_bias = tf.reduce_sum(tf.cast(d_heads, bias.dtype), axis=0)
  return {"product": d_heads, "bias": d_bias}


def attend(product, bias, of_tokens, seed, *, shape, keep_prob, part):
  """`attention` with `groups` in `of_tokens`; `shape` is (B, S, N)."""
  batch, length, heads = shape
  size = product.shape.as_list()[-1] // (3 * heads)
  known = _Shape(batch, length, heads, size, keep_prob, part)
  return attention(product, bias, *of_tokens, seed, shape=known)


def _forward_on_gpu(heads, query_groups, key_groups, seed, shape):
  width = shape.heads * shape.size
  return _call(
    "forward",
    [heads, query_groups, key_groups, seed],
    [([heads.shape[0], width], heads.dtype), (shape.rows, tf.float32)],
    shape,
    _FORWARD,
    ("QUERIES", "KEYS"),
  )


def _backward_on_gpu(*tensors_and_shape):
  *tensors, shape = tensors_and_shape
  heads = tensors[0]
  results = [(heads.shape.as_list(), heads.dtype)]
  names = ("BLOCK", "STEP")
  return _call("backward", tensors, results, shape, _BACKWARD, names)[0]


def _call(name, operands, results, shape, blocks, block_names) -> list:
  """What XLA's call of a kernel of `flash_kernels` gives."""
  least = max(_LEAST, 1 << (shape.length - 1).bit_length())
  sizes = [min(n, least) for n in (blocks.rows, blocks.columns)]
  types = tuple(_TYPES[t.dtype] for t in operands)
  types += tuple(_TYPES[dtype] for _, dtype in results)
  code = _code(name, types, shape, tuple(zip(block_names, sizes)), blocks)
  numbers = {
    "num_warps": blocks.warps,
    "num_stages": blocks.stages,
    "grid_x": -(-shape.length // sizes[0]),
    "grid_y": shape.heads,
    "grid_z": shape.batch,
  }
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
def _code(name, types, shape, sizes, blocks) -> str:
  """A kernel's intermediate code, as a string of MLIR's."""
  from model import flash_kernels  # imports Triton, which a CPU does not need

  first, count = shape.part or (0, shape.heads)
  constants = {
    "S": shape.length,
    "N": shape.heads,
    "D": shape.size,
    "SCALE": shape.scale,
    "MASKED": MASKED_SCORE,
    "KEEP_PROB": shape.keep_prob,
    "THRESHOLD": kernels.keep_threshold(shape.keep_prob),
    "FIRST_HEAD": first,
    "ALL_HEADS": count,
    **dict(sizes),
  }
  code = flash_kernels.intermediate_code(
    getattr(flash_kernels, name), types, constants, blocks.warps, blocks.stages
  )
  for character in '\\"\n':
    code = code.replace(character, f"\\{ord(character):02X}")
  return code


# The same with TensorFlow's ops.


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
  ends = [*range(0, shape.length, _FORWARD.columns), shape.length]
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


def _forward(heads, query_groups, key_groups, seed, shape):
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
  heads, query_groups, key_groups, seed, log_totals, along, d_context, shape
):
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
  d_heads = [tf.cast(d_query, heads.dtype), *map(_joined, (d_keys, d_values))]
  return _side_by_side(d_heads, shape)


def _joined(blocks):
  return tf.concat(blocks, axis=2)
