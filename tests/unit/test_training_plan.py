"""Hand-worked plans, and every refusal with its numbers."""

import dataclasses

import pytest

from common.errors import UserError
from config import training_plan


def resolve(**changes):
  settings = dict(
    ranks=2, records=10_000, train_batch_size=8, num_train_steps=1000,
    num_warmup_steps=100,
  )  # fmt: skip
  return training_plan.resolve(**{**settings, **changes})


def numbers(plan):
  return plan.records_per_update, plan.updates, plan.warmup_updates


def test_per_rank_mode_keeps_the_examples_seen():
  """Or more of them, where steps are rounded up."""
  one = resolve(ranks=1)
  assert numbers(one) == (8, 1000, 100)
  many = resolve(ranks=4, num_accumulation_steps=5)
  assert numbers(many) == (160, 50, 5)
  assert many.total_examples == one.total_examples == 8000
  assert many.epochs == 0.8
  three = resolve(ranks=3)
  assert numbers(three) == (24, 334, 34)
  assert three.total_examples >= 8000


def test_global_mode_derives_the_accumulation():
  plan = resolve(global_batch_size=64)
  assert plan.accumulation == 4
  assert numbers(plan) == (64, 1000, 100)  # not divided


def test_a_plan_is_printed_in_full():
  """With steps that ranks share."""
  plan = resolve(ranks=16, num_accumulation_steps=2, num_train_steps=3200)
  text = "\n".join(plan.lines())
  for number in ("16 ranks", "2 micro", "8 examples", "256", "100 updates"):
    assert number in text
  assert plan.lines()[2] == (
    "--num_train_steps=3200 on 16 ranks x 2 micro-batches are 100 updates"
  )
  assert len(resolve(ranks=1).lines()) == 2
  assert len(resolve(global_batch_size=64).lines()) == 2


def test_a_recipe_in_examples_is_the_same_for_packed_records():
  """As many examples an update and in all, whatever the records hold."""
  plan = resolve(global_batch_size=256, train_batch_size=32, packing_factor=2.0)
  assert plan.accumulation == 2
  assert numbers(plan) == (128, 1000, 100)
  assert plan.total_examples == 256_000
  assert "global batch 256 in 128 records" in "\n".join(plan.lines())
  # 16 per rank and step, stated for one rank: 8 x 2 x 2 = 32 an update.
  per_rank = resolve(packing_factor=2.0)
  assert per_rank.updates == 250
  assert per_rank.total_examples == resolve().total_examples == 8000


def test_a_packed_global_batch_is_met_as_nearly_as_records_go():
  for most, (micro, accumulation) in {44: (44, 1), 32: (22, 2)}.items():
    plan = resolve(
      global_batch_size=256, train_batch_size=most, packing_factor=2.9
    )
    assert (plan.micro_batch, plan.accumulation) == (micro, accumulation)
    assert numbers(plan) == (88, 1000, 100)  # steps as stated
    assert plan.examples(88) == 255


@pytest.mark.parametrize("factor", [1.0, 1.005, 1.19, 2.9, 40.0])
@pytest.mark.parametrize("batch", [16, 17, 108, 256])
def test_a_global_batch_leaves_all_steps_as_they_are_stated(factor, batch):
  """Whatever its whole records hold more or less than it asks for."""
  steps = dict(num_train_steps=997, num_warmup_steps=11, num_decay_steps=13)
  plan = resolve(
    ranks=1, global_batch_size=batch, packing_factor=factor, **steps
  )
  made = plan.updates, plan.warmup_updates, plan.decay_updates
  assert made == (997, 11, 13)


def test_a_global_batch_is_the_same_on_any_number_of_ranks():
  """Also where it cannot be divided; what is left over is said."""
  for ranks in range(1, 17):
    plan = resolve(ranks=ranks, global_batch_size=60)
    assert (plan.records_per_update, plan.updates) == (60, 1000)
    assert plan.micro_batch <= 8
    assert 0 <= plan.empty_rows < ranks * plan.accumulation + plan.micro_batch
  plan = resolve(ranks=7, global_batch_size=60)
  assert (plan.micro_batch, plan.accumulation, plan.empty_rows) == (5, 2, 10)
  assert "global batch 60 and 10 empty rows" in plan.lines()[0]
  assert "empty" not in resolve(global_batch_size=64).lines()[0]


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(ranks=16, global_batch_size=15), "15 records.*16 ranks"),
    (
      dict(global_batch_size=64, num_accumulation_steps=3),
      "64.*num_accumulation_steps=3|num_accumulation_steps=3.*64",
    ),
    (dict(records=15), "15 records.*global batch of 16"),
    (dict(num_warmup_steps=1001), "1001.*1000"),
    (dict(num_warmup_steps=-1), "-1"),
    (dict(num_decay_steps=901), "=100 .*num_decay_steps=901.*=1000"),
  ],
)
def test_impossible_plans_are_refused_with_their_numbers(changes, words):
  with pytest.raises(UserError, match=words):
    resolve(**changes)


def test_steps_divided_by_very_many_are_still_one():
  plan = resolve(
    ranks=10**8, records=None, num_train_steps=7, num_warmup_steps=0
  )
  assert plan.updates == 1


def test_progress_is_that_of_the_stage_or_of_the_cooldown():
  """What a share of masks that moves goes by; `updates` ends the stage."""
  stage = training_plan.Stage(number=1, first_update=900)
  for first, change in (
    (0, {}), (900, {"stage": stage}), (800, {"cooldown_start": 800})
  ):  # fmt: skip
    plan = dataclasses.replace(resolve(ranks=1), **change)
    assert [plan.progress(n) for n in (first, 999)] == [0.0, 1.0]
