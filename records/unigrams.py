"""How often tokens occur in the text of records, and what that predicts."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from common.errors import DataError
from records import data_set, record_report, tfrecord

MOST_RECORDS = 50_000  # a few seconds; a word that is rarer is rare


def numbers(
  files: tfrecord.RecordSet, most: int = MOST_RECORDS, in_a_row: int = 1
) -> np.ndarray:
  """The records to count, all or about `most`: int64 [n], evenly spread.

  `in_a_row` of them are neighbours, which a slow disk reads at once.
  """
  if len(files) <= most:
    return np.arange(len(files))
  in_a_row = min(in_a_row, most)
  # Rows of neighbours begin at even distances; they may meet, so each is once.
  starts = np.linspace(0, len(files) - in_a_row, most // in_a_row)
  return np.unique(starts.astype(np.int64)[:, None] + np.arange(in_a_row))


def features_of(
  files: tfrecord.RecordSet, vocab_size: int
) -> dict[str, dict[str, data_set.Feature]]:
  """File -> the features of its records, by its manifest or first record."""
  manifests, features = data_set.find_manifests(files.paths), {}
  for path, start in zip(files.paths, files.starts, strict=True):
    if path in manifests:
      features[path] = manifests[path][1].features()
      continue
    first = files.read(start)
    try:
      features[path] = data_set.features_of_record(first, vocab_size)
    except DataError as e:
      raise DataError(f"{files.where(start)}: {e}") from e
  return features


def texts(
  files: tfrecord.RecordSet,
  chosen: Iterable[int],
  features: Mapping[str, Mapping[str, data_set.Feature]],
  at: Callable[[int], None] = lambda done: None,
) -> Iterator[np.ndarray]:
  """The tokens of each of the records `chosen`, before masking: int [n]."""
  for done, number in enumerate(chosen, 1):
    of_file = features[files.locate(number)[0]]
    record = record_report.read_record(files, number, of_file)
    ids, _ = record_report.original_ids(record)
    yield ids[record["input_mask"] > 0]
    at(done)


def count(
  sequences: Iterable[np.ndarray], vocab_size: int, special: Sequence[int]
) -> np.ndarray:
  """int64 [vocab_size]: how often tokens occur; 0 for those of `special`."""
  counts = np.zeros(vocab_size, np.int64)
  for ids in sequences:
    counts += np.bincount(ids, minlength=vocab_size)
  counts[list(special)] = 0
  return counts


def log_frequencies(counts: np.ndarray) -> np.ndarray:
  """float64 [vocab_size], in nats."""
  # Laplace's smoothing: a token that never occurs has a finite logarithm.
  smoothed = counts + 1
  return np.log(smoothed / smoothed.sum())


def log_likelihoods(
  counts: np.ndarray, sentences: Iterable[np.ndarray]
) -> np.ndarray:
  """float64 [sentences]: the sums of their tokens' log frequencies."""
  logs = log_frequencies(counts)
  # Exact sums: sentences of the same tokens are equal in any order.
  return np.array([math.fsum(logs[ids]) for ids in sentences])
