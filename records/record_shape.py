"""The lengths, masks and heads of a run's records: as their manifests say."""

import dataclasses

import numpy as np

from records import data_set, masking
from records.record_files import RecordFiles


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


def of_manifest(files: RecordFiles, vocab_size: int) -> RecordShape | None:
  """What the first file's manifest says; None without one."""
  manifest = files.manifest
  if not manifest:
    return None
  most, masks = manifest.max_predictions_per_seq, manifest.mask_settings()
  # Masks that are drawn on reading have room for those of every manifest.
  if masks:
    for _, other in files.manifests.values():
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
