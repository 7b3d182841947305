"""Whole runs in one process: contracts, resume, errors, the graph."""

import dataclasses
import functools
import json
import os
import re
import shutil
import types

import numpy as np
import pytest
import reference_numpy
import resuming
import runs
import trained
from finetuning_runs import command_line
from samples import (
  change_manifest,
  encode_example,
  fake_records,
  feature_values,
  write_config,
  write_packed,
  write_records,
)

import input_pipeline
import modeling
import run_pretraining
from checkpoints import (
  agreement,
  checkpoint_files,
  description,
  metrics,
  run_folder,
  run_start,
)
from checkpoints.checkpoint_files import CheckpointError, CheckpointFiles
from common import input_files, json_files
from common.errors import UserError
from common.files import file_sha256
from common.tensorflow_v1 import tf
from config import lr_schedule, record_shapes
from config.pretraining import PretrainingConfig
from gradients.distributed import Comm
from interop import model_source, run_settings
from records import (
  data_set,
  record_files,
  record_order,
  record_shape,
  tfrecord,
)
from records.masking import MaskConfig
from training import evaluation, plans, resume, training_run


def test_micro_batches_equal_one_big_batch(tiny_run, tmp_path):
  """Unequal numbers of masked tokens: a mean of means would differ."""
  one, six = tmp_path / "one", tmp_path / "six"
  runs.trained(tiny_run, one, do_eval=True)
  runs.pretrain(tiny_run, six, train_batch_size=4)
  losses = runs.metrics(one)
  assert len(losses) == 20 and losses[0] > losses[-1]
  np.testing.assert_allclose(runs.metrics(six), losses, rtol=1e-5)
  for key in ("grad_norm", "masked_lm_accuracy", "examples"):
    np.testing.assert_allclose(
      runs.metrics(six, key), runs.metrics(one, key), rtol=1e-4, err_msg=key
    )


@pytest.mark.parametrize(
  "stop, block", [(7, 0), pytest.param(10, 1, marks=pytest.mark.slow)]
)
def test_resumed_equals_never_stopped(dynamic_run, tmp_path, stop, block):
  """Bit for bit, over an epoch's end (120 records, 24 each).

  With dropout, micro-batches, packed records and masks drawn on reading.
  """
  tiny_run, global_batch = dynamic_run
  masks = MaskConfig(masked_lm_prob=(0.3, 0.1), do_whole_word_mask=False)
  _, resumed = resuming.compare(
    tiny_run, tmp_path, [resuming.killed_after(stop + 2)], dropout=0.1,
    train_batch_size=12, global_batch_size=global_batch, masks=masks,
    max_predictions_per_seq=None, save_checkpoints_steps=stop,
    shuffle_block_records=block,  # of 1: two windows an epoch
  )  # fmt: skip
  assert runs.metrics(resumed, "global_step") == list(range(1, 21))
  start = runs.read_json(resumed, "run.json")["runs"][-1]
  assert start["first_update"] == stop


@pytest.mark.parametrize(
  "micro_batch, asked_at",
  [(8, 25), pytest.param(24, 7, marks=pytest.mark.slow)],
)
def test_stopped_by_a_signal_equals_never_stopped(
  tiny_run, tmp_path, capfd, micro_batch, asked_at
):
  """Between updates, and in the second of an update's three micro-batches."""
  whole, _ = resuming.compare(
    tiny_run, tmp_path, [resuming.signalled_at(asked_at)],
    keys=("loss", "loss_scale"), dropout=0.1, train_batch_size=micro_batch,
    precision="fp16", loss_scale=dict(loss_scale_window=5),
  )  # fmt: skip
  assert len(set(runs.metrics(whole, "loss_scale"))) > 2
  err = capfd.readouterr().err
  assert "SIGTERM: saving after this micro-batch, then stopping" in err
  assert "stopped as asked after update 8, saved: the same command" in err


@pytest.mark.parametrize(
  "vote, asked_at",
  [
    pytest.param("own_stop_vote", 9, marks=pytest.mark.slow),
    ("own_evaluation_vote", 19),
  ],
)
def test_an_evaluation_that_a_stop_prevents_is_made_when_resuming(
  tiny_run, tmp_path, vote, asked_at
):
  """Of 8 batches each, after 0, 5, 10, 15: one stop before, one in the third.

  A second resume makes none twice.
  """
  settings = dict(do_eval=True, eval_every_steps=5, eval_batch_size=16)
  runs.pretrain(tiny_run, tmp_path / "whole", **settings)
  folder = tmp_path / "stopped"
  result = resuming.run_with_signal(
    asked_at, vote, tiny_run, folder, **settings
  )
  assert result["training"]["stopped"]
  assert result["training"]["global_step"] == 10
  assert evaluated(folder) == [0, 5]
  result = resuming.run_with_signal(
    1, "own_stop_vote", tiny_run, folder, **settings
  )
  assert result["training"]["global_step"] == 12
  assert evaluated(folder) == [0, 5, 10]
  runs.pretrain(tiny_run, folder, **settings)
  assert evaluated(folder) == [0, 5, 10, 15, 20]
  for name in (metrics.METRICS_FILE, metrics.EVAL_METRICS_FILE):
    whole, resumed = (
      [
        (report["global_step"], report["masked_lm_loss"])
        for report in metrics.read_jsonl(str(f / name))
      ]
      for f in (tmp_path / "whole", folder)
    )
    assert resumed == whole


def evaluated(folder):
  path = str(folder / metrics.EVAL_METRICS_FILE)
  return [e["global_step"] for e in metrics.read_jsonl(path)]


def test_a_second_run_in_a_folder_is_refused(tiny_run, tmp_path):
  """It would write over the first one's files."""
  folder = tmp_path / "run"
  with (
    run_folder.locked(str(folder), Comm()),
    pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "),
  ):
    runs.pretrain(tiny_run, folder, num_train_steps=4)
  assert not folder.exists()
  with run_folder.locked(str(folder), Comm()):
    pass


def test_an_elastic_world_takes_over_from_a_stopped_rank(tmp_path, monkeypatch):
  class Elastic(Comm):
    elastic = True

  monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1234")
  with (
    run_folder.locked(str(tmp_path), Elastic()),
    run_folder.locked(str(tmp_path), Elastic()),
  ):
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1235")
    in_use = pytest.raises(UserError, match="is in use by")
    with in_use, run_folder.locked(str(tmp_path), Elastic()):
      pass


def test_masks_are_decided_when_training(dynamic_run, tmp_path):
  """The records are packed, were made for 10% and at most 5 of 32 tokens."""
  tiny_run, _ = dynamic_run

  def shape(training=True, **flags):
    config = runs.config(
      tiny_run, tmp_path, max_seq_length=None, max_predictions_per_seq=None,
      masks=MaskConfig(**flags),
    )  # fmt: skip
    return record_shapes.of_patterns(config.input_file, config, training)

  made = shape()
  assert made.masks.masked_lm_prob == made.last_prob == 0.1
  assert made.max_predictions_per_seq == 5 and made.whole_words
  more = shape(
    masked_lm_prob=(0.1, 0.3), do_whole_word_mask=False, mask_replace_prob=0.5
  )
  assert more.mask_probs(np.array([0, 0.5, 1])) == pytest.approx(
    [0.1, 0.2, 0.3]
  )
  assert more.max_predictions_per_seq == more.masks.max_predictions_per_seq
  assert more.max_predictions_per_seq == int(32 * 0.3 + 3 * 0.5)
  assert more.knows_words and not more.whole_words
  assert more.masks.mask_replace_prob == 0.5
  assert shape(masked_lm_prob=(0.1, 0.1)).max_predictions_per_seq == 5
  masks = MaskConfig((0.3, 0.3))
  config = runs.config(tiny_run, tmp_path, max_seq_length=None, masks=masks)
  with pytest.raises(UserError, match=r"=5: .* may need 11 masked tokens"):
    record_shapes.of_patterns(tiny_run[1], config)
  # An evaluation's do not depend on the training's.
  evaluation = shape(training=False)
  assert evaluation.masks.masked_lm_prob == 0.15
  assert evaluation == shape(False, masked_lm_prob=(0.4, 0.4))
  change_manifest(tmp_path, settings={"do_whole_word_mask": False})
  with pytest.raises(UserError, match="do not say where words begin"):
    shape(do_whole_word_mask=True)


def test_masked_lm_alone(tiny_run, tmp_path):
  """Records of pairs serve, too; the model has no part that it does not need.

  A run keeps its objective, and finds it in its folder.
  """
  run = tmp_path / "run"
  alone = dict(objective="mlm", num_train_steps=6, do_eval=True)
  runs.pretrain(tiny_run, run, eval_every_steps=3, **alone)
  report = metrics.read_jsonl(str(run / metrics.METRICS_FILE))[-1]
  assert report["loss"] == report["masked_lm_loss"]
  assert "next_sentence_loss" not in report
  results = runs.read_json(run, "eval_results.json")
  assert results["masked_lm_loss"] > 0 and "next_sentence_loss" not in results
  shapes = checkpoint_files.Checkpoint(f"{run}/model.ckpt-6").shapes
  assert not any("pooler" in n or "seq_relationship" in n for n in shapes)
  best = metrics.best_evaluation(str(run), 6, metrics.BEST_BY)
  assert f"{run}/model.ckpt-{best}" == model_source.find(str(run)).path

  def settled(folder):
    config, _ = settled_as(tiny_run, folder)
    return config.objective, config.segment_ids

  with pytest.raises(UserError, match="--segment_ids false -> true: its"):
    runs.pretrain(tiny_run, run, **alone, segment_ids=True)
  assert settled(run) == ("mlm", None)
  runs.change_run(run, segment_ids=True)
  assert settled(run) == ("mlm", True)
  assert settled(tmp_path / "other")[0] == "mlm_nsp"


# Objective and segment ids of a folder's run; flags; what a run from there has.
LEARNED = [
  ("mlm", None, dict(do_eval=True), ("mlm", False)),
  ("mlm", None, dict(do_eval=True, segment_ids=True),
   "--segment_ids false -> true: its model"),
  # The records' objective, which has segments.
  ("mlm", None, dict(do_train=True), ("mlm_nsp", None)),
  ("mlm_nsp", False, dict(do_train=True), ("mlm_nsp", False)),
  ("mlm_nsp", False, dict(do_eval=True), ("mlm_nsp", False)),
  ("mlm_nsp", True, dict(do_eval=True, objective="mlm"), ("mlm", True)),
  ("mlm_nsp", True, dict(do_eval=True, segment_ids=False),
   "--segment_ids true -> false: its model"),
  # A dry run plans a training.
  ("mlm_nsp", True, dict(dry_run=True, segment_ids=False), ("mlm_nsp", False)),
]  # fmt: skip


def begun_run(folder, **flags):
  """A folder as of a run with these flags and one update, but without it."""
  folder.mkdir(exist_ok=True)
  said = {"runs": [{"flags": flags, "plan": {"updates": 1}}]}
  (folder / "run.json").write_text(json.dumps(said))
  (folder / "model.ckpt-1.index").touch()


@pytest.mark.parametrize("objective, segments, given, want", LEARNED)
def test_another_folders_model_keeps_what_it_learned(
  tiny_run, tmp_path, objective, segments, given, want
):
  """As --init_checkpoint, to evaluate it or to train on."""
  begun_run(tmp_path / "run", objective=objective, segment_ids=segments)

  def check():
    start = f"{tmp_path}/run/model.ckpt-1"
    given_to = {"do_train": False, "init_checkpoint": start, **given}
    config, _ = settled_as(tiny_run, tmp_path / "new", **given_to)
    assert (config.objective, config.segment_ids) == want

  if isinstance(want, tuple):
    return check()
  with pytest.raises(UserError, match=want):
    check()
  # What a start without a checkpoint had says nothing of the model.
  (tmp_path / "new").mkdir()
  shutil.copy(tmp_path / "run" / "run.json", tmp_path / "new")
  with pytest.raises(UserError, match=want):
    check()


@pytest.mark.parametrize("segments", [None, False, True])
@pytest.mark.parametrize("objective", ["mlm", "mlm_nsp"])
def test_a_converted_model_is_as_its_run_folder(
  tiny_run, tmp_path, objective, segments
):
  """To evaluate and to train on: task.json says what run.json does."""
  run, there = tmp_path / "run", tmp_path / "there"
  begun_run(run, objective=objective, segment_ids=segments)
  _, task = model_source.pretraining_task(
    description.read(str(run)), model_source.Given()
  )
  there.mkdir()
  (there / "task.json").write_text(json.dumps(task))
  (there / "model.ckpt-1.index").touch()
  assert task["objective"] == objective

  def learned(folder, **given):
    try:
      given = {"do_train": False, **given}
      given["init_checkpoint"] = f"{folder}/model.ckpt-1"
      config, _ = settled_as(tiny_run, tmp_path / "new", **given)
    except UserError as e:
      return str(e).partition(": ")[2]
    used = agreement.uses_segments(config.objective, config.segment_ids)
    return config.objective, used

  for given in (
    {"do_eval": True},
    {"do_eval": True, "objective": "mlm"},
    {"do_eval": True, "segment_ids": False},
    {"do_eval": True, "segment_ids": True},
    {"do_train": True},
    {"do_train": True, "objective": "mlm"},
    {"do_train": True, "objective": "mlm", "segment_ids": True},
  ):
    assert learned(there, **given) == learned(run, **given), given


def test_published_models_are_evaluated_with_segment_ids(tiny_run, tmp_path):
  (tmp_path / "bert_model.ckpt.index").touch()
  start = f"{tmp_path}/bert_model.ckpt"
  settled = functools.partial(
    settled_as, tiny_run, tmp_path, objective="mlm", init_checkpoint=start
  )
  config, lines = settled(do_train=False, do_eval=True)
  assert "--segment_ids, as published models are" in lines
  assert config.segment_ids is True
  assert settled()[0].segment_ids is None


def test_a_checkpoint_of_the_present_folder_is_as_one_of_another(
  tiny_run, tmp_path, monkeypatch
):
  run = tmp_path / "run"
  begun_run(run, objective="mlm_nsp", segment_ids=False)
  shutil.copy(tiny_run[0], run / "bert_config.json")
  monkeypatch.chdir(run)
  config, lines = settled_flags(
    input_file=tiny_run[1], output_dir="../new", init_checkpoint="model.ckpt-1"
  )
  assert config.init_checkpoint == "./model.ckpt-1"
  assert config.segment_ids is False
  assert "--bert_config_file=./bert_config.json, as found" in lines


def test_another_folders_model_has_one_vocabulary(packed_run, tmp_path):
  """A next phase, or an evaluation, of records of other words is refused."""
  (tiny, _), run = packed_run, tmp_path / "run"
  runs.trained(tiny, run, num_train_steps=4)
  other = {"sha256": "0" * 64}
  _, before = change_manifest(tmp_path, tokenizer=other)
  start = dict(init_checkpoint=f"{run}/model.ckpt-4")
  for flags in ({}, {"do_train": False, "do_eval": True}):
    with pytest.raises(UserError, match="SHA-256 .* one vocabulary"):
      runs.pretrain(tiny, tmp_path / "new", **start, **flags)
  meant = runs.config(tiny, tmp_path / "new", **start, other_vocabulary=True)
  # A run that has a checkpoint does not read that folder any more. One that
  # was ended before its first save starts from it again.
  begun = tmp_path / "begun"
  shutil.copytree(run, begun)
  config = runs.config(tiny, begun, **start)
  tokenizer = dataclasses.asdict(before.tokenizer) | other
  data = {"files": [], "tokenizer": tokenizer}
  run_start.check_vocabulary(meant, data)
  with pytest.raises(UserError, match=f"{begun}: vocabulary "):
    run_start.check_vocabulary(config, data)
  for name in ("model.ckpt-4.json", "checkpoint"):
    (begun / name).unlink()
  with pytest.raises(UserError, match=f"{run}: vocabulary "):
    run_start.check_vocabulary(config, data)


def test_segment_ids_may_be_left_out(tiny_run, tmp_path):
  """The rows of their table are then the first alone, and it may have one."""
  bert = runs.config(tiny_run, tmp_path).bert
  few = dict(num_train_steps=1, num_warmup_steps=0, bert=bert)
  for given in (False, True):
    run = tmp_path / str(given)
    runs.pretrain(tiny_run, run, segment_ids=given, **few)
    saved = checkpoint_files.Checkpoint(f"{run}/model.ckpt-1")
    table = saved["bert/embeddings/token_type_embeddings/adam_m"]
    assert table[0].any() and table[1].any() == given
  bert.type_vocab_size = 1
  with pytest.raises(UserError, match="type_vocab_size=1 .*--nosegment_ids"):
    record_shapes.of_patterns(None, runs.config(tiny_run, tmp_path, **few))
  config = runs.config(tiny_run, tmp_path, segment_ids=False, **few)
  assert not record_shapes.of_patterns(None, config).segments


def test_records_without_pairs_teach_no_next_sentence(packed_run, tmp_path):
  (tiny, _), run = packed_run, tmp_path / "run"
  change_manifest(tmp_path, settings={"objective": "mlm"})
  with pytest.raises(data_set.DataError, match="have no pairs of segments"):
    runs.pretrain(tiny, run, segment_ids=True)
  runs.pretrain(tiny, run, num_train_steps=1, num_warmup_steps=0)
  (report,) = metrics.read_jsonl(str(run / metrics.METRICS_FILE))
  assert report["loss"] > 0 and "next_sentence_loss" not in report


def test_records_of_two_kinds_need_an_objective(packed_run, tmp_path):
  (tiny, files), _ = packed_run
  shutil.copytree(tmp_path, tmp_path / "more")
  change_manifest(tmp_path / "more", settings={"objective": "mlm"})
  given = dict(
    bert_config_file=tiny, output_dir=f"{tmp_path}/run",
    input_file=f"{files},{tmp_path}/more/*.tfrecord",
  )  # fmt: skip
  with pytest.raises(UserError, match="for mlm.*: give records of one kind"):
    settled_flags(**given)
  assert settled_flags(objective="mlm", **given)[0].objective == "mlm"


def test_drawn_masks_have_room_for_every_data_set(dynamic_run, tmp_path):
  """Whichever file is the first."""
  (_, files), _ = dynamic_run
  shutil.copytree(tmp_path, tmp_path / "more")
  change_manifest(tmp_path, max_predictions_per_seq=9)
  both = [files, f"{tmp_path}/more/*.tfrecord"]
  for inputs in (both, both[::-1]):
    shape = record_shape.of_manifest(record_files.find(",".join(inputs)), 100)
    assert shape.max_predictions_per_seq == 9
    assert shape.masks.max_predictions_per_seq == 9


@pytest.mark.slow
def test_a_run_is_reproducible_and_its_seed_matters(tiny_run, tmp_path):
  for name, seed in (("a", 1), ("b", 1), ("c", 2)):
    runs.pretrain(
      tiny_run, tmp_path / name, seed=seed, dropout=0.1, num_train_steps=4
    )
  a, b, c = (runs.metrics(tmp_path / name) for name in "abc")
  assert a == b != c


def test_evaluation_is_over_all_records_and_independent_of_the_batch(
  tiny_run, tmp_path
):
  """Also of a checkpoint in another folder, and as after its training."""
  runs.trained(tiny_run, tmp_path / "a", do_eval=True, num_train_steps=4)
  trained = runs.read_json(tmp_path / "a", "eval_results.json")
  assert trained["examples"] == 120 and trained["global_step"] == 4
  alone = dict(do_train=False, do_eval=True)
  start = f"{tmp_path}/a/model.ckpt-4"
  again = runs.pretrain(tiny_run, tmp_path / "a", **alone)
  assert again["evaluation"] == trained
  other = runs.pretrain(
    tiny_run, tmp_path / "b", init_checkpoint=start, eval_batch_size=7, **alone
  )
  for key in trained.keys() - {"global_step"}:
    np.testing.assert_allclose(
      other["evaluation"][key], trained[key], rtol=1e-5, err_msg=key
    )


def test_packed_records_train_as_their_examples(tmp_path):
  """An update of the whole data set, packed and with an example a record."""
  packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
  packed.mkdir()
  unpacked.mkdir()
  files, _ = write_packed(packed)
  found = tfrecord.RecordSet(input_files.expand_patterns(files))
  examples = [e for r in found for e in examples_of(feature_values(r))]
  with tfrecord.shard_writer(f"{unpacked}/data.tfrecord") as writer:
    for example in examples:
      writer.write(encode_example(example))
  config = write_config(tmp_path / "config.json")
  for folder, pattern, batch in (
    (packed, files, len(found)),
    (unpacked, f"{unpacked}/data.tfrecord", len(examples)),
  ):
    result = runs.pretrain(
      (config, pattern), folder / "run", train_batch_size=batch,
      global_batch_size=len(examples), do_eval=True, num_train_steps=5,
    )  # fmt: skip
    assert result["evaluation"]["examples"] == len(examples)
  for key in ("masked_lm_loss", "next_sentence_loss", "examples", "grad_norm"):
    np.testing.assert_allclose(
      runs.metrics(packed / "run", key), runs.metrics(unpacked / "run", key),
      rtol=1e-5,
    )  # fmt: skip


def filled(values, size):
  return np.pad(values, (0, size - len(values)))


def examples_of(record):
  """The examples of a packed record, each as a record's features."""
  numbers = np.array(record["input_mask"])
  values = {name: np.array(v) for name, v in record.items()}
  masks = values["masked_lm_positions"], values["masked_lm_weights"] > 0
  for number in range(1, numbers.max() + 1):
    places = np.flatnonzero(numbers == number)
    masked = np.flatnonzero(masks[1] & (numbers[masks[0]] == number))
    tokens = lambda name, at=places: filled(values[name][at], 32)
    predictions = lambda name, at=masked: filled(values[name][at], 5)
    label = values["next_sentence_labels"][number - 1 : number]
    yield {
      "input_ids": tokens("input_ids"),
      "input_mask": filled(np.ones(len(places), int), 32),
      "segment_ids": tokens("segment_ids"),
      "masked_lm_positions": filled(masks[0][masked] - places[0], 5),
      "masked_lm_ids": predictions("masked_lm_ids"),
      "masked_lm_weights": predictions("masked_lm_weights").astype(np.float32),
      "next_sentence_labels": label,
    }


# Ops that TensorFlow makes and nobody runs: ends of its gradient functions and
# conditions, handles of iterators and variables. The loss is only
# differentiated.
TENSORFLOWS_OWN = re.compile(
  r"^gradients/|^IteratorToStringHandle$"
  r"|/(Switch|switch_[tf])$|/(Read/ReadVariableOp|IsInitialized/.*)$"
  r"|^scaled_loss$|^loss/"
)


def settled_flags(do_train=True, **given):
  """(the config, the log's lines) of a command with these flags."""
  values = command_line(PretrainingConfig, do_train=do_train, **given)
  given = PretrainingConfig.read_flags(values)
  return run_settings.configured(PretrainingConfig, *given)


def settled_as(tiny_run, folder, **given):
  """`settled_flags` of this data in `folder`."""
  return settled_flags(
    bert_config_file=tiny_run[0], input_file=tiny_run[1],
    output_dir=str(folder), **given,
  )  # fmt: skip


def test_dropout_does_not_come_again_with_fewer_micro_batches(
  tiny_run, tmp_path
):
  """Micro-batch 800 is in update 100 of 8, or in update 800 of 1."""
  config = runs.config(tiny_run, tmp_path)
  micro = types.SimpleNamespace(number=tf.constant(800))
  with tf.Session() as session:
    seeds = [
      session.run(
        training_run.dropout_seed(
          config, types.SimpleNamespace(accumulation=n), Comm(), micro
        )
      ).tolist()
      for n in (1, 8, 1)
    ]
  assert seeds[0] == seeds[2] != seeds[1]


def test_google_berts_files_give_the_references_losses(tmp_path, letters):
  """TensorFlow's own writers, names as google/bert's, sums by NumPy."""
  prefix = trained.write_model(tmp_path / "theirs", "pretraining", letters)
  config, path = f"{tmp_path}/theirs/bert_config.json", f"{tmp_path}/a.tfrecord"
  made = fake_records(10, seed=3)
  feature = {
    "i": lambda v: tf.train.Feature(int64_list=tf.train.Int64List(value=v)),
    "f": lambda v: tf.train.Feature(float_list=tf.train.FloatList(value=v)),
  }
  with tf.python_io.TFRecordWriter(path) as writer:
    for one in made:
      each = {n: feature[np.asarray(v).dtype.kind](v) for n, v in one.items()}
      example = tf.train.Example(features=tf.train.Features(feature=each))
      writer.write(example.SerializeToString())
  runs.pretrain(
    (config, path), tmp_path / "out", init_checkpoint=prefix,
    do_train=False, do_eval=True, eval_batch_size=4,
  )  # fmt: skip
  found = runs.read_json(tmp_path / "out", "eval_results.json")
  checkpoint = checkpoint_files.Checkpoint(prefix)
  weights = {n: checkpoint[n].astype(float) for n in checkpoint.shapes}
  columns = {n: np.stack([one[n] for one in made]) for n in made[0]}
  batch = types.SimpleNamespace(**columns, example_weights=np.ones(10))
  sums = reference_numpy.pretraining_sums(weights, batch, 2, 2)
  for head, weight in (
    ("masked_lm", sums["masked_lm_weight"]), ("next_sentence", 10)
  ):  # fmt: skip
    for name, key in (("loss", "loss"), ("accuracy", "correct")):
      wanted = pytest.approx(sums[f"{head}_{key}"] / weight, rel=1e-5)
      assert found[f"{head}_{name}"] == wanted, (head, name)


def test_a_preset_has_the_vocabulary_of_the_records(packed_run, tmp_path):
  (config_file, files), _ = packed_run
  given = dict(input_file=files, output_dir=str(tmp_path / "new"))
  preset = dict(given, bert_config_file="mini")
  path, manifest = change_manifest(tmp_path)
  size = manifest.tokenizer.vocab_size
  config, lines = settled_flags(**preset)
  assert (config.bert.hidden_size, config.bert.vocab_size) == (256, size)
  assert lines == [
    f"--bert_config_file=mini: vocabulary of {size} from the data's vocabulary"
  ]
  assert config.as_dict()["bert"]["vocab_size"] == size
  for words in (size, 40000):  # the preset's own file would have so many
    config, _ = settled_flags(**preset, sampled_softmax=words)
    with pytest.raises(UserError, match=f"the vocabulary has {size} words"):
      record_shapes.of_patterns(files, config)
  bare = write_records(tmp_path / "bare.tfrecord", 3)
  config, _ = settled_flags(**{**preset, "input_file": bare})
  assert config.bert.vocab_size == 30522
  config, _ = settled_flags(**given, bert_config_file=config_file)
  assert config.bert.vocab_size == 100
  made = {"a": (path.name, manifest)}
  (line,) = input_pipeline.unused_rows(30522, made)
  assert f"has {size:,} tokens: {30522 - size:,} rows would never" in line
  assert not input_pipeline.unused_rows(size, made)
  assert not input_pipeline.unused_rows(30522, {})


def test_the_config_may_be_left_out_where_a_folder_has_it(
  tiny_run, tmp_path, monkeypatch
):
  config_file, files = tiny_run
  monkeypatch.chdir(tmp_path)
  os.mkdir("run")
  shutil.copy(config_file, "run/bert_config.json")
  shutil.copy(config_file, "bert_config.json")  # of no folder that is named
  given = dict(input_file=files)
  with pytest.raises(UserError, match="--bert_config_file is missing"):
    settled_flags(**given, output_dir="new")
  config, lines = settled_flags(**given, output_dir="run")
  assert config.bert.vocab_size == 100
  assert lines == ["--bert_config_file=run/bert_config.json, as found"]
  new = settled_flags(**given, output_dir="run", bert_config_file="base")[0]
  assert new.bert.hidden_size == 768  # no run is there yet
  checkpoint_files.write_weights("run/bert_model.ckpt", {"x": np.zeros(1)})
  config, _ = settled_flags(**given, output_dir="new", init_checkpoint="run")
  assert config.init_checkpoint == "run/bert_model.ckpt"
  assert config.bert.vocab_size == 100
  other = write_config(
    tmp_path / "other.json", hidden_act="relu", num_hidden_layers=1
  )
  with pytest.raises(UserError, match="differ in hidden_act: leave the flag"):
    settled_flags(
      **given, output_dir="new", init_checkpoint="run", bert_config_file=other
    )
  (tmp_path / "run" / "model.ckpt-3.json").write_text("{}")
  with pytest.raises(UserError, match="base and run/.* differ in hidden_size"):
    settled_flags(**given, output_dir="run", bert_config_file="base")


def test_records_of_other_words_than_the_models_are_told(packed_run, tmp_path):
  """Of a model with files, and of a run, whose records say it."""
  (config_file, files), _ = packed_run
  model, staged = tmp_path / "model", tmp_path / "stages.json"
  model.mkdir()
  shutil.copy(config_file, model / "bert_config.json")
  checkpoint_files.write_weights(f"{model}/x.ckpt", {"x": np.zeros(1)})
  (model / "vocab.txt").write_text("a\n")
  staged.write_text(json.dumps([{"num_train_steps": 1, "input_file": files}]))
  start = dict(output_dir="new", init_checkpoint=str(model))

  def told(case, digest):
    (model / "task.json").write_text(json.dumps({"do_lower_case": case}))
    change_manifest(tmp_path, tokenizer={"sha256": digest})
    start.pop("other_vocabulary", None)
    try:
      _, lines = settled_flags(input_file=files, **start)
    except UserError as e:
      assert re.search(
        r"of other words. Make records .*--other_vocabulary", f"{e}"
      )
      start["other_vocabulary"] = True
      _, lines = settled_flags(input_file=files, **start)
    assert f"{model}/x.ckpt (the only one)" in lines[0]
    in_stages = dict(stages=str(staged), global_batch_size=4)
    assert settled_flags(**in_stages, **start)[1] == lines
    return any("embeddings are of other words" in line for line in lines)

  own = file_sha256(str(model / "vocab.txt"))
  assert [told(True, own), told(False, own), told(True, "0")] == [0, 1, 1]
  # Of google/bert's folders the name says it.
  cased = tmp_path / "cased_L-12_H-768_A-12"
  cased.mkdir()
  shutil.move(model / "vocab.txt", cased)
  change_manifest(tmp_path, tokenizer={"sha256": own})
  about = description.read(str(cased))
  located = model_source.Located(f"{cased}/bert_model.ckpt", "", about)
  (line,) = run_settings.other_text(located, record_files.find(files), True)
  assert "its embeddings are of other words" in line
  _, manifest = change_manifest(tmp_path)
  read = {"files": [str(tmp_path / "data-0.tfrecord")]}
  read["tokenizer"] = dataclasses.asdict(manifest.tokenizer)
  run = {"plan": {}, "data": read}
  (model / "run.json").write_text(json.dumps({"runs": [run]}))
  assert not told(True, own)  # the same records


def test_files_that_are_trained_on_are_told(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in "abc":
    (tmp_path / name).write_text("")
  os.symlink("a", "link")
  assert not evaluation.overlap_warning(["a"], ["b", "c"], "--x")
  (line,) = evaluation.overlap_warning(["c", "link"], ["a", "b"], "--x")
  assert "1 of 2 files, such as link, are also trained on" in line
  assert "held out as --x" in line
  held_out = {"c": True, "link": False, "b,c": False, "d": None, None: False}
  for evaluated, known in held_out.items():
    run = {"flags": {"eval_input_file": evaluated}}
    assert description.is_held_out(run, ["a", "b"]) is known
  assert description.is_held_out({"flags": {}}, ["a"]) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_op_is_reachable_from_the_train_op(tiny_run, tmp_path, precision):
  """Nothing is built for nothing: forward, backward, update, reports."""
  with tf.Graph().as_default() as graph:
    tf.enable_resource_variables()
    config = runs.config(
      tiny_run, tmp_path, train_batch_size=12, dropout=0.1, precision=precision
    )
    task = run_pretraining.training_task(config, Comm())
    fetched = {**task.ops._asdict(), "vote": task.vote.counts}
    for name in ("variables", "first_pass", "between"):
      del fetched[name]
    initializers = tf.group(
      tf.global_variables_initializer(), tf.local_variables_initializer()
    )
    operations = graph.get_operations()
  starts = [op for op in operations if op.type == "MakeIterator"]
  reached = ancestors([*tf.nest.flatten(fetched), initializers, *starts])
  stray = [op.name for op in operations if op not in reached]
  stray = [name for name in stray if not TENSORFLOWS_OWN.search(name)]
  assert not stray, "\n".join(stray)
  assert len(reached) > 2000  # the search found the graph


def ancestors(roots):
  stack = [x if isinstance(x, tf.Operation) else x.op for x in roots]
  reached = set()
  while stack:
    op = stack.pop()
    if op not in reached:
      reached.add(op)
      stack += [t.op for t in op.inputs] + list(op.control_inputs)
  return reached


def test_init_checkpoint_reports_loaded_missing_and_unused(
  tiny_run, tmp_path, capfd
):
  first, run = tmp_path / "first", tmp_path / "run"
  runs.trained(tiny_run, first, num_train_steps=4)
  # A checkpoint without the NSP head and with something foreign.
  partial = f"{tmp_path}/partial.ckpt"
  weights = {
    name: value
    for name, value in runs.weights(first).items()
    if name.startswith("bert/") and "adam" not in name
  }
  foreign = {"foreign": np.ones(1, np.float32)}
  checkpoint_files.write_weights(partial, {**weights, **foreign})
  few = dict(num_train_steps=1, num_warmup_steps=0)
  runs.pretrain(tiny_run, tmp_path / "part", init_checkpoint=partial, **few)
  text = capfd.readouterr().err
  assert "unused: 1\n    foreign" in text
  assert "cls/seq_relationship/output_bias" in text.split("missing there")[1]
  # The loss of update 1 is that of the weights as loaded.
  runs.pretrain(tiny_run, run, init_checkpoint=f"{first}/model.ckpt-4", **few)
  assert runs.metrics(run)[0] < runs.metrics(first)[0]
  assert runs.metrics(run, "global_step") == [1]


def test_early_stopping(tiny_run, tmp_path):
  """The first evaluation after an update is the best, and two are no better."""
  settings = dict(
    do_eval=True, eval_every_steps=1, early_stopping_evaluations=2,
    learning_rate=1e-30,
  )  # fmt: skip
  for _ in range(2):  # the same command trains no further
    training = runs.pretrain(tiny_run, tmp_path, **settings)["training"]
    assert training["stopped_early"] and training["global_step"] == 3


def test_records_made_again_are_noticed(packed_run, tmp_path, capsys):
  (tiny, _), folder = packed_run, tmp_path / "run"
  said = lambda: description.read(str(folder))
  runs.pretrain(tiny, folder, num_train_steps=2, num_warmup_steps=0)
  assert len(said().records_now()) == 2
  (path,) = tmp_path.glob("*.manifest.json")
  first, *others = data_set.Manifest.load(str(path)).files
  changed = dataclasses.replace(first, sha256="1" * 64)
  _, before = change_manifest(tmp_path, files=(changed, *others))
  assert said().records_now() == [] and said().manifest() is None
  path.unlink()  # then nothing says that they are others
  assert len(said().records_now()) == 2
  dataclasses.replace(before, files=(changed, *others)).save(str(path))
  runs.pretrain(tiny, folder, num_train_steps=3, num_warmup_steps=0)
  assert "\n  contents of records " in capsys.readouterr().err
  assert said().manifest()[0] == str(path)
  change_manifest(tmp_path, tokenizer={"sha256": "2" * 64})
  for flags in ({"num_train_steps": 4}, {"do_train": False, "do_eval": True}):
    with pytest.raises(UserError, match="SHA-256 2.* one vocabulary"):
      runs.pretrain(tiny, folder, num_warmup_steps=0, **flags)


def test_evaluations_after_the_update_of_a_start_are_dropped(
  tiny_run, tmp_path
):
  updates = dict(num_train_steps=4, num_warmup_steps=0)
  evaluated = dict(do_eval=True, eval_every_steps=1, save_checkpoints_steps=2)
  runs.pretrain(tiny_run, tmp_path, **evaluated, **updates)
  on = metrics.evaluations(str(tmp_path))[-1][metrics.EVALUATION_SET]
  assert metrics.was_evaluated(tmp_path, 4, on)
  assert not metrics.was_evaluated(tmp_path, 4, "others")
  for path in tmp_path.glob("model.ckpt-4*"):
    path.unlink()
  runs.pretrain(tiny_run, tmp_path, **updates)
  found = [metrics.was_evaluated(tmp_path, step, on) for step in (1, 2, 3, 4)]
  assert found == [True, True, True, False]  # 3 was saved as the best then


def test_the_best_is_of_evaluations_on_the_same_records(
  tiny_run, tmp_path, capsys
):
  said = "the best one is chosen among those from here on"
  path = tmp_path / metrics.EVAL_METRICS_FILE
  best = lambda step: metrics.best_evaluation(
    str(tmp_path), step, metrics.BEST_BY
  )

  def train(steps, **more):
    """Whether it is said that others are the best from here on."""
    runs.pretrain(
      tiny_run, tmp_path, num_train_steps=steps, do_eval=True,
      eval_every_steps=1, num_warmup_steps=0, **more,
    )  # fmt: skip
    return capsys.readouterr().err.count(said)

  train(2)
  lines = metrics.read_jsonl(str(path))
  lines[1]["masked_lm_loss"] = 0.0  # update 1, on easier records
  path.write_text("".join(f"{json_files.text(line)}\n" for line in lines))
  assert best(2) == 1
  # Which are all records.
  assert not train(3, max_eval_steps=100, eval_batch_size=7)
  assert best(3) == 1
  few = dict(max_eval_steps=1, eval_batch_size=4)
  assert train(4, **few) == 1
  # Update 3, from which it resumed, is evaluated again.
  steps = [line["global_step"] for line in metrics.read_jsonl(str(path))]
  assert steps == [0, 1, 2, 3, 4]
  assert best(4) > 2
  assert metrics.evaluations_since_best(str(tmp_path), 4, metrics.BEST_BY) < 2
  assert not train(5, **few)


def test_a_stage_counts_its_own_evaluations(tmp_path):
  """Its model may have grown, so that its first losses are higher."""
  lines = [
    f'{{"global_step": {step}, "masked_lm_loss": {step}.0}}\n'
    for step in (1, 2, 3)
  ]
  (tmp_path / "eval_metrics.jsonl").write_text("".join(lines))
  for first, want in ((0, 2), (1, 1), (3, 0)):
    count = metrics.evaluations_since_best(
      str(tmp_path), 3, metrics.BEST_BY, first
    )
    assert count == want


def test_the_run_folder_says_what_was_run(tiny_run, tmp_path):
  folder = tmp_path / "run"
  runs.pretrain(
    tiny_run, folder, do_eval=True, num_train_steps=4, eval_every_steps=2
  )
  run = runs.read_json(folder, description.RUN_FILE)["runs"][0]
  assert run["flags"]["learning_rate"] == 1e-3
  assert run["plan"]["records_per_update"] == 24
  assert run["data"]["records"] == 120
  assert run["versions"]["tensorflow"] == tf.__version__
  results = runs.read_json(folder, run_folder.EVAL_RESULTS_FILE)
  heads = [f"{h}_loss" for h in ("masked_lm", "next_sentence")]
  shared = {*heads, *(name.replace("loss", "accuracy") for name in heads)}
  shared |= {"examples", "global_step"}
  assert shared <= set(results)
  log = metrics.read_jsonl(str(folder / metrics.EVAL_METRICS_FILE))
  assert evaluated(folder) == [0, 2, 4]
  # An evaluation alone, of other records perhaps, chooses no best checkpoint.
  alone = dict(do_train=False, do_eval=True, max_eval_steps=1)
  runs.pretrain(tiny_run, folder, **alone)
  assert metrics.read_jsonl(str(folder / metrics.EVAL_METRICS_FILE)) == log
  report = metrics.read_jsonl(str(folder / metrics.METRICS_FILE))[-1]
  others = "loss learning_rate grad_norm loss_scale tokens_per_second"
  assert shared | {*others.split()} <= set(report)
  assert report["examples"] == 96


# Refusals, with the names and numbers that disagree ---------------------------


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(input_file="/nowhere/*.tfrecord"), "/nowhere/[*].tfrecord"),
    (dict(max_seq_length=64), "data-0.*record 0.*32.*64"),
    (dict(init_checkpoint="/nowhere/model.ckpt"), "/nowhere/model.ckpt"),
    (dict(do_train=False), "--do_train.*--do_eval"),
    (dict(do_train=False, do_eval=True), "nothing to evaluate"),
    (dict(masks=MaskConfig((0.3, 0.15))), "--masked_lm_prob: the masks of.*d"),
    (dict(max_position_embeddings=16), "32 tokens.*max_position_embeddings=16"),
  ],
)
def test_settings_that_cannot_be(tiny_run, tmp_path, changes, words):
  config, files = tiny_run
  changes = dict(changes)  # the table's
  if most := changes.pop("max_position_embeddings", None):
    short = tmp_path / "short.json"
    config = write_config(short, max_position_embeddings=most)
  with pytest.raises(UserError, match=words):
    runs.pretrain((config, files), tmp_path / "run", **changes)


def test_resuming_another_run_is_refused(tiny_run, tmp_path):
  """Nothing in its folder changes."""
  run = tmp_path / "run"
  runs.trained(tiny_run, run, num_train_steps=4)
  told = [run / name for name in ("bert_config.json", "run.json")]
  before = [path.read_bytes() for path in told]
  bert = runs.config(tiny_run, run).bert.to_dict()
  wide = modeling.BertConfig.from_dict({**bert, "intermediate_size": 128})
  # Before the data is read, and after it.
  with pytest.raises(UserError, match="intermediate_size 64 -> 128: its model"):
    runs.pretrain(tiny_run, run, bert=wide)
  start = dict(init_checkpoint=f"{run}/model.ckpt-4", bert=wide)
  words = r"model\.ckpt-4.*layer_0/intermediate.* is \[.*64\].* there"
  with pytest.raises(CheckpointError, match=words):
    runs.pretrain(tiny_run, tmp_path / "new", **start)
  write_records(tmp_path / "data-9.tfrecord", 3)
  with pytest.raises(UserError, match="records 120 -> 123"):
    runs.pretrain(tiny_run, run)
  assert [path.read_bytes() for path in told] == before


PER_RANK = dict(
  global_batch_size=None, train_batch_size=4,
  num_train_steps=60, num_warmup_steps=6,
)  # fmt: skip


def refusal_to_resume(tiny_run, step, seen, ranks=1, **changes):
  """What is said of resuming a run after so many updates and records."""
  config = runs.config(tiny_run, "folder", **changes)
  source = types.SimpleNamespace(set=range(120), packing_factor=1.0)
  plan = plans.of_run(config, source, ranks)
  orders = [record_order.Order(120, 5)] * 2
  try:
    resume.check_position(
      config, plan, {"files": []}, step, seen, orders, description.read("")
    )
  except UserError as e:
    return str(e)
  return None


@pytest.mark.parametrize(
  "step, seen, changes, words",
  [
    # 30 updates of 4 on 1 rank, then 2 ranks, and the other way round.
    (
      30, 120, dict(ranks=2, **PER_RANK),
      "folder: records of an update 4 -> 8: updates and .*"
      "--global_batch_size=4 --num_train_steps=60 --num_warmup_steps=6; or",
    ),
    (
      20, 160, PER_RANK,
      "records of an update 8 -> 4: .* --global_batch_size=8 "
      "--num_train_steps=30 --num_warmup_steps=3; or start a new run",
    ),
    (
      20, 80, dict(num_accumulation_steps=2, **PER_RANK),
      "--num_train_steps=60 .* and leave out --num_accumulation_steps; or",
    ),
    (
      20, 160, dict(lr_schedule="warmup_exp_decay_exp", **PER_RANK),
      "--num_warmup_steps=3 --lr_decay_steps=500; or",
    ),
    # --global_batch_size itself, whose steps are as they were.
    (5, 80, {}, "update 16 -> 24: .* it give --global_batch_size=16; or start"),
    # As many updates were of this batch as of another one.
    (4, 36, PER_RANK, "records of an update 9 -> 4: "),
    (3, 37, PER_RANK, r"update 12\.3333 -> 4: .* its own: start a new run"),
    # Of the same batch, but a shorter plan.
    (
      21, 504, {},
      "folder holds a run of 21 updates, more than the 20 of this plan: give "
      "more --num_train_steps",
    ),
  ],
)  # fmt: skip
def test_a_run_keeps_its_global_batch(tiny_run, step, seen, changes, words):
  said = refusal_to_resume(tiny_run, step, seen, **changes)
  assert re.search(words, said), said


def test_the_default_warmup_follows_the_length_of_the_run(tiny_run):
  for stated, steps, decay, want in (
    (None, 1_000_000, None, 10_000), (None, 100_000, None, 10_000),
    (None, 40, None, 4), (None, 1, None, 0), (None, 100, 95, 5),
    (0, 1000, None, 0), (7, 1000, None, 7),
  ):  # fmt: skip
    config = runs.config(
      tiny_run, "folder", num_warmup_steps=stated, num_train_steps=steps,
      lr_schedule="wsd", num_decay_steps=decay,
    )  # fmt: skip
    assert config.warmup_of(steps) == want
    assert plans.of_run(config, None, 1).warmup_updates == want


def test_steps_of_another_micro_batch_are_others(tiny_run, tmp_path):
  """In per-rank mode they are stated in the micro-batches of one rank."""
  settings = {**PER_RANK, "train_batch_size": 8, "save_checkpoints_steps": 0}
  run = tmp_path / "run"
  runs.pretrain(tiny_run, run, **{**settings, "num_train_steps": 10})
  # The advice is in that run's steps, also where the batch is another one.
  for accumulation, steps, words in (
    (
      2, 10, "updates of the same steps 10 -> 5: .* give --global_batch_size=8 "
      "--num_train_steps=10 --num_warmup_steps=6 and leave out",
    ),
    (None, 20, "--global_batch_size=8 --num_train_steps=20 --num_warm"),
  ):  # fmt: skip
    again = {**settings, "train_batch_size": 4, "num_train_steps": steps}
    with pytest.raises(UserError, match=words):
      runs.pretrain(tiny_run, run, num_accumulation_steps=accumulation, **again)


def test_a_global_batch_may_be_made_otherwise(tiny_run):
  """By other ranks, micro-batches and modes; and what refusals say to give."""
  for ranks, accumulation in ((1, 4), (2, 2), (4, 1)):
    changes = {**PER_RANK, "num_accumulation_steps": accumulation}
    assert refusal_to_resume(tiny_run, 5, 80, ranks, **changes) is None
  for changes in (dict(), dict(train_batch_size=5), dict(num_train_steps=9)):
    changes = {"global_batch_size": 16, **changes}
    assert refusal_to_resume(tiny_run, 9, 144, 3, **changes) is None
  assert refusal_to_resume(tiny_run, 0, 0) is None


def test_changes_are_complete_and_written_as_in_a_command(tiny_run, tmp_path):
  same = dict(precision="bf16", dropout=0.1)
  before = runs.config(tiny_run, tmp_path, **same)
  plan = plans.of_run(before, None, 1)
  started = {
    "flags": json.loads(json_files.text(before.as_dict())),
    "plan": dataclasses.asdict(plan),
    "data": {"files": ["a", "b"]},
  }
  # A run of before has not all keys of today.
  del started["flags"]["bert"]["hidden_act"]

  def changes(files=("a", "b"), **settings):
    config = runs.config(tiny_run, tmp_path, **same | settings)
    now = resume.facts_of(config, plan, {"files": list(files)})
    return agreement.agree(agreement.of_start(**started), now, "a", ())

  assert changes() == []
  assert changes(("c",)) == ["record files a,b -> c"]
  found = changes(
    recompute=("layer",), optimizer={"optimizer": "lamb"}, precision="fp32",
    dropout=0.0,
  )  # fmt: skip
  assert found == [
    "--bert_config_file: hidden_dropout_prob 0.1 -> 0.0",
    "--bert_config_file: attention_probs_dropout_prob 0.1 -> 0.0",
    "--optimizer adamw -> lamb",
    "--precision bf16 -> fp32",
    "--recompute (empty) -> layer",
  ]


def test_a_checkpoint_is_saved_when_its_time_has_come(tiny_run, tmp_path):
  """With --save_every_minutes that pass in each update."""
  settings = dict(save_every_minutes=1e-9, save_checkpoints_steps=0)
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=3, num_warmup_steps=1, **settings
  )
  saved = sorted(path.name for path in tmp_path.glob("model*.index"))
  assert saved == [f"model.ckpt-{step}.index" for step in (1, 2, 3)]


@pytest.mark.slow
def test_a_cooldown_is_a_branch_of_its_run(
  tiny_run, tmp_path, monkeypatch, capsys
):
  """Bit for bit what the run itself makes of its last updates."""
  settings = dict(
    lr_schedule="wsd", num_decay_steps=4, num_train_steps=12,
    save_checkpoints_steps=2, keep_checkpoints=9,
  )  # fmt: skip
  main, branch = tmp_path / "main", tmp_path / "branch"
  runs.pretrain(tiny_run, main, **settings)

  def start_of(named):
    flags = {"cooldown_from": str(named)} if named else {}
    config, _ = settled_flags(
      input_file=tiny_run[1], output_dir=str(branch), lr_schedule="wsd",
      num_decay_steps=4, **flags,
    )  # fmt: skip
    return config.cooldown_from

  start = start_of(main)
  assert start == f"{main}/model.ckpt-8"  # not 10 or 12, nor 2: the warm-up
  settings |= {"cooldown_from": start, "num_train_steps": 500}
  # A run that still trains may remove the checkpoint that was chosen.
  removed = [shutil.move(f, tmp_path) for f in main.glob("model.ckpt-8.*")]
  runs.pretrain(tiny_run, branch, **settings)
  for file in removed:
    shutil.move(file, main)
  assert "differs from the run in" in capsys.readouterr().err
  runs.assert_equal(runs.weights(branch), runs.weights(main))
  assert runs.metrics(branch) == runs.metrics(main)[8:]
  # It is a run of its own from then on.
  assert start_of(main) == start_of(start) == start_of(None) == start
  assert runs.pretrain(tiny_run, branch, **settings)["training"]["updates"] == 0
  with pytest.raises(UserError, match=r"8 -> .*4: give the former"):
    start_of(main / "model.ckpt-4")
  shutil.rmtree(branch)
  for named, words in (
    (main / "model.ckpt-2", r"by its updates \(4 to 8 of"),
    (main / "model.ckpt-10", r"by its updates \(4 to 8 of"),
    (tmp_path, "no folder of a training"),
  ):
    with pytest.raises(UserError, match=words):
      start_of(named)
  # Nor is it 10 or 12 where the run is to go on: their rates have fallen.
  runs.change_run(main, plan={"updates": 500})
  assert start_of(main) == start
  monkeypatch.chdir(main)
  assert start_of("model.ckpt-8") == "./model.ckpt-8"
  runs.change_run(main, rewarmup=False)
  with pytest.raises(UserError, match=r"constant by its updates \(1 to 0 of"):
    start_of(main)
  with pytest.raises(UserError, match="--cooldown_from needs --num_decay"):
    runs.pretrain(tiny_run, branch, **{**settings, "num_decay_steps": None})


def test_a_run_ends_in_its_time_with_its_rate_at_its_end(
  dynamic_run, tmp_path, monkeypatch
):
  """Each update takes a tenth of the time, the first of a start none.

  So a stop costs no time. No other run can continue such a schedule.
  """
  tiny_run, global_batch = dynamic_run
  runs.updates_take(monkeypatch, 6.0)
  settings = dict(
    max_train_minutes=1.0, num_train_steps=10_000, num_warmup_steps=2_500,
    global_batch_size=global_batch, max_predictions_per_seq=None,
    masks=MaskConfig((0.3, 0.15)), save_checkpoints_steps=4,
  )  # fmt: skip
  folder = tmp_path / "run"
  with runs.ended_after(4):
    runs.pretrain(tiny_run, folder, **settings)
  result = runs.pretrain(tiny_run, folder, **settings)
  assert result["training"]["out_of_time"]
  tenths = np.array([0, 4, 8, 7, *[7, 6, 5, 4, 3, 2, 1]])
  np.testing.assert_allclose(
    runs.metrics(folder, "learning_rate"), 1e-4 * tenths, rtol=1e-3
  )
  again = runs.pretrain(tiny_run, folder, **settings)["training"]
  assert again["updates"] == 0 and again["out_of_time"]
  following = dict(
    global_batch_size=global_batch, rewarmup=False,
    init_checkpoint=f"{folder}/model.ckpt-11",
  )  # fmt: skip
  with pytest.raises(CheckpointError, match="max_train_minutes.*--norewarmup"):
    runs.pretrain(tiny_run, tmp_path / "next", **following)


def test_a_resumed_run_says_what_changed(tiny_run, tmp_path, capsys):
  """And keeps its learning rate, where that would depend on the ranks."""
  folder = tmp_path / "run"
  few = dict(num_warmup_steps=0)
  runs.pretrain(tiny_run, folder, num_train_steps=2, **few)
  assert "changed since" not in capsys.readouterr().err
  with pytest.raises(UserError, match="records of an update 24 -> 12"):
    runs.pretrain(tiny_run, folder, global_batch_size=12)
  assert len(runs.read_json(folder, "run.json")["runs"]) == 1
  runs.pretrain(tiny_run, folder, num_train_steps=3, train_batch_size=8, **few)
  assert (
    "changed since its last start:\n  --train_batch_size 24 -> 8\n"
    "  --num_train_steps 2 -> 3\n  updates 2 -> 3\n"
  ) in capsys.readouterr().err
  # The same command, but run.json has it that there were 4 ranks.
  runs.change_run(folder, plan={"ranks": 4}, lr_scaling="sqrt")
  words = "factor of --lr_scaling 2.0 -> 1.0: .* --learning_rate=0.002"
  with pytest.raises(UserError, match=words):
    runs.pretrain(tiny_run, folder, num_train_steps=4, lr_scaling="sqrt")
  config = runs.config(tiny_run, folder, lr_scaling="sqrt")
  plan = plans.of_run(config, None, 1)
  runs.change_run(folder, stages=[{"num_train_steps": 2}])
  stages = ({"num_train_steps": 20},)
  config = dataclasses.replace(config, stages=stages, num_train_steps=100_000)
  with pytest.raises(UserError, match="=none and 2.0 times --learning_rate"):
    resume.check_run(config, plan, description.read(str(folder)))


def test_a_cooldown_may_be_longer_than_the_default_of_a_run(tiny_run, tmp_path):
  """--num_train_steps has no meaning for it; masks move over its updates."""
  config = runs.config(
    tiny_run, tmp_path, cooldown_from="main/model.ckpt-500000",
    lr_schedule="wsd", num_decay_steps=200_001, num_warmup_steps=150_000,
  )  # fmt: skip
  plan = plans.of_run(config, None, 1)
  assert plan.updates == 700_001
  updates = np.array([500_000, 600_000, 700_000])
  assert plan.progress(updates).tolist() == [0.0, 0.5, 1.0]
  assert len(plan.lines()) == 2  # no division of steps
  # As many as a run's last ones, whose division was rounded up, too.
  for steps, divided in ((10, 2), (4, 1), (9, 2)):
    few = dataclasses.replace(
      config, num_decay_steps=steps, global_batch_size=None
    )
    assert plans.of_run(few, None, 8).decay_updates == divided
  config = dataclasses.replace(config, num_warmup_steps=500_001)
  with pytest.raises(
    UserError, match="500,000 is in the 500,001 updates of wa"
  ):
    plans.of_run(config, None, 1)


def test_float16_may_begin_when_a_run_resumes(tiny_run, tmp_path):
  scale = {"initial_loss_scale": 64.0}
  runs.trained(tiny_run, tmp_path, num_train_steps=4)
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=5, precision="fp16", loss_scale=scale
  )
  assert runs.metrics(tmp_path, "loss_scale") == [*[1.0] * 4, 64.0]


@pytest.mark.slow
def test_a_run_that_could_not_learn_is_refused(tiny_run, tmp_path):
  """--init_checkpoint whose update is past the end of the schedule."""
  runs.trained(tiny_run, tmp_path / "one", num_train_steps=4)
  past = dict(
    init_checkpoint=f"{tmp_path}/one/model.ckpt-4", rewarmup=False,
    num_train_steps=4, num_warmup_steps=1,
  )  # fmt: skip
  for changes, words in (
    (past, "updates 1 to 4 .* a peak of 0.001, .* --init_check.* update 4:"),
    (dict(learning_rate=0.0), "updates 1 to 20 .* is 0: .* a peak of 0, "),
  ):
    with pytest.raises(UserError, match=words):
      runs.pretrain(tiny_run, tmp_path / "two", **changes)
  assert not (tmp_path / "two").exists()


DAMAGED = (".data-00000-of-00001", ".index", ".json")
DAMAGES = [(end, how) for end in DAMAGED for how in ("cut", "changed", "gone")]
SLOW = [pytest.param(*damage, marks=pytest.mark.slow) for damage in DAMAGES[1:]]


@pytest.mark.parametrize("ending, how", [DAMAGES[0], *SLOW])
def test_a_damaged_checkpoint_is_told_and_the_one_before_used(
  tiny_run, tmp_path, capfd, ending, how
):
  settings = dict(save_checkpoints_steps=4, num_train_steps=8)
  runs.trained(tiny_run, tmp_path, **settings)
  whole = runs.weights(tmp_path)
  path = tmp_path / f"model.ckpt-8{ending}"
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  if how == "gone":
    path.unlink()
  else:
    path.write_bytes(data[:100] if how == "cut" else data)
  runs.pretrain(tiny_run, tmp_path, **settings)
  told = capfd.readouterr().err
  never_was_one = (ending, how) == (".json", "gone")
  assert ("damaged: " in told) != never_was_one
  assert never_was_one or f"damaged: {path}: " in told
  assert f"resumed {tmp_path}/model.ckpt-4\n" in told
  assert runs.metrics(tmp_path, "global_step") == list(range(1, 9))
  runs.assert_equal(runs.weights(tmp_path), whole)


@pytest.mark.slow
def test_nothing_whole_is_no_new_run(tiny_run, tmp_path):
  runs.trained(tiny_run, tmp_path, num_train_steps=4)
  (tmp_path / "model.ckpt-4.index").unlink()
  words = r"no checkpoint is whole \(.*ckpt-4.index: No such file.*start a new"
  with pytest.raises(CheckpointError, match=words):
    runs.pretrain(tiny_run, tmp_path, num_train_steps=4)


@pytest.mark.slow
def test_a_second_phase_warms_up_again_unless_told_not_to(tiny_run, tmp_path):
  runs.trained(tiny_run, tmp_path / "one", num_train_steps=4)
  schedule = lr_schedule.Schedule(peak=1e-3, total=10, warmup=4)
  for rewarmup, first in ((True, 0), (False, 4)):
    folder = tmp_path / str(rewarmup)
    runs.pretrain(
      tiny_run, folder, init_checkpoint=f"{tmp_path}/one/model.ckpt-4",
      rewarmup=rewarmup, num_train_steps=10,
    )  # fmt: skip
    np.testing.assert_allclose(
      runs.metrics(folder, "learning_rate"),
      schedule(np.arange(first, first + 10)),
      rtol=1e-5,
    )


@pytest.mark.parametrize(
  "precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_16_bits_train_as_float32_does(tiny_run, tmp_path, precision):
  whole, half = tmp_path / "fp32", tmp_path / precision
  runs.trained(tiny_run, whole, do_eval=True)
  runs.pretrain(
    tiny_run, half, do_eval=True, precision=precision,
    loss_scale=dict(initial_loss_scale=2.0**10),
  )  # fmt: skip
  assert runs.metrics(half) != runs.metrics(whole)
  np.testing.assert_allclose(runs.metrics(half), runs.metrics(whole), rtol=1e-2)
  assert not any(runs.metrics(half, "skipped"))
  for name, value in runs.weights(half).items():
    assert value.dtype in (np.float32, np.int64), name


def test_a_damaged_best_checkpoint_is_written_again(tiny_run, tmp_path):
  """Also one that only its evaluation saved."""
  settings = dict(
    do_eval=True, eval_every_steps=4, save_checkpoints_steps=3,
    num_train_steps=5, num_warmup_steps=0,
  )  # fmt: skip
  files = CheckpointFiles(str(tmp_path), keep=9)
  for _ in range(2):
    with runs.ended_after(4):
      runs.pretrain(tiny_run, tmp_path, **settings)
    assert files.steps() == [4, 3]
    files.check(4)
    damaged = tmp_path / "model.ckpt-4.index"
    damaged.write_bytes(damaged.read_bytes()[:-1])
