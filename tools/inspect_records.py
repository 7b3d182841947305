"""Shows the manifest and the examples of record files, and verifies the files.

  python -m tools.inspect_records 'records/train*.tfrecord'

Verifying reads every checksum, index and record. Status 1 if a file is damaged.
"""

import collections
import dataclasses
import itertools
import os

from common import input_files
from common.console import counted
from common.errors import DataError
from common.settings import run_with, setting
from records import data_set, record_files, record_report
from text_encoders.kinds import VocabularyFiles

_MAX_VOCAB_SIZE = 1 << 31  # where no vocabulary is known: ids are int32


@dataclasses.dataclass(frozen=True)
class InspectSettings(VocabularyFiles):
  """The flags of tools.inspect_records."""

  whose_vocabulary = " of the records"
  default_vocabulary = (
    " Default: the manifest's, if it is in the records' folder or the one "
    "above."
  )
  # fmt: off
  num_examples: int = setting(3, "Examples to show.", low=0)
  verify: bool = setting(True,
    "Read and check every record. --noverify counts what some of them hold.")
  num_workers: int | None = setting(None,
    "Worker processes. Default: all cores.", low=1)
  # fmt: on


def inspect_data_set(
  paths: list[str],
  listing: tuple[str, data_set.Manifest] | None,
  settings: InspectSettings,
) -> collections.Counter:
  """Prints what the files of a data set hold; returns their survey."""
  manifest_path, manifest = listing or ("", None)
  folder = os.path.dirname(paths[0])
  info = manifest.tokenizer if manifest else None
  named = settings.named_vocabulary()
  encoder = record_report.find_encoder(info, folder, named)
  if manifest:
    features, masks = manifest.features(), manifest.mask_settings()
    infos, pairs = manifest.shards, manifest.has_pairs
    print(f"{manifest_path}\n{manifest.describe(folder)}")
  else:
    vocab_size = encoder.vocab_size if encoder else _MAX_VOCAB_SIZE
    features, masks = data_set.features_of_first(paths, vocab_size), None
    infos, pairs = {}, True
    others = ", ..." if len(paths) > 2 else ""
    print(f"{', '.join(paths[:2])}{others}\n  no manifest")
  if settings.num_examples:
    print(f"\n{record_report.legend(features, encoder)}\n")
    examples = record_report.examples(paths, features, masks, encoder, pairs)
    for text in itertools.islice(examples, settings.num_examples):
      print(f"{text}\n")
  listed = [infos.get(os.path.basename(path)) for path in paths]
  survey = record_report.survey(
    paths, listed, features, settings.verify, settings.num_workers
  )
  print(f"{record_report.describe(survey, len(paths), pairs)}\n")
  return survey


def main(settings: InspectSettings, *words: str) -> None:
  """Shows and verifies record files."""
  # A shell's own globs match files beside records, too.
  names = [name for name in words if not name.endswith(input_files.SIDE_FILES)]
  files = record_files.find(",".join(names or words))
  # Files of one manifest are shown together, whatever the patterns were.
  groups = collections.defaultdict(list)
  for path in files.paths:
    manifest_path, _ = files.manifests.get(path, ("", None))
    groups[manifest_path].append(path)
  total: collections.Counter = collections.Counter()
  for group in groups.values():
    total += inspect_data_set(group, files.manifests.get(group[0]), settings)
  damaged = len(files.paths) - total["files"]
  if damaged:
    raise DataError(f"{damaged} of {len(files.paths)} files are damaged")
  verdict = "all checksums right" if settings.verify else "not verified"
  records = counted(total["records"], "record")
  print(counted(len(files.paths), "file"), records, verdict, sep=", ")


if __name__ == "__main__":
  run_with(InspectSettings, main, arguments=None)
