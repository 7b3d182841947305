"""Models of transformers with other layers than BERT's give the same numbers.

Read in place and written, padded and packed: logits, and the gradients of one
step of masked LM. Skipped as `test_convert_parity.py` is.
"""

import numpy as np
import pytest
from conversions import assert_same
from reference_modern import EURO_BERT, MODERN_BERT

import modeling
from checkpoints import checkpoint_weights
from common import json_files
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from finetuning import heads, squad
from model import huggingface_config, huggingface_weights, tasks, weights

# Of the largest number: transformers' float32 is as far from float64.
TOLERANCE = 2e-6
NOISE = 0.03
SIZE = dict(
  vocab_size=120, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
  intermediate_size=96, max_position_embeddings=2048, initializer_range=0.06,
)  # fmt: skip
IDS = dict(
  pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3
)

# Name -> transformers' class, and what its config has beside `SIZE`.
THEIRS = {
  "modern": ("ModernBertForMaskedLM", {**IDS, "local_attention": 32}),
  "narrow": (
    "ModernBertForMaskedLM",
    {
      **IDS, "num_hidden_layers": 7, "hidden_size": 48,
      "num_attention_heads": 2, "local_attention": 6, "norm_bias": True,
      "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
      "tie_word_embeddings": False, "norm_eps": 1e-3,
      "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
      },
    },
  ),
  "other acts": (
    "ModernBertForMaskedLM",
    {
      **IDS, "global_attn_every_n_layers": 2, "local_attention": 128,
      "hidden_activation": "silu", "classifier_activation": "silu",
      "decoder_bias": False,
    },
  ),
  "euro": ("EuroBertForMaskedLM", {**IDS, "num_key_value_heads": 2}),
  "euro tied": (
    "EuroBertForMaskedLM",
    {**IDS, "tie_word_embeddings": True, "mlp_bias": True,
     "attention_bias": True},
  ),
  "roberta": (
    "RobertaForMaskedLM",
    {**IDS, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
     "max_position_embeddings": 2050},
  ),
}  # fmt: skip
BODY = [weights.ENCODER, weights.TRANSFORM]
ROBERTA = dict(position_offset=1, hidden_act="gelu_erf", norm_eps=1e-5)
# Name -> our keys, and the parts of a model.
OURS = {
  "masked LM": (
    {**MODERN_BERT, "local_attention": 32, "classifier_pooling": "mean"},
    [*BODY, weights.MASKED_LM],
  ),
  "narrow": (
    {
      **MODERN_BERT, "local_attention": 6, "hidden_size": 48,
      "num_attention_heads": 2, "attention_bias": True, "mlp_bias": True,
      "norm_bias": True, "classifier_bias": True, "tie_word_embeddings": False,
      "classifier_pooling": "cls",
    },
    [*BODY, weights.MASKED_LM],
  ),
  "deep": (
    {
      **MODERN_BERT, "num_hidden_layers": 7, "global_attn_every_n_layers": 2,
      "local_attention": 128, "hidden_act": "silu", "decoder_bias": False,
    },
    [*BODY, weights.MASKED_LM],
  ),
  "encoder": ({**MODERN_BERT, "classifier_pooling": "cls"}, BODY[:1]),
  "first token": (
    {**MODERN_BERT, "classifier_pooling": "cls"}, [*BODY, weights.CLASSIFIER],
  ),
  "mean": (
    {**MODERN_BERT, "classifier_pooling": "mean"}, [*BODY, weights.CLASSIFIER],
  ),
  "answers": (
    {**MODERN_BERT, "classifier_pooling": "mean"}, [*BODY, weights.QUESTIONS],
  ),
  "labels of tokens": (
    {**MODERN_BERT, "classifier_pooling": "cls"},
    [*BODY, weights.TOKEN_CLASSIFIER],
  ),
  "euro": (EURO_BERT, [weights.ENCODER, weights.MASKED_LM]),
  "euro encoder": (EURO_BERT, [weights.ENCODER]),
  "roberta": (ROBERTA, [weights.ENCODER, weights.MASKED_LM]),
  "roberta's labels": (ROBERTA, [weights.ENCODER, weights.TOKEN_CLASSIFIER]),
  "roberta's answers": (ROBERTA, [weights.ENCODER, weights.QUESTIONS]),
}  # fmt: skip


def random_batch(length, is_packed, labels=True, rows=3, window=None):
  """transformers' inputs; `examples` has our input_mask, 0 where is padding."""
  rng = np.random.default_rng(length)
  ends = [[length], [length // 2], [length - 5]]
  if is_packed:
    ends = [[5, length // 2, length], [length // 3, length - 7], [length - 1]]
  examples, positions = np.zeros([2, rows, length], np.int64)
  for row, last in enumerate(ends):
    for number, (start, end) in enumerate(zip([0, *last], last, strict=False)):
      examples[row, start:end] = number + 1
      positions[row, start:end] = np.arange(end - start)
  ids = rng.integers(5, SIZE["vocab_size"], [rows, length])
  batch = {"input_ids": np.where(examples > 0, ids, 0)}
  if labels:
    is_label = (examples > 0) & (rng.random([rows, length]) < 0.3)
    batch["labels"] = np.where(is_label, ids[:, ::-1], -100)
  if is_packed:
    queries, keys = examples[:, None, :, None], examples[:, None, None]
    together = queries == keys
    place = np.arange(length)
    near = np.abs(place[:, np.newaxis] - place) <= (window or 0) // 2
    batch["position_ids"] = positions
    batch["full_attention"] = as_scores(together)
    batch["sliding_attention"] = as_scores(together & near)
  else:
    batch["attention_mask"] = (examples > 0).astype(np.int64)
  return batch, examples


def as_scores(mask):
  return np.where(mask, 0.0, np.finfo(np.float32).min).astype(np.float32)


def our_outputs(folder, batch, examples):
  """Logits by transformers' names; gradients by our variables' names."""
  known = huggingface_config.read_config(folder)
  checkpoint = checkpoint_weights.open_checkpoint(folder)
  shapes = checkpoint.shapes
  bert = known.config
  found = weights.heads_of(bert, shapes)
  fp32 = modeling.mixed_precision.FP32
  with tf.Graph().as_default(), tf.Session() as session:
    model = modeling.BertModel(
      bert, False, tf.constant(batch["input_ids"], tf.int32),
      tf.constant(examples, tf.int32), scope="bert",
      examples_per_sequence=int(examples.max()),
      with_pooler=tasks.LABELS in found,
    )  # fmt: skip
    sequence = model.get_sequence_output()
    read = heads.HeadInput(model, bert, fp32, 3)
    outputs = {"last_hidden_state": sequence}
    if tasks.LABELS in found:
      matmul, bias, *_ = read.label_logits(tasks.LABELS)
      outputs = {"logits": matmul + bias}
    elif tasks.TOKENS in found:
      matmul, bias, *_ = read.label_logits(tasks.TOKENS)
      outputs = {"logits": tf.reshape(matmul + bias, [*examples.shape, 3])}
    elif tasks.QUESTIONS in found:
      both = squad.span_logits(read.features(tasks.QUESTIONS), bert, fp32)
      outputs = {"start_logits": both[..., 0], "end_logits": both[..., 1]}
    elif tasks.MASKED_LM in found:
      logits = modeling.masked_lm_logits(
        bert, sequence, model.get_embedding_table(), None
      )
      shape = [*batch["input_ids"].shape, bert.vocab_size]
      outputs = {"logits": tf.reshape(logits.matmul + logits.bias, shape)}
    variables = tf.trainable_variables()
    variables = [v for v in variables if v.op.name in shapes]
    if "labels" in batch:
      chosen = (batch["labels"] >= 0).reshape(-1)
      losses, _ = logits.losses_and_correct(
        tf.constant(np.maximum(batch["labels"], 0), tf.int32)
      )
      loss = tf.reduce_sum(losses * chosen) / chosen.sum()
      gradients = tf.gradients(loss, variables)
      for variable, gradient in zip(variables, gradients, strict=True):
        outputs[variable.op.name] = tf.convert_to_tensor(gradient)
    session.run(tf.global_variables_initializer())
    for variable in variables:
      variable.load(checkpoint[variable.op.name], session)
    return known, session.run(outputs)


def compare(folder, output_file, batch, examples):
  """The largest difference of each output, over its largest number.

  Gradients' are over the largest number of all gradients.
  """
  known, ours = our_outputs(folder, batch, examples)
  with np.load(output_file) as theirs:
    arrays = dict(theirs)
  arrays.pop("loss", None)
  gradients = {
    name.removeprefix("gradient:"): arrays.pop(name)
    for name in [*arrays]
    if name.startswith("gradient:")
  }
  if gradients:
    gradients, _ = huggingface_weights.from_huggingface(
      gradients, known, folder
    )
    arrays |= gradients
  sizes = [np.abs(value).max() for value in gradients.values()]
  assert arrays and {*arrays} <= {*ours}
  found = {}
  for name, value in arrays.items():
    got = ours[name]
    assert value.shape == got.shape, name
    if value.shape[:2] == examples.shape:
      value, got = value[examples > 0], got[examples > 0]
    largest = max(sizes) if name in gradients else np.abs(value).max()
    found[name] = float(np.abs(value - got).max() / largest)
  return found


def cases(first, *others):
  """Tokens, packed or padded, models; of others of both lengths, slow ones."""
  slow = [(n, *other) for other in others for n in (128, 2048)]
  return pytest.mark.parametrize(
    "length, is_packed, names",
    [first, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)],
  )


@cases((128, True, ["modern"]), (False, [*THEIRS]), (True, [*THEIRS]))
def test_what_transformers_wrote(tmp_path, peer, length, is_packed, names):
  jobs, answers = [], {}
  for seed, name in enumerate(names):
    kind, keys = THEIRS[name]
    if is_packed and kind.startswith("Roberta"):
      continue  # it takes no such masks
    window = keys.get("local_attention", 2)
    batch, examples = random_batch(length, is_packed, window=window)
    if kind.startswith("Roberta"):
      batch["input_ids"] = np.where(examples > 0, batch["input_ids"], 1)
    folder = str(tmp_path / name)
    files = f"{folder}.in.npz", f"{folder}.out.npz"
    np.savez(files[0], **batch)
    jobs.append(["make", folder, kind, {**SIZE, **keys}, seed, NOISE])
    jobs.append(["run", folder, kind, *files])
    answers[name] = folder, files[1], batch, examples
  peer(jobs)
  assert_alike(answers)


def assert_alike(answers):
  """Of a dict of arguments of `compare`."""
  for name, case in answers.items():
    found = compare(*case)
    worst = max(found, key=found.get)
    print(f"{name}: logits {found.get('logits')}, {worst} {found[worst]}")
    assert found[worst] <= TOLERANCE, (name, found)


LANGUAGE_MODELS = ["masked LM", "narrow", "deep", "euro"]


@cases((128, False, ["mean"]), (False, [*OURS]), (True, LANGUAGE_MODELS))
def test_what_we_wrote(tmp_path, peer, length, is_packed, names):
  """With the classes that config.json names; read back to the last bit."""
  jobs, answers = [], {}
  for seed, name in enumerate(names):
    keys, parts = OURS[name]
    folder, kind, values = write_ours(tmp_path / name, keys, parts, seed)
    batch, examples = random_batch(
      length, is_packed, kind.endswith("LM"), window=keys.get("local_attention")
    )
    files = f"{folder}.in.npz", f"{folder}.out.npz"
    np.savez(files[0], **batch)
    jobs.append(["run", folder, kind, *files])
    answers[name] = folder, files[1], batch, examples
    assert_same(checkpoint_weights.read([folder]).values, values)
  peer(jobs)
  assert_alike(answers)


def write_ours(folder, keys, parts, seed):
  """A folder of random weights of ours, its class and these weights."""
  config = BertConfig.from_dict({**SIZE, "type_vocab_size": 2, **keys})
  rng, values = np.random.default_rng(seed), {}
  for weight in weights.weights(config):
    if weight.part in parts:
      shape = [3 if n is None else n for n in weight.shape]
      value = rng.normal(0.0, 0.06, shape) + weight.name.endswith("gamma")
      values[weight.name] = value.astype(np.float32)
  found, labels = weights.heads_of(config, values), []
  if {*found} & {*tasks.LABELLED}:
    labels = ["a", "b", "c"]
  content = huggingface_config.to_huggingface_config(
    config, found, "here", labels
  )
  folder.mkdir()
  json_files.write(str(folder / "config.json"), content)
  tensors = huggingface_weights.to_huggingface(values, config, "here")
  huggingface_weights.write_tensors(str(folder), tensors)
  return str(folder), content["architectures"][0], values
