"""Runs flash_kernels by Triton's interpreter: IN.npz OUT.npz; no GPU, no torch.

With TRITON_INTERPRET=1, in an environment that has Triton.
"""

import sys

import numpy as np
from triton.runtime import interpreter

from model import flash_kernels


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
  pointers = map(_Pointer, arrays)
  _Executor(kernel.fn, kernel.arg_names, grid)(*pointers, **constants)


def main(source, target):
  with np.load(source) as found:
    given = {name: found[name] for name in found.files}
  constants = {n: given[n].item() for n in given if n.isupper()}
  heads, dy, seed = given["heads"], given["dy"], given["seed"]
  groups = [given["queries"], given["keys"]]
  length, count, size = (constants[n] for n in "SND")
  batch = len(heads) // length
  context = np.full_like(dy, np.nan)
  log_totals = np.full([batch, count, length], np.nan, np.float32)
  grid = lambda block: (-(-length // block), count, batch)
  run(
    flash_kernels.forward,
    grid(16),
    [heads, *groups, seed, context, log_totals],
    {**constants, "QUERIES": 16, "KEYS": 32},
  )
  along = (dy * context).reshape(batch, length, count, size).sum(-1)
  along = np.ascontiguousarray(along.transpose(0, 2, 1))
  d_heads = np.full_like(heads, np.nan)
  run(
    flash_kernels.backward,
    grid(32),
    [heads, *groups, seed, log_totals, along, dy, d_heads],
    {**constants, "BLOCK": 32, "STEP": 16},
  )
  np.savez(target, context=context, d_heads=d_heads)


if __name__ == "__main__":
  main(*sys.argv[1:])
