"""Text to records: the work of create_pretraining_data.py.

Any number of workers (workers/shared_work.py) share two passes: pieces of text
to the token store (token_store.py), then the store to shards (shards.py). One
worker, any, joins the store, and one moves the finished shards to where they
belong. Unfinished work is in a folder beside the output.
"""

import dataclasses
import functools
import os
import time
from typing import NamedTuple

from common import console, errors, input_files, stores
from corpus import text_files
from records import data_set, shards, tfrecord, token_store
from records.creation_settings import IN_MANIFEST, CreationSettings
from text_encoders import tokenizer_files
from text_encoders.base import TokenizerInfo
from workers import leases, shared_work, work_dir

_BLOCK_BYTES = 16 << 20  # about, of the records that a worker holds at a time
_MAX_DEFAULT_SHARDS = 4096
# 1 cut chunks of JSON lines elsewhere; 2 had no `parts`, 3 no `letters`; 4 had
# words of SentencePiece begin at what it does not know.
_PLAN_VERSION = 5


class Summary(NamedTuple):
  """The new data set, and the work that it took."""

  manifest: data_set.Manifest
  manifest_path: str
  seconds: float  # of this command
  kept: str  # what an earlier attempt had finished


def create(
  settings: CreationSettings, worker: work_dir.Worker | None = None
) -> Summary | None:
  """Makes the records, their indexes and the manifest, alone or with others.

  The worker that moves the files gets the summary, the others None. A DataError
  leaves existing records as they are and no unfinished work.
  """
  # All that the user may have to change is found before any work is done.
  begin = time.monotonic()
  paths = input_files.expand_patterns(settings.input_file)
  claim(settings, paths, settings.explicit_shards)
  states = shared_work.states_of(paths)
  pieces = text_files.split_into_pieces(paths, settings.text)
  # The tokenizer is loaded here, so that its errors come early.
  vocabularies = settings.named_vocabulary()
  encoder, lines = tokenizer_files.load(vocabularies, settings.do_lower_case)
  if lines and not (worker and worker.number):
    console.tell(*lines)
  info = encoder.info()
  tokenizer = dataclasses.replace(info, file=encoder.file)
  settings = dataclasses.replace(settings, do_lower_case=info.do_lower_case)

  def make(work: shared_work.SharedWork) -> Summary:
    creation = _Creation(settings, work, paths, tokenizer)
    counts, kept_bytes = creation.tokenize(pieces)
    if counts.documents < 2 and settings.objective != "mlm":
      raise errors.DataError(
        f"the input is one document of {counts.sentences} sentences, but half "
        "of the examples need a sentence of another document: put a blank "
        "line between documents (the end of a file does not separate them)"
      )
    shared_work.expect_unchanged(states)
    results, kept_shards = creation.make_shards(counts)
    work.await_publishing()
    manifest = _manifest(settings, info, counts, results)
    creation.publish(manifest)
    seconds, kept = time.monotonic() - begin, ""
    if kept_bytes or kept_shards:
      kept = (
        f"{kept_bytes / 1e6:,.1f} MB of text tokenized and {kept_shards} of "
        f"{len(results)} shards made before"
      )
    return Summary(manifest, settings.manifest_path, seconds, kept)

  # All that decides the bytes: a command with the same plan resumes.
  plan = dataclasses.asdict(settings) | {
    "files": states,
    "tokenizer": dataclasses.asdict(info) | {"files": encoder.digest()},
    "version": _PLAN_VERSION,
  }
  del plan["workers"]
  aside = settings.work_folder
  job = work_dir.Job(aside, plan, "--output_file", settings.folder)
  return shared_work.share(make, job, worker, settings.workers.num_workers)


def claim(
  settings: CreationSettings, inputs: list[str], num_shards: int | None
) -> data_set.Manifest | None:
  """Refuses to write others' files; the manifest of what is replaced."""
  flag = f"--output_file={settings.output_file}"
  # No input may be overwritten.
  names, earlier = settings.shard_names(num_shards), None
  outputs = [os.path.join(settings.folder, name) for name in names]
  input_files.check_not_written(inputs, "--input_file", *outputs)
  for name, path in settings.named_vocabulary().items():
    input_files.check_not_written([path], f"--{name}", *outputs)
  try:
    owners = data_set.find_manifests(outputs)
    if stores.at(settings.manifest_path).is_file():
      earlier = data_set.Manifest.load(settings.manifest_path)
  except errors.DataError as e:  # a UserError keeps the finished work
    raise errors.UserError(
      f"{flag}: {e}: move it away, or give another name"
    ) from e
  # Nor what belongs to others; the data set's own files are replaced.
  problems = []
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


def _manifest(
  settings: CreationSettings,
  info: TokenizerInfo,
  counts: token_store.CorpusCounts,
  results: list[shards.ShardResult],
) -> data_set.Manifest:
  shown = {name: getattr(settings, name) for name in IN_MANIFEST}
  all_counts = dataclasses.asdict(counts)
  for name in ("examples", "real_tokens", "masked_tokens", "random_next"):
    all_counts[name] = sum(getattr(result, name) for result in results)
  return data_set.Manifest(
    max_seq_length=settings.max_seq_length,
    max_predictions_per_seq=settings.max_predictions_per_seq,
    examples_per_record=settings.examples_per_record,
    masking="dynamic" if settings.dynamic_masks else "static",
    tokenizer=info,
    settings=shown | {"num_shards": len(results)},
    counts=all_counts,
    files=tuple(result.info for result in results),
  )


# The two passes ---------------------------------------------------------------


def _example_bytes(settings: CreationSettings) -> int:
  # Ids take two bytes, mask and segment one, a prediction eight.
  size, most = settings.max_seq_length, settings.max_predictions_per_seq
  return 4 * size + 8 * most + 200


def shards_and_blocks(
  counts: token_store.CorpusCounts, settings: CreationSettings
) -> tuple[int, int]:
  """The number of shards, and of each one's blocks of `_BLOCK_BYTES`, about."""
  full = counts.tokens // settings.max_seq_length
  examples = settings.dupe_factor * (counts.documents + full)
  blocks = max(1, -(-examples * _example_bytes(settings) // _BLOCK_BYTES))
  most = min(blocks, counts.parts, _MAX_DEFAULT_SHARDS)
  count = settings.explicit_shards or most
  return count, -(-blocks // count)


class _Creation(NamedTuple):
  """The steps of the work, as one of its workers does them."""

  settings: CreationSettings
  work: shared_work.SharedWork
  inputs: list[str]
  tokenizer: TokenizerInfo

  def tokenize(
    self, pieces: list[text_files.Piece]
  ) -> tuple[token_store.CorpusCounts, int]:
    """Text to the token store: (counts, text bytes of an earlier attempt)."""
    settings, store = self.settings, self.work.folder("store")
    chunks = self.work.folder("pieces")
    counts_file = os.path.join(store, token_store.COUNTS)
    if os.path.exists(counts_file):
      counts = token_store.read_counts(store)
      return counts, counts.text_bytes
    tasks = []
    how = settings.text, self.tokenizer, settings.do_whole_word_mask
    for number, piece in enumerate(pieces):
      # The chunks are STEM.0, STEM.1, ..., then there is STEM.done.
      stem = f"{chunks}/{number:06d}"
      chunk_file = functools.partial("{}.{}".format, stem)
      tokenize = functools.partial(
        token_store.tokenize_piece, piece, *how, chunk_file
      )
      tasks.append(leases.Task(stem + ".done", tokenize, chunk_file))
    before = set(os.listdir(chunks))
    # Chunks are joined while later ones are being made.
    phase = shared_work.Phase(tasks, self.work)
    join = functools.partial(self._join, phase, before)
    what = "another worker to put the tokens together"
    task = leases.Task(counts_file, join)
    kept = self.work.once(task, what, phase.keep_going)
    # The store has all of it: chunks would take as much disk again.
    if kept is not None:  # this worker joined them
      for chunk in phase.chunks():
        os.unlink(chunk)
    return token_store.read_counts(store), kept or 0

  def _join(
    self, phase: shared_work.Phase, before: set[str], output: str
  ) -> int:
    """Makes the store, with the counts `output`; bytes that were `before`."""
    settings, done, kept = self.settings, 0, 0
    # A document longer than a block of examples is cut.
    block_examples = _BLOCK_BYTES // _example_bytes(settings)
    block_tokens = block_examples * settings.max_seq_length
    encoder = token_store.load_tokenizer(self.tokenizer)
    # Progress is in bytes on disk: what compressed text holds is not known.
    total = 0
    for path in self.inputs:
      total += stores.at(path).state()[0]
    with (
      token_store.StoreWriter(
        os.path.dirname(output), encoder.vocab_size
      ) as writer,
      console.Progress("tokenizing", total / 1e6, "MB") as bar,
    ):
      for chunk in phase.chunks():
        size = writer.append(chunk)
        done += size
        if os.path.basename(chunk) in before:
          kept += size
        bar.at(done / 1e6)
      writer.finish(encoder, block_tokens)
    return kept

  def make_shards(
    self, counts: token_store.CorpusCounts
  ) -> tuple[list[shards.ShardResult], int]:
    """Makes all shards: (results, number of an earlier attempt)."""
    settings, folder = self.settings, self.work.folder("shards")
    count, num_blocks = shards_and_blocks(counts, settings)
    # Only now it may be known how many files there will be.
    claim(settings, self.inputs, count)
    store, tasks = self.work.folder("store"), []
    for shard, name in enumerate(settings.shard_names(count)):
      task = shards.ShardTask(
        store, shard, count, num_blocks, settings, self.tokenizer
      )
      path = os.path.join(folder, name + shards.RESULT_SUFFIX)
      make = functools.partial(shards.build_shard, task)
      tasks.append(leases.Task(path, make))
    phase = shared_work.Phase(tasks, self.work)
    # All shards hold about as much text.
    megabytes = counts.text_bytes / 1e6 / count
    results = phase.finish("making records", "MB", megabytes)
    return [shards.ShardResult.load(path) for path in results], phase.kept

  def publish(self, manifest: data_set.Manifest) -> None:
    """Replaces an earlier manifest's files by the shards and the new one."""
    settings, folder = self.settings, self.work.folder("shards")
    # Making shards takes hours: other data sets may have come meanwhile.
    earlier = claim(settings, self.inputs, len(manifest.files))
    may_be_moved = earlier is None or earlier == manifest
    moves, names = [], set()
    for name in _with_indexes(manifest):
      source = os.path.join(folder, name)
      output = stores.at(os.path.join(settings.folder, name))
      if os.path.exists(source):
        moves.append((source, output))
      elif may_be_moved and output.is_file():
        names.add(name)  # it was moved before a stop
      else:
        raise errors.DataError(f"{source} is gone: start again")
    stale = []
    for name in _with_indexes(earlier) if earlier else ():
      if name not in names:
        stale.append(stores.at(os.path.join(settings.folder, name)))
    # The manifest knows what to delete, so it is the mark of the whole.
    source = os.path.join(folder, os.path.basename(settings.manifest_path))
    manifest.save(source)
    moves.append((source, stores.at(settings.manifest_path)))
    self.work.publish(moves, stale)


def _with_indexes(manifest: data_set.Manifest) -> list[str]:
  """The names of a data set's files, each shard after its index."""
  names = []
  for name in manifest.shards:
    names += [name + tfrecord.INDEX_SUFFIX, name]
  return names
