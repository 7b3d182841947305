"""Records for people: as text, how full they are, whether they are damaged.

Tokens to predict are written {seen|was}: as the model sees them, and the
original. So `the {[MASK]|cat} sat {dog|on} the {mat|mat}` has a masked token,
one that a random token replaces and one that stays. Pieces of words in braces
are the vocabulary's: `play{[MASK]|##ing}`.
"""

import functools
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

import tokenization
from common import console
from common.errors import DataError
from common.files import file_sha256
from data import masking, tf_example, tfrecord, workers

_WIDTH = 80
_SURVEYED = 1000  # records read from files that are not verified
_SPACE = tokenization.SENTENCEPIECE_SPACE
_NEXT_SENTENCE = ("B follows A", "B is from elsewhere")  # by label

Record = Mapping[str, np.ndarray]  # name -> values, see `records`
Features = Mapping[str, tf_example.Feature]  # what they must be


def read_record(
  files: tfrecord.RecordSet, number: int, features: Features
) -> dict[str, np.ndarray]:
  """The checked values of a record; DataError names file, record and byte."""
  data = files.read(number)
  try:
    record = tf_example.decode_example(data)
    tf_example.check_example(record, features)
    _check_positions(record)
    return record
  except DataError as e:
    raise DataError(
      f"{files.where(number)}: {e}. It is damaged or of another data set: copy "
      "or make the file again."
    ) from e


def _check_positions(record: Record) -> None:
  """Raises `DataError` if examples or tokens to predict are misplaced."""
  mask = record["input_mask"]
  steps = np.diff(mask, prepend=0)
  length = int(np.count_nonzero(mask))
  # Numbers may go up by 1, and to 0 where the padding begins.
  if (
    not length
    or mask[length:].any()
    or not np.isin(steps[:length], (0, 1)).all()
  ):
    raise DataError(
      "input_mask is not 1 for the tokens of the first example, 2 for those of "
      "the next and so on, then 0"
    )
  if "masked_lm_weights" in record:
    used = record["masked_lm_weights"] > 0
    positions = record["masked_lm_positions"][used]
    if np.any(positions >= length):
      raise DataError(f"masked_lm_positions holds {positions.max()}, padding")
    if len(np.unique(positions)) < len(positions):
      raise DataError("masked_lm_positions holds a position twice")


def table(rows: Mapping[str, str]) -> str:
  """Each name with its text, wrapped."""
  lines = [_wrapped(f"  {name:<11} ", text) for name, text in rows.items()]
  return "\n".join(lines)


def _wrapped(head: str, text: str) -> str:
  wrapper = textwrap.TextWrapper(_WIDTH, head, " " * len(head))
  wrapper.break_long_words = wrapper.break_on_hyphens = False
  return wrapper.fill(text)


def find_vocabulary(
  info: tokenization.TokenizerInfo, *folders: str
) -> str | None:
  """The file that `info` describes, in one of the folders or its parent."""
  for folder in folders:
    for place in (folder, os.path.join(folder, os.pardir)):
      path = os.path.normpath(os.path.join(place, os.path.basename(info.file)))
      if os.path.isfile(path) and file_sha256(path) == info.sha256:
        return path
  return None


def find_encoder(
  info: tokenization.TokenizerInfo | None,
  folder: str,
  vocab_file: str | None,
  spm_model_file: str | None,
) -> tokenization.Encoder | None:
  """The encoder of the given file, else of `find_vocabulary`'s; or None.

  DataError if the file contradicts `info`.
  """
  if info and not (vocab_file or spm_model_file):
    found = find_vocabulary(info, folder)
    is_model = info.kind == "sentencepiece"
    vocab_file, spm_model_file = (None, found) if is_model else (found, None)
  if not (vocab_file or spm_model_file):
    return None
  encoder = tokenization.load_tokenizer(vocab_file, True, spm_model_file)
  sha256 = encoder.info().sha256
  if info and sha256 != info.sha256:
    raise DataError(
      f"{vocab_file or spm_model_file} has SHA-256 {sha256}, but the records "
      f"were made with {info.file} of SHA-256 {info.sha256}: give that file"
    )
  return encoder


def legend(
  features: Features,
  settings: masking.MaskSettings | None,
  encoder: tokenization.Encoder | None,
) -> str:
  """How to read `examples` with the same arguments."""
  key = "{seen|was} is a token to predict, as the model sees it and as it was."
  here = ", here once" if settings else ""
  drawn = f"Masks are drawn when records are read{here}."
  words = "Ids, not words: --vocab_file or --spm_model_file gives their words."
  dynamic = "masked_lm_ids" not in features
  lines = {drawn: dynamic, key: settings or not dynamic, words: not encoder}
  return "\n".join(line for line, wanted in lines.items() if wanted)


def examples(
  paths: Sequence[str],
  features: Features,
  settings: masking.MaskSettings | None,
  encoder: tokenization.Encoder | None,
  pairs: bool = True,
) -> Iterator[str]:
  """The examples of record files as text, up to the first error in each file.

  `settings` draws masks, always the same; without `encoder` ids are shown.
  Examples are `pairs` of segments, or sequences.
  """
  for path in paths:
    try:
      files = tfrecord.RecordSet([path])
      for number in range(len(files)):
        record = read_record(files, number, features)
        if settings:
          record |= _drawn_masks(record, settings, number)
        texts = list(_examples_of_record(record, encoder, pairs))
        for i, text in enumerate(texts, 1):
          place = f", example {i} of {len(texts)}" if len(texts) > 1 else ""
          yield f"{os.path.basename(path)}, record {number}{place}\n{text}"
    except ValueError as e:
      yield f"no more examples of {os.path.basename(path)}: {e}"


def _drawn_masks(
  record: Record, settings: masking.MaskSettings, number: int
) -> dict[str, np.ndarray]:
  batch = {name: values[None] for name, values in record.items()}
  drawn = masking.mask_records(
    batch["input_ids"],
    batch["input_mask"],
    batch["segment_ids"],
    masking.record_keys(0, 0, np.array([number])),
    settings,
    batch.get("is_continuation"),
  )
  return {name: values[0] for name, values in drawn._asdict().items()}


def _examples_of_record(
  record: Record, encoder: tokenization.Encoder | None, pairs: bool
) -> Iterator[str]:
  mask, segments = record["input_mask"], record["segment_ids"]
  was, chosen = original_ids(record)
  texts = _spelled(record["input_ids"], was, chosen, encoder)
  for number in range(1, int(mask.max(initial=0)) + 1):
    here = mask == number
    count = (
      f"  {np.count_nonzero(here)} tokens, "
      f"{np.count_nonzero(mask[chosen] == number)} to predict"
    )
    parts = {"  ": here}
    if pairs:
      count += f"; {_NEXT_SENTENCE[record['next_sentence_labels'][number - 1]]}"
      parts = {f"  {n}: ": here & (segments == i) for i, n in enumerate("AB")}
    lines = [count]
    for name, places in parts.items():
      text = "".join(texts[i] for i in np.flatnonzero(places))
      lines.append(_wrapped(name, text.removeprefix(" ")))
    yield "\n".join(lines)


def original_ids(record: Record) -> tuple[np.ndarray, np.ndarray]:
  """int [S], the tokens before masking; int [n], the places to predict."""
  was, chosen = record["input_ids"].copy(), np.zeros(0, int)
  if "masked_lm_weights" in record:
    used = record["masked_lm_weights"] > 0
    chosen = record["masked_lm_positions"][used]
    was[chosen] = record["masked_lm_ids"][used]
  return was, chosen


def _spelled(
  seen: np.ndarray,
  was: np.ndarray,
  chosen: np.ndarray,
  encoder: tokenization.Encoder | None,
) -> list[str]:
  """Texts of ids [S], {seen|was} at places `chosen`; a space begins a word."""
  spell: Callable[[int], str] = str
  continues, mark = np.zeros(len(was), bool), ""
  if encoder:
    spell = lambda i: encoder.tokens[i] or f"[{i}]"
    continues = encoder.is_continuation[was]
    # A segment may begin inside a word: no word continues [CLS] or [SEP].
    continues[1:] &= ~np.isin(was[:-1], (encoder.cls_id, encoder.sep_id))
    mark = "##" if isinstance(encoder, tokenization.WordPieceEncoder) else ""
  texts = [
    spell(token).removeprefix(mark if joined else _SPACE)
    for token, joined in zip(was, continues, strict=True)
  ]
  for i in chosen:
    texts[i] = f"{{{spell(seen[i])}|{spell(was[i])}}}"
  return [
    text if joined else f" {text}"
    for text, joined in zip(texts, continues, strict=True)
  ]


class Survey(NamedTuple):
  """What was counted in record files."""

  files: int = 0
  records: int = 0  # in these files
  read: int = 0  # records that the following counts are of
  positions: int = 0  # for tokens
  tokens: int = 0  # without padding
  examples: int = 0
  from_elsewhere: int = 0  # examples whose B does not follow A
  to_predict: int = 0  # tokens; 0 without masks

  def plus(self, other: "Survey") -> "Survey":
    return Survey(*map(sum, zip(self, other, strict=True)))

  def describe(self, files: int, pairs: bool = True) -> str:
    """A table for people; `files` counts damaged ones too."""
    share = lambda part, whole: f"{part / max(1, whole):.1%}"
    records = f"{self.records:,} in {self.files} files"
    if self.files < files:
      records += f"; {files - self.files} other files are damaged"
    if self.read < self.records:
      records += f"; the counts below are from {self.read:,} of them"
    fill = f"{share(self.tokens, self.positions)} of the tokens are not padding"
    if self.to_predict:
      fill += f", {share(self.to_predict, self.tokens)} of them to predict"
    examples = f"{self.examples / max(1, self.read):.2f} in a record"
    if pairs:
      random_next = share(self.from_elsewhere, self.examples)
      examples += f"; in {random_next} B is from elsewhere"
    return table({"records": records, "fill": fill, "examples": examples})


def _count(record: Record) -> Survey:
  return Survey(
    read=1,
    positions=len(record["input_mask"]),
    tokens=int(np.count_nonzero(record["input_mask"])),
    examples=int(record["input_mask"].max(initial=0)),
    from_elsewhere=int(np.count_nonzero(record["next_sentence_labels"])),
    to_predict=int(np.count_nonzero(record.get("masked_lm_weights", ()))),
  )


def survey_file(
  path: str,
  info: tfrecord.ShardInfo | None,
  features: Features,
  most: int | None,
) -> Survey | DataError:
  """Verifies a file, or with `most` only samples it, and counts what it holds.

  Returns the first error: raised, it would stop the pool's other files.
  """
  try:
    if not most:
      tfrecord.verify_file(path, info)
    files = tfrecord.RecordSet([path])
    counts, numbers = Survey(files=1, records=len(files)), range(len(files))
    if most and most < len(files):
      numbers = np.linspace(0, len(files) - 1, most).astype(int).tolist()
    for number in numbers:
      counts = counts.plus(_count(read_record(files, number, features)))
    return counts
  except DataError as e:
    return e


def survey(
  paths: Sequence[str],
  infos: Sequence[tfrecord.ShardInfo | None],
  features: Features,
  verify: bool,
  num_workers: int | None,
) -> Survey:
  """The sum of `survey_file` over undamaged files; reports errors on stderr."""
  count = min(num_workers or workers.available_cores(), len(paths))
  most = None if verify else -(-_SURVEYED // len(paths))
  total, done = Survey(), 0.0
  title, size = "verifying" if verify else "sampling", _megabytes(*paths)
  with (
    console.Progress(title, size, "MB") as bar,
    workers.Workers(count if verify else 1) as pool,
  ):
    check = functools.partial(survey_file, features=features, most=most)
    results = pool.map(check, paths, infos)
    for path, result in zip(paths, results, strict=True):
      done += _megabytes(path)
      bar.at(done)
      if isinstance(result, DataError):
        console.tell(f"error: {result}")
      else:
        total = total.plus(result)
  return total


def _megabytes(*paths: str) -> float:
  return sum(map(os.path.getsize, paths)) / 1e6
