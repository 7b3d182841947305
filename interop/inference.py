"""Runs a trained model: one graph with a signature for each head.

A checkpoint and an exported SavedModel open as the same `Model`. Inputs are
int32, outputs float32; input_mask is 1 for tokens, 0 for padding. Shapes as in
`modeling`; B, S and P may be any. docs/use_a_model.md has the signatures.
"""

import contextlib
import glob
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import mixed_precision
import modeling
from checkpoints import checkpoint_weights, restore, run_folder
from common import files, input_files
from common.errors import UserError, reason
from common.model_files import CONFIG_FILE
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from finetuning.behaviour import INPUTS
from finetuning.heads import HeadInput
from interop import model_writing
from interop.heads import BEHAVIOURS, ENCODER, MASKED_LM
from interop.model_source import EXTRA_FOLDER, Source
from model import tasks, weights
from xla_patches import jit

_WORDS = "bert/embeddings/word_embeddings"
_POOLER = "bert/pooler/dense/kernel"
_DEFAULT = tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY
_TAGS = [tf.saved_model.tag_constants.SERVING]


class Model(NamedTuple):
  """An open model."""

  session: tf.Session
  signatures: dict  # name -> SignatureDef

  def signature(self, name: str):
    """A SignatureDef; `UserError` if the model has no such head."""
    if name not in self.signatures:
      raise UserError(
        f"this model has no {name} head, only {', '.join(self.names())}"
      )
    return self.signatures[name]

  def run(self, name: str, arrays: dict) -> dict:
    """Outputs by name; raises as `signature`."""
    signature = self.signature(name)
    return self.session.run(
      {output: info.name for output, info in signature.outputs.items()},
      {info.name: arrays[n] for n, info in signature.inputs.items()},
    )

  def names(self) -> list[str]:
    """All but the default signature, which equals the last of them."""
    return [name for name in BEHAVIOURS if name in self.signatures]

  def close(self) -> None:
    self.session.close()


def open_model(
  source: Source, names: Sequence[str] = (), precision: str = "fp32"
) -> Model:
  """Opens an export, or a checkpoint as `open_checkpoint` does."""
  if not source.is_export:
    return open_checkpoint(source, names, precision)
  if precision != "fp32":
    raise UserError(
      f"--precision={precision}: {source.path} is exported with its own: leave "
      "the flag out"
    )
  return open_export(source.path)


def open_export(folder: str) -> Model:
  """Opens a SavedModel; `UserError` if TensorFlow cannot load it."""
  names = ["saved_model.pb", *glob.glob("variables/*", root_dir=folder)]
  input_files.expect_plain(os.path.join(folder, name) for name in names)
  # TensorFlow's loader raises many kinds of errors for a damaged folder.
  session = tf.Session(graph=tf.Graph())
  try:
    with session.graph.as_default():
      content = tf.saved_model.loader.load(session, _TAGS, folder)
  except (tf.errors.OpError, OSError, RuntimeError, ValueError) as e:
    session.close()
    raise UserError(
      f"{folder}: not a whole SavedModel ({reason(e)}): export it again"
    ) from e
  return Model(session, dict(content.signature_def))


def open_checkpoint(
  source: Source, names: Sequence[str] = (), precision: str = "fp32"
) -> Model:
  """Opens a checkpoint with the signatures `names`, or all that it has.

  Raises `UserError` if it is damaged, of another config, or lacks a head.
  """
  checkpoint = checkpoint_weights.open_checkpoint(source.path)
  shapes = checkpoint.shapes
  if _WORDS not in shapes:
    raise UserError(
      f"{source.path}: no BERT: it lacks {_WORDS} and has, for example, "
      f"{min(shapes)}"
    )
  # A head that reads the pooled output is of no use without the pooler.
  has = [ENCODER]
  pools = _POOLER in shapes or not source.bert.has_pooler
  for head in weights.heads_of(source.bert, shapes):
    if pools or not head.reads_pooled:
      has.append(head.signature)
  use = tasks.BY_KIND[source.task["task"]]
  if not use.bias:  # no weights tell that the model has it
    has.append(use.signature)
  for name in names:
    if name not in has:
      raise UserError(
        f"{source.path} has no {name} head, only {', '.join(has)}"
      )
  session = tf.Session(graph=tf.Graph())
  with session.graph.as_default(), jit.mode("off"):
    signatures = _build(
      source,
      [name for name in has if not names or name in names],
      shapes.get(tasks.label_bias(shapes), [0])[0],
      pools,
      mixed_precision.make_policy(precision),
    )
    restore.restore_all(session, checkpoint, tf.global_variables())
  return Model(session, signatures)


def _build(
  source: Source, names: Sequence[str], labels: int, pools: bool, policy
) -> dict:
  """Name -> SignatureDef of the graph that it builds, with the default one."""
  behaviours, bert = [BEHAVIOURS[name] for name in names], source.bert
  left_out, inputs = set(), {}
  if bert.type_vocab_size <= 1:
    left_out.add("segment_ids")
  if source.task.get("include_prompt", True):
    left_out.add(tasks.POOLED)
  for name in (*INPUTS, tasks.POSITIONS, tasks.POOLED):
    if name not in left_out:
      inputs[name] = tf.placeholder(tf.int32, [None, None], name)
  segments = inputs.get("segment_ids")
  if not source.task.get("segment_ids", True):
    segments = None  # it never learned the second one
  # Of a masked LM head alone the last layer is computed at the masks only.
  positions = inputs[tasks.POSITIONS]
  reads_pooled = any(b.head is None or b.head.reads_pooled for b in behaviours)
  with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
    model = modeling.BertModel(
      bert,
      False,
      inputs["input_ids"],
      inputs["input_mask"],
      segments,
      scope="bert",
      policy=policy,
      with_pooler=pools and reads_pooled,
      positions=positions if list(names) == [MASKED_LM] else None,
    )
    pooled = inputs.get(tasks.POOLED, inputs["input_mask"])
    encoder = HeadInput(
      model, bert, policy, labels, positions, task=source.task, pooled=pooled
    )
    signatures = {}
    for behaviour in behaviours:
      outputs = {}
      for name, tensor in behaviour.outputs(encoder).items():
        outputs[name] = tf.identity(tf.cast(tensor, tf.float32))
      read = {n: inputs[n] for n in behaviour.inputs if n in inputs}
      signatures[behaviour.signature] = (
        tf.saved_model.signature_def_utils.predict_signature_def(read, outputs)
      )
  return {**signatures, _DEFAULT: signatures[names[-1]]}


# Export -----------------------------------------------------------------------


def export(model: Model, source: Source, folder: str) -> float:
  """Writes a model of `open_checkpoint` as a SavedModel, whole or not at all.

  Its assets.extra has config, vocabulary and task.json for predict.py. Returns
  the largest difference between outputs of the model and of its export.
  """
  tokenizer = source.tokenizer()  # an error if it is missing or does not fit
  with files.new_folder(folder) as aside:
    with model.session.graph.as_default():
      builder = tf.saved_model.builder.SavedModelBuilder(aside)
      builder.add_meta_graph_and_variables(
        model.session, _TAGS, model.signatures, strip_default_attrs=True
      )
      builder.save()
    extra = os.path.join(aside, EXTRA_FOLDER)
    os.makedirs(extra)
    config = os.path.join(extra, CONFIG_FILE)
    files.write(config, source.bert.to_json_string().encode())
    task = {**source.known_task, "exported_from": os.path.basename(source.path)}
    run_folder.write_task(extra, task, tokenizer)
    model_writing.write_tokenizer(extra, tokenizer, task, source.bert)
    return _largest_difference(model, aside, source.bert)


_MOST_DIFFERENT = 1e-4  # more than another order of additions in a matmul does


def _largest_difference(model: Model, folder: str, bert: BertConfig) -> float:
  """Over all outputs for two random sequences, one of them with padding."""
  # Any tokens will do: what is compared are two copies of one graph.
  rng = np.random.default_rng(0)
  length = min(12, bert.max_position_embeddings)
  mask = np.ones([2, length], np.int32)
  mask[1, length // 2 :] = 0
  arrays = {
    "input_ids": rng.integers(bert.vocab_size, size=[2, length]),
    "input_mask": mask,
    "segment_ids": rng.integers(max(1, bert.type_vocab_size), size=[2, length]),
    tasks.POSITIONS: np.zeros([2, 1], np.int32),
    tasks.POOLED: mask,
  }
  with contextlib.closing(open_export(folder)) as written:
    differences = []
    for name in model.names():
      outputs = written.run(name, arrays)
      for output, value in model.run(name, arrays).items():
        differences.append(float(np.abs(value - outputs[output]).max()))
  # NumPy's maximum, unlike Python's, is NaN if one of them is.
  difference = float(np.max(differences))
  if not difference <= _MOST_DIFFERENT:
    raise UserError(
      f"the export's answers differ from the checkpoint's by {difference:g}: "
      "nothing was written"
    )
  return difference
