"""The work of create_pretraining_data.py: text to records.

Worker processes and ranks share two passes: text to the token store
(corpus.py), then the store to shards (shards.py). Both write to a folder beside
the output (work_dir.py); complete files move to their places together.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import time

import tokenization
from common import console, errors
from common.files import naming
from data import (
  corpus,
  records,
  shards,
  text_files,
  tfrecord,
  tokenizer_files,
  work_dir,
  workers,
)
from data.creation_settings import Settings

_BLOCK_BYTES = 16 << 20  # about, of the records that a worker holds at a time
_MAX_DEFAULT_SHARDS = 4096
_SHARDS = "shards"  # the folder of those that are being made
# 1 cut chunks of JSON lines elsewhere; 2 had no `parts`, 3 no `letters`.
_PLAN_VERSION = 4


@dataclasses.dataclass(frozen=True)
class Summary:
  """What was made, where, and how long it took."""

  manifest: records.Manifest
  manifest_path: str
  seconds: dict[str, float]  # by stage
  kept: str  # what an earlier start had finished


def create(
  settings: Settings, ranks: work_dir.Ranks = work_dir.ALONE
) -> Summary | None:
  """Makes the records, their indexes and the manifest; every rank calls it.

  Rank 0 gets the summary, the others None, and they may finish earlier. A
  DataError leaves existing records as they are and no unfinished work.
  """
  start = time.monotonic()
  paths = records.expand_patterns(settings.input_file)
  claim(settings, paths, settings.given_shards)
  states = [_state(path) for path in paths]
  pieces = text_files.split_into_pieces(paths, settings.text)
  tokenizer, info = _load_tokenizer(settings, ranks)
  settings = dataclasses.replace(settings, do_lower_case=info.do_lower_case)
  # All that decides the bytes: the same plan resumes.
  plan = dataclasses.asdict(settings) | {
    "files": states,
    "tokenizer": dataclasses.asdict(info),
    "version": _PLAN_VERSION,
  }
  del plan["num_workers"]
  cores = max(1, workers.available_cores() // ranks.local_size)
  os.makedirs(settings.folder, exist_ok=True)
  with (
    work_dir.work_folder(settings.work_folder, plan, ranks) as folder,
    # One pool for both passes: its workers keep the tokenizer.
    workers.Workers(settings.num_workers or cores) as pool,
  ):
    work = _Work(settings, folder, ranks, pool, tokenizer)
    counts, kept_bytes = work.tokenize(pieces)
    for path, state in zip(paths, states, strict=True):
      if _state(path) != state:
        raise errors.DataError(
          f"{path} was changed while it was read: start again when it is whole"
        )
    tokenized = time.monotonic()
    # The corpus may have decided how many shards there are.
    claim(settings, paths, _num_shards(counts, settings))
    results, kept_shards = work.make_shards(counts)
    if ranks.rank:
      return None
    made = time.monotonic()
    manifest = _manifest(settings, info, counts, results)
    # Making shards takes hours: others may have come meanwhile.
    earlier = claim(settings, paths, len(results))
    _publish(settings, os.path.join(folder, _SHARDS), manifest, earlier)
  seconds = {
    "tokenizing": tokenized - start,
    "making examples": made - tokenized,
    "moving files": time.monotonic() - made,
  }
  kept = ""
  if kept_bytes or kept_shards:
    kept = (
      f"{kept_bytes / 1e6:,.1f} MB of text tokenized and {kept_shards} of "
      f"{len(results)} shards made before"
    )
  return Summary(manifest, settings.manifest_path, seconds, kept)


def _state(path: str) -> list:
  """[path, bytes, nanoseconds of the last change]."""
  status = os.stat(path)
  return [path, status.st_size, status.st_mtime_ns]


def claim(
  settings: Settings, inputs: list[str], num_shards: int | None
) -> records.Manifest | None:
  """The data set's earlier manifest, if all that we shall write is ours.

  UserError if a file of ours is an input, a folder or another data set's. None
  as `num_shards`: the corpus decides.
  """
  flag = f"--output_file={settings.output_file}"
  names, earlier = settings.shard_names(num_shards), None
  outputs = [os.path.join(settings.folder, name) for name in names]
  records.check_not_written(inputs, "--input_file", *outputs)
  for name, path in tokenizer_files.named(settings).items():
    records.check_not_written([path], f"--{name}", *outputs)
  try:
    owners = records.find_manifests(outputs)
    if os.path.exists(settings.manifest_path):
      earlier = records.Manifest.load(settings.manifest_path)
  except errors.DataError as e:  # as a UserError it keeps the finished work
    raise errors.UserError(
      f"{flag}: {e}: move it away, or give another name"
    ) from e
  problems = [f"{path} is a folder" for path in outputs if os.path.isdir(path)]
  for path, (owner, _) in owners.items():
    if os.path.basename(owner) != os.path.basename(settings.manifest_path):
      problems.append(f"{path} is a file of the data set {owner}")
  before = list(earlier.shards) if earlier else names
  if before != settings.shard_names(len(before)):
    problems.append(f"{settings.manifest_path} is {before[0]}'s")
  if problems:
    raise errors.UserError(
      f"{flag}: {problems[0]}: give another name (not only another extension) "
      "or folder, or remove that first"
    )
  return earlier


def _load_tokenizer(settings: Settings, ranks: work_dir.Ranks):
  """(spec, info) of the tokenizer, loaded so that errors come early."""
  files = tokenizer_files.named(settings)
  encoder, lines = tokenizer_files.load(files, settings.do_lower_case)
  if lines and not ranks.rank:
    console.tell(*lines)
  info = encoder.info()
  spec = corpus.TokenizerSpec(
    info.kind, encoder.file, info.do_lower_case, info.sha256
  )
  return spec, info


def _manifest(
  settings: Settings,
  info: tokenization.TokenizerInfo,
  counts: corpus.CorpusCounts,
  results: list[shards.ShardResult],
) -> records.Manifest:
  all_counts = dataclasses.asdict(counts)
  for name in ("examples", "real_tokens", "masked_tokens", "random_next"):
    all_counts[name] = sum(getattr(result, name) for result in results)
  return records.Manifest(
    max_seq_length=settings.max_seq_length,
    max_predictions_per_seq=settings.max_predictions_per_seq,
    examples_per_record=settings.examples_per_record,
    masking="dynamic" if settings.dynamic_masks else "static",
    tokenizer=info,
    settings={**settings.in_manifest, "num_shards": len(results)},
    counts=all_counts,
    files=tuple(result.info for result in results),
  )


def _publish(
  settings: Settings,
  folder: str,
  manifest: records.Manifest,
  earlier: records.Manifest | None,
) -> None:
  """Moves the finished files of `folder` to their places.

  The earlier manifest's files go first: a glob would match them too. While
  files are moved there is no manifest, and those that were moved before a stop
  stay. DataError if a file is gone.
  """
  may_be_moved = earlier is None or earlier == manifest
  moves, moved = {}, set()
  for name in _with_indexes(manifest):
    source = os.path.join(folder, name)
    place = os.path.join(settings.folder, name)
    if os.path.exists(source):
      moves[source] = place
    elif may_be_moved and os.path.exists(place):
      moved.add(name)
    else:
      raise errors.DataError(f"{source} is gone: start again")
  stale = set(_with_indexes(earlier)) - moved if earlier else []
  # The manifest goes last: it knows what to delete.
  for name in [*stale, os.path.basename(settings.manifest_path)]:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(os.path.join(settings.folder, name))
  for source, place in moves.items():
    os.replace(source, place)
  manifest.save(settings.manifest_path)


def _with_indexes(manifest: records.Manifest) -> list[str]:
  """The names of its files, each after its index."""
  names = []
  for name in manifest.shards:
    names += [name + tfrecord.INDEX_SUFFIX, name]
  return names


# The two passes ---------------------------------------------------------------


def _example_bytes(settings: Settings) -> int:
  # Ids take two bytes, mask and segment one, a prediction eight.
  return (
    4 * settings.max_seq_length + 8 * settings.max_predictions_per_seq + 200
  )


def _blocks_of_corpus(counts: corpus.CorpusCounts, settings: Settings) -> int:
  """The records of the corpus in units of about `_BLOCK_BYTES`."""
  examples = settings.dupe_factor * (
    counts.documents + counts.tokens // settings.max_seq_length
  )
  return max(1, -(-examples * _example_bytes(settings) // _BLOCK_BYTES))


def _num_shards(counts: corpus.CorpusCounts, settings: Settings) -> int:
  """The number given, or as many as have about 16 MB each."""
  return settings.given_shards or min(
    _blocks_of_corpus(counts, settings), counts.parts, _MAX_DEFAULT_SHARDS
  )


@dataclasses.dataclass(frozen=True)
class _Work:
  settings: Settings
  folder: str
  ranks: work_dir.Ranks
  pool: workers.Workers
  tokenizer: corpus.TokenizerSpec

  def _start(self, function, tasks: list) -> list:
    """Starts this rank's tasks, which it returns, but for finished ones."""
    mine = tasks[self.ranks.rank :: self.ranks.size]
    self.pool.start(
      function, [task for task in mine if not os.path.exists(task.done_file)]
    )
    return mine

  def _wait(self, number: int, *files: str) -> None:
    """Waits for one of the files of task `number`."""
    work_dir.wait_until(
      lambda: any(map(os.path.exists, files)),
      f"{files[0]} of rank {number % self.ranks.size}",
      self.pool.check,
    )

  def tokenize(
    self, pieces: list[text_files.Piece]
  ) -> tuple[corpus.CorpusCounts, int]:
    """Text to the token store: (counts, text bytes of an earlier start)."""
    settings = self.settings
    store = os.path.join(self.folder, "store")
    if counts := corpus.store_counts(store):
      return counts, counts.text_bytes
    chunks = os.path.join(self.folder, "pieces")
    os.makedirs(store, exist_ok=True)
    os.makedirs(chunks, exist_ok=True)
    tasks = [
      corpus.PieceTask(
        piece,
        os.path.join(chunks, f"{number:06d}"),
        first_chunk=0,
        text=settings.text,
        tokenizer=self.tokenizer,
        mark_words=settings.do_whole_word_mask,
      )
      for number, piece in enumerate(pieces)
    ]
    if self.ranks.rank:
      self._start(corpus.tokenize_piece, tasks)
      counts = work_dir.wait_until(
        functools.partial(corpus.store_counts, store),
        f"rank 0 to put the tokens of all ranks into {store}",
        self.pool.check,
      )
      return counts, 0
    # A document longer than a block of examples is cut.
    block_examples = _BLOCK_BYTES // _example_bytes(settings)
    block_tokens = block_examples * settings.max_seq_length
    loaded = corpus.load_tokenizer(self.tokenizer)
    writing = corpus.StoreWriter(store, loaded.vocab_size)
    with naming(store), writing as writer:
      journal = writer.journal
      kept = journal.bytes_on_disk
      if journal.piece < len(tasks):  # the store has its first chunks
        tasks[journal.piece] = dataclasses.replace(
          tasks[journal.piece], first_chunk=journal.chunk
        )
      self._start(corpus.tokenize_piece, tasks)
      self._join(tasks, writer)
      counts = writer.finish(loaded, block_tokens)
    shutil.rmtree(chunks)
    if counts.documents < 2 and settings.objective != "mlm":
      raise errors.DataError(
        f"the input is one document of {counts.sentences} sentences, but half "
        "of the examples need a sentence of another document: put a blank "
        "line between documents (the end of a file does not separate them)"
      )
    return counts, kept

  def _join(
    self, tasks: list[corpus.PieceTask], writer: corpus.StoreWriter
  ) -> None:
    """Puts all ranks' chunks into the store, in the order of the text."""
    journal = writer.journal
    total = sum(os.path.getsize(path) for path in {t.piece.path for t in tasks})
    with console.Progress(
      "tokenizing", total / 1e6, "MB", journal.bytes_on_disk / 1e6
    ) as bar:
      while journal.piece < len(tasks):
        task = tasks[journal.piece]
        chunk = task.chunk_file(journal.chunk)
        self._wait(journal.piece, chunk, task.done_file)
        # A finished piece has all of its chunks.
        if os.path.exists(chunk):
          writer.append(chunk)
          bar.at(journal.bytes_on_disk / 1e6)
        else:
          writer.next_piece()

  def make_shards(
    self, counts: corpus.CorpusCounts
  ) -> tuple[list[shards.ShardResult], int]:
    """Makes shards; rank 0 waits for all: (results, number made before)."""
    settings = self.settings
    num_shards = _num_shards(counts, settings)
    folder = os.path.join(self.folder, _SHARDS)
    os.makedirs(folder, exist_ok=True)
    tasks = [
      shards.ShardTask(
        store=os.path.join(self.folder, "store"),
        path=os.path.join(folder, name),
        shard=number,
        num_shards=num_shards,
        num_blocks=-(-_blocks_of_corpus(counts, settings) // num_shards),
        settings=settings,
        tokenizer=self.tokenizer,
      )
      for number, name in enumerate(settings.shard_names(num_shards))
    ]
    kept = sum(os.path.exists(task.done_file) for task in tasks)
    mine = self._start(shards.build_shard, tasks)
    wanted = mine if self.ranks.rank else tasks
    # All shards hold about as much text.
    megabytes = counts.text_bytes / 1e6 / num_shards
    results = []
    with console.Progress(
      "making records", len(wanted) * megabytes, "MB"
    ) as bar:
      for task in wanted:
        self._wait(task.shard, task.done_file)
        results.append(shards.ShardResult.load(task.done_file))
        bar.at(len(results) * megabytes)
    return results, kept
