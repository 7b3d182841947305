"""Whole runs in one process: contracts, resume, errors, the graph."""

import copy
import dataclasses
import json
import os
import re
import shutil
import signal
import types

import numpy as np
import pytest
import reference_numpy
import runs
import trained
from finetuning_runs import command_line
from samples import (
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
  checkpoint_files,
  checkpointing,
  description,
  metrics,
  run_folder,
  run_start,
)
from checkpoints.checkpoint_files import CheckpointError
from common import json_files
from common.errors import UserError
from common.files import file_sha256
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from data import record_order, record_shape, records, tf_example, tfrecord
from data.masking import MaskConfig
from gradients import lr_schedule
from gradients.distributed import Comm
from interop import model_source, run_settings
from training import evaluation, plans, resume, training_run
from training.signals import Budget


def test_micro_batches_equal_one_big_batch(tiny_run, tmp_path):
  """Unequal numbers of masked tokens: a mean of means would differ."""
  runs.trained(tiny_run, tmp_path / "one", do_eval=True)
  runs.pretrain(tiny_run, tmp_path / "two", train_batch_size=12)
  runs.pretrain(tiny_run, tmp_path / "six", train_batch_size=4)
  one = runs.metrics(tmp_path / "one")
  assert len(one) == 20 and one[0] > one[-1]
  for name in ("two", "six"):
    np.testing.assert_allclose(
      runs.metrics(tmp_path / name), one, rtol=1e-5, err_msg=name
    )
    for key in ("grad_norm", "masked_lm_accuracy", "examples"):
      np.testing.assert_allclose(
        runs.metrics(tmp_path / name, key),
        runs.metrics(tmp_path / "one", key),
        rtol=1e-4,
      )


@pytest.mark.parametrize(
  "stop, block", [(7, 0), pytest.param(10, 1, marks=pytest.mark.slow)]
)
def test_resumed_equals_never_stopped(dynamic_run, tmp_path, stop, block):
  """Bit for bit, over an epoch's end (120 records, 24 each).

  With dropout, micro-batches, packed records and masks drawn on reading.
  """
  tiny_run, global_batch = dynamic_run
  settings = dict(
    dropout=0.1,
    train_batch_size=12,
    global_batch_size=global_batch,
    save_checkpoints_steps=stop,
    shuffle_block_records=block,  # of 1: two windows an epoch
    masks=MaskConfig(masked_lm_prob=(0.3, 0.1), do_whole_word_mask=False),
    max_predictions_per_seq=None,
  )
  runs.pretrain(tiny_run, tmp_path / "whole", **settings)
  folder = tmp_path / "stopped"
  interrupt(runs.config(tiny_run, folder, **settings), after=stop + 2)
  assert runs.metrics(folder, "global_step") == list(range(1, stop + 3))
  resumed = runs.pretrain(tiny_run, folder, **settings)
  assert resumed["training"]["updates"] == 20 - stop
  assert runs.metrics(folder) == runs.metrics(tmp_path / "whole")
  assert runs.metrics(folder, "global_step") == list(range(1, 21))
  stopped, whole = runs.weights(folder), runs.weights(tmp_path / "whole")
  assert set(stopped) == set(whole)
  for name, value in whole.items():
    np.testing.assert_array_equal(stopped[name], value, err_msg=name)


@pytest.mark.parametrize(
  "micro_batch, asked_at",
  [(8, 25), pytest.param(24, 7, marks=pytest.mark.slow)],
)
def test_stopped_by_a_signal_equals_never_stopped(
  tiny_run, tmp_path, capfd, micro_batch, asked_at
):
  """Between updates, and in the second of an update's three micro-batches."""
  settings = dict(
    dropout=0.1,
    train_batch_size=micro_batch,
    precision="fp16",
    loss_scale=dict(loss_scale_window=5),
  )
  runs.pretrain(tiny_run, tmp_path / "whole", **settings)
  result = stop(
    tiny_run, tmp_path / "stopped", "own_stop_vote", asked_at, **settings
  )
  assert result["training"]["stopped"]
  assert result["training"]["updates"] == 8
  err = capfd.readouterr().err
  assert "SIGTERM: saving after this update, then stopping" in err
  assert "stopped as asked before update 9, saved: the same command" in err
  result = runs.pretrain(tiny_run, tmp_path / "stopped", **settings)
  assert not result["training"]["stopped"]
  for key in ("loss", "loss_scale", "global_step"):
    assert runs.metrics(tmp_path / "stopped", key) == (
      runs.metrics(tmp_path / "whole", key)
    )
  assert len(set(runs.metrics(tmp_path / "whole", "loss_scale"))) > 2
  for name, value in runs.weights(tmp_path / "whole").items():
    np.testing.assert_array_equal(
      runs.weights(tmp_path / "stopped")[name], value, err_msg=name
    )


def stop(tiny_run, folder, vote, asked_at, **settings):
  """A run that gets SIGTERM once it has fed its `vote` the n-th time."""
  seen = []
  original = tf.Session.run

  def run(session, fetches, feeds=None, *more):
    if feeds and any(vote in str(key) for key in feeds):
      seen.append(session)
      if len(seen) == asked_at:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(session, fetches, feeds, *more)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tf.Session, "run", run)
    return runs.pretrain(tiny_run, folder, **settings)


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
  result = stop(tiny_run, folder, vote, asked_at, **settings)
  assert result["training"]["stopped"]
  assert result["training"]["global_step"] == 10
  assert evaluated(folder) == [0, 5]
  result = stop(tiny_run, folder, "own_stop_vote", 1, **settings)
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
  runs.pretrain(tiny_run, folder, num_train_steps=4)


def test_an_elastic_world_takes_over_from_a_stopped_rank(tmp_path, monkeypatch):
  class Elastic(Comm):
    elastic = True

  monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1234")
  with (
    run_folder.locked(str(tmp_path), Elastic()),
    run_folder.locked(str(tmp_path), Elastic()),
  ):
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1235")
    with pytest.raises(UserError), run_folder.locked(str(tmp_path), Elastic()):
      pass


def test_masks_are_decided_when_training(dynamic_run, tmp_path):
  """The records are packed, were made for 10% and at most 5 of 32 tokens."""
  tiny_run, _ = dynamic_run

  def shape(training=True, **flags):
    config = runs.config(
      tiny_run, tmp_path, max_seq_length=None, max_predictions_per_seq=None,
      masks=MaskConfig(**flags),
    )  # fmt: skip
    return record_shape.of_run(config.input_file, config, training)

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
  with pytest.raises(UserError, match=r"=5: .* may need 11 masked tokens"):
    config = runs.config(
      tiny_run, tmp_path, max_seq_length=None, masks=MaskConfig((0.3, 0.3))
    )
    record_shape.of_run(tiny_run[1], config)
  # An evaluation's do not depend on the training's.
  evaluation = shape(training=False)
  assert evaluation.masks.masked_lm_prob == 0.15
  assert evaluation == shape(False, masked_lm_prob=(0.4, 0.4))


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
  with pytest.raises(UserError, match="--objective mlm -> mlm_nsp"):
    runs.pretrain(tiny_run, run, **{**alone, "objective": "mlm_nsp"})
  with pytest.raises(UserError, match="--segment_ids false -> true: its"):
    runs.pretrain(tiny_run, run, **{**alone, "segment_ids": True})
  config, _ = settled_flags(
    input_file=tiny_run[1], output_dir=str(run), bert_config_file=tiny_run[0]
  )
  assert config.objective == "mlm" and config.segment_ids is None
  raw = json.loads((run / "run.json").read_text())
  raw["runs"][-1]["flags"]["segment_ids"] = True
  (run / "run.json").write_text(json.dumps(raw))
  config, _ = settled_flags(
    input_file=tiny_run[1], output_dir=str(run), bert_config_file=tiny_run[0]
  )
  assert config.segment_ids is True
  # A model with fewer layers finds all its variables in the checkpoint.
  raw["runs"][-1]["flags"]["bert"]["num_hidden_layers"] = 2
  raw["runs"][-1]["flags"]["segment_ids"] = None
  (run / "run.json").write_text(json.dumps(raw))
  with pytest.raises(UserError, match="num_hidden_layers 2 -> 1: its model"):
    runs.pretrain(tiny_run, run, **alone)
  other = tmp_path / "other"
  config, _ = settled_flags(
    input_file=tiny_run[1], output_dir=str(other), bert_config_file=tiny_run[0]
  )
  assert config.objective == "mlm_nsp"


def test_another_folders_model_keeps_what_it_learned(tiny_run, tmp_path):
  """As --init_checkpoint, to evaluate it or to train on."""
  run = tmp_path / "run"
  runs.pretrain(tiny_run, run, objective="mlm", num_train_steps=4)
  given = dict(
    input_file=tiny_run[1], output_dir=str(tmp_path / "new"),
    init_checkpoint=str(run),
  )  # fmt: skip

  def settled(**flags):
    values = command_line(PretrainingConfig, **given, **flags)
    return run_settings.configured(PretrainingConfig, values)[0]

  config = settled(do_eval=True)
  assert (config.objective, config.segment_ids) == ("mlm", False)
  with pytest.raises(UserError, match="--segment_ids: .*trained without them"):
    settled(do_eval=True, segment_ids=True)
  config = settled(do_train=True)  # the records' objective, which has segments
  assert (config.objective, config.segment_ids) == ("mlm_nsp", None)
  raw = json.loads((run / "run.json").read_text())
  raw["runs"][-1]["flags"] |= {"objective": "mlm_nsp", "segment_ids": False}
  (run / "run.json").write_text(json.dumps(raw))
  assert settled(do_train=True).segment_ids is False
  config = settled(do_eval=True)
  assert (config.objective, config.segment_ids) == ("mlm_nsp", False)
  raw["runs"][-1]["flags"]["segment_ids"] = True
  (run / "run.json").write_text(json.dumps(raw))
  assert settled(do_eval=True, objective="mlm").segment_ids is True
  with pytest.raises(UserError, match="--nosegment_ids: .*trained with them"):
    settled(do_eval=True, segment_ids=False)
  # A dry run plans a training.
  config = settled(dry_run=True, segment_ids=False)
  assert (config.objective, config.segment_ids) == ("mlm_nsp", False)
  # What a start without a checkpoint had says nothing of the model.
  (tmp_path / "new").mkdir()
  shutil.copy(run / "run.json", tmp_path / "new")
  with pytest.raises(UserError, match="--nosegment_ids: .*trained with them"):
    settled(do_eval=True, segment_ids=False)


@pytest.mark.parametrize("segments", [None, False, True])
@pytest.mark.parametrize("objective", ["mlm", "mlm_nsp"])
def test_a_converted_model_is_as_its_run_folder(
  tiny_run, tmp_path, objective, segments
):
  """To evaluate and to train on: task.json says what run.json does."""
  run, there = tmp_path / "run", tmp_path / "there"
  there.mkdir()
  run.mkdir()
  flags = {"objective": objective, "segment_ids": segments}
  made = {"runs": [{"flags": flags, "plan": {"updates": 1}}]}
  (run / "run.json").write_text(json.dumps(made))
  _, task = model_source.pretraining_task(
    description.read(str(run)), model_source.Given()
  )
  (there / "task.json").write_text(json.dumps(task))
  for folder in (run, there):
    (folder / "model.ckpt-1.index").touch()
  assert task["objective"] == objective

  def learned(folder, **given):
    values = command_line(
      PretrainingConfig, input_file=tiny_run[1], output_dir=f"{tmp_path}/new",
      init_checkpoint=f"{folder}/model.ckpt-1", bert_config_file=tiny_run[0],
      **given,
    )  # fmt: skip
    try:
      config, _ = run_settings.configured(PretrainingConfig, values)
    except UserError as e:
      return str(e).partition(":")[0]
    used = description.uses_segments(config.objective, config.segment_ids)
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
  given = dict(
    input_file=tiny_run[1], output_dir=f"{tmp_path}/new", objective="mlm",
    init_checkpoint=f"{tmp_path}/bert_model.ckpt", bert_config_file=tiny_run[0],
  )  # fmt: skip
  values = command_line(PretrainingConfig, do_eval=True, **given)
  config, lines = run_settings.configured(PretrainingConfig, values)
  assert "--segment_ids, as published models are" in lines
  assert config.segment_ids is True
  values = command_line(PretrainingConfig, do_train=True, **given)
  config, _ = run_settings.configured(PretrainingConfig, values)
  assert config.segment_ids is None


def test_a_checkpoint_of_the_present_folder_is_as_one_of_another(
  tiny_run, tmp_path, monkeypatch
):
  run = tmp_path / "run"
  runs.pretrain(tiny_run, run, num_train_steps=4, segment_ids=False)
  monkeypatch.chdir(run)
  config, lines = settled_flags(
    input_file=tiny_run[1], output_dir="../new", init_checkpoint="model.ckpt-4"
  )
  assert config.init_checkpoint == "./model.ckpt-4"
  assert config.segment_ids is False
  assert "--bert_config_file=./bert_config.json, as found" in lines


def test_another_folders_model_has_one_vocabulary(packed_run, tmp_path):
  """A next phase, or an evaluation, of records of other words is refused."""
  (tiny, _), run = packed_run, tmp_path / "run"
  runs.pretrain(tiny, run, num_train_steps=4)
  (path,) = tmp_path.glob("*.manifest.json")
  manifest = records.Manifest.load(str(path))
  other = dataclasses.replace(manifest.tokenizer, sha256="0" * 64)
  dataclasses.replace(manifest, tokenizer=other).save(str(path))
  for flags in ({}, {"do_train": False, "do_eval": True}):
    with pytest.raises(UserError, match="SHA-256 .* one vocabulary"):
      runs.pretrain(
        tiny, tmp_path / "new", init_checkpoint=f"{run}/model.ckpt-4", **flags
      )
  # A run that has a checkpoint does not read that folder any more. One that
  # was ended before its first save starts from it again.
  shutil.copytree(run, tmp_path / "begun")
  config = runs.config(
    tiny, tmp_path / "begun", init_checkpoint=f"{run}/model.ckpt-4"
  )
  data = {"files": [], "tokenizer": dataclasses.asdict(other)}
  with pytest.raises(UserError, match=f"{tmp_path}/begun: vocabulary "):
    run_start.check_vocabulary(config, data)
  for name in ("model.ckpt-4.json", "checkpoint"):
    (tmp_path / "begun" / name).unlink()
  with pytest.raises(UserError, match=f"{run}: vocabulary "):
    run_start.check_vocabulary(config, data)


def test_records_that_were_made_again_are_not_the_runs(packed_run, tmp_path):
  (tiny, _), run = packed_run, tmp_path / "run"
  runs.pretrain(tiny, run, num_train_steps=4)
  assert len(description.read(str(run)).records_now()) == 2
  (path,) = tmp_path.glob("*.manifest.json")
  made = records.Manifest.load(str(path))
  first = dataclasses.replace(made.files[0], sha256="0" * 64)
  dataclasses.replace(made, files=(first, *made.files[1:])).save(str(path))
  assert description.read(str(run)).records_now() == []
  path.unlink()  # then nothing says that they are others
  assert len(description.read(str(run)).records_now()) == 2


def test_segment_ids_may_be_left_out(tiny_run, tmp_path):
  """The rows of their table are then the first alone."""
  tables = {}
  for given in (None, True):
    run = tmp_path / str(given)
    runs.pretrain(
      tiny_run, run, objective="mlm", segment_ids=given, num_train_steps=4
    )
    found = checkpoint_files.Checkpoint(f"{run}/model.ckpt-4")
    tables[given] = found["bert/embeddings/token_type_embeddings/adam_m"]
  assert tables[None][0].any() and not tables[None][1].any()
  assert tables[True].any(axis=1).all()
  bert = runs.config(tiny_run, tmp_path).bert
  bert.type_vocab_size = 1
  with pytest.raises(UserError, match="type_vocab_size=1 .*--nosegment_ids"):
    runs.pretrain(tiny_run, tmp_path / "one", bert=bert)
  runs.pretrain(
    tiny_run, tmp_path / "one", bert=bert, num_train_steps=4, segment_ids=False
  )


def test_records_without_pairs_teach_no_next_sentence(tmp_path):
  files, _ = write_packed(tmp_path)
  (path,) = tmp_path.glob("*.manifest.json")
  manifest = records.Manifest.load(str(path))
  manifest.settings["objective"] = "mlm"
  manifest.save(str(path))
  tiny = write_config(tmp_path / "config.json", num_hidden_layers=1), files
  for flags in ({"objective": "mlm_nsp"}, {"segment_ids": True}):
    with pytest.raises(records.DataError, match="have no pairs of segments"):
      runs.pretrain(tiny, tmp_path / "run", **flags)
  runs.pretrain(tiny, tmp_path / "run", num_train_steps=4)
  report = metrics.read_jsonl(str(tmp_path / "run" / metrics.METRICS_FILE))[-1]
  assert report["loss"] > 0 and "next_sentence_loss" not in report


def test_records_of_two_kinds_need_an_objective(packed_run, tmp_path):
  (tiny, files), _ = packed_run
  (path,) = tmp_path.glob("*.manifest.json")
  manifest = records.Manifest.load(str(path))
  more = tmp_path / "more"
  more.mkdir()
  for shard in manifest.files:
    os.link(tmp_path / shard.name, more / shard.name)
  settings = {**manifest.settings, "objective": "mlm"}
  dataclasses.replace(manifest, settings=settings).save(str(more / path.name))
  given = dict(
    bert_config_file=tiny, output_dir=f"{tmp_path}/run",
    input_file=f"{files},{more}/*.tfrecord",
  )  # fmt: skip
  found = lambda **flags: settled_flags(**given, **flags)[0]
  with pytest.raises(
    UserError, match="for mlm.*: give records of one kind, or"
  ):
    found()
  assert found(objective="mlm").objective == "mlm"


def test_drawn_masks_have_room_for_every_data_set(tmp_path):
  """Whichever file is the first."""
  (tmp_path / "b").mkdir()
  (tmp_path / "c").mkdir()
  pattern, _ = write_packed(tmp_path / "b", dynamic=True)
  other, _ = write_packed(tmp_path / "c", dynamic=True)
  (path,) = (tmp_path / "b").glob("*.manifest.json")
  made = records.Manifest.load(str(path))
  dataclasses.replace(made, max_predictions_per_seq=9).save(str(path))
  for files in (f"{pattern},{other}", f"{other},{pattern}"):
    shape = record_shape.of_manifest(files, 100)
    assert shape.max_predictions_per_seq == 9
    assert shape.masks.max_predictions_per_seq == 9


def test_masks_that_are_written_cannot_be_decided(tiny_run, tmp_path):
  masks = MaskConfig(masked_lm_prob=(0.3, 0.15))
  with pytest.raises(UserError, match="--masked_lm_prob: the masks of .*drawn"):
    runs.pretrain(tiny_run, tmp_path, masks=masks)


def test_words_that_records_do_not_know_are_refused(tmp_path):
  pattern, _ = write_packed(tmp_path, dynamic=True)
  (path,) = tmp_path.glob("*.manifest.json")
  manifest = records.Manifest.load(str(path))
  manifest.settings["do_whole_word_mask"] = False
  manifest.save(str(path))
  tiny = write_config(tmp_path / "config.json"), pattern
  config = runs.config(
    tiny, tmp_path, masks=MaskConfig(do_whole_word_mask=True)
  )
  with pytest.raises(UserError, match="do not say where words begin"):
    record_shape.of_run(pattern, config)


def interrupt(config, after):
  """Runs `config` but dies, without saving, when update `after` is reported."""

  class Killed(Exception):
    pass

  write = metrics.MetricsLog.write

  def dying_write(log, report):
    write(log, report)
    if report["global_step"] == after:
      raise Killed

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(metrics.MetricsLog, "write", dying_write)
    with pytest.raises(Killed):
      run_pretraining.pretrain(config, Comm())


@pytest.mark.slow
def test_a_run_is_reproducible_and_its_seed_matters(tiny_run, tmp_path):
  for name, seed in (("a", 1), ("b", 1), ("c", 2)):
    runs.pretrain(
      tiny_run, tmp_path / name, seed=seed, dropout=0.1, num_train_steps=4
    )
  assert runs.metrics(tmp_path / "a") == runs.metrics(tmp_path / "b")
  assert runs.metrics(tmp_path / "a") != runs.metrics(tmp_path / "c")


def test_evaluation_is_over_all_records_and_independent_of_the_batch(
  tiny_run, tmp_path
):
  results = []
  for size in (7, 64):
    result = runs.pretrain(
      tiny_run,
      tmp_path / "run",
      do_eval=True,
      eval_batch_size=size,
      num_train_steps=4,
    )
    results.append(result["evaluation"])
  assert results[0]["examples"] == results[1]["examples"] == 120
  assert results[0]["global_step"] == 4
  for key, value in results[0].items():
    np.testing.assert_allclose(value, results[1][key], rtol=1e-5, err_msg=key)


def test_packed_records_train_as_their_examples(tmp_path):
  """An update of the whole data set, packed and with an example a record."""
  folders = ("packed", "unpacked")
  for name in folders:
    (tmp_path / name).mkdir()
  files, _ = write_packed(tmp_path / "packed")
  packed = tfrecord.RecordSet(records.expand_patterns(files))
  examples = [e for r in packed for e in examples_of(feature_values(r))]
  path = tmp_path / "unpacked" / "data.tfrecord"
  with tfrecord.shard_writer(str(path)) as writer:
    for example in examples:
      writer.write(tf_example.encode_example(example))
  config = write_config(tmp_path / "config.json")
  for folder, pattern, batch in (
    ("packed", files, len(packed)),
    ("unpacked", str(path), len(examples)),
  ):
    result = runs.pretrain(
      (config, pattern),
      tmp_path / folder / "run",
      train_batch_size=batch,
      global_batch_size=len(examples),
      do_eval=True,
    )
    assert result["evaluation"]["examples"] == len(examples)
  for key in (
    "masked_lm_loss", "next_sentence_loss", "examples", "grad_norm",
  ):  # fmt: skip
    np.testing.assert_allclose(
      *(runs.metrics(tmp_path / f / "run", key) for f in folders), rtol=1e-5
    )


def filled(values, size):
  return np.pad(values, (0, size - len(values)))


def examples_of(record):
  """The examples of a packed record, each as a record's features."""
  numbers = np.array(record["input_mask"])
  values = {name: np.array(v) for name, v in record.items()}
  for number in range(1, numbers.max() + 1):
    places = np.flatnonzero(numbers == number)
    masked = np.flatnonzero(
      (values["masked_lm_weights"] > 0)
      & (numbers[values["masked_lm_positions"]] == number)
    )
    tokens = lambda name, at=places: filled(values[name][at], 32)
    predictions = lambda name, at=masked: filled(values[name][at], 5)
    yield {
      "input_ids": tokens("input_ids"),
      "input_mask": filled(np.ones(len(places), int), 32),
      "segment_ids": tokens("segment_ids"),
      "masked_lm_positions": filled(
        values["masked_lm_positions"][masked] - places[0], 5
      ),
      "masked_lm_ids": predictions("masked_lm_ids"),
      "masked_lm_weights": predictions("masked_lm_weights").astype(np.float32),
      "next_sentence_labels": values["next_sentence_labels"][
        number - 1 : number
      ],
    }


# Ops that TensorFlow makes and nobody runs: ends of its gradient functions and
# conditions, handles of iterators and variables. The loss is only
# differentiated.
TENSORFLOWS_OWN = re.compile(
  r"^gradients/|^IteratorToStringHandle$"
  r"|/(Switch|switch_[tf])$|/(Read/ReadVariableOp|IsInitialized/.*)$"
  r"|^scaled_loss$|^loss/"
)


def settled_flags(**given):
  """(the config, the log's lines) of a command with these flags."""
  values = command_line(PretrainingConfig, do_train=True, **given)
  return run_settings.configured(PretrainingConfig, values)


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
  (manifest,) = tmp_path.glob("*.manifest.json")
  manifest = records.Manifest.load(str(manifest))
  size = manifest.tokenizer.vocab_size
  config, lines = settled_flags(**given, bert_config_file="mini")
  assert (config.bert.hidden_size, config.bert.vocab_size) == (256, size)
  assert lines == [
    f"--bert_config_file=mini: vocabulary of {size} from the data's vocabulary"
  ]
  assert config.as_dict()["bert"]["vocab_size"] == size
  # So many words the preset's own file would have.
  config, _ = settled_flags(
    **given, bert_config_file="mini", sampled_softmax=size
  )
  with pytest.raises(UserError, match=f"the vocabulary has {size} words"):
    record_shape.of_run(files, config)
  config, _ = settled_flags(
    **given, bert_config_file="mini", sampled_softmax=40000
  )
  with pytest.raises(UserError, match=f"the vocabulary has {size} words"):
    record_shape.of_run(files, config)
  bare = write_records(tmp_path / "bare.tfrecord", 3)
  other = {**given, "input_file": bare, "bert_config_file": "mini"}
  assert settled_flags(**other)[0].bert.vocab_size == 30522
  config, _ = settled_flags(**given, bert_config_file=config_file)
  assert config.bert.vocab_size == 100
  made = {"a": ("a.manifest.json", manifest)}
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
  model = tmp_path / "model"
  model.mkdir()
  shutil.copy(config_file, model / "bert_config.json")
  checkpoint_files.write_weights(f"{model}/x.ckpt", {"x": np.zeros(1)})
  (path,) = tmp_path.glob("*.manifest.json")
  manifest = records.Manifest.load(str(path))
  (model / "vocab.txt").write_text("a\n")

  def told(case, digest):
    (model / "task.json").write_text(json.dumps({"do_lower_case": case}))
    tokenizer = dataclasses.replace(manifest.tokenizer, sha256=digest)
    dataclasses.replace(manifest, tokenizer=tokenizer).save(str(path))
    _, lines = settled_flags(
      input_file=files, output_dir="new", init_checkpoint=str(model)
    )
    assert f"{model}/x.ckpt (the only one)" in lines[0]
    staged = tmp_path / "stages.json"
    staged.write_text(json.dumps([{"num_train_steps": 1, "input_file": files}]))
    values = command_line(
      PretrainingConfig, do_train=True, stages=str(staged), output_dir="new",
      init_checkpoint=str(model), global_batch_size=4,
    )  # fmt: skip
    assert run_settings.configured(PretrainingConfig, values)[1] == lines
    return any("embeddings are of other words" in line for line in lines)

  own = file_sha256(str(model / "vocab.txt"))
  assert [told(True, own), told(False, own), told(True, "0")] == [0, 1, 1]
  # Of google/bert's folders the name says it.
  cased = tmp_path / "cased_L-12_H-768_A-12"
  cased.mkdir()
  (cased / "vocab.txt").write_text("a\n")
  tokenizer = dataclasses.replace(manifest.tokenizer, sha256=own)
  dataclasses.replace(manifest, tokenizer=tokenizer).save(str(path))
  (line,) = run_settings.other_text(f"{cased}/bert_model.ckpt", files)
  assert "model of --init_checkpoint, of cased text" in line
  (model / "vocab.txt").unlink()
  read = {"files": [str(tmp_path / "data-0.tfrecord")]}
  read["tokenizer"] = dataclasses.asdict(tokenizer)
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
    del fetched["variables"]
    initializers = tf.group(
      tf.global_variables_initializer(), tf.local_variables_initializer()
    )
    starts = [o for o in graph.get_operations() if o.type == "MakeIterator"]
    reached = ancestors([*tf.nest.flatten(fetched), initializers, *starts])
    stray = [
      op.name
      for op in graph.get_operations()
      if op not in reached and not TENSORFLOWS_OWN.search(op.name)
    ]
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
  runs.trained(tiny_run, tmp_path / "first", num_train_steps=4)
  source = str(tmp_path / "first" / "model.ckpt-4")
  checkpoint = runs.weights(tmp_path / "first")
  # A checkpoint without the NSP head and with something foreign.
  partial = str(tmp_path / "partial.ckpt")
  with tf.Graph().as_default(), tf.Session() as session:
    for name, value in checkpoint.items():
      if name.startswith("bert/") and "adam" not in name:
        tf.get_variable(name, initializer=value)
    tf.get_variable("foreign", initializer=1.0)
    session.run(tf.global_variables_initializer())
    tf.train.Saver().save(session, partial)
  capfd.readouterr()
  runs.pretrain(
    tiny_run, tmp_path / "second", init_checkpoint=partial, num_train_steps=4
  )
  text = capfd.readouterr().err
  assert "unused: 1\n    foreign" in text
  assert "cls/seq_relationship/output_bias" in text.split("missing there")[1]
  # Update 1 has rate 0, so its loss is that of the weights as loaded.
  runs.pretrain(
    tiny_run, tmp_path / "third", init_checkpoint=source, num_train_steps=4
  )
  assert (
    runs.metrics(tmp_path / "third")[0] < (runs.metrics(tmp_path / "first")[0])
  )
  assert runs.metrics(tmp_path / "third", "global_step")[0] == 1


@pytest.mark.slow
def test_evaluating_a_checkpoint_without_training(tiny_run, tmp_path):
  trained = runs.pretrain(
    tiny_run, tmp_path / "a", do_eval=True, num_train_steps=4
  )
  alone = runs.pretrain(
    tiny_run,
    tmp_path / "b",
    do_train=False,
    do_eval=True,
    init_checkpoint=str(tmp_path / "a" / "model.ckpt-4"),
  )
  again = runs.pretrain(tiny_run, tmp_path / "a", do_train=False, do_eval=True)
  loss = trained["evaluation"]["masked_lm_loss"]
  assert alone["evaluation"]["masked_lm_loss"] == loss
  assert again["evaluation"] == trained["evaluation"]


def test_evaluating_with_the_config_of_another_model_is_refused(
  tiny_run, tmp_path
):
  runs.pretrain(tiny_run, tmp_path / "a", num_train_steps=4)
  bert = runs.config(tiny_run, tmp_path).bert
  bert.hidden_act = "relu"
  with pytest.raises(UserError, match="hidden_act gelu -> relu"):
    runs.pretrain(
      tiny_run, tmp_path / "a", do_train=False, do_eval=True, bert=bert
    )


def test_records_made_again_are_noticed(packed_run, tmp_path, capsys):
  tiny, _ = packed_run
  folder = tmp_path / "run"
  runs.pretrain(tiny, folder, num_train_steps=2, num_warmup_steps=0)
  (path,) = tmp_path.glob("*.manifest.json")
  before = json.loads(path.read_text())

  def change(edit):
    made = copy.deepcopy(before)
    edit(made)
    path.write_text(json.dumps(made))

  change(lambda made: made["files"][0].update(sha256="1" * 64))
  assert (
    description.read(str(folder)).manifest() is None
  )  # not of these records
  runs.pretrain(tiny, folder, num_train_steps=3, num_warmup_steps=0)
  assert "\n  contents of records " in capsys.readouterr().err
  assert description.read(str(folder)).manifest()[0] == str(path)
  change(lambda made: made["tokenizer"].update(sha256="2" * 64))
  for flags in ({"num_train_steps": 4}, {"do_train": False, "do_eval": True}):
    with pytest.raises(UserError, match="SHA-256 2.* one vocabulary"):
      runs.pretrain(tiny, folder, num_warmup_steps=0, **flags)


def test_evaluations_after_the_update_of_a_start_are_dropped(
  tiny_run, tmp_path
):
  updates = dict(num_train_steps=4, num_warmup_steps=0)
  runs.pretrain(
    tiny_run,
    tmp_path,
    do_eval=True,
    eval_every_steps=1,
    save_checkpoints_steps=2,
    **updates,
  )
  on = metrics.set_before(str(tmp_path), 4)
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
  run = dict(do_eval=True, eval_every_steps=1, num_warmup_steps=0)
  runs.pretrain(tiny_run, tmp_path, num_train_steps=2, **run)
  path = tmp_path / metrics.EVAL_METRICS_FILE
  lines = metrics.read_jsonl(str(path))
  lines[1]["masked_lm_loss"] = 0.0  # update 1, on easier records
  path.write_text("".join(f"{json_files.text(line)}\n" for line in lines))
  best = lambda step: metrics.best_evaluation(
    str(tmp_path), step, metrics.BEST_BY
  )
  assert best(2) == 1
  capsys.readouterr()
  said = "the best one is chosen among those from here on"
  many = dict(max_eval_steps=100, eval_batch_size=7)  # which are all records
  runs.pretrain(tiny_run, tmp_path, num_train_steps=3, **many, **run)
  assert best(3) == 1 and said not in capsys.readouterr().err
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=4, max_eval_steps=1, eval_batch_size=4,
    **run,
  )  # fmt: skip
  # Update 3, from which it resumed, is evaluated again.
  found = metrics.read_jsonl(str(path))
  assert [line["global_step"] for line in found] == [0, 1, 2, 3, 4]
  assert best(4) > 2
  assert metrics.evaluations_since_best(str(tmp_path), 4, metrics.BEST_BY) < 2
  assert capsys.readouterr().err.count(said) == 1
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=5, max_eval_steps=1, eval_batch_size=4,
    **run,
  )  # fmt: skip
  assert said not in capsys.readouterr().err


def test_the_run_folder_says_what_was_run(tiny_run, tmp_path):
  runs.pretrain(
    tiny_run, tmp_path / "run", do_eval=True, num_train_steps=4,
    eval_every_steps=2,
  )  # fmt: skip
  run = runs.read_json(tmp_path / "run", description.RUN_FILE)["runs"][0]
  assert run["flags"]["learning_rate"] == 1e-3
  assert run["plan"]["records_per_update"] == 24
  assert run["data"]["records"] == 120
  assert run["versions"]["tensorflow"] == tf.__version__
  results = runs.read_json(tmp_path / "run", run_folder.EVAL_RESULTS_FILE)
  assert {
    "masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss",
    "next_sentence_accuracy", "examples", "global_step",
  } <= set(results)  # fmt: skip
  logged = str(tmp_path / "run" / metrics.EVAL_METRICS_FILE)
  log = metrics.read_jsonl(logged)
  assert [entry["global_step"] for entry in log] == [0, 2, 4]
  # An evaluation alone, of other records perhaps, chooses no best checkpoint.
  alone = dict(do_train=False, do_eval=True, max_eval_steps=1)
  runs.pretrain(tiny_run, tmp_path / "run", **alone)
  assert metrics.read_jsonl(logged) == log
  report = metrics.read_jsonl(str(tmp_path / "run" / metrics.METRICS_FILE))[-1]
  assert {
    "global_step", "loss", "masked_lm_loss", "next_sentence_loss",
    "learning_rate", "grad_norm", "loss_scale", "examples",
    "examples_per_second", "tokens_per_second",
  } <= set(report)  # fmt: skip
  assert report["examples"] == 96
  [events] = os.listdir(tmp_path / "run" / "train")
  tags = {
    value.tag: value.simple_value
    for event in tf.train.summary_iterator(
      str(tmp_path / "run" / "train" / events)
    )
    for value in event.summary.value
  }
  assert tags["train/loss"] == pytest.approx(report["loss"], rel=1e-6)


def test_the_padding_share_is_counted(tmp_path):
  write_records(tmp_path / "data-0.tfrecord", 24)
  tiny = write_config(tmp_path / "c.json"), str(tmp_path / "data-0.tfrecord")
  result = runs.pretrain(tiny, tmp_path / "run", num_train_steps=2,
                         num_warmup_steps=0)  # fmt: skip
  mask = [
    tf.train.Example.FromString(r).features.feature["input_mask"]
    for r in tf.io.tf_record_iterator(tiny[1])
  ]
  real = sum(sum(m.int64_list.value) for m in mask)
  assert result["training"]["padding"] == pytest.approx(1 - real / (24 * 32))


# -----------------------------------------------------------------------------
# Errors: one clear message with the names and numbers that disagree
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(input_file="/nowhere/*.tfrecord"), ["/nowhere/*.tfrecord"]),
    (dict(train_batch_size=121, global_batch_size=121), ["120", "121"]),
    (dict(max_seq_length=64), ["data-0", "record 0", "32", "64"]),
    (dict(init_checkpoint="/nowhere/model.ckpt"), ["/nowhere/model.ckpt"]),
    (dict(do_train=False), ["--do_train", "--do_eval"]),
    (dict(do_train=False, do_eval=True), ["nothing to evaluate"]),
    (dict(learning_rate=float("nan")), ["learning_rate", "nan"]),
    (dict(num_accumulation_steps=3), ["num_accumulation_steps=3", "24"]),
    (dict(eval_every_steps=5), ["eval_every_steps", "--do_eval"]),
  ],
)
def test_settings_that_cannot_be(tiny_run, tmp_path, changes, words):
  with pytest.raises(UserError) as error:
    runs.pretrain(tiny_run, tmp_path / "run", **changes)
  for word in words:
    assert word in str(error.value)


def test_records_longer_than_the_positions_are_refused(tiny_run, tmp_path):
  short = write_config(tmp_path / "short.json", max_position_embeddings=16)
  with pytest.raises(UserError, match=r"32 tokens.*max_position_embeddings=16"):
    runs.pretrain((short, tiny_run[1]), tmp_path / "run")


def test_a_checkpoint_of_another_shape_is_refused(tiny_run, tmp_path):
  """In its run's folder by the config's key, else by the variable."""
  run = tmp_path / "run"
  runs.trained(tiny_run, run, num_train_steps=4)
  wide = write_config(
    tmp_path / "wide.json", num_hidden_layers=1, intermediate_size=128
  )
  told = [run / name for name in ("bert_config.json", "run.json")]
  before = [path.read_bytes() for path in told]
  with pytest.raises(UserError, match="intermediate_size 64 -> 128: its model"):
    runs.pretrain((wide, tiny_run[1]), run)
  assert [path.read_bytes() for path in told] == before
  with pytest.raises(
    checkpointing.CheckpointError,
    match=r"model\.ckpt-4.*layer_0/intermediate.* is \[.*64\].* there",
  ):
    runs.pretrain(
      (wide, tiny_run[1]),
      tmp_path / "new",
      init_checkpoint=f"{run}/model.ckpt-4",
    )


def test_resuming_another_run_is_refused(tiny_run, tmp_path):
  runs.trained(tiny_run, tmp_path / "run", num_train_steps=4)
  for changes, said in (
    (dict(seed=5), "--seed 12345 -> 5: give the former"),
    (dict(shuffle_block_records=9), "--shuffle_block_records 0 -> 9"),
    ({}, "records 120 -> 123"),
  ):
    if not changes:
      write_records(tmp_path / "data-9.tfrecord", 3)
    with pytest.raises(UserError, match=said):
      runs.pretrain(tiny_run, tmp_path / "run", **changes)


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
      config, plan, {"files": []}, step, seen, orders, description.read(None),
      "folder",
    )  # fmt: skip
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
    # A tenth by default.
    (
      20, 160, {**PER_RANK, "num_warmup_steps": None},
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


@pytest.mark.parametrize(
  "stated, steps, decay, want",
  [
    (None, 1_000_000, None, 10_000),
    (None, 100_000, None, 10_000),  # google/bert's defaults
    (None, 40, None, 4),
    (None, 9, None, 0),
    (None, 1, None, 0),
    (None, 100, 95, 5),
    (0, 1000, None, 0),
    (7, 1000, None, 7),
    (1001, 1000, None, 1001),  # which `resolve` refuses
  ],
)
def test_the_default_warmup_follows_the_length_of_the_run(
  tiny_run, stated, steps, decay, want
):
  config = runs.config(
    tiny_run, "folder", num_warmup_steps=stated, num_train_steps=steps,
    lr_schedule="wsd", num_decay_steps=decay,
  )  # fmt: skip
  assert config.warmup_of(steps) == want
  if want + (decay or 0) <= steps:
    assert plans.of_run(config, None, 1).warmup_updates == want


def test_steps_of_another_micro_batch_are_others(tiny_run, tmp_path):
  """In per-rank mode they are stated in the micro-batches of one rank."""
  settings = {**PER_RANK, "train_batch_size": 8, "save_checkpoints_steps": 0}
  run = tmp_path / "run"
  runs.pretrain(tiny_run, run, **{**settings, "num_train_steps": 10})
  again = dict(train_batch_size=4, num_accumulation_steps=2)
  with pytest.raises(
    UserError,
    match="updates of the same steps 10 -> 5: .* give --global_batch_size=8 "
    "--num_train_steps=10 --num_warmup_steps=6 and leave out",
  ):
    runs.pretrain(tiny_run, run, **{**settings, **again, "num_train_steps": 10})
  # The advice is in that run's steps, also where the batch is another one.
  with pytest.raises(
    UserError, match="--global_batch_size=8 --num_train_steps=20 --num_warm"
  ):
    again = dict(train_batch_size=4, num_train_steps=20)
    runs.pretrain(tiny_run, run, **{**settings, **again})


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
  before = runs.config(tiny_run, tmp_path, precision="bf16", dropout=0.1)
  plan = plans.of_run(before, None, 1)
  started = {
    "flags": json.loads(json_files.text(before.as_dict())),
    "plan": dataclasses.asdict(plan),
    "data": {"files": ["a", "b"]},
  }

  def changes(files=("a", "b"), **settings):
    config = runs.config(tiny_run, tmp_path, **settings)
    now = resume.facts_of(config, plan, {"files": list(files)})
    return description.agree(description.facts(**started), now, "a", ())

  same = dict(precision="bf16", dropout=0.1)
  assert changes(**same) == []
  assert changes(("c",), **same) == ["record files a,b -> c"]
  found = changes(
    recompute=("layer",), init_checkpoint="x", optimizer={"optimizer": "lamb"}
  )
  assert found == [
    "--bert_config_file: hidden_dropout_prob 0.1 -> 0.0",
    "--bert_config_file: attention_probs_dropout_prob 0.1 -> 0.0",
    "--init_checkpoint (not given) -> x",
    "--optimizer adamw -> lamb",
    "--precision bf16 -> fp32",
    "--recompute (empty) -> layer",
  ]
  now = resume.facts_of(runs.config(tiny_run, tmp_path, **same))
  model = (description.MODEL,)
  assert description.agree(description.facts(**started), now, "a", model) == []
  # A run of before has not all keys of today.
  bert = modeling.BertConfig.from_dict({**before.bert.to_dict(), "gated": True})
  gated = dataclasses.replace(before, bert=bert)
  with pytest.raises(UserError, match="gated false -> true: its mod"):
    now = resume.facts_of(gated)
    description.agree(description.facts(**started), now, "a", model)
  now = resume.facts_of(runs.config(tiny_run, tmp_path, **same))
  started["flags"]["bert"]["pre_layer_norm"] = True
  with pytest.raises(UserError, match="pre_layer_norm true -> false: its mod"):
    description.agree(description.facts(**started), now, "a", model)


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
  given = runs.weights(main)

  def start_of(named):
    values = command_line(
      PretrainingConfig, do_train=True, input_file=tiny_run[1],
      output_dir=str(branch), lr_schedule="wsd", num_decay_steps=4,
      cooldown_from=str(named),
    )  # fmt: skip
    config, _ = run_settings.configured(PretrainingConfig, values)
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
  made = runs.weights(branch)
  assert made.keys() == given.keys()
  for name, value in given.items():
    np.testing.assert_array_equal(made[name], value, err_msg=name)
  assert runs.metrics(branch) == runs.metrics(main)[8:]
  # It is a run of its own from then on.
  assert start_of(main) == start_of(start) == start
  assert runs.pretrain(tiny_run, branch, **settings)["training"]["updates"] == 0
  with pytest.raises(UserError, match=r"8 -> .*4: give the former"):
    start_of(main / "model.ckpt-4")
  shutil.rmtree(branch)
  for named in (main / "model.ckpt-2", main / "model.ckpt-10"):
    with pytest.raises(UserError, match=r"by its updates \(4 to 8 of"):
      start_of(named)
  with pytest.raises(UserError, match="no folder of a training"):
    start_of(tmp_path)
  # Nor is it 10 or 12 where the run is to go on: their rates have fallen.
  made = runs.read_json(main, "run.json")
  made["runs"][-1]["plan"]["updates"] = 500
  (main / "run.json").write_text(json.dumps(made))
  assert start_of(main) == start
  monkeypatch.chdir(main)
  assert start_of("model.ckpt-8") == "./model.ckpt-8"
  made["runs"][-1]["flags"]["rewarmup"] = False
  (main / "run.json").write_text(json.dumps(made))
  with pytest.raises(UserError, match=r"constant by its updates \(1 to 0 of"):
    start_of(main)
  with pytest.raises(UserError, match="--cooldown_from needs --num_decay"):
    runs.pretrain(tiny_run, branch, **{**settings, "num_decay_steps": None})


def test_a_run_ends_in_its_time_with_its_rate_at_its_end(
  dynamic_run, tmp_path, monkeypatch
):
  """Each update takes a tenth of the time, but the first, which compiles."""
  tiny_run, global_batch = dynamic_run
  lap = lambda self: 0.0 if self._last is None else 6.0
  monkeypatch.setattr(Budget, "lap", lap)
  settings = dict(
    max_train_minutes=1.0, num_train_steps=10_000, num_warmup_steps=2_500,
    global_batch_size=global_batch, max_predictions_per_seq=None,
    masks=MaskConfig(masked_lm_prob=(0.3, 0.15)),
  )  # fmt: skip
  result = runs.pretrain(tiny_run, tmp_path, **settings)
  assert result["training"]["out_of_time"]
  tenths = np.array([0, 4, 8, 7, 6, 5, 4, 3, 2, 1])
  np.testing.assert_allclose(
    runs.metrics(tmp_path, "learning_rate"), 1e-4 * tenths, rtol=1e-3
  )
  again = runs.pretrain(tiny_run, tmp_path, **settings)["training"]
  assert again["updates"] == 0 and again["out_of_time"]


def test_a_stop_costs_no_time(dynamic_run, tmp_path, monkeypatch):
  tiny_run, global_batch = dynamic_run
  monkeypatch.setattr(
    Budget, "lap", lambda self: 0.0 if self._last is None else 6.0
  )
  settings = dict(
    max_train_minutes=1.0, num_warmup_steps=0, global_batch_size=global_batch
  )
  runs.pretrain(tiny_run, tmp_path, num_train_steps=4, **settings)
  runs.pretrain(tiny_run, tmp_path, num_train_steps=10_000, **settings)
  # 18 s in the first start; update 5 is the first of the second.
  assert runs.metrics(tmp_path, "learning_rate")[4:] == pytest.approx(
    [7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4], rel=1e-3
  )


def test_a_resumed_run_says_what_changed(tiny_run, tmp_path, capsys):
  """And keeps its learning rate, where that would depend on the ranks."""
  folder = tmp_path / "run"
  runs.pretrain(tiny_run, folder, num_train_steps=2, num_warmup_steps=0)
  assert "changed since" not in capsys.readouterr().err
  with pytest.raises(UserError, match="records of an update 24 -> 12"):
    runs.pretrain(tiny_run, folder, global_batch_size=12)
  assert len(runs.read_json(folder, "run.json")["runs"]) == 1
  runs.pretrain(
    tiny_run, folder, num_train_steps=3, num_warmup_steps=0, train_batch_size=8
  )
  assert (
    "changed since its last start:\n  --train_batch_size 24 -> 8\n"
    "  --num_train_steps 2 -> 3\n  updates 2 -> 3\n"
  ) in capsys.readouterr().err
  # The same command, but run.json has it that there were 4 ranks.
  path = folder / "run.json"
  raw = json.loads(path.read_text())
  raw["runs"][-1]["flags"]["lr_scaling"] = "sqrt"
  raw["runs"][-1]["plan"]["ranks"] = 4
  path.write_text(json.dumps(raw))
  with pytest.raises(
    UserError,
    match="factor of --lr_scaling 2.0 -> 1.0: .* --learning_rate=0.002",
  ):
    runs.pretrain(tiny_run, folder, num_train_steps=4, lr_scaling="sqrt")
  config = runs.config(tiny_run, folder, lr_scaling="sqrt")
  plan = plans.of_run(config, None, 1)
  raw["runs"][-1]["flags"]["stages"] = [{"num_train_steps": 2}]
  path.write_text(json.dumps(raw))
  stages = ({"num_train_steps": 20},)
  config = dataclasses.replace(config, stages=stages, num_train_steps=100_000)
  with pytest.raises(UserError, match="=none and 2.0 times --learning_rate"):
    resume.check_run(config, plan, description.read(str(folder)))


def test_a_run_of_a_fixed_time_has_no_schedule_to_continue(
  dynamic_run, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    Budget, "lap", lambda self: 0.0 if self._last is None else 30.0
  )
  tiny_run, batch = dynamic_run
  run = dict(num_warmup_steps=0, global_batch_size=batch)
  runs.pretrain(tiny_run, tmp_path / "one", max_train_minutes=1.0, **run)
  (path,) = (tmp_path / "one").glob("model.ckpt-*.index")
  run["init_checkpoint"] = str(path).removesuffix(".index")
  with pytest.raises(CheckpointError, match="max_train_minutes.*--norewarmup"):
    runs.pretrain(tiny_run, tmp_path / "two", rewarmup=False, **run)


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
  run = dict(num_warmup_steps=0, loss_scale={"initial_loss_scale": 64.0})
  runs.pretrain(tiny_run, tmp_path, num_train_steps=2, **run)
  runs.pretrain(tiny_run, tmp_path, num_train_steps=3, precision="fp16", **run)
  assert runs.metrics(tmp_path, "loss_scale") == [1.0, 1.0, 64.0]


@pytest.mark.slow
def test_a_run_that_could_not_learn_is_refused(tiny_run, tmp_path):
  """--init_checkpoint whose update is past the end of the schedule."""
  runs.pretrain(tiny_run, tmp_path / "one", num_train_steps=5)
  changes = dict(
    init_checkpoint=str(tmp_path / "one" / "model.ckpt-5"),
    rewarmup=False,
    num_train_steps=5,
  )
  with pytest.raises(
    UserError,
    match="from 1 to 5 is 0, .* a peak of 0.001, .* counted on from update 5 ",
  ):
    runs.pretrain(tiny_run, tmp_path / "two", **changes)
  with pytest.raises(UserError, match="from 1 to 20 is 0.* with a peak of 0, "):
    runs.pretrain(tiny_run, tmp_path / "two", learning_rate=0.0)
  assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
  "ending",
  [
    ".data-00000-of-00001",
    pytest.param(".index", marks=pytest.mark.slow),
    pytest.param(".json", marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize(
  "how",
  [
    "cut",
    pytest.param("changed", marks=pytest.mark.slow),
    pytest.param("gone", marks=pytest.mark.slow),
  ],
)
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
  if (ending, how) == (".json", "gone"):  # never was one
    assert "damaged: " not in told
  else:
    assert f"damaged: {path}: " in told
  assert f"resumed {tmp_path}/model.ckpt-4\n" in told
  assert runs.metrics(tmp_path, "global_step") == list(range(1, 9))
  for name, value in runs.weights(tmp_path).items():
    np.testing.assert_array_equal(value, whole[name], err_msg=name)


@pytest.mark.slow
def test_nothing_whole_is_no_new_run(tiny_run, tmp_path):
  runs.trained(tiny_run, tmp_path, num_train_steps=4)
  (tmp_path / "model.ckpt-4.index").unlink()
  with pytest.raises(
    checkpointing.CheckpointError,
    match=r"no checkpoint is whole \(.*ckpt-4.index: No such file.*start a new",
  ):
    runs.pretrain(tiny_run, tmp_path, num_train_steps=4)


def test_the_command_ends_with_one_clear_line(tiny_run, tmp_path):
  """Through the flags, as a person starts it: no traceback, status 1."""
  config = json.loads(open(tiny_run[0], encoding="utf-8").read())
  config["hiden_size"] = 3
  bad = tmp_path / "bad.json"
  bad.write_text(json.dumps(config))
  process = runs.command((str(bad), tiny_run[1]), tmp_path / "run")
  assert process.returncode == 1
  last = process.stderr.strip().splitlines()[-1]
  assert "bad.json" in last and "hiden_size" in last
  assert "Traceback" not in process.stderr
  # The error is all: TensorFlow has not started.
  assert process.stderr.splitlines() == [last]


def test_a_word_that_is_no_flag_is_an_error(tiny_run, tmp_path):
  """Such as what a shell makes of an unquoted glob."""
  process = runs.command(tiny_run, tmp_path / "run", flags=["other.tfrecord"])
  assert process.returncode == 1
  assert "other.tfrecord" in process.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_second_phase_warms_up_again_unless_told_not_to(tiny_run, tmp_path):
  runs.pretrain(tiny_run, tmp_path / "one", num_train_steps=6)
  first = str(tmp_path / "one" / "model.ckpt-6")
  rates = {}
  for rewarmup in (True, False):
    folder = tmp_path / str(rewarmup)
    runs.pretrain(
      tiny_run,
      folder,
      init_checkpoint=first,
      rewarmup=rewarmup,
      num_train_steps=10,
    )
    rates[rewarmup] = runs.metrics(folder, "learning_rate")
  schedule = lr_schedule.Schedule(peak=1e-3, total=10, warmup=4)
  np.testing.assert_allclose(rates[True], schedule(np.arange(10)), rtol=1e-5)
  np.testing.assert_allclose(
    rates[False], schedule(np.arange(6, 16)), rtol=1e-5
  )


@pytest.mark.slow
def test_lamb_trains_and_resumes_bit_for_bit(tiny_run, tmp_path):
  settings = dict(
    optimizer=dict(optimizer="lamb", bias_correction=True, prenormalize=True),
    lr_schedule="warmup_exp_decay_exp",
    lr_decay_steps=5,
    learning_rate=2e-2,
    save_checkpoints_steps=10,
  )
  runs.pretrain(tiny_run, tmp_path / "whole", **settings)
  losses = runs.metrics(tmp_path / "whole")
  assert losses[-1] < losses[0]
  stopped = {**settings, "lr_offset": 0.0}
  runs.pretrain(tiny_run, tmp_path / "parts", num_train_steps=10, **stopped)
  runs.pretrain(tiny_run, tmp_path / "parts", **settings)
  whole, parts = (
    runs.weights(tmp_path / "whole"),
    runs.weights(tmp_path / "parts"),
  )
  assert whole.keys() == parts.keys() and "applied_updates" in whole
  for name, value in whole.items():
    np.testing.assert_array_equal(parts[name], value, err_msg=name)


@pytest.mark.parametrize(
  "precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_16_bits_train_as_float32_does(tiny_run, tmp_path, precision):
  runs.trained(tiny_run, tmp_path / "fp32", do_eval=True)
  runs.pretrain(
    tiny_run,
    tmp_path / precision,
    do_eval=True,
    precision=precision,
    loss_scale=dict(initial_loss_scale=2.0**10),
  )
  want, got = (
    runs.metrics(tmp_path / "fp32"),
    runs.metrics(tmp_path / precision),
  )
  assert got != want
  np.testing.assert_allclose(got, want, rtol=1e-2)
  assert not any(runs.metrics(tmp_path / precision, "skipped"))
  for name, value in runs.weights(tmp_path / precision).items():
    assert value.dtype in (np.float32, np.int64), name


@pytest.mark.slow
def test_fp16_resumes_with_its_loss_scale_bit_for_bit(tiny_run, tmp_path):
  """A scale that is far too high, so that it is on its way down at the stop."""
  settings = dict(
    precision="fp16",
    dropout=0.1,
    loss_scale=dict(initial_loss_scale=2.0**30, loss_scale_window=4),
    save_checkpoints_steps=10,
  )
  for folder, steps in (("whole", 20), ("parts", 10), ("parts", 20)):
    changes = dict(settings, loss_scale=dict(settings["loss_scale"]))
    runs.pretrain(
      tiny_run,
      tmp_path / folder,
      num_train_steps=steps,
      lr_schedule="constant",
      **changes,
    )
  whole = runs.weights(tmp_path / "whole")
  parts = runs.weights(tmp_path / "parts")
  assert whole.keys() == parts.keys() and "loss_scale/value" in whole
  for name, value in whole.items():
    np.testing.assert_array_equal(parts[name], value, err_msg=name)
  scales = runs.metrics(tmp_path / "parts", "loss_scale")
  assert scales[0] == 2.0**30 and scales[-1] < 2.0**25
  skipped = runs.metrics(tmp_path / "parts", "skipped")
  assert skipped[0] and not all(skipped)
  # All are counted, those from before the stop too.
  counted = runs.metrics(tmp_path / "parts", "skipped_updates")
  assert counted == np.cumsum(skipped).tolist()
