"""Small models of each kind with weights of chance, as runs leave them."""

import json
import shutil

import numpy as np
from samples import TINY

import modeling
from common.tensorflow_v1 import tf
from finetuning import heads
from model import tasks

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
  "ner": {
    "task": "ner",
    "labels": ["B-LOC", "I-LOC", "O"],
    "doc_stride": 8,
  },
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
    with_pooler=kind not in ("squad", "ner"),
  )
  sequence, pooled = model.get_sequence_output(), model.get_pooled_output()
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
    matmul, bias = heads.label_logits(tasks.LABELS, pooled, 3, bert)
    outputs["classifier/logits"] = matmul + bias
    outputs["classifier/probabilities"] = tf.nn.softmax(matmul + bias)
  elif kind == "ner":
    matmul, bias = heads.label_logits(tasks.TOKENS, sequence, 3, bert)
    scores = tf.reshape(matmul + bias, [1, -1, 3])
    outputs["token_classifier/logits"] = scores
    outputs["token_classifier/probabilities"] = tf.nn.softmax(scores)
  else:
    both = heads.span_logits(sequence, bert)
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
  prefix = str(folder / "bert_model.ckpt")
  bert = modeling.BertConfig.from_dict(CONFIG)
  with tf.Graph().as_default(), tf.Session() as session:
    tf.set_random_seed(5)
    logits(kind, bert, [[2, 3]], [[0, 0]])
    weights = tf.trainable_variables()
    for weight in weights:
      tf.get_variable(f"{weight.op.name}/adam_m", weight.shape)
    session.run(tf.global_variables_initializer())
    for name, value in dict(changes).items():
      (weight,) = [w for w in weights if w.op.name == name]
      weight.load(np.broadcast_to(value, weight.shape), session)
    tf.train.Saver(tf.global_variables()).save(session, prefix)
  (folder / "checkpoint").unlink()  # as google/bert's folders are
  return prefix


def expected(kind, prefix, ids, segments):
  """What `logits` are of one input, int [S], with a checkpoint's weights."""
  bert = modeling.BertConfig.from_dict(CONFIG)
  with tf.Graph().as_default(), tf.Session() as session:
    outputs = logits(kind, bert, np.array([ids]), np.array([segments]))
    tf.train.Saver(tf.trainable_variables()).restore(session, prefix)
    return {n: value[0] for n, value in session.run(outputs).items()}
