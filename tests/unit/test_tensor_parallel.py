"""Tensor slicing as one rank sees it; the rest is in tests/ranks."""

import types

import finetuning_runs
import numpy as np
import pytest
import runs

import run_pretraining
from checkpoints import run_start
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from config.exchange_config import AllreduceConfig
from gradients import distributed
from gradients.distributed import Comm
from model import kernels, tensor_parallel
from records import masking


def slices_of(size):
  return [
    tensor_parallel.Slices(types.SimpleNamespace(rank=r, size=size))
    for r in range(size)
  ]


@pytest.mark.parametrize("size, count", [(12, 4), (101, 2), (7, 3), (5, 5)])
def test_bounds_share_all_out(size, count):
  bounds = [s.bounds(size) for s in slices_of(count)]
  assert [b for b, _ in bounds] == [0, *(e for _, e in bounds[:-1])]
  assert bounds[-1][1] == size
  lengths = {end - begin for begin, end in bounds}
  assert 0 not in lengths and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_starts_as_a_part_of_the_whole(axis):
  """Whatever is random in an initializer is a function of the name alone."""
  from model.layers import create_initializer

  def value(slices):
    with tf.Graph().as_default(), tf.Session() as session:
      tf.set_random_seed(3)
      v = slices.get_variable("a/kernel", [6, 10], create_initializer(), axis)
      session.run(tf.global_variables_initializer())
      assert (tensor_parallel.cut_of(v) is None) == (slices.size == 1)
      return session.run(v)

  whole = value(tensor_parallel.WHOLE)
  parts = [value(s) for s in slices_of(3)]
  np.testing.assert_array_equal(np.concatenate(parts, axis), whole)


@pytest.mark.parametrize("heads", [(0, 4), (1, 3), (2, 4)])
def test_a_slice_draws_its_heads_part_of_the_mask(heads):
  first, last = heads
  seed = tf.constant([5, 7])
  whole = kernels.keep_mask([3, 4, 6, 5], 0.7, seed)
  part = kernels.keep_mask([3, last - first, 6, 5], 0.7, seed, (first, 4))
  with tf.Session() as session:
    whole, part = session.run([whole, part])
  np.testing.assert_array_equal(part, whole[:, first:last])


def test_cross_entropy_over_slices():
  """Losses, right answers and gradients as of all classes together."""
  rng = np.random.default_rng(0)
  logits, bias, labels = (
    rng.normal(size=(9, 7)).astype(np.float32) * 5,
    rng.normal(size=7).astype(np.float32),
    rng.integers(0, 7, 9).astype(np.int32),
  )
  logits[2] += 80.0  # large ones, too
  labels[:2] = logits[:2].argmax(axis=1)
  with tf.Graph().as_default(), tf.Session() as session:
    all_of = [tf.constant(logits), tf.constant(bias)]
    want = kernels.cross_entropy(*all_of, tf.constant(labels), dtype=tf.float32)
    d_want = tf.gradients(want[0] * np.arange(9.0), all_of)
    cut = lambda x, s: x[..., slice(*s.bounds(7))]
    groups = slices_of(3)
    own = [[cut(t, s) for t in all_of] for s in groups]
    parts = []
    for s, tensors in zip(groups, own, strict=True):
      first, end = s.bounds(7)
      at = np.where((labels >= first) & (labels < end), labels - first, -1)
      at = tf.constant(at, tf.int32)
      part = kernels._cross_entropy_part(*tensors, at, dtype=tf.float32)
      parts.append(part)
    for s, tensors in zip(groups, own, strict=True):
      got = kernels.sliced_cross_entropy(
        *tensors,
        tf.constant(labels),
        dtype=tf.float32,
        first=s.bounds(7)[0],
        stack=lambda _: tf.stack(parts),
      )
      d_got = tf.gradients(got[0] * np.arange(9.0), tensors)
      values = session.run([got, want, d_got, d_want])
      np.testing.assert_allclose(values[0], values[1], rtol=1e-5, atol=2e-5)
      for g, w in zip(values[2], values[3], strict=True):
        np.testing.assert_allclose(g, cut(w, s), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"tensor_parallel": 3}, "num_attention_heads=2 is not a multiple"),
    ({"xla": "step"}, "needs --xla=layers"),
    (
      {"allreduce": AllreduceConfig(powersgd_rank=2)},
      "needs no --powersgd_rank",
    ),
    (
      {
        "max_train_minutes": 1.0,
        "masks": masking.MaskConfig(masked_lm_prob=(0.3, 0.15)),
      },
      "needs the same masks",
    ),
  ],
)
def test_what_cannot_be_sliced_is_said(tiny_run, tmp_path, changes, message):
  with pytest.raises(UserError, match=message):
    runs.config(tiny_run, tmp_path, **{"tensor_parallel": 2, **changes})
  with pytest.raises(UserError, match="1 ranks are no mult"):
    distributed.init(tensor_parallel=2)


def test_the_model_of_an_earlier_stage_is_sliced_whole_or_not(
  tiny_run, tmp_path, monkeypatch
):
  config = runs.config(
    tiny_run, tmp_path, do_train=False, do_eval=True, tensor_parallel=2
  )
  earlier = BertConfig.from_dict(
    {**config.bert.to_dict(), "hidden_size": 48, "num_attention_heads": 3}
  )
  monkeypatch.setattr(run_start, "evaluated_bert", lambda *_: earlier)
  with pytest.raises(UserError, match="num_attention_heads=3 is not a mult"):
    run_pretraining.evaluator(config, Comm())


@pytest.mark.parametrize("name", ["classify", "embed"])
def test_a_fine_tuning_refuses_what_it_cannot_slice(tmp_path, letters, name):
  make = finetuning_runs.maker(name, tmp_path, letters)
  for changes, message in (
    ({"tensor_parallel": 3}, "num_attention_heads=2 is not a multiple"),
    ({"xla": "step", "tensor_parallel": 2}, "needs --xla=layers"),
  ):
    with pytest.raises(UserError, match=message):
      make(tmp_path / "out", **changes)
  with pytest.raises(UserError, match="1 ranks are no multiple of it"):
    make(tmp_path / "out", tensor_parallel=2).check()
