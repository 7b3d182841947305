"""Small models of each kind with weights of chance, as runs leave them."""

import json
import shutil

import numpy as np
from conversions import PRETRAINING, random_values
from samples import TINY

import mixed_precision
import modeling
from checkpoints import checkpoint_files
from common.tensorflow_v1 import tf
from finetuning import heads, squad
from model import tasks, weights

CONFIG = {**TINY, "initializer_range": 0.3}
TASKS = {
  "pretraining": {},
  "classifier": {
    "task": "classifier",
    "labels": ["no", "yes", "who knows"],
    "columns": {"text": "sentence", "text_pair": None, "label": "label"},
  },
  "squad": {
    "task": "squad",
    "doc_stride": 8,
    "max_query_length": 6,
    "version_2_with_negative": True,
  },
  "ner": {"task": "ner", "labels": ["B-LOC", "I-LOC", "O"], "doc_stride": 8},
  "embedder": {
    "task": "embedder",
    "normalize": True,
    "include_prompt": False,
    "prompts": {"query": "ab ", "document": ""},
  },
}


PARTS = {
  "pretraining": PRETRAINING,
  "classifier": (weights.ENCODER, weights.POOLER, weights.CLASSIFIER),
  "squad": (weights.ENCODER, weights.QUESTIONS),
  "ner": (weights.ENCODER, weights.TOKEN_CLASSIFIER),
  "embedder": (weights.ENCODER,),
}


def logits(kind, bert, ids, segments):
  """name -> tensor of a graph that training would build; ids: int [1, S]."""
  model = modeling.BertModel(
    bert,
    False,
    tf.constant(ids, tf.int32),
    None,
    tf.constant(segments, tf.int32),
    scope="bert",
    with_pooler=kind in ("pretraining", "classifier"),
  )
  sequence, pooled = model.get_sequence_output(), model.get_pooled_output()
  read = heads.HeadInput(model, bert, mixed_precision.FP32, 3)
  outputs = {"encoder/sequence_output": sequence}
  if pooled is not None:
    outputs["encoder/pooled_output"] = pooled
  if kind == "pretraining":
    places = tf.constant([[0, len(ids[0]) - 1]])
    ones = tf.ones([1, 2])
    *_, words = modeling.get_masked_lm_output(
      bert, sequence, model.get_embedding_table(), places, places, ones
    )
    *_, follows = modeling.get_next_sentence_output(bert, pooled, [0])
    outputs["masked_lm/log_probs"] = words[None]
    outputs["next_sentence/log_probs"] = follows
  elif kind == "classifier":
    matmul, bias, *_ = read.label_logits(tasks.LABELS)
    outputs["classifier/logits"] = matmul + bias
    outputs["classifier/probabilities"] = tf.nn.softmax(matmul + bias)
  elif kind == "ner":
    matmul, bias, *_ = read.label_logits(tasks.TOKENS)
    scores = tf.reshape(matmul + bias, [1, -1, 3])
    outputs["token_classifier/logits"] = scores
    outputs["token_classifier/probabilities"] = tf.nn.softmax(scores)
  elif kind == "embedder":
    mean = tf.reduce_mean(sequence, axis=1)
    outputs["embedding/embedding"] = tf.math.l2_normalize(mean, -1)
  else:
    both = squad.span_logits(sequence, bert, mixed_precision.FP32)
    outputs["span/start_logits"] = both[..., 0]
    outputs["span/end_logits"] = both[..., 1]
  return outputs


def write_model(folder, kind, vocab_file, changes=()):
  """A folder with checkpoint, config, vocabulary and task.json.

  `changes`: (variable, its value). The checkpoint holds an optimizer's slot
  for each variable, too. Returns the checkpoint's prefix.
  """
  folder.mkdir(parents=True)
  (folder / "bert_config.json").write_text(json.dumps(CONFIG))
  shutil.copyfile(vocab_file, folder / "vocab.txt")
  if task := TASKS[kind]:
    common = {
      "max_seq_length": 24,
      "do_lower_case": True,
      "vocabulary": {"vocab_file": "vocab.txt"},
    }
    (folder / "task.json").write_text(json.dumps({**task, **common}))
  values = random_values(PARTS[kind])
  for name, value in dict(changes).items():
    values[name] = np.broadcast_to(value, values[name].shape).astype(np.float32)
  slots = {f"{n}/adam_m": np.zeros_like(v) for n, v in values.items()}
  prefix = str(folder / "bert_model.ckpt")
  checkpoint_files.write_weights(prefix, {**values, **slots})
  return prefix


def expected(kind, prefix, examples):
  """What `logits` are of each (ids, segments) with a checkpoint's weights."""
  bert = modeling.BertConfig.from_dict(CONFIG)
  with tf.Graph().as_default(), tf.Session() as session:
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
      outputs = [
        logits(kind, bert, np.array([ids]), np.array([segments]))
        for ids, segments in examples
      ]
    tf.train.Saver(tf.trainable_variables()).restore(session, prefix)
    found = session.run(outputs)
  return [{name: value[0] for name, value in one.items()} for one in found]
