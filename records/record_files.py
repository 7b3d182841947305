"""Record files with their manifests: found once, for all who ask about them."""

import os
from typing import NamedTuple

from common import input_files
from records import data_set, tfrecord
from records.data_set import Manifest
from text_encoders.base import TokenizerInfo


class RecordFiles(NamedTuple):
  """The files that names and globs mean, and the manifests that list them."""

  patterns: str
  paths: list[str]
  manifests: dict[str, tuple[str, Manifest]]  # path -> (its path, manifest)

  @property
  def first(self) -> tuple[str, Manifest] | None:
    """(path, manifest) of the first file; None without one."""
    return self.manifests.get(self.paths[0])

  @property
  def manifest(self) -> Manifest | None:
    """The first file's manifest; None without one."""
    return self.first[1] if self.first else None

  @property
  def tokenizer(self) -> TokenizerInfo | None:
    """What the records were made with, if a manifest says it."""
    for _, manifest in self.manifests.values():
      return manifest.tokenizer
    return None

  def expect_records(self) -> None:
    """Raises `DataError` for files that are no record files."""
    for path in self.paths:
      if path not in self.manifests:  # which lists nothing else
        tfrecord.expect_records(path)

  def real_tokens(self) -> float | None:
    """Mean real tokens of a record; None if a file has no manifest."""
    # A manifest has its data set's mean, which counts for each file of it.
    tokens, records = 0.0, 0
    for path, (_, manifest) in self.manifests.items():
      count = manifest.shards[os.path.basename(path)].records
      mean = manifest.counts.get("real_tokens", 0) / manifest.num_records
      tokens, records = tokens + count * mean, records + count
    is_known = tokens and len(self.manifests) == len(self.paths)
    return tokens / records if is_known else None


def find(patterns: str) -> RecordFiles:
  """Expands names and globs; `DataError` for none, or a damaged manifest."""
  paths = input_files.expand_patterns(patterns)
  return RecordFiles(patterns, paths, data_set.find_manifests(paths))
