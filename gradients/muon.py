"""Muon: orthogonal updates of hidden matrices; AdamW for all else."""

import collections
import functools
import re

from common.tensorflow_v1 import tf
from config import execution
from config.optimizers import polynomials_of
from gradients import moments
from gradients.adamw import AdamWeightDecayOptimizer
from xla_patches import jit

MOMENTUM = "muon_m"
# Dense layers' matrices inside of encoder layers. Queries, keys, values and
# gates are variables of their own.
_HIDDEN = re.compile(r"/layer_\d+/.*kernel$")
# Matrices in a product: so many fill a GPU, and more take more memory.
_AT_ONCE = 8
# From this ratio of columns to rows on, steps share a Gram matrix.
_WIDE = 2
# With more, bfloat16's rounding of the Gram matrix outgrows the result.
_STEPS_OF_A_GRAM = 2
_TINY = 1e-7  # beside a norm, so that zeros stay zeros


class MuonOptimizer(AdamWeightDecayOptimizer):
  """Momentum, made orthogonal, for hidden matrices; AdamW for other weights.

    m <- mu m + (1 - mu) g
    u <- mu m + (1 - mu) g                         (Nesterov)
    w <- w - lr (0.2 sqrt(max(rows, columns)) orth(u) + decay w)

  orth(U S V') is near U V', see `orthogonalized`. (Jordan et al. 2024,
  https://kellerjordan.github.io/posts/muon/; the factor, with which AdamW's
  rate and decay fit, from Liu et al. 2025, https://arxiv.org/abs/2502.16982.)
  """

  def __init__(
    self, *args, muon_momentum=0.95, muon_steps=5, muon_coefficients="jordan",
    matmul_type=tf.float32, **kwargs,
  ):  # fmt: skip
    """Matrices are made orthogonal by products of `matmul_type`."""
    super().__init__(*args, **kwargs)
    self.momentum = muon_momentum
    self._polynomials = polynomials_of(muon_coefficients, muon_steps)
    self._matmul_type = matmul_type

  def is_matrix(self, variable):
    name = moments.variable_name(variable)
    return len(variable.shape) == 2 and bool(_HIDDEN.search(name))

  def slots_of(self, variable):
    if self.is_matrix(variable):
      return {MOMENTUM: ""}
    return super().slots_of(variable)

  def is_one_program(self, layout):
    # XLA multiplies bfloat16 on a CPU at float32's rate.
    return jit.on_gpu() and layout.comm.size * layout.slices.size == 1

  def _update_all(self, changes, layout):
    matrices = [change for change in changes if MOMENTUM in change.slots]
    others = [change for change in changes if MOMENTUM not in change.slots]
    updates = self._update_matrices(matrices, layout)
    return [*updates, *super()._update_all(others, layout)]

  def _update_matrices(self, changes, layout) -> list[tf.Operation]:
    new_moments, directions = [], []
    for change in changes:
      gradient, kept = change.gradient, change.slots[MOMENTUM].variable
      moment = self.momentum * kept + (1.0 - self.momentum) * gradient
      new_moments.append((kept, moment))
      direction = self.momentum * moment + (1.0 - self.momentum) * gradient
      directions.append(direction)
    variables = [change.variable for change in changes]
    steps = layout.by_matrix(self._steps, directions, variables)
    rate = tf.convert_to_tensor(self.learning_rate, tf.float32)
    new_weights = []
    for change, step in zip(changes, steps, strict=True):
      weights = tf.convert_to_tensor(change.variable)
      new = weights - rate * (step + change.decay * weights)
      new_weights.append((change.variable, new))
    # Everything is read before anything is written.
    new_values = [*new_weights, *new_moments]
    with tf.control_dependencies([value for _, value in new_values]):
      return moments.assign_all(new_values)

  def _steps(self, matrices: list) -> list[tf.Tensor]:
    """The step at rate 1 of each whole matrix of momentum."""
    by_shape = collections.defaultdict(list)  # indices of `matrices`
    for index, matrix in enumerate(matrices):
      by_shape[tuple(sorted(matrix.shape.as_list()))].append(index)
    modes = execution.UPDATE if jit.on_gpu() else ()
    settings = dict(polynomials=self._polynomials, dtype=self._matmul_type)
    orthogonalize = jit.compiled(orthogonalized, modes, **settings)
    steps: dict[int, tf.Tensor] = {}
    for (_, columns), indices in by_shape.items():
      for first in range(0, len(indices), _AT_ONCE):
        batch = indices[first : first + _AT_ONCE]
        wide = tf.stack([_laid_wide(matrices[i], matrices[i]) for i in batch])
        scaled = 0.2 * columns**0.5 * orthogonalize(wide)
        for index, step in zip(batch, tf.unstack(scaled), strict=True):
          steps[index] = _laid_wide(step, matrices[index])
    return [steps[index] for index in range(len(matrices))]


def _laid_wide(tensor, matrix) -> tf.Tensor:
  """`tensor`, or its transpose if `matrix` has more rows than columns."""
  rows, columns = matrix.shape.as_list()
  return tf.transpose(tensor) if rows > columns else tensor


def orthogonalized(matrices, polynomials, dtype=tf.float32) -> tf.Tensor:
  """U V' of each of float [k, rows, columns] = U S V', nearly; rows <= columns.

  Each of `polynomials`, (a, b, c), takes a singular value s to
  a s + b s^3 + c s^5, and small ones so towards 1 (Newton-Schulz). Products
  are of `dtype`, the result float32.
  """
  _, rows, columns = matrices.shape.as_list()
  norms = tf.norm(matrices, axis=[1, 2], keepdims=True)
  x = tf.cast(matrices / (norms + _TINY), dtype)
  at_once = _STEPS_OF_A_GRAM if columns >= _WIDE * rows else 1
  for first in range(0, len(polynomials), at_once):
    x = _by_gram(x, polynomials[first : first + at_once])
  return tf.cast(x, tf.float32)


def _by_gram(x, polynomials) -> tf.Tensor:
  """x after `polynomials`, whose products but two are of rows x rows.

  Each is f x, where f = a I + b G + c G^2 of the Gram matrix G = x x'. They
  commute, so the next G is f G f.
  """
  gram = tf.matmul(x, x, transpose_b=True)
  if len(polynomials) == 1:
    a, b, c = polynomials[0]
    return a * x + tf.matmul(b * gram + c * tf.matmul(gram, gram), x)
  identity = tf.eye(gram.shape[-1].value, dtype=x.dtype)
  factors: list[tf.Tensor] = []
  for a, b, c in polynomials:
    if factors:
      gram = tf.matmul(tf.matmul(factors[-1], gram), factors[-1])
    factors.append(a * identity + b * gram + c * tf.matmul(gram, gram))
  return tf.matmul(functools.reduce(tf.matmul, factors), x)
