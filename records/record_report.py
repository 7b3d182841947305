"""Records for people: as text, how full they are, whether they are damaged.

Tokens to predict are written {seen|was}: as the model sees them, and the
original. So `the {[MASK]|cat} sat {dog|on} the {mat|mat}` has a masked token,
one that a random token replaces and one that stays. Pieces of words in braces
are the vocabulary's: `play{[MASK]|##ing}`.
"""

import functools
import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from common import console, stores
from common.errors import DataError
from common.files import file_sha256
from records import masking, tf_example, tfrecord
from text_encoders import kinds
from text_encoders.base import Encoder, TokenizerInfo
from workers.pool import Pool, available_cores

_WIDTH = 80
_SURVEYED = 1000  # records read from files that are not verified
_MOST_RANDOM = 0.9  # of pairs: half is usual, four fifths for short documents
_NO_NEXT = (
  ": few documents have a next sentence to learn; a blank line is to end a "
  "document only, and --objective=mlm does without pairs"
)
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
  # Other programs' records, with 0 and 1, are the case of one example.
  steps = np.diff(mask, prepend=0)
  length = int(np.count_nonzero(mask))
  # Numbers may go up by 1, and to 0 where the padding begins.
  goes_up = np.isin(steps[:length], (0, 1)).all()
  if not length or mask[length:].any() or not goes_up:
    raise DataError(
      "input_mask is not 1 for the tokens of the first example, 2 for those of "
      "the next and so on, then 0"
    )
  if "masked_lm_weights" in record:
    positions = record["masked_lm_positions"][record["masked_lm_weights"] > 0]
    if np.any(positions >= length):
      raise DataError(f"masked_lm_positions holds {positions.max()}, padding")
    if len(np.unique(positions)) < len(positions):
      raise DataError("masked_lm_positions holds a position twice")


def table(rows: Mapping[str, str]) -> str:
  """Each name with its text, wrapped."""
  return "\n".join([_wrapped(f"  {n:<11} ", rows[n]) for n in rows])


def _wrapped(head: str, text: str) -> str:
  wrapper = textwrap.TextWrapper(_WIDTH, head, " " * len(head))
  wrapper.break_long_words = wrapper.break_on_hyphens = False
  return wrapper.fill(text)


def find_vocabulary(info: TokenizerInfo, *folders: str) -> str | None:
  """The file that `info` describes, in one of the folders or its parent."""
  for folder in folders:
    for parent in (folder, os.path.join(folder, os.pardir)):
      path = os.path.normpath(os.path.join(parent, os.path.basename(info.file)))
      if os.path.isfile(path) and file_sha256(path) == info.sha256:
        return path
  return None


def find_encoder(
  info: TokenizerInfo | None, folder: str, files: dict[str, Any]
) -> Encoder | None:
  """The encoder of `files`, flag -> file, or of `find_vocabulary`, or None."""
  if info and not files:
    path = find_vocabulary(info, folder)
    if path:
      files = {kinds.KINDS[info.kind].flag: path}
  if not files:
    return None
  encoder = kinds.load_tokenizer(**files)
  sha256 = encoder.info().sha256
  if info and sha256 != info.sha256:
    raise DataError(
      f"{encoder.file} has SHA-256 {sha256}, but the records "
      f"were made with {info.file} of SHA-256 {info.sha256}: give that file"
    )
  return encoder


def legend(features: Features, encoder: Encoder | None) -> str:
  """How to read `examples` with the same arguments."""
  lines = [
    "{seen|was} is a token to predict, as the model sees it and as it was."
  ]
  if "masked_lm_ids" not in features:
    drawn = "Masks are drawn when records are read: with a manifest, here once."
    lines.insert(0, drawn)
  if not encoder:
    lines.append(f"Ids, not words: {kinds.VOCABULARY_FLAGS} gives their words.")
  return "\n".join(lines)


def examples(
  paths: Sequence[str],
  features: Features,
  settings: masking.MaskSettings | None,
  encoder: Encoder | None,
  pairs: bool = True,
) -> Iterator[str]:
  """The examples of record files as text, up to the first error in a file."""
  for path in paths:
    shard = os.path.basename(path)
    try:
      files = tfrecord.RecordSet([path])
      for number in range(len(files)):
        record = read_record(files, number, features)
        # Drawn by fixed keys, so a record looks the same each time.
        if settings:
          batch = {name: values[None] for name, values in record.items()}
          keys = masking.record_keys(0, 0, np.array([number]))
          drawn = masking.mask_records(
            batch["input_ids"], batch["input_mask"], batch["segment_ids"], keys,
            settings, batch.get("is_continuation"),
          )  # fmt: skip
          record |= {name: row[0] for name, row in drawn._asdict().items()}
        texts = _examples_of_record(record, encoder, pairs)
        for i, text in enumerate(texts, 1):
          part = f", example {i} of {len(texts)}" if len(texts) > 1 else ""
          yield f"{shard}, record {number}{part}\n{text}"
    except ValueError as e:
      yield f"no more examples of {shard}: {e}"


def _examples_of_record(
  record: Record, encoder: Encoder | None, pairs: bool
) -> list[str]:
  numbers = record["input_mask"]
  was, chosen = original_ids(record)
  texts = _spelled(record["input_ids"], was, chosen, encoder)
  examples = []
  for number in range(1, int(numbers.max(initial=0)) + 1):
    positions = np.flatnonzero(numbers == number)
    predicted = np.count_nonzero(numbers[chosen] == number)
    lines = [f"  {len(positions)} tokens, {predicted} to predict"]
    parts = {"  ": positions}
    if pairs:
      label = record["next_sentence_labels"][number - 1]
      lines[0] += f"; {_NEXT_SENTENCE[label]}"
      is_b = record["segment_ids"][positions] > 0
      parts = {"  A: ": positions[~is_b], "  B: ": positions[is_b]}
    for name, part in parts.items():
      text = "".join(texts[position] for position in part)
      lines.append(_wrapped(name, text.removeprefix(" ")))
    examples.append("\n".join(lines))
  return examples


def original_ids(record: Record) -> tuple[np.ndarray, np.ndarray]:
  """(int [S], the tokens before masking; int [n], positions to predict)."""
  was, chosen = record["input_ids"].copy(), np.zeros(0, int)
  if "masked_lm_weights" in record:
    used = record["masked_lm_weights"] > 0
    chosen = record["masked_lm_positions"][used]
    was[chosen] = record["masked_lm_ids"][used]
  return was, chosen


def _spelled(
  seen: np.ndarray, was: np.ndarray, chosen: np.ndarray, encoder: Encoder | None
) -> list[str]:
  """Texts of ids [S], {seen|was} at positions `chosen`."""
  if encoder is None:
    vocabulary: Callable[[int], str] = str
    joined = np.zeros(len(was), bool)
  else:
    vocabulary = encoder.texts.__getitem__
    joined = encoder.is_continuation[was]
    # A segment may begin inside a word: no word continues [CLS] or [SEP].
    joined[1:] &= ~np.isin(was[:-1], (encoder.cls_id, encoder.sep_id))
  is_chosen = np.isin(np.arange(len(was)), chosen)
  texts = []
  for position, token in enumerate(was):
    text = vocabulary(token)
    # A token at the start of a segment keeps the mark of one that goes on.
    if encoder and joined[position] != encoder.marks_spaces:
      text = text.removeprefix(encoder.mark)
    if is_chosen[position]:
      shown = vocabulary(seen[position]).strip()
      text = f"{{{shown}|{vocabulary(token).strip()}}}"
    # A space begins a word.
    texts.append(text if joined[position] else f" {text}")
  return texts


def survey_file(
  path: str, info: tfrecord.ShardInfo | None, features: Features, most: int
) -> Counter | DataError:
  """Counts what a sample of `most` records holds; 0: the file, verified."""
  try:
    if not most:
      tfrecord.verify_file(path, info)
    files = tfrecord.RecordSet([path])
    # A sample is spread evenly over the file.
    numbers: Sequence[int] = range(len(files))
    if most and most < len(files):
      numbers = np.linspace(0, len(files) - 1, most).astype(int).tolist()
    counts = Counter(files=1, records=len(files), read=len(numbers))
    for number in numbers:
      record = read_record(files, number, features)
      mask, labels = record["input_mask"], record["next_sentence_labels"]
      weights = record.get("masked_lm_weights", np.zeros(0))
      counts["positions"] += len(mask)
      counts["tokens"] += int((mask > 0).sum())
      counts["examples"] += int(mask.max())
      counts["from elsewhere"] += int(labels.sum())
      counts["to predict"] += int(weights.sum())
    return counts
  except DataError as e:
    return e  # raised, it would stop the pool's other files


def survey(
  paths: Sequence[str],
  infos: Sequence[tfrecord.ShardInfo | None],
  features: Features,
  verify: bool,
  num_workers: int | None,
) -> Counter:
  """The sum of `survey_file` over undamaged files; reports errors on stderr."""
  count = min(num_workers or available_cores(), len(paths))
  most = 0 if verify else math.ceil(_SURVEYED / len(paths))
  megabytes = [stores.at(path).state()[0] / 1e6 for path in paths]
  total: Counter = Counter()
  done = 0.0
  title = "verifying" if verify else "sampling"
  # A sample is so small that starting processes would take longer.
  with (
    console.Progress(title, sum(megabytes), "MB") as bar,
    Pool(count if verify else 1) as pool,
  ):
    check = functools.partial(survey_file, features=features, most=most)
    results = pool.map(check, paths, infos)
    for size, result in zip(megabytes, results, strict=True):
      done += size
      bar.at(done)
      if isinstance(result, DataError):
        console.tell(f"error: {result}")
      else:
        total += result
  return total


def next_sentences(random: int, examples: int) -> str:
  """The share of pairs whose B is `random`, and what a too large one means."""
  share = random / max(1, examples)
  return f"{share:.1%}{_NO_NEXT if share > _MOST_RANDOM else ''}"


def describe(counts: Counter, files: int, pairs: bool) -> str:
  """A table of a `survey` of so many files, damaged ones too."""

  def share(part, whole):
    return f"{counts[part] / max(1, counts[whole]):.1%}"

  files_read = console.counted(counts["files"], "file")
  records = f"{counts['records']:,} in {files_read}"
  if counts["files"] < files:
    records += f"; {files - counts['files']} other files are damaged"
  if counts["read"] < counts["records"]:
    records += f"; the counts below are from {counts['read']:,} of them"
  fill = f"{share('tokens', 'positions')} of the tokens are not padding"
  if counts["to predict"]:
    fill += f", {share('to predict', 'tokens')} of them to predict"
  examples = f"{counts['examples'] / max(1, counts['read']):.2f} in a record"
  if pairs:
    random_next = next_sentences(counts["from elsewhere"], counts["examples"])
    examples += f"; B is from elsewhere in {random_next}"
  return table({"records": records, "fill": fill, "examples": examples})
