"""What --init_checkpoint lacks, and names of a checkpoint's files."""

import math
import os
import pathlib
import re
import shutil
import tempfile
import types

import finetuning_runs
import pytest
import samples
import trained

import modeling
from checkpoints import (
  checkpoint_files,
  checkpoint_weights,
  checkpointing,
)
from checkpoints.restore import InitReport, of_encoder
from common.errors import UserError
from common.tensorflow_v1 import tf
from gradients.distributed import Comm
from interop import model_source, run_settings
from training import resume

LAYER = "bert/encoder/layer_1/output/dense/kernel"
WORDS = "bert/embeddings/word_embeddings"
HEAD = "cls/predictions/output_bias"


@pytest.fixture(scope="module")
def model(tmp_path_factory, letters):
  """A whole model of two layers with both heads of pre-training."""
  folder = tmp_path_factory.mktemp("whole") / "model"
  return trained.write_model(folder, "pretraining", letters)


def without(model, folder, pattern):
  """The model's checkpoint without the weights whose names match."""
  source = checkpoint_files.Checkpoint(model)
  names = [n for n in source.shapes if not re.search(f"{pattern}|adam_m", n)]
  prefix = f"{tempfile.mkdtemp(dir=folder)}/part.ckpt"
  checkpoint_files.write_weights(prefix, {n: source[n] for n in names})
  return prefix


# What is left out -> (why pre-training refuses it, or None; what it tells).
PARTS = {
  "a layer": ("layer_1/", None, ["WARNING: half a model: ", "lacks 16 "]),
  "the embeddings": ("^bert/emb", None, ["lacks 5 ", "bert/embeddings/"]),
  "one bias": ("layer_0/.*query/bias", None, ["WARNING: ", "lacks 1 weights"]),
  "the encoder": ("^bert/(?!pooler)", "lacks bert/emb", []),
  "the pooler": ("pooler", None, ["missing there, so initial weights: 2"]),
  "the masked LM head": (
    "^cls/pred",
    None,
    ["lacks the masked LM head", f"about ln(100) = {math.log(100):.1f}"],
  ),
}


def refusal(restore, kind, init_checkpoint="x", trains=True, session=None):
  """What a run says that refuses to start from a checkpoint; None: it starts.

  `restore` is that of its checkpointer.
  """
  named = types.SimpleNamespace
  run = named(
    task=named(initial=None) if trains else None,
    config=named(kind=kind, init_checkpoint=init_checkpoint, rewarmup=True),
    checkpointer=named(restore=restore),
    comm=named(is_root=True),
    session=session,
    job=named(labels=None),
  )
  try:
    resume._start(run)
  except UserError as e:
    return str(e)
  return None


@pytest.fixture
def refuses(tmp_path):
  """The `refusal` of pre-training, of one graph for any checkpoint."""
  bert = modeling.BertConfig.from_dict(trained.CONFIG)
  with tf.Graph().as_default(), tf.Session() as session:
    trained.logits("pretraining", bert, [[2, 3]], [[0, 0]])
    restore = checkpointing.Checkpointer(str(tmp_path / "run"), Comm()).restore
    yield lambda named: refusal(restore, "pretraining", named, session=session)


def test_pretraining_tells_what_a_checkpoint_lacks(
  model, tmp_path, capfd, refuses
):
  for name, (pattern, refused, told) in PARTS.items():
    said = refuses(without(model, tmp_path, pattern))
    assert (refused in said) if refused else said is None, name
    err = capfd.readouterr().err
    assert all(words in err for words in told), name
    has = lambda words, told=told: any(words in line for line in told)
    is_half = has("lacks 5") or has("WARNING") or bool(refused)
    assert ("WARNING" in err) == is_half, name
    assert ("masked LM head" in err) == has("masked LM head"), name


def test_fine_tuning_refuses_half_an_encoder(model, letters, tmp_path):
  finetuning_runs.write_sentences(tmp_path / "train.tsv", 16, seed=1)
  task = finetuning_runs.classifier(
    samples.write_config(tmp_path / "config.json"), letters, tmp_path / "run",
    train_file=str(tmp_path / "train.tsv"),
    init_checkpoint=without(model, tmp_path, PARTS["a layer"][0]),
  )  # fmt: skip
  with pytest.raises(UserError, match=r"lacks bert/.* \(of \d+ variables\)"):
    finetuning_runs.run(task)
  assert not os.path.exists(tmp_path / "run" / "run.json")


@pytest.mark.parametrize(
  "kind, trains, loaded, missing, refused",
  [
    ("pretraining", True, [WORDS], [LAYER, HEAD], False),
    ("pretraining", True, [HEAD], [WORDS, LAYER], True),
    ("pretraining", False, [WORDS, LAYER], [HEAD], True),
    ("classifier", True, [WORDS, LAYER], ["output_bias"], False),
    ("classifier", True, [WORDS], [LAYER], True),
    ("squad", True, [WORDS], [LAYER], True),
    ("squad", True, [WORDS, LAYER], ["bert/pooler/dense/bias"], False),
    ("squad", False, [WORDS, LAYER], ["cls/squad/output_bias"], True),
  ],
)
def test_what_may_start_random(kind, trains, loaded, missing, refused):
  report = InitReport("x", loaded, missing, [], [])
  restore = types.SimpleNamespace(initialise=lambda *_: report)
  said = refusal(restore, kind, trains=trains)
  assert (f"lacks {missing[0]} (of " in said) if refused else said is None


def test_layers_that_the_model_has_not_are_told():
  """Slots of an optimizer are no weights."""
  lines = InitReport("x", [WORDS], [], [LAYER, f"{WORDS}/adam_m"], []).lines()
  assert lines[-1].startswith(
    "WARNING: half a model: the checkpoint alone has 1"
  )
  assert of_encoder([WORDS, HEAD, "bert/pooler/dense/bias"]) == [WORDS]


@pytest.mark.parametrize(
  "prefix, end",
  [
    ("bert_model.ckpt", ".index"),
    ("bert_model.ckpt", ".data-00000-of-00001"),
    ("bert_model.ckpt", ".meta"),
    ("model.ckpt-7", ".index"),
    ("model.ckpt-7", ".json"),
  ],
)
def test_a_file_of_a_checkpoint_names_it(model, tmp_path, prefix, end, capsys):
  folder = shutil.copytree(os.path.dirname(model), tmp_path / "model")
  for suffix in (".index", ".data-00000-of-00001"):
    os.symlink(model + suffix, folder / f"model.ckpt-7{suffix}")
  prefix = f"{folder}/{prefix}"
  if end in (".meta", ".json"):
    pathlib.Path(prefix + end).write_text("{}")
  assert model_source.locate(prefix + end).path == prefix
  assert f"is without {end}" in capsys.readouterr().err
  origin = run_settings.find_origin("", {"init_checkpoint": prefix + end})
  assert (origin.init, origin.lines) == (prefix, ())
  opened = checkpoint_weights.open_checkpoint(prefix + end)
  assert opened.path == prefix and WORDS in opened.shapes
  with pytest.raises(UserError, match=rf"={prefix}: .*no folder of a training"):
    run_settings.find_origin("", {"cooldown_from": prefix + end})


def test_a_checkpoint_in_the_working_folder_is_of_this_folder(
  model, monkeypatch
):
  """Whose task.json says its labels, for example."""
  folder, name = os.path.split(model)
  monkeypatch.chdir(folder)
  located = model_source.locate(name)
  assert located[:2] == (f"./{name}", "as named")
  assert located.about.folder == "."
  for nothing in ("", "nothing"):
    with pytest.raises(UserError, match=f"^{nothing}: no such model"):
      model_source.locate(nothing)


def test_a_checkpoint_of_such_a_name_is_itself(model, tmp_path):
  odd = f"{tmp_path}/odd.index"
  for suffix in (".index", ".data-00000-of-00001"):
    os.symlink(model + suffix, odd + suffix)
  assert checkpoint_files.prefix_of(odd) == odd
  assert checkpoint_files.prefix_of(f"{odd}.index") == odd


@pytest.mark.parametrize(
  "name", ["no/x.ckpt", "no", "./x.index", "x.ckpt.index"]
)
def test_a_model_that_is_not_there_is_said(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=f"{name}: no such model"):
    run_settings.find_origin("", {"init_checkpoint": name})
  # A run that resumes needs it no more.
  path = name if os.path.dirname(name) else f"./{name}"
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "model.ckpt-7.json").write_text("{}")
  origin = run_settings.find_origin("run", {"init_checkpoint": name})
  assert origin.init == path and origin.continues


def test_counters_are_not_among_unused_variables():
  report = InitReport(
    "x", ["a"], [], ["a/adam_m", "b", "global_step", "loss_scale/value"], []
  )
  assert report.lines()[-3:] == [
    "  unused: 1", "    b", "  and 1 slots of an optimizer"
  ]  # fmt: skip
