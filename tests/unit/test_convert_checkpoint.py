"""Checkpoints to Hugging Face folders and back: bits, names, errors.

`test_convert_parity.py` holds the numbers against transformers'.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import types

import ml_dtypes
import numpy as np
import pytest
import runs
import safetensors.numpy
from conversions import (
  PRETRAINING,
  answers,
  assert_same,
  convert,
  random_values,
  read,
  refused,
  their_tensors,
  write_checkpoint,
  write_folder,
  write_shards,
)
from samples import (
  LETTERS,
  TINY,
  change_manifest,
  contents,
  write_config,
  write_packed,
  write_records_of,
)
from test_huggingface_types import EURO, MODERN

from checkpoints import checkpoint_files
from common.errors import UserError
from config.bert_config import BertConfig
from interop import model_source
from interop.model_writing import task_differences
from interop.predictions import Input
from model import weights
from model.weights import (
  CLASSIFIER,
  ENCODER,
  MASKED_LM,
  NEXT_SENTENCE,
  POOLER,
  QUESTIONS,
  TOKEN_CLASSIFIER,
)
from text_encoders import kinds, tokenizer_files

BODY = (ENCODER, POOLER)
CLASSIFY = (*BODY, CLASSIFIER)


# Round trips ------------------------------------------------------------------


@pytest.mark.parametrize(
  "parts, architecture",
  [
    (PRETRAINING, "BertForPreTraining"),
    (BODY, "BertModel"),
    ((ENCODER, MASKED_LM), "BertForMaskedLM"),
    ((*BODY, NEXT_SENTENCE), "BertForNextSentencePrediction"),
    (CLASSIFY, "BertForSequenceClassification"),
    ((*BODY, QUESTIONS), "BertForQuestionAnswering"),
    ((*PRETRAINING, CLASSIFIER), "BertForSequenceClassification"),
    ((ENCODER, TOKEN_CLASSIFIER), "BertForTokenClassification"),
    ((*BODY, TOKEN_CLASSIFIER), "BertForTokenClassification"),
  ],
)
def test_there_and_back_is_bit_equal(tmp_path, letters, parts, architecture):
  values = random_values(parts)
  settings = {"hidden_dropout_prob": 0.0, "initializer_range": 0.05}
  prefix = write_checkpoint(tmp_path / "a", values, **settings)
  said = convert(prefix, tmp_path / "b", vocab_file=letters)
  names = "README.md config.json model.safetensors task.json tokenizer.json"
  names += " tokenizer_config.json vocab.txt"
  assert sorted(os.listdir(tmp_path / "b")) == names.split()
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
  configs = [f"{tmp_path}/{folder}/bert_config.json" for folder in "ac"]
  old, new = map(BertConfig.from_json_file, configs)
  assert old.to_dict() == new.to_dict()
  vocabulary = pathlib.Path(letters).read_bytes()
  assert (tmp_path / "c" / "vocab.txt").read_bytes() == vocabulary


def test_names_and_kernels_are_hugging_faces(tmp_path):
  values = random_values()
  prefix = write_checkpoint(tmp_path / "a", values)
  convert(prefix, tmp_path / "b")
  path = str(tmp_path / "b" / "model.safetensors")
  tensors = safetensors.numpy.load_file(path)
  for theirs, ours in (
    ("bert.embeddings.word_embeddings.weight",
     "bert/embeddings/word_embeddings"),
    ("bert.embeddings.LayerNorm.weight", "bert/embeddings/LayerNorm/gamma"),
    ("bert.encoder.layer.1.attention.self.key.weight",
     "bert/encoder/layer_1/attention/self/key/kernel"),
    ("bert.encoder.layer.0.attention.output.dense.bias",
     "bert/encoder/layer_0/attention/output/dense/bias"),
    ("bert.encoder.layer.0.intermediate.dense.weight",
     "bert/encoder/layer_0/intermediate/dense/kernel"),
    ("bert.encoder.layer.1.output.LayerNorm.bias",
     "bert/encoder/layer_1/output/LayerNorm/beta"),
    ("bert.pooler.dense.weight", "bert/pooler/dense/kernel"),
    ("cls.predictions.transform.dense.weight",
     "cls/predictions/transform/dense/kernel"),
    ("cls.predictions.bias", "cls/predictions/output_bias"),
    ("cls.seq_relationship.weight", "cls/seq_relationship/output_weights"),
  ):  # fmt: skip
    # PyTorch's matrices are the other way round.
    want = values[ours].T if ours.endswith("/kernel") else values[ours]
    np.testing.assert_array_equal(tensors[theirs], want, err_msg=theirs)
  assert len(tensors) == len(values)


# What predict.py says: the task beside the weights.

TASK = {"max_seq_length": 24, "vocabulary": {"vocab_file": "vocab.txt"}}
COLUMNS = {"text": "a", "text_pair": None, "label": "c"}
CLASSIFIER_TASK = {**TASK, "task": "classifier", "columns": COLUMNS}
CASED_TASK = {
  **CLASSIFIER_TASK, "labels": ["a", "b", "c"], "do_lower_case": False,
}  # fmt: skip
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
  data = write_records_of(folder.parent / "data", letters, do_lower_case)
  prefix = write_checkpoint(folder, random_values())
  (folder / "run.json").write_text(json.dumps({"runs": [{"data": data}]}))
  return prefix


@pytest.mark.parametrize(
  "kind, lower, inputs",
  [
    ("pretraining", False, [*TEXTS, *LONG]),
    ("classifier", False, [*TEXTS[::2], *LONG]),
    ("sentencepiece", False, TEXTS),
    ("regression", True, TEXTS),
    ("squad", True, QUESTION),
  ],
)
def test_predictions_survive_both_ways(
  tmp_path, letters, spm_model, kind, inputs, lower
):
  run, case = tmp_path / "runs" / "a", {"do_lower_case": lower}
  run.parent.mkdir()
  if kind == "pretraining":
    prefix = write_pretraining_run(run, letters, lower)
  elif kind == "squad":
    task = {**SQUAD_TASK, **case, "version_2_with_negative": True}
    prefix = write_run(run, (ENCODER, QUESTIONS), letters, task)
  else:
    labels = ["no", "who knows", "yes"] if kind == "classifier" else []
    task = {**CLASSIFIER_TASK, **case, "labels": labels}
    if kind != "classifier":
      del task["columns"]
    outputs = 1 if kind == "regression" else 3
    prefix = write_run(run, CLASSIFY, letters, task, outputs)
    if kind == "sentencepiece":
      task["vocabulary"] = {"spm_model_file": "m.model"}
      (run / "task.json").write_text(json.dumps(task))
      shutil.copyfile(spm_model, run / "m.model")
  want = answers(prefix, inputs)
  said = convert(prefix, tmp_path / "theirs")
  assert "assumed" not in said and f"--do_lower_case={lower}" in said
  shutil.rmtree(tmp_path / "runs")  # what was made needs nothing of it
  shutil.rmtree(tmp_path / "data", ignore_errors=True)
  prefix = tmp_path / "back" / "model.ckpt"
  said = convert(tmp_path / "theirs", prefix)
  assert "assumed" not in said and f"--do_lower_case={lower}" in said
  assert answers(prefix, inputs) == want
  convert(prefix, tmp_path / "again")
  theirs, again = (contents(tmp_path / name) for name in ("theirs", "again"))
  assert theirs.pop("README.md") != again.pop("README.md")  # has their names
  assert again == theirs


@pytest.mark.parametrize(
  "parts, labels",
  [
    (CLASSIFY, ["no", "maybe", "yes"]),
    ((ENCODER, TOKEN_CLASSIFIER), ["no", "maybe", "yes"]),
    (CLASSIFY, ["LABEL_0", "LABEL_1"]),
    (CLASSIFY, ["LABEL_0"]),
  ],
)
def test_hugging_faces_own_files_say_the_task(tmp_path, letters, parts, labels):
  """As transformers saves them, without task.json.

  Stand-ins are no names of labels: later runs may say them. Of a regression,
  which has one output, there are none to say.
  """
  kind = "ner" if TOKEN_CLASSIFIER in parts else "classifier"
  is_named = "yes" in labels
  task = {**CASED_TASK, "task": kind, "labels": labels}
  if not is_named:
    del task["labels"]
  prefix = write_run(tmp_path / "a", parts, letters, task, len(labels))
  convert(prefix, tmp_path / "b")
  config = runs.read_json(tmp_path / "b", "config.json")
  assert config["id2label"] == {str(n): label for n, label in enumerate(labels)}
  assert config["label2id"] == {label: n for n, label in enumerate(labels)}
  problem = "single_label_classification" if labels[1:] else "regression"
  assert config.get("problem_type") == (problem if kind != "ner" else None)
  tokenizer = runs.read_json(tmp_path / "b", "tokenizer_config.json")
  assert tokenizer["model_max_length"] == 24
  assert tokenizer["do_lower_case"] is False
  os.remove(tmp_path / "b" / "task.json")
  said = convert(tmp_path / "b", tmp_path / "c" / "m")
  assert ("labels by number: no, maybe, yes" in said) == is_named
  saved = runs.read_json(tmp_path / "c", "task.json")
  # No columns, and no length of a training.
  known = {"task", "do_lower_case", "vocabulary"}
  want = {key: task[key] for key in known}
  if is_named or len(labels) == 1:
    want["labels"] = labels if is_named else []
  if kind == "ner":  # its training was not ours
    want["space_before_words"] = False
  assert saved == want
  if len(labels) == 2:
    (answer,) = answers(tmp_path / "c" / "m", TEXTS[:1])
    assert answer["probabilities"].keys() == {"0", "1"}
  if is_named:
    (tmp_path / "a" / "task.json").write_text(
      json.dumps({**task, "labels": labels[:2]})
    )
    refused(prefix, tmp_path / "d", "2 names of labels .* has 3")


def test_what_a_folder_says_twice_must_agree(tmp_path, letters):
  prefix = write_run(tmp_path / "a", CLASSIFY, letters, CASED_TASK)
  theirs, out = tmp_path / "b", tmp_path / "out"
  convert(prefix, theirs)
  other = tmp_path / "other.txt"
  other.write_text("".join(f"{t}\n" for t in LETTERS[:-1]))
  for model in (prefix, theirs):
    for message, flag in (
      ("--do_lower_case=True, but .*leave", {"do_lower_case": True}),
      ("another vocabulary than .*leave", {"vocab_file": str(other)}),
    ):
      refused(model, out, message, to="tensorflow", **flag)
  # fmt: off
  for file, key, value, message in (
    ("task.json", "labels", ["a", "c", "b"], "labels is .* in task.json, but"),
    ("task.json", "task", "squad", "task is 'squad' in task.json"),
    ("task.json", "labels", 5, "task.json: damaged"),
    ("task.json", "do_lower_case", "no",
     "task.json: damaged: do_lower_case is 'no'"),
    ("tokenizer_config.json", "do_lower_case", "no",
     "tokenizer_config.json: damaged: do_lower_case is 'no', not true or"),
  ):
    # fmt: on
    content = (theirs / file).read_text()
    changed = {**json.loads(content), key: value}
    (theirs / file).write_text(json.dumps(changed))
    refused(theirs, out, message)
    (theirs / file).write_text(content)
  lower = {**CASED_TASK, "do_lower_case": True}
  second = write_run(tmp_path / "c", CLASSIFY, letters, lower)
  message = "differ in do_lower_case: only check"
  refused([prefix, second], out, message, to="tensorflow")


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
  message = r"on .*case.* text .*leave the flag out"
  refused(folder, tmp_path / "d", message, do_lower_case=not lower)


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
  assert source.max_seq_length == TINY["max_position_embeddings"]
  begins = [line.split()[0] for line in source.lines()[1:]]
  assert begins == [f"{source.path}:", "every"]
  cased = convert(prefix, tmp_path / "c", do_lower_case=False)
  assert "assumed: 1\n" in cased and "--do_lower_case=False" in cased
  # The published folders' names say it.
  named = write_checkpoint(tmp_path / "cased_L-12_H-768_A-12", random_values())
  said = convert(named, tmp_path / "d")
  assert "assumed" not in said and "--do_lower_case=False" in said
  message = "--do_lower_case=True, but .* cased te"
  refused(named, tmp_path / "e", message, do_lower_case=True)


# What a training leaves, and means --------------------------------------------


@pytest.mark.slow
def test_a_trainings_state_is_left_out(tiny_run, tmp_path, capfd):
  """And --init_checkpoint takes what is written, from both forms."""
  run = tmp_path / "run"
  given = dict(num_train_steps=2, num_warmup_steps=0)
  optimizer = dict(optimizer="lamb", bias_correction=True)
  runs.pretrain(tiny_run, run, precision="fp16", optimizer=optimizer, **given)
  prefix = str(run / "model.ckpt-2")
  said = convert(prefix, tmp_path / "only" / "model.ckpt", to="tensorflow")
  trained, weights = read(prefix), read(tmp_path / "only" / "model.ckpt")
  assert_same(weights, {name: trained[name] for name in weights})
  one_layer = {name for name in random_values() if "/layer_1/" not in name}
  assert set(weights) == one_layer
  slots = [f"{len(weights)} slots adam_{name}" for name in "mv"]
  counters = "applied_updates global_step loss_scale/value skipped_updates"
  counters += " training_state/samples_seen"
  for line in (*slots, *counters.split()):
    assert f"    {line}\n" in said
  convert(prefix, tmp_path / "theirs")
  again = str(tmp_path / "again" / "model.ckpt")
  convert(tmp_path / "theirs", again)
  assert_same(read(again), weights)
  capfd.readouterr()
  runs.pretrain(tiny_run, tmp_path / "next", init_checkpoint=again, **given)
  told = "".join(capfd.readouterr())
  for line in (f"loaded: {len(weights)}", "unused: 0", "initial weights: 0"):
    assert f"{line}\n" in told
  runs.pretrain(tiny_run, tmp_path / "same", init_checkpoint=prefix, **given)
  assert runs.metrics(tmp_path / "next") == runs.metrics(tmp_path / "same")


def test_means(tmp_path):
  """As a checkpoint and as a Hugging Face folder."""
  several = [random_values(seed=seed) for seed in range(3)]
  prefixes = []
  for step, values in enumerate(several):
    values = {**values, "global_step": np.int64(step)}
    prefixes.append(write_checkpoint(tmp_path / "a", values, f"m-{step}"))
  for to, output in (("tensorflow", "b"), ("huggingface", "theirs")):
    said = convert(prefixes, tmp_path / output, to=to)
    assert "the mean of 3 checkpoints" in said and "global_step" in said
  convert(tmp_path / "theirs", tmp_path / "back" / "b")
  want = {
    name: np.mean([v[name].astype(np.float64) for v in several], axis=0)
    for name in several[0]
  }
  for prefix in ("b", "back/b"):
    found = read(tmp_path / prefix)
    assert set(found) == set(want)
    for name, value in found.items():
      np.testing.assert_allclose(value, want[name], rtol=1e-7, err_msg=name)


def test_means_are_of_different_checkpoints_of_one_model(tmp_path):
  a = write_checkpoint(tmp_path / "a", random_values())
  b = write_checkpoint(tmp_path / "b", random_values(BODY))
  c = write_checkpoint(tmp_path / "c", random_values(), hidden_act="relu")
  for models, message in (
    ([a, tmp_path / "a"], f"are one checkpoint, {a}: name ea"),
    ([a, b], "cls/pred.*None in .*/b|None there"),
    ([a, c], r"a/bert.* and .*c/.* differ in hidden_act:"),
  ):
    refused(models, tmp_path / "out", message, to="tensorflow")


def test_a_tokenizer_alone_says_the_case(tmp_path, letters):
  """Not a config that its class does not lay over it."""
  prefix = write_checkpoint(tmp_path / "a", random_values())
  folder = tmp_path / "hf"
  convert(prefix, folder)
  (folder / "task.json").unlink()
  encoder = kinds.load_tokenizer(letters, do_lower_case=False)
  tokenizer_files.write_tokenizer(str(folder), encoder, 64)
  config = {"do_lower_case": True, "tokenizer_class": "XLMRobertaTokenizer"}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  source = model_source.find(str(folder))
  assert "do_lower_case" not in source.about.task
  assert source.task["do_lower_case"] is False


def test_a_mean_needs_no_equal_columns():
  """Which are of a run; the model's own facts count."""
  task = {"task": "embedder", "text_column": "anchor", "simcse": False}
  task |= {"prompts": {"query": "q "}, "normalize": True}
  assert not task_differences(task, {**task, "text_column": "question"})
  for changed in ({"prompts": {"query": ""}}, {"normalize": False}):
    assert task_differences(task, {**task, **changed})


# What others write ------------------------------------------------------------


TIED = {
  "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
  "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def old_names(tensors):
  """With buffers, too, and ties."""
  tensors |= {name: tensors[of].copy() for name, of in TIED.items()}
  tensors["bert.embeddings.position_ids"] = np.arange(64)[None]
  for name in [*tensors]:
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    old = old.replace("LayerNorm.bias", "LayerNorm.beta")
    tensors[old] = tensors.pop(name)
  return tensors


def one_of_two(tensors):
  """Only the other one of two tied names."""
  return {**tensors, **{name: tensors.pop(of) for name, of in TIED.items()}}


def of_type(dtype):
  return lambda tensors: {n: t.astype(dtype) for n, t in tensors.items()}


@pytest.mark.parametrize(
  "parts, change",
  [
    (PRETRAINING, old_names),
    (PRETRAINING, one_of_two),
    # A model saved alone has no prefix.
    (BODY, lambda tensors: {f"bert.{n}": t for n, t in tensors.items()}),
    *(
      (PRETRAINING, of_type(dtype))
      for dtype in (np.float16, np.float64, ml_dtypes.bfloat16)
    ),
  ],
)
def test_what_others_write_is_read(tmp_path, parts, change):
  values = {  # that each type can hold
    name: (np.round(value * 64) / 64).astype(np.float32)
    for name, value in random_values(parts).items()
  }
  folder = write_folder(tmp_path / "a", change(their_tensors(values)))
  said = convert(folder, tmp_path / "b" / "m")
  assert_same(read(tmp_path / "b" / "m"), values)
  for name in (*TIED, "bert.embeddings.position_ids"):
    is_left_out = f"    {name} (follows from the rest)" in said
    assert is_left_out == (
      change is old_names or (name in TIED and change is one_of_two)
    )


def test_shards(tmp_path):
  tensors, out = their_tensors(), tmp_path / "c"
  folder = write_folder(tmp_path / "a", {})
  names = sorted(tensors)
  parts = [{n: tensors[n] for n in part} for part in (names[::2], names[1::2])]
  write_shards(folder, parts)
  convert(folder, tmp_path / "b" / "m")
  assert_same(read(tmp_path / "b" / "m"), random_values())
  last = folder / "model-00002-of-00002.safetensors"
  del parts[1][names[1]]
  safetensors.numpy.save_file(parts[1], str(last))
  refused(folder, out, rf"00002.safeten.*: {names[1]}: in it or")
  last.unlink()
  refused(folder, out, "model-00002-of-00002")
  (folder / "model.safetensors.index.json").write_text('{"weight_map": 5}')
  refused(folder, out, "not an index")


# Errors -----------------------------------------------------------------------


def changed(name, value):
  return lambda tensors: {**tensors, name: value}


def without(*names):
  return lambda tensors: {n: v for n, v in tensors.items() if n not in names}


# fmt: off
REFUSED = [
  # Tensors
  (changed("bert.pooler.dense.bias", np.zeros(7, "f")),
   r"in bert.pooler.dense.bias is of shape \[7\], .* makes it \[32\]"),
  (without("cls.predictions.bias"), "masked LM head lacks cls.predictions.b"),
  (without("bert.embeddings.LayerNorm.bias"),
   "encoder lacks bert.embeddings.LayerNorm.bias"),
  (changed("bert.encoder.layer.2.output.dense.bias", np.zeros(3, "f")),
   "encoder.layer.2.output.dense.bias: no weight of .* 2 layers"),
  (changed("cls.predictions.decoder.weight", np.zeros([100, 32], "f")),
   "decoder.weight is not bert.embeddings.word_embeddings.weight"),
  (changed("bert.pooler.dense.bias", np.zeros(32, np.int8)),
   "pooler.dense.bias is uint8, not a float"),
  (changed("bert.pooler.dense.bias", np.full(32, np.inf, "f")),
   "pooler.dense.bias holds values that are not finite"),
  (changed("bert.embeddings.LayerNorm.gamma", np.zeros(32, "f")),
   "LayerNorm.weight is there twice"),
  # config.json
  ({"num_hidden_layers": 3}, r"lacks bert\.encoder\.layer\.2\."),
  ({"vocab_size": 99}, r"is of shape \[100, 32\].*\[99, 32\]"),
  ({"id2label": {"0": "a", "2": "b"}}, "does not name the labels 0, 1, 2"),
  ({"id2label": {"0": "a", "1": "a"}}, "two labels of one name"),
]
CLASSIFIERS_REFUSED = [
  (1, {"problem_type": "multi_label_classification"}, "with 1 outputs"),
  (1, {"problem_type": "single_label_classification"}, "with 1 outputs"),
  (3, {"id2label": {"0": "a", "1": "b"}}, "names 2 labels, .* has 3 outputs"),
  (3, {"architectures": ["BertForMaskedLM"]}, "an architecture without one"),
]
# fmt: on


@pytest.mark.parametrize(
  "labels, change, message",
  [*((0, *case) for case in REFUSED), *CLASSIFIERS_REFUSED],
)
def test_models_that_cannot_be_converted(tmp_path, labels, change, message):
  """Pre-trained ones, and classifiers of so many labels."""
  parts = CLASSIFY if labels else PRETRAINING
  tensors, config = their_tensors(random_values(parts, labels=labels)), change
  if callable(change):
    tensors, config = change(tensors), {}
  folder = write_folder(tmp_path / "a", tensors, **config)
  assert str(folder) in refused(folder, tmp_path / "b", message)


def test_a_classifier_of_tokens_is_told_from_one_of_texts(tmp_path):
  """By the architecture; without one, by the pooler that only texts need."""
  values = random_values(CLASSIFY)
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
  old = write_folder(tmp_path / "old", tensors, **named)
  convert(old, tmp_path / "o" / "m")
  names = {*read(tmp_path / "o" / "m")}
  assert {"cls/tokens/output_bias", "bert/pooler/dense/bias"} <= names
  assert runs.read_json(tmp_path / "o", "task.json")["task"] == "ner"


def test_our_models_that_hugging_face_does_not_have(tmp_path):
  out, other = tmp_path / "b", {"my/head": np.ones(3, np.float32)}
  pooled = {**MODERN, "classifier_pooling": "pooler"}
  for number, (keys, values, message) in enumerate((
    ({}, random_values() | other, "has no place for my/head"),
    ({}, random_values((ENCODER, CLASSIFIER)),
     "of texts, but not the pooler that it"),
    (pooled, random_values(BODY, keys=pooled),
     "ModernBERT has no place for bert/"),
    (EURO, random_values(CLASSIFY, keys=EURO),
     "EuroBERT has no place for"),
    ({"pre_layer_norm": True}, random_values(),
     "4/bert_model.ckpt: pre_layer_norm"),
  )):  # fmt: skip
    prefix = write_checkpoint(tmp_path / str(number), values, **keys)
    refused(prefix, out, message)
    # It is of no concern to us.
    said = convert(prefix, tmp_path / f"ours_{number}" / "m", to="tensorflow")
    assert_same(read(tmp_path / f"ours_{number}" / "m"), values)
    assert ("my/head (not BERT's, kept)" in said) == ("my/head" in values)


def test_damage_and_what_is_not_there(tmp_path, letters):
  prefix = write_checkpoint(tmp_path / "a", random_values())
  out, bare = tmp_path / "out", str(tmp_path / "bare" / "m")
  checkpoint_files.write_weights(bare, {"a": np.ones(3, np.float32)})
  nan = random_values()
  nan["bert/pooler/dense/bias"][3] = np.nan
  nan = write_checkpoint(tmp_path / "nan", nan)
  deep = write_config(tmp_path / "c.json", num_hidden_layers=3)
  alone = str(tmp_path / "m")
  checkpoint_files.write_weights(alone, random_values())
  keys = {**TINY, "vocab_size": 70}
  small = write_checkpoint(
    tmp_path / "small", random_values(keys=keys), vocab_size=70
  )
  # fmt: off
  for model, message, flags in (
    (tmp_path / "a" / "other", "a/other: no such model", {}),
    (bare, "give --bert_config_file", {}),
    (nan, "pooler/dense/bias holds values that", {}),
    (prefix, "which is the model's, differ in num_hi",
     {"bert_config_file": deep}),
    (alone, "lacks|shape", {"bert_config_file": deep}),
    (small, "has 78 tokens, but .*=70", {"vocab_file": letters}),
    (prefix, "only one of --vocab_file, --spm",
     {"vocab_file": letters, "spm_model_file": "spiece.model"}),
    (prefix, "SentencePiece model", {"spm_model_file": letters}),
  ):
    # fmt: on
    refused(model, out, message, **flags)
  data = tmp_path / "a" / "bert_model.ckpt.data-00000-of-00001"
  damaged = bytearray(data.read_bytes())
  damaged[2000] ^= 1
  for content in (damaged, damaged[:3000]):
    data.write_bytes(content)
    refused(prefix, out, "bert_model.ckpt: damaged")
  folder = write_folder(tmp_path / "b", their_tensors())
  weights = folder / "model.safetensors"
  weights.write_bytes(weights.read_bytes()[:-5])
  refused(folder, out, "model.safetensors: damaged")
  weights.unlink()
  refused(folder, out, "holds no model: name the --output_dir")


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
  said = refused(folder, tmp_path / "m", "safetensors")
  said, _, command = said.partition("safetensors: ")
  assert said.startswith(f"{folder}: has no model.safetensors. Copy it, or")
  python, option, code, *words = shlex.split(command)
  assert (python, option, words) == ("python", "-c", [str(folder)])
  monkeypatch.setattr(sys, "argv", [option, *words])
  exec(code, {})
  convert(folder, tmp_path / "m")
  assert_same(read(tmp_path / "m"), random_values())


def test_nothing_is_overwritten(tmp_path, letters):
  prefix = write_checkpoint(tmp_path / "a", random_values())
  for folder, file, content in (
    ("full", "x", "mine"),
    ("b", "vocab.txt", "another\n"),
    ("run", "run.json", '{"runs": []}'),
  ):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / file).write_text(content)
  before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
  # fmt: off
  for output, settings, message in (
    (tmp_path / "full", {},
     "already exists and is not empty: give a new folder"),
    (prefix, {"to": "tensorflow"}, "index exists already"),
    (tmp_path / "b", {"to": "tensorflow", "vocab_file": letters},
     "vocab.txt already exists and is"),
    (tmp_path / "run" / "m", {"to": "tensorflow"},
     "run is the folder of another run"),
  ):
    # fmt: on
    with pytest.raises(UserError, match=message):
      convert(prefix, output, **settings)
  assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == before
  assert len(os.listdir(tmp_path)) == 4
  (tmp_path / "empty").mkdir()
  convert(prefix, tmp_path / "empty")
  convert(prefix, tmp_path / "a" / "again", to="tensorflow")  # of one config


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


# The model card ---------------------------------------------------------------


def write_run_file(folder, *starts):
  (folder / "run.json").write_text(json.dumps({"runs": starts}))


def test_a_folder_has_a_card_with_what_the_runs_files_say(tmp_path, letters):
  run = tmp_path / "run"
  prefix = write_checkpoint(run, random_values(), name="model.ckpt-20")
  # The model's vocabulary is not beside the records, but has their digest.
  write_packed(run)
  vocabulary = pathlib.Path(letters).read_bytes()
  digest = hashlib.sha256(vocabulary).hexdigest()
  change_manifest(run, tokenizer={"sha256": digest})
  start = {
    "flags": {
      "optimizer": {"optimizer": "lamb"}, "learning_rate": 1e-3,
      "eval_input_file": f"{run}/data-*",
    },
    "plan": {
      "updates": 40, "records_per_update": 24, "warmup_updates": 4, "ranks": 2,
    },
    "data": {"files": [f"{run}/data-0.tfrecord"], "records": 120},
    "versions": {"tensorflow": "2.21.0", "git": None},
  }  # fmt: skip
  # A start that found nothing left to train did not make these weights.
  later = {**start, "first_update": 20, "plan": {**start["plan"], "ranks": 7}}
  write_run_file(run, start, later)
  with open(run / "eval_metrics.jsonl", "w") as f:
    for step in (20, 40):
      row = {"masked_lm_accuracy": step / 100, "note": "a|<b>"}
      print(json.dumps({"global_step": step, **row}), file=f)
  shutil.copytree(run, tmp_path / "again")
  for models, name, lines in (
    (prefix, "my model", """
      license: "cc0-1.0"
      language: ["en", "no"]
      pipeline_tag: "fill-mask"
      mask_token: "[MASK]"
      # my model
      | updates planned | 40 |
      | update of these weights | 20 |
      | ranks | 2 |
      | optimizer | lamb |
      | learning rate | 0.001 |
      | masked words: right | 20.0% |
      | note | a\\|&lt;b> |
      | tensorflow | 2.21.0 |
      | masks | static |
      | evaluated on | the training records |"""),
    ([prefix, tmp_path / "again"], "both", """
      | mean of the weights of several runs, at updates | 20, 20 |
      | data, training and versions are those of | the first |"""),
  ):  # fmt: skip
    convert(
      models, tmp_path / name, vocab_file=letters, license="cc0-1.0",
      language=("en", "no"),
    )  # fmt: skip
    card = (tmp_path / name / "README.md").read_text()
    wanted = {line.strip() for line in lines.strip().splitlines()}
    assert wanted <= {*card.splitlines()}
    assert str(tmp_path) not in card and "licence is not" not in card


def test_a_card_says_what_the_training_did(tmp_path):
  """Dropout but for the config's, so many minutes, in stages."""
  prefix = write_checkpoint(tmp_path / "a", random_values())
  run = {
    "flags": {
      "bert": {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1},
      "attention_probs_dropout_prob": None, "hidden_dropout_prob": 0.0,
      "lr_schedule": "linear", "max_train_minutes": 30.0,
      "masks": {"masked_lm_prob": [0.2, 0.15]},
      "stages": [{"input_file": "/my/x*", "time_share": 1.0}],
    },
    "plan": {"updates": 4, "records_per_update": 24, "ranks": 1},
    "data": {"files": [], "examples": 300, "records": 81},
  }  # fmt: skip
  rows = {
    "dropout in this training": "0",
    "dropout of attention in this training": "0.1", "examples": "300",
    "records that hold them": "81", "learning rate schedule": "linear",
    "records per update": "24", "minutes planned": "30",
    "updates planned": None, "masked when training": "0.2 to 0.15",
    "share of the tokens to mask": None, "stage 1": "time_share 1.0",
  }  # fmt: skip
  write_run_file(tmp_path / "a", run)
  convert(prefix, tmp_path / "b", do_lower_case=False)
  card = (tmp_path / "b" / "README.md").read_text()
  table = dict(re.findall(r"^\| (.+) \| (.+) \|$", card, re.M))
  assert {name: table.get(name) for name in rows} == rows
  assert "_" not in "".join(table)
  assert "; cased text." in card and "/my/" not in card


def test_a_card_of_bare_weights_says_what_is_not_known(tmp_path):
  prefix = write_checkpoint(tmp_path / "a", random_values(BODY))
  convert(prefix, tmp_path / "b")
  card = (tmp_path / "b" / "README.md").read_text()
  assert 'license: "unknown"' in card and "The licence is not stated" in card
  assert "language" not in card and "mask_token" not in card
  assert 'pipeline_tag: "feature-extraction"' in card
  assert card.count("Not known: no file beside") == 4
  assert "no file says whether of lower-cased text." in card
  message = r"--license and --language are for"
  refused(tmp_path / "b", tmp_path / "c", message, license="mit")
