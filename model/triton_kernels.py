"""What XLA calls on GPUs in place of its own kernels, with --triton.

- Attention of whole sequences without its scores in memory. A row's softmax is
  computed in blocks of keys, from the highest score and the sum so far
  (FlashAttention, https://arxiv.org/abs/2205.14135). What stays for the
  backward pass are the heads, the result, and a number for each row.
- `kernels.add_and_norm` and its gradient, each in one pass over memory, of
  which XLA makes several.

Triton makes intermediate code of `triton_source`, for which it needs no GPU,
and XLA compiles that with its program. Without a GPU a model has none of it.
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
  row = tf.cast(bias, product.dtype)
  context, log_totals = _forward(
    product, row, query_groups, key_groups, seed, shape=shape
  )
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
  row = tf.cast(bias, product.dtype)
  d_product = _backward(
    product, row, query_groups, key_groups, seed, log_totals, along, dy,
    shape=shape,
  )  # fmt: skip
  d_bias = tf.reduce_sum(tf.cast(d_product, bias.dtype), axis=0)
  return {"product": d_product, "bias": d_bias}


def attend(product, bias, of_tokens, seed, *, shape, keep_prob, part):
  """`attention` with `groups` in `of_tokens`; `shape` is (B, S, N)."""
  batch, length, heads = shape
  size = product.shape.as_list()[-1] // (3 * heads)
  known = _Shape(batch, length, heads, size, keep_prob, part)
  return attention(product, bias, *of_tokens, seed, shape=known)


def _forward(*tensors, shape):
  context = [shape.batch * shape.length, shape.heads * shape.size]
  results = [(context, tensors[0].dtype), (shape.rows, tf.float32)]
  return _call_attention("attention", tensors, results, shape, *_FORWARD)


def _backward(*tensors, shape):
  results = [(tensors[0].shape.as_list(), tensors[0].dtype)]
  (d_product,) = _call_attention(
    "attention_gradient", tensors, results, shape, *_BACKWARD
  )
  return d_product


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
def add_and_norm(
  x, residual, gamma, beta, seed, bias, *, keep_prob, epsilon, store
):
  """`kernels.add_and_norm` of [R, H], centred and in float32."""
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


@add_and_norm.gradient
def add_and_norm_gradient(
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
