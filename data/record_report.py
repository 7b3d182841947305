"""Records for people: their words, how full they are, whether they are whole.

Tokens to predict are written {seen|was}: as the model sees them and as they
were. So `the {[MASK]|cat} sat {dog|on} the {mat|mat}` has a masked token, one
that a random token replaces and one that stays. In braces pieces of words are
as in the vocabulary: `play{[MASK]|##ing}`.
"""

import itertools
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

import tokenization
from common import console
from common.errors import DataError
from data import masking, tf_example, tfrecord, workers

_WIDTH = 80
_SAMPLE_RECORDS = 1000  # of files that are not verified
_SPACE = tokenization.SENTENCEPIECE_SPACE
_NEXT_SENTENCE = ("B follows A", "B is from elsewhere")  # by label

Record = Mapping[str, np.ndarray]  # name -> values, see `records`
Features = Mapping[str, tf_example.Feature]  # what they must be


def read_record(
  files: tfrecord.RecordSet, number: int, features: Features
) -> dict[str, np.ndarray]:
  """The values of a record, checked.

  Raises:
    DataError: it is damaged or of another shape; with file, record and byte.
  """
  data = files.read(number)
  try:
    record = tf_example.decode_example(data)
    tf_example.check_example(record, features)
    check_places(record)
  except DataError as e:
    raise DataError(
      f"{files.where(number)}: {e}. It is damaged or of another data set: copy "
      "or make the file again."
    ) from e
  return record


def check_places(record: Record) -> None:
  """Checks what values of a record say of each other.

  Raises:
    DataError: examples are not one after another, numbered from 1, with
      padding at the end; or a token to predict is padding or there twice.
  """
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
    places = record["masked_lm_positions"][used]
    if np.any(places >= length):
      raise DataError(f"masked_lm_positions holds {places.max()}, padding")
    if len(np.unique(places)) < len(places):
      raise DataError("masked_lm_positions has a place twice")


def table(rows: Mapping[str, str]) -> str:
  """Names and what is to be said of each, in lines."""
  return "\n".join(
    _wrapped(f"  {name:<11} ", text) for name, text in rows.items()
  )


def _wrapped(head: str, text: str) -> str:
  return textwrap.fill(
    text,
    _WIDTH,
    initial_indent=head,
    subsequent_indent=" " * len(head),
    break_long_words=False,
    break_on_hyphens=False,
  )


# -----------------------------------------------------------------------------
# Examples as text
# -----------------------------------------------------------------------------


def find_vocabulary(
  info: tokenization.TokenizerInfo, *folders: str
) -> str | None:
  """The file that `info` is of, in one of the folders or the one above it."""
  for folder in folders:
    for place in (folder, os.path.join(folder, os.pardir)):
      path = os.path.normpath(os.path.join(place, os.path.basename(info.file)))
      if os.path.isfile(path) and tfrecord.file_sha256(path) == info.sha256:
        return path
  return None


def find_encoder(
  info: tokenization.TokenizerInfo | None,
  folder: str,
  vocab_file: str | None,
  spm_model_file: str | None,
) -> tokenization.Encoder | None:
  """The encoder of the file given, or of that near the records.

  Args:
    info: what the manifest says of it, if there is one.
    folder: where the records are; that file is looked for there and above.
    vocab_file, spm_model_file: one of them, or neither.

  Returns:
    The encoder; None if no file is given and none is found.

  Raises:
    DataError: the file given does not do, or is another than `info` says.
  """
  if info and not vocab_file and not spm_model_file:
    found = find_vocabulary(info, folder)
    if info.kind == "sentencepiece":
      spm_model_file = found
    else:
      vocab_file = found
  if not vocab_file and not spm_model_file:
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
  """How to read `examples` of the same arguments."""
  key = "{seen|was} is a token to predict, as the model sees it and as it was."
  drawn = "Masks are drawn on reading" + (", here once." if settings else ".")
  words = "Ids, not words: --vocab_file or --spm_model_file says their words."
  dynamic = "masked_lm_ids" not in features
  lines = {drawn: dynamic, key: settings or not dynamic, words: not encoder}
  return "\n".join(line for line, wanted in lines.items() if wanted)


def examples(
  paths: Sequence[str],
  features: Features,
  settings: masking.MaskSettings | None,
  encoder: tokenization.Encoder | None,
) -> Iterator[str]:
  """The examples of record files as text, one after another.

  Args:
    paths: the files. Of a damaged one there are the examples before the
      damage, then what is wrong.
    features: of every record.
    settings: (optional) draws masks, as an evaluation does.
    encoder: whose tokens they are; None writes ids.
  """
  for path in paths:
    try:
      files = tfrecord.RecordSet([path])
      for number in range(len(files)):
        record = read_record(files, number, features)
        if settings:
          record = _with_drawn_masks(record, settings, number)
        texts = list(_examples_of_record(record, encoder))
        for i, text in enumerate(texts, 1):
          place = f", example {i} of {len(texts)}" if len(texts) > 1 else ""
          yield f"{os.path.basename(path)}, record {number}{place}\n{text}"
    except ValueError as e:
      yield f"no more examples of {os.path.basename(path)}: {e}"


def _with_drawn_masks(
  record: Record, settings: masking.MaskSettings, number: int
) -> Record:
  tokens = ("input_ids", "input_mask", "segment_ids")
  continuation = record.get("is_continuation")
  drawn = masking.mask_records(
    *(record[name][None] for name in tokens),
    masking.record_keys(0, 0, np.array([number])),
    settings,
    None if continuation is None else continuation[None],
  )
  return {
    **record,
    "input_ids": drawn.input_ids[0],
    "masked_lm_positions": drawn.positions[0],
    "masked_lm_ids": drawn.labels[0],
    "masked_lm_weights": drawn.weights[0],
  }


def _examples_of_record(
  record: Record, encoder: tokenization.Encoder | None
) -> Iterator[str]:
  mask, segments = record["input_mask"], record["segment_ids"]
  was, chosen = record["input_ids"].copy(), np.zeros(0, int)
  if "masked_lm_weights" in record:
    used = record["masked_lm_weights"] > 0
    chosen = record["masked_lm_positions"][used]
    was[chosen] = record["masked_lm_ids"][used]
  texts, goes_on = _spelled(record["input_ids"], was, chosen, encoder)
  for number in range(1, int(mask.max(initial=0)) + 1):
    label = record["next_sentence_labels"][number - 1]
    lines = [
      f"  {np.count_nonzero(mask == number)} tokens, "
      f"{np.count_nonzero(mask[chosen] == number)} to predict; "
      f"{_NEXT_SENTENCE[label]}"
    ]
    for segment, name in enumerate("AB"):
      words = []
      for place in np.flatnonzero((mask == number) & (segments == segment)):
        if goes_on[place] and words:
          words[-1] += texts[place]
        else:
          words.append(texts[place])
      lines.append(_wrapped(f"  {name}: ", " ".join(words)))
    yield "\n".join(lines)


def _spelled(
  seen: np.ndarray,
  was: np.ndarray,
  chosen: np.ndarray,
  encoder: tokenization.Encoder | None,
) -> tuple[list[str], np.ndarray]:
  """Of each place its text and whether that goes on with the word before.

  Args:
    seen: int [S], ids that the model sees.
    was: int [S], ids that stood there.
    chosen: int [n], places of tokens to predict.
    encoder: whose ids they are, or None.
  """
  if encoder is None:
    spell, goes_on, mark = str, np.zeros(len(was), bool), ""
  else:
    spell = lambda i: encoder.tokens[i] or f"[{i}]"
    goes_on = encoder.is_continuation[was]
    # A segment may begin inside of a word, which its [CLS] or [SEP] is not.
    goes_on[1:] &= ~np.isin(was[:-1], (encoder.cls_id, encoder.sep_id))
    mark = "##" if isinstance(encoder, tokenization.WordPieceEncoder) else ""
  texts = [
    spell(token).removeprefix(mark if joined else _SPACE)
    for token, joined in zip(was, goes_on, strict=True)
  ]
  for place in chosen:
    texts[place] = f"{{{spell(seen[place])}|{spell(was[place])}}}"
  return texts, goes_on


# -----------------------------------------------------------------------------
# All records
# -----------------------------------------------------------------------------


class Survey(NamedTuple):
  """What was counted in records."""

  files: int = 0
  records: int = 0  # in these files
  read: int = 0  # of these records; the rest is of them
  places: int = 0  # for tokens
  tokens: int = 0  # that are no padding
  examples: int = 0
  from_elsewhere: int = 0  # examples whose B does not follow A
  to_predict: int = 0  # tokens; 0 without masks

  def plus(self, other: "Survey") -> "Survey":
    return Survey(*map(sum, zip(self, other, strict=True)))

  def describe(self, files: int) -> str:
    """For people, in lines; `files` were to be read."""
    share = lambda part, whole: f"{part / max(1, whole):.1%}"
    records = f"{self.records:,} in {self.files} files"
    if self.files < files:
      records += f"; {files - self.files} other files are damaged"
    if self.read < self.records:
      records += f"; what follows is of {self.read:,} of them"
    fill = f"{share(self.tokens, self.places)} of the tokens are no padding"
    if self.to_predict:
      fill += f", {share(self.to_predict, self.tokens)} of them to predict"
    examples = f"{self.examples / max(1, self.read):.2f} in a record; in "
    examples += (
      f"{share(self.from_elsewhere, self.examples)} B is from elsewhere"
    )
    return table({"records": records, "fill": fill, "examples": examples})


def _count(record: Record) -> Survey:
  return Survey(
    read=1,
    places=len(record["input_mask"]),
    tokens=np.count_nonzero(record["input_mask"]),
    examples=int(record["input_mask"].max(initial=0)),
    from_elsewhere=np.count_nonzero(record["next_sentence_labels"]),
    to_predict=np.count_nonzero(record.get("masked_lm_weights", ())),
  )


def survey_file(
  path: str,
  info: tfrecord.ShardInfo | None,
  features: Features,
  sample: int | None,
) -> Survey | DataError:
  """Verifies a record file and counts what is in it.

  Args:
    path: the file.
    info: what the manifest says of it, if there is one.
    features: of every record.
    sample: (optional) read only so many records, and verify no others.

  Returns:
    The counts, or the first error. (It is not raised: in a pool of workers the
    other files must go on.)
  """
  try:
    if not sample:
      tfrecord.verify_file(path, info)
    files = tfrecord.RecordSet([path])
    counts, numbers = Survey(files=1, records=len(files)), range(len(files))
    if sample and sample < len(files):
      numbers = np.linspace(0, len(files) - 1, sample).astype(int).tolist()
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
  """`survey_file` of all, with a bar; errors are told on stderr.

  Args:
    paths, infos: of each file.
    features: of every record.
    verify: read all records, not a sample.
    num_workers: processes; None: all cores.

  Returns:
    Of the files without an error.
  """
  count = min(num_workers or workers.available_cores(), len(paths))
  sample = None if verify else -(-_SAMPLE_RECORDS // len(paths))
  total, done = Survey(), 0.0
  title, size = "verifying" if verify else "sampling", _megabytes(*paths)
  with (
    console.Progress(title, size, "MB") as bar,
    workers.Workers(count if verify else 1) as pool,
  ):
    results = pool.map(
      survey_file,
      paths,
      infos,
      itertools.repeat(features),
      itertools.repeat(sample),
    )
    for path, result in zip(paths, results, strict=True):
      done += _megabytes(path)
      bar.at(done)
      if isinstance(result, DataError):
        bar.say(f"error: {result}")
      else:
        total = total.plus(result)
  return total


def _megabytes(*paths: str) -> float:
  return sum(map(os.path.getsize, paths)) / 1e6
