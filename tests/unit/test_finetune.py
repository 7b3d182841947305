"""Whole fine-tuning runs: packing, resume, best checkpoint, precision, XLA."""

import dataclasses
import glob
import json
import os
import re
import shutil
import types
from unittest import mock

import finetuning_runs
import numpy as np
import pytest
import runs
import samples
from sklearn.metrics import f1_score

from checkpoints import checkpoint_files, description, metrics
from common.errors import UserError
from common.files import file_sha256
from common.tensorflow_v1 import tf
from corpus import tables
from finetuning import (
  classification,
  embedding,
  finetune,
  multi_label,
  ner,
  packed,
  squad,
  task_file,
)
from interop import run_settings
from training import train_loop

run = finetuning_runs.run
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def config_file(tmp_path):
  return samples.write_config(tmp_path / "config.json")


def task_fixture(name):
  """(folder, **changes) -> a task on its own data, some of them held out."""

  @pytest.fixture(name=name)
  def make(tmp_path, letters):
    return finetuning_runs.maker(name, tmp_path, letters)

  return make


classify, answer, label, choose = map(
  task_fixture, ("classify", "answer", "label", "choose")
)


# Of the runs that several tests go on from.
TRAINED = dict(
  num_train_epochs=8.0, learning_rate=3e-3, dropout=0.1, do_eval=True,
  do_predict=True, eval_every_epochs=0, save_checkpoints_steps=10,
  keep_checkpoints=99,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, letters):
  """(fixture's name, folder): puts a run of its task there."""
  kept = {}

  def copy(name, folder):
    if name not in kept:
      place = tmp_path_factory.mktemp(name)
      kept[name] = place / "out"
      run(finetuning_runs.maker(name, place, letters)(kept[name], **TRAINED))
    runs.copy_run(kept[name], folder)
    return folder

  return copy


def configured(kind, **given):
  """(the config, the log's lines) of a command with these flags."""
  values = finetuning_runs.command_line(kind, **given)
  return run_settings.configured(kind, *kind.read_flags(values))


def from_flags(kind, **given):
  return configured(kind, **given)[0]


def settled_flags(**given):
  given = {"max_seq_length": 32, **given}
  return configured(classification.ClassifierConfig, **given)


# fmt: off
COMMON = {
  "vocabulary": {"vocab_file": "vocab.txt"},
  "best_by": {"keys": ["f1"], "higher": True},
}
CLASSIFIER = {
  "task": "classifier", "labels": ["0", "1"], "metrics": ["f1", "accuracy"],
  "columns": {"text": "words", "text_pair": None, "label": "class"},
  "max_seq_length": 32, "do_lower_case": False, **COMMON,
}
SQUAD = {
  "task": "squad", "max_seq_length": 48, "doc_stride": 16,
  "max_query_length": 8, "n_best_size": 5, "max_answer_length": 10,
  "version_2_with_negative": True, "null_score_diff_threshold": 0.5,
  "do_lower_case": True, **COMMON,
}
NER = {
  "task": "ner", "labels": ["B-LOC", "O"],
  "metrics": ["f1", "precision", "recall", "accuracy"], "word_column": 2,
  "label_column": None, "tokens_field": "words", "tags_field": "tags",
  "label_names": [], "max_seq_length": 48, "doc_stride": 16,
  "do_lower_case": False, **COMMON,
}
KINDS = {
  "classifier": (
    classification.ClassifierConfig, classification.Classification,
  ),
  "squad": (squad.SquadConfig, squad.Squad),
  "ner": (ner.NerConfig, ner.Ner),
}
# fmt: on


@pytest.fixture
def finished(tmp_path, config_file, letters):
  """task.json's content -> a run folder as far as settings go."""

  def make(task):
    folder = tmp_path / "done"
    folder.mkdir()
    shutil.copy(config_file, folder / "bert_config.json")
    shutil.copy(letters, folder / "vocab.txt")
    (folder / "task.json").write_text(json.dumps(task))
    (folder / "model.ckpt-3.json").write_text("{}")  # it says: a checkpoint
    return folder

  return make


@pytest.mark.parametrize(
  "task, count",
  [(CLASSIFIER, 8), (SQUAD, 8), (NER, 8)],
  ids=["classify", "squad", "ner"],
)
def test_flags_that_are_not_given_are_the_models(
  tmp_path, config_file, finished, task, count
):
  folder, kind = finished(task), KINDS[task["task"]][0]
  given = dict(bert_config_file=config_file, do_predict=True, predict_file="x")
  own = {**given, "output_dir": str(folder)}
  other = {**given, "output_dir": str(tmp_path / "new")}
  wanted = kind.defaults(task, {})
  wanted.pop("metrics" if task is NER else "", None)  # follow from the labels
  assert len(wanted) == count
  for flags in (own, {**other, "init_checkpoint": f"{folder}/model.ckpt-3"}):
    config = from_flags(kind, **flags)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.tokenizer().vocab_size > 50  # the folder's copy
  if task is SQUAD:
    threshold = from_flags(kind, **own, null_score_diff_threshold=2.0)
    assert threshold.null_score_diff_threshold == 2.0
  elif task is CLASSIFIER:
    assert wanted["regression"] is False
    glue = from_flags(kind, **own, task_name="MRPC")
    assert glue.text_column is None and glue.max_seq_length == 32
  resumed = from_flags(kind, **{**own, "do_train": True, "train_file": "y"})
  assert resumed.max_seq_length == task["max_seq_length"]


@pytest.fixture
def pretrained(tmp_path, letters):
  """A run folder of pre-training, cased, with checkpoints 3 and 5."""
  folder = tmp_path / "pretrain"
  folder.mkdir()
  data = samples.write_records_of(tmp_path / "data", letters, False)
  samples.write_config(folder / "bert_config.json")
  (folder / "run.json").write_text(json.dumps({"runs": [{"data": data}]}))
  files = checkpoint_files.CheckpointFiles(str(folder), keep=9)
  for step in (3, 5):
    files.write(step, {"x": np.zeros(1, np.float32)})
  files.wait()
  return folder


@pytest.mark.parametrize("name", ["", "model.ckpt-3"])
def test_a_run_folder_is_enough(tmp_path, pretrained, letters, name):
  start = str(pretrained / name) if name else str(pretrained)
  given = dict(
    do_train=True, train_file="x", output_dir=str(tmp_path / "new"),
    init_checkpoint=start,
  )  # fmt: skip
  config, lines = settled_flags(**given)
  assert config.init_checkpoint == f"{pretrained}/{name or 'model.ckpt-5'}"
  assert config.bert.to_dict()["hidden_size"] == 32
  assert config.do_lower_case is False
  assert config.vocab_file == str(tmp_path / "data" / "vocab.txt")
  chosen = f"--init_checkpoint={start}: {config.init_checkpoint} (the newest)"
  assert (chosen in lines) == (not name)
  other = samples.write_config(tmp_path / "other.json", hidden_act="relu")
  (tmp_path / "v.txt").write_text("\n".join(samples.LETTERS[:-1]))
  for contradiction, words in (
    ({"bert_config_file": other}, "differ in hidden_act: leave"),
    ({"bert_config_file": "mini"}, "differ in hidden_size"),
    ({"vocab_file": str(tmp_path / "v.txt")}, "records were made with"),
    ({"do_lower_case": True}, "trained on cased text"),
    ({"init_checkpoint": str(tmp_path)}, "did you mean .*/pretrain?"),
  ):
    with pytest.raises(UserError, match=words):
      settled_flags(**{**given, **contradiction})


def test_a_run_keeps_what_it_started_from(tmp_path, pretrained, finished):
  """Also if a newer checkpoint comes there, or nothing is left of it."""
  folder, start = finished(CLASSIFIER), f"{pretrained}/model.ckpt-3"
  run = {"plan": {"ranks": 1}, "flags": {"init_checkpoint": start}}
  (folder / "run.json").write_text(json.dumps({"runs": [run]}))
  given = dict(do_train=True, train_file="x", output_dir=str(folder))
  config, lines = settled_flags(**given, init_checkpoint=str(pretrained))
  assert config.init_checkpoint == start
  assert lines == [f"--bert_config_file={folder}/bert_config.json, as found"]
  assert config.do_lower_case is False and config.vocab_file is None
  (tmp_path / "other").mkdir()
  config, lines = settled_flags(**given, init_checkpoint=f"{tmp_path}/other")
  assert config.init_checkpoint == start
  assert f"other is ignored: {folder} holds a run that was started" in lines[0]
  # A start that saved nothing does not bind the next one.
  (tmp_path / "unsaved").mkdir()
  shutil.copy(folder / "run.json", tmp_path / "unsaved")
  unsaved = {**given, "output_dir": f"{tmp_path}/unsaved"}
  _, lines = settled_flags(**unsaved, init_checkpoint=str(pretrained))
  assert "which this run was started" not in lines[0]
  shutil.rmtree(pretrained)
  config, _ = settled_flags(**given, init_checkpoint=str(pretrained))
  assert config.init_checkpoint == start
  given = dict(do_predict=True, predict_file="x", output_dir=str(folder))
  assert settled_flags(**given)[0].tokenizer().vocab_size > 50


def test_presets(tmp_path, letters, monkeypatch):
  monkeypatch.chdir(tmp_path)
  given = dict(do_train=True, train_file="x", output_dir="new")
  with pytest.raises(UserError, match="--bert_config_file is missing: give t"):
    settled_flags(**given)
  given |= {"bert_config_file": "tiny"}
  with pytest.raises(UserError, match="give --vocab_file, --spm"):
    settled_flags(**given)
  given |= {"vocab_file": shutil.copy(letters, "vocab.txt")}
  config = settled_flags(**given)[0]
  assert config.bert.vocab_size == len(samples.LETTERS)
  assert config.do_lower_case is True
  (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
  assert settled_flags(**given)[0].do_lower_case is False
  with pytest.raises(UserError, match="trained on cased text .*tokenizer_conf"):
    settled_flags(**given, do_lower_case=True)
  os.mkdir("tiny")  # a folder is no config
  assert settled_flags(**given)[0].bert.hidden_size == 128
  os.rmdir("tiny")
  samples.write_config(tmp_path / "tiny")
  assert settled_flags(**given)[0].bert.hidden_size == 32


def test_ranks_that_join_later_have_the_same_settings(
  tmp_path, config_file, finished, letters
):
  """The first ones found no task.json yet, nor a copy of the vocabulary."""
  columns = {"text": "sentence", "text_pair": None, "label": "label"}
  task = CLASSIFIER | {"columns": columns, "metrics": ["accuracy"]}
  given = dict(
    bert_config_file=config_file, do_train=True, max_seq_length=32,
    do_lower_case=False,
  )  # fmt: skip
  kind = classification.ClassifierConfig
  first = from_flags(
    kind, **given, output_dir=str(tmp_path / "new"), vocab_file=letters
  ).as_dict()
  later = from_flags(kind, **given, output_dir=str(finished(task))).as_dict()
  assert first["vocab_file"] == file_sha256(letters)
  assert {**first, "output_dir": ""} == {**later, "output_dir": ""}


RESUME = {"do_train": True, "train_file": "t.tsv"}
# fmt: off
# A few: test_agreement.py walks the table of what must agree.
CONTRADICTIONS = [
  (CLASSIFIER, {"max_seq_length": 64}, "--max_seq_length 32 -> 64: its"),
  (CLASSIFIER | {"labels": ["a", "b"], "metrics": ["matthews", "accuracy"]},
   {"task_name": "CoLA"}, "labels a,b -> 0,1: its model"),
  (CLASSIFIER, {"vocab_file": "other.txt"}, "vocabulary SHA-256 .* -> SHA-256"),
  (CLASSIFIER | {"max_seq_length": "9"}, {}, "json: .* max_seq_length is '9'"),
  (CLASSIFIER | {"columns": CLASSIFIER["columns"] | {"label": "words"}},
   RESUME, "labels 0,1 -> a,b: its"),
  (CLASSIFIER, {"multi_label": True}, "--multi_label false -> true: its mod"),
  (CLASSIFIER | {"multi_label": True, "metrics": ["f1_micro"]},
   {"multi_label": False}, "--multi_label true -> false: its model"),
  (SQUAD, {"max_seq_length": 32}, "task squad -> classifier"),
  ({}, {"max_seq_length": 32, "vocab_file": "vocab.txt"},
   "task pretraining -> classifier"),
  (NER, {"do_train": True, "train_file": "a", "word_column": 1},
   "--word_column 2 -> 1: give the former"),
]
# fmt: on


@pytest.mark.parametrize("saved, given, words", CONTRADICTIONS)
def test_flags_that_contradict_the_model(
  tmp_path, config_file, finished, saved, given, words, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "other.txt").write_text("[PAD]\n")
  (tmp_path / "t.tsv").write_text("words\tclass\na\t0\nb\t1\n")
  folder = finished(saved)
  before = samples.contents(folder)
  config, task = KINDS["ner" if saved.get("task") == "ner" else "classifier"]
  flags = {"bert_config_file": config_file, "output_dir": str(folder)}
  if "train_file" not in given:
    flags |= {"do_predict": True, "predict_file": "a"}
  with pytest.raises(UserError, match=words):
    run(task(from_flags(config, **flags | given)))
  assert samples.contents(folder) == before


def test_an_encoder_of_any_folder_is_an_embedder_to_evaluate(
  tmp_path, config_file, finished, letters
):
  """It has no weights of its own; a Hugging Face folder names a task."""
  given = dict(bert_config_file=config_file, vocab_file=letters)
  given["max_seq_length"] = 32
  for saved in ({"task": "pretraining", "vocabulary": {}}, {}):
    shutil.rmtree(tmp_path / "done", ignore_errors=True)
    config = from_flags(
      embedding.EmbedderConfig, do_eval=True, eval_file="x", **given,
      output_dir=str(tmp_path / "new"),
      init_checkpoint=str(finished(saved) / "model.ckpt-3"),
    )  # fmt: skip
    task_file.check(config, lambda: {})
  shutil.rmtree(tmp_path / "done", ignore_errors=True)
  start = str(finished({"task": "squad", "vocabulary": {}}) / "model.ckpt-3")
  config = dataclasses.replace(config, init_checkpoint=start)
  with pytest.raises(UserError, match="task squad -> embedder"):
    task_file.check(config, lambda: {})


def test_what_a_converted_model_does_not_say_is_free(
  tmp_path, config_file, finished
):
  """Its head is known, its labels' names and its lengths are not."""
  for kind, given in (
    (classification.ClassifierConfig, {"task_name": "SST-2"}),
    (squad.SquadConfig, {"doc_stride": 20, "max_query_length": 8}),
  ):
    shutil.rmtree(tmp_path / "done", ignore_errors=True)
    folder = finished({"task": kind.kind, "vocabulary": {}})
    config = from_flags(
      kind, bert_config_file=config_file, do_eval=True, eval_file="x",
      output_dir=str(tmp_path / "new"), max_seq_length=40, do_lower_case=False,
      init_checkpoint=str(folder / "model.ckpt-3"), **given,
    )  # fmt: skip
    told = {"labels": ["0", "1"], "max_seq_length": 40, "do_lower_case": False}
    task_file.check(config, lambda: {**told, **given})  # noqa: B023


def test_a_training_that_does_not_start_leaves_no_task(tmp_path, classify):
  task = classify(tmp_path / "out", init_checkpoint=str(tmp_path / "no" / "x"))
  with pytest.raises(UserError, match="no/x: no readable checkpoint"):
    run(task)
  assert not list(tmp_path.glob("out/*"))


# Whole runs -------------------------------------------------------------------


def test_answers_are_found(tmp_path, answer, trained):
  out = trained("answer", tmp_path / "out")
  result = runs.read_json(out, "eval_results.json")
  assert result["loss"] < runs.metrics(out)[0]  # of the first update
  reader = tf.train.load_checkpoint(str(out))
  assert reader.get_tensor("cls/squad/output_weights").shape == (2, 32)
  assert not reader.has_tensor("bert/pooler/dense/kernel")
  predictions = runs.read_json(out, squad.PREDICTIONS_FILE)
  best = runs.read_json(out, squad.NBEST_FILE)
  questions = answer(out, do_predict=True).prediction_set.questions
  assert set(predictions) == set(best) == {q.id for q in questions}
  for question in questions:
    assert predictions[question.id] == best[question.id][0]["text"]
    assert predictions[question.id] in question.context
    assert sum(b["probability"] for b in best[question.id]) == pytest.approx(1)


def test_squad_2(tmp_path, answer):
  questions = finetuning_runs.write_questions
  files = {
    "train_file": questions(tmp_path / "c.json", 8, 1, answered=False),
    "predict_file": questions(tmp_path / "d.json", 4, 2, answered=False),
  }
  with pytest.raises(UserError, match="has no answer.*version_2_with_negative"):
    _ = answer(tmp_path / "x", **files).training_set
  unlabelled = tmp_path / "e.json"
  unlabelled.write_text(
    (tmp_path / "c.json").read_text().replace("answers", "a")
  )
  with pytest.raises(UserError, match="has no answer: if that is right"):
    _ = answer(
      tmp_path / "x", **files | {"train_file": str(unlabelled)},
      version_2_with_negative=True,
    ).training_set  # fmt: skip
  task = answer(
    tmp_path / "out", do_eval=True, do_predict=True, num_train_epochs=1.0,
    version_2_with_negative=True, **files,
  )  # fmt: skip
  found = run(task)["evaluation"]
  shares = 2 * found["HasAns_exact"] + found["NoAns_exact"]
  assert found["exact"] == pytest.approx(shares / 3)
  odds = runs.read_json(tmp_path / "out", squad.NULL_ODDS_FILE)
  predictions = runs.read_json(tmp_path / "out", squad.PREDICTIONS_FILE)
  assert len(odds) == 12
  assert all((predictions[q] == "") == (odds[q] > 0.0) for q in odds)


@pytest.mark.parametrize(
  "name", [slow("classify"), "answer", "label", "choose"]
)
def test_packed_equals_unpacked(tmp_path, request, trained, name):
  make, out = request.getfixturevalue(name), trained(name, tmp_path / "out")
  found = {}
  for most in (1, 16):
    task = make(
      out, do_train=False, do_eval=True, examples_per_record=most,
      eval_batch_size=5,
    )  # fmt: skip
    found[most] = run(task)["evaluation"]
    assert task.evaluation_set.slots <= most
    shutil.rmtree(out / "eval", ignore_errors=True)
  assert found[16] == pytest.approx(found[1], rel=1e-5)
  assert task.evaluation_set.slots >= 2


def test_an_update_of_whole_records_that_is_far_off_is_told(tmp_path, classify):
  task = classify(tmp_path / "out", max_seq_length=64, examples_per_record=32)
  source = task.training_set
  batch = round(1.4 * source.packing_factor)  # one record, not two
  assert 4 < batch < 64
  config = dataclasses.replace(task.config, global_batch_size=batch)
  (line,) = packed.rounding(source.plan(config, 1))
  assert f"has 1 packed records, {source.packing_factor:.1f} exam" in line
  fewer = classify(tmp_path / "out", max_seq_length=64, examples_per_record=1)
  assert not packed.rounding(fewer.training_set.plan(config, 1))
  with pytest.raises(UserError, match=f"start fewer, .*={batch // 4}"):
    source.plan(config, 4)
  config = dataclasses.replace(
    task.config, lr_schedule="wsd", num_decay_steps=9999
  )
  with pytest.raises(UserError, match="=9999 and .* steps of --num_train_epo"):
    source.plan(config, 1)


def test_labels_keep_their_rows_whatever_the_order(tmp_path, classify, trained):
  """Of the model that a training begins from, or that is evaluated."""
  first = trained("classify", tmp_path / "first")
  again = tmp_path / "again"
  scored = runs.read_json(first, "eval_results.json")["accuracy"]
  assert scored > 0.6  # or this tests nothing
  task = runs.read_json(first, "task.json")
  swapped = {**task, "labels": task["labels"][::-1]}
  (first / "task.json").write_text(json.dumps(swapped))
  result = run(
    classify(
      again, do_eval=True, eval_every_epochs=0, learning_rate=1e-9,
      init_checkpoint=tf.train.latest_checkpoint(str(first)),
    )
  )  # fmt: skip
  assert runs.read_json(again, "task.json")["labels"] == task["labels"][::-1]
  # The rows stay, so the names of the labels are swapped.
  assert result["evaluation"]["accuracy"] == pytest.approx(1 - scored)


def test_rows_of_labels_of_words_go_by_their_names(
  tmp_path, label, trained, capsys
):
  """From one model to the next, in whatever order; of others there is none."""
  first = trained("label", tmp_path / "first")
  given = {"init_checkpoint": tf.train.latest_checkpoint(str(first))}
  given |= {"learning_rate": 1e-9, "num_train_epochs": 0.5}
  for folder, names, said in (
    ("next", ("O", "I-LOC", "B-LOC"), "missing there, so initial weights: 0"),
    ("more", ("O", "I-LOC", "B-LOC", "B-PER"),
     "initial weights: 2\n    cls/tokens/output_bias"),
  ):  # fmt: skip
    capsys.readouterr()
    run(label(tmp_path / folder, label_names=names, **given))
    assert said in capsys.readouterr().err
  bias = [runs.weights(tmp_path / n)["cls/tokens/output_bias"] for n in
          ("first", "next")]  # fmt: skip
  np.testing.assert_allclose(*bias, atol=1e-6)


@pytest.mark.parametrize("name", [slow("classify"), "label", "choose"])
def test_one_big_batch_equals_micro_batches(tmp_path, request, name):
  """Though those of labels have different numbers of words."""
  make, losses = request.getfixturevalue(name), {}
  for micro in (16, 4):
    folder = tmp_path / str(micro)
    run(make(folder, global_batch_size=16, train_batch_size=micro))
    losses[micro] = runs.metrics(folder)
    plan = runs.read_json(folder, description.RUN_FILE)["runs"][0]["plan"]
    assert (plan["accumulation"] > 1) == (micro == 4)
  assert losses[4] == pytest.approx(losses[16], rel=1e-5)
  assert len(losses[4]) > 4


@pytest.mark.parametrize(
  "name", ["classify", "choose", slow("label"), slow("answer")]
)
def test_resumed_equals_never_stopped(tmp_path, request, trained, name):
  make = request.getfixturevalue(name)
  whole, part = tmp_path / "whole", tmp_path / "part"
  trained(name, whole)
  runs.copy_run(whole, part)
  for path in glob.glob(f"{part}/model.ckpt-*"):
    if ".ckpt-10." not in path:
      os.remove(path)
  run(make(part, **TRAINED))
  before, after = runs.weights(whole), runs.weights(part)
  assert before["global_step"] > 20
  assert all(np.array_equal(before[n], after[n]) for n in before)
  assert runs.metrics(whole) == runs.metrics(part)


def test_the_best_is_kept_evaluated_and_predicted_with(tmp_path, classify):
  """The rate rises until the end: it learns, then it falls apart."""
  out = tmp_path / "out"
  task = classify(
    out, do_eval=True, do_predict=True, eval_every_steps=5,
    num_train_epochs=25.0, warmup_proportion=1.0, learning_rate=0.1,
    keep_checkpoints=1, metrics=("accuracy", "f1"),
  )  # fmt: skip
  result = run(task)["evaluation"]
  evaluations = metrics.read_jsonl(str(out / metrics.EVAL_METRICS_FILE))
  best = max(evaluations, key=lambda r: r["accuracy"])
  assert evaluations[-1]["accuracy"] < best["accuracy"]  # or it tests nothing
  assert result["accuracy"] == best["accuracy"] == 1.0
  assert result["loss"] < 0.1
  assert result["global_step"] == best["global_step"]
  assert len(glob.glob(f"{out}/model.ckpt-*.json")) == 2
  names = tf.train.load_checkpoint(str(out))
  assert names.get_tensor("output_weights").shape == (2, 32)
  assert names.get_tensor("output_bias").shape == (2,)
  # The folder alone predicts the same, without the other flags.
  predictions = out / classification.PREDICTIONS_FILE
  written = predictions.read_text()
  predictions.unlink()
  saved = description.read(str(out)).task
  assert saved["task"] == "classifier" and saved["labels"] == ["0", "1"]
  assert saved["vocabulary"] == {"vocab_file": "vocab.txt"}
  kept = ("task.json", "bert_config.json", "vocab.txt")
  before = [(out / name).read_bytes() for name in kept]
  again = classification.Classification(
    from_flags(
      classification.ClassifierConfig, output_dir=str(out), do_predict=True,
      bert_config_file=str(out / "bert_config.json"),
      predict_file=str(tmp_path / "b.tsv"), xla="off",
    )
  )  # fmt: skip
  run(again)
  assert predictions.read_text() == written
  assert again.labels == ["0", "1"]
  assert [(out / name).read_bytes() for name in kept] == before


@pytest.mark.parametrize(
  "flag, file",
  [
    slow("spm_model_file", "spm_model"), ("tokenizer_file", "bpe_file"),
  ],
)  # fmt: skip
def test_other_vocabularies(tmp_path, request, flag, file):
  make = finetuning_runs.maker("answer", tmp_path, None)
  samples.write_config(tmp_path / "config.json", vocab_size=300)
  out = tmp_path / "out"
  vocabulary = {flag: request.getfixturevalue(file)}
  run(make(out, **vocabulary, do_predict=True, num_train_epochs=0.5))
  path = out / squad.PREDICTIONS_FILE
  written = path.read_text()
  os.remove(path)
  again = make(out, do_train=False, do_predict=True, train_file=None)
  run(again)
  assert path.read_text() == written
  for question in again.prediction_set.questions:
    assert json.loads(written)[question.id] in question.context


@pytest.mark.slow
def test_early_stopping(tmp_path, classify):
  changes = dict(
    do_eval=True, eval_every_steps=1, early_stopping_evaluations=2,
    num_train_epochs=10.0, learning_rate=1e-30,
  )  # fmt: skip
  result = run(classify(tmp_path / "out", **changes))
  assert result["training"]["stopped_early"]
  # The first evaluation after an update is the best, and two are no better.
  assert result["training"]["global_step"] == 3
  assert result["evaluation"]["global_step"] == 1
  again = run(classify(tmp_path / "out", **changes))
  assert again["training"]["global_step"] == 3


MODES = {
  "layers": ({"xla": "layers"}, 1e-5),
  "step": ({"xla": "step"}, 1e-5),
  "bf16": ({"precision": "bf16"}, 0.02),
  "fp16": (
    {"precision": "fp16", "loss_scale": {"initial_loss_scale": 1024.0}}, 0.01
  ),
  "losses": (
    {"precision": "bf16", "precision_policy": ("losses=bf16",)}, 0.1
  ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classify", "answer", "label", "choose"])
def test_modes_train_the_same(tmp_path, request, name):
  make = request.getfixturevalue(name)
  run(make(tmp_path / "plain", num_train_epochs=1.0))
  plain = runs.metrics(tmp_path / "plain")
  for mode, (changes, tolerance) in MODES.items():
    run(make(tmp_path / mode, num_train_epochs=1.0, **changes))
    losses = runs.metrics(tmp_path / mode)
    assert losses == pytest.approx(plain, rel=tolerance), mode


def test_regression(tmp_path, classify, capfd):
  """On the table that it is trained on, which is told."""
  path = tmp_path / "r.tsv"
  rng = np.random.default_rng(0)
  counts = rng.integers(1, 8, 64)
  rows = "".join(f"{' '.join(['a'] * n)}\t{n / 4}\n" for n in counts)
  path.write_text("sentence\tlabel\n" + rows)
  task = classify(
    tmp_path / "out", train_file=str(path), eval_file=str(path), do_eval=True,
    regression=True, num_train_epochs=20.0, eval_every_epochs=0.0,
    learning_rate=3e-3,
  )  # fmt: skip
  found = run(task)["evaluation"]
  assert found["pearson"] > 0.9 and found["loss"] < 0.1
  assert set(runs.metrics(tmp_path / "out", "accuracy")) == {None}
  line = f"evaluating on training data: 1 of 1 files, such as {path}"
  assert line in capfd.readouterr().err


def test_a_folder_keeps_its_threshold(tmp_path, choose, trained):
  """The best evaluation's, for predictions and on files of other labels."""
  out = trained("choose", tmp_path / "out")
  best = runs.read_json(out, "eval_results.json")
  task, labels = runs.read_json(out, "task.json"), finetuning_runs.COLOURS
  threshold = task["label_threshold"]
  assert threshold == best["label_threshold"] != 0.5
  assert best["f1_micro"] > 0.5  # or this tests nothing
  path, predicted = out / classification.PREDICTIONS_FILE, []
  for row in tables.read_table(str(path)):
    names = [n for n in labels if float(row.values[n]) > threshold]
    assert row.values["prediction"] == ",".join(names)
    predicted.append([int(n in names) for n in labels])
  made = choose(tmp_path / "x", do_eval=True)
  targets = np.array([e.targets for e in made.evaluation_set.examples])
  for average in ("micro", "macro", "samples"):
    score = f1_score(targets, predicted, average=average, zero_division=0.0)
    assert best[f"f1_{average}"] == pytest.approx(score)
  written = path.read_bytes()
  other = finetuning_runs.write_sets(tmp_path / "c.jsonl", 30, 3)
  config = from_flags(
    classification.ClassifierConfig, output_dir=str(out), do_predict=True,
    predict_file=str(tmp_path / "b.jsonl"), do_eval=True, eval_file=other,
    xla="off",
  )  # fmt: skip
  found = run(multi_label.task_of(config))["evaluation"]
  assert found["label_threshold"] == threshold
  assert path.read_bytes() == written


def test_a_training_that_stops_keeps_its_best_threshold(
  tmp_path, choose, monkeypatch
):
  out, evaluations = tmp_path / "out", []
  task = choose(
    out, do_eval=True, eval_every_epochs=0, eval_every_steps=2,
    num_train_epochs=8.0, learning_rate=3e-3,
  )  # fmt: skip
  keep_best = train_loop.Saver.keep_best

  def stop_after_three(saver, step):
    evaluations.append(step)
    if len(evaluations) > 4:
      raise KeyboardInterrupt
    return keep_best(saver, step)

  monkeypatch.setattr(train_loop.Saver, "keep_best", stop_after_three)
  with pytest.raises(KeyboardInterrupt):
    run(task)
  scores = metrics.read_jsonl(str(out / "eval_metrics.jsonl"))[:-1]
  best = max(scores, key=lambda scores: scores["f1_micro"])
  assert len(scores) == 3 and best["f1_micro"] > 0
  kept = runs.read_json(out, "task.json")["label_threshold"]
  assert kept == best["label_threshold"]


def test_what_is_best_is_settled_by_the_training(tmp_path, classify):
  """Also where a later evaluation has other metrics."""
  task = classify(tmp_path / "out", do_train=False, do_eval=True)
  for settled in (metrics.BestBy(("spearman",), True), None):
    saved = {"best_by": settled._asdict()} if settled else {}
    model = types.SimpleNamespace(task=saved)
    want = settled or task.best_by
    with mock.patch.object(finetune.task_file, "binding", return_value=model):
      assert finetune._best_by(task, task.config) == want
    config = dataclasses.replace(task.config, do_train=True)
    assert finetune._best_by(task, config) == task.best_by


def test_a_head_that_was_never_trained_does_not_predict(
  tmp_path, classify, trained
):
  values = runs.weights(trained("classify", tmp_path / "one"))
  encoder = str(tmp_path / "bare" / "x")
  body = [n for n in values if n.startswith("bert/") and "adam" not in n]
  (tmp_path / "bare").mkdir()
  checkpoint_files.write_weights(encoder, {n: values[n] for n in body})
  given = {"init_checkpoint": encoder}
  task = classify(tmp_path / "two", do_train=False, do_predict=True, **given)
  with pytest.raises(UserError, match="lacks output_bias .of 2 variables"):
    run(task)
  run(classify(tmp_path / "two", num_train_epochs=0.5, **given))


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"do_train": False}, "--do_train, --do_eval, --do_predict"),
    ({"max_seq_length": 65}, "max_position_embeddings=64"),
    ({"task_name": "xyz"}, "--task_name=xyz: not one of cola"),
    ({"metrics": ("pearson",)}, "--metrics=pearson: not all are of accuracy"),
    ({"early_stopping_evaluations": 1}, "needs --do_eval"),
    ({"output_dir": None}, "--output_dir is missing"),
    ({"task_name": "MRPC", "text_column": "x"}, "give --text_column or --task"),
    ({"train_batch_size": 65}, "64 examples are fewer than one update's 65"),
  ],
)
def test_settings_that_cannot_be(tmp_path, classify, changes, words):
  with pytest.raises(UserError, match=words):
    run(classify(**{"output_dir": tmp_path / "out", **changes}))


def test_texts_that_are_cut_are_told(tmp_path, classify):
  line = classify(tmp_path / "out", max_seq_length=20).training_set.line()
  assert "a.tsv: 64 examples of" in line and "were longer and lost" in line


# Questions that are damaged ---------------------------------------------------


def shift_answers(data, characters, only=None):
  """Moves the answers' starts; of `only` so many questions."""
  for paragraph in data["data"][0]["paragraphs"]:
    for entry in paragraph["qas"][:only]:
      for answer in entry["answers"]:
        answer["answer_start"] += characters


def first_paragraph(data):
  return data["data"][0]["paragraphs"][0]


DAMAGED = [
  (lambda d: first_paragraph(d)["qas"][0].update(answers=None),
   "not readable as SQuAD's format: .*answers is None, not a list"),
  (lambda d: d["data"][0]["paragraphs"].append(first_paragraph(d)),
   "two questions have the id"),
  (lambda d: shift_answers(d, 1000),
   "none of the 48 answers is found in its paragraph; the first: question "
   "0-.* is not at answer_start 1..., where '' stands"),
]  # fmt: skip


@pytest.mark.parametrize("change, words", DAMAGED)
def test_damaged_squad_files(tmp_path, answer, change, words):
  data = json.loads((tmp_path / "a.json").read_text())
  change(data)
  (tmp_path / "bad.json").write_text(json.dumps(data))
  task = answer(tmp_path / "out", train_file=str(tmp_path / "bad.json"))
  with pytest.raises(UserError, match=f"bad.json: .*{words}"):
    _ = task.training_set


@pytest.mark.parametrize(
  "id_of, wanted", [(lambda n: n / 2, "0.5"), (str, "1")]
)
def test_ids_of_questions_may_be_numbers(tmp_path, answer, id_of, wanted):
  """A number and its text are one id: predictions.json has only texts."""
  data, count = json.loads((tmp_path / "a.json").read_text()), 0
  for paragraph in data["data"][0]["paragraphs"]:
    for entry in paragraph["qas"]:
      count += 1
      entry["id"] = id_of(count)
  path = tmp_path / "numbers.json"
  path.write_text(json.dumps(data))
  source = answer(tmp_path / "out", train_file=str(path)).training_set
  assert source.questions[0].id == wanted
  first_paragraph(data)["qas"][1]["id"] = wanted
  path.write_text(json.dumps(data))
  with pytest.raises(UserError, match=f"two questions have the id {wanted}"):
    _ = answer(tmp_path / "out", train_file=str(path)).training_set


def test_answers_that_are_not_found(tmp_path, answer):
  """Their questions are not trained on, and count in the metrics only."""
  data = json.loads((tmp_path / "a.json").read_text())
  shift_answers(data, -1, only=1)
  (tmp_path / "bad.json").write_text(json.dumps(data))
  bad = str(tmp_path / "bad.json")
  task = answer(
    tmp_path / "out", train_file=bad, eval_file=bad, predict_file=bad,
    do_eval=True, do_predict=True,
  )  # fmt: skip
  whole = answer(tmp_path / "out", train_file=str(tmp_path / "a.json"))
  count = len(whole.training_set.examples)
  first = first_paragraph(data)["qas"][0]["id"]
  asked = count // 3
  assert len(task.training_set.examples) == count - asked
  assert re.search(
    rf"; {asked} of {count} questions are skipped: their answers are not "
    rf"found; the first: question {first}: the answer '\d+' is not at",
    task.training_set.line(),
  )
  lost = {p["qas"][0]["id"] for p in data["data"][0]["paragraphs"]}
  assert not lost.intersection(e.where for e in task.training_set.examples)
  evaluation = task.evaluation_set
  line = evaluation.line()
  assert f"; {asked} of {count} questions are not in the loss" in line
  for example in evaluation.examples:
    assert example.weight == float(example.where not in lost)
  outputs = {"logits": np.zeros((len(evaluation), evaluation.tokens, 2))}
  assert set(task.results(evaluation, outputs)) == {"exact_match", "f1"}
  assert task.prediction_set is evaluation
  task = answer(tmp_path / "out", predict_file=bad, do_predict=True)
  assert task.prediction_set.line() == evaluation.line().split(";")[0]
