"""Labels of words: the task, its loss and metrics, a whole run.

`test_finetune.py` has what runs of all tasks have in common.
"""

import json
import os

import finetuning_runs
import numpy as np
import pytest

from checkpoints import description
from common.errors import UserError
from common.tensorflow_v1 import tf
from finetuning import heads, ner, packed
from finetuning.words import SILENT
from interop import run_settings

run = finetuning_runs.run


@pytest.fixture
def label(tmp_path, letters):
  """(folder, **changes) -> task on 64 sentences, 20 held out."""
  return finetuning_runs.maker("label", tmp_path, letters)


@pytest.fixture
def given(tmp_path, label):
  """(text of a file to train on, **settings) -> its task."""

  def of_text(text, **settings):
    (tmp_path / "own.txt").write_text(text)
    settings = {"train_file": str(tmp_path / "own.txt"), **settings}
    return label(tmp_path / "out", **settings)

  return of_text


# Examples and metrics ---------------------------------------------------------


def test_targets_stand_at_the_words_first_tokens(given):
  made = given("ab N\n\u200b V\nc P\n\nd N\nef V\n")
  source = made.training_set
  assert made.labels == ["N", "P", "V"]
  targets = source._columns.targets
  ids = source._columns.input_ids
  vocabulary = made.config.tokenizer().tokens
  found = [
    (vocabulary[token], made.labels[target])
    for token, target in zip(ids.ravel(), targets.ravel(), strict=True)
    if target != SILENT
  ]
  assert sorted(found) == [("a", "N"), ("c", "P"), ("d", "N"), ("e", "V")]
  assert [example.weight for example in source.examples] == [2.0, 2.0]
  assert len(source) == 1  # both in one row


def outputs_of(source, made, labels):
  """The head's outputs where each word's first token has its label."""
  found = np.zeros([len(source), source.tokens], np.float32)
  flat = [label for of_sentence in labels for label in [*of_sentence, None]]
  for place, word in np.ndenumerate(source._words):
    if word != SILENT:
      found[place] = made.labels.index(flat[word])
  return {"labels": found}


def test_entities_are_counted(given):
  made = given("w B-LOC\nw I-LOC\nw O\n\nw B-PER\nw I-PER\nw B-LOC\n")
  assert made.metrics == ["f1", "precision", "recall", "accuracy"]
  assert made.best_by == (("f1",), True)
  source = made.training_set
  guesses = [["B-LOC", "O", "O"], ["B-PER", "I-PER", "I-LOC"]]
  found = made.results(source, outputs_of(source, made, guesses))
  # PER, and the LOC of one word, of three; of these LOCs one is right.
  assert found["accuracy"] == pytest.approx(4 / 6)
  for name in ("f1", "precision", "recall"):
    assert found[name] == pytest.approx(2 / 3)
  assert (found["PER/f1"], found["LOC/recall"]) == (1.0, 0.5)


def test_plain_labels_have_accuracy_only(given):
  """Also in a long sentence, which becomes windows."""
  right = [f"L{n % 4}" for n in range(60)]
  words = "".join(f"{'ab' * (1 + n % 3)} {right[n]}\n" for n in range(60))
  made = given(words, max_seq_length=24, doc_stride=8)
  assert made.metrics == ["accuracy"] and made.best_by == (("accuracy",), True)
  source = made.training_set
  assert len(source.examples) > 5
  assert sum(example.weight for example in source.examples) == 60
  for wrong in (0, 15):
    guesses = [["L0"] * wrong + right[wrong:]]
    found = made.results(source, outputs_of(source, made, guesses))
    accuracy = sum(map(str.__eq__, guesses[0], right)) / 60
    assert found == {"accuracy": pytest.approx(accuracy)}


def test_words_without_a_token_are_O(given):
  """They count, as those that are."""
  made = given("w B-LOC\n\u200b I-LOC\n\n\u200b O\n")
  source = made.training_set
  found = made.results(source, outputs_of(source, made, [["B-LOC", None]]))
  assert found["accuracy"] == pytest.approx(2 / 3)
  assert found["f1"] == 0.0


def test_predictions_have_each_word_and_a_line_between_sentences(
  tmp_path, given
):
  path = tmp_path / "new.jsonl"
  lines = [["New York", "\u200b", "a\tb"], [], ["x"]]
  path.write_text("".join(json.dumps({"tokens": x}) + "\n" for x in lines))
  made = given("w B-LOC\nw O\n", predict_file=str(path))
  source = made.prediction_set
  (tmp_path / "out").mkdir()
  labels = [["B-LOC", "O", "B-LOC"], [], ["O"]]
  made.write_predictions(source, outputs_of(source, made, labels))
  written = (tmp_path / "out" / ner.PREDICTIONS_FILE).read_text()
  assert written == "New York\tB-LOC\n\u200b\tO\na b\tB-LOC\n\n\nx\tO\n\n"


# Labels -----------------------------------------------------------------------


def test_labels_are_the_models_by_name(tmp_path, given):
  """Whatever the order in which the data have them, or --label_names."""
  (tmp_path / "task.json").write_text(json.dumps({"labels": ["O", "B-A"]}))
  start = {"init_checkpoint": f"{tmp_path}/model.ckpt-1"}
  for more in ({}, {"label_names": ("B-A", "O")}):
    made = given("w B-A\nw O\n", **start, **more)
    assert made.labels == ["O", "B-A"]
    assert made.training_set.rows.tolist() == [1, 0, SILENT]
  assert given("w B-B\nw O\n", **start).labels == ["B-B", "O"]
  named = given("w O\nw B-B\n", label_names=("O", "B-B", "I-B"))
  assert named.labels == ["O", "B-B", "I-B"]


@pytest.mark.parametrize(
  "train, dev, message",
  [
    ("w O\nw B-A\n", "w O\n\nw O\nw B-B\n",
     "b.txt: line 4: a label is 'B-B', not one of B-A, O"),
    ("w O\n", "w O\n", "own.txt has 1 different labels, such as 'O': a"),
    ("w O\nw\n", "w O\n", "own.txt: line 2: the number of its columns is 1"),
  ],
)  # fmt: skip
def test_wrong_labels_are_named(tmp_path, given, train, dev, message):
  made = given(train)
  (tmp_path / "b.txt").write_text(dev)
  with pytest.raises(UserError, match=message):
    _ = made.training_set, made.evaluation_set


@pytest.mark.parametrize(
  "text, counts, words",
  [
    ("w B\nw O\n\nw O\n", "'O' 2, 'B' 1", "are of entities of one type, _, as"),
    ("# c x O\nw N O\nw N B-A\nw N 0\n# N tags\nw N 0\nw N O\n",
     "'O' 2, '0' 2, 'B-A' 1, 'tags' 1",
     "O: '0' (own.txt: line 4), 'tags' (own.txt: line 5)"),
    ("w V\nw N\nw N\n", "'N' 2, 'V' 1", "O: 'N' (own.txt: line 2), 'V'"),
    ("w B-A\nw O\n", "'B-A' 1, 'O' 1", ""),
  ],
)  # fmt: skip
def test_labels_are_shown_with_a_word_on_f1(given, text, counts, words):
  made = given(text)
  file = made.training_set.describe()["files"][0]
  first, *others = made.lines()
  assert first == f"{file}: labels {counts}"
  assert len(others) == bool(words)
  for line in others:
    assert words in line.replace(file, "own.txt")


def test_an_older_run_keeps_its_metrics(tmp_path, given):
  """In which B and I were no entities."""
  (tmp_path / "out").mkdir()
  (tmp_path / "out" / "model.ckpt-1.json").touch()
  saved = {"task": "ner", "labels": ["B", "O"], "metrics": ["accuracy"]}
  (tmp_path / "out" / "task.json").write_text(json.dumps(saved))
  assert given("w B\nw O\n").metrics == ["accuracy"]


def test_a_file_that_is_not_given(tmp_path, label):
  task = label(tmp_path / "out", train_file=None)
  with pytest.raises(UserError, match="^--do_train needs --train_file$"):
    task.check()


# The head ---------------------------------------------------------------------


def test_the_loss_is_the_mean_over_words(tmp_path, given):
  """By NumPy, of packed examples; some have several words, one has none."""
  made = given("ab X\ncd Y\n\nc Y\n\n\u200b X\n\nefg Z\n")
  batch = made.training_set._columns
  assert batch.weights.shape == (1, 4) and sorted(batch.weights[0])[0] == 0
  with tf.Graph().as_default(), tf.Session() as session:
    constants = packed.FinetuningBatch(*map(tf.constant, batch))
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
      head = made.head(constants, False)
      model = heads.encode(constants, made, False).model
    by_name = {v.op.name: v for v in tf.trainable_variables()}
    weights = [
      by_name[f"cls/tokens/output_{name}"] for name in ("weights", "bias")
    ]
    session.run(tf.global_variables_initializer())
    weights[1].load([0.3, -0.2, 0.1], session)
    found, sequence, matrix, bias = session.run(
      [tuple(head[:2]), model.get_sequence_output(), *weights]
    )
    labels = session.run(head.outputs["labels"])
  logits = sequence @ matrix.T + bias
  np.testing.assert_array_equal(labels, logits.argmax(-1))
  shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  losses, correct = np.zeros([2, 1, 4])
  for place, target in enumerate(batch.targets[0]):
    if target != SILENT:
      example = batch.input_mask[0, place] - 1
      count = batch.weights[0, example]
      losses[0, example] -= np.log(shares[0, place, target]) / count
      correct[0, example] += (labels[0, place] == target) / count
  np.testing.assert_allclose(found[0], losses, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found[1], correct, rtol=1e-6)


# Runs -------------------------------------------------------------------------


def test_numbers_are_found(tmp_path, label):
  """It learns, keeps the best, and its folder alone does the rest."""
  out = tmp_path / "out"
  task = label(
    out, do_eval=True, do_predict=True, num_train_epochs=16.0,
    eval_every_epochs=4.0, learning_rate=3e-3,
  )  # fmt: skip
  result = run(task)["evaluation"]
  assert result["f1"] > 0.95 and result["accuracy"] > 0.95
  assert result["LOC/f1"] == result["f1"] and result["examples"] == 20
  saved = description.read(str(out)).task
  assert (saved["task"], saved["labels"]) == ("ner", ["B-LOC", "I-LOC", "O"])
  assert saved["best_by"] == {"keys": ["f1"], "higher": True}
  written = (out / ner.PREDICTIONS_FILE).read_text()
  os.remove(out / ner.PREDICTIONS_FILE)
  files = {path.name: path.read_bytes() for path in out.glob("*.json")}
  flags = finetuning_runs.command_line(
    ner.NerConfig, output_dir=str(out), do_predict=True, xla="off",
    predict_file=task.config.predict_file,
  )  # fmt: skip
  config, _ = run_settings.configured(
    ner.NerConfig, *ner.NerConfig.read_flags(flags)
  )
  assert (config.doc_stride, config.max_seq_length) == (16, 64)
  run(ner.Ner(config))
  assert (out / ner.PREDICTIONS_FILE).read_text() == written
  assert (out / "task.json").read_bytes() == files["task.json"]
  assert written.count("\n\n") == 20
  # Elsewhere, of a folder that cannot be written to.
  again = label(
    tmp_path / "else", do_train=False, do_eval=True,
    init_checkpoint=tf.train.latest_checkpoint(str(out)),
  )  # fmt: skip
  assert run(again)["evaluation"]["f1"] > 0.9
