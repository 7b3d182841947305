"""Exports: the same answers without this project, and nothing half done."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import runs
import trained
from samples import LETTERS, TINY, write_config
from tokenizers import Tokenizer

import convert_checkpoint
from checkpoints.checkpoint_files import CheckpointError, CheckpointFiles
from checkpoints.metrics import BEST_BY
from common.errors import UserError
from common.tensorflow_v1 import tf
from convert_checkpoint import ConversionSettings
from interop import inference, model_source
from model import tasks
from text_encoders.base import SPECIAL_TOKENS

# In a process that has TensorFlow and nothing of this project, as Serving's;
# then docs/use_a_model.md's example, which has this project's tokenizer.
FRESH = """
import pathlib
import sys
import numpy as np
import tensorflow as tf

root, *names = sys.argv[1:]
for name in names:
  loaded = tf.saved_model.load(f"{name}.export", tags=["serve"])
  arrays = np.load("inputs.npz")
  found = {}
  for batch in ("a", "b"):
    for part, function in loaded.signatures.items():
      wanted = function.structured_input_signature[1]
      given = {n: tf.constant(arrays[f"{batch}/{n}"]) for n in wanted}
      for output, value in function(**given).items():
        found[f"{batch}/{part}/{output}"] = value.numpy()
  np.savez(f"{name}.npz", **found)
assert not {"modeling", "inference", "tensorflow_v1"} & set(sys.modules)
sys.path.insert(0, root)
exec(pathlib.Path("example.py").read_text())
"""
LENGTHS = {"a": [12, 5, 1], "b": [7, 64]}  # two batches, padded to the longest


def batches():
  """batch -> list of (ids, segments)."""
  rng = np.random.default_rng(3)
  sizes = (TINY["vocab_size"], 2)
  return {
    batch: [[rng.integers(0, m, n) for m in sizes] for n in lengths]
    for batch, lengths in LENGTHS.items()
  }


def arrays_of(batch):
  """The signatures' inputs; masked positions: the first and the last token."""
  shape = len(batch), max(len(ids) for ids, _ in batch)
  made = {n: np.zeros(shape, np.int32) for n in inference.INPUTS}
  # What stands in padding is not read.
  made["input_ids"][:] = 7
  made["segment_ids"][:] = 1
  for row, (ids, segments) in enumerate(batch):
    made["input_ids"][row, : len(ids)] = ids
    made["input_mask"][row, : len(ids)] = 1
    made["segment_ids"][row, : len(ids)] = segments
  made[tasks.POOLED] = made["input_mask"]
  last = [[0, len(ids) - 1] for ids, _ in batch]
  return {**made, tasks.POSITIONS: np.array(last, np.int32)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory, letters):
  """kind -> (checkpoint, its folder's export, what a fresh process got)."""
  folder = tmp_path_factory.mktemp("models")
  prefixes = {}
  # No word that the vocabulary has not is likely.
  bias = np.where(np.arange(TINY["vocab_size"]) < len(LETTERS), 0, -50)
  changes = {"pretraining": {"cls/predictions/output_bias": bias}}
  for kind in trained.TASKS:
    prefixes[kind] = trained.write_model(
      folder / kind, kind, letters, changes.get(kind, {})
    )
    source = model_source.find(str(folder / kind))
    model = inference.open_checkpoint(source)
    inference.export(model, source, str(folder / f"{kind}.export"))
    model.close()
  arrays = {
    f"{batch}/{name}": value
    for batch, examples in batches().items()
    for name, value in arrays_of(examples).items()
  }
  np.savez(folder / "inputs.npz", **arrays)
  (folder / "example.py").write_text(example_of_the_page())
  done = subprocess.run(
    [sys.executable, "-I", "-c", FRESH, runs.ROOT, *prefixes],
    cwd=folder, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  words = ast.literal_eval(done.stdout)
  assert len(words) == 3 and {*words} <= {*LETTERS}
  return {
    kind: (prefix, folder / f"{kind}.export", np.load(folder / f"{kind}.npz"))
    for kind, prefix in prefixes.items()
  }


def example_of_the_page():
  """docs/use_a_model.md's, on the pre-trained model's export."""
  with open(f"{runs.ROOT}/docs/use_a_model.md", encoding="utf-8") as f:
    blocks = re.findall(r"^```python\n(.*?)^```", f.read(), re.M | re.S)
  (example,) = (block for block in blocks if "saved_model.load" in block)
  name = '"runs/quickstart/served/1"'
  assert name in example
  return example.replace(name, '"pretraining.export"')


DEFAULTS = {
  "pretraining": "masked_lm", "classifier": "classifier", "squad": "span",
  "ner": "token_classifier", "embedder": "embedding",
}  # fmt: skip


@pytest.mark.parametrize("kind", trained.TASKS)
def test_a_fresh_process_gets_the_checkpoints_answers(answers, kind):
  """Each row of a padded batch is what training's graph makes of it alone."""
  prefix, folder, found = answers[kind]
  names = set()
  for batch, examples in batches().items():
    rows = trained.expected(kind, prefix, examples)
    names |= {f"{batch}/{name}" for name in rows[0]}
    for row, ((ids, _), wanted) in enumerate(zip(examples, rows, strict=True)):
      for name, value in wanted.items():
        got = found[f"{batch}/{name}"][row]
        if len(value) == len(ids):
          got = got[: len(ids)]  # a number for each token
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)
  extra = folder / "assets.extra"
  ids = Tokenizer.from_file(f"{extra}/tokenizer.json").encode("a").ids
  assert ids == [LETTERS.index(token) for token in ("[CLS]", "a", "[SEP]")]
  config = json.loads((extra / "tokenizer_config.json").read_text())
  assert "token_type_ids" in config["model_input_names"]
  # And there are no others but the default's, which is the most useful.
  default = {name for name in found.files if "/serving_default/" in name}
  assert {*found.files} - default == names
  assert default
  for name in default:
    other = name.replace("serving_default", DEFAULTS[kind])
    np.testing.assert_array_equal(found[name], found[other])
  # The export holds the weights and what they mean.
  assert not os.path.exists(f"{folder}.unfinished")
  names = [name for name, _ in tf.train.list_variables(prefix)]
  weights = {name for name in names if not name.endswith("/adam_m")}
  saved = tf.train.list_variables(str(folder / "variables" / "variables"))
  assert {name for name, _ in saved} == weights
  source = model_source.find(str(folder))
  config = model_source.find(prefix).bert
  assert source.is_export and source.bert.to_dict() == config.to_dict()
  assert tuple(source.tokenizer().tokens[:5]) == SPECIAL_TOKENS
  assert source.task.get("labels") == trained.TASKS[kind].get("labels")


def test_only_what_is_asked_for(answers):
  source = model_source.find(answers["pretraining"][0])
  model = inference.open_checkpoint(source, ["masked_lm"])
  assert model.names() == ["masked_lm"]
  names = {v.op.name for v in model.session.graph.get_collection("variables")}
  assert "cls/predictions/output_bias" in names
  assert not any("pooler" in name or "seq_rel" in name for name in names)
  for name in ("span", "spam"):
    words = f"has no {name} head, only encoder, next"
    with pytest.raises(UserError, match=words):
      inference.open_checkpoint(source, [name])


def test_a_checkpoint_that_does_not_do(tmp_path, letters):
  """A missing variable, another config, weights that are not finite."""
  prefix = trained.write_model(
    tmp_path / "m", "classifier", letters, [("output_bias", np.nan)]
  )
  with pytest.raises(CheckpointError, match=r"output_bias holds .* not finite"):
    inference.open_checkpoint(model_source.find(prefix))
  os.remove(tmp_path / "m" / "bert_config.json")
  for change, words in (
    ({"num_hidden_layers": 3}, "lacks bert/encoder/layer_2/"),
    ({"vocab_size": 120}, r"word_embeddings is \[100, 32\] there"),
  ):
    path = write_config(tmp_path / "other.json", **change)
    given = model_source.Given(bert_config_file=path)
    with pytest.raises(CheckpointError, match=words):
      inference.open_checkpoint(model_source.find(prefix, given))


def test_it_is_written_whole_or_not_at_all(answers, tmp_path, monkeypatch):
  source = model_source.find(answers["pretraining"][0])
  model = inference.open_checkpoint(source)
  monkeypatch.setattr(inference, "_MOST_DIFFERENT", -1.0)
  with pytest.raises(UserError, match="differ from the checkpoint's"):
    inference.export(model, source, f"{tmp_path}/out/1")
  assert os.listdir(tmp_path / "out") == []
  monkeypatch.undo()
  inference.export(model, source, f"{tmp_path}/out/1/")
  assert os.listdir(tmp_path / "out") == ["1"]
  with pytest.raises(UserError, match="already exists"):
    inference.export(model, source, f"{tmp_path}/out/1")


def test_bf16_is_near(answers, tmp_path):
  """And what is written of it answers as it does."""
  source = model_source.find(answers["classifier"][0])
  arrays = arrays_of(batches()["a"])
  fp32, bf16 = (
    inference.open_checkpoint(source, precision=p).run("classifier", arrays)
    for p in ("fp32", "bf16")
  )
  model, folder = inference.open_checkpoint(source, precision="bf16"), "out/1"
  inference.export(model, source, str(tmp_path / folder))
  written = inference.open_model(model_source.find(str(tmp_path / folder)))
  logits = written.run("classifier", arrays)["logits"]
  np.testing.assert_allclose(logits, bf16["logits"], atol=1e-5)
  assert bf16["logits"].dtype == np.float32
  difference = np.abs(fp32["logits"] - bf16["logits"]).max()
  assert 0 < difference < 0.1 * np.abs(fp32["logits"]).max()


def test_a_model_that_never_learned_second_segments_reads_none(answers):
  source, outputs = model_source.find(answers["classifier"][0]), []
  task = {**source.task, "segment_ids": False}
  arrays = arrays_of(batches()["a"])
  zeros = {**arrays, "segment_ids": 0 * arrays["segment_ids"]}
  without = dataclasses.replace(source, task=task)
  for one, inputs in ((source, zeros), (without, arrays)):
    model = inference.open_checkpoint(one)
    outputs.append(model.run("classifier", inputs)["logits"])
  assert arrays["segment_ids"].any()
  np.testing.assert_array_equal(*outputs)


# Which checkpoint ------------------------------------------------------------


BY_F1 = {"keys": ["f1"], "higher": True}


def test_the_best_checkpoint_is_taken(tmp_path):
  """That with the lowest held-out loss, if it is still there."""
  files = CheckpointFiles(str(tmp_path / "run"), keep=5)
  os.mkdir(files.folder)
  write_config(tmp_path / "run" / "bert_config.json")
  for step in (10, 20, 30):
    files.write(step, {"x": np.zeros(step, np.float32)})
  files.wait()
  assert model_source.find(files.folder).path == files.prefix(30)
  first, second = BEST_BY.keys
  log = tmp_path / "run" / "eval_metrics.jsonl"
  rows = [
    {first: loss, second: 1.0, "global_step": step}
    for step, loss in ((0, 0.1), (10, 3.0), (20, 2.0), (30, 2.5))
  ]
  log.write_text("\n".join(map(json.dumps, rows)))
  found = model_source.find(files.folder)
  best = (files.prefix(20), "the best by evaluation")
  assert (found.path, found.chosen) == best
  os.remove(files.prefix(20) + ".json")
  found = model_source.find(files.folder)
  assert (found.path, found.chosen) == (files.prefix(30), "the newest")
  # A fine-tuned model's is chosen by what its task says.
  about = {"task": "classifier", "labels": ["0", "1"], "best_by": BY_F1}
  (tmp_path / "run" / "task.json").write_text(json.dumps(about))
  rows = [{"f1": 0.9, "global_step": 10}, {"f1": 0.8, "global_step": 30}]
  log.write_text("\n".join(map(json.dumps, rows)))
  found = model_source.find(files.folder)
  assert found.path == files.prefix(10) and found.task["labels"] == ["0", "1"]
  with open(files.prefix(10) + ".index", "r+b") as f:
    f.write(b"damaged")
  with pytest.raises(CheckpointError, match="were written"):
    model_source.find(files.folder)


def test_export_is_a_conversion(answers, tmp_path):
  """And says what it cannot export."""
  prefix, _, _ = answers["squad"]
  folder = os.path.dirname(prefix)
  settings = ConversionSettings(
    to="saved_model", output=str(tmp_path / "1"), signatures=("span",)
  )
  lines = convert_checkpoint.convert(settings, folder)
  assert lines[0].endswith("bert_model.ckpt (the only one)")
  assert "serving_default is span" in lines
  assert not any(line.startswith("  encoder") for line in lines)
  assert model_source.find(settings.output).is_export
  (tmp_path / "theirs").mkdir()
  (tmp_path / "theirs" / "config.json").write_text("{}")
  other = dataclasses.replace(settings, output=str(tmp_path / "2"))
  for models, to, words in (
    ([settings.output], "saved_model", "exported already"),
    (["a", "b"], "saved_model", "exports one checkpoint's weights: write the"),
    ([str(tmp_path / "theirs")], "saved_model", "holds no model"),
    ([folder], "tensorflow", "are for --to=saved_model"),
  ):
    with pytest.raises(UserError, match=words):
      convert_checkpoint.convert(dataclasses.replace(other, to=to), *models)
