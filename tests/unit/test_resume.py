"""Resumed equals never stopped, bit for bit: a feature x a way of ending.

test_run_pretraining.py has packed records and evaluations, test_stages.py
stages, test_finetune.py its tasks, and lockstep/ and ranks/ several ranks.
"""

import numpy as np
import pytest
import resuming
import runs

from config.exchange_config import AllreduceConfig
from gradients import power_sgd

SLOW = pytest.mark.slow
ZERO = dict(
  allreduce=AllreduceConfig(zero=1), optimizer=dict(bias_correction=True)
)
LOW_RANK = dict(allreduce=AllreduceConfig(powersgd_rank=2))
LAMB = dict(
  optimizer=dict(optimizer="lamb", bias_correction=True, prenormalize=True),
  lr_schedule="warmup_exp_decay_exp", lr_decay_steps=5, learning_rate=2e-2,
)  # fmt: skip
# A scale that is far too high, so that it is on its way down at the stop.
HALF = dict(
  precision="fp16", dropout=0.1, lr_schedule="constant",
  loss_scale=dict(initial_loss_scale=2.0**30, loss_scale_window=4),
)  # fmt: skip
SAMPLED = dict(
  sampled_softmax=30, num_train_steps=5, num_warmup_steps=1,
  save_checkpoints_steps=1, global_batch_size=12, train_batch_size=12,
)  # fmt: skip
ACCUMULATED = dict(train_batch_size=8)  # three micro-batches
KEYS = ("loss", "grad_norm", "loss_scale", "skipped_updates")


def has_errors(folder):
  """PowerSGD has not sent all."""
  weights = runs.weights(folder)
  assert any(n.endswith(power_sgd.ERROR) and weights[n].any() for n in weights)


def has_corrections(folder):
  """Bias correction counts, and the rate is one at which the model learns."""
  losses = runs.metrics(folder)
  assert losses[-1] < losses[0]
  assert "applied_updates" in runs.weights(folder)


def has_skipped(folder):
  """The scale fell; all skipped updates are counted, before the stop too."""
  assert "loss_scale/value" in runs.weights(folder)
  scales = runs.metrics(folder, "loss_scale")
  assert scales[0] == 2.0**30 and scales[-1] < 2.0**25
  skipped = runs.metrics(folder, "skipped")
  assert skipped[0] and not all(skipped)
  counted = runs.metrics(folder, "skipped_updates")
  assert counted == np.cumsum(skipped).tolist()


def has_dropped(folder):
  """Some updates lost some of their micro-batches, not all."""
  dropped = runs.metrics(folder, "dropped_micro_batches")
  skipped = runs.metrics(folder, "skipped")
  assert any(d and not s for d, s in zip(dropped, skipped, strict=True))


def trained(folder):
  assert len(runs.metrics(folder)) >= 5


@pytest.mark.parametrize(
  "settings, ways, last, shows",
  [
    pytest.param(ZERO, [resuming.lost_after(7)], None, trained, id="zero"),
    pytest.param(
      ZERO, [resuming.lost_after(7)], dict(allreduce=AllreduceConfig()),
      trained,
      id="zero-then-whole", marks=SLOW,
    ),
    pytest.param(
      LOW_RANK, [resuming.lost_after(7)], None, has_errors, id="powersgd",
      marks=SLOW,
    ),
    pytest.param(
      LOW_RANK | ACCUMULATED,
      [resuming.signalled_at(10), resuming.killed_after(17)], None, has_errors,
      id="powersgd-accumulated",
    ),
    pytest.param(
      LAMB, [resuming.ended_at(10, lr_offset=0.0)], None, has_corrections,
      id="lamb", marks=SLOW,
    ),
    pytest.param(
      HALF, [resuming.ended_at(10), resuming.signalled_at(3)], None,
      has_skipped,
      id="fp16", marks=SLOW,
    ),
    pytest.param(
      HALF | ACCUMULATED | {"loss_scale": dict(initial_loss_scale=2.0**23)},
      [resuming.killed_after(9)], None, has_dropped,
      id="fp16-accumulated", marks=SLOW,
    ),
    pytest.param(
      SAMPLED, [resuming.killed_after(3, train_batch_size=4)],
      dict(train_batch_size=6, xla="step"), trained, id="sampled",
    ),
    pytest.param(
      SAMPLED, [resuming.killed_after(3, train_batch_size=4, xla="layers")],
      dict(train_batch_size=6, xla="layers"), trained,
      id="sampled-layers", marks=SLOW,
    ),
  ],
)  # fmt: skip
def test_resumed_equals_never_stopped(
  tiny_run, tmp_path, settings, ways, last, shows
):
  settings = dict(save_checkpoints_steps=7) | settings
  whole, parts = resuming.compare(
    tiny_run, tmp_path, ways, last, keys=KEYS, **settings
  )
  shows(whole)
  shows(parts)
