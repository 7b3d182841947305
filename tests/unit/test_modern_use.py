"""What runs, predictions and exports do with models of later layers.

From Hugging Face folders, read in place, and to them.
"""

import itertools
import shutil

import finetuning_runs
import numpy as np
import pytest
import runs
from conversions import answers, convert, random_values, write_checkpoint
from samples import LETTERS, TINY, write_config
from test_huggingface_types import EURO, MLM, MODERN, ROBERTA

from checkpoints import checkpoint_weights
from common.errors import UserError
from config.pretraining import PretrainingConfig
from finetuning.classification import ClassifierConfig
from gradients.distributed import Comm
from interop import (
  inference,
  model_source,
  pseudo_likelihood,
  run_settings,
)
from interop.predictions import Input
from model.tasks import POSITIONS
from text_encoders.wordpiece import WordPieceEncoder

slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
SIZE = {"vocab_size": len(LETTERS)}
MODELS = {
  "modernbert": {**MODERN, **SIZE}, "eurobert": {**EURO, **SIZE},
  "roberta": {**ROBERTA, **SIZE, "type_vocab_size": 1},
}  # fmt: skip


@pytest.fixture
def made(tmp_path, letters):
  """A model type -> a checkpoint of ours and the same as their folder."""

  def make(name):
    values = random_values(MLM, keys=MODELS[name])
    prefix = write_checkpoint(tmp_path / "ours", values, **MODELS[name])
    folder = tmp_path / "theirs"
    convert(prefix, folder, vocab_file=letters, do_lower_case=True)
    return prefix, str(folder)

  return make


def assert_near(got, want):
  """Two trees of JSON but for rounding."""
  if isinstance(want, dict):
    assert got.keys() == want.keys()
    got, want = list(got.values()), list(want.values())
  if isinstance(want, list):
    for one, other in zip(got, want, strict=True):
      assert_near(one, other)
  elif isinstance(want, float):
    assert got == pytest.approx(want, abs=1e-4)
  else:
    assert got == want


@pytest.mark.parametrize(
  "name", ["modernbert", slow("eurobert"), slow("roberta")]
)
def test_a_folder_answers_as_the_checkpoint_and_the_export(
  made, tmp_path, letters, name
):
  prefix, folder = made(name)
  inputs = [Input("a [MASK] b"), Input("ab c 1 2 [MASK] d e f g h i j")]
  want = answers(prefix, inputs, vocab_file=letters, do_lower_case=True)
  assert_near(answers(folder, inputs), want)
  source, export = model_source.find(folder), str(tmp_path / "served" / "1")
  opened = inference.open_checkpoint(source)
  has = ["encoder", "masked_lm"]
  assert opened.names() == has
  inference.export(opened, source, export)
  # These models have no segments, so nobody has to give them.
  for signature in opened.signatures.values():
    assert {"input_ids", "input_mask"} == {*signature.inputs} - {POSITIONS}
  assert_near(answers(export, inputs), want)
  encoder = WordPieceEncoder(letters, True)
  sentences = encoder.encode_batch(["a b c", "ab c 1 2 d e f g h"])
  scored = pseudo_likelihood.Scorer(opened, encoder).score(sentences, Comm())
  assert np.isfinite(scored).all() and scored[0] != scored[1]
  opened.close()


# The end of its class in transformers, and something to answer.
TUNED = {
  "classify": ("SequenceClassification", [Input("w1 good w2")]),
  "answer": ("QuestionAnswering", [Input("w1?", "w1 123, w2 456")]),
  "label": ("TokenClassification", [Input("w1 123 ab, w2")]),
}


@pytest.mark.parametrize(
  "name, kind",
  [
    ("modernbert", "classify"), slow("modernbert", "answer"),
    slow("modernbert", "label"), slow("eurobert", "classify"),
    slow("roberta", "answer"),
  ],
)  # fmt: skip
def test_fine_tuning_from_a_folder(made, tmp_path, letters, capfd, name, kind):
  """A run begins with the folder's weights; ModernBERT's becomes a folder."""
  _, folder = made(name)
  out = tmp_path / "tuned"
  make = finetuning_runs.maker(kind, tmp_path, letters)
  shutil.copy(tmp_path / "ours" / "bert_config.json", tmp_path / "config.json")
  finetuning_runs.run(
    make(out, init_checkpoint=folder, num_train_epochs=0.5, log_every_steps=100)
  )
  told = "".join(capfd.readouterr())
  assert f"initialised from {folder}" in told and "WARNING" not in told
  loaded = checkpoint_weights.open_checkpoint(folder).shapes
  unread = {"cls/predictions/output_bias", "cls/predictions/output_weights"}
  if name == "roberta":
    unread |= {n for n in loaded if n.startswith("cls/predictions/")}
  assert f"  loaded: {len({*loaded} - unread)}\n" in told
  head, inputs = TUNED[kind]
  want = answers(str(out), inputs)
  if name == "modernbert":
    convert(out, tmp_path / "again")
    content = runs.read_json(tmp_path / "again", "config.json")
    assert content["architectures"] == [f"ModernBertFor{head}"]
    assert_near(answers(str(tmp_path / "again"), inputs), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_pretraining_from_a_folder(tiny_run, tmp_path, capfd, name):
  """All weights are found, and a checkpoint of the run becomes a folder."""
  keys = {**MODELS[name], "vocab_size": TINY["vocab_size"]}
  values = random_values(MLM, keys=keys)
  prefix = write_checkpoint(tmp_path / "ours", values, **keys)
  convert(prefix, tmp_path / "theirs")
  _, records = tiny_run
  runs.pretrain(
    (f"{tmp_path}/ours/bert_config.json", records), tmp_path / "run",
    num_train_steps=1, num_warmup_steps=0, objective="mlm",
    init_checkpoint=str(tmp_path / "theirs"),
  )  # fmt: skip
  told = "".join(capfd.readouterr())
  for line in (f"loaded: {len(values)}", "unused: 0", "initial weights: 0"):
    assert f"{line}\n" in told
  convert(tmp_path / "run", tmp_path / "again")
  again = checkpoint_weights.open_checkpoint(str(tmp_path / "again"))
  assert {*again.shapes} == {*values}


LONGER = {"global_rope_theta": 9e5, "max_position_embeddings": 512}


@pytest.mark.parametrize(
  "kind, flags",
  [
    (ClassifierConfig, dict(do_train=True, train_file="x", max_seq_length=60)),
    (PretrainingConfig, dict(dry_run=True)),
    (PretrainingConfig, dict(do_eval=True)),
  ],
)
def test_a_new_training_may_extend_rotary_positions(
  made, tmp_path, kind, flags
):
  changes = LONGER, {"local_rope_theta": 7.0}, {**LONGER, "norm_eps": 0.1}
  for model, change in itertools.product(made("modernbert"), changes):
    keys = {**MODELS["modernbert"], **change}
    path = write_config(tmp_path / "other.json", **keys)
    values = finetuning_runs.command_line(
      kind, bert_config_file=path, init_checkpoint=model,
      output_dir=str(tmp_path / "new"), **flags,
    )  # fmt: skip
    if "norm_eps" in change or "do_eval" in flags:
      with pytest.raises(UserError, match="differ in .*(_eps|_theta): leave"):
        run_settings.configured(kind, *kind.read_flags(values))
      continue
    config, lines = run_settings.configured(kind, *kind.read_flags(values))
    assert {key: getattr(config.bert, key) for key in change} == change
    assert any(f"{path} extends" in line for line in lines)
