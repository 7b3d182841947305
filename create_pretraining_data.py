"""Text to pre-training records: masked LM and next-sentence examples.

  python create_pretraining_data.py --input_file='corpus/train*.txt' \\
      --output_file=records/train.tfrecord --vocab_file=vocab.txt \\
      --num_shards=4

writes records/train-00000-of-00004.tfrecord ... with an index beside each, and
records/train.manifest.json. Flags, instances and masks are google/bert's.

Two passes, each over worker processes: text to token files (corpus.py), then
token files to shards (shards.py). The bytes are the same for any number of
workers. Everything is made in a scratch folder beside the output and moved
when it is whole.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

import tqdm
from absl import flags

import corpus
import errors
import records
import shards
import tfrecord
import tokenization

_DEFAULT_SHARD_BYTES = 16 << 20  # of records, about; also a worker's memory
_MAX_DEFAULT_SHARDS = 4096
_PROGRESS_SECONDS = 5  # between lines where stderr is no terminal


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to make of which text; the names are the flags'."""

  input_file: str
  output_file: str
  vocab_file: str | None = None
  spm_model_file: str | None = None
  do_lower_case: bool = True
  do_whole_word_mask: bool = False
  max_seq_length: int = 128
  max_predictions_per_seq: int = 20
  random_seed: int = 12345
  dupe_factor: int | None = None  # None: 10, or 1 with dynamic masks
  masked_lm_prob: float = 0.15
  short_seq_prob: float = 0.1
  examples_per_record: int = 1
  dynamic_masks: bool = False
  num_shards: int | None = None  # None: by the size of the corpus
  num_workers: int | None = None  # None: all cores; never decides the bytes

  def __post_init__(self):
    if self.dupe_factor is None:
      object.__setattr__(self, "dupe_factor", 1 if self.dynamic_masks else 10)
    self._check(self.max_seq_length >= 8, "max_seq_length", "at least 8")
    self._check(
      1 <= self.max_predictions_per_seq <= self.max_seq_length,
      "max_predictions_per_seq",
      f"1 to max_seq_length ({self.max_seq_length})",
    )
    self._check(self.random_seed >= 0, "random_seed", "at least 0")
    self._check(self.dupe_factor >= 1, "dupe_factor", "at least 1")
    self._check(0 < self.masked_lm_prob < 1, "masked_lm_prob", "in (0, 1)")
    self._check(0 <= self.short_seq_prob <= 1, "short_seq_prob", "in [0, 1]")
    self._check(
      self.examples_per_record >= 1, "examples_per_record", "at least 1"
    )
    for name in ("num_shards", "num_workers"):
      value = getattr(self, name)
      self._check(value is None or value >= 1, name, "at least 1")
    paths = self.output_paths
    self._check(bool(paths), "output_file", "a file name")
    self._check(
      len(set(paths)) == len(paths)
      and len({os.path.dirname(os.path.abspath(p)) for p in paths}) == 1,
      "output_file",
      "different files of one folder, because one manifest describes them",
    )
    if len(paths) > 1:
      self._check(
        self.num_shards in (None, len(paths)),
        "num_shards",
        f"left out or {len(paths)}, the number of files in --output_file",
      )

  def _check(self, ok: bool, name: str, want: str) -> None:
    if not ok:
      raise records.DataError(f"--{name}={getattr(self, name)}: must be {want}")

  @property
  def examples(self) -> shards.ExampleSettings:
    """Those that decide the examples."""
    names = [f.name for f in dataclasses.fields(shards.ExampleSettings)]
    return shards.ExampleSettings(**{n: getattr(self, n) for n in names})

  @property
  def output_paths(self) -> list[str]:
    """The names in --output_file."""
    return [p.strip() for p in self.output_file.split(",") if p.strip()]

  @property
  def folder(self) -> str:
    return os.path.dirname(self.output_paths[0]) or "."

  @property
  def manifest_path(self) -> str:
    stem = os.path.splitext(self.output_paths[0])[0]
    return stem + records.MANIFEST_SUFFIX

  def shard_names(self, num_shards: int) -> list[str]:
    """File names without folder: those given, or NAME-00000-of-00004.EXT."""
    names = [os.path.basename(p) for p in self.output_paths]
    if len(names) == num_shards:
      return names
    stem, extension = os.path.splitext(names[0])
    return [
      f"{stem}-{i:05d}-of-{num_shards:05d}{extension}"
      for i in range(num_shards)
    ]


class Summary(dict):
  """The manifest's counts, and `seconds` by stage beside them."""

  manifest: records.Manifest
  manifest_path: str
  seconds: dict[str, float]


# -----------------------------------------------------------------------------
# Progress and workers
# -----------------------------------------------------------------------------


class _Progress:
  """A bar on a terminal, a line every few seconds elsewhere, on stderr."""

  def __init__(self, title: str, total: int | None, unit: str):
    self._bar = tqdm.tqdm(
      desc=title,
      total=total,
      unit=unit,
      unit_scale=True,
      disable=not sys.stderr.isatty(),
      leave=False,
    )
    self._title, self._total, self._unit = title, total, unit
    self._done, self._start = 0, time.monotonic()
    self._next_line = self._start + _PROGRESS_SECONDS

  def add(self, amount: int) -> None:
    self._bar.update(amount)
    self._done += amount
    now = time.monotonic()
    if self._bar.disable and now >= self._next_line:
      self._next_line = now + _PROGRESS_SECONDS
      rate = self._done / (now - self._start)
      of = f" of {self._total:,}" if self._total else ""
      print(
        f"{self._title}: {self._done:,}{of} {self._unit}, {rate:,.0f}/s",
        file=sys.stderr,
        flush=True,
      )

  def close(self) -> None:
    self._bar.close()


def available_cores() -> int:
  """Cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


@contextlib.contextmanager
def _workers(num_workers: int) -> Iterator[Callable[..., Iterator]]:
  """A `map` over processes whose results come in order; a plain one for 1."""
  if num_workers == 1:
    yield map
    return
  # Not fork: the caller may have threads (TensorFlow's), which fork breaks.
  context = multiprocessing.get_context("spawn")
  try:
    with concurrent.futures.ProcessPoolExecutor(num_workers, context) as pool:
      yield pool.map
  except concurrent.futures.process.BrokenProcessPool as e:
    raise records.DataError(
      "a worker process died, most likely for lack of memory: give fewer "
      "--num_workers or more --num_shards"
    ) from e


def default_num_shards(counts: corpus.CorpusCounts, settings: Settings) -> int:
  """Shards of about 16 MB, by the corpus and the settings alone."""
  examples = settings.dupe_factor * (
    counts.documents + counts.tokens // settings.max_seq_length
  )
  # Ids take two bytes, mask and segment one, a prediction eight.
  example_bytes = (
    4 * settings.max_seq_length + 8 * settings.max_predictions_per_seq + 200
  )
  wanted = -(-examples * example_bytes // _DEFAULT_SHARD_BYTES)
  return min(max(1, wanted), counts.documents, _MAX_DEFAULT_SHARDS)


# -----------------------------------------------------------------------------
# The whole
# -----------------------------------------------------------------------------


def create(settings: Settings) -> Summary:
  """Makes the records, their indexes and the manifest.

  Args:
    settings: validated by its constructor.

  Returns:
    The manifest's counts, with the manifest and the time of each stage.

  Raises:
    DataError: the input or the tokenizer does not do; nothing is left behind,
      and records that were there before are untouched.
  """
  start = time.monotonic()
  paths = records.expand_patterns(settings.input_file)
  _check_apart(paths, settings)
  pieces = corpus.split_into_pieces(paths)
  tokenizer, info = _load_tokenizer(settings)
  os.makedirs(settings.folder, exist_ok=True)
  with tempfile.TemporaryDirectory(
    prefix=".create_pretraining_data-", dir=settings.folder
  ) as scratch:
    # One pool for both passes: its workers keep the tokenizer.
    with _workers(settings.num_workers or available_cores()) as parallel:
      counts = _first_pass(pieces, scratch, tokenizer, parallel)
      tokenized = time.monotonic()
      results = _second_pass(settings, scratch, tokenizer, counts, parallel)
    manifest = _manifest(settings, info, counts, results)
    _publish(settings, scratch, manifest)
  summary = Summary(manifest.counts)
  summary.manifest, summary.manifest_path = manifest, settings.manifest_path
  summary.seconds = {
    "tokenizing": tokenized - start,
    "making examples": time.monotonic() - tokenized,
  }
  return summary


def _check_apart(paths: Iterable[str], settings: Settings) -> None:
  outputs = {os.path.abspath(p) for p in settings.output_paths}
  for path in paths:
    if os.path.abspath(path) in outputs:
      raise records.DataError(f"{path} is both --input_file and --output_file")


def _load_tokenizer(settings: Settings):
  """(spec, info) of the tokenizer; loads it, so that it fails early."""
  file = settings.vocab_file or settings.spm_model_file
  spec = corpus.TokenizerSpec(
    vocab_file=settings.vocab_file,
    spm_model_file=settings.spm_model_file,
    do_lower_case=settings.do_lower_case,
    sha256=tfrecord.file_sha256(file) if file and os.path.isfile(file) else "",
  )
  return spec, corpus.load_tokenizer(spec).info()


def _first_pass(
  pieces: list[corpus.Piece],
  scratch: str,
  tokenizer: corpus.TokenizerSpec,
  parallel: Callable[..., Iterator],
) -> corpus.CorpusCounts:
  """Text to the token store in `scratch`."""
  known = all(piece.end is not None for piece in pieces)
  total = sum(p.end - p.start for p in pieces) if known else None
  progress = _Progress("tokenizing", total, "B")
  files = [
    os.path.join(scratch, f"piece-{i:06d}.i32") for i in range(len(pieces))
  ]
  counts = corpus.write_store(
    scratch,
    parallel(corpus.tokenize_piece, pieces, files, [tokenizer] * len(pieces)),
    corpus.load_tokenizer(tokenizer).unk_id,
    lambda piece: progress.add(piece.bytes),
  )
  progress.close()
  if counts.documents < 2:
    raise records.DataError(
      f"the input is one document of {counts.sentences} sentences, but half of "
      "the examples need a sentence of another document: put a blank line "
      "between documents (the end of a file does not separate them)"
    )
  return counts


def _second_pass(
  settings: Settings,
  scratch: str,
  tokenizer: corpus.TokenizerSpec,
  counts: corpus.CorpusCounts,
  parallel: Callable[..., Iterator],
) -> list[shards.ShardResult]:
  """The token store to shards, in `scratch` under their final names."""
  num_shards = settings.num_shards or len(settings.output_paths)
  if not settings.num_shards and num_shards == 1:
    num_shards = default_num_shards(counts, settings)
  shards.write_order(scratch, counts.documents, settings.random_seed)
  tasks = [
    shards.ShardTask(
      store=scratch,
      path=os.path.join(scratch, name),
      shard=i,
      num_shards=num_shards,
      settings=settings.examples,
      tokenizer=tokenizer,
    )
    for i, name in enumerate(settings.shard_names(num_shards))
  ]
  progress = _Progress("making examples", None, "examples")
  results = []
  for result in parallel(shards.build_shard, tasks):
    results.append(result)
    progress.add(result.examples)
  progress.close()
  return results


def _manifest(
  settings: Settings,
  info: tokenization.TokenizerInfo,
  counts: corpus.CorpusCounts,
  results: list[shards.ShardResult],
) -> records.Manifest:
  return records.Manifest(
    max_seq_length=settings.max_seq_length,
    max_predictions_per_seq=settings.max_predictions_per_seq,
    examples_per_record=settings.examples_per_record,
    masking="dynamic" if settings.dynamic_masks else "static",
    tokenizer=info,
    settings={
      **dataclasses.asdict(settings.examples),
      "num_shards": len(results),
    },
    counts={
      **dataclasses.asdict(counts),
      "examples": sum(s.examples for s in results),
      "real_tokens": sum(s.real_tokens for s in results),
      "masked_tokens": sum(s.masked_tokens for s in results),
      "random_next": sum(s.random_next for s in results),
    },
    files=tuple(s.info for s in results),
  )


def _publish(
  settings: Settings, scratch: str, manifest: records.Manifest
) -> None:
  """Moves the finished files to their places; the manifest comes last.

  Files that an earlier manifest of this name lists go first: a glob would
  take what is left of another number of shards for part of this data set.
  """
  with contextlib.suppress(records.DataError):  # none, or not ours to read
    for old in records.Manifest.load(settings.manifest_path).files:
      path = os.path.join(settings.folder, os.path.basename(old.name))
      for stale in (path, path + tfrecord.INDEX_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
          os.unlink(stale)
  with contextlib.suppress(FileNotFoundError):
    os.unlink(settings.manifest_path)
  for info in manifest.files:
    for suffix in (tfrecord.INDEX_SUFFIX, ""):
      name = info.name + suffix
      os.replace(
        os.path.join(scratch, name), os.path.join(settings.folder, name)
      )
  manifest.save(settings.manifest_path)


def report(summary: Summary) -> str:
  """The closing table."""
  c, manifest = summary, summary.manifest
  num_records = sum(info.records for info in manifest.files)
  capacity = num_records * manifest.max_seq_length
  is_static = manifest.masking == "static"
  masked = f"{c['masked_tokens']:,}" if is_static else "drawn on reading"
  total = sum(summary.seconds.values())
  rows = [
    ("documents", f"{c['documents']:,}"),
    ("sentences", f"{c['sentences']:,}"),
    ("tokens", f"{c['tokens']:,}"),
    ("unknown tokens", f"{c['unknown_tokens'] / c['tokens']:.3%}"),
    ("unigram entropy", f"{c['unigram_entropy']:.3f} nats"),
    ("examples", f"{c['examples']:,}"),
    ("records", f"{num_records:,} of {manifest.packing_factor:.2f} examples"),
    ("random next", f"{c['random_next'] / c['examples']:.1%}"),
    ("masked tokens", masked),
    ("fill", f"{c['real_tokens'] / capacity:.1%} of tokens are no padding"),
    *((name, f"{s:.1f} s") for name, s in summary.seconds.items()),
    ("speed", f"{c['text_bytes'] / 1e6 / total:.2f} MB of text/s"),
    ("files", f"{len(manifest.files)}, {manifest.files[0].name} ..."),
    ("manifest", summary.manifest_path),
  ]
  if c["bad_lines"]:
    rows.insert(
      3, ("not UTF-8", f"bytes dropped from {c['bad_lines']:,} lines")
    )
  return "\n".join(f"{name:<16} {value}" for name, value in rows)


def define_flags() -> None:
  flags.DEFINE_string(
    "input_file",
    None,
    "Text, one sentence a line and a blank line between documents, plain or "
    ".gz: names and globs, comma-separated. The end of a file does not end a "
    "document.",
    required=True,
  )
  flags.DEFINE_string(
    "output_file",
    None,
    "Record file to write. With several shards NAME.EXT becomes "
    "NAME-00000-of-00004.EXT ...; a comma-separated list gives exact names.",
    required=True,
  )
  flags.DEFINE_string("vocab_file", None, "WordPiece vocabulary (vocab.txt).")
  flags.DEFINE_string(
    "spm_model_file", None, "SentencePiece model, instead of --vocab_file."
  )
  flags.DEFINE_bool(
    "do_lower_case",
    True,
    "Whether to lower-case the text: True for an uncased vocabulary.",
  )
  flags.DEFINE_bool(
    "do_whole_word_mask", False, "Mask whole words instead of single pieces."
  )
  flags.DEFINE_integer("max_seq_length", 128, "Tokens of a record at most.")
  flags.DEFINE_integer(
    "max_predictions_per_seq", 20, "Masked tokens of a record at most."
  )
  flags.DEFINE_integer(
    "examples_per_record",
    1,
    "Examples that share a record at most, so that training spends no time on "
    "padding; 1: not packed, as google/bert's scripts read it.",
  )
  flags.DEFINE_integer("random_seed", 12345, "Decides all that is random.")
  flags.DEFINE_integer(
    "dupe_factor",
    None,
    "Copies of each document, each cut and masked in its own way. Default: 10, "
    "or 1 with --dynamic_masks.",
  )
  flags.DEFINE_float("masked_lm_prob", 0.15, "Share of tokens to mask.")
  flags.DEFINE_float(
    "short_seq_prob", 0.1, "Share of documents cut into shorter examples."
  )
  flags.DEFINE_bool(
    "dynamic_masks",
    False,
    "Leave the masks to training, which draws new ones each epoch.",
  )
  flags.DEFINE_integer(
    "num_shards", None, "Files to write. Default: one for about 16 MB."
  )
  flags.DEFINE_integer(
    "num_workers",
    None,
    "Processes. Default: all cores. The records are the same for any number.",
  )


def _stop(signal_number, _) -> None:
  # As an exception, so that the scratch folder is removed.
  sys.exit(f"create_pretraining_data.py: stopped by signal {signal_number}")


def main(_) -> None:
  signal.signal(signal.SIGTERM, _stop)
  names = [field.name for field in dataclasses.fields(Settings)]
  settings = Settings(**{name: flags.FLAGS[name].value for name in names})
  print(report(create(settings)))


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
