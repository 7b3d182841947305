"""The lengths, masks and heads of a run's records: of flags and manifests."""

import dataclasses
import os
from typing import Any

import numpy as np

from common import input_files
from common.errors import UserError
from records import data_set, masking


@dataclasses.dataclass(frozen=True)
class RecordShape:
  """The lengths and limits of this run's records."""

  max_seq_length: int
  max_predictions_per_seq: int
  vocab_size: int
  examples_per_record: int = 1
  masks: masking.MaskSettings | None = None  # drawn on reading
  knows_words: bool = False  # whether records have is_continuation
  whole_words: bool = False  # of those masks
  last_prob: float | None = None  # in the last update; None: as in the first
  next_sentence: bool = True  # whether that head is trained
  segments: bool = True  # whether the model gets segment ids

  @property
  def masks_move(self) -> bool:
    """Whether the share to mask changes from update to update."""
    return len(set(self.mask_probs(np.array([0.0, 1.0])))) > 1

  def mask_probs(self, progress: np.ndarray) -> np.ndarray:
    """float [n]: the share to mask of records at shares [0, 1] of the run."""
    first = self.masks.masked_lm_prob if self.masks else 0.0
    last = first if self.last_prob is None else self.last_prob
    return first + (last - first) * progress

  def features(self) -> dict:
    """name -> `tf_example.Feature`."""
    return data_set.record_features(
      self.max_seq_length,
      self.max_predictions_per_seq,
      self.examples_per_record,
      self.vocab_size,
      dynamic=self.masks is not None,
      whole_words=self.knows_words,
    )


def of_manifest(files: str, vocab_size: int) -> RecordShape | None:
  """What the first file's manifest says; None without one.

  Masks that are drawn on reading have room for those of every manifest.
  """
  paths = input_files.expand_patterns(files)
  manifests = data_set.find_manifests(paths)
  if paths[0] not in manifests:
    return None
  _, manifest = manifests[paths[0]]
  most, masks = manifest.max_predictions_per_seq, manifest.mask_settings()
  if masks:
    for _, other in manifests.values():
      most = max(most, other.max_predictions_per_seq)
    masks = masks._replace(max_predictions_per_seq=most)
  return RecordShape(
    manifest.max_seq_length,
    most,
    vocab_size,
    manifest.examples_per_record,
    masks=masks,
    knows_words=manifest.knows_words and masks is not None,
    next_sentence=manifest.has_pairs,
    segments=manifest.has_pairs,
  )


def of_run(files: str | None, config, training: bool = True) -> RecordShape:
  """The shape of `files` in a run of a `PretrainingConfig`.

  Lengths are the flags', else the manifest's, else 128 and 20. Masks that are
  drawn on reading are training's, or an evaluation's.
  """
  bert, given = config.bert, config.masks.changes
  if training and config.sampled_softmax >= bert.vocab_size:
    raise UserError(
      f"--sampled_softmax={config.sampled_softmax}: the vocabulary has "
      f"{bert.vocab_size} words; give fewer, or leave it out for all"
    )
  known = of_manifest(files, bert.vocab_size) if files else None
  shape = known or RecordShape(128, 20, bert.vocab_size)
  length, masked = config.max_seq_length, config.max_predictions_per_seq
  if config.stages and not training:
    # A stage's lengths are its own records'; those to evaluate on have theirs.
    length = masked = None
    if not known:
      paths = input_files.expand_patterns(files or "")
      features = data_set.features_of_first(paths, bert.vocab_size)
      if features:
        length = features["input_ids"].size
      if "masked_lm_positions" in features:
        masked = features["masked_lm_positions"].size
  length = length or shape.max_seq_length
  shape = dataclasses.replace(shape, max_seq_length=length)
  if shape.masks:
    shape = _with_masks(shape, files, config, training)
  else:
    if training and files and given:
      raise UserError(
        f"--{next(iter(given))}: the masks of {files} were drawn when the "
        "records were made: make them with create_pretraining_data.py "
        "--dynamic_masks, or leave the flag out"
      )
    if not masked and not files and config.masks.masked_lm_prob:
      # A dry run's records have room for what the flag asks.
      prob = max(config.masks.masked_lm_prob)
      masked = masking.most_predictions(length, prob, 1)
    masked = masked or shape.max_predictions_per_seq
    shape = dataclasses.replace(shape, max_predictions_per_seq=masked)
  if shape.max_predictions_per_seq > shape.max_seq_length:
    raise UserError(
      f"--max_predictions_per_seq={shape.max_predictions_per_seq}: more than "
      f"--max_seq_length={shape.max_seq_length} tokens"
    )
  return _with_heads(shape, config)


def _with_heads(shape: RecordShape, config) -> RecordShape:
  """With what the model learns from the records."""
  pairs, alone = data_set.OBJECTIVES
  objective = config.objective or (pairs if shape.next_sentence else alone)
  has_pairs, segments = objective == pairs, config.segment_ids
  if segments is None:
    segments = has_pairs
  if segments and config.bert.type_vocab_size < 2:
    raise UserError(
      f"the BERT config's type_vocab_size={config.bert.type_vocab_size} has no "
      "place for second segments: set 2, or give --nosegment_ids"
    )
  return dataclasses.replace(shape, next_sentence=has_pairs, segments=segments)


def _with_masks(shape: RecordShape, files, config, training) -> RecordShape:
  """With masks as the flags draw them on reading, or as an evaluation does."""
  masks: Any = shape.masks
  made_with, given = masks.masked_lm_prob, config.masks.changes
  probs, most = (masking.EVALUATION_PROB,) * 2, None
  whole_words = shape.knows_words
  if training:
    probs = given.get("masked_lm_prob", (made_with, made_with))
    most = config.max_predictions_per_seq
    whole_words = given.get("do_whole_word_mask", whole_words)
    for name in masking.SHARES:
      masks = masks._replace(**{name: given.get(name, getattr(masks, name))})
  if whole_words and not shape.knows_words:
    raise UserError(
      f"--do_whole_word_mask: {files} do not say where words begin: make them "
      "with create_pretraining_data.py --dynamic_masks --do_whole_word_mask, "
      "or leave the flag out"
    )
  needed, examples = shape.max_predictions_per_seq, shape.examples_per_record
  asked = not training or "masked_lm_prob" in given
  if asked:
    length, prob = shape.max_seq_length, max(probs)
    room = masking.most_predictions(length, prob, examples)
    if prob <= made_with and round(length * made_with) <= needed:
      room = min(room, needed)  # so they were packed
    needed = room
  if most and most < needed and (asked or examples > 1):
    raise UserError(
      f"--max_predictions_per_seq={most}: {files} may need {needed} masked "
      "tokens a record: leave it out"
    )
  most = most or needed
  return dataclasses.replace(
    shape,
    max_predictions_per_seq=most,
    masks=masks._replace(masked_lm_prob=probs[0], max_predictions_per_seq=most),
    last_prob=probs[1],
    whole_words=whole_words,
  )


def tokens_of_a_record(config) -> float:
  """Mean real tokens in a record, by the manifests of --input_file."""
  files = config.input_file
  paths = input_files.expand_patterns(files) if files else []
  manifests, tokens, total = data_set.find_manifests(paths), 0.0, 0
  for path, (_, manifest) in manifests.items():
    count = manifest.shards[os.path.basename(path)].records
    mean = manifest.counts.get("real_tokens", 0) / manifest.num_records
    tokens, total = tokens + count * mean, total + count
  if tokens and len(manifests) == len(paths):
    return tokens / total
  return of_run(files, config).max_seq_length
