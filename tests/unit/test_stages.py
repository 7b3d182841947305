"""--stages: equal to stages by hand, and to a run that is never killed."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import runs
from finetuning_runs import command_line
from samples import (
  NO_DROPOUT,
  TINY,
  change_manifest,
  write_config,
  write_packed,
  write_records,
)

import run_pretraining
from checkpoints import checkpoint_files, description, metrics
from common import input_files
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import record_shapes, stages, training_plan
from config.bert_config import BertConfig
from config.pretraining import PretrainingConfig
from gradients.distributed import Comm
from interop import run_settings
from records import masking, record_files
from records.masking import MaskConfig
from training import dry_run, plans, train_loop, training_run
from training.divergence import DivergedError
from training.signals import Budget

TRAINING_STATE = "training_state/"


@pytest.fixture
def other_records(tmp_path):
  return write_records(tmp_path / "other.tfrecord", 50, seed=9)


def staged(*items, **changes):
  """Settings of a run of constant rate with these stages."""
  settings = dict(
    lr_schedule="constant", num_warmup_steps=0, train_batch_size=8,
    num_train_steps=PretrainingConfig.num_train_steps,
    save_checkpoints_steps=1, keep_checkpoints=50,
  )  # fmt: skip
  return {**settings, "stages": checked(*items), **changes}


def checked(*items):
  return tuple(stages.read_item(item, "a stage") for item in items)


def values_of(path):
  found = checkpoint_files.Checkpoint(str(path))
  names = (n for n in found.shapes if not n.startswith(TRAINING_STATE))
  return {name: found[name] for name in names}


def assert_same_checkpoint(one, other, step):
  name = f"model.ckpt-{step}"
  runs.assert_equal(values_of(one / name), values_of(other / name))


def assert_same_reports(run, whole):
  for key in ("global_step", "loss", "learning_rate", "examples", "grad_norm"):
    assert runs.metrics(run, key) == runs.metrics(whole, key), key


def by_hand(config, before):
  """Variables after four updates in the graph of `config`, from `before`."""
  with training_run.graph(config):
    task = run_pretraining.training_task(config, Comm())
    session = tf.Session(config=training_run.session_config(config, Comm()))
    session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )
    variables = {v.op.name: v for v in tf.global_variables()}
    for name in variables.keys() & before.keys():
      variables[name].load(before[name], session)
    task.batches.start(session, 0)
    for _ in range(4):
      for _ in range(task.plan.accumulation - 1):
        session.run(task.ops.accumulate)
      session.run(task.ops.fetches())
    made = session.run(variables)
  return {n: v for n, v in made.items() if not n.startswith(TRAINING_STATE)}


def test_staged_equals_the_stages_by_hand(tiny_run, other_records, tmp_path):
  """A run of the first, and its variables in the graph of the second."""
  run, hand = tmp_path / "run", tmp_path / "hand"
  one = {"num_train_steps": 3, "global_batch_size": 12}
  two = {"num_train_steps": 4, "global_batch_size": 20, "learning_rate": 2e-3}
  runs.pretrain(
    tiny_run, run, **staged(one, two | {"input_file": other_records})
  )
  first = staged(**one, stages=None)
  runs.pretrain(tiny_run, hand, **first)
  assert_same_checkpoint(run, hand, 3)
  config = runs.config((tiny_run[0], other_records), hand, **first | two)
  made = by_hand(config, values_of(hand / "model.ckpt-3"))
  runs.assert_equal(values_of(run / "model.ckpt-7"), made)
  assert runs.metrics(run, "examples")[-1] == 3 * 12 + 4 * 20
  files = [other_records, *input_files.expand_patterns(tiny_run[1])]
  assert description.read(str(run)).record_files == files


@pytest.fixture
def longer_stage(tmp_path):
  """Packed records with masks that are drawn, then longer ones: config, items.

  Lengths are those of manifests.
  """
  items = []
  for s, updates, masked in ((32, 3, "0.4:0.2"), (64, 4, "0.3:0.1")):
    (tmp_path / str(s)).mkdir()
    files, batch = write_packed(tmp_path / str(s), dynamic=True, s=s)
    items.append(
      {
        "num_train_steps": updates, "input_file": files,
        "global_batch_size": batch * s // 64, "masked_lm_prob": masked,
      }
    )  # fmt: skip
  config = write_config(tmp_path / "config.json", num_hidden_layers=1)
  return (config, items[0]["input_file"]), items


def masks_apart(items):
  """Each item without its share of masks, and that share."""
  for item in items:
    others = {**item}
    yield others, masking.shares(others.pop("masked_lm_prob"))


LENGTHS = dict(max_seq_length=None, max_predictions_per_seq=None)


def test_a_stage_of_longer_records_equals_it_by_hand(longer_stage, tmp_path):
  """Also when killed in it."""
  tiny_run, items = longer_stage
  run, hand, killed = (tmp_path / name for name in ("run", "hand", "killed"))
  settings = staged(*items, **LENGTHS)
  runs.pretrain(tiny_run, run, **settings)
  with runs.ended_after(5):
    runs.pretrain(tiny_run, killed, **settings)
  result = runs.pretrain(tiny_run, killed, **settings)
  assert result["training"]["updates"] == 2
  assert_same_reports(killed, run)
  assert_same_checkpoint(killed, run, 7)
  about = description.read(str(run))
  for step, length in ((3, 32), (7, 64), (None, 64)):
    _, manifest = dataclasses.replace(about, step=step).manifest()
    assert manifest.max_seq_length == length

  first, second = (
    staged(**item, **LENGTHS, stages=None, masks=MaskConfig(share))
    for item, share in masks_apart(items)
  )
  runs.pretrain(tiny_run, hand, **first)
  assert_same_checkpoint(run, hand, 3)
  before = values_of(hand / "model.ckpt-3")
  made = by_hand(runs.config(tiny_run, hand, **second), before)
  runs.assert_equal(values_of(run / "model.ckpt-7"), made)
  places = "bert/embeddings/position_embeddings/adam_m"
  assert not before[places][32:].any() and made[places][32:].any()


def test_a_run_continues_at_another_length_and_theta(longer_stage, tmp_path):
  """As modern encoders do: the weights stay, and positions turn more slowly."""
  _, items = longer_stage
  modern = dict(
    num_hidden_layers=1, position_type="rotary",
    pre_layer_norm=True, gated=True,
  )  # fmt: skip
  tables, start = [], {}
  for (item, _), theta in zip(masks_apart(items), (1e4, 1.6e5), strict=True):
    config = write_config(
      tmp_path / f"{theta}.json", global_rope_theta=theta, **modern
    )
    run = tmp_path / str(theta)
    settings = staged(**item, **LENGTHS, **start, stages=None)
    masks = MaskConfig(masking.shares("0.2"))
    runs.pretrain((config, item["input_file"]), run, masks=masks, **settings)
    assert description.read(str(run)).bert.global_rope_theta == theta
    newest = f"{run}/model.ckpt-{item['num_train_steps']}"
    tables.append(values_of(newest)["bert/embeddings/word_embeddings"])
    start = {"init_checkpoint": newest}
  moved = np.abs(tables[1] - tables[0]).max()
  assert 0 < moved < 0.5 * np.abs(tables[0]).max()


def three_stages(other_records):
  """A batch that grows, the same data on, other data."""
  return staged(
    {"num_train_steps": 4, "global_batch_size": [6, 18]},
    {
      "num_train_steps": 3, "global_batch_size": 24,
      "hidden_dropout_prob": 0.2,
    },
    {"num_train_steps": 3, "input_file": other_records,
     "global_batch_size": [8, 16, 1]},
    lr_schedule="linear", num_warmup_steps=2, dropout=0.1,
    initial_weights="informed", sampled_softmax=60, save_checkpoints_steps=2,
  )  # fmt: skip


def test_killed_in_any_stage_equals_never_killed(
  tiny_run, other_records, tmp_path
):
  """Also while a batch grows, and with updates that are made again."""
  settings = three_stages(other_records)
  whole, run = tmp_path / "whole", tmp_path / "run"
  runs.pretrain(tiny_run, whole, **settings)
  assert runs.metrics(whole, "examples") == [
    6, 18, 30, 48, 72, 96, 120, 128, 144, 160
  ]  # fmt: skip
  rates = 1e-3 * (1 - np.arange(2, 10) / 10)  # one schedule over all
  np.testing.assert_allclose(
    runs.metrics(whole, "learning_rate")[2:], rates, rtol=1e-5
  )
  # The second stage continues in the data of the first.
  for step, stage, seen in ((7, [1, 4, 48, 48], 120), (10, [2, 7, 0, 120], 40)):
    state = checkpoint_files.Checkpoint(f"{whole}/model.ckpt-{step}")
    assert state["training_state/stage"].tolist() == stage
    assert state["training_state/samples_seen"] == seen

  # In each stage, and between them; what is saved by then.
  for last, saved in ((3, 2), (4, 4), (6, 6), (7, 7), (9, 8)):
    with runs.ended_after(last):
      runs.pretrain(tiny_run, run, **settings)
    steps = checkpoint_files.CheckpointFiles(str(run), 50).steps()
    assert steps[0] == saved
  result = runs.pretrain(tiny_run, run, **settings)
  assert result["training"]["updates"] == 2
  assert runs.metrics(run, "global_step") == list(range(1, 11))
  assert_same_reports(run, whole)
  for step in (4, 7, 10):
    assert_same_checkpoint(run, whole, step)


def test_stages_that_have_begun_stay(tiny_run, tmp_path):
  items = [{"num_train_steps": n, "global_batch_size": 12} for n in (2, 2)]
  runs.pretrain(tiny_run, tmp_path / "run", **staged(*items))
  items[1]["hidden_dropout_prob"] = 0.5
  with pytest.raises(UserError, match=r"have begun .* -> .*0\.5"):
    runs.pretrain(tiny_run, tmp_path / "run", **staged(*items))
  del items[1]["hidden_dropout_prob"]
  items[1]["learning_rate"] = 1e-4  # as after one that was too high
  more = staged(*items, {"num_train_steps": 1, "global_batch_size": 6})
  result = runs.pretrain(tiny_run, tmp_path / "run", **more)
  assert result["training"]["global_step"] == 5
  with pytest.raises(UserError, match="stages that have begun .* -> "):
    runs.pretrain(tiny_run, tmp_path / "run", **staged(items[0]))
  plain = staged(stages=None, num_train_steps=1, global_batch_size=12)
  with pytest.raises(UserError, match="stages given -> none: give the former"):
    runs.pretrain(tiny_run, tmp_path / "run", **plain)


def test_a_stage_has_masks_of_its_own(tiny_run, tmp_path):
  config = runs.config(
    tiny_run, tmp_path, masks=MaskConfig(mask_replace_prob=0.7),
    **staged(
      {
        "num_train_steps": 1, "masked_lm_prob": "0.3:0.2",
        "do_whole_word_mask": True, "random_replace_prob": 0.2,
      },
      {"num_train_steps": 1},
    ),
  )  # fmt: skip
  first, second = stages.configs(config)
  assert first.masks == MaskConfig(
    masked_lm_prob=(0.3, 0.2), do_whole_word_mask=True, mask_replace_prob=0.7,
    random_replace_prob=0.2,
  )  # fmt: skip
  assert second.masks == config.masks


def test_tokens_of_a_record_are_those_of_all_manifests(packed_run, tmp_path):
  """A stage that ends by tokens reads records of several data sets."""
  (_, files), _ = packed_run
  # The same records as another data set.
  more = shutil.copytree(tmp_path, tmp_path / "more")
  both = f"{files},{more}/*.tfrecord"
  tokens = lambda files: record_files.find(files).real_tokens()
  assert tokens(files) is None  # it does not say
  _, made = change_manifest(tmp_path)
  for folder, count in ((tmp_path, 2400), (more, 1200)):
    change_manifest(folder, counts={**made.counts, "real_tokens": count})
  assert [tokens(files), tokens(both)] == [20, 15]


@pytest.mark.parametrize(
  "shares, late, tenths",
  [
    ((0.6, 0.4), None, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
    # One of 24 seconds ends the first stage 12 late; the next has less time.
    ((0.5, 0.5), 18.0, [10, 9, 8, 7, 3, 3, 2, 1]),
  ],
)
def test_stages_by_shares_of_the_time(
  dynamic_run, tmp_path, monkeypatch, shares, late, tenths
):
  """Each update takes a tenth of it, but the first of a start, which compiles.

  The one rate falls in both. A run keeps its time, also where it was killed
  before a stage's first save.
  """

  def lap(budget):
    if budget._last is None:
      return 0.0
    return 24.0 if budget.passed == late else 6.0

  monkeypatch.setattr(Budget, "lap", lap)
  tiny_run, batch = dynamic_run
  first, second = ({"time_share": share} for share in shares)
  settings = staged(
    {**first, "masked_lm_prob": "0.3:0.2"}, second,
    lr_schedule="linear", max_train_minutes=1.0, num_train_steps=1000,
    global_batch_size=batch, max_predictions_per_seq=None,
  )  # fmt: skip
  train = lambda **changes: runs.pretrain(
    tiny_run, tmp_path, **{**settings, **changes}
  )["training"]
  assert train()["out_of_time"]
  rates = runs.metrics(tmp_path, "learning_rate")
  np.testing.assert_allclose(rates, 1e-4 * np.array(tenths), 1e-3)
  if late:
    return
  assert train()["updates"] == 0
  stage = runs.read_json(tmp_path, "run.json")["runs"][-1]["plan"]["stage"]
  runs.change_run(tmp_path, plan={"stage": {**stage, "number": 5}})
  with pytest.raises(UserError, match="--max_train_minutes 1.0 -> 2.0: give"):
    train(max_train_minutes=2.0)


def first_plan(tiny_run, *items, **changes):
  """The plan of the first stage."""
  config = runs.config(tiny_run, "folder", **staged(*items, **changes))

  def plan_of(stage):
    stage = dataclasses.replace(stage, num_warmup_steps=0)
    return plans.of_run(stage, None, 1), 32

  begun = training_plan.Stage()
  return stages.Stages(config, begun, plan_of).start(begun).plan


@pytest.mark.parametrize("stated, want", [(None, 10), (0, 0), (25, 25)])
def test_the_default_warmup_is_a_tenth_of_all_stages(tiny_run, stated, want):
  items = {"num_train_steps": 30}, {"num_train_steps": 70}
  plan = first_plan(tiny_run, *items, num_warmup_steps=stated)
  assert plan.warmup_updates == want


def rotary(theta):
  """A BERT config with rotary positions of this wavelength."""
  keys = {**TINY, **NO_DROPOUT, "position_type": "rotary"}
  return BertConfig.from_dict({**keys, "global_rope_theta": theta})


TIMED = {"num_train_steps": None, "time_share": 1}
MINUTE = {"max_train_minutes": 1.0}
TURNED = {"bert": rotary(500.0)}
MOVING = {"masks": MaskConfig(masked_lm_prob=(0.3, 0.15))}


@pytest.mark.parametrize(
  "item, changes, words",
  [
    ({"num_train_steps": None}, {}, "must have one of num_train_"),
    ({"seed": 3}, {}, "seed.*can change no flags but"),
    ({"num_train_steps": "1"}, {}, "num_train_steps is '1', not an integer"),
    ({"num_train_steps": 0}, {}, "0.* which is positive"),
    ({"global_batch_size": [8, 12]}, {}, r"\[8, 12\]: .* grows in multiples"),
    ({}, MINUTE, "choose one of the two"),
    ({**TIMED, "time_share": 0.7}, MINUTE, "all stages is 0.7"),
    ({**TIMED, "global_batch_size": [6, 12]}, MINUTE, "in so many updates"),
    ({}, {"num_warmup_steps": 10}, "than the 9 updates"),
    ({}, {"global_batch_size": None}, "needs --global_b"),
    ({}, {"num_train_steps": 7}, "no --num_train_steps"),
    ({}, MOVING, "--masked_lm_prob that moves"),
    ({"input_file": "x"}, {"do_eval": True}, "--eval_input_file, because"),
    ({"hidden_dropout_prob": 2.0}, {}, "stage 1: .*hidden_dropout_prob"),
    ({"global_rope_theta": 9.0}, {}, "needs rotary positions"),
    ({"global_rope_theta": 9.0}, TURNED, "theta in the last stage"),
    ({"global_rope_theta": -1.0}, TURNED, "global_rope_theta is -1.0, not > 0"),
  ],
)
def test_stages_that_cannot_be(tiny_run, tmp_path, item, changes, words):
  item = {"num_train_steps": 9, **item}
  given = {name: value for name, value in item.items() if value is not None}
  # The last stage has no wavelength of its own, unless that is what is wrong.
  items = [given] * (2 if item.get("global_rope_theta") == 9.0 else 1)
  if item.get("global_rope_theta") == -1.0:
    items.append({"num_train_steps": 9})
  with pytest.raises(UserError, match=words):
    runs.pretrain(tiny_run, tmp_path / "run", **staged(*items, **changes))


def test_a_file_that_is_no_list_of_stages(tmp_path):
  path = tmp_path / "stages.json"
  with pytest.raises(UserError, match="No such file"):
    stages.read(str(path))
  for text, words in (
    ("{}", "must be a list"),
    ("[1]", "stage 1: it is 1, not an object"),
  ):
    path.write_text(text)
    with pytest.raises(UserError, match=f"--stages=.*{words}"):
      stages.read(str(path))
  path.write_text(json.dumps([{"time_share": 1, "masked_lm_prob": 0.3}]))
  assert stages.read(str(path)) == (
    {"time_share": 1.0, "masked_lm_prob": "0.3"},
  )


def test_tokens_end_a_stage(tiny_run):
  """Records without a manifest count as full: 32 tokens."""

  def sizes(records, batch):
    plans = []
    for tokens in (32 * records - 1, 32 * records):
      item = {"num_train_tokens": tokens, "global_batch_size": batch}
      plans.append(list(first_plan(tiny_run, item).sizes()))
    assert plans[0] == plans[1]
    return [size for updates, size in plans[0] for _ in range(updates)]

  assert sizes(36, 12) == [12] * 3
  # Two updates of 4 and 8 records, then full ones of 12.
  assert sizes(36, [4, 12, 2]) == [4, 8, 12, 12]
  # 8, 16 and then 20 examples: the sizes that updates really have.
  uneven = sizes(300, [8, 20])
  assert {*uneven} <= {8, 16, 20} and uneven[0] == 8
  assert sum(uneven[:-1]) < 300 <= sum(uneven) < 300 + 20


def test_a_stage_that_has_ended_needs_no_records(
  tiny_run, other_records, tmp_path
):
  """Nor must its batch suit the ranks of those after it."""
  first = write_records(tmp_path / "first.tfrecord", 50)
  given = staged(
    {"num_train_steps": 2, "input_file": first, "global_batch_size": 12},
    {"num_train_steps": 3, "input_file": other_records,
     "global_batch_size": 24},
  )  # fmt: skip
  with runs.ended_after(3):
    runs.pretrain(tiny_run, tmp_path / "run", **given)
  os.remove(first)
  path = tmp_path / "stages.json"
  path.write_text(json.dumps(given["stages"]))
  values = command_line(
    PretrainingConfig, bert_config_file=tiny_run[0], stages=str(path),
    do_train=True, output_dir=f"{tmp_path}/run",
  )  # fmt: skip
  config, _ = run_settings.configured(
    PretrainingConfig, *PretrainingConfig.read_flags(values),
    PretrainingConfig.check_files,
  )  # fmt: skip
  assert config.input_file == other_records
  given |= {"do_eval": True, "eval_input_file": other_records}
  result = runs.pretrain(tiny_run, tmp_path / "run", **given)
  assert result["training"]["global_step"] == 5
  assert runs.metrics(tmp_path / "run", "examples") == [12, 24, 48, 72, 96]
  with pytest.raises(UserError, match="stage 1: .*first.tfrecord"):
    runs.pretrain(tiny_run, tmp_path / "new", **given)


def test_slices_need_suit_no_stage_that_has_ended(tiny_run, tmp_path):
  given = staged(
    {"num_train_steps": 2, "sampled_softmax": 8},
    {"num_train_steps": 3, "sampled_softmax": 0},
  )
  config = runs.config(tiny_run, tmp_path, tensor_parallel=2, **given)
  with pytest.raises(UserError, match="stage 1: .*sampled_softmax"):
    stages.configs(config, 0)
  assert [c.tensor_parallel for c in stages.configs(config, 1)] == [1, 2]


def test_a_dry_run_plans_no_stage_after_the_last_update(
  tiny_run, tmp_path, monkeypatch, capsys
):
  """Nor does it need files."""
  config = runs.config(
    tiny_run, tmp_path, dry_run=True, do_eval=True, input_file=None,
    **staged(
      {"time_share": 0.2}, {"time_share": 0.3}, {"time_share": 0.5},
      max_train_minutes=600.0, num_train_steps=10, global_batch_size=12,
    ),
  )  # fmt: skip
  planned = []

  def tell_needs(build, start, ranks):
    planned.append(start.plan.stage.number)
    return 5 * len(planned)

  monkeypatch.setattr(dry_run, "tell_needs", tell_needs)
  dry_run.run(config, [], run_pretraining.training_step)
  assert planned == [0, 1]
  told = "stage 2 would be the last: --num_train_steps=10 end there"
  assert told in capsys.readouterr().err


def test_held_out_records_have_lengths_of_their_own(tiny_run, tmp_path):
  """Without a manifest they say it themselves, whatever the stage's are."""
  longer = write_records(tmp_path / "longer.tfrecord", 30, s=64, p=9)
  given = {"max_seq_length": 64, "max_predictions_per_seq": 9}
  config = runs.config(
    tiny_run, tmp_path, **staged({"num_train_steps": 1, **given})
  )
  (stage,) = stages.configs(config)
  assert record_shapes.of_patterns(longer, stage).max_predictions_per_seq == 9
  held_out = record_shapes.of_patterns(tiny_run[1], stage, training=False)
  assert held_out.max_seq_length == 32
  assert held_out.max_predictions_per_seq == 5


def test_dropout_is_the_stages_the_flags_or_the_configs(tiny_run, tmp_path):
  """The run folder keeps the config's, which a resumed run reads."""
  flags = staged({"num_train_steps": 2}, {"num_train_steps": 2}, dropout=0.1)
  flags["stages"][1]["hidden_dropout_prob"] = 0.0
  base = runs.config(tiny_run, tmp_path, hidden_dropout_prob=0.3, **flags)
  configs = base, *stages.configs(base)
  found = [
    (bert.hidden_dropout_prob, bert.attention_probs_dropout_prob)
    for bert in (config.trained_bert for config in configs)
  ]
  assert found == [(0.3, 0.1), (0.3, 0.1), (0.0, 0.1)]
  for config in configs:
    assert config.as_dict()["bert"]["hidden_dropout_prob"] == 0.1


def test_a_stage_has_rotary_positions_of_its_own(tiny_run, tmp_path):
  """Its updates and evaluation are those of a model with its wavelength."""
  run, plain, killed = (tmp_path / name for name in ("run", "plain", "killed"))
  evaluated = {"do_eval": True, "eval_input_file": tiny_run[1]}
  stage = {"num_train_steps": 3, "global_batch_size": 8}
  items = {**stage, "global_rope_theta": 7.0}, stage
  settings = staged(*items, bert=rotary(500.0), **evaluated)
  whole = runs.pretrain(tiny_run, run, **settings)
  short = runs.pretrain(
    tiny_run, plain, **staged(stage, bert=rotary(7.0), **evaluated)
  )
  assert_same_checkpoint(run, plain, 3)
  evaluations = metrics.read_jsonl(run / "eval_metrics.jsonl")
  losses = [evaluation["masked_lm_loss"] for evaluation in evaluations]
  assert losses[-2] == short["evaluation"]["masked_lm_loss"]
  assert runs.read_json(run, "bert_config.json")["global_rope_theta"] == 500
  # The model is the last stage's.
  alone = {**settings, "do_train": False, "stages": None}
  again = runs.pretrain(tiny_run, run, **alone)
  assert again["evaluation"] == whole["evaluation"]

  settings = staged(*items, bert=rotary(500.0))
  with runs.ended_after(2):
    runs.pretrain(tiny_run, killed, **settings)
  runs.pretrain(tiny_run, killed, **settings)
  assert_same_checkpoint(killed, run, 6)


@pytest.fixture
def third_is_skipped(monkeypatch):
  run_update = train_loop.run_update

  def skipped_third(run, number, *rest):
    update, verdict = run_update(run, number, *rest)
    bad = {"skipped": number == 3, "nonfinite_variable": 0}
    return {**update, **bad}, verdict

  monkeypatch.setattr(train_loop, "run_update", skipped_third)


@pytest.mark.parametrize("stop", [5, 1])
def test_a_stages_last_evaluation_does_not_end_a_run_early(
  tiny_run, tmp_path, stop
):
  """Of three stages; the second's are no better, and nobody asks at its end."""
  settings = staged(
    *[{"num_train_steps": n} for n in (1, 3, 2)], do_eval=True,
    learning_rate=1e-30, eval_every_steps=3, early_stopping_evaluations=1,
    save_checkpoints_steps=100,
  )  # fmt: skip
  with runs.ended_after(stop):
    runs.pretrain(tiny_run, tmp_path, **settings)
  training = runs.pretrain(tiny_run, tmp_path, **settings)["training"]
  assert training["global_step"] == 6 and not training["stopped_early"]


@pytest.mark.usefixtures("third_is_skipped")
@pytest.mark.parametrize("stages", [(3, 4), (1, 2)])
def test_a_bad_update_at_a_stages_end_ends_the_run(tiny_run, tmp_path, stages):
  """What comes next would begin without the updates since the last save."""
  items = [{"num_train_steps": n, "global_batch_size": 12} for n in stages]
  with pytest.raises(DivergedError, match="update 3: gradients are not fin"):
    runs.pretrain(tiny_run, tmp_path, **staged(*items))
  assert (tmp_path / "model.ckpt-2.index").exists()


@pytest.mark.parametrize("own", [False, True])
def test_the_rate_to_lower_is_that_which_counts(tiny_run, tmp_path, own):
  """Of a stage with one of its own that is no flag."""
  item = {"num_train_steps": 30, "global_batch_size": 12}
  given = {"learning_rate": 1e38}
  items = [{**item, **(given if own else {})}]
  with pytest.raises(DivergedError) as error:
    runs.pretrain(tiny_run, tmp_path, **staged(*items, **given))
  how = "with a lower learning rate: give the same command with "
  how += "--learning_rate=5e+37"
  if own:
    how = 'give stage 1 of --stages "learning_rate": 5e+37: '
    how += "give the same command"
  assert str(error.value).endswith(f"from there {how}")


@pytest.mark.usefixtures("third_is_skipped")
def test_the_time_does_not_end_with_a_bad_update(
  tiny_run, tmp_path, monkeypatch
):
  runs.updates_take(monkeypatch, 30.0)
  settings = dict(
    max_train_minutes=1.0, num_train_steps=100, save_checkpoints_steps=0
  )
  training = runs.pretrain(tiny_run, tmp_path, **settings)["training"]
  assert training["out_of_time"] and training["global_step"] == 4
