"""Kernels for GPUs in Triton; `triton_kernels` says what they compute.

Attention whose scores never leave the chip (FlashAttention,
https://arxiv.org/abs/2205.14135 and 2307.08691): a program has a block of one
head's queries and walks over blocks of keys with a running softmax. The
backward pass computes the probabilities again from each row's `log_total`.
There a program has a block of keys, and walks over queries for the gradients of
its keys and values; then the same block of queries, and walks over keys. So
nothing is added up in memory, in an order that may change.

Pointers are to arrays in C order. Of attention: `heads` and `d_heads` are
queries, keys and values, [B * S, 3, N, D], without their `bias`, [3, N, D];
`context` and `d_context` [B * S, N, D]; `log_totals` and `along` float32 [B, N,
S]; `query_groups` and `key_groups` int32 [B, S]; D is a power of two from 16
on. Of `add_and_norm`: [R, H]; gamma, beta and `bias` [H], the first two
float32. `seed` is uint32 [2].
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir  # compiling ahead has no public way
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mix(x, MULTIPLIER: tl.constexpr, SHIFT: tl.constexpr):
  x *= MULTIPLIER
  return x ^ (x >> SHIFT)


@triton.jit
def _kept(rows, columns, seed, WIDTH: tl.constexpr, THRESHOLD: tl.constexpr):
  """`kernels.keep_mask` at int64 `rows` and int32 `columns`, broadcast."""
  ROWS_OF_WORD: tl.constexpr = 2**32 // WIDTH
  high = (rows // ROWS_OF_WORD).to(tl.uint32)
  low = (rows % ROWS_OF_WORD).to(tl.uint32) * WIDTH
  x = (low + columns.to(tl.uint32)) ^ tl.load(seed)
  x = _mix(_mix(x, 0x7FEB352D, 15), 0x846CA68B, 16)
  x += tl.load(seed + 1) + high * 0x9E3779B1
  x = _mix(_mix(x, 0x9E3779B1, 15), 0x846CA68B, 16)
  return x < THRESHOLD


@triton.jit
def _scores(
  product, query_group, key_group, column,
  S: tl.constexpr, SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
  """Of a product of queries and keys, in units of log(2)."""
  bias = tl.where(query_group == key_group, 0.0, MASKED * _LOG2_E)
  scores = product * (SCALE * _LOG2_E) + bias
  return tl.where(column < S, scores, float("-inf"))


@triton.jit
def _load(at, bias, inside):
  """Rows of `heads`, as wide as a head, with their bias; 0 outside."""
  return tl.load(at, inside, 0.0) + tl.load(bias)[None, :]


@triton.jit
def attention(
  heads, bias, query_groups, key_groups, seed, context, log_totals,
  S: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
  MASKED: tl.constexpr, KEEP_PROB: tl.constexpr, THRESHOLD: tl.constexpr,
  FIRST_HEAD: tl.constexpr, ALL_HEADS: tl.constexpr, QUERIES: tl.constexpr,
  KEYS: tl.constexpr,
):  # fmt: skip
  """The grid: blocks of QUERIES, N, B."""
  head, example = tl.program_id(1), tl.program_id(2).to(tl.int64)
  f = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
  d = tl.arange(0, D)
  heads += example * S * 3 * N * D + head * D
  bias += head * D + d
  inside = f[:, None] < S
  query = _load(heads + f[:, None] * (3 * N * D) + d, bias, inside)
  query_group = tl.load(query_groups + example * S + f, mask=f < S, other=-1)
  rows = (example * ALL_HEADS + FIRST_HEAD + head) * S + f
  highest = tl.full([QUERIES], float("-inf"), tl.float32)
  total = tl.zeros([QUERIES], tl.float32)
  output = tl.zeros([QUERIES, D], tl.float32)
  for first in range(0, S, KEYS):
    t = first + tl.arange(0, KEYS)
    key_at = heads + N * D + t[:, None] * (3 * N * D) + d
    key = _load(key_at, bias + N * D, t[:, None] < S)
    value = _load(key_at + N * D, bias + 2 * N * D, t[:, None] < S)
    key_group = tl.load(key_groups + example * S + t, mask=t < S, other=-1)
    scores = _scores(
      tl.dot(query, tl.trans(key)), query_group[:, None], key_group[None, :],
      t[None, :], S, SCALE, MASKED,
    )  # fmt: skip
    higher = tl.maximum(highest, tl.max(scores, 1))
    probs = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
    total = total * shrink + tl.sum(probs, 1)
    if KEEP_PROB < 1.0:
      kept = _kept(rows[:, None], t[None, :], seed, S, THRESHOLD)
      probs = tl.where(kept, probs, 0.0)
    output = tl.dot(probs.to(value.dtype), value, output * shrink[:, None])
    highest = higher
  output = output / (total * KEEP_PROB)[:, None]
  at = context + (example * S + f[:, None]) * (N * D) + head * D + d
  tl.store(at, output.to(context.dtype.element_ty), mask=f[:, None] < S)
  log_total = (highest + tl.log2(total)) / _LOG2_E
  tl.store(log_totals + (example * N + head) * S + f, log_total, mask=f < S)


@triton.jit
def attention_gradient(
  heads, bias, query_groups, key_groups, seed, log_totals, along, d_context,
  d_heads,
  S: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
  MASKED: tl.constexpr, KEEP_PROB: tl.constexpr, THRESHOLD: tl.constexpr,
  FIRST_HEAD: tl.constexpr, ALL_HEADS: tl.constexpr, BLOCK: tl.constexpr,
  STEP: tl.constexpr,
):  # fmt: skip
  """The grid: blocks of BLOCK keys, and as many queries, N, B."""
  head, example = tl.program_id(1), tl.program_id(2).to(tl.int64)
  own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  d = tl.arange(0, D)
  heads += example * S * 3 * N * D + head * D
  bias += head * D + d
  d_heads += example * S * 3 * N * D + head * D
  d_context += example * S * N * D + head * D
  query_groups += example * S
  key_groups += example * S
  log_totals += (example * N + head) * S
  along += (example * N + head) * S
  first_row = (example * ALL_HEADS + FIRST_HEAD + head) * S
  is_own = own[:, None] < S
  own_at = own[:, None] * (3 * N * D) + d
  kind = d_heads.dtype.element_ty

  own_key = _load(heads + N * D + own_at, bias + N * D, is_own)
  own_value = _load(heads + 2 * N * D + own_at, bias + 2 * N * D, is_own)
  key_group = tl.load(key_groups + own, mask=own < S, other=-1)
  d_key = tl.zeros([BLOCK, D], tl.float32)
  d_value = tl.zeros([BLOCK, D], tl.float32)
  for first in range(0, S, STEP):
    f = first + tl.arange(0, STEP)
    inside = f[:, None] < S
    query = _load(heads + f[:, None] * (3 * N * D) + d, bias, inside)
    dy = tl.load(d_context + f[:, None] * (N * D) + d, inside, 0.0)
    group = tl.load(query_groups + f, mask=f < S, other=-1)
    # A query beyond the last has no probabilities.
    log_total = tl.load(log_totals + f, mask=f < S, other=float("inf"))
    scores = _scores(
      tl.dot(own_key, tl.trans(query)), group[None, :], key_group[:, None],
      own[:, None], S, SCALE, MASKED,
    )  # fmt: skip
    probs = tl.exp2(scores - log_total[None, :] * _LOG2_E)  # [BLOCK, STEP]
    d_probs = tl.dot(own_value, tl.trans(dy))
    dropped = probs
    if KEEP_PROB < 1.0:
      rows = (first_row + f)[None, :]
      kept = _kept(rows, own[:, None], seed, S, THRESHOLD)
      dropped = tl.where(kept, probs * (1.0 / KEEP_PROB), 0.0)
      d_probs = tl.where(kept, d_probs * (1.0 / KEEP_PROB), 0.0)
    d_value = tl.dot(dropped.to(dy.dtype), dy, d_value)
    query_along = tl.load(along + f, mask=f < S, other=0.0)
    d_scores = probs * (d_probs - query_along[None, :]) * SCALE
    d_key = tl.dot(d_scores.to(query.dtype), query, d_key)
  tl.store(d_heads + N * D + own_at, d_key.to(kind), mask=is_own)
  tl.store(d_heads + 2 * N * D + own_at, d_value.to(kind), mask=is_own)

  own_query = _load(heads + own_at, bias, is_own)
  own_dy = tl.load(d_context + own[:, None] * (N * D) + d, is_own, 0.0)
  query_group = tl.load(query_groups + own, mask=own < S, other=-1)
  own_total = tl.load(log_totals + own, mask=own < S, other=float("inf"))
  own_along = tl.load(along + own, mask=own < S, other=0.0)
  d_query = tl.zeros([BLOCK, D], tl.float32)
  for first in range(0, S, STEP):
    t = first + tl.arange(0, STEP)
    inside = t[:, None] < S
    key_at = heads + N * D + t[:, None] * (3 * N * D) + d
    key = _load(key_at, bias + N * D, inside)
    value = _load(key_at + N * D, bias + 2 * N * D, inside)
    group = tl.load(key_groups + t, mask=t < S, other=-1)
    scores = _scores(
      tl.dot(own_query, tl.trans(key)), query_group[:, None], group[None, :],
      t[None, :], S, SCALE, MASKED,
    )  # fmt: skip
    probs = tl.exp2(scores - own_total[:, None] * _LOG2_E)  # [BLOCK, STEP]
    d_probs = tl.dot(own_dy, tl.trans(value))
    if KEEP_PROB < 1.0:
      own_rows = (first_row + own)[:, None]
      kept = _kept(own_rows, t[None, :], seed, S, THRESHOLD)
      d_probs = tl.where(kept, d_probs * (1.0 / KEEP_PROB), 0.0)
    d_scores = probs * (d_probs - own_along[:, None]) * SCALE
    d_query = tl.dot(d_scores.to(key.dtype), key, d_query)
  tl.store(d_heads + own_at, d_query.to(kind), mask=is_own)


@triton.jit
def _total(
  x, residual, bias, seed, row, column, inside,
  H: tl.constexpr, KEEP_PROB: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
  """dropout(x + bias) + residual of a row: float32, 0 outside."""
  at = row * H + column
  wide = tl.load(x + at, inside, 0.0) + tl.load(bias + column, inside, 0.0)
  wide = wide.to(tl.float32)
  if KEEP_PROB < 1.0:
    kept = _kept(row, column, seed, H, THRESHOLD)
    wide = tl.where(kept, wide * (1.0 / KEEP_PROB), 0.0)
  return wide + tl.load(residual + at, inside, 0.0).to(tl.float32)


@triton.jit
def add_and_norm(
  x, residual, bias, gamma, beta, seed, y, means, rstds,
  R: tl.constexpr, H: tl.constexpr, EPSILON: tl.constexpr,
  KEEP_PROB: tl.constexpr, THRESHOLD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
  """The grid: R. WIDTH is the power of two from H on."""
  row = tl.program_id(0).to(tl.int64)
  column = tl.arange(0, WIDTH)
  inside = column < H
  total = _total(
    x, residual, bias, seed, row, column, inside, H, KEEP_PROB, THRESHOLD
  )
  mean = tl.sum(total, 0) / H
  centred = tl.where(inside, total - mean, 0.0)
  rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / H + EPSILON)
  result = centred * rstd * tl.load(gamma + column, inside, 0.0)
  result += tl.load(beta + column, inside, 0.0)
  tl.store(y + row * H + column, result.to(y.dtype.element_ty), inside)
  tl.store(means + row, mean)
  tl.store(rstds + row, rstd)


@triton.jit
def add_and_norm_gradient(
  x, residual, bias, gamma, means, rstds, seed, dy, dy_2, dx, d_residual, sums,
  R: tl.constexpr, H: tl.constexpr, KEEP_PROB: tl.constexpr,
  THRESHOLD: tl.constexpr, WIDTH: tl.constexpr, TWICE: tl.constexpr,
  ROWS: tl.constexpr,
):  # fmt: skip
  """The grid: blocks of ROWS rows, of which `sums` has each [3, H].

  They are the gradients of gamma, beta and the bias.
  """
  block = tl.program_id(0).to(tl.int64)
  column = tl.arange(0, WIDTH)
  scale = tl.load(gamma + column, column < H, 0.0)
  d_gamma = tl.zeros([WIDTH], tl.float32)
  d_beta = tl.zeros([WIDTH], tl.float32)
  d_bias = tl.zeros([WIDTH], tl.float32)
  for i in range(ROWS):
    row = block * ROWS + i
    inside = (column < H) & (row < R)
    at = row * H + column
    total = _total(
      x, residual, bias, seed, row, column, inside, H, KEEP_PROB, THRESHOLD
    )
    d_y = tl.load(dy + at, inside, 0.0).to(tl.float32)
    if TWICE:
      d_y += tl.load(dy_2 + at, inside, 0.0).to(tl.float32)
    mean = tl.load(means + row, row < R, 0.0)
    rstd = tl.load(rstds + row, row < R, 0.0)
    x_hat = tl.where(inside, (total - mean) * rstd, 0.0)
    d_gamma += d_y * x_hat
    d_beta += d_y
    d_x_hat = d_y * scale
    along_one = tl.sum(d_x_hat, 0) / H
    along_x_hat = tl.sum(d_x_hat * x_hat, 0) / H
    d_total = (d_x_hat - along_one - x_hat * along_x_hat) * rstd
    kind = d_residual.dtype.element_ty
    tl.store(d_residual + at, d_total.to(kind), inside)
    if KEEP_PROB < 1.0:
      kept = _kept(row, column, seed, H, THRESHOLD)
      d_total = tl.where(kept, d_total * (1.0 / KEEP_PROB), 0.0)
    rounded = d_total.to(dx.dtype.element_ty)
    tl.store(dx + at, rounded, inside)
    d_bias += rounded.to(tl.float32)
  sums += block * 3 * H + column
  tl.store(sums, d_gamma, column < H)
  tl.store(sums + H, d_beta, column < H)
  tl.store(sums + 2 * H, d_bias, column < H)


def intermediate_code(kernel, types, constants, warps, stages) -> str:
  """Triton's code of a kernel, for any GPU: what XLA reads and compiles.

  `types` are those that the pointers point to, in order; `constants` the
  arguments after them.
  """
  # For the oldest GPU of 16-bit floats; this stage does not depend on it.
  target = GPUTarget("cuda", 80, 32)
  backend = make_backend(target)
  options = backend.parse_options({"num_warps": warps, "num_stages": stages})
  context = ir.context()
  ir.load_dialects(context)
  backend.load_dialects(context)
  pointers = kernel.arg_names[: len(types)]
  signature = {name: f"*{t}" for name, t in zip(pointers, types, strict=True)}
  signature |= dict.fromkeys(constants, "constexpr")
  source = ASTSource(
    kernel,
    signature,
    {(kernel.arg_names.index(name),): v for name, v in constants.items()},
    # XLA's buffers begin at multiples of more bytes than these.
    {(i,): [["tt.divisibility", 16]] for i in range(len(types))},
  )
  module = source.make_ir(
    target,
    options,
    backend.get_codegen_implementation(options),
    backend.get_module_map(),
    context,
  )
  # Without the lines of this file.
  return backend.make_ttir(module, {}, options, target.arch).str_nodebug()
