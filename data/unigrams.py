"""How often tokens occur in the text of records, and what that predicts."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from data import record_report, records, tfrecord

MOST_RECORDS = 50_000  # a few seconds; a word that is rarer is rare


def numbers(
  files: tfrecord.RecordSet, most: int = MOST_RECORDS, in_a_row: int = 1
) -> np.ndarray:
  """The records to count, all or about `most`: int64 [n].

  They are evenly spread; `in_a_row`, which a slow disk reads at once, together.
  """
  if len(files) <= most:
    return np.arange(len(files))
  in_a_row = min(in_a_row, most)
  starts = np.linspace(0, len(files) - in_a_row, most // in_a_row)
  rows = starts.astype(np.int64)[:, None] + np.arange(in_a_row)
  return np.unique(rows)


def features_of(files: tfrecord.RecordSet, vocab_size: int) -> dict:
  """What `count` needs to know of files: by their manifest, if there is one."""
  found = records.find_manifest(files.paths[0])
  if found:
    return found[1].features()
  return records.features_of_first(files.paths, vocab_size)


def count(
  files: tfrecord.RecordSet,
  chosen: Iterable[int],
  features: dict[str, records.Feature],
  vocab_size: int,
  special: Sequence[int],
  at: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
  """int64 [vocab_size]: tokens of the records `chosen`, before masking.

  The ids `special` and padding are left out. `at` is called with the records
  done. DataError names file and record.
  """
  counts = np.zeros(vocab_size, np.int64)
  for done, number in enumerate(chosen, 1):
    record = record_report.read_record(files, number, features)
    ids, _ = record_report.original_ids(record)
    ids = ids[record["input_mask"] > 0]
    counts += np.bincount(ids, minlength=vocab_size)
    at(done)
  counts[list(special)] = 0
  return counts


def log_frequencies(counts: np.ndarray) -> np.ndarray:
  """float64 [vocab_size], in nats: each count is one more than it is."""
  smoothed = counts + 1
  return np.log(smoothed / smoothed.sum())


def log_likelihoods(
  counts: np.ndarray, sentences: Iterable[np.ndarray]
) -> np.ndarray:
  """float64 [sentences]: the sums of their tokens' log frequencies.

  Sums are exact before they are rounded: sentences of the same tokens are equal
  in any order.
  """
  logs = log_frequencies(counts)
  return np.array([math.fsum(logs[ids]) for ids in sentences])
