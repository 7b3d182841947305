"""Trainings of run_embedder.py: one update, however it is cut."""

import dataclasses
import json

import finetuning_runs
import numpy as np
import pytest
import runs
import trained

from checkpoints import metrics
from common.errors import DataError, UserError
from finetuning import embedding as embedding_task
from finetuning.embedding import EmbedderConfig
from interop import embedding, run_settings
from training import train_loop

run = finetuning_runs.run
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
NEGATIVES = {"negative_columns": ("negative",)}
DROPOUT = {"dropout": 0.1}


@pytest.fixture
def embed(tmp_path, letters):
  """(folder, **changes) -> a task of pairs, some of them held out."""
  # With smaller weights all [CLS] are nearly equal, and rounding counts.
  return finetuning_runs.maker(
    "embed", tmp_path, letters, initializer_range=0.2
  )


def assert_alike(folders):
  """The runs have the same losses, norms and weights."""
  first, *others = folders
  assert len(runs.metrics(first)) == 8
  for other in others:
    for key in ("loss", "grad_norm"):
      want = runs.metrics(first, key)
      np.testing.assert_allclose(
        runs.metrics(other, key), want, rtol=2e-5, atol=5e-6
      )
    got = runs.weights(other)
    for name, value in runs.weights(first).items():
      np.testing.assert_allclose(got[name], value, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
  "changes",
  [
    {**NEGATIVES, "both_directions": True},
    slow({"matryoshka_dims": ("4", "32"), "pooling": "cls"}),
    slow({"query_prompt": "ab ", "include_prompt": False, **NEGATIVES}),
  ],
)
def test_micro_batches_and_packing_change_nothing(embed, tmp_path, changes):
  folders = []
  # Rows of one group have no other shape in a micro-batch of 5 or 16.
  for micro, packed in ((16, 1), (5, 1), (2, 1)):
    folders.append(tmp_path / f"{micro}")
    task = embed(
      folders[-1], global_batch_size=16, train_batch_size=micro,
      examples_per_record=packed, **changes,
    )  # fmt: skip
    run(task)
  assert_alike(folders)


def test_packed_groups_have_the_vectors_of_single_ones(embed, tmp_path):
  """One update of all groups, in rows of one group or of several."""
  losses = []
  for packed in (1, 32):
    folder = tmp_path / str(packed)
    task = embed(
      folder, train_batch_size=64, examples_per_record=packed,
      num_train_epochs=1.0, **NEGATIVES,
    )  # fmt: skip
    assert (len(task.training_set) < 40) == (packed > 1)
    run(task)
    losses.append((runs.metrics(folder), runs.metrics(folder, "grad_norm")))
  np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("changes", [DROPOUT, slow({**DROPOUT, **NEGATIVES})])
def test_the_second_pass_has_the_dropout_of_the_first(embed, tmp_path, changes):
  """An update of one micro-batch, in one pass and, compiled, in two."""
  folders = [tmp_path / mode for mode in ("off", "step")]
  for folder in folders:
    run(embed(folder, xla=folder.name, examples_per_record=1, **changes))
  assert_alike(folders)


@pytest.mark.parametrize("call", [2, 4, slow(6)])
def test_killed_in_any_pass_equals_never_killed(
  embed, tmp_path, monkeypatch, call
):
  """Update 4 ends in its first pass, between the passes, or in the second."""
  settings = {
    "global_batch_size": 16, "train_batch_size": 6, "save_checkpoints_steps": 3,
    "examples_per_record": 1, **DROPOUT,
  }  # fmt: skip
  whole, part = tmp_path / "whole", tmp_path / "part"
  run(embed(whole, **settings))
  calls = train_loop.optimization.TrainOps.calls
  updates = []

  def killed(ops, micro_batches):
    updates.append(calls(ops, micro_batches))
    assert len(updates[0]) == 2 * 3 + 1
    cut = [*updates[-1][:call], "no tensor"]
    return cut if len(updates) == 4 else updates[-1]

  no_tensor = pytest.raises(ValueError, match="no tensor")
  with monkeypatch.context() as patched, no_tensor:
    patched.setattr(train_loop.optimization.TrainOps, "calls", killed)
    run(embed(part, **settings))
  assert runs.read_json(part, "model.ckpt-3.json")
  run(embed(part, **settings))
  runs.assert_equal(runs.weights(part), runs.weights(whole))
  assert runs.metrics(part) == runs.metrics(whole)


@pytest.mark.parametrize(
  "changes, best",
  [
    ({}, "ndcg_at_10"),
    (
      {
        "score_column": "score",
        "text_pair_column": "other",
        "matryoshka_dims": ("8",),
      },
      "spearman",
    ),
    slow({"simcse": True, **DROPOUT}, "ndcg_at_10"),
  ],
)
def test_it_learns_evaluates_and_embeds(embed, tmp_path, changes, best):
  folder = tmp_path / "out"
  task = embed(
    folder, num_train_epochs=12.0, do_eval=True, do_predict=True,
    eval_every_epochs=4.0, learning_rate=3e-3, **changes,
  )  # fmt: skip
  result = run(task)["evaluation"]
  losses = runs.metrics(folder)
  assert losses[-1] < losses[0]
  evaluations = metrics.read_jsonl(str(folder / metrics.EVAL_METRICS_FILE))
  assert result[best] == max(one[best] for one in evaluations)
  assert result[best] > 0.5  # by chance it is 0 or, of 20 documents, 0.3
  if "matryoshka_dims" in changes:
    assert 0.5 < result["pearson/8"] != result["pearson"]
  vectors = np.load(folder / "vectors.npy")
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
  saved = json.loads((folder / "task.json").read_text())
  assert saved["pooling"] == "mean" and saved["normalize"]


def test_a_new_training_has_the_inputs_of_its_embedder(tmp_path, letters):
  """Its prompts, pooling and lengths, unless a flag says others."""
  trained.write_model(tmp_path / "model", "embedder", letters)

  def inputs(**flags):
    values = finetuning_runs.command_line(
      EmbedderConfig, do_train=True, train_file="x",
      init_checkpoint=str(tmp_path / "model"),
      output_dir=str(tmp_path / "new"), **flags,
    )  # fmt: skip
    read = EmbedderConfig.read_flags(values)
    config, _ = run_settings.configured(EmbedderConfig, *read)
    names = ("query_prompt", "include_prompt", "pooling", "max_seq_length")
    return [getattr(config, name) for name in names]

  assert inputs() == ["ab ", False, "mean", 24]
  changes = dict(query_prompt="", include_prompt=True, max_seq_length=16)
  assert inputs(**changes) == ["", True, "mean", 16]
  # A flag settles what would contradict it.
  assert inputs(pooling="cls") == ["ab ", True, "cls", 24]
  saved = {"task": "embedder", "query_length": 8, "negative_columns": ["n"]}

  def defaults(**flags):
    known = EmbedderConfig.defaults(saved, flags)
    return {*known} & {"query_length", "negative_columns"}

  assert defaults(max_seq_length=4) == {"negative_columns"}
  assert defaults(max_seq_length=8) == {"query_length", "negative_columns"}
  for flags in ({"score_column": "s"}, {"simcse": True}):
    assert defaults(**flags) == {"query_length"}


def test_negatives_are_those_of_the_run(embed, tmp_path):
  """Of an evaluation alone, too; a table without them has none."""
  folder = tmp_path / "out"
  trained_with = run(embed(folder, do_eval=True, **NEGATIVES))["evaluation"]
  saved = json.loads((folder / "task.json").read_text())
  assert saved["negative_columns"] == ["negative"]
  values = finetuning_runs.command_line(
    EmbedderConfig, do_eval=True, eval_file=str(tmp_path / "b.jsonl"),
    output_dir=str(folder), eval_batch_size=16, xla="off",
  )  # fmt: skip
  read = EmbedderConfig.read_flags(values)
  config, _ = run_settings.configured(EmbedderConfig, *read)
  task = embedding_task.Embedding(config)
  assert run(task)["evaluation"] == pytest.approx(trained_with)
  rows = map(json.loads, (tmp_path / "b.jsonl").read_text().splitlines())
  pairs = [{"anchor": r["anchor"], "positive": r["positive"]} for r in rows]
  plain = tmp_path / "plain.jsonl"
  plain.write_text("\n".join(map(json.dumps, pairs)))
  task = embedding_task.Embedding(
    dataclasses.replace(config, eval_file=str(plain))
  )
  assert run(task)["evaluation"]["examples"] < trained_with["examples"]
  task = embed(tmp_path / "x", negative_columns=("negative", "no"))
  with pytest.raises(UserError, match="has no 'no'.*by --negative_columns"):
    _ = task.training_set


def test_a_text_may_have_all_positions_of_a_model(tmp_path, letters):
  """They are no multiple of 8, as a row's tokens are."""
  embed = finetuning_runs.maker(
    "embed", tmp_path, letters, max_position_embeddings=100
  )
  folder, text = tmp_path / "out", " ".join("a" * 98)
  (tmp_path / "long.jsonl").write_text(json.dumps({"anchor": text}) + "\n")
  task = embed(
    folder, max_seq_length=100, num_train_epochs=1.0, do_predict=True,
    predict_file=str(tmp_path / "long.jsonl"),
  )  # fmt: skip
  run(task)
  want = embedding.open_embedder(str(folder)).embed([text], "query")
  vectors = np.load(folder / "vectors.npy")
  np.testing.assert_allclose(vectors, want, atol=1e-5)


def test_simcse_is_evaluated_on_pairs(embed, tmp_path):
  """Beside itself a text would always be found."""
  task = embed(tmp_path / "out", simcse=True, do_eval=True)
  rows = len(task.read("eval").examples)
  assert rows > len((tmp_path / "b.jsonl").read_text().splitlines())
  scores = dict(score_column="score", text_pair_column="other")
  task = embed(tmp_path / "c", simcse=True, do_eval=True, **scores)
  assert task.best_by.keys == ("spearman",)
  assert {*run(task)["evaluation"]} >= {"spearman", "pearson"}
  task = embed(tmp_path / "a", simcse=True, text_pair_column="x")
  assert len(task.read("train").examples) == 64
  with pytest.raises(UserError, match="has no 'x'.*by --text_pair_column"):
    task.read("eval")


def test_a_folder_to_search_in_has_no_scores(embed, tmp_path):
  """Scores of training say nothing of what chooses the best checkpoint."""
  folder = tmp_path / "beir"
  (folder / "qrels").mkdir(parents=True)
  text = '{"_id": "1", "title": "", "text": "a b"}\n'
  for name in ("corpus", "queries"):
    (folder / f"{name}.jsonl").write_text(text)
  qrels = "query-id\tcorpus-id\tscore\n1\t1\t1\n"
  (folder / "qrels" / "test.tsv").write_text(qrels)
  scores = {"score_column": "score", "text_pair_column": "other"}
  task = embed(tmp_path / "out", **scores, eval_file=str(folder))
  assert task.best_by.keys == ("ndcg_at_10",)
  assert embed(tmp_path / "a", **scores).best_by.keys == ("spearman",)


def test_vectors_are_those_of_texts_to_search_with(embed, tmp_path):
  """Unless training had no other side."""
  prompts = {"query_prompt": "a b ", "document_prompt": "c "}
  lengths = []
  for number, simcse in enumerate((False, True)):
    task = embed(tmp_path / f"{number}", simcse=simcse, **prompts)
    examples = task.read("predict").examples
    lengths.append(sum(len(one.texts[0].ids) for one in examples))
  # One side's prompt has a letter more than the other's.
  assert lengths[0] == lengths[1] + len(examples)


def test_a_model_is_used_as_it_compares(embed, tmp_path):
  """Also one of another library, whose vectors have no length of 1."""
  first, use = tmp_path / "a", dict(do_train=False, do_predict=True)
  run(embed(first, num_train_epochs=1.0))
  path = first / "task.json"
  task = json.loads(path.read_text())
  changed = {"normalize": False, "similarity": "dot"}
  path.write_text(json.dumps({**task, **changed}))
  (index,) = first.glob("model.ckpt-*.index")
  model = str(index.with_suffix(""))
  task = embed(tmp_path / "b", init_checkpoint=model, do_eval=True, **use)
  run(task)
  rows = (tmp_path / "b.jsonl").read_text().splitlines()
  texts = [json.loads(row)["anchor"] for row in rows]
  want = embedding.open_embedder(model).embed(texts, "query")
  assert not np.allclose(np.linalg.norm(want, axis=1), 1)
  got = np.load(tmp_path / "b" / "vectors.npy")
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert task.describe()["similarity"] == "dot"


def test_a_prompt_leaves_room_for_a_text(embed, tmp_path):
  settings = {"query_prompt": "a b c d ", "query_length": 6}
  task = embed(tmp_path / "out", **settings)
  with pytest.raises(UserError, match="'a b c d ' leaves no room .* 6 tokens"):
    task.read("train")
  task = embed(tmp_path / "out", **{**settings, "query_length": 7})
  assert {len(one.texts[0].ids) for one in task.read("train").examples} == {7}


# What is wrong with a line of the pairs -> the error.
BAD_ROWS = [
  ({"positive": ""}, {}, "line 3 has \"\" where 'positive' should be"),
  ({"positive": None}, {}, "line 3 has null where 'positive' should be"),
  ({"score": float("nan")}, {"score_column": "score"}, "line 3 has NaN"),
  ({"score": "x"}, {"score_column": "score"}, "'x', not a finite number"),
  ({"negative": [1]}, NEGATIVES, r"line 3: negative\[0\] is 1, not text"),
  ({}, {"text_column": "q"}, "has no 'q'.*by --text_column"),
  ({}, {"negative_columns": ("n",)}, "has no 'n'.*by --negative_columns"),
]


@pytest.mark.parametrize("wrong, changes, message", BAD_ROWS)
def test_a_bad_row_is_named(embed, tmp_path, wrong, changes, message):
  task = embed(tmp_path / "out", **changes)
  path = tmp_path / "a.jsonl"
  lines = path.read_text().splitlines()
  lines[2] = json.dumps({**json.loads(lines[2]), **wrong})
  path.write_text("\n".join(lines))
  with pytest.raises(UserError, match=message):
    run(task)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"matryoshka_dims": ("33",)}, "33 is not a number of 1 to 32"),
    ({"matryoshka_dims": ("x",)}, "x is not a number"),
    ({"query_length": 65}, "must be 4 to --max_seq_length=64"),
    ({"pooling": "cls", "include_prompt": False}, "out of a mean, but --pooli"),
    ({"max_seq_length": 4096}, "max_position_embeddings"),
    ({"simcse": True, **NEGATIVES}, "--negative_columns"),
    ({"score_column": "s", **NEGATIVES}, "--negative_columns"),
    ({"temperature": 0.0}, "--temperature=0.0: must be 0.005"),
  ],
)
def test_a_bad_setting_is_refused(embed, tmp_path, changes, message):
  with pytest.raises(UserError, match=message):
    embed(tmp_path / "out", **changes)


def test_a_positive_equal_to_its_anchor_is_left_out(embed, tmp_path, capsys):
  path = tmp_path / "a.jsonl"
  task = embed(tmp_path / "out")
  with open(path, "a") as file:
    file.write(json.dumps({"anchor": "w", "positive": "w"}) + "\n")
  assert len(task.training_set.examples) == 64
  (line, other) = task.lines()
  assert "columns negative are not read" in line
  assert "1 row left out" in other and "first line 65" in other
  path.write_text(json.dumps({"anchor": "w", "positive": "w"}))
  with pytest.raises(DataError, match="1 row left out, whose.*--simcse learns"):
    embed(tmp_path / "none").read("train")
