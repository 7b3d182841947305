"""--triton: its arithmetic, its kernels, and what it refuses.

On a machine with a GPU some of these run the kernels there.
"""

import functools
import os
import pathlib
import subprocess
import types

import attention_in_blocks
import numpy as np
import pytest
import runs
from tiny_models import tiny_config

import mixed_precision
from benchmarks import gpu_check
from common.errors import UserError
from common.tensorflow_v1 import tf
from finetuning import heads as finetuning_heads
from finetuning import packed as packed_rows
from model import kernels, triton_kernels
from training import training_run
from xla_patches import jit

BERT_TINY = f"{runs.ROOT}/configs/bert_tiny.json"
B, N, D = 2, 3, 16
SEED = np.array([123456789, 3987654321], np.uint32)


@pytest.fixture
def in_blocks(monkeypatch):
  attention_in_blocks.use(monkeypatch)


def inputs(length, packed, rng, size=D):
  """product, bias, the two groups, and a gradient of the context."""
  width = N * size
  product = rng.standard_normal([B * length, 3 * width])
  own = np.sort(rng.integers(0, 3, [B, length]), axis=1)[:, ::-1]
  if not packed:
    own = np.minimum(own, 1)
  numbers = (own if packed else np.ones_like(own), own)
  return [
    product.astype(np.float32),
    rng.standard_normal([3 * width]).astype(np.float32),
    *(np.ascontiguousarray(n, np.int32) for n in numbers),
    rng.standard_normal([B * length, width]).astype(np.float32),
  ]


def plain(product, bias, queries, keys, length, keep_prob, part):
  """By `kernels.attention_probs`."""
  query, key, value = kernels.split_heads(
    product, bias, parts=3, shape=(B, length, N)
  )
  same = tf.equal(queries[:, :, tf.newaxis], keys[:, tf.newaxis])
  probs = kernels.attention_probs(
    tf.matmul(query, key, transpose_b=True),
    (1.0 - tf.cast(same, tf.float32))[:, tf.newaxis] * -10000.0,
    tf.constant(SEED),
    scale=value.shape.as_list()[-1] ** -0.5,
    keep_prob=keep_prob,
    dtype=tf.float32,
    heads=part,
  )
  context = tf.transpose(tf.matmul(probs, value), [0, 2, 1, 3])
  return tf.reshape(context, [B * length, -1])


def flash(product, bias, queries, keys, length, keep_prob, part):
  return triton_kernels.attend(
    product,
    bias,
    (queries, keys),
    tf.constant(SEED),
    shape=(B, length, N),
    keep_prob=keep_prob,
    part=part,
  )


def run(function, arrays, *static, dtype=tf.float32, mode="off"):
  """The context, and the gradients of product and bias, in float32."""
  product, *others, dy = arrays
  with tf.Graph().as_default(), tf.Session() as session, jit.mode(mode):
    product, *others = map(tf.constant, (product, *others))
    context = function(tf.cast(product, dtype), *others, *static)
    sources = [product, others[0]]
    gradients = tf.gradients(context, sources, tf.cast(dy, dtype))
    return session.run([tf.cast(context, tf.float32), *gradients])


def interpreted(tmp_path, what, arrays, **constants):
  """name -> array, by Triton's interpreter in the environment that has it."""
  python = pathlib.Path(runs.ROOT, gpu_check.PYTHON)
  if not python.exists():
    pytest.skip(f"{gpu_check.PYTHON} is missing: benchmarks/gpu_check.py")
  np.savez(tmp_path / "in.npz", **arrays, **constants)
  script = pathlib.Path(runs.ROOT, "tests/support/interpret_triton.py")
  done = subprocess.run(
    [python, script, what, tmp_path / "in.npz", tmp_path / "out.npz"],
    env={**os.environ, "PYTHONPATH": str(runs.ROOT), "TRITON_INTERPRET": "1"},
    capture_output=True,
    text=True,
    check=False,
    timeout=runs.HANG_SECONDS,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  with np.load(tmp_path / "out.npz") as found:
    return dict(found)


def assert_close(got, want):
  assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
  "length, keep_prob, part",
  [(9, 1.0, None), (150, 0.8, None), (64, 0.8, (2, 7))],
)
def test_it_is_attention(packed, length, keep_prob, part):
  arrays = inputs(length, packed, np.random.default_rng(1))
  want = run(plain, arrays, length, keep_prob, part)
  got = run(flash, arrays, length, keep_prob, part)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
@pytest.mark.parametrize(
  "length, size, keep_prob, part",
  [
    (9, 16, 1.0, None),
    (100, 128, 0.9, None),
    (300, 32, 0.9, (2, 7)),
    (512, 64, 0.9, None),
  ],
)
def test_programs_in_16_bits_are_near_it(
  length, size, keep_prob, part, dtype, monkeypatch
):
  """By the kernels, on a GPU."""
  if not jit.on_gpu():
    attention_in_blocks.use(monkeypatch)
  arrays = inputs(length, True, np.random.default_rng(4), size)
  want = run(plain, arrays, length, keep_prob, part)
  got = run(flash, arrays, length, keep_prob, part, dtype=dtype, mode="layers")
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize("keep_prob, twice", [(1.0, True), (0.9, False)])
@pytest.mark.parametrize("width", [100, 768])
def test_a_gpus_layer_norm_is_near_the_plain_one(width, keep_prob, twice):
  if not jit.on_gpu():
    pytest.skip("no GPU")
  rng = np.random.default_rng(5)
  rows = rng.standard_normal([4, 21, width]).astype(np.float32)
  columns = rng.standard_normal([3, width]).astype(np.float32)

  def results(kernel, dtype, mode):
    with tf.Graph().as_default(), tf.Session() as session, jit.mode(mode):
      x, residual, *dy = (tf.cast(tf.constant(t), dtype) for t in rows)
      gamma, beta, bias = map(tf.constant, columns)
      y = kernel(
        x, residual, gamma, beta, tf.constant(SEED), bias, keep_prob=keep_prob,
        epsilon=1e-7, centred=True, dtype=tf.float32, store=dtype, twice=twice,
      )  # fmt: skip
      ys = y if twice else (y,)
      sources = [x, residual, gamma, beta, bias]
      found = [ys[0], *tf.gradients(ys, sources, dy[: len(ys)])]
      return session.run([tf.cast(t, tf.float32) for t in found])

  want = results(kernels.add_and_norm, tf.float32, "off")
  got = results(triton_kernels.add_and_norm, tf.bfloat16, "layers")
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.slow
@pytest.mark.parametrize(
  # The dropout's elements of so many heads are more than 32 bits count.
  "length, keep_prob, part",
  [(40, 1.0, None), (80, 0.8, (2, 10**8))],
)
def test_the_gpus_attention_gives_the_same(tmp_path, length, keep_prob, part):
  """In blocks of other sizes."""
  arrays = inputs(length, True, np.random.default_rng(2))
  context, d_heads, _ = run(flash, arrays, length, keep_prob, part)
  heads, bias, queries, keys, dy = arrays
  first, count = part or (0, N)
  got = interpreted(
    tmp_path,
    "attention",
    dict(heads=heads, bias=bias, queries=queries, keys=keys, seed=SEED, dy=dy),
    S=length, N=N, D=D, SCALE=D**-0.5, MASKED=triton_kernels.MASKED_SCORE,
    KEEP_PROB=keep_prob, THRESHOLD=kernels.keep_threshold(keep_prob),
    FIRST_HEAD=first, ALL_HEADS=count,
  )  # fmt: skip
  assert_close(got["context"], context)
  assert_close(got["d_heads"], d_heads)


@pytest.mark.slow
@pytest.mark.parametrize("keep_prob, twice", [(1.0, True), (0.8, False)])
def test_the_gpus_layer_norm_gives_the_same(tmp_path, keep_prob, twice):
  """Of rows that fill neither the last program nor the power of two."""
  rng = np.random.default_rng(3)
  x, residual, dy, dy_2 = rng.standard_normal([4, 21, 24]).astype(np.float32)
  gamma, beta, bias = rng.standard_normal([3, 24]).astype(np.float32)
  names = ("x", "residual", "gamma", "beta", "seed", "bias")
  values = (x, residual, gamma, beta, SEED, bias)
  with tf.Graph().as_default(), tf.Session() as session:
    tensors = list(map(tf.constant, values))
    y = kernels.add_and_norm(
      *tensors, keep_prob=keep_prob, epsilon=1e-7, centred=True,
      dtype=tf.float32, store=tf.float32,
    )  # fmt: skip
    sources = [t for t in tensors if t.dtype == tf.float32]
    d_y = dy + dy_2 if twice else dy
    want, *gradients = session.run([y, *tf.gradients(y, sources, d_y)])
  got = interpreted(
    tmp_path, "add_and_norm",
    dict(zip(names, values, strict=True)) | dict(dy=dy, dy_2=dy_2),
    R=21, H=24, EPSILON=1e-7, KEEP_PROB=keep_prob,
    THRESHOLD=kernels.keep_threshold(keep_prob), WIDTH=32, TWICE=twice, ROWS=8,
  )  # fmt: skip
  assert_close(got["y"], want)
  d_gamma, d_beta, d_bias = got["sums"].sum(axis=0)
  made = (got["dx"], got["d_residual"], d_gamma, d_beta, d_bias)
  for a, b in zip(made, gradients, strict=True):
    assert_close(a, b)


def test_groups_of_tokens():
  """The groups of plain rows are the mask's; packed ones number examples."""
  mask = np.array([[1, 1, 0], [1, 0, 0]])
  ones = np.ones_like(mask)
  with tf.Graph().as_default(), tf.Session() as session:
    for given, is_packed, rows, keys in (
      (mask, False, ones, mask),
      (None, False, ones, ones),
      (2 * mask, True, 2 * mask, 2 * mask),
    ):
      tensor = None if given is None else tf.constant(given, tf.int32)
      groups = triton_kernels.groups(tensor, [2, 3], is_packed)
      np.testing.assert_array_equal(session.run(groups), (rows, keys))


@pytest.mark.parametrize(
  "flags, words",
  [
    (dict(precision="fp32"), "needs attention in 16 bits"),
    (dict(precision_policy=("softmax=bf16",)), "with a float32 softmax"),
    (dict(xla="off"), "needs --xla=layers or whole_layers or step"),
    (dict(recompute=("attention",)), "needs no attention in --recompute"),
  ],
)
def test_what_it_cannot_do_is_refused(tmp_path, flags, words):
  given = dict(triton=True, precision="bf16", xla="layers", dry_run=True)
  with pytest.raises(UserError, match=words):
    runs.config((BERT_TINY, ""), tmp_path, **{**given, **flags})


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("is_training", [False, True])
def test_finetuning_attends_by_it_when_it_trains(is_training):
  bert, products = tiny_config(), []
  for triton in (False, True):
    config = types.SimpleNamespace(
      bert=bert, policy=mixed_precision.FP32, recompute=(), triton=triton
    )
    with tf.Graph().as_default() as graph:
      rows = [tf.zeros([4, 16], tf.int32) for _ in range(3)]
      batch = packed_rows.FinetuningBatch(
        *rows, tf.zeros([4, 3, 1], tf.int32), tf.zeros([4, 3])
      )
      finetuning_heads.encode(batch, config, is_training)
    operations = graph.get_operations()
    products.append(sum(op.type == "MatMul" for op in operations))
  # One of queries, keys and values together.
  fewer = 2 * bert.num_hidden_layers * is_training
  assert products[0] - products[1] == fewer


@pytest.mark.parametrize(
  "norms, words",
  [
    ({}, "attention and layer norm by Triton's kernels"),
    ({"recompute": ("layer_norm",)}, "; attention by Triton's kernels"),
  ],
)
def test_the_plan_names_the_kernels(norms, words):
  config = types.SimpleNamespace(
    bert=tiny_config(), policy=mixed_precision.FP32, tf32=True, triton=True,
    deterministic=False, **{"recompute": (), **norms},
  )  # fmt: skip
  assert words in training_run.precision_line(config, on_gpu=True)
  assert "ttention by" not in training_run.precision_line(config, on_gpu=False)


@pytest.fixture
def gpu_of(monkeypatch):
  """Makes a GPU of a compute capability, of which nvidia-smi tells."""

  def show(capability):
    listed = [f"NVIDIA X, {capability}"]
    jit.check_gpus.cache_clear()
    monkeypatch.setattr(jit, "visible_gpus", lambda _: listed)

  return show


@pytest.mark.parametrize("capability", ["7.0", "8.6", "9.0", "10.0", "12.0"])
def test_xla_compiles_for_volta_to_hopper(gpu_of, tmp_path, capability):
  """Blackwell trains without XLA."""
  gpu_of(capability)
  config = functools.partial(
    runs.config, (BERT_TINY, ""), tmp_path, dry_run=True
  )
  for mode in ("auto", "layers", "step"):
    if float(capability) < 10:
      config(xla=mode)
    else:
      with pytest.raises(UserError, match=r"X has 1\d\.0: give --xla=off$"):
        config(xla=mode)
  config(xla="off")


@pytest.mark.parametrize("capability", ["7.5", "12.0"])
def test_a_gpu_that_triton_does_not_know_is_refused(gpu_of, capability):
  gpu_of(capability)
  with pytest.raises(UserError, match=r"8\.0 to 9\.x .*: leave it out$"):
    triton_kernels.check_installed()


@pytest.mark.parametrize("size", [8, 48, 256])
def test_heads_that_no_kernel_has_are_refused(size):
  with pytest.raises(UserError, match=f"not of {size}: leave it out"):
    triton_kernels.check_size(size)
