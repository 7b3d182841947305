"""Several labels of a text: loss, labels, threshold, folders, whole runs."""

import json
import shutil

import finetuning_runs
import numpy as np
import pytest
import runs
from conversions import answers, convert, random_values, write_checkpoint

from common.errors import UserError
from common.tensorflow_v1 import tf
from finetuning import classification, metrics
from finetuning.behaviour import Input
from interop import inference, model_source
from interop.heads import BEHAVIOURS
from model import weights

LABELS = ["blue", "green", "red"]


@pytest.fixture
def choose(tmp_path, letters):
  return finetuning_runs.maker("choose", tmp_path, letters)


# Of three sentences: red and blue, none, green.
ROWS = [("a b", ["red", "blue"]), ("b", []), ("c", ["green"])]
TARGETS = [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def write_table(path, ending, rows=ROWS):
  lines = []
  for text, labels in rows:
    if ending == "jsonl":
      lines.append(json.dumps({"sentence": text, "label": labels}))
    elif ending == "tsv":
      lines.append(f"{text}\t{' | '.join(labels)}")
    else:
      lines.append(",".join([text, *(str(int(n in labels)) for n in LABELS)]))
  heads = {"tsv": "sentence\tlabel", "csv": f"sentence,{','.join(LABELS)}"}
  lines = [heads[ending], *lines] if ending in heads else lines
  path = path.with_suffix(f".{ending}")
  path.write_text("\n".join(lines) + "\n")
  return str(path)


FORMS = {
  "jsonl": {}, "tsv": {"label_separator": "|"},
  "csv": {"label_columns": tuple(LABELS)},
}  # fmt: skip


@pytest.mark.parametrize("ending", FORMS)
def test_ways_to_write_labels(tmp_path, choose, ending):
  path = write_table(tmp_path / "own", ending)
  task = choose(tmp_path / "out", train_file=path, **FORMS[ending])
  assert task.labels == LABELS
  found = [[*e.targets] for e in task.training_set.examples]
  assert found == TARGETS
  counted, sizes = task.lines()
  assert counted.startswith(f"{path}: labels ") and "'green' 1" in counted
  assert sizes == f"{path}: 1.00 labels of an example, 1 of 3 without one"


def test_loss_and_gradient_are_numpys(tmp_path, choose):
  task = choose(tmp_path / "out")
  rng = np.random.default_rng(0)
  logits = rng.normal(0.0, 9.0, [6, 3]).astype(np.float32)
  targets = rng.integers(0, 2, [2, 3, 3]).astype(np.float32)
  with tf.Graph().as_default(), tf.Session() as session:
    scores = tf.constant(logits)
    losses, correct = task.losses_and_correct(None, scores, targets, None)
    gradient = tf.gradients(tf.reduce_mean(losses), scores)[0]
    losses, correct, gradient = session.run([losses, correct, gradient])
  x, y = logits.astype(float), targets.reshape(6, 3)
  want = (np.logaddexp(0.0, x) - x * y).mean(axis=1)
  np.testing.assert_allclose(losses, want, rtol=1e-6)
  want = (1 / (1 + np.exp(-x)) - y) / y.size
  np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-9)
  assert correct.tolist() == [*map(float, ((x > 0) == y).all(axis=1))]


def test_the_threshold_has_the_highest_f1():
  for seed in range(20):
    rng = np.random.default_rng(seed)
    shares = rng.choice([0.05, 0.2, 0.3, 0.45, 0.6, 0.9], [7, 4])
    targets = (rng.random([7, 4]) < 0.4).astype(int)
    scores = {}
    for bound in (0.025, 0.125, 0.25, 0.375, 0.525, 0.75):
      predicted = (shares > bound).astype(int)
      scores[bound] = metrics.metric("f1_micro", 4)(targets, predicted)
    best = metrics.best_threshold(targets, shares)
    assert scores[round(best, 3)] == max(scores.values())
    assert metrics.best_threshold(targets, shares * np.nan) == 0.5


# (files' content, flags, message): the second file is evaluated on.
LINES = '{"sentence": "a", "label": ["x", "y"]}\n'
REFUSED = [
  (LINES, LINES.replace("y", "z"), {}, "b.jsonl: line 1: label is 'z', not o"),
  ('{"sentence": "a", "label": []}\n', LINES, {}, "a.jsonl: no row has a labe"),
  (LINES, '{"sentence": "a", "label": ""}', {}, "b.jsonl: no row has a label"),
  (LINES.replace('"y"', '"x"'), "", {}, "has 1 different labels, such as 'x'"),
  (LINES.replace('"y"', "3"), "", {}, "a.jsonl: line 1: label has 3, but lab"),
  (LINES.replace('["x", "y"]', "null"), "", {}, "has null where 'label' shou"),
  (LINES, "", {"label_column": "tags"}, "line 1 has no 'tags'; its columns"),
  (LINES, "", {"label_columns": ("x", "y")}, "line 1 has no 'x'; its columns"),
  ('{"sentence": "a", "x": 1, "y": -1}', "", {"label_columns": ("x", "y")},
   "a.jsonl: line 1: y is '-1', neither 0 nor 1"),
  ("", "", {"label_columns": ("x", "x")}, "--label_columns=x is one label, wh"),
  (LINES, "", {"multi_label": False}, "by --label_column .--multi_label reads"),
  ("", "", {"metrics": ("accuracy",)}, "not all are of f1_micro, f1_macro"),
  ("", "", {"regression": True}, "multi_label does not go with --regression"),
  ("", "", {"task_name": "SST-2"}, "multi_label does not go with --task_name"),
  ("", "", {"multi_label": False, "label_threshold": 0.4}, "needs --multi_lab"),
]  # fmt: skip


@pytest.mark.parametrize("trained, evaluated, changes, words", REFUSED)
def test_errors(tmp_path, choose, trained, evaluated, changes, words):
  for name, content in (("a", trained), ("b", evaluated)):
    (tmp_path / f"{name}.jsonl").write_text(content)
  with pytest.raises(UserError, match=words):
    task = choose(tmp_path / "out", **{"multi_label": True, **changes})
    _ = task.training_set, task.evaluation_set


# Folders ----------------------------------------------------------------------

TASK = {
  "task": "classifier", "labels": LABELS, "multi_label": True,
  "label_threshold": 0.4, "do_lower_case": True, "max_seq_length": 24,
  "vocabulary": {"vocab_file": "vocab.txt"},
}  # fmt: skip
INPUTS = [Input("a b c"), Input("d [MASK]", "e f g")]


@pytest.fixture
def model(tmp_path, letters):
  """The prefix of a checkpoint that gives several labels."""
  parts = (weights.ENCODER, weights.POOLER, weights.CLASSIFIER)
  prefix = write_checkpoint(tmp_path / "a", random_values(parts))
  shutil.copyfile(letters, tmp_path / "a" / "vocab.txt")
  (tmp_path / "a" / "task.json").write_text(json.dumps(TASK))
  return prefix


def test_a_training_that_evaluates_chooses_the_threshold_again():
  for evaluates, want in ((False, 0.4), (True, None)):
    flags = {"do_train": True, "do_eval": evaluates, "do_predict": True}
    task = classification.ClassifierConfig.defaults(TASK, flags)
    assert task.get("label_threshold") == want


def test_folders_answer_the_same(tmp_path, model):
  want = answers(model, INPUTS)
  for answer in want:
    shares = answer["probabilities"]
    assert sum(shares.values()) != pytest.approx(1.0, abs=0.01)
    assert {*answer["labels"]} == {n for n in LABELS if shares[n] > 0.4}
  behaviour = BEHAVIOURS["classifier"]
  nothing = {"labels": [], "probabilities": {"blue": 0.1, "red": 0.2}}
  several = {**nothing, "labels": ["red", "blue"]}
  assert behaviour.answer_lines(several) == ["red 20.0%  blue 10.0%"]
  assert behaviour.answer_lines(nothing) == [
    "(no label; the most likely: red 20.0%)"
  ]
  theirs, back = tmp_path / "theirs", tmp_path / "back" / "m"
  convert(model, theirs)
  problem = runs.read_json(theirs, "config.json")["problem_type"]
  assert problem == "multi_label_classification"
  card = (theirs / "README.md").read_text()
  assert 'top_k=None, function_to_apply="sigmoid")' in card
  assert "with a sigmoid score above 0.4." in card
  convert(theirs, back)
  convert(model, tmp_path / "served", to="saved_model")
  for folder in (theirs, back, tmp_path / "served"):
    found = answers(folder, INPUTS)
    for one, other in zip(found, want, strict=True):
      assert one["labels"] == other["labels"]
      assert one["probabilities"] == pytest.approx(other["probabilities"])
  # As transformers saves it: half is its threshold.
  (theirs / "task.json").unlink()
  for one, other in zip(answers(theirs, INPUTS), want, strict=True):
    assert one["probabilities"] == pytest.approx(other["probabilities"])
    shares = one["probabilities"]
    assert {*one["labels"]} == {n for n in LABELS if shares[n] > 0.5}
  single = {**TASK, "multi_label": False}
  (theirs / "task.json").write_text(json.dumps(single))
  with pytest.raises(UserError, match="multi_label is False in task.json, but"):
    answers(theirs, INPUTS)


def test_logits_and_loss_are_transformers(tmp_path, model, choose, peer):
  folder, name = tmp_path / "theirs", "BertForSequenceClassification"
  convert(model, folder)
  rng = np.random.default_rng(0)
  ids = rng.integers(5, 30, [4, 9])
  targets = rng.integers(0, 2, [4, 3]).astype(np.float32)
  files = [str(tmp_path / f"{name}.npz") for name in ("batch", "out")]
  np.savez(files[0], input_ids=ids, labels=targets)
  peer([["run", str(folder), name, *files]])
  found = np.load(files[1])
  opened = inference.open_model(model_source.find(str(folder)))
  arrays = {"input_ids": ids, "input_mask": np.ones_like(ids)}
  outputs = opened.run("classifier", {**arrays, "segment_ids": 0 * ids})
  opened.close()
  np.testing.assert_allclose(outputs["logits"], found["logits"], atol=5e-6)
  task = choose(tmp_path / "out")
  with tf.Graph().as_default(), tf.Session() as session:
    logits = tf.constant(outputs["logits"])
    losses, _ = task.losses_and_correct(None, logits, targets, None)
    loss = session.run(losses).mean()
  assert loss == pytest.approx(float(found["loss"]), rel=1e-6)


@pytest.mark.parametrize("before", [False, True])
def test_a_model_of_the_other_kind_is_told(tmp_path, choose, before):
  """Its rows go by the same names, but its weights have other answers."""
  task = {**TASK, "multi_label": before}
  (tmp_path / "task.json").write_text(json.dumps(task))
  given = {"init_checkpoint": f"{tmp_path}/model.ckpt-1"}
  path = write_table(tmp_path / "own", "tsv", [(n, [n]) for n in LABELS])
  told = {}
  for now in (False, True):
    made = choose(tmp_path / "out", multi_label=now, train_file=path, **given)
    told[now] = any("training begins with" in line for line in made.lines())
  assert told == {before: False, not before: True}
