"""Classification: tables to examples, labels, metrics, predictions."""

import functools
import itertools
import json
import re
import types
from unittest import mock

import finetuning_runs
import numpy as np
import pytest
import runs
import samples

import run_pretraining
from checkpoints import agreement
from common.errors import UserError
from common.tensorflow_v1 import tf
from corpus import tables
from finetuning import classification, finetune, metrics, packed, windows
from finetuning.labels import identity, label_order
from gradients.distributed import Comm
from text_encoders.base import SPECIAL_TOKENS, Encoder

SPECIAL = Encoder("vocab.txt", True)
SPECIAL.cls_id, SPECIAL.sep_id = 2, 3


def pair(a, b, room):
  """As google/bert: a token at a time from the longer, b if they are equal."""
  a, b = list(range(10, 10 + a)), list(range(50, 50 + b))
  while len(a) + len(b) > room - 3:
    (a if len(a) > len(b) else b).pop()
  return [2, *a, 3, *b, 3], [0] * (len(a) + 2) + [1] * (len(b) + 1)


def test_texts_are_cut_as_in_google_bert():
  lengths = (0, 1, 4, 9, 10), (0, 1, 5, 9), (4, 9, 12, 13, 30)
  for a, b, room in itertools.product(*lengths):
    texts = np.arange(10, 10 + a), np.arange(50, 50 + b)
    ids, segments, cut = windows.encode_pair(SPECIAL, room, *texts)
    assert (ids.tolist(), segments.tolist()) == pair(a, b, room)
    assert cut == a + b + 3 - len(ids)
  ids, segments, _ = windows.encode_pair(SPECIAL, 5, np.arange(10, 20))
  assert ids.tolist() == [2, 10, 11, 12, 3] and not segments.any()


# Metrics, by hand -------------------------------------------------------------


# (metric, right, predicted, its value): 2 true positives, 1 false, 1 missed, 4
# true negatives; then what is not defined; then three labels.
SCORED = [
  (metrics.accuracy, "11100000", "11010000", 6 / 8),
  (metrics.f1, "11100000", "11010000", 4 / 6),
  (metrics.matthews, "11100000", "11010000", 7 / 15),
  (metrics.matthews, "0101", "1111", 0.0),
  (metrics.f1, "00", "00", 0.0),
  (metrics.pearson, "0123", "1111", 0.0),
  (metrics.pearson, "0123", "1357", 1.0),
  # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5, 5.
  (metrics.spearman, "0123", "0559", 4.5 / (4.5 * 5) ** 0.5),
  (functools.partial(metrics.f1, average="macro"), "0012", "0112",
   (2 / 3 + 2 / 3 + 1) / 3),
]  # fmt: skip


def test_metrics():
  for metric, *labels, value in SCORED:
    right, predicted = (np.array([*map(int, digits)]) for digits in labels)
    assert metric(right, predicted) == pytest.approx(value)
  # What a training gives that has diverged.
  assert metrics.pearson(np.arange(3.0), np.array([np.nan, 0, 1])) == 0.0


def test_f1_goes_by_the_labels_of_the_task():
  """And not by those that happen to be there: of three, two are."""
  targets, predicted = np.array([0, 0, 1]), np.array([0, 1, 1])
  two, three = (metrics.metric("f1", n)(targets, predicted) for n in (2, 3))
  assert two == pytest.approx(2 / 3)
  assert three == pytest.approx((2 / 3 + 2 / 3) / 2)
  assert metrics.metric("f1", 3)(np.array([0, 0]), np.array([0, 0])) == 1.0
  assert metrics.metric("accuracy", 3)(targets, predicted) == 2 / 3


# GLUE's files -----------------------------------------------------------------

MNLI = "index\tsentence1\tsentence2\tlabel1\tgold_label\n"
PAIRS = "index\tsentence1\tsentence2\tlabel\n"
# fmt: off
FILES = {
  "cola": ("", "gj04\t1\t\ta b\ngj04\t0\t*\tb a\n", ["1", "0"]),
  "sst-2": ("sentence\tlabel\n", "a b \t1\nb\t0\n", ["1", "0"]),
  "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
           '1\t7\t8\ta "b\tb\n0\t9\t9\tb\ta\n', ["1", "0"]),
  "sts-b": (
    "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\t"
    "sentence2\tscore\n",
    "0\tm\tM\t2012\t1\tn\tn\ta\tb\t5.000\n1\tm\tM\t2012\t5\tn\tn\ta\tb\t4.75\n",
    [5.0, 4.75]),
  "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n",
          "1\t2\t3\ta\tb\t0\n2\t4\t5\ta\ta\t1\n", ["0", "1"]),
  "mnli": (
    MNLI, "0\ta\tb\tneutral\tneutral\n1\ta\tb\tentailment\tcontradiction\n",
    ["neutral", "contradiction"]),
  "qnli": ("index\tquestion\tsentence\tlabel\n",
           "0\ta\tb\tentailment\n1\ta\tb\tnot_entailment\n",
           ["entailment", "not_entailment"]),
  "rte": (PAIRS, "0\ta\tb\tnot_entailment\n1\ta\tb\tentailment\n",
          ["not_entailment", "entailment"]),
  "wnli": (PAIRS, "0\ta\tb\t1\n1\ta\tb\t0\n", ["1", "0"]),
}
# fmt: on


@pytest.fixture
def make(tmp_path):
  """(**settings) -> a task whose files are in tmp_path."""
  tokens = [*SPECIAL_TOKENS, "a", "b", '"', "good", "bad"]
  return functools.partial(
    finetuning_runs.classifier, samples.write_config(tmp_path / "bert.json"),
    samples.write_vocabulary(tmp_path / "vocab.txt", tokens), tmp_path / "out",
    data_dir=str(tmp_path), examples_per_record=4,
  )  # fmt: skip


@pytest.mark.parametrize("task", sorted({*classification.GLUE} - {"mnli-mm"}))
def test_glue_files(tmp_path, make, task):
  header, rows, labels = FILES[task]
  (tmp_path / "train.tsv").write_text(header + rows, encoding="utf-8")
  made = make(task_name=task.upper())
  source = made.training_set
  targets = [e.targets[0] for e in source.examples]
  numbers = [made.labels.index(x) if made.labels else x for x in labels]
  assert targets == numbers
  # So the same command resumes it.
  now = agreement.of_start(made.config.as_dict())
  before = agreement.of_task(made.task_content())
  agreement.agree(before, now, "", agreement.scopes(True))
  has_pair = classification.GLUE[task].pair is not None
  assert (source.examples[0].ids == 3).sum() == 1 + has_pair
  assert source.examples[0].segments.any() == has_pair


def test_a_model_that_never_learned_second_segments(
  tmp_path, make, monkeypatch
):
  """Evaluations give it none, as predictions do."""
  header, rows, _ = FILES["rte"]
  (tmp_path / "train.tsv").write_text(header + rows)
  for task in ({}, {"segment_ids": False}):
    model = types.SimpleNamespace(task=task)
    monkeypatch.setattr(packed.task_file, "binding", lambda _, m=model: m)
    source = make(task_name="RTE").read("train")
    assert source._columns.segment_ids.any() == (not task)


def test_files_of_cola_and_mnli_have_their_own_ways(tmp_path, make):
  """CoLA has a header in its test file only, MNLI two sets to evaluate on."""
  (tmp_path / "test.tsv").write_text("index\tsentence\n0\ta b\n1\tb\n")
  assert len(make(task_name="cola").prediction_set.examples) == 2
  for name, wanted in (("mnli", "matched"), ("mnli-mm", "mismatched")):
    config = make(task_name=name).config
    assert config.path("eval") == str(tmp_path / f"dev_{wanted}.tsv")
    assert config.path("predict") == str(tmp_path / f"test_{wanted}.tsv")


# Tables -----------------------------------------------------------------------


HEADER = "sentence\tlabel\n"


@pytest.fixture
def table(tmp_path, make):
  """(text of a table to train on, **settings) -> its task."""

  def of_text(text, **settings):
    (tmp_path / "own.tsv").write_text(text)
    return make(train_file=str(tmp_path / "own.tsv"), **settings)

  return of_text


def scores(source, labels, answers):
  """Logits that are 1 at the labels of `answers`, else 0."""
  logits = np.zeros((len(source), source.slots, len(labels)), np.float32)
  both = source.record_of, source.slot_of
  for row, slot, answer in zip(*both, answers, strict=True):
    logits[row, slot, labels.index(answer)] = 1.0
  return {"logits": logits}


def test_labels_have_one_order(table):
  """Whatever the order that they are found in; NaN is no number."""
  text = f"{HEADER}a\t10\nb\tno\na\t9\nb\t10\n"
  assert table(text).labels == ["9", "10", "no"]
  ordered = ["-inf", "0.5", "1", "1.0", "2", "1e999", "inf", "NaN", "nan", "no"]
  rng = np.random.default_rng(0)
  for _ in range(50):
    found = rng.permutation(ordered).tolist()
    assert sorted(found, key=label_order) == ordered


def test_labels_are_shown_with_their_counts(table):
  """As they are spelt: some are mistakes."""
  for labels, regression, shown in (
    ("1 0 1 1.0 -1", False, "labels '1' 2, '0' 1, '1.0' 1, '-1' 1"),
    ("1 0.5 -1", True, "labels from -1 to 1"),
  ):
    rows = "".join(f"a\t{label}\n" for label in labels.split())
    made = table(HEADER + rows, regression=regression)
    path = made.training_set.describe()["files"][0]
    assert made.lines() == [f"{path}: {shown}"]
  rows = "".join(f"a\tl{n}\n" * (99 - n) for n in range(40))
  made = table(HEADER + rows)
  assert (
    made.training_set and "'l11' 88, 16 others, 'l28' 71" in made.lines()[0]
  )


def build_pretraining(config):
  with (
    mock.patch.object(
      run_pretraining.training_run, "run", lambda _, __, build, *___: build()
    ),
    tf.Graph().as_default(),
  ):
    run_pretraining.pretrain_stage(config, None, Comm())


def test_what_cannot_be_published_is_told_before_training(
  table, tiny_run, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(finetune.training_run, "run", print)
  for is_other in (False, True):
    made = table(HEADER + "a\t1\nb\t0\n" * 8)
    made.config.bert.pre_layer_norm = is_other
    finetune.finetune(made, Comm())
    config = runs.config(tiny_run, tmp_path)
    config.bert.pre_layer_norm = is_other
    build_pretraining(config)
    line = "no Hugging Face folder can be written of this model: BERT lacks pre"
    assert capsys.readouterr().err.count(line) == 2 * is_other
  config = runs.config(tiny_run, tmp_path)  # of pairs
  config.bert.position_type = "rotary"
  build_pretraining(config)
  line = "RoFormer lacks this next sentence head"
  assert line in capsys.readouterr().err


@pytest.mark.parametrize(
  "text, changes, words",
  [
    (f"{HEADER}a\t1\nb\t1\n", {},
     "has 1 different labels, such as '1': a classifier"),
    (HEADER + "".join(f"a\t{i}.5\n" for i in range(1100)), {},
     "1100 different labels, .* for numbers give --regression"),
    (f"{HEADER}a\t1.5\nb\tx\n", {"regression": True},
     "line 3: label is 'x', not a finite number"),
    (f"{HEADER}a\t1\nb\t0\n", {"eval_file": "dev.tsv"},
     "dev.tsv: line 3: label is '2', not one of 0, 1"),
  ],
)  # fmt: skip
def test_errors_of_tables(tmp_path, monkeypatch, table, text, changes, words):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "dev.tsv").write_text(f"{HEADER}a\t1\nb\t2\n")
  with pytest.raises(UserError, match=words):
    task = table(text, **changes)
    _ = task.training_set, task.evaluation_set


def test_labels_that_nothing_says(make):
  with pytest.raises(UserError, match="has no run that says which labels"):
    _ = make(do_train=False, do_eval=True).labels


# (a model's labels, the labels of a task, the model's row of each or None)
NAMES = [
  (["b", "a"], ["a", "b"], [1, 0]),
  (["no", "maybe", "yes"], ["yes", "no", "maybe"], [2, 0, 1]),
  (["1.0", " 0"], ["0", "1"], [1, 0]),
  (["True", "False"], ["0", "1"], [1, 0]),
  (["a", "A"], ["A", "a"], [1, 0]),
  (["cafe\u0301", "b"], ["b", "caf\u00e9"], [1, 0]),
  (["new  york", "b"], ["b", "new york"], [1, 0]),
  (["no", "yes"], ["0", "1"], None),
  (["a", "b"], ["a", "c"], None),
  (["a", "b"], ["a", "b", "c"], None),
  (["a", "A"], ["a", "b"], None),
  (["007", "08"], ["7", "8"], None),
  (["1", "1.0", "b"], ["b", "1"], None),  # as 1.0 of this project told apart
  ([], ["0", "1"], None),  # a regression, or no file says them
]


@pytest.fixture
def model(tmp_path):
  """(names of labels) -> the flag of a model that has them."""

  def of_labels(labels):
    (tmp_path / "task.json").write_text(json.dumps({"labels": labels}))
    return {"init_checkpoint": f"{tmp_path}/model.ckpt-1"}

  return of_labels


@pytest.mark.parametrize("of_model, of_task, rows", NAMES)
def test_a_models_rows_are_found_by_name(table, model, of_model, of_task, rows):
  text = HEADER + "".join(f"a\t{label}\n" for label in of_task)
  made = table(text, **model(of_model))
  assert made.labels == (of_model if rows else sorted(of_task))
  wanted = rows or [made.labels.index(label) for label in of_task]
  assert [e.targets[0] for e in made.training_set.examples] == wanted


@pytest.mark.parametrize(
  "of_model, labels, rows",
  [
    (["POSITIVE", "NEGATIVE"], ["negative", "Positive"], [1, 0]),
    (["1", "0"], ["false", "1.0", " 0"], [1, 0, 1]),
    (["b", "a", "A"], ["A", "a", "B"], [2, 1, None]),
    (["1", "1.0"], ["1.0", "1"], [1, 0]),  # as 1.0 of this project knew them
    (["no", "yes"], ["0"], [None]),
  ],
)
def test_an_evaluation_finds_the_models_labels(
  tmp_path, table, model, of_model, labels, rows
):
  given = dict(do_train=False, do_eval=True, eval_file=f"{tmp_path}/own.tsv")
  given |= model(of_model)
  for label, row in zip(labels, rows, strict=True):
    made = table(f"{HEADER}a\t{label}\n", **given)
    assert made.labels == of_model
    if row is None:
      with pytest.raises(UserError, match=f"line 2: label is '{label}', not o"):
        _ = made.evaluation_set
    else:
      assert made.evaluation_set.examples[0].targets == (row,)


PUBLISHED = [
  ("mnli", ["entailment", "neutral", "contradiction"], [1, 2]),
  ("mnli", ["ENTAILMENT", "NEUTRAL", "CONTRADICTION"], [1, 2]),
  ("rte", ["not_entailment", "entailment"], [0, 1]),
  ("sst-2", ["POSITIVE", "NEGATIVE"], [0, 1]),
  ("mrpc", ["not_equivalent", "equivalent"], [1, 0]),
  ("qqp", ["duplicate", "not_duplicate"], [1, 0]),
  ("wnli", ["not_entailment", "entailment"], [1, 0]),
]


@pytest.mark.parametrize("task, of_model, rows", PUBLISHED)
def test_published_names_of_glues_labels(
  tmp_path, make, model, task, of_model, rows
):
  """With Hugging Face's names of a task's labels, in any order and case."""
  header, lines, _ = FILES[task]
  name = "dev_matched" if task == "mnli" else "dev"
  (tmp_path / f"{name}.tsv").write_text(header + lines, encoding="utf-8")
  made = make(task_name=task, do_train=False, do_eval=True, **model(of_model))
  assert made.labels == of_model
  source = made.evaluation_set
  assert [e.targets[0] for e in source.examples] == rows
  answers = scores(source, of_model, [of_model[row] for row in rows])
  assert {*made.results(source, answers).values()} == {1.0}


def test_ways_to_write_one_label(tmp_path, make):
  for labels, names in (
    ([1, 1.0, True, " 1", 0, 0.0, False, "0 "], ["0", "1"]),
    ([True, False, "True", "false", True, False], ["False", "True"]),
    ([2, "2.0", 10, 10.0], ["2", "10"]),
    (["1.50", 1.5, "007", 7], ["1.5", "1.50", "007", "7"]),
    (["a b", "a  b", " a b ", "A b"], ["A b", "a b"]),
    (["caf\u00e9", "cafe\u0301", "x"], ["caf\u00e9", "x"]),
  ):
    path = tmp_path / "own.jsonl"
    rows = [json.dumps({"sentence": "a", "label": label}) for label in labels]
    path.write_text("\n".join(rows) + "\n")
    made = make(train_file=str(path))
    assert sorted(made.labels) == sorted(names)
    for label, example in zip(labels, made.training_set.examples, strict=True):
      spelt = made.labels[example.targets[0]]
      assert identity(str(label)) == identity(spelt)


@pytest.mark.parametrize("labels", [["0", "1"], ["1", "0"]])
def test_f1_is_of_one_label_whatever_the_models_order(table, model, labels):
  text = f"{HEADER}a\t1\nb\t1\na a\t0\nb b\t0\nb a\t0\n"
  made = table(text, metrics=("f1",), **model(labels))
  assert made.labels == labels
  source = made.training_set
  # One "1" of two is found, and one of two that were predicted is one.
  assert made.results(source, scores(source, labels, "10100")) == {"f1": 0.5}


def test_predictions_file(tmp_path, table):
  made = table(f"{HEADER}a\tno\nb\tyes\na a\tno\n")
  source = made.training_set
  logits = np.zeros((len(source), source.slots, 2), np.float32)
  for i, score in enumerate([0.0, np.log(3.0), -20.0]):
    logits[source.record_of[i], source.slot_of[i], 1] = score
  (tmp_path / "out").mkdir()
  made.write_predictions(source, {"logits": logits})
  path = str(tmp_path / "out" / classification.PREDICTIONS_FILE)
  rows = [row.values for row in tables.read_table(path)]
  assert [r["prediction"] for r in rows] == ["no", "yes", "no"]
  shares = [float(r["yes"]) for r in rows]
  assert shares == pytest.approx([0.5, 0.75, 0.0], abs=1e-6)
  assert made.results(source, {"logits": logits}) == {"accuracy": 1.0}


def test_labels_in_the_predictions_file_are_read_back(tmp_path, make):
  """Fields are between tabs, lines end with line feeds, all else is escaped."""
  # With halves of surrogate pairs, which JSON may hold, as of an emoji.
  labels = ["a\tb", "c\nd", "e\rf", "g\\h", r"i\tj", 'say "k"', "\ud83d"]
  labels += ["b\udc00", r"\ud83d"]
  path = tmp_path / "own.jsonl"
  rows = [json.dumps({"sentence": "a", "label": label}) for label in labels]
  path.write_text("\n".join(rows))
  task = make(train_file=str(path))
  source = task.training_set
  (tmp_path / "out").mkdir()
  task.write_predictions(source, scores(source, task.labels, labels))
  written = (tmp_path / "out" / classification.PREDICTIONS_FILE).read_bytes()
  unescaped = {"t": "\t", "n": "\n", "r": "\r", "\\": "\\"}
  unescaped |= {"ud83d": "\ud83d", "udc00": "\udc00"}

  def read(field):
    return re.sub(r"\\(u....|.)", lambda found: unescaped[found[1]], field)

  lines = written.decode().removesuffix("\n").split("\n")
  header, *rows = [[*map(read, line.split("\t"))] for line in lines]
  assert header == ["index", "prediction", *task.labels]
  assert [row[1] for row in rows] == labels
  assert {len(row) for row in rows} == {len(header)}


def test_every_row_gets_its_own_prediction(tmp_path, make):
  """None is left out of what is predicted: the rest would move up."""
  path = tmp_path / "new.tsv"
  rows = [f"{'a ' * (i % 7 + 1)}\t{i}" for i in range(300)]
  path.write_text("\n".join(["sentence\tid", *rows]) + "\n\n")
  given = dict(do_train=False, do_predict=True, predict_file=str(path))
  assert len(make(**given).prediction_set.examples) == 300
  for line, words in (("only text", "has 1 fields for 2"), ("", "is empty")):
    lines = ["sentence\tid", *rows[:100], line, *rows[100:]]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=f"new.tsv: .* line 102 {words}"):
      _ = make(**given).prediction_set
    assert len(tables.read_table(str(path))) == 300
