"""Whole fine-tuning runs: packing, resume, best checkpoint, precision, XLA."""

import functools
import glob
import json
import os
import shutil

import conftest
import finetuning_runs
import numpy as np
import pytest
import runs

import convert_checkpoint
from errors import UserError
from finetuning import classification, finetune, squad
from tensorflow_v1 import tf
from training import training_hooks


@pytest.fixture
def config_file(tmp_path):
  return conftest.write_config(tmp_path / "config.json")


@pytest.fixture
def classify(tmp_path, config_file, letters):
  """(folder, **changes) -> task on 64 sentences, 20 held out."""
  return functools.partial(
    finetuning_runs.classifier,
    config_file,
    letters,
    train_file=finetuning_runs.write_sentences(tmp_path / "a.tsv", 64, 1),
    eval_file=finetuning_runs.write_sentences(tmp_path / "b.tsv", 20, 2),
    predict_file=str(tmp_path / "b.tsv"),
  )


@pytest.fixture
def answer(tmp_path, config_file, letters):
  """(folder, **changes) -> task on 48 questions, 12 held out."""
  return functools.partial(
    finetuning_runs.squad_task,
    config_file,
    letters,
    train_file=finetuning_runs.write_questions(tmp_path / "a.json", 16, 1),
    predict_file=finetuning_runs.write_questions(tmp_path / "b.json", 4, 2),
  )


run = finetuning_runs.run


def test_a_classifier_learns(tmp_path, classify):
  task = classify(
    tmp_path / "out", do_eval=True, do_predict=True, num_train_epochs=25.0,
    eval_every_epochs=5.0, learning_rate=3e-3,
  )  # fmt: skip
  result = run(task)
  assert result["evaluation"]["accuracy"] == 1.0
  assert result["evaluation"]["loss"] < 0.1
  names = tf.train.load_checkpoint(task.config.output_dir)
  assert names.get_tensor("output_weights").shape == (2, 32)
  assert names.get_tensor("output_bias").shape == (2,)


def test_answers_are_found(tmp_path, answer):
  task = answer(
    tmp_path / "out", do_eval=True, do_predict=True, num_train_epochs=2.0
  )
  before = run(answer(tmp_path / "none", do_eval=True, num_train_epochs=0.1))
  result = run(task)
  assert result["evaluation"]["loss"] < before["evaluation"]["loss"]
  reader = tf.train.load_checkpoint(task.config.output_dir)
  assert reader.get_tensor("cls/squad/output_weights").shape == (2, 32)
  assert not reader.has_tensor("bert/pooler/dense/kernel")
  predictions = runs.read_json(tmp_path / "out", squad.PREDICTIONS_FILE)
  best = runs.read_json(tmp_path / "out", squad.NBEST_FILE)
  ids = {q.id for q in task.prediction_set.questions}
  assert set(predictions) == set(best) == ids
  for question in task.prediction_set.questions:
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
  task = answer(
    tmp_path / "out", do_eval=True, do_predict=True, num_train_epochs=1.0,
    version_2_with_negative=True, **files,
  )  # fmt: skip
  found = run(task)["evaluation"]
  assert set(task.result_names()) <= set(found)
  shares = 2 * found["HasAns_exact"] + found["NoAns_exact"]
  assert found["exact"] == pytest.approx(shares / 3)
  odds = runs.read_json(tmp_path / "out", squad.NULL_ODDS_FILE)
  predictions = runs.read_json(tmp_path / "out", squad.PREDICTIONS_FILE)
  assert len(odds) == 12
  assert all((predictions[q] == "") == (odds[q] > 0.0) for q in odds)


@pytest.mark.parametrize("name", ["classify", "answer"])
def test_packed_equals_unpacked(tmp_path, request, name):
  make = request.getfixturevalue(name)
  run(make(tmp_path / "out", num_train_epochs=1.0))
  found = {}
  for packed in (1, 2, 16):
    task = make(
      tmp_path / "out", do_train=False, do_eval=True,
      examples_per_record=packed, eval_batch_size=5,
    )  # fmt: skip
    found[packed] = run(task)["evaluation"]
    assert task.evaluation_set.slots <= packed
    shutil.rmtree(tmp_path / "out" / "eval", ignore_errors=True)
  assert found[2] == pytest.approx(found[1], rel=1e-5)
  assert found[16] == pytest.approx(found[1], rel=1e-5)
  assert task.evaluation_set.slots >= 2


def test_one_big_batch_equals_micro_batches(tmp_path, classify):
  losses = {}
  for micro in (16, 4):
    folder = tmp_path / str(micro)
    run(classify(folder, global_batch_size=16, train_batch_size=micro))
    losses[micro] = runs.metrics(folder)
    plan = runs.read_json(folder, training_hooks.RUN_FILE)["runs"][0]["plan"]
    assert (plan["accumulation"] > 1) == (micro == 4)
  assert losses[4] == pytest.approx(losses[16], rel=1e-5)
  assert len(losses[4]) > 4


@pytest.mark.parametrize("name", ["classify", "answer"])
def test_resumed_equals_never_stopped(tmp_path, request, name):
  make = request.getfixturevalue(name)
  whole, part = tmp_path / "whole", tmp_path / "part"
  changes = dict(save_checkpoints_steps=3, keep_checkpoints=99, dropout=0.1)
  run(make(whole, **changes))
  shutil.copytree(whole, part)
  for path in glob.glob(f"{part}/model.ckpt-*"):
    if ".ckpt-3." not in path:
      os.remove(path)
  run(make(part, **changes))
  before, after = runs.weights(whole), runs.weights(part)
  assert all(np.array_equal(before[n], after[n]) for n in before)
  assert runs.metrics(whole) == runs.metrics(part)


def test_the_best_is_kept_evaluated_and_predicted_with(tmp_path, classify):
  """The rate rises until the end: it learns, then it falls apart."""
  task = classify(
    tmp_path / "out", do_eval=True, do_predict=True, eval_every_steps=5,
    num_train_epochs=25.0, warmup_proportion=1.0, learning_rate=0.1,
    keep_checkpoints=1, metrics=("accuracy", "f1"),
  )  # fmt: skip
  result = run(task)["evaluation"]
  path = tmp_path / "out" / training_hooks.EVAL_METRICS_FILE
  trained = training_hooks.read_jsonl(str(path))
  best = max(trained, key=lambda r: r["accuracy"])
  assert trained[-1]["accuracy"] < best["accuracy"]  # or this tests nothing
  assert result["accuracy"] == best["accuracy"]
  assert result["global_step"] == best["global_step"]
  assert len(glob.glob(f"{tmp_path}/out/model.ckpt-*.json")) == 2
  # The folder alone predicts the same, without the other flags.
  name = classification.PREDICTIONS_FILE
  written = (tmp_path / "out" / name).read_text()
  os.remove(tmp_path / "out" / name)
  again = finetuning_runs.classifier(
    str(tmp_path / "config.json"), None, tmp_path / "out", do_train=False,
    do_predict=True, predict_file=str(tmp_path / "b.tsv"),
  )  # fmt: skip
  run(again)
  assert (tmp_path / "out" / name).read_text() == written
  assert again.labels == ["0", "1"]


@pytest.mark.parametrize("name", ["classify", "answer"])
def test_sentencepiece(tmp_path, config_file, spm_model, request, name):
  kind = {
    "classify": finetuning_runs.classifier, "answer": finetuning_runs.squad_task
  }[name]  # fmt: skip
  files = request.getfixturevalue(name).keywords
  make = functools.partial(kind, config_file, None, tmp_path / "out")
  run(make(**files, spm_model_file=spm_model, do_predict=True))
  path = (
    tmp_path
    / "out"
    / (
      classification.PREDICTIONS_FILE
      if name == "classify"
      else squad.PREDICTIONS_FILE
    )
  )
  written = path.read_text()
  os.remove(path)
  predict_file = files["predict_file"]
  again = make(do_train=False, do_predict=True, predict_file=predict_file)
  run(again)
  assert path.read_text() == written
  if name == "answer":
    texts = json.loads(written)
    for question in again.prediction_set.questions:
      assert texts[question.id] in question.context


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


@pytest.mark.parametrize("name", ["classify", "answer"])
@pytest.mark.parametrize(
  "changes, tolerance",
  [
    ({"xla": "layers"}, 1e-5),
    ({"xla": "step"}, 1e-5),
    ({"precision": "bf16"}, 0.02),
    ({"precision": "fp16", "loss_scale": {"initial_loss_scale": 1024.0}}, 0.01),
    ({"optimizer_name": "lamb"}, None),
  ],
  ids=["layers", "step", "bf16", "fp16", "lamb"],
)
@pytest.mark.slow
def test_modes_train_the_same(tmp_path, request, name, changes, tolerance):
  make = request.getfixturevalue(name)
  if "optimizer_name" in changes:
    from training.optimizers import OptimizerConfig

    changes = {"optimizer": OptimizerConfig(optimizer="lamb")}
  else:
    run(make(tmp_path / "plain", num_train_epochs=1.0))
  run(make(tmp_path / "out", num_train_epochs=1.0, **changes))
  losses = runs.metrics(tmp_path / "out")
  assert np.isfinite(losses).all()
  if tolerance:
    assert losses == pytest.approx(
      runs.metrics(tmp_path / "plain"), rel=tolerance
    )


def test_regression(tmp_path, config_file, letters):
  path = tmp_path / "r.tsv"
  rng = np.random.default_rng(0)
  counts = rng.integers(1, 8, 64)
  rows = "".join(f"{' '.join(['a'] * n)}\t{n / 4}\n" for n in counts)
  path.write_text("sentence\tlabel\n" + rows)
  task = finetuning_runs.classifier(
    config_file, letters, tmp_path / "out", train_file=str(path),
    eval_file=str(path), do_eval=True, regression=True, num_train_epochs=20.0,
    eval_every_epochs=0.0, learning_rate=3e-3,
  )  # fmt: skip
  found = run(task)["evaluation"]
  assert found["pearson"] > 0.9 and found["loss"] < 0.1


def test_a_head_that_was_never_trained_does_not_predict(tmp_path, classify):
  run(classify(tmp_path / "one", num_train_epochs=0.5))
  saved = tf.train.latest_checkpoint(str(tmp_path / "one"))
  with tf.Graph().as_default(), tf.Session() as session:
    reader = tf.train.load_checkpoint(saved)
    kept = [
      tf.Variable(reader.get_tensor(name), name=name)
      for name in reader.get_variable_to_shape_map()
      if name.startswith("bert/") and "adam" not in name
    ]
    session.run(tf.global_variables_initializer())
    encoder = tf.train.Saver(kept).save(session, str(tmp_path / "enc"))
  task = classify(
    tmp_path / "two", do_train=False, do_predict=True, init_checkpoint=encoder
  )
  with pytest.raises(UserError, match="lacks output_bias .of 2 variables"):
    run(task)
  run(classify(tmp_path / "two", init_checkpoint=encoder, num_train_epochs=0.5))


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"do_train": False}, "--do_train, --do_eval, --do_predict"),
    ({"max_seq_length": 65}, "max_position_embeddings=64"),
    ({"task_name": "xyz"}, "--task_name=xyz: not one of cola"),
    ({"warmup_proportion": 1.5}, "--warmup_proportion=1.5: must be 0 to 1"),
    ({"metrics": ("pearson",)}, "pearson is of numbers: give --regression"),
    ({"metrics": ("bleu",)}, "bleu is not one of accuracy"),
    ({"early_stopping_evaluations": 1}, "needs --do_eval"),
    ({"output_dir": None}, "--output_dir is missing"),
  ],
)
def test_settings_that_cannot_be(tmp_path, classify, changes, words):
  with pytest.raises(UserError, match=words):
    classify(**{"output_dir": tmp_path / "out", **changes})


def test_a_folder_of_another_task(tmp_path, classify, answer):
  run(classify(tmp_path / "out", num_train_epochs=0.5))
  saved = (tmp_path / "out" / "task.json").read_text()
  with pytest.raises(UserError, match="holds a run of classifier .*is squad"):
    run(answer(tmp_path / "out"))
  os.remove(tmp_path / "out" / "task.json")
  with pytest.raises(UserError, match="holds a run of pre-training"):
    run(classify(tmp_path / "out"))
  assert not (tmp_path / "out" / "task.json").exists() and saved


def test_fewer_examples_than_an_update(tmp_path, classify):
  task = classify(tmp_path / "out", train_batch_size=65)
  with pytest.raises(UserError, match="64 examples are fewer than one .* 65"):
    run(task)


def test_texts_that_are_cut_are_told(tmp_path, classify, capsys):
  run(classify(tmp_path / "out", num_train_epochs=0.5, max_seq_length=20))
  err = capsys.readouterr().err
  assert "a.tsv: 64 examples of" in err and "were longer and lost" in err


def test_a_vocabulary_of_another_model(tmp_path, config_file):
  vocab = tmp_path / "large.txt"
  tokens = [*conftest.LETTERS, *(f"w{i}" for i in range(90))]
  vocab.write_text("".join(f"{t}\n" for t in tokens))
  task = finetuning_runs.classifier(
    config_file, str(vocab), tmp_path / "out",
    train_file=finetuning_runs.write_sentences(tmp_path / "a.tsv", 8, 1),
  )  # fmt: skip
  with pytest.raises(UserError, match=r"large.txt has 16\d tokens.*size=100"):
    _ = task.training_set


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda d: d.pop("data"), "the file has no list 'data'"),
    (lambda d: d["data"][0].pop("paragraphs"), "article 0 has no list"),
    (
      lambda d: d["data"][0]["paragraphs"][0]["qas"][0]["answers"][0].update(
        answer_start=1
      ),
      "does not stand at answer_start 1",
    ),
    (
      lambda d: d["data"][0]["paragraphs"][0]["qas"][0].pop("id"),
      "has no text 'id'",
    ),
    (
      lambda d: d["data"][0]["paragraphs"].append(
        d["data"][0]["paragraphs"][0]
      ),
      "two questions have the id",
    ),
  ],
)
def test_damaged_squad_files(tmp_path, answer, change, words):
  with open(tmp_path / "a.json", encoding="utf-8") as f:
    data = json.load(f)
  change(data)
  (tmp_path / "bad.json").write_text(json.dumps(data))
  task = answer(tmp_path / "out", train_file=str(tmp_path / "bad.json"))
  with pytest.raises(UserError, match=f"bad.json: .*{words}"):
    _ = task.training_set


def test_task_file_has_what_predicting_needs(tmp_path, classify):
  run(classify(tmp_path / "out", num_train_epochs=0.5))
  saved = finetune.saved_task(str(tmp_path / "out"))
  assert saved["task"] == "classifier" and saved["labels"] == ["0", "1"]
  assert saved["vocabulary"] == {"vocab_file": "vocab.txt"}
  assert (tmp_path / "out" / "vocab.txt").exists()


def test_a_classifier_becomes_a_hugging_face_folder(tmp_path, classify):
  run(classify(tmp_path / "out", num_train_epochs=0.5))
  prefix = tf.train.latest_checkpoint(str(tmp_path / "out"))
  prefix = prefix or glob.glob(f"{tmp_path}/out/model.ckpt-*.index")[0][:-6]
  convert_checkpoint.convert(
    convert_checkpoint.Settings((prefix,), str(tmp_path / "theirs"))
  )
  config = runs.read_json(tmp_path / "theirs", "config.json")
  assert config["id2label"] == {"0": "0", "1": "1"}
  assert config["architectures"] == ["BertForSequenceClassification"]
  assert (tmp_path / "theirs" / "tokenizer.json").exists()
