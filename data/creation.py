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
from common.files import file_sha256
from data import (
  corpus,
  records,
  shards,
  text_files,
  tfrecord,
  work_dir,
  workers,
)
from data.creation_settings import Settings

_BLOCK_BYTES = 16 << 20  # about, of the records that a worker holds at a time
_MAX_DEFAULT_SHARDS = 4096
_SHARDS = "shards"  # the folder of those that are being made
_PLAN_VERSION = 3  # 1 cut chunks of JSON lines elsewhere; 2 had no `parts`


class Summary(dict):
  """The manifest's counts, and `seconds` by stage beside them."""

  manifest: records.Manifest
  manifest_path: str
  seconds: dict[str, float]
  kept: str = ""  # what an earlier start had finished


# The whole --------------------------------------------------------------------


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
  tokenizer, info = _load_tokenizer(settings)
  os.makedirs(settings.folder, exist_ok=True)
  plan = _plan(settings, states, info)
  num_workers = settings.num_workers or max(
    1, workers.available_cores() // ranks.local_size
  )
  with (
    work_dir.work_folder(settings.work_folder, plan, ranks) as folder,
    # One pool for both passes: its workers keep the tokenizer.
    workers.Workers(num_workers) as pool,
  ):
    work = _Work(settings, folder, ranks, pool, tokenizer)
    counts, kept_bytes = work.tokenize(pieces)
    for path, before in zip(paths, states, strict=True):
      if not os.path.exists(path) or _state(path) != before:
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
    _publish(settings, folder, manifest, earlier)
  summary = Summary(manifest.counts)
  summary.manifest, summary.manifest_path = manifest, settings.manifest_path
  summary.seconds = {
    "tokenizing": tokenized - start,
    "making examples": made - tokenized,
    "moving files": time.monotonic() - made,
  }
  if kept_bytes or kept_shards:
    summary.kept = (
      f"{kept_bytes / 1e6:,.1f} MB of text tokenized and {kept_shards} of "
      f"{len(results)} shards made before"
    )
  return summary


def _plan(settings: Settings, states: list, info) -> dict:
  """All that decides the bytes, for `work_dir.work_folder`."""
  plan = dataclasses.asdict(settings) | {
    "files": states,
    "tokenizer": dataclasses.asdict(info),
    "version": _PLAN_VERSION,
  }
  del plan["num_workers"]
  return plan


def _state(path: str) -> list:
  """[path, bytes, nanoseconds of the last change]."""
  status = os.stat(path)
  return [path, status.st_size, status.st_mtime_ns]


def claim(
  settings: Settings, inputs: list[str], num_shards: int | None
) -> records.Manifest | None:
  """The data set's earlier manifest, if all that we shall write is ours.

  UserError if a file of ours has another owner: an input, a folder, another
  data set or its unfinished work. None as `num_shards`: the corpus decides.
  """
  flag = f"--output_file={settings.output_file}"
  outputs = settings.output_paths
  listed, earlier = {}, None
  try:
    if num_shards:
      names = settings.shard_names(num_shards)
      outputs = [os.path.join(settings.folder, name) for name in names]
      listed = records.find_manifests(outputs)
    if os.path.exists(settings.manifest_path):
      earlier = records.Manifest.load(settings.manifest_path)
  except errors.DataError as e:  # as a UserError it keeps the finished work
    raise errors.UserError(
      f"{flag}: {e}: move it away, or give another name"
    ) from e
  records.check_not_written(inputs, "--input_file", *outputs)
  for name in ("vocab_file", "spm_model_file"):
    if path := getattr(settings, name):
      records.check_not_written([path], f"--{name}", *outputs)
  problems = []
  for output in outputs:
    manifest_path, _ = listed.get(output, (settings.manifest_path, None))
    if os.path.basename(manifest_path) != settings.manifest_name:
      problems.append(
        f"{output} is a file of another data set, {manifest_path}: give "
        "another name, or remove that data set"
      )
    if num_shards and os.path.isdir(output):
      problems.append(
        f"{output} is a folder: name files in it, as {output}/train.tfrecord"
      )
  names = list(earlier.shards) if earlier else []
  if names and names != settings.shard_names(len(names)):
    problems.append(
      f"{settings.manifest_path} is the manifest of another data set, "
      f"{names[0]}: give another name (not only another extension) or folder, "
      "or remove that data set"
    )
  plan = work_dir.plan_of(settings.work_folder) or {}
  other = plan.get("output_file", settings.output_file)
  other_names = [os.path.basename(path) for path in records.listed(other)]
  if other_names != settings.output_names:
    problems.append(
      f"{settings.work_folder} holds unfinished work of --output_file={other}: "
      "finish it, remove that folder, or give another name (not only another "
      "extension)"
    )
  if problems:
    raise errors.UserError(f"{flag}: {problems[0]}")
  return earlier


def _load_tokenizer(settings: Settings):
  """(spec, info) of the tokenizer, loaded so that errors come early."""
  file = settings.vocab_file or settings.spm_model_file
  spec = corpus.TokenizerSpec(
    vocab_file=settings.vocab_file,
    spm_model_file=settings.spm_model_file,
    do_lower_case=settings.do_lower_case,
    sha256=file_sha256(file) if file and os.path.isfile(file) else "",
  )
  return spec, corpus.load_tokenizer(spec).info()


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
  """Moves the finished files to their places; DataError if one is gone.

  The earlier manifest's files go first: a glob would match them too. Files that
  were moved before a stop stay.
  """
  before = earlier.shards if earlier else {}
  moves, moved = {}, set()
  for info in manifest.files:
    # While files are moved there is no manifest.
    may_be_moved = not earlier or before.get(info.name) == info
    for name in _with_index(info.name):
      source = os.path.join(folder, _SHARDS, name)
      place = os.path.join(settings.folder, name)
      if os.path.exists(source):
        moves[source] = place
      elif may_be_moved and os.path.exists(place):
        moved.add(name)
      else:
        raise errors.DataError(f"{source} is gone: start again")
  stale = {name for file in before for name in _with_index(file)} - moved
  # The manifest goes last: it knows what to delete.
  for name in [*sorted(stale), settings.manifest_name]:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(os.path.join(settings.folder, name))
  for source, place in moves.items():
    os.replace(source, place)
  manifest.save(settings.manifest_path)


def _with_index(name: str) -> tuple[str, str]:
  """The names of a record file's index and the file, which appears last."""
  return name + tfrecord.INDEX_SUFFIX, name


# The two passes ---------------------------------------------------------------


def _num_shards(counts: corpus.CorpusCounts, settings: Settings) -> int:
  """The number given, or as many as have about 16 MB each."""
  return settings.given_shards or min(
    _blocks_of_corpus(counts, settings), counts.parts, _MAX_DEFAULT_SHARDS
  )


def _blocks_of_corpus(counts: corpus.CorpusCounts, settings: Settings) -> int:
  """The records of the corpus in units of about `_BLOCK_BYTES`."""
  examples = settings.dupe_factor * (
    counts.documents + counts.tokens // settings.max_seq_length
  )
  return max(1, -(-examples * _example_bytes(settings) // _BLOCK_BYTES))


def _example_bytes(settings: Settings) -> int:
  # Ids take two bytes, mask and segment one, a prediction eight.
  return (
    4 * settings.max_seq_length + 8 * settings.max_predictions_per_seq + 200
  )


def _not_made(tasks: list[shards.ShardTask]) -> list[shards.ShardTask]:
  return [task for task in tasks if not os.path.exists(task.result_file)]


@dataclasses.dataclass(frozen=True)
class _Work:
  settings: Settings
  folder: str
  ranks: work_dir.Ranks
  pool: workers.Workers
  tokenizer: corpus.TokenizerSpec

  def tokenize(
    self, pieces: list[text_files.Piece]
  ) -> tuple[corpus.CorpusCounts, int]:
    """Text to the token store: (counts, text bytes of an earlier start)."""
    store = os.path.join(self.folder, "store")
    if counts := corpus.store_counts(store):
      return counts, counts.text_bytes
    os.makedirs(store, exist_ok=True)
    os.makedirs(os.path.join(self.folder, "pieces"), exist_ok=True)
    if self.ranks.rank:
      self._start_pieces(pieces, 0, 0)
      counts = work_dir.wait_until(
        functools.partial(corpus.store_counts, store),
        f"rank 0 to put the tokens of all ranks into {store}",
        self.pool.check,
      )
      return counts, 0
    # A document longer than a block of examples is cut.
    settings = self.settings
    block_examples = _BLOCK_BYTES // _example_bytes(settings)
    block_tokens = block_examples * settings.max_seq_length
    loaded = corpus.load_tokenizer(self.tokenizer)
    with corpus.StoreWriter(store, loaded.vocab_size) as writer:
      kept = writer.journal.bytes_on_disk
      self._start_pieces(pieces, writer.journal.piece, writer.journal.chunk)
      self._join(pieces, writer)
      counts = writer.finish(loaded.unk_id, block_tokens)
    shutil.rmtree(os.path.join(self.folder, "pieces"))
    if counts.documents < 2 and settings.objective != "mlm":
      raise errors.DataError(
        f"the input is one document of {counts.sentences} sentences, but half "
        "of the examples need a sentence of another document: put a blank "
        "line between documents (the end of a file does not separate them)"
      )
    return counts, kept

  def _piece_task(self, pieces, number, first_chunk=0) -> corpus.PieceTask:
    return corpus.PieceTask(
      pieces[number],
      os.path.join(self.folder, "pieces", f"{number:06d}"),
      first_chunk,
      self.settings.text,
      self.tokenizer,
      self.settings.do_whole_word_mask,
    )

  def _start_pieces(self, pieces, first: int, first_chunk: int) -> None:
    """Starts this rank's pieces that are not finished."""
    tasks = []
    for number in self.ranks.mine(len(pieces)):
      chunk = first_chunk if number == first else 0
      task = self._piece_task(pieces, number, chunk)
      if number >= first and not os.path.exists(task.done_file):
        tasks.append(task)
    self.pool.start(corpus.tokenize_piece, tasks)

  def _join(self, pieces, writer: corpus.StoreWriter) -> None:
    """Puts all ranks' chunks into the store, in the order of the text."""
    total = sum(os.path.getsize(path) for path in {p.path for p in pieces})
    journal = writer.journal
    with console.Progress(
      "tokenizing", total / 1e6, "MB", journal.bytes_on_disk / 1e6
    ) as bar:
      while journal.piece < len(pieces):
        task = self._piece_task(pieces, journal.piece)
        chunk = task.chunk_file(journal.chunk)

        def is_ready(files=(chunk, task.done_file)):
          return any(map(os.path.exists, files))

        work_dir.wait_until(
          is_ready,
          f"{chunk}, tokens of {task.piece.path}, from rank "
          f"{journal.piece % self.ranks.size}",
          self.pool.check,
        )
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
    os.makedirs(os.path.join(self.folder, _SHARDS), exist_ok=True)
    tasks = self._shard_tasks(counts)
    mine = [tasks[i] for i in self.ranks.mine(len(tasks))]
    wanted = mine if self.ranks.rank else tasks
    missing = _not_made(wanted)
    kept = len(wanted) - len(missing)
    self.pool.start(shards.build_shard, _not_made(mine))
    # All blocks hold about as much text.
    blocks = tasks[0].num_blocks
    megabytes = counts.text_bytes / 1e6 / (blocks * len(tasks))
    blocks_made = sum(task.blocks_made for task in wanted)
    with console.Progress(
      "making records",
      blocks * len(wanted) * megabytes,
      "MB",
      blocks_made * megabytes,
    ) as bar:
      while missing:
        self.pool.check()
        time.sleep(work_dir.POLL_SECONDS)
        missing = _not_made(missing)
        blocks_made = blocks * (len(wanted) - len(missing))
        blocks_made += sum(task.blocks_made for task in missing)
        bar.at(blocks_made * megabytes)
    results = [shards.ShardResult.load(task.result_file) for task in wanted]
    return results, kept

  def _shard_tasks(self, counts: corpus.CorpusCounts) -> list[shards.ShardTask]:
    settings = self.settings
    num_shards = _num_shards(counts, settings)
    blocks = -(-_blocks_of_corpus(counts, settings) // num_shards)
    return [
      shards.ShardTask(
        store=os.path.join(self.folder, "store"),
        path=os.path.join(self.folder, _SHARDS, name),
        shard=number,
        num_shards=num_shards,
        num_blocks=blocks,
        settings=settings,
        tokenizer=self.tokenizer,
      )
      for number, name in enumerate(settings.shard_names(num_shards))
    ]
