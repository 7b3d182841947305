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
from data.creation_settings import Settings, listed

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
  records.check_not_written(paths, "--input_file", *settings.output_paths)
  _check_unshared(settings)
  if settings.given_shards:
    _check_no_inputs(settings, paths, settings.given_shards)
    _check_unlisted(settings, settings.given_shards)
  states = list(map(_state, paths))
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
    _check_unchanged(paths, plan)
    tokenized = time.monotonic()
    num_shards = _num_shards(counts, settings)
    _check_no_inputs(settings, paths, num_shards)
    _check_unlisted(settings, num_shards)
    results, kept_shards = work.make_shards(counts)
    if ranks.rank:
      return None
    made = time.monotonic()
    manifest = _manifest(settings, info, counts, results)
    _publish(settings, folder, manifest)
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
  found = os.stat(path)
  return [path, found.st_size, found.st_mtime_ns]


def _check_unchanged(paths: list[str], plan: dict) -> None:
  """DataError if a text file was changed while it was read."""
  for path, before in zip(paths, plan["files"], strict=True):
    if not os.path.exists(path) or _state(path) != before:
      raise errors.DataError(
        f"{path} was changed while it was read: start again when it is whole"
      )


def _check_unshared(settings: Settings) -> None:
  """Raises `UserError` if another data set has our manifest or work folder."""
  manifest = _earlier_manifest(settings)
  earlier = [info.name for info in manifest.files] if manifest else []
  if earlier and earlier != settings.shard_names(len(earlier)):
    raise errors.UserError(
      f"--output_file={settings.output_file}: {settings.manifest_path} is the "
      f"manifest of another data set, {earlier[0]}: give another name (not "
      "only another extension) or folder, or remove that data set"
    )
  plan = work_dir.plan_of(settings.work_folder)
  other = (plan or {}).get("output_file", "")
  names = [os.path.basename(path) for path in listed(other)]
  if other and names != settings.output_names:
    raise errors.UserError(
      f"--output_file={settings.output_file}: {settings.work_folder} holds "
      f"unfinished work of --output_file={other}: finish it, remove that "
      "folder, or give another name (not only another extension)"
    )


def _places(settings: Settings, num_shards: int) -> list[str]:
  names = settings.shard_names(num_shards)
  return [os.path.join(settings.folder, name) for name in names]


def _check_no_inputs(
  settings: Settings, paths: list[str], num_shards: int
) -> None:
  """Raises an error if a file of ours would replace an input, or a folder."""
  inputs = {
    "--input_file": paths,
    "--vocab_file": [settings.vocab_file or ""],
    "--spm_model_file": [settings.spm_model_file or ""],
  }
  places = _places(settings, num_shards)
  for flag, names in inputs.items():
    records.check_not_written(filter(None, names), flag, *places)
  for place in filter(os.path.isdir, places):
    raise errors.UserError(
      f"--output_file={settings.output_file}: {place} is a folder: name files "
      f"in it, as {place}/train.tfrecord"
    )


def _check_unlisted(settings: Settings, num_shards: int) -> None:
  """Raises `UserError` if another manifest lists a file of ours."""
  places = _places(settings, num_shards)
  try:
    listed = records.find_manifests(places)
  except errors.DataError as e:  # a UserError keeps the finished work
    raise errors.UserError(str(e)) from e
  for place, (other, _) in listed.items():
    if os.path.basename(other) != os.path.basename(settings.manifest_path):
      raise errors.UserError(
        f"--output_file={settings.output_file}: {place} is a file of another "
        f"data set, {other}: give another name, or remove that data set"
      )


def _earlier_manifest(settings: Settings) -> records.Manifest | None:
  if not os.path.exists(settings.manifest_path):
    return None
  try:
    return records.Manifest.load(settings.manifest_path)
  except errors.DataError as e:
    raise errors.UserError(
      f"{e}. --output_file={settings.output_file} would replace it: move it "
      "away, or give another name"
    ) from e


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
  return records.Manifest(
    max_seq_length=settings.max_seq_length,
    max_predictions_per_seq=settings.max_predictions_per_seq,
    examples_per_record=settings.examples_per_record,
    masking="dynamic" if settings.dynamic_masks else "static",
    tokenizer=info,
    settings={**settings.in_manifest, "num_shards": len(results)},
    counts={
      **dataclasses.asdict(counts),
      **{
        name: sum(getattr(result, name) for result in results)
        for name in ("examples", "real_tokens", "masked_tokens", "random_next")
      },
    },
    files=tuple(s.info for s in results),
  )


def _publish(
  settings: Settings, folder: str, manifest: records.Manifest
) -> None:
  """Moves the finished files to their places; DataError if one is gone.

  The earlier manifest's files go first: a glob would match them too. Files that
  were moved before a stop stay.
  """
  _check_unshared(settings)
  _check_unlisted(settings, len(manifest.files))
  earlier = _earlier_manifest(settings)
  before = {info.name: info for info in earlier.files} if earlier else {}
  moves, moved = {}, set()
  for info in manifest.files:
    # While files are moved there is no manifest.
    may_be_moved = not earlier or before.get(info.name) == info
    for name in _with_index(info.name):
      made = os.path.join(folder, _SHARDS, name)
      place = os.path.join(settings.folder, name)
      if os.path.exists(made):
        moves[made] = place
      elif may_be_moved and os.path.exists(place):
        moved.add(name)
      else:
        raise errors.DataError(f"{made} is gone: start again")
  stale = {name for file in before for name in _with_index(file)} - moved
  # The manifest goes last: it knows what to delete.
  for name in [*sorted(stale), os.path.basename(settings.manifest_path)]:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(os.path.join(settings.folder, name))
  for made, place in moves.items():
    os.replace(made, place)
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


def _block_tokens(settings: Settings) -> int:
  examples = _BLOCK_BYTES // _example_bytes(settings)
  return examples * settings.max_seq_length


def _any_exists(*paths: str) -> bool:
  return any(map(os.path.exists, paths))


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
        lambda: corpus.store_counts(store),
        f"rank 0 to put the tokens of all ranks into {store}",
        self.pool.check,
      )
      return counts, 0
    loaded = corpus.load_tokenizer(self.tokenizer)
    with corpus.StoreWriter(store, loaded.vocab_size) as writer:
      kept = writer.journal.bytes_on_disk
      self._start_pieces(pieces, writer.journal.piece, writer.journal.chunk)
      self._join(pieces, writer)
      counts = writer.finish(loaded.unk_id, _block_tokens(self.settings))
    shutil.rmtree(os.path.join(self.folder, "pieces"))
    if counts.documents < 2 and self.settings.objective != "mlm":
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
    tasks = [
      self._piece_task(pieces, i, first_chunk if i == first else 0)
      for i in self.ranks.mine(len(pieces))
      if i >= first
    ]
    missing = [task for task in tasks if not os.path.exists(task.done_file)]
    self.pool.start(corpus.tokenize_piece, missing)

  def _join(self, pieces, writer: corpus.StoreWriter) -> None:
    total = sum(os.path.getsize(p) for p in {piece.path for piece in pieces})
    at = writer.journal
    with console.Progress(
      "tokenizing", total / 1e6, "MB", at.bytes_on_disk / 1e6
    ) as bar:
      while at.piece < len(pieces):
        task = self._piece_task(pieces, at.piece)
        chunk = task.chunk_file(at.chunk)
        work_dir.wait_until(
          functools.partial(_any_exists, chunk, task.done_file),
          f"{chunk}, tokens of {task.piece.path}, from rank "
          f"{at.piece % self.ranks.size}",
          self.pool.check,
        )
        # A finished piece has all of its chunks.
        if os.path.exists(chunk):
          writer.append(chunk)
          bar.at(at.bytes_on_disk / 1e6)
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
    # In MB of text; blocks are equal parts of it.
    of_block = counts.text_bytes / 1e6 / sum(t.num_blocks for t in tasks)
    blocks = sum(t.num_blocks for t in wanted)
    made = sum(t.blocks_made for t in wanted)
    with console.Progress(
      "making records", blocks * of_block, "MB", made * of_block
    ) as bar:
      while missing:
        self.pool.check()
        time.sleep(work_dir.POLL_SECONDS)
        missing = _not_made(missing)
        unmade = sum(t.num_blocks - t.blocks_made for t in missing)
        bar.at((blocks - unmade) * of_block)
    return [shards.ShardResult.load(t.result_file) for t in wanted], kept

  def _shard_tasks(self, counts: corpus.CorpusCounts) -> list[shards.ShardTask]:
    settings = self.settings
    num_shards = _num_shards(counts, settings)
    blocks = -(-_blocks_of_corpus(counts, settings) // num_shards)
    return [
      shards.ShardTask(
        store=os.path.join(self.folder, "store"),
        path=os.path.join(self.folder, _SHARDS, name),
        shard=i,
        num_shards=num_shards,
        num_blocks=blocks,
        settings=settings,
        tokenizer=self.tokenizer,
      )
      for i, name in enumerate(settings.shard_names(num_shards))
    ]
