"""The lengths, masks and heads of a run's records, by flags and manifests."""

import dataclasses
from typing import Any

from common.errors import UserError
from records import data_set, masking, record_files
from records.record_shape import RecordShape, of_manifest


def of_patterns(
  files: str | None, config, training: bool = True
) -> RecordShape:
  """`of_run` of the files that names and globs mean."""
  return of_run(record_files.find(files) if files else None, config, training)


def of_run(
  files: record_files.RecordFiles | None, config, training: bool = True
) -> RecordShape:
  """The shape of `files` in a run of a `PretrainingConfig`; None: not known.

  Lengths are the flags', else the manifest's, else 128 and 20. Masks that are
  drawn on reading are training's, or an evaluation's.
  """
  bert, flags = config.bert, config.masks.changes
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
    if files and not known:
      features = data_set.features_of_first(files.paths, bert.vocab_size)
      if features:
        length = features["input_ids"].size
      if "masked_lm_positions" in features:
        masked = features["masked_lm_positions"].size
  length = length or shape.max_seq_length
  shape = dataclasses.replace(shape, max_seq_length=length)
  if shape.masks:
    shape = _with_masks(shape, files, config, training)
  else:
    if training and files and flags:
      raise UserError(
        f"--{next(iter(flags))}: the masks of {files.patterns} were drawn when "
        "the records were made: make them with create_pretraining_data.py "
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
  # An evaluation's do not depend on flags: results of all runs compare.
  masks: Any = shape.masks
  first_prob, flags = masks.masked_lm_prob, config.masks.changes
  probs, most = (masking.EVALUATION_PROB,) * 2, None
  whole_words = shape.knows_words
  if training:
    probs = flags.get("masked_lm_prob", (first_prob, first_prob))
    most = config.max_predictions_per_seq
    whole_words = flags.get("do_whole_word_mask", whole_words)
    for name in masking.SHARES:
      masks = masks._replace(**{name: flags.get(name, getattr(masks, name))})
  if whole_words and not shape.knows_words:
    raise UserError(
      f"--do_whole_word_mask: {files.patterns} do not say where words begin: "
      "make them with create_pretraining_data.py --dynamic_masks "
      "--do_whole_word_mask, or leave the flag out"
    )
  needed, examples = shape.max_predictions_per_seq, shape.examples_per_record
  redraws = not training or "masked_lm_prob" in flags
  # Records were packed for the masks that their maker drew: other masks may
  # need more room, and a redraw as many as they were made with needs the same.
  if redraws:
    length, prob = shape.max_seq_length, max(probs)
    room = masking.most_predictions(length, prob, examples)
    if prob <= first_prob and round(length * first_prob) <= needed:
      room = min(room, needed)  # so they were packed
    needed = room
  if most and most < needed and (redraws or examples > 1):
    raise UserError(
      f"--max_predictions_per_seq={most}: {files.patterns} may need {needed} "
      "masked tokens a record: leave it out"
    )
  most = most or needed
  return dataclasses.replace(
    shape,
    max_predictions_per_seq=most,
    masks=masks._replace(masked_lm_prob=probs[0], max_predictions_per_seq=most),
    last_prob=probs[1],
    whole_words=whole_words,
  )
