"""Small models of random weights, as checkpoints and Hugging Face folders."""

import json
import os

import numpy as np
import pytest
import safetensors.numpy
from samples import TINY, write_config

import convert_checkpoint
from checkpoints import checkpoint_files
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from interop import inference, model_source, predictions
from model import huggingface_weights, weights

PRETRAINING = (
  weights.ENCODER, weights.POOLER, weights.MASKED_LM, weights.NEXT_SENTENCE,
)  # fmt: skip


def random_values(parts=PRETRAINING, seed=0, labels=3, keys=TINY, stddev=0.3):
  """Weights of a model by our names, float32."""
  rng = np.random.default_rng(seed)
  values = {}
  for weight in weights.weights(BertConfig.from_dict(keys)):
    if weight.part in parts:
      shape = [labels if n is None else n for n in weight.shape]
      values[weight.name] = rng.normal(0.0, stddev, shape).astype(np.float32)
  return values


def their_tensors(values=None):
  """The tiny model's weights by Hugging Face's names."""
  config = BertConfig.from_dict(TINY)
  return huggingface_weights.to_huggingface(
    values or random_values(), config, "here"
  )


def write_checkpoint(folder, values, name="bert_model.ckpt", **config):
  """A checkpoint and its config in a folder; returns the prefix."""
  folder.mkdir(exist_ok=True, parents=True)
  write_config(folder / "bert_config.json", **config)
  prefix = str(folder / name)
  checkpoint_files.write_weights(prefix, values)
  return prefix


def write_folder(folder, tensors, **config):
  """A Hugging Face folder as others write it; returns its path."""
  folder.mkdir(parents=True)
  content = {"model_type": "bert", **TINY, **config}
  (folder / "config.json").write_text(json.dumps(content))
  safetensors.numpy.save_file(tensors, str(folder / "model.safetensors"))
  return folder


def write_shards(folder, shards):
  """Puts files of tensors and their index in the place of the one file."""
  (folder / "model.safetensors").unlink()
  weight_map = {}
  for number, tensors in enumerate(shards, 1):
    name = f"model-{number:05}-of-{len(shards):05}.safetensors"
    safetensors.numpy.save_file(tensors, str(folder / name))
    weight_map |= dict.fromkeys(tensors, name)
  index = folder / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": weight_map}))


def convert(model, output, **settings):
  """Converts; returns the report as one text."""
  models = (model,) if isinstance(model, (str, os.PathLike)) else model
  settings = convert_checkpoint.ConversionSettings(
    output=str(output), **settings
  )
  return "\n".join(convert_checkpoint.convert(settings, *map(str, models)))


def refused(model, output, message, **settings):
  """Converting makes nothing; returns the error, which has the message."""
  with pytest.raises(UserError, match=message) as error:
    convert(model, output, **settings)
  assert not os.path.exists(output)
  return str(error.value)


def answers(model, inputs, **given):
  """What predict.py would print of a checkpoint, folder or export."""
  source = model_source.find(str(model), model_source.Given(**given))
  opened = inference.open_model(source)
  predictor = predictions.Predictor(opened, source)
  found = [prediction.answer for prediction in predictor.predict(inputs)]
  opened.close()
  return found


def read(prefix):
  """Name -> array of a checkpoint."""
  reader = tf.train.load_checkpoint(str(prefix))
  return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def assert_same(got, want):
  """Equal weights to the last bit."""
  assert set(got) == set(want)
  for name, value in want.items():
    assert got[name].dtype == np.float32
    np.testing.assert_array_equal(got[name], value, err_msg=name)
