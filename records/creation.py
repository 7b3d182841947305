"""The work of create_pretraining_data.py: text to records.

Any number of workers, with processes of their own, share two passes: pieces of
text to the token store (corpus.py), then the store to shards (shards.py). Both
write to a folder beside the output (work_dir.py), where each piece and shard is
leased to one worker (leases.py). One worker, any, puts the store together; and
one moves the complete shards to their places, when all are there.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from common import console, errors, input_files, stores
from corpus import text_files
from records import data_set, shards, tfrecord, token_store
from records.creation_settings import Settings
from text_encoders import tokenizer_files
from text_encoders.base import TokenizerInfo
from workers import leases, work_dir
from workers.shared_work import Inputs, Phase, SharedWork, share

_BLOCK_BYTES = 16 << 20  # about, of the records that a worker holds at a time
_MAX_DEFAULT_SHARDS = 4096
# 1 cut chunks of JSON lines elsewhere; 2 had no `parts`, 3 no `letters`.
_PLAN_VERSION = 4


class Summary(NamedTuple):
  """What was made, where, and how long it took."""

  manifest: data_set.Manifest
  manifest_path: str
  seconds: dict[str, float]  # by stage
  kept: str  # what an earlier start had finished


def create(
  settings: Settings, worker: work_dir.Worker | None = None
) -> Summary | None:
  """Makes the records, their indexes and the manifest, alone or with others.

  It ends when all is made. The worker that moved the files gets the summary,
  the others None. A DataError leaves existing records as they are and no
  unfinished work.
  """
  start, worker = time.monotonic(), worker or work_dir.alone()
  paths = input_files.expand_patterns(settings.input_file)
  claim(settings, paths, settings.given_shards)
  inputs = Inputs.of(paths)
  pieces = text_files.split_into_pieces(paths, settings.text)
  tokenizer, info = _load_tokenizer(settings, worker)
  settings = dataclasses.replace(settings, do_lower_case=info.do_lower_case)

  def make(work: SharedWork) -> Summary:
    making = _Making(settings, work, tokenizer)
    counts, kept_bytes = making.tokenize(pieces)
    inputs.expect_unchanged()
    tokenized = time.monotonic()
    # The corpus may have decided how many shards there are.
    claim(settings, paths, _num_shards(counts, settings))
    results, kept_shards = making.make_shards(counts)
    work.await_publishing()
    made = time.monotonic()
    manifest = _manifest(settings, info, counts, results)
    # Making shards takes hours: others may have come meanwhile.
    earlier = claim(settings, paths, len(results))
    _publish(settings, work.folder("shards"), manifest, earlier)
    work.start.finish()
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

  # All that decides the bytes: the same plan resumes.
  plan = dataclasses.asdict(settings) | {
    "files": inputs.states,
    "tokenizer": dataclasses.asdict(info),
    "version": _PLAN_VERSION,
  }
  del plan["workers"]
  processes = settings.workers.num_workers
  return share(make, settings.work_folder, plan, worker, processes)


def claim(
  settings: Settings, inputs: list[str], num_shards: int | None
) -> data_set.Manifest | None:
  """The data set's earlier manifest, if all that we shall write is ours.

  UserError if a file of ours is an input, a folder or another data set's. None
  as `num_shards`: the corpus decides.
  """
  flag = f"--output_file={settings.output_file}"
  names, earlier = settings.shard_names(num_shards), None
  outputs = [os.path.join(settings.folder, name) for name in names]
  input_files.check_not_written(inputs, "--input_file", *outputs)
  for name, path in tokenizer_files.named(settings).items():
    input_files.check_not_written([path], f"--{name}", *outputs)
  try:
    owners = data_set.find_manifests(outputs)
    if stores.at(settings.manifest_path).is_file():
      earlier = data_set.Manifest.load(settings.manifest_path)
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


def _load_tokenizer(settings: Settings, worker: work_dir.Worker):
  """(spec, info) of the tokenizer, loaded so that errors come early."""
  files = tokenizer_files.named(settings)
  encoder, lines = tokenizer_files.load(files, settings.do_lower_case)
  if lines and not worker.number:
    console.tell(*lines)
  info = encoder.info()
  lower = info.do_lower_case
  spec = token_store.TokenizerSpec(info.kind, encoder.file, lower, info.sha256)
  return spec, info


def _manifest(
  settings: Settings,
  info: TokenizerInfo,
  counts: token_store.CorpusCounts,
  results: list[shards.ShardResult],
) -> data_set.Manifest:
  all_counts = dataclasses.asdict(counts)
  for name in ("examples", "real_tokens", "masked_tokens", "random_next"):
    all_counts[name] = sum(getattr(result, name) for result in results)
  return data_set.Manifest(
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
  manifest: data_set.Manifest,
  earlier: data_set.Manifest | None,
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
    place = stores.at(os.path.join(settings.folder, name))
    if os.path.exists(source):
      moves[source] = place
    elif may_be_moved and place.is_file():
      moved.add(name)
    else:
      raise errors.DataError(f"{source} is gone: start again")
  stale = set(_with_indexes(earlier)) - moved if earlier else []
  # The manifest goes last: it knows what to delete.
  for name in [*stale, os.path.basename(settings.manifest_path)]:
    stores.at(os.path.join(settings.folder, name)).remove()
  for source, place in moves.items():
    # A worker that was thought to be gone may be moving them, too.
    with contextlib.suppress(FileNotFoundError):
      place.take(source)
  manifest.save(settings.manifest_path)


def _with_indexes(manifest: data_set.Manifest) -> list[str]:
  """The names of its files, each after its index."""
  names = []
  for name in manifest.shards:
    names += [name + tfrecord.INDEX_SUFFIX, name]
  return names


# The two passes ---------------------------------------------------------------


def _example_bytes(settings: Settings) -> int:
  # Ids take two bytes, mask and segment one, a prediction eight.
  size, most = settings.max_seq_length, settings.max_predictions_per_seq
  return 4 * size + 8 * most + 200


def _blocks_of_corpus(
  counts: token_store.CorpusCounts, settings: Settings
) -> int:
  """The records of the corpus in units of about `_BLOCK_BYTES`."""
  full = counts.tokens // settings.max_seq_length
  examples = settings.dupe_factor * (counts.documents + full)
  return max(1, -(-examples * _example_bytes(settings) // _BLOCK_BYTES))


def _num_shards(counts: token_store.CorpusCounts, settings: Settings) -> int:
  """The number given, or as many as have about 16 MB each."""
  return settings.given_shards or min(
    _blocks_of_corpus(counts, settings), counts.parts, _MAX_DEFAULT_SHARDS
  )


class _Making(NamedTuple):
  """The passes over a corpus, as one of their workers."""

  settings: Settings
  work: SharedWork
  tokenizer: token_store.TokenizerSpec

  def tokenize(
    self, pieces: list[text_files.Piece]
  ) -> tuple[token_store.CorpusCounts, int]:
    """Text to the token store: (counts, text bytes of an earlier start)."""
    settings, store = self.settings, self.work.folder("store")
    chunks = self.work.folder("pieces")
    if counts := token_store.store_counts(store):
      return counts, counts.text_bytes
    tasks = []
    for number, piece in enumerate(pieces):
      output, words = f"{chunks}/{number:06d}", settings.do_whole_word_mask
      tasks.append(
        token_store.PieceTask(
          piece, output, settings.text, self.tokenizer, words
        )
      )
    before = set(os.listdir(chunks))
    phase = self.work.phase(token_store.tokenize_piece, tasks)
    kept = 0

    def join(scratch: str) -> None:
      nonlocal kept
      kept = self._join(tasks, phase, scratch, before)

    read = functools.partial(token_store.store_counts, store)
    what = "another worker to put the tokens together"
    counts = self.work.once("store", join, read, what, phase)
    if counts.documents < 2 and settings.objective != "mlm":
      raise errors.DataError(
        f"the input is one document of {counts.sentences} sentences, but half "
        "of the examples need a sentence of another document: put a blank "
        "line between documents (the end of a file does not separate them)"
      )
    return counts, kept

  def _join(
    self,
    tasks: list[token_store.PieceTask],
    phase: Phase,
    scratch: str,
    before: set[str],
  ) -> int:
    """Makes the store of all workers' chunks, in the order of the text.

    Returns the bytes of text whose chunks were there `before`.
    """
    settings = self.settings
    # A document longer than a block of examples is cut.
    block_examples = _BLOCK_BYTES // _example_bytes(settings)
    block_tokens = block_examples * settings.max_seq_length
    loaded = token_store.load_tokenizer(self.tokenizer)
    total = 0
    for path in {task.piece.path for task in tasks}:
      total += stores.at(path).state()[0]
    joined, done, kept = [], 0, 0
    with (
      token_store.StoreWriter(scratch, loaded.vocab_size) as writer,
      console.Progress("tokenizing", total / 1e6, "MB") as bar,
    ):
      for chunk in _chunks_in_order(tasks, phase):
        size = writer.append(chunk)
        joined.append(chunk)
        done += size
        if os.path.basename(chunk) in before:
          kept += size
        bar.at(done / 1e6)
      writer.finish(loaded, block_tokens)
    store = self.work.folder("store")
    leases.deliver(scratch, os.path.join(store, token_store.COUNTS))
    for chunk in joined:
      os.unlink(chunk)
    return kept

  def make_shards(
    self, counts: token_store.CorpusCounts
  ) -> tuple[list[shards.ShardResult], int]:
    """Makes shards until all are there: (results, number made before)."""
    settings, folder = self.settings, self.work.folder("shards")
    store, num_shards = self.work.folder("store"), _num_shards(counts, settings)
    num_blocks = -(-_blocks_of_corpus(counts, settings) // num_shards)
    tasks = []
    for shard, name in enumerate(settings.shard_names(num_shards)):
      path = os.path.join(folder, name)
      tasks.append(
        shards.ShardTask(
          store,
          path,
          shard=shard,
          num_shards=num_shards,
          num_blocks=num_blocks,
          settings=settings,
          tokenizer=self.tokenizer,
        )
      )
    phase = self.work.phase(shards.build_shard, tasks)
    # All shards hold about as much text.
    megabytes = counts.text_bytes / 1e6 / num_shards
    results, total = [], num_shards * megabytes
    with console.Progress("making records", total, "MB") as bar:
      for task in tasks:
        phase.wait(task.done_file)
        results.append(shards.ShardResult.load(task.done_file))
        bar.at(len(results) * megabytes)
    return results, phase.kept


def _chunks_in_order(
  tasks: list[token_store.PieceTask], phase: Phase
) -> Iterator[str]:
  """The files of all workers' chunks, each as soon as it is there."""
  for task in tasks:
    for number in itertools.count():
      chunk = task.chunk_file(number)
      phase.wait(chunk, task.done_file)
      # A finished piece has all of its chunks.
      if not os.path.exists(chunk):
        break
      yield chunk
