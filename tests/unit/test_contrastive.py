"""Losses between the texts of an update, beside NumPy's loops."""

import numpy as np
import pytest

from common.tensorflow_v1 import tf
from finetuning import contrastive

NO_TEXT = -1


def unit(vectors):
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def is_negative(ids, i, side, text):
  """Whether a text is a negative of group i's anchor, or positive: side 1."""
  equal = ids[:, side] == ids[i, side]
  return text not in (NO_TEXT, ids[i, side], *ids[equal, 1 - side])


def reference(vectors, ids, weights, temperature, both, dims):
  """The mean loss, and each anchor's, in loops."""
  count, texts, _ = vectors.shape
  losses = np.zeros(count)
  for size in dims:
    units = unit(vectors[:, :, :size])
    cos = lambda i, s, k, t, u=units: u[i, s] @ u[k, t] / temperature
    for i in range(count):
      others = [
        cos(i, 0, k, t)
        for k in range(count)
        for t in range(1, texts)
        if is_negative(ids, i, 0, ids[k, t])
      ]
      own = cos(i, 0, i, 1)
      forward = np.log(np.exp([own, *others]).sum()) - own
      backward = forward
      if both:
        others = [
          cos(i, 1, k, 0)
          for k in range(count)
          if is_negative(ids, i, 1, ids[k, 0])
        ]
        backward = np.log(np.exp([own, *others]).sum()) - own
      losses[i] += (forward + backward) / 2
  return (losses * weights).sum() / weights.sum(), losses


def groups(texts=3, count=11, seed=0):
  """Groups in which texts repeat and are missing, and one that is none."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, 14, [count, texts]).astype(np.int32)
  ids[:, 0] = rng.integers(8, 18, count)  # some are documents, too
  ids[2, 2:] = NO_TEXT
  weights = np.ones(count, np.float32)
  weights[4], ids[4] = 0, NO_TEXT
  table = rng.normal(size=[32, 8]).astype(np.float32)
  return contrastive.Groups(
    table[ids], ids, weights, rng.integers(0, 4, count).astype(np.float32)
  )


def evaluated(loss, values, **arguments):
  with tf.Graph().as_default(), tf.Session() as session:
    tensors = contrastive.Groups(*map(tf.constant, values))
    gradient, by_group = session.run(loss(tensors, **arguments))
    return gradient, *by_group.values()


def check_gradient(gradient, function, vectors, step=1e-5):
  """In five directions, by differences."""
  rng = np.random.default_rng(0)
  for _ in range(5):
    way = rng.normal(size=vectors.shape)
    rise = function(vectors + step * way) - function(vectors - step * way)
    assert (gradient * way).sum() == pytest.approx(rise / (2 * step), rel=1e-4)


@pytest.mark.parametrize("block", [1 << 22, 4 * 33, 1])
@pytest.mark.parametrize(
  "texts, both, dims", [(3, False, []), (2, True, [8]), (4, True, [4, 2])]
)
def test_info_nce_is_the_reference(monkeypatch, block, texts, both, dims):
  """The whole vectors, of 8 numbers, count with the others."""
  monkeypatch.setattr(contrastive, "_BLOCK_SCORES", block)
  values = groups(texts)
  gradient, losses, _ = evaluated(
    contrastive.info_nce, values, temperature=0.3, both_directions=both,
    dims=dims,
  )  # fmt: skip
  _, ids, weights, _ = values
  mean = lambda v: reference(v, ids, weights, 0.3, both, {*dims, 8})
  vectors = values.vectors.astype(float)
  real = weights > 0
  np.testing.assert_allclose(losses[real], mean(vectors)[1][real], rtol=2e-6)
  check_gradient(gradient, lambda v: mean(v)[0], vectors)


# Groups of texts -> how many negatives each anchor has, and each positive.
NEGATIVES = [
  # No negative of an anchor is the positive of an equal anchor, whose ever.
  (["apx", "aqx", "brq"], [3, 3, 5], [1, 1, 2]),
  (["ap-", "aq-", "bqp", "cp-"], [0, 0, 3, 2], [1, 1, 1, 1]),
  (["ap", "bp", "bq", "cr"], [2, 1, 1, 3], [1, 1, 2, 3]),
  (["ab", "ba", "cd"], [1, 1, 2], [1, 1, 2]),  # both sides have the texts
]


@pytest.mark.parametrize("texts, of_anchors, of_positives", NEGATIVES)
def test_texts_that_belong_are_no_negatives(texts, of_anchors, of_positives):
  """Of equal vectors the loss is the logarithm of their number."""
  ids = np.array([[ord(t) for t in group] for group in texts], np.int32)
  ids[ids == ord("-")] = NO_TEXT
  some = np.ones(len(ids), "f")
  values = contrastive.Groups(np.ones([*ids.shape, 8], "f"), ids, some, some)
  logs = np.log1p([of_anchors, of_positives])
  for both, want in ((False, logs[0]), (True, logs.mean(axis=0))):
    _, losses, _ = evaluated(
      contrastive.info_nce, values, temperature=0.5, both_directions=both
    )
    np.testing.assert_allclose(losses, want, atol=1e-6)


def test_the_nearest_is_right():
  values = groups(2)
  table = np.eye(32, 8, dtype=np.float32)
  vectors = np.stack([table[:8], table[:8]], axis=1)
  vectors[3, 0] = table[5]  # nearer to another's positive
  ids = np.arange(16, dtype=np.int32).reshape(8, 2)
  values = contrastive.Groups(vectors, ids, np.ones(8, "f"), np.zeros(8, "f"))
  *_, correct = evaluated(
    contrastive.info_nce, values, temperature=0.1, both_directions=False
  )
  assert correct.tolist() == [1, 1, 1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("dims", [[], [8], [3]])
def test_cosent_is_the_reference(dims):
  values = groups(2)

  def loss(vectors):
    total = 0.0
    for size in {*dims, 8}:
      units = unit(vectors[:, :, :size])
      cos = (units[:, 0] * units[:, 1]).sum(axis=1) / 0.2
      inner = 1.0
      for i, k in np.ndindex(11, 11):
        if values.scores[i] > values.scores[k]:
          both = values.weights[i] * values.weights[k]
          inner += both * np.exp(cos[k] - cos[i])
      total += np.log(inner)
    return total

  gradient, losses = evaluated(
    contrastive.cosent, values, temperature=0.2, dims=dims
  )
  vectors = values.vectors.astype(float)
  np.testing.assert_allclose(losses, loss(vectors), rtol=1e-6)
  check_gradient(gradient, loss, vectors)
