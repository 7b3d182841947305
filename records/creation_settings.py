"""The flags of create_pretraining_data.py."""

import dataclasses
import os

from common import input_files, stores
from common.errors import UserError
from common.settings import check, in_group
from corpus import text_files
from records import data_set
from text_encoders.kinds import VocabularyFiles
from workers import launchers

# What lies beside records, here and in the folder of work in progress.
_NO_RECORDS = (*input_files.SIDE_FILES, ".result", ".unfinished")
# The settings that a manifest shows.
IN_MANIFEST = (
  "do_whole_word_mask max_seq_length max_predictions_per_seq random_seed "
  "dupe_factor masked_lm_prob short_seq_prob examples_per_record dynamic_masks "
  "objective cross_documents prose text_field encoding"
).split()

_text, _vocabulary = in_group("Text"), in_group("Vocabulary")
_records, _workers = in_group("Records"), in_group("Shards and workers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreationSettings(VocabularyFiles):
  """The flags of create_pretraining_data.py."""

  # High limits exceed what anybody wants; far larger values run out of memory.
  # fmt: off
  input_file: str = _text(help=
    "Text files, names, globs and URLs, comma-separated: one sentence a line "
    "and a blank line between documents, or .jsonl, a document a line; plain, "
    "gzip, bzip2, xz or zstd. The end of a file does not end a document.")
  output_file: str = _records(help=
    "Record file to write, or its URL (s3://...). With several shards NAME.EXT "
    "becomes NAME-00000-of-00004.EXT and so on; a comma-separated list gives "
    "exact names. Data sets in one folder must differ in NAME.")
  prose: str = _text("",
    "Language (ISO 639-1 code: en, zh, ...) of lines of prose, which are split "
    "into sentences. Empty: a line is a sentence.", alias="language")
  text_field: str = _text(*text_files.TEXT_FIELD)
  encoding: str = _text(*text_files.ENCODING)
  do_lower_case: bool | None = _vocabulary(None,
    "Lower-case the text, as an uncased vocabulary expects. Default: as files "
    "beside the vocabulary say, or else true.")
  objective: str = _records(data_set.OBJECTIVES[0],
    "What the records are for. mlm_nsp: masked LM and next sentence "
    "prediction, so an example is a pair of segments. mlm: masked LM alone, so "
    "it is as much of a document as fits.", choices=data_set.OBJECTIVES)
  cross_documents: bool = _records(False,
    "With --objective=mlm, continue an example with the next document, after a "
    "[SEP]. Without it the end of a document ends its example.")
  do_whole_word_mask: bool = _records(False,
    "Mask whole words instead of single tokens. Chinese words are those that "
    "jieba segments.")
  max_seq_length: int = _records(128,
    "Tokens of one record at most.", low=8, high=1 << 16)
  max_predictions_per_seq: int = _records(20,
    "Masked tokens of one record at most.", low=1)
  random_seed: int = _records(12345,
    "Seed of all that is random in the records.", low=0, high=(1 << 63) - 1,
    alias="seed")
  dupe_factor: int = _records(None,  # replaced by __post_init__
    "Copies of each document, each cut into examples and masked in its own "
    "way; with --objective=mlm all are cut alike, unless --short_seq_prob "
    "says otherwise. Default: 10, or 1 with --dynamic_masks.",
    low=1, high=10_000)
  masked_lm_prob: float = _records(0.15,
    "Share of the tokens to mask.", above=0, below=1)
  short_seq_prob: float = _records(None,  # replaced by __post_init__
    "Share of the documents, with --objective=mlm of the examples, that are "
    "cut shorter than --max_seq_length. Default: 0.1, or 0 with "
    "--objective=mlm.", low=0, high=1)
  examples_per_record: int = _records(1,
    "Examples that share one record at most, so that training spends no time "
    "on padding. 1 does not pack, which is what google/bert's scripts read.",
    low=1)
  dynamic_masks: bool = _records(False,
    "Leave the masks to training, which draws new ones in each epoch.")
  num_shards: int | None = _workers(None,
    "Record files to write. Default: one for about 16 MB.",
    low=1, high=100_000)
  workers: launchers.WorkerSettings = _workers(launchers.WorkerSettings())
  # fmt: on

  def __post_init__(self):
    if self.dupe_factor is None:
      object.__setattr__(self, "dupe_factor", 1 if self.dynamic_masks else 10)
    if self.short_seq_prob is None:
      short = 0.0 if self.objective == "mlm" else 0.1
      object.__setattr__(self, "short_seq_prob", short)
    check(self)
    _ = self.text  # checks its settings
    # What fits no single field's range: fields that depend on each other.
    size, paths = self.max_seq_length, self.output_paths
    folders = {os.path.dirname(os.path.abspath(path)) for path in paths}
    names = set(self.shard_names(None))
    most = f"1 to max_seq_length ({size})"
    for name, fits, want in (
      ("max_predictions_per_seq", self.max_predictions_per_seq <= size, most),
      ("examples_per_record", self.examples_per_record <= size, most),
      (
        "cross_documents",
        not self.cross_documents or self.objective == "mlm",
        "left out without --objective=mlm",
      ),
      (
        "output_file",
        all(names) and len(names) == len(paths) and len(folders) == 1,
        "different files of one folder, because one manifest describes them",
      ),
      (
        "output_file",
        not any(name.endswith(_NO_RECORDS) for name in names),
        f"a name without the end {', '.join(_NO_RECORDS)}, which other files "
        "beside records have",
      ),
      (
        "num_shards",
        len(paths) == 1 or self.num_shards in (None, len(paths)),
        f"left out or {len(paths)}, the number of files in --output_file",
      ),
    ):
      if not fits:
        raise UserError(f"--{name}={getattr(self, name)}: must be {want}")

  @property
  def text(self) -> text_files.TextFormat:
    return text_files.TextFormat(self.prose, self.text_field, self.encoding)

  @property
  def output_paths(self) -> list[str]:
    """The given names of record files; one may stand for several."""
    return input_files.listed(self.output_file)

  @property
  def explicit_shards(self) -> int | None:
    """The number of record files; None: the corpus decides."""
    files = len(self.output_paths)
    return files if files > 1 else self.num_shards

  @property
  def folder(self) -> str:
    return os.path.dirname(self.output_paths[0]) or "."

  @property
  def manifest_path(self) -> str:
    return os.path.splitext(self.output_paths[0])[0] + data_set.MANIFEST_SUFFIX

  @property
  def work_folder(self) -> str:
    return stores.at(self.output_paths[0]).work_folder()

  def shard_names(self, num_shards: int | None) -> list[str]:
    """File names: those given, or NAME-00000-of-00004.EXT, ..."""
    # A list of names is exact; one name may stand for several files.
    names = [os.path.basename(path) for path in self.output_paths]
    if num_shards in (None, len(names)):
      return names
    stem, extension = os.path.splitext(names[0])
    end = f"of-{num_shards:05d}{extension}"
    return [f"{stem}-{i:05d}-{end}" for i in range(num_shards)]
