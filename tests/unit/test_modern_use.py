"""What runs, predictions and exports do with models of later layers.

From Hugging Face folders, read in place, and to them.
"""

import json

import finetuning_runs
import numpy as np
import pytest
import runs
from samples import LETTERS, TINY
from test_convert_checkpoint import convert, write_checkpoint
from test_huggingface_types import EURO, MODERN, ROBERTA, random_values

import tokenization
from checkpoints import checkpoint_weights
from gradients.distributed import Comm
from interop import inference, model_source, pseudo_likelihood
from interop.predictions import Input, Predictor
from model import weights

SIZE = {"vocab_size": len(LETTERS)}
MODELS = {
  "modernbert": {**MODERN, **SIZE}, "eurobert": {**EURO, **SIZE},
  "roberta": {**ROBERTA, **SIZE},
}  # fmt: skip
PRETRAINED = [weights.ENCODER, weights.TRANSFORM, weights.MASKED_LM]


@pytest.fixture
def made(tmp_path, letters):
  """A model type -> a checkpoint of ours and the same as their folder."""

  def make(name):
    values = random_values(MODELS[name], PRETRAINED)
    prefix = write_checkpoint(tmp_path / "ours", values, **MODELS[name])
    folder = tmp_path / "theirs"
    convert(prefix, folder, vocab_file=letters, do_lower_case=True)
    return prefix, str(folder)

  return make


def answers(path, inputs, **given):
  source = model_source.find(path, model_source.Given(**given))
  model = inference.open_model(source)
  found = Predictor(model, source).predict(inputs)
  model.close()
  return found


def assert_near(got, want):
  """Two trees of JSON but for rounding."""
  if isinstance(want, dict):
    assert got.keys() == want.keys()
    for key in want:
      assert_near(got[key], want[key])
  elif isinstance(want, list):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
      assert_near(one, other)
  elif isinstance(want, float):
    assert got == pytest.approx(want, abs=1e-4)
  else:
    assert got == want


@pytest.mark.parametrize(
  "name",
  ["modernbert", *(pytest.param(n, marks=pytest.mark.slow) for n in
                   ("eurobert", "roberta"))],
)  # fmt: skip
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
  assert_near(answers(export, inputs), want)
  encoder = tokenization.WordPieceEncoder(letters, True)
  sentences = encoder.encode_batch(["a b c", "ab c 1 2 d e f g h"])
  scored = pseudo_likelihood.Scorer(opened, encoder).score(sentences, Comm())
  assert np.isfinite(scored).all() and scored[0] != scored[1]
  opened.close()


@pytest.mark.parametrize(
  "name, kind",
  [
    ("modernbert", "classifier"),
    pytest.param("modernbert", "squad", marks=pytest.mark.slow),
    pytest.param("modernbert", "ner", marks=pytest.mark.slow),
    pytest.param("eurobert", "classifier", marks=pytest.mark.slow),
    pytest.param("roberta", "squad", marks=pytest.mark.slow),
  ],
)
def test_fine_tuning_from_a_folder(made, tmp_path, letters, capfd, name, kind):
  """A run begins with the folder's weights; ModernBERT's becomes a folder."""
  _, folder = made(name)
  out = tmp_path / "tuned"
  if kind == "classifier":
    write, task = finetuning_runs.write_sentences, finetuning_runs.classifier
    data, inputs = "data.tsv", [Input("w1 good w2")]
  elif kind == "ner":
    write, task = finetuning_runs.write_words, finetuning_runs.ner_task
    data, inputs = "data.conll", [Input("w1 123 ab, w2")]
  else:
    write, task = finetuning_runs.write_questions, finetuning_runs.squad_task
    data, inputs = "data.json", [Input("w1?", "w1 123, w2 456")]
  data = write(tmp_path / data, 24, 0)
  config = f"{tmp_path}/ours/bert_config.json"
  finetuning_runs.run(
    task(
      config, letters, out, train_file=data, init_checkpoint=folder,
      num_train_epochs=1.0, log_every_steps=100,
    )
  )  # fmt: skip
  told = "".join(capfd.readouterr())
  assert f"initialised from {folder}" in told and "WARNING" not in told
  loaded = checkpoint_weights.open_checkpoint(folder).shapes
  unread = {"cls/predictions/output_bias", "cls/predictions/output_weights"}
  if name == "roberta":
    unread |= {n for n in loaded if n.startswith("cls/predictions/")}
  assert f"  loaded: {len({*loaded} - unread)}\n" in told
  want = answers(str(out), inputs)
  if name == "modernbert":
    convert(out, tmp_path / "again")
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    classes = {"classifier": "SequenceClassification",
               "squad": "QuestionAnswering",
               "ner": "TokenClassification"}  # fmt: skip
    assert content["architectures"] == [f"ModernBertFor{classes[kind]}"]
    assert_near(answers(str(tmp_path / "again"), inputs), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_pretraining_from_a_folder(tiny_run, tmp_path, capfd, name):
  """All weights are found, and a checkpoint of the run becomes a folder."""
  keys = {**MODELS[name], "vocab_size": TINY["vocab_size"]}
  values = random_values(keys, PRETRAINED)
  prefix = write_checkpoint(tmp_path / "ours", values, **keys)
  convert(prefix, tmp_path / "theirs")
  _, records = tiny_run
  runs.pretrain(
    (f"{tmp_path}/ours/bert_config.json", records), tmp_path / "run",
    num_train_steps=1, num_warmup_steps=0, objective="mlm",
    init_checkpoint=str(tmp_path / "theirs"),
  )  # fmt: skip
  told = "".join(capfd.readouterr())
  assert f"loaded: {len(values)}\n" in told
  assert "missing there, so initial weights: 0\n" in told
  assert "unused: 0\n" in told
  convert(tmp_path / "run", tmp_path / "again")
  again = checkpoint_weights.open_checkpoint(str(tmp_path / "again"))
  assert {*again.shapes} == {*values}
