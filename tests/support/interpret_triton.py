"""Runs kernels of triton_source on a CPU: WHAT IN.npz OUT.npz.

By Triton's interpreter, TRITON_INTERPRET=1, in an environment that has Triton;
it needs neither a GPU nor PyTorch.
"""

import sys

import numpy as np
from triton.runtime import interpreter

from model import triton_source


class _Pointer:
  """What the interpreter asks of an array."""

  def __init__(self, array):
    self.dtype, self._array = array.dtype.name, array

  def data_ptr(self):
    return self._array.ctypes.data


class _Executor(interpreter.GridExecutor):
  """The arrays are in the host's memory already."""

  def _init_args_hst(self, args, kwargs):
    return args, kwargs

  def _restore_args_dev(self, *args):
    pass


def run(kernel, grid, arrays, constants):
  assert all(array.flags.c_contiguous for array in arrays)
  known = {k: v for k, v in constants.items() if k in kernel.arg_names}
  _Executor(kernel.fn, kernel.arg_names, grid)(*map(_Pointer, arrays), **known)


def unwritten(*shape):
  return np.full(shape, np.nan, np.float32)


def attention(given, constants):
  dy = given["dy"]
  inputs = [given[n] for n in ("heads", "bias", "queries", "keys", "seed")]
  length, count, size = (constants[n] for n in "SND")
  batch = len(dy) // length
  context, log_totals = unwritten(*dy.shape), unwritten(batch, count, length)
  grid = lambda block: (-(-length // block), count, batch)
  run(
    triton_source.attention,
    grid(16),
    [*inputs, context, log_totals],
    {**constants, "QUERIES": 16, "KEYS": 32},
  )
  along = (dy * context).reshape(batch, length, count, size).sum(-1)
  along = np.ascontiguousarray(along.transpose(0, 2, 1))
  d_heads = unwritten(*given["heads"].shape)
  run(
    triton_source.attention_gradient,
    grid(32),
    [*inputs, log_totals, along, dy, d_heads],
    {**constants, "BLOCK": 32, "STEP": 16},
  )
  return {"context": context, "d_heads": d_heads}


def add_and_norm(given, constants):
  rows, width = given["x"].shape
  y, means, rstds = unwritten(rows, width), unwritten(rows), unwritten(rows)
  names = ("x", "residual", "bias", "gamma", "beta", "seed")
  inputs = [given[name] for name in names]
  run(
    triton_source.add_and_norm, (rows,), [*inputs, y, means, rstds], constants
  )
  x, residual, bias, gamma, _, seed = inputs
  count = -(-rows // constants["ROWS"])
  dx, d_residual = unwritten(rows, width), unwritten(rows, width)
  sums = unwritten(count, 3, width)
  inputs = [x, residual, bias, gamma, means, rstds, seed]
  inputs += [given["dy"], given["dy_2"]]
  run(
    triton_source.add_and_norm_gradient,
    (count,),
    [*inputs, dx, d_residual, sums],
    constants,
  )
  return {"y": y, "dx": dx, "d_residual": d_residual, "sums": sums}


def main(what, source, target):
  with np.load(source) as found:
    given = {name: found[name] for name in found.files}
  constants = {n: given[n].item() for n in given if n.isupper()}
  parts = {"attention": attention, "add_and_norm": add_and_norm}
  np.savez(target, **parts[what](given, constants))


if __name__ == "__main__":
  main(*sys.argv[1:])
