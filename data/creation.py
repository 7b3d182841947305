"""The work of create_pretraining_data.py: text to records.

Two passes, each over worker processes and ranks: text to the token store
(corpus.py), then the store to shards (shards.py). Files are made in a folder
beside the output (work_dir.py) and moved when all are complete.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import time

import tokenization
from common import errors, progress
from data import (
  corpus,
  records,
  shards,
  text_files,
  tfrecord,
  work_dir,
  workers,
)

_BLOCK_BYTES = 16 << 20  # about, of the records that a worker holds at a time
_MAX_DEFAULT_SHARDS = 4096
# What lies beside records, here and in the folder of work in progress.
_NO_RECORDS = (*records.NO_RECORDS, ".result", ".blocks", ".unfinished")
_SHARDS = "shards"  # the folder of those that are being made
# More than anybody wants, and less than what only ends for lack of memory.
_LARGEST = {
  "max_seq_length": 1 << 16,
  "random_seed": (1 << 63) - 1,
  "dupe_factor": 10_000,
  "num_shards": 100_000,
  "num_workers": 4096,
}


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
  prose: str = ""
  text_field: str = "text"
  encoding: str = "utf-8"
  num_shards: int | None = None  # None: by the size of the corpus
  num_workers: int | None = None  # None: all cores; never decides the bytes

  def __post_init__(self):
    if self.dupe_factor is None:
      object.__setattr__(self, "dupe_factor", 1 if self.dynamic_masks else 10)
    for name, most in _LARGEST.items():
      value = getattr(self, name)
      self._check(value is None or value <= most, name, f"at most {most}")
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
      1 <= self.examples_per_record <= self.max_seq_length,
      "examples_per_record",
      f"1 to max_seq_length ({self.max_seq_length})",
    )
    for name in ("num_shards", "num_workers"):
      value = getattr(self, name)
      self._check(value is None or value >= 1, name, "at least 1")
    paths, names = self.output_paths, self.output_names
    self._check(bool(paths) and all(names), "output_file", "a file name")
    self._check(
      not any(name.endswith(_NO_RECORDS) for name in names),
      "output_file",
      f"no name that ends in {', '.join(_NO_RECORDS)}: so end the names of "
      "what lies beside records",
    )
    _ = self.text  # raises, if it must
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
      raise errors.DataError(f"--{name}={getattr(self, name)}: must be {want}")

  @property
  def examples(self) -> shards.ExampleSettings:
    names = [f.name for f in dataclasses.fields(shards.ExampleSettings)]
    return shards.ExampleSettings(**{n: getattr(self, n) for n in names})

  @property
  def text(self) -> text_files.TextFormat:
    return text_files.TextFormat(self.prose, self.text_field, self.encoding)

  @property
  def output_paths(self) -> list[str]:
    return _listed(self.output_file)

  @property
  def output_names(self) -> list[str]:
    return [os.path.basename(path) for path in self.output_paths]

  @property
  def given_shards(self) -> int | None:
    """The number of record files; None: the corpus decides."""
    if self.num_shards or len(self.output_paths) == 1:
      return self.num_shards
    return len(self.output_paths)

  @property
  def folder(self) -> str:
    return os.path.dirname(self.output_paths[0]) or "."

  @property
  def manifest_path(self) -> str:
    return self._stem + records.MANIFEST_SUFFIX

  @property
  def work_folder(self) -> str:
    return self._stem + ".unfinished"

  @property
  def _stem(self) -> str:
    return os.path.splitext(self.output_paths[0])[0]

  def shard_names(self, num_shards: int) -> list[str]:
    """File names: those given, or NAME-00000-of-00004.EXT, ..."""
    names = self.output_names
    if len(names) == num_shards:
      return names
    stem, extension = os.path.splitext(names[0])
    return [
      f"{stem}-{i:05d}-of-{num_shards:05d}{extension}"
      for i in range(num_shards)
    ]


def _listed(names: str) -> list[str]:
  return [name.strip() for name in names.split(",") if name.strip()]


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
  """Makes the records, their indexes and the manifest.

  Every rank calls this; their machines share the files.

  Returns:
    The summary on rank 0; None on others, which may finish earlier.

  Raises:
    DataError: the input or the tokenizer cannot be used; nothing is left
      behind, and existing records are untouched.
  """
  start = time.monotonic()
  paths = records.expand_patterns(settings.input_file)
  outputs = {os.path.abspath(path) for path in settings.output_paths}
  for path in paths:
    if os.path.abspath(path) in outputs:
      raise errors.DataError(f"{path} is both --input_file and --output_file")
  _check_unshared(settings)
  if settings.given_shards:
    _check_unlisted(settings, settings.given_shards)
  pieces = text_files.split_into_pieces(paths, settings.text)
  tokenizer, info = _load_tokenizer(settings)
  os.makedirs(settings.folder, exist_ok=True)
  plan = _plan(settings, paths, info)
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
    tokenized = time.monotonic()
    _check_unlisted(settings, _num_shards(counts, settings))
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


def _plan(settings: Settings, paths: list[str], info) -> dict:
  """All that decides the bytes, as `work_dir` compares it."""
  files = [[p, os.path.getsize(p), os.stat(p).st_mtime_ns] for p in paths]
  plan = dataclasses.asdict(settings)
  del plan["num_workers"]
  plan |= {"files": files, "tokenizer": dataclasses.asdict(info)}
  plan["version"] = records.MANIFEST_VERSION
  return json.loads(json.dumps(plan))  # as it will be read back


def _check_unshared(settings: Settings) -> None:
  """Names that differ only in the extension share manifest and work folder.

  Raises:
    UserError: another data set uses them.
  """
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
  names = [os.path.basename(path) for path in _listed(other)]
  if other and names != settings.output_names:
    raise errors.UserError(
      f"--output_file={settings.output_file}: {settings.work_folder} holds "
      f"unfinished work of --output_file={other}: finish it, remove that "
      "folder, or give another name (not only another extension)"
    )


def _check_unlisted(settings: Settings, num_shards: int) -> None:
  """Raises `UserError` if another manifest lists a file of one of the names."""
  names = settings.shard_names(num_shards)
  places = [os.path.join(settings.folder, name) for name in names]
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
  """The manifest at this data set's path, if there is one."""
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
    sha256=tfrecord.file_sha256(file) if file and os.path.isfile(file) else "",
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
    settings={
      **dataclasses.asdict(settings.examples),
      **dataclasses.asdict(settings.text),
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
  settings: Settings, folder: str, manifest: records.Manifest
) -> None:
  """Moves the finished files to their places; the manifest comes last.

  First the files of the earlier manifest are deleted: a glob would take shards
  of another number for part of this data set. Files that were moved before a
  stop stay.

  Raises:
    DataError: a finished file is gone; nothing was moved or deleted.
  """
  _check_unshared(settings)
  _check_unlisted(settings, len(manifest.files))
  earlier = _earlier_manifest(settings)
  listed = {info.name: info for info in earlier.files} if earlier else {}
  moves, moved = {}, set()
  for info in manifest.files:
    # While files are moved there is no manifest.
    may_be_moved = not earlier or listed.get(info.name) == info
    for name in _with_index(info.name):
      made = os.path.join(folder, _SHARDS, name)
      place = os.path.join(settings.folder, name)
      if os.path.exists(made):
        moves[made] = place
      elif may_be_moved and os.path.exists(place):
        moved.add(name)
      else:
        raise errors.DataError(f"{made} is gone: start again")
  stale = {name for file in listed for name in _with_index(file)} - moved
  for name in sorted(stale):
    with contextlib.suppress(FileNotFoundError):
      os.unlink(os.path.join(settings.folder, name))
  with contextlib.suppress(FileNotFoundError):
    os.unlink(settings.manifest_path)
  for made, place in moves.items():
    os.replace(made, place)
  manifest.save(settings.manifest_path)


def _with_index(name: str) -> tuple[str, str]:
  """A record file's index and the file, which must appear last."""
  return name + tfrecord.INDEX_SUFFIX, name


# The two passes ---------------------------------------------------------------


def _num_shards(counts: corpus.CorpusCounts, settings: Settings) -> int:
  """Those given, or shards of about 16 MB."""
  return settings.given_shards or min(
    _blocks_of_corpus(counts, settings), counts.documents, _MAX_DEFAULT_SHARDS
  )


def _blocks_of_corpus(counts: corpus.CorpusCounts, settings: Settings) -> int:
  """How many times about `_BLOCK_BYTES` of records the corpus gives."""
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
  """About the tokens of the documents that fill a block."""
  examples = _BLOCK_BYTES // _example_bytes(settings)
  return examples * settings.max_seq_length


def _not_made(tasks: list[shards.ShardTask]) -> list[shards.ShardTask]:
  return [task for task in tasks if not os.path.exists(task.result_file)]


@dataclasses.dataclass(frozen=True)
class _Work:
  """The two passes, on one rank."""

  settings: Settings
  folder: str
  ranks: work_dir.Ranks
  pool: workers.Workers
  tokenizer: corpus.TokenizerSpec

  def tokenize(
    self, pieces: list[text_files.Piece]
  ) -> tuple[corpus.CorpusCounts, int]:
    """Text to the token store: (counts, text bytes an earlier start did)."""
    store = os.path.join(self.folder, "store")
    if counts := corpus.store_counts(store):
      return counts, counts.text_bytes
    os.makedirs(store, exist_ok=True)
    os.makedirs(os.path.join(self.folder, "pieces"), exist_ok=True)
    if self.ranks.rank:
      self._start_pieces(pieces, 0, 0)
      work_dir.wait_until(
        lambda: corpus.store_counts(store),
        f"rank 0 to put the tokens of all ranks into {store}",
        self.pool.check,
      )
      return corpus.store_counts(store), 0
    loaded = corpus.load_tokenizer(self.tokenizer)
    with corpus.StoreWriter(store, loaded.vocab_size) as writer:
      kept = writer.bytes_on_disk
      self._start_pieces(pieces, writer.piece, writer.chunk)
      self._join(pieces, writer)
      counts = writer.finish(loaded.unk_id, _block_tokens(self.settings))
    shutil.rmtree(os.path.join(self.folder, "pieces"))
    if counts.documents < 2:
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
    """Starts this rank's pieces from `first` on that are not finished."""
    tasks = [
      self._piece_task(pieces, i, first_chunk if i == first else 0)
      for i in self.ranks.mine(len(pieces))
      if i >= first
    ]
    missing = [task for task in tasks if not os.path.exists(task.done_file)]
    self.pool.start(corpus.tokenize_piece, missing)

  def _join(self, pieces, writer: corpus.StoreWriter) -> None:
    """Appends the chunks of all ranks to the store as they appear."""
    total = sum(os.path.getsize(p) for p in {piece.path for piece in pieces})
    with progress.Progress(
      "tokenizing", total / 1e6, "MB", writer.bytes_on_disk / 1e6
    ) as bar:
      while writer.piece < len(pieces):
        task = self._piece_task(pieces, writer.piece)
        # In this order: a finished piece has all of its chunks.
        done = os.path.exists(task.done_file)
        if os.path.exists(chunk := task.chunk_file(writer.chunk)):
          writer.append(chunk)
          bar.at(writer.bytes_on_disk / 1e6)
        elif done:
          writer.next_piece()
        else:
          work_dir.wait_until(
            lambda task=task, chunk=chunk: (
              os.path.exists(chunk) or os.path.exists(task.done_file)
            ),
            f"{chunk}, tokens of {task.piece.path}, from rank "
            f"{writer.piece % self.ranks.size}",
            self.pool.check,
          )

  def make_shards(
    self, counts: corpus.CorpusCounts
  ) -> tuple[list[shards.ShardResult], int]:
    """The token store to shards: (results, shards an earlier start made).

    Rank 0 waits for all of them, others for their own.
    """
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
    with progress.Progress(
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
        settings=settings.examples,
        tokenizer=self.tokenizer,
      )
      for i, name in enumerate(settings.shard_names(num_shards))
    ]
