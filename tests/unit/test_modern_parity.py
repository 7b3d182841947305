"""transformers' models and ours of the same weights give the same numbers.

Read in place and written, padded and packed: outputs of each head, and for
later layers than BERT's the gradients of one step of masked LM. Skipped as
`test_convert_parity.py` is.
"""

import os

import numpy as np
import pytest
from conversions import PRETRAINING, assert_same, random_values
from reference_modern import EURO_BERT, MODERN_BERT
from samples import TINY

import modeling
from checkpoints import checkpoint_weights
from common import json_files
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from finetuning import heads, squad
from model import huggingface_config, huggingface_weights, tasks, weights

# Of BERT's numbers; of others' over the largest one: transformers' float32 is
# as far from float64.
TOLERANCE, OF_LARGEST = 1e-5, 2e-6
SIZE = dict(
  vocab_size=120, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
  intermediate_size=96, max_position_embeddings=2048, initializer_range=0.06,
)  # fmt: skip
IDS = dict(
  pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3
)
# The rest of a class of BERT's, its activation, and the parts that it has.
BERTS = {
  "ForPreTraining": ("gelu", PRETRAINING),
  "Model": ("gelu_new", PRETRAINING[:2]),
  "ForMaskedLM": ("relu", (weights.ENCODER, weights.MASKED_LM)),
  "ForNextSentencePrediction":
    ("gelu", (*PRETRAINING[:2], weights.NEXT_SENTENCE)),
  "ForSequenceClassification":
    ("gelu_new", (*PRETRAINING[:2], weights.CLASSIFIER)),
  "ForQuestionAnswering": ("gelu", (*PRETRAINING[:2], weights.QUESTIONS)),
  "ForTokenClassification":
    ("gelu_new", (weights.ENCODER, weights.TOKEN_CLASSIFIER)),
}  # fmt: skip
OUR_ACTS = {"gelu": "gelu_erf", "gelu_new": "gelu", "relu": "relu"}

ROBERTAS = {
  **IDS, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
  "max_position_embeddings": 2050,
}  # fmt: skip
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
      # transformers 4 reads the first two, 5 the others.
      "global_rope_theta": 500.0, "local_rope_theta": 90.0,
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
      "hidden_activation": "silu", "classifier_activation": "swish",
      "decoder_bias": False,
    },
  ),
  "euro": ("EuroBertForMaskedLM", {**IDS, "num_key_value_heads": 2}),
  "euro tied": (
    "EuroBertForMaskedLM",
    {**IDS, "tie_word_embeddings": True, "mlp_bias": True,
     "attention_bias": True},
  ),
  "euro's labels": ("EuroBertForTokenClassification", {**IDS, "num_labels": 5}),
  "roberta": ("RobertaForMaskedLM", ROBERTAS),
  "roformer": ("RoFormerForMaskedLM", {}),
  "roberta's texts": (
    "RobertaForSequenceClassification", {**ROBERTAS, "num_labels": 3},
  ),
  **{
    f"Bert{name}": (
      f"Bert{name}", {**TINY, "hidden_act": act, "initializer_range": 0.2}
    )
    for name, (act, _) in BERTS.items()
  },
}  # fmt: skip
BODY = [weights.ENCODER, weights.TRANSFORM]
ROFORMER = {"position_type": "rotary"}
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
  "roformer": (ROFORMER, [weights.ENCODER, weights.MASKED_LM]),
  "roformer's labels": (
    ROFORMER, [weights.ENCODER, weights.TOKEN_CLASSIFIER],
  ),
  "roberta's labels": (ROBERTA, [weights.ENCODER, weights.TOKEN_CLASSIFIER]),
  "roberta's texts": (
    ROBERTA, [weights.ENCODER, weights.POOLER, weights.CLASSIFIER],
  ),
  "euro's labels": (EURO_BERT, [weights.ENCODER, weights.TOKEN_CLASSIFIER]),
  "roberta's answers": (ROBERTA, [weights.ENCODER, weights.QUESTIONS]),
  **{
    f"Bert{name}": ({**TINY, "hidden_act": OUR_ACTS[act]}, parts)
    for name, (act, parts) in BERTS.items()
  },
}  # fmt: skip


def batch_for(kind, keys, length, is_packed):
  """`random_batch` for a class of transformers'."""
  if kind.startswith("Bert"):
    batch, examples = random_batch(16, False, False, TINY["vocab_size"])
    batch["token_type_ids"] = (np.arange(16) % 7 > 2) * examples
    return batch, examples
  has_labels = kind.endswith("MaskedLM")
  window = keys.get("local_attention", 2)
  batch, examples = random_batch(length, is_packed, has_labels, window=window)
  if "pad_token_id" in keys and kind.startswith("Roberta"):
    batch["input_ids"] = np.where(examples > 0, batch["input_ids"], 1)
  return batch, examples


def random_batch(
  length, is_packed, labels=True, vocab_size=SIZE["vocab_size"], window=2
):
  """transformers' inputs; `examples` has our input_mask, 0 where is padding."""
  rows = 3
  rng = np.random.default_rng(length)
  ends = [[length], [length // 2], [length - 5]]
  if is_packed:
    ends = [[5, length // 2, length], [length // 3, length - 7], [length - 1]]
  examples, positions = np.zeros([2, rows, length], np.int64)
  for row, last in enumerate(ends):
    for number, (start, end) in enumerate(zip([0, *last], last, strict=False)):
      examples[row, start:end] = number + 1
      positions[row, start:end] = np.arange(end - start)
  ids = rng.integers(5, vocab_size, [rows, length])
  batch = {"input_ids": np.where(examples > 0, ids, 0)}
  if labels:
    is_label = (examples > 0) & (rng.random([rows, length]) < 0.3)
    batch["labels"] = np.where(is_label, ids[:, ::-1], -100)
  if is_packed:
    queries, keys = examples[:, None, :, None], examples[:, None, None]
    together = queries == keys
    place = np.arange(length)
    near = np.abs(place[:, np.newaxis] - place) <= window // 2
    batch["position_ids"] = positions
    batch["full_attention"] = as_scores(together)
    batch["sliding_attention"] = as_scores(together & near)
  else:
    batch["attention_mask"] = (examples > 0).astype(np.int64)
  return batch, examples


def as_scores(mask):
  return np.where(mask, 0.0, np.finfo(np.float32).min).astype(np.float32)


def our_outputs(folder, batch, examples):
  """Outputs by transformers' names; gradients by our variables' names."""
  known = huggingface_config.read_config(folder)
  checkpoint = checkpoint_weights.open_checkpoint(folder)
  shapes, bert = checkpoint.shapes, known.config
  found, fp32 = weights.heads_of(bert, shapes), modeling.mixed_precision.FP32
  labels = shapes.get(tasks.label_bias(shapes), [0])[0]
  segments = batch.get("token_type_ids", np.zeros_like(examples))
  with tf.Graph().as_default(), tf.Session() as session:
    model = modeling.BertModel(
      bert, False, tf.constant(batch["input_ids"], tf.int32),
      tf.constant(examples, tf.int32), tf.constant(segments, tf.int32),
      scope="bert", examples_per_sequence=int(examples.max()),
      with_pooler=tasks.LABELS in found or "bert/pooler/dense/bias" in shapes,
    )  # fmt: skip
    sequence = model.get_sequence_output()
    read = heads.HeadInput(model, bert, fp32, labels)
    outputs = {"last_hidden_state": sequence}
    if model.get_pooled_output() is not None:
      outputs["pooler_output"] = model.get_pooled_output()
    for head in found:
      name = "logits"
      if head in tasks.LABELLED:
        matmul, bias, *_ = read.label_logits(head)
        value = matmul + bias
        if head is tasks.TOKENS:
          value = tf.reshape(value, [*examples.shape, labels])
      elif head is tasks.QUESTIONS:
        both = squad.span_logits(read.features(head), bert, fp32)
        outputs["start_logits"], value = both[..., 0], both[..., 1]
        name = "end_logits"
      elif head is tasks.NEXT_SENTENCE:
        both = modeling.next_sentence_logits(bert, model.get_pooled_output())
        value = both.matmul + both.bias
        outputs["seq_relationship_logits"] = value
      else:
        logits = modeling.masked_lm_logits(
          bert, sequence, model.get_embedding_table(), None
        )
        value = logits.matmul[:, : bert.vocab_size] + logits.bias
        value = tf.reshape(value, [*examples.shape, bert.vocab_size])
        outputs["prediction_logits"] = value
      outputs[name] = value
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
  """(the largest difference, the largest number) of each output.

  Gradients' is the largest number of all gradients; padding does not count but
  for BERT, to whose masks it is the same.
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
    if value.shape[:2] == examples.shape and known.kind.name != "bert":
      value, got = value[examples > 0], got[examples > 0]
    largest = max(sizes) if name in gradients else np.abs(value).max()
    found[name] = float(np.abs(value - got).max()), float(largest)
  return found


LANGUAGE_MODELS = ["masked LM", "narrow", "deep", "euro"]
BERT = [name for name in OURS if name.startswith("Bert")]
LONG = [(THEIRS, False), (THEIRS, True), (OURS, False), (OURS, True)]


@pytest.mark.parametrize(
  "table, names, length, is_packed",
  [
    (THEIRS, ["modern", "euro's labels", *BERT], 128, True),
    (THEIRS, ["roberta's texts", "roformer"], 128, False),
    (
      OURS,
      ["mean", "roberta's texts", "euro's labels", "roformer's labels", *BERT],
      128,
      False,
    ),
    *(
      pytest.param(table, None, length, is_packed, marks=pytest.mark.slow)
      for table, is_packed in LONG
      for length in (128, 2048)
    ),
  ],
)
def test_numbers_are_transformers(
  tmp_path, peer, table, names, length, is_packed
):
  """Of what it wrote, and of what we write with the class in config.json."""
  jobs, answers = [], {}
  if names is None:
    names = LANGUAGE_MODELS if table is OURS and is_packed else [*table]
  for seed, name in enumerate(names):
    folder = tmp_path / name
    if table is THEIRS:
      kind, keys = table[name]
      if is_packed and kind.startswith(("Roberta", "RoFormer")):
        continue  # it takes no such masks
      noise = 0.2 if kind.startswith("Bert") else 0.03
      made = ["make", str(folder), kind, {**SIZE, **keys}, seed, noise]
      jobs.append(made)
    else:
      keys, parts = table[name]
      kind = write_ours(folder, keys, parts, seed)
    batch, examples = batch_for(kind, keys, length, is_packed)
    files = f"{folder}.in.npz", f"{folder}.out.npz"
    np.savez(files[0], **batch)
    jobs.append(["run", str(folder), kind, *files])
    answers[name] = str(folder), files[1], batch, examples
  peer(jobs)
  answers = {k: case for k, case in answers.items() if os.path.exists(case[1])}
  if not answers:
    pytest.skip("NOT COMPARED: this version of transformers has none of these")
  for name, case in answers.items():
    found = compare(*case)
    print(f"{name}: {found}")
    for output, (difference, largest) in found.items():
      bound = TOLERANCE if name in BERT else OF_LARGEST * largest
      # Sums over all tokens: of 2,048 transformers' is 2.1e-7 from float64, and
      # ours 2.0e-8.
      bound *= 2 if "token_type" in output else 1
      assert difference <= bound, (name, output, difference, largest)


def write_ours(folder, keys, parts, seed):
  """The class of a new folder of random weights, which reads back as it is."""
  keys = {**SIZE, "type_vocab_size": 2, **keys}
  config = BertConfig.from_dict(keys)
  if folder.name in BERT:
    values = random_values(parts, seed, keys=keys)
  else:
    values = random_values(parts, seed, keys=keys, stddev=0.06)
    for name, value in values.items():
      value += name.endswith("gamma")
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
  assert_same(checkpoint_weights.read([str(folder)]).values, values)
  return content["architectures"][0]
