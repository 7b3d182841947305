"""Checkpoints to Hugging Face folders and back: bits, names, errors.

`test_convert_parity.py` holds the numbers against transformers'.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import types

import numpy as np
import pytest
import runs
import safetensors.numpy
from samples import LETTERS, TINY, contents, write_config, write_packed

import convert_checkpoint
import tokenization
from checkpoints import checkpoint_files
from common import files
from common.errors import UserError
from common.tensorflow_v1 import tf
from convert_checkpoint import Settings
from data import records
from interop import (
  inference,
  model_source,
  predictions,
)
from interop.predictions import Input
from model import huggingface_config, huggingface_weights, weights
from model.bert_config import BertConfig
from model.weights import (
  CLASSIFIER,
  ENCODER,
  MASKED_LM,
  NEXT_SENTENCE,
  POOLER,
  QUESTIONS,
  TOKEN_CLASSIFIER,
)

CONFIG = BertConfig.from_dict(TINY)
PRETRAINING = (ENCODER, POOLER, MASKED_LM, NEXT_SENTENCE)


def random_values(parts=PRETRAINING, seed=0, labels=3):
  """Weights of the tiny model by our names, float32."""
  rng = np.random.default_rng(seed)
  return {
    w.name: rng.normal(
      0.0, 0.3, [labels if n is None else n for n in w.shape]
    ).astype(np.float32)
    for w in weights.weights(CONFIG)
    if w.part in parts
  }


def write_checkpoint(folder, values, name="bert_model.ckpt", **config):
  """A checkpoint and its config in a folder; returns the prefix."""
  folder.mkdir(exist_ok=True, parents=True)
  write_config(folder / "bert_config.json", **config)
  prefix = str(folder / name)
  checkpoint_files.write_weights(prefix, values)
  return prefix


def convert(given, output, **settings):
  """Converts; returns the report as one text."""
  given = (given,) if isinstance(given, (str, os.PathLike)) else given
  settings = Settings(
    input=tuple(map(str, given)), output=str(output), **settings
  )
  return "\n".join(convert_checkpoint.convert(settings))


def read(prefix):
  """Name -> array of a checkpoint."""
  reader = tf.train.load_checkpoint(str(prefix))
  return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def assert_same(got, want):
  assert set(got) == set(want)
  for name, value in want.items():
    assert got[name].dtype == np.float32
    np.testing.assert_array_equal(got[name], value, err_msg=name)


def write_folder(folder, tensors, **config):
  """A Hugging Face folder as others write it; returns its path."""
  folder.mkdir()
  content = {"model_type": "bert", **TINY, **config}
  (folder / "config.json").write_text(json.dumps(content))
  safetensors.numpy.save_file(tensors, str(folder / "model.safetensors"))
  return folder


# -----------------------------------------------------------------------------
# Round trips
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "parts, architecture",
  [
    (PRETRAINING, "BertForPreTraining"),
    ((ENCODER, POOLER), "BertModel"),
    ((ENCODER, MASKED_LM), "BertForMaskedLM"),
    ((ENCODER, POOLER, NEXT_SENTENCE), "BertForNextSentencePrediction"),
    ((ENCODER, POOLER, CLASSIFIER), "BertForSequenceClassification"),
    ((ENCODER, POOLER, QUESTIONS), "BertForQuestionAnswering"),
    ((*PRETRAINING, CLASSIFIER), "BertForSequenceClassification"),
    ((ENCODER, TOKEN_CLASSIFIER), "BertForTokenClassification"),
    ((ENCODER, POOLER, TOKEN_CLASSIFIER), "BertForTokenClassification"),
  ],
)
def test_there_and_back_is_bit_equal(tmp_path, letters, parts, architecture):
  values = random_values(parts)
  settings = {"hidden_dropout_prob": 0.0, "initializer_range": 0.05}
  prefix = write_checkpoint(tmp_path / "a", values, **settings)
  said = convert(prefix, tmp_path / "b", vocab_file=letters)
  assert sorted(os.listdir(tmp_path / "b")) == [
    "README.md",
    "config.json",
    "model.safetensors",
    "task.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
  ]
  config = runs.read_json(tmp_path / "b", "config.json")
  assert config["architectures"] == [architecture]
  assert (config["hidden_act"], config["layer_norm_eps"]) == ("gelu_new", 1e-12)
  is_labelled = bool({CLASSIFIER, TOKEN_CLASSIFIER} & {*parts})
  assert ("id2label" in config) == is_labelled
  assert ("problem_type" in config) == (CLASSIFIER in parts)
  for part in weights.PARTS:
    assert (f"    {part}: " in said) == (part in parts)
  again = convert(tmp_path / "b", tmp_path / "c" / "model.ckpt")
  assert_same(read(tmp_path / "c" / "model.ckpt"), values)
  assert "--do_lower_case=True" in again
  old, new = (
    BertConfig.from_json_file(str(tmp_path / folder / "bert_config.json"))
    for folder in "ac"
  )
  assert old.to_dict() == new.to_dict()
  with open(letters, "rb") as f:
    assert (tmp_path / "c" / "vocab.txt").read_bytes() == f.read()


def test_names_and_kernels_are_hugging_faces(tmp_path):
  values = random_values()
  prefix = write_checkpoint(tmp_path / "a", values)
  convert(prefix, tmp_path / "b")
  path = str(tmp_path / "b" / "model.safetensors")
  tensors = safetensors.numpy.load_file(path)
  for theirs, ours, transposed in (
    ("bert.embeddings.word_embeddings.weight",
     "bert/embeddings/word_embeddings", 0),
    ("bert.embeddings.LayerNorm.weight", "bert/embeddings/LayerNorm/gamma", 0),
    ("bert.encoder.layer.1.attention.self.key.weight",
     "bert/encoder/layer_1/attention/self/key/kernel", 1),
    ("bert.encoder.layer.0.attention.output.dense.bias",
     "bert/encoder/layer_0/attention/output/dense/bias", 0),
    ("bert.encoder.layer.0.intermediate.dense.weight",
     "bert/encoder/layer_0/intermediate/dense/kernel", 1),
    ("bert.encoder.layer.1.output.LayerNorm.bias",
     "bert/encoder/layer_1/output/LayerNorm/beta", 0),
    ("bert.pooler.dense.weight", "bert/pooler/dense/kernel", 1),
    ("cls.predictions.transform.dense.weight",
     "cls/predictions/transform/dense/kernel", 1),
    ("cls.predictions.bias", "cls/predictions/output_bias", 0),
    ("cls.seq_relationship.weight", "cls/seq_relationship/output_weights", 0),
  ):  # fmt: skip
    want = values[ours].T if transposed else values[ours]
    np.testing.assert_array_equal(tensors[theirs], want, err_msg=theirs)
  assert len(tensors) == len(values)
  convert(prefix, tmp_path / "c" / "only.ckpt", to="tensorflow")
  assert_same(read(tmp_path / "c" / "only.ckpt"), values)


@pytest.mark.parametrize(
  "ours, theirs",
  [
    ("gelu", "gelu_new"),
    ("gelu_erf", "gelu"),
    ("relu", "relu"),
    ("tanh", "tanh"),
    ("linear", "linear"),
  ],
)
def test_activations(ours, theirs):
  config = BertConfig.from_dict({**TINY, "hidden_act": ours})
  content = huggingface_config.to_their_config(config, (), "here")
  assert content["hidden_act"] == theirs
  back = huggingface_config.from_their_config(content, "there")
  assert back.config.to_dict() == config.to_dict() and not back.left_out


def test_a_config_without_keys_has_hugging_faces_defaults():
  config = huggingface_config.from_their_config({}, "there").config.to_dict()
  assert config["hidden_act"] == "gelu_erf"
  assert (config["vocab_size"], config["type_vocab_size"]) == (30522, 2)
  assert (config["hidden_size"], config["num_hidden_layers"]) == (768, 12)


def test_labels_keep_their_names(tmp_path):
  values = random_values((ENCODER, POOLER, CLASSIFIER))
  task = tmp_path / "a" / "task.json"
  prefix = write_checkpoint(tmp_path / "a", values)
  task.write_text(json.dumps({"labels": ["no", "maybe", "yes"]}))
  convert(prefix, tmp_path / "b")
  config = runs.read_json(tmp_path / "b", "config.json")
  assert config["id2label"] == {"0": "no", "1": "maybe", "2": "yes"}
  assert config["label2id"] == {"no": 0, "maybe": 1, "yes": 2}
  said = convert(tmp_path / "b", tmp_path / "c")
  assert "labels by number: no, maybe, yes" in said
  task.write_text(json.dumps({"labels": ["no", "yes"]}))
  with pytest.raises(UserError, match="2 names of labels .* has 3"):
    convert(prefix, tmp_path / "d")


# What predict.py says: the task beside the weights.

TASK = {"max_seq_length": 24, "vocabulary": {"vocab_file": "vocab.txt"}}
COLUMNS = {"text": "a", "text_pair": None, "label": "c"}
CLASSIFIER_TASK = {**TASK, "task": "classifier", "columns": COLUMNS}
SQUAD_TASK = {**TASK, "task": "squad", "doc_stride": 8, "max_query_length": 6}
TEXTS = [Input("Ab [MASK] C"), Input("Ab c", "D e"), Input("a b")]
QUESTION = [Input("Ab?", " ".join("A B c d e f g" * 6))]
LONG = [Input("Ab " * 40)]


def write_run(folder, parts, letters, task, labels=3):
  """A fine-tuned run's folder."""
  prefix = write_checkpoint(folder, random_values(parts, labels=labels))
  shutil.copyfile(letters, folder / "vocab.txt")
  (folder / "task.json").write_text(json.dumps(task))
  return prefix


def write_pretraining_run(folder, letters, do_lower_case):
  """One whose records' manifest, not the folder, says case and vocabulary."""
  data = folder.parent / "data"
  data.mkdir()
  write_packed(data)
  path = str(data / "data.manifest.json")
  tokenizer = tokenization.load_tokenizer(letters, do_lower_case).info()
  made = dataclasses.replace(records.Manifest.load(path), tokenizer=tokenizer)
  made.save(path)
  shutil.copyfile(letters, data / "vocab.txt")
  prefix = write_checkpoint(folder, random_values())
  read = {"files": [str(data / "data-0.tfrecord")]}
  read["tokenizer"] = dataclasses.asdict(tokenizer)
  (folder / "run.json").write_text(json.dumps({"runs": [{"data": read}]}))
  return prefix


def predicted(model, inputs):
  """What predict.py would print with --json, and for people."""
  source = model_source.find(str(model))
  opened = inference.open_checkpoint(source)
  made = predictions.Predictor(opened, source).predict(inputs)
  opened.close()
  return json.dumps(made), [predictions.as_lines(one) for one in made]


@pytest.mark.parametrize(
  "kind, lower, inputs",
  [
    ("pretraining", True, [*TEXTS, *LONG]),
    ("pretraining", False, [*TEXTS, *LONG]),
    ("classifier", False, [*TEXTS[::2], *LONG]),
    ("no names", True, TEXTS),
    ("sentencepiece", False, TEXTS),
    ("regression", True, TEXTS),
    ("squad 1", False, QUESTION),
    ("squad 2", True, QUESTION),
  ],
)
def test_predictions_survive_both_ways(
  tmp_path, letters, spm_model, kind, inputs, lower
):
  body, run = (ENCODER, POOLER), tmp_path / "runs" / "a"
  case = {"do_lower_case": lower}
  run.parent.mkdir()
  if kind == "pretraining":
    prefix = write_pretraining_run(run, letters, lower)
  elif kind.startswith("squad"):
    task = {**SQUAD_TASK, **case, "version_2_with_negative": kind == "squad 2"}
    prefix = write_run(run, (ENCODER, QUESTIONS), letters, task)
  else:
    labels = ["no", "who knows", "yes"] if kind == "classifier" else []
    task = {**CLASSIFIER_TASK, **case, "labels": labels}
    if kind != "classifier":
      del task["columns"]
    outputs = 1 if kind == "regression" else 3
    prefix = write_run(run, (*body, CLASSIFIER), letters, task, outputs)
    if kind == "sentencepiece":
      task["vocabulary"] = {"spm_model_file": "m.model"}
      (run / "task.json").write_text(json.dumps(task))
      shutil.copyfile(spm_model, run / "m.model")
  want = predicted(prefix, inputs)
  said = convert(prefix, tmp_path / "theirs")
  assert "assumed" not in said and f"--do_lower_case={lower}" in said
  shutil.rmtree(tmp_path / "runs")  # what was made needs nothing of it
  shutil.rmtree(tmp_path / "data", ignore_errors=True)
  prefix = tmp_path / "back" / "model.ckpt"
  said = convert(tmp_path / "theirs", prefix)
  assert "assumed" not in said and f"--do_lower_case={lower}" in said
  assert predicted(prefix, inputs) == want
  convert(prefix, tmp_path / "again")
  theirs, again = (contents(tmp_path / name) for name in ("theirs", "again"))
  assert theirs.pop("README.md") != again.pop("README.md")  # has their names
  assert again == theirs


def test_hugging_faces_own_files_say_the_task(tmp_path, letters):
  """As transformers saves them, without task.json."""
  parts = (ENCODER, POOLER, CLASSIFIER)
  task = {**CLASSIFIER_TASK, "labels": ["a", "b", "c"], "do_lower_case": False}
  prefix = write_run(tmp_path / "a", parts, letters, task)
  convert(prefix, tmp_path / "b")
  config = runs.read_json(tmp_path / "b", "config.json")
  assert config["problem_type"] == "single_label_classification"
  tokenizer = runs.read_json(tmp_path / "b", "tokenizer_config.json")
  assert tokenizer["model_max_length"] == 24
  assert tokenizer["do_lower_case"] is False
  os.remove(tmp_path / "b" / "task.json")
  convert(tmp_path / "b", tmp_path / "c" / "m")
  saved = runs.read_json(tmp_path / "c", "task.json")
  del task["columns"], task["max_seq_length"]  # no length of a training
  assert saved == task
  number = random_values(parts, labels=1)
  convert(write_checkpoint(tmp_path / "d", number), tmp_path / "e")
  config = runs.read_json(tmp_path / "e", "config.json")
  assert (config["problem_type"], len(config["id2label"])) == ("regression", 1)


def test_what_a_folder_says_twice_must_agree(tmp_path, letters):
  parts = (ENCODER, POOLER, CLASSIFIER)
  task = {**CLASSIFIER_TASK, "labels": ["a", "b", "c"], "do_lower_case": False}
  prefix = write_run(tmp_path / "a", parts, letters, task)
  convert(prefix, tmp_path / "b")
  out, other = tmp_path / "out", tmp_path / "other.txt"
  other.write_text("".join(f"{t}\n" for t in LETTERS[:-1]))
  for given in (prefix, tmp_path / "b"):
    to = {"to": "tensorflow"}
    with pytest.raises(UserError, match="--do_lower_case=True, but .*leave"):
      convert(given, out, do_lower_case=True, **to)
    with pytest.raises(UserError, match="another vocabulary than .*leave"):
      convert(given, out, vocab_file=str(other), **to)
  for file, key, value, message in (
    ("task.json", "labels", ["a", "c", "b"], "labels is .* in task.json, but"),
    ("task.json", "task", "squad", "task is 'squad' in task.json"),
    ("task.json", "labels", 5, "task.json: damaged"),
    (
      "task.json", "do_lower_case", "no",
      "task.json: damaged: do_lower_case is 'no'",
    ),
    (
      "tokenizer_config.json", "do_lower_case", "no",
      "tokenizer_config.json: damaged: do_lower_case is 'no', not true or",
    ),
  ):  # fmt: skip
    copy = shutil.copytree(tmp_path / "b", tmp_path / "copy")
    content = runs.read_json(copy, file)
    (copy / file).write_text(json.dumps({**content, key: value}))
    with pytest.raises(UserError, match=message):
      convert(copy, out)
    shutil.rmtree(copy)
  assert not out.exists()
  cased = {**task, "do_lower_case": True}
  second = write_run(tmp_path / "c", parts, letters, cased)
  with pytest.raises(UserError, match="differ in do_lower_case: only check"):
    convert([prefix, second], out, to="tensorflow")


@pytest.mark.parametrize(
  "file, decides",
  [("tokenizer_config.json", "task.json"), ("task.json", "task.json"),
   ("tokenizer.json", "tokenizer_config.json")],
)  # fmt: skip
def test_where_files_disagree_on_case_the_first_decides(
  tmp_path, letters, file, decides
):
  prefix = write_checkpoint(tmp_path / "a", random_values())
  folder = tmp_path / "b"
  convert(prefix, folder, vocab_file=letters, do_lower_case=False)
  if decides != "task.json":
    os.remove(folder / "task.json")
  text = (folder / file).read_text()
  for key in ("do_lower_case", "lowercase", "strip_accents"):
    text = text.replace(f'"{key}": false', f'"{key}": true')
  (folder / file).write_text(text)
  lower = file == decides
  said = convert(folder, tmp_path / "c" / "m")
  says = f"{folder}: do_lower_case={lower} as {folder}/{decides} says, against "
  assert says in said
  assert runs.read_json(tmp_path / "c", "task.json")["do_lower_case"] is lower
  with pytest.raises(UserError, match=r"on .*case.* text .*leave the flag out"):
    convert(folder, tmp_path / "d" / "m", do_lower_case=not lower)


def test_stand_ins_are_no_names_of_labels(tmp_path, letters):
  """As of a classifier from Hugging Face: later runs may say the names."""
  values = random_values((ENCODER, POOLER, CLASSIFIER), labels=2)
  prefix = write_checkpoint(tmp_path / "a", values)
  convert(prefix, tmp_path / "b", vocab_file=letters)
  config = runs.read_json(tmp_path / "b", "config.json")
  assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
  os.remove(tmp_path / "b" / "task.json")
  convert(tmp_path / "b", tmp_path / "c" / "m")
  prefix = str(tmp_path / "c" / "m")
  saved = runs.read_json(tmp_path / "c", "task.json")
  assert saved.keys() == {"task", "do_lower_case", "vocabulary"}
  (made,) = json.loads(predicted(prefix, TEXTS[:1])[0])
  assert made["probabilities"].keys() == {"0", "1"}
  number = random_values((ENCODER, POOLER, CLASSIFIER), labels=1)
  convert(write_checkpoint(tmp_path / "d", number), tmp_path / "e")
  os.remove(tmp_path / "e" / "task.json")
  convert(tmp_path / "e", tmp_path / "f" / "m")
  assert runs.read_json(tmp_path / "f", "task.json")["labels"] == []


def test_what_nothing_says_is_assumed_aloud(tmp_path, letters):
  prefix = write_checkpoint(tmp_path / "a", random_values((ENCODER, QUESTIONS)))
  shutil.copyfile(letters, tmp_path / "a" / "vocab.txt")
  said = convert(prefix, tmp_path / "b")
  assert "assumed: 2\n" in said
  assert (
    "assumed --do_lower_case; give --nodo_lower_case if it is cased" in said
  )
  assert "set version_2_with_negative to true in task.json" in said
  unknown = {"task": "squad", "vocabulary": {"vocab_file": "vocab.txt"}}
  assert runs.read_json(tmp_path / "b", "task.json") == unknown
  for file in ("task.json", "tokenizer.json", "tokenizer_config.json"):
    os.remove(tmp_path / "b" / file)  # as with transformers' first ones
  said = convert(tmp_path / "b", tmp_path / "back" / "m")
  assert "assumed: 2\n" in said
  assert runs.read_json(tmp_path / "back", "task.json") == unknown
  source = model_source.find(str(tmp_path / "back" / "m"))
  assert source.max_seq_length == CONFIG.max_position_embeddings
  assert [line.split()[0] for line in source.assumed()] == [
    source.path + ":",
    "every",
  ]
  cased = convert(prefix, tmp_path / "c", do_lower_case=False)
  assert "assumed: 1\n" in cased and "--do_lower_case=False" in cased
  # The published folders' names say it.
  named = write_checkpoint(tmp_path / "cased_L-12_H-768_A-12", random_values())
  said = convert(named, tmp_path / "d")
  assert "assumed" not in said and "--do_lower_case=False" in said
  with pytest.raises(UserError, match="--do_lower_case=True, but .* cased te"):
    convert(named, tmp_path / "e", do_lower_case=True)


# -----------------------------------------------------------------------------
# What a training leaves, and means
# -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trainings_state_is_left_out(tiny_run, tmp_path, capfd):
  """And --init_checkpoint takes what is written, from both forms."""
  run = tmp_path / "run"
  runs.pretrain(
    tiny_run,
    run,
    num_train_steps=2,
    num_warmup_steps=0,
    precision="fp16",
    optimizer=dict(optimizer="lamb", bias_correction=True),
  )
  prefix = str(run / "model.ckpt-2")
  trained = read(prefix)
  said = convert(prefix, tmp_path / "only" / "model.ckpt", to="tensorflow")
  weights = read(tmp_path / "only" / "model.ckpt")
  assert_same(weights, {name: trained[name] for name in weights})
  one_layer = {name for name in random_values() if "/layer_1/" not in name}
  assert set(weights) == one_layer
  for line in (
    f"{len(weights)} slots adam_m",
    f"{len(weights)} slots adam_v",
    "applied_updates",
    "global_step",
    "loss_scale/value",
    "skipped_updates",
    "training_state/samples_seen",
  ):
    assert f"    {line}\n" in said
  convert(prefix, tmp_path / "theirs")
  convert(tmp_path / "theirs", tmp_path / "again" / "model.ckpt")
  assert_same(read(tmp_path / "again" / "model.ckpt"), weights)
  capfd.readouterr()
  runs.pretrain(
    tiny_run,
    tmp_path / "next",
    num_train_steps=1,
    num_warmup_steps=0,
    init_checkpoint=str(tmp_path / "again" / "model.ckpt"),
  )
  told = capfd.readouterr()
  told = told.out + told.err
  assert f"loaded: {len(weights)}\n" in told
  assert (
    "missing there, so initial weights: 0\n" in told and "unused: 0\n" in told
  )
  assert runs.metrics(tmp_path / "next")[0] < 6.0


@pytest.mark.parametrize("to", ["tensorflow", "huggingface"])
def test_means(tmp_path, to):
  several = [random_values(seed=seed) for seed in range(3)]
  prefixes = [
    write_checkpoint(
      tmp_path / "a", {**values, "global_step": np.int64(i)}, f"m-{i}"
    )
    for i, values in enumerate(several)
  ]
  said = convert(prefixes, tmp_path / "b", to=to)
  assert "the mean of 3 checkpoints" in said and "global_step" in said
  if to == "huggingface":
    convert(tmp_path / "b", tmp_path / "c" / "b")
  got = read(tmp_path / ("b" if to == "tensorflow" else "c/b"))
  for name, value in got.items():
    want = np.mean([v[name].astype(np.float64) for v in several], axis=0)
    np.testing.assert_allclose(value, want, rtol=1e-7, err_msg=name)
  assert set(got) == set(several[0])


def test_a_mean_counts_each_checkpoint_once(tmp_path):
  folder = tmp_path / "a"
  prefix = write_checkpoint(folder, random_values())
  with pytest.raises(UserError, match=f"are one checkpoint, {prefix}: name ea"):
    convert([prefix, folder], tmp_path / "b")


def test_means_are_of_one_model_only(tmp_path):
  a = write_checkpoint(tmp_path / "a", random_values())
  fewer = random_values((ENCODER, POOLER))
  b = write_checkpoint(tmp_path / "b", fewer)
  with pytest.raises(UserError, match="cls/pred.*None in .*/b|None there"):
    convert([a, b], tmp_path / "out", to="tensorflow")
  c = write_checkpoint(tmp_path / "c", random_values(), hidden_act="relu")
  with pytest.raises(
    UserError, match=r"a/bert.* and .*c/.* differ in hidden_act:"
  ):
    convert([a, c], tmp_path / "out", to="tensorflow")
  assert not (tmp_path / "out").exists()


# -----------------------------------------------------------------------------
# What others write
# -----------------------------------------------------------------------------


def their_tensors(values=None):
  return huggingface_weights.to_theirs(
    values or random_values(), CONFIG, "here"
  )


def test_old_names_buffers_and_ties(tmp_path):
  tensors = {
    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
      "LayerNorm.bias", "LayerNorm.beta"
    ): value
    for name, value in their_tensors().items()
  }
  assert "bert.embeddings.LayerNorm.gamma" in tensors
  tied = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
  }
  tensors |= {name: tensors[of].copy() for name, of in tied.items()}
  tensors["bert.embeddings.position_ids"] = np.arange(64)[None]
  said = convert(write_folder(tmp_path / "a", tensors), tmp_path / "b" / "m")
  assert_same(read(tmp_path / "b" / "m"), random_values())
  for name in (*tied, "bert.embeddings.position_ids"):
    assert f"    {name} (follows from the rest)" in said
  # The other one of two tied names is enough.
  for of in tied.values():
    del tensors[of]
  convert(write_folder(tmp_path / "c", tensors), tmp_path / "d" / "m")
  assert_same(read(tmp_path / "d" / "m"), random_values())


def test_a_model_saved_alone_has_no_prefix(tmp_path):
  values = random_values((ENCODER, POOLER))
  tensors = their_tensors(values)
  assert "embeddings.LayerNorm.weight" in tensors
  tensors = {f"bert.{name}": value for name, value in tensors.items()}
  convert(write_folder(tmp_path / "a", tensors), tmp_path / "b" / "m")
  assert_same(read(tmp_path / "b" / "m"), values)


@pytest.mark.parametrize("kind", ["F16", "F64", "BF16"])
def test_other_floats_become_float32(tmp_path, kind):
  values = {  # that each of them can hold
    name: (np.round(value * 64) / 64).astype(np.float32)
    for name, value in random_values().items()
  }
  tensors = their_tensors(values)
  if kind == "BF16":
    folder = write_folder(tmp_path / "a", {})
    write_bfloat16(folder / "model.safetensors", tensors)
  else:
    dtype = {"F16": np.float16, "F64": np.float64}[kind]
    tensors = {name: value.astype(dtype) for name, value in tensors.items()}
    folder = write_folder(tmp_path / "a", tensors)
  convert(folder, tmp_path / "b" / "m")
  assert_same(read(tmp_path / "b" / "m"), values)


def write_bfloat16(path, tensors):
  """By the format's description: a length, JSON, the data."""
  header, data = {}, b""
  for name, value in tensors.items():
    upper = (value.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    header[name] = {
      "dtype": "BF16",
      "shape": list(value.shape),
      "data_offsets": [len(data), len(data) + len(upper)],
    }
    data += upper
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_shards(tmp_path):
  tensors = their_tensors()
  folder = write_folder(tmp_path / "a", {})
  (folder / "model.safetensors").unlink()
  names, weight_map = sorted(tensors), {}
  for i, part in enumerate((names[:9], names[9:])):
    name = f"model-0000{i + 1}-of-00002.safetensors"
    weight_map |= dict.fromkeys(part, name)
    safetensors.numpy.save_file(
      {n: tensors[n] for n in part}, str(folder / name)
    )
  index = folder / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": weight_map}))
  convert(folder, tmp_path / "b" / "m")
  assert_same(read(tmp_path / "b" / "m"), random_values())
  less = {n: v for n, v in tensors.items() if n in names[10:]}
  safetensors.numpy.save_file(less, str(folder / name))
  with pytest.raises(
    UserError, match=rf"00002.safeten.*: {names[9]}: in it or"
  ):
    convert(folder, tmp_path / "c" / "m")
  (folder / name).unlink()
  with pytest.raises(UserError, match="model-00002-of-00002"):
    convert(folder, tmp_path / "c" / "m")
  for text in ("{}", "[]", '{"weight_map": {"a": 5}}'):
    index.write_text(text)
    with pytest.raises(UserError, match="not an index"):
      convert(folder, tmp_path / "c" / "m")


# -----------------------------------------------------------------------------
# Errors
# -----------------------------------------------------------------------------


def changed(name, value):
  return lambda tensors: {**tensors, name: value}


def without(*names):
  return lambda tensors: {n: v for n, v in tensors.items() if n not in names}


def refused(folder, out, message):
  """Converting ends with a message that names the folder; nothing is made."""
  with pytest.raises(UserError, match=message) as error:
    convert(folder, out)
  assert str(folder) in str(error.value) and not out.exists()


@pytest.mark.parametrize(
  "change, message",
  [
    # Tensors
    (
      changed("bert.pooler.dense.bias", np.zeros(7, np.float32)),
      r"in bert.pooler.dense.bias is of shape \[7\], .* makes it \[32\]",
    ),
    (
      without("cls.predictions.bias"),
      "masked LM head lacks cls.predictions.b",
    ),
    (
      without("bert.embeddings.LayerNorm.bias"),
      "encoder lacks bert.embeddings.LayerNorm.bias",
    ),
    (
      changed("bert.encoder.layer.2.output.dense.bias", np.zeros(3, "f")),
      "encoder.layer.2.output.dense.bias: no weight of .* 2 layers",
    ),
    (
      changed("cls.predictions.decoder.weight", np.zeros([100, 32], "f")),
      "decoder.weight is not bert.embeddings.word_embeddings.weight",
    ),
    (
      changed("bert.pooler.dense.bias", np.zeros(32, np.int8)),
      "pooler.dense.bias is uint8, not a float",
    ),
    (
      changed("bert.pooler.dense.bias", np.full(32, np.inf, np.float32)),
      "pooler.dense.bias holds values that are not finite",
    ),
    (
      changed("bert.embeddings.LayerNorm.gamma", np.zeros(32, "f")),
      "LayerNorm.weight is there twice",
    ),
    # config.json
    ({"layer_norm_eps": -1}, "norm_eps is -1, not > 0"),
    (
      {"position_embedding_type": "relative_key"},
      "is 'relative_key', not ",
    ),
    ({"is_decoder": True}, "is_decoder is True"),
    (
      {"model_type": "albert"},
      "model_type is 'albert', not bert or robert",
    ),
    ({"hidden_act": "mish"}, "hidden_act is 'mish'.*gelu_new"),
    ({"hidden_act": ["gelu"]}, "hidden_act is .*'gelu'"),
    ({"architectures": ["BertForMultipleChoice"]}, "the architecture Be"),
    ({"architectures": 5}, "the architecture 5 is"),
    ({"hidden_size": 33}, "hidden_size 33 is not a multiple"),
    ({"num_hidden_layers": 3}, r"lacks bert\.encoder\.layer\.2\."),
    ({"vocab_size": 99}, r"is of shape \[100, 32\].*\[99, 32\]"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"id2label": {"0": "a", "2": "b"}}, "does not name the labels 0, 1, 2"),
    ({"id2label": ["a"]}, "does not name the labels 0, 1, 2"),
    ({"id2label": {"0": "a", "1": "a"}}, "two labels of one name"),
  ],
)
def test_models_that_cannot_be_converted(tmp_path, change, message):
  tensors, config = their_tensors(), change
  if callable(change):
    tensors, config = change(tensors), {}
  folder = write_folder(tmp_path / "a", tensors, **config)
  refused(folder, tmp_path / "b", message)


@pytest.mark.parametrize(
  "labels, change, message",
  [
    (3, {"problem_type": "multi_label_classification"}, "is 'multi_label_cl"),
    (3, {"problem_type": "regression"}, "is 'regression' .* with 3 outputs"),
    (1, {"problem_type": "single_label_classification"}, "with 1 outputs"),
    (3, {"id2label": {"0": "a", "1": "b"}}, "names 2 labels, .* has 3 outputs"),
    (3, {"architectures": ["BertForMaskedLM"]}, "an architecture without one"),
  ],
)
def test_classifiers_that_are_none_of_ours(tmp_path, labels, change, message):
  values = random_values((ENCODER, POOLER, CLASSIFIER), labels=labels)
  folder = write_folder(tmp_path / "a", their_tensors(values), **change)
  refused(folder, tmp_path / "b", message)


def test_a_classifier_of_tokens_is_told_from_one_of_texts(tmp_path):
  """By the architecture; without one, by the pooler that only texts need."""
  values = random_values((ENCODER, POOLER, CLASSIFIER))
  tensors = their_tensors(values)
  bare = without("bert.pooler.dense.weight", "bert.pooler.dense.bias")(tensors)
  for name, content, head in (
    ("texts", tensors, "Sequence"),
    ("tokens", bare, "Token"),
  ):
    folder = write_folder(tmp_path / name, content)
    said = convert(folder, tmp_path / f"of_{name}" / "m")
    assert f"to be that of BertFor{head}Classification" in said
  ours = read(tmp_path / "of_tokens" / "m")
  bias = ours["cls/tokens/output_bias"]
  np.testing.assert_array_equal(bias, values["output_bias"])
  assert "output_bias" not in ours
  # As transformers saved it before its version 4.
  named = {"architectures": ["BertForTokenClassification"]}
  convert(
    write_folder(tmp_path / "old", tensors, **named), tmp_path / "o" / "m"
  )
  assert {"cls/tokens/output_bias", "bert/pooler/dense/bias"} <= {
    *read(tmp_path / "o" / "m")
  }
  task = runs.read_json(tmp_path / "o", "task.json")
  assert task["task"] == "ner"


def test_a_classifier_of_texts_needs_its_pooler(tmp_path):
  prefix = write_checkpoint(
    tmp_path / "e", random_values((ENCODER, CLASSIFIER))
  )
  with pytest.raises(UserError, match="of texts, but not the pooler that it"):
    convert(prefix, tmp_path / "d")


def test_labels_of_tokens_keep_their_names(tmp_path):
  values = random_values((ENCODER, TOKEN_CLASSIFIER))
  prefix = write_checkpoint(tmp_path / "a", values)
  labels = ["B-PER", "I-PER", "O"]
  task = {"task": "ner", "labels": labels}
  (tmp_path / "a" / "task.json").write_text(json.dumps(task))
  convert(prefix, tmp_path / "b")
  config = runs.read_json(tmp_path / "b", "config.json")
  assert [*config["id2label"].values()] == labels
  os.remove(tmp_path / "b" / "task.json")
  convert(tmp_path / "b", tmp_path / "c" / "m")
  back = runs.read_json(tmp_path / "c", "task.json")
  assert (back["task"], back["labels"]) == ("ner", labels)


def test_our_models_that_hugging_face_does_not_have(tmp_path):
  pre = write_checkpoint(tmp_path / "a", random_values(), pre_layer_norm=True)
  with pytest.raises(UserError, match="a/bert_model.ckpt: pre_layer_norm"):
    convert(pre, tmp_path / "b")
  convert(pre, tmp_path / "c" / "m", to="tensorflow")  # of no concern to us
  other = {**random_values(), "my/head": np.ones(3, np.float32)}
  prefix = write_checkpoint(tmp_path / "d", other)
  with pytest.raises(UserError, match="has no place for my/head"):
    convert(prefix, tmp_path / "b")
  said = convert(prefix, tmp_path / "e" / "m", to="tensorflow")
  assert "my/head (not BERT's, kept)" in said
  assert_same(read(tmp_path / "e" / "m"), other)
  assert not (tmp_path / "b").exists()


def test_damage_and_what_is_not_there(tmp_path, letters):
  prefix = write_checkpoint(tmp_path / "a", random_values())
  out, value = tmp_path / "out", np.ones(3, np.float32)
  with pytest.raises(UserError, match=r"a/other: no such model"):
    convert(tmp_path / "a" / "other", out)
  with pytest.raises(UserError, match="give --bert_config_file"):
    checkpoint_files.write_weights(str(tmp_path / "bare" / "m"), {"a": value})
    convert(tmp_path / "bare" / "m", out)
  nan = random_values()
  nan["bert/pooler/dense/bias"][3] = np.nan
  with pytest.raises(UserError, match="pooler/dense/bias holds values that"):
    convert(write_checkpoint(tmp_path / "nan", nan), out)
  deep = write_config(tmp_path / "deep.json", num_hidden_layers=3)
  with pytest.raises(UserError, match="which is the model's, differ in num_hi"):
    convert(prefix, out, bert_config_file=deep)
  with pytest.raises(UserError, match="lacks|shape"):
    checkpoint_files.write_weights(str(tmp_path / "m"), random_values())
    convert(tmp_path / "m", out, bert_config_file=deep)
  with pytest.raises(UserError, match="has 78 tokens, but .*=70"):
    values = random_values()
    values["bert/embeddings/word_embeddings"] = np.zeros([70, 32], np.float32)
    values["cls/predictions/output_bias"] = np.zeros(70, np.float32)
    small = write_checkpoint(tmp_path / "small", values, vocab_size=70)
    convert(small, out, vocab_file=letters)
  with pytest.raises(UserError, match="only one of --vocab_file, --spm"):
    convert(prefix, out, vocab_file=letters, spm_model_file="spiece.model")
  with pytest.raises(UserError, match="SentencePiece model"):
    convert(prefix, out, spm_model_file=letters)
  data = tmp_path / "a" / "bert_model.ckpt.data-00000-of-00001"
  damaged = bytearray(data.read_bytes())
  damaged[2000] ^= 1
  data.write_bytes(damaged)
  with pytest.raises(UserError, match="bert_model.ckpt: damaged"):
    convert(prefix, out)
  data.write_bytes(damaged[:3000])
  with pytest.raises(UserError, match="bert_model.ckpt: damaged"):
    convert(prefix, out)
  folder = write_folder(tmp_path / "b", their_tensors())
  weights = folder / "model.safetensors"
  weights.write_bytes(weights.read_bytes()[:-5])
  with pytest.raises(UserError, match="model.safetensors: damaged"):
    convert(folder, out)
  weights.rename(folder / "pytorch_model.bin")
  with pytest.raises(UserError, match="no model.safetensors. Copy it, or"):
    convert(folder, out)
  (folder / "pytorch_model.bin").unlink()
  with pytest.raises(UserError, match="holds no model: name the --output_dir"):
    convert(folder, out)
  assert not out.exists()


def test_pytorch_s_weights_come_with_the_command_that_converts(
  tmp_path, monkeypatch
):
  """The command runs with stand-ins, on shards, in a folder of an odd name."""

  class Tensor(np.ndarray):
    clone = np.ndarray.copy
    contiguous = lambda self: np.ascontiguousarray(self)

  def load(path, device, weights_only):
    assert weights_only and device == "cpu"
    with np.load(path) as arrays:
      return {name: arrays[name].view(Tensor) for name in arrays}

  monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(load=load))
  monkeypatch.setitem(sys.modules, "safetensors.torch", safetensors.numpy)
  folder = write_folder(tmp_path / "it's [1]", {})
  (folder / "model.safetensors").unlink()
  tensors = list(their_tensors().items())
  for number, some in enumerate((tensors[:9], tensors[9:])):
    with open(folder / f"pytorch_model-{number}.bin", "wb") as f:
      np.savez(f, **dict(some))
  with pytest.raises(UserError) as raised:
    convert(folder, tmp_path / "m")
  said, _, command = str(raised.value).partition("safetensors: ")
  assert said.startswith(f"{folder}: has no model.safetensors. Copy it, or")
  python, option, code, *words = shlex.split(command)
  assert (python, option, words) == ("python", "-c", [str(folder)])
  monkeypatch.setattr(sys, "argv", [option, *words])
  exec(code, {})
  convert(folder, tmp_path / "m")
  assert_same(read(tmp_path / "m"), random_values())


def test_nothing_is_overwritten(tmp_path, letters):
  prefix = write_checkpoint(tmp_path / "a", random_values())
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "x").write_text("mine")
  with pytest.raises(
    UserError, match="already exists and is not empty: give a new folder"
  ):
    convert(prefix, tmp_path / "full")
  with pytest.raises(UserError, match="index exists already"):
    convert(prefix, prefix, to="tensorflow")
  (tmp_path / "empty").mkdir()
  convert(prefix, tmp_path / "empty")
  convert(prefix, tmp_path / "a" / "again", to="tensorflow")  # of one config
  with pytest.raises(UserError, match="vocab.txt already exists and is"):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "vocab.txt").write_text("another\n")
    convert(prefix, tmp_path / "b", to="tensorflow", vocab_file=letters)
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "run.json").write_text('{"runs": []}')
  with pytest.raises(UserError, match="run is the folder of another run"):
    convert(prefix, tmp_path / "run" / "m", to="tensorflow")
  assert os.listdir(tmp_path / "run") == ["run.json"]
  own = ["a", "b", "empty", "full", "run"]
  assert sorted(os.listdir(tmp_path)) == own
  assert os.listdir(tmp_path / "b") == ["vocab.txt"]


@pytest.mark.parametrize("to", ["huggingface", "tensorflow"])
def test_a_run_folder_gives_its_best_checkpoint(tmp_path, letters, to):
  """With the case and the vocabulary of its records."""
  run = tmp_path / "runs" / "a"
  run.parent.mkdir()
  write_pretraining_run(run, letters, do_lower_case=False)
  os.remove(run / "bert_model.ckpt.index")
  files = checkpoint_files.CheckpointFiles(str(run), keep=9)
  for step in (10, 20):
    files.write(step, random_values(seed=step))
  files.wait()
  losses = {10: 1.0, 20: 2.0}
  keys = "global_step", "masked_lm_loss", "next_sentence_loss"
  rows = (dict(zip(keys, (n, x, 1), strict=True)) for n, x in losses.items())
  (run / "eval_metrics.jsonl").write_text(
    "".join(json.dumps(row) + "\n" for row in rows)
  )
  said = convert(run, f"{tmp_path}/out/", to=to)
  assert said.startswith(f"converted {run}/model.ckpt-10 (the best by eval")
  assert "--do_lower_case=False" in said and "assumed" not in said
  made = tmp_path / "out"
  assert (made / "vocab.txt").read_bytes() == open(letters, "rb").read()
  if to == "tensorflow":
    assert_same(read(made / "bert_model.ckpt"), random_values(seed=10))


def test_what_to_convert_is_named_once():
  settings = Settings(input=("a",), output="b")
  with pytest.raises(UserError, match="c and --input=a: give one"):
    convert_checkpoint.main(settings, "c")
  with pytest.raises(UserError, match="nothing to convert is named"):
    convert_checkpoint.main(Settings(output="b"))


def test_the_command(tmp_path):
  """One line and status 1 for an error, the report otherwise."""
  prefix = write_checkpoint(tmp_path / "a", random_values())
  script = f"{runs.ROOT}/convert_checkpoint.py"
  flags = [prefix, f"--output={tmp_path}/b", "--nodo_lower_case"]
  done = runs.launch([script, *flags])
  assert done.returncode == 0, done.stderr
  assert f"    {tmp_path}/b/config.json" in done.stdout
  assert "the vocabulary (give --vocab_file, --spm" in done.stdout
  failed = runs.launch([script, *flags])
  assert failed.returncode == 1 and not failed.stdout
  assert failed.stderr.splitlines()[-1] == (
    f"convert_checkpoint.py: error: --output={tmp_path}/b already exists and "
    "is not empty: give a new folder, or remove that one"
  )


@pytest.mark.parametrize(
  "to",
  [
    "huggingface",
    "tensorflow",
    pytest.param("saved_model", marks=pytest.mark.slow),
  ],
)
def test_the_same_command_ends_what_was_killed_at_any_file(
  tmp_path, letters, to
):
  """And leaves nothing beside it, whatever the first one left there."""
  prefix = write_checkpoint(tmp_path / "a", random_values())
  given = dict(to=to, vocab_file=letters, do_lower_case=True)
  convert(prefix, tmp_path / "whole" / "m", **given)
  names = lambda folder: sorted(
    str(path.relative_to(folder)) for path in folder.rglob("*")
  )
  moment, was_killed = 0, [True]
  while was_killed:
    out = tmp_path / str(moment)
    with runs.killed_at(moment) as was_killed:
      convert(prefix, out / "m", **given)
    with contextlib.suppress(UserError):  # it was written already
      convert(prefix, out / "m", **given)
    assert names(out) == names(tmp_path / "whole"), moment
    moment += 1
  assert moment > 3


def test_two_commands_do_not_work_on_one_folder(tmp_path):
  prefix = write_checkpoint(tmp_path / "a", random_values())
  with files.new_folder(str(tmp_path / "b")) as aside:
    with open(os.path.join(aside, "mine"), "w") as f:
      f.write("whole")
    with pytest.raises(UserError, match="b.unfinished: another process works"):
      convert(prefix, tmp_path / "b")
  assert contents(tmp_path / "b") == {"mine": b"whole"}


# -----------------------------------------------------------------------------
# The model card
# -----------------------------------------------------------------------------


def test_a_folder_has_a_card_with_what_the_runs_files_say(tmp_path, letters):
  prefix = write_checkpoint(
    tmp_path / "run", random_values(), name="model.ckpt-20"
  )
  write_packed(tmp_path / "run")
  data = str(tmp_path / "run" / "data-0.tfrecord")
  run = {
    "flags": {
      "optimizer": {"optimizer": "lamb"}, "learning_rate": 1e-3,
      "eval_input_file": f"{tmp_path}/run/data-*",
    },
    "plan": {
      "updates": 40, "records_per_update": 24, "warmup_updates": 4, "ranks": 2,
    },
    "data": {"files": [data], "records": 120},
    "versions": {"tensorflow": "2.21.0", "git": None},
  }  # fmt: skip
  (tmp_path / "run" / "run.json").write_text(json.dumps({"runs": [run]}))
  evaluations = [
    {"global_step": step, "masked_lm_accuracy": step / 100, "note": "a|<b>"}
    for step in (20, 40)
  ]
  (tmp_path / "run" / "eval_metrics.jsonl").write_text(
    "".join(json.dumps(results) + "\n" for results in evaluations)
  )
  # The records' manifest names another vocabulary: this is that one's digest.
  manifest = tmp_path / "run" / "data.manifest.json"
  content = json.loads(manifest.read_text())
  with open(letters, "rb") as f:
    digest = hashlib.sha256(f.read()).hexdigest()
  content["tokenizer"]["sha256"] = digest
  manifest.write_text(json.dumps(content))
  convert(
    prefix, tmp_path / "my model", vocab_file=letters, license="cc0-1.0",
    language=("en", "no"),
  )  # fmt: skip
  card = (tmp_path / "my model" / "README.md").read_text()
  header = card.split("---\n")[1].splitlines()
  assert 'license: "cc0-1.0"' in header and 'language: ["en", "no"]' in header
  assert 'pipeline_tag: "fill-mask"' in header
  assert 'mask_token: "[MASK]"' in header
  for line in (
    "# my model",
    "| updates planned | 40 |",
    "| update of these weights | 20 |",
    "| optimizer | lamb |",
    "| learning rate | 0.001 |",
    "| masked words: right | 20.0% |",
    "| note | a\\|&lt;b> |",
    "| tensorflow | 2.21.0 |",
    "| masks | static |",
    "| evaluated on | the training records |",
  ):
    assert line in card.splitlines(), line
  assert str(tmp_path) not in card and "licence is not" not in card
  # A start that found nothing left to train did not make these weights.
  later = {**run, "first_update": 20, "plan": {**run["plan"], "ranks": 7}}
  starts = json.dumps({"runs": [run, later]})
  (tmp_path / "run" / "run.json").write_text(starts)
  convert(prefix, tmp_path / "later", vocab_file=letters)
  card = (tmp_path / "later" / "README.md").read_text()
  assert "| ranks | 2 |" in card.splitlines()
  shutil.copytree(tmp_path / "run", tmp_path / "again")
  convert([prefix, tmp_path / "again"], tmp_path / "both", vocab_file=letters)
  card = (tmp_path / "both" / "README.md").read_text()
  for line in (
    "| mean of the weights of several runs, at updates | 20, 20 |",
    "| data, training and versions are those of | the first |",
  ):
    assert line in card.splitlines(), line


@pytest.mark.parametrize(
  "flags, data, rows",
  [
    (  # a training without the config's dropout
      {"bert": {"hidden_dropout_prob": 0.1}, "hidden_dropout_prob": 0.0},
      {"records": 9},
      {"dropout in this training": "0", "records that hold them": "9"},
    ),
    (
      {"bert": {"hidden_dropout_prob": 0.1}, "hidden_dropout_prob": None},
      {},
      {"dropout in this training": "0.1", "records that hold them": None},
    ),
    (  # a table of 300 rows, fine-tuned without a flag for dropout
      {"bert": {"attention_probs_dropout_prob": 0.0}, "lr_schedule": "linear"},
      {"examples": 300, "records": 81},
      {
        "dropout of attention in this training": "0",
        "examples": "300",
        "records that hold them": "81",
        "learning rate schedule": "linear",
      },
    ),
  ],
)
def test_a_card_says_what_the_training_did(tmp_path, flags, data, rows):
  prefix = write_checkpoint(tmp_path / "a", random_values())
  run = {"flags": flags, "plan": {"ranks": 1}, "data": {"files": [], **data}}
  (tmp_path / "a" / "run.json").write_text(json.dumps({"runs": [run]}))
  convert(prefix, tmp_path / "b", do_lower_case=True)
  card = (tmp_path / "b" / "README.md").read_text()
  table = dict(re.findall(r"^\| (.+) \| (.+) \|$", card, re.M))
  assert {name: table.get(name) for name in rows} == rows
  assert "_" not in "".join(table)


def test_a_full_disk_is_an_error_for_people(tmp_path):
  tensors = {"a": np.zeros([3], np.float32)}
  with pytest.raises(OSError, match="model.safetensors: "):
    huggingface_weights.write_tensors(str(tmp_path / "no folder"), tensors)


def test_a_card_of_bare_weights_says_what_is_not_known(tmp_path):
  prefix = write_checkpoint(tmp_path / "a", random_values((ENCODER, POOLER)))
  convert(prefix, tmp_path / "b")
  card = (tmp_path / "b" / "README.md").read_text()
  assert 'license: "unknown"' in card and "The licence is not stated" in card
  assert "language" not in card and "mask_token" not in card
  assert 'pipeline_tag: "feature-extraction"' in card
  assert card.count("Not known: no file beside") == 4
  assert "no file says whether of lower-cased text." in card
  run = {
    "flags": {
      "max_train_minutes": 30.0, "masks": {"masked_lm_prob": [0.2, 0.15]},
      "stages": [{"input_file": f"{tmp_path}/x*", "time_share": 1.0}],
    },
    "plan": {"updates": 4, "records_per_update": 24, "ranks": 1},
  }  # fmt: skip
  (tmp_path / "a" / "run.json").write_text(json.dumps({"runs": [run]}))
  convert(prefix, tmp_path / "d", do_lower_case=False)
  card = (tmp_path / "d" / "README.md").read_text()
  assert "| records per update | 24 |" in card and "; cased text." in card
  assert "| minutes planned | 30 |" in card and "updates planned" not in card
  assert "| masked when training | 0.2 to 0.15 |" in card
  assert "share of the tokens to mask" not in card
  assert "| stage 1 | time_share 1.0 |" in card and str(tmp_path) not in card
  with pytest.raises(UserError, match=r"--license and --language are for"):
    convert(tmp_path / "b", tmp_path / "c" / "m", license="mit")
