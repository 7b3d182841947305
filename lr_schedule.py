"""Learning rate schedules: pure functions of the update."""

import numpy as np

from tensorflow_v1 import tf

LR_SCALINGS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def linear(step, peak: float, total: int, warmup: int):
  """google/bert's schedule: linearly up from 0 to the peak, then down to 0.

  The decay is measured from update 0, not from the end of the warm-up, as in
  google/bert's `create_optimizer`: where the warm-up ends, the rate drops to
  peak * (1 - warmup / total). With a warm-up, update 0 has rate 0.

  Args:
    step: the update, 0 for the first: a number, a NumPy array or a Tensor.
    peak: the highest rate.
    total: updates of the whole run.
    warmup: updates of the warm-up.

  Returns:
    The rate, in kind: a float32 Tensor, or NumPy float64.
  """
  if isinstance(step, tf.Tensor):
    where, minimum, step = tf.where, tf.minimum, tf.cast(step, tf.float32)
  else:
    where, minimum, step = np.where, np.minimum, np.asarray(step, np.float64)
  decayed = peak * (1.0 - minimum(step, float(total)) / float(total))
  warming = peak * step / max(1.0, float(warmup))
  return where(step < float(warmup), warming, decayed)


def scale_peak(peak: float, scaling: str, ranks: int) -> float:
  """The peak times ranks^(0, 1/2 or 1) for scaling none, sqrt or linear."""
  return peak * ranks ** LR_SCALINGS[scaling]
