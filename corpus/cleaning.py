"""Documents to a corpus: the work of tools.prepare_corpus.

Any number of workers share its phases (workers/shared_work.py):

  read   pieces of the input to chunks of documents, without what filters remove
  lines  which documents lose which lines that recur; by part of the hashes
  sign   chunks to sentences and their signatures (near_duplicates.py)
  pairs  near-duplicates; by band of the signatures and part of its keys
  join   clusters of duplicates, the split and the files; one worker does it

Memory holds a chunk, the hashes of a part, or some numbers of each document.
From phase to phase a document is its lines in UTF-8, from `sign` on its
sentences.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from common import json_files, stores
from common.console import counted
from corpus import documents, filters, near_duplicates, prose, text_files
from corpus.report import Summary
from workers.shared_work import Phase, SharedWork, Task, make_chunks

MIN_DOCUMENTS = 20  # fewer give poor random next sentences, and are cut
PIECE_SENTENCES = 32  # of a cut document
TRAIN, HELDOUT, REMOVED = "train.txt", "heldout.txt", "removed.tsv"
REPORT, _SUMMARY = "report.html", "summary.json"
_CHUNK_CHARS = 2 << 20  # of the documents that a worker holds at a time
_PART_HASHES = 4 << 20  # that a worker sorts at a time
_END = b"\0"  # of an item in a file: text holds no NUL, see text_files.py
_REMEDY = "start the same command again"
_COMPARED_PAIRS, _SHOWN_BYTES = 50, 400  # for a pair in the report
_line_hash = functools.partial(hashlib.blake2b, digest_size=8)
# Reasons for which a document is not in the corpus, beside the filters' names.
_EMPTY, _EVALUATED = "empty", "shared with an evaluation set"
_EQUAL, _SIMILAR = "duplicate", "near-duplicate"


@dataclasses.dataclass(frozen=True)
class Rules:
  """Rules by which documents are changed, removed and held out."""

  form: documents.DocumentFormat
  filters: filters.Filters
  language: str  # whose rules end a sentence
  max_line_documents: int | None  # that keep an equal line; None: any number
  # Text that must not be in the corpus.
  evaluation_sets: tuple[text_files.Piece, ...]
  similarity: float  # of near-duplicates
  keep_duplicates: bool
  heldout_fraction: float


# Chunks of documents ----------------------------------------------------------


class _Chunk(NamedTuple):
  """Consecutive documents, as a phase leaves them: a folder of files."""

  path: str

  @property
  def done_file(self) -> str:
    """Counts of the chunk; it is written last."""
    return os.path.join(self.path, f"{os.path.basename(self.path)}.json")

  def texts(self, kind: str) -> list[bytes]:
    with open(os.path.join(self.path, kind), "rb") as f:
      return f.read().split(_END)[:-1]

  def array(self, kind: str) -> np.ndarray:
    return np.load(os.path.join(self.path, f"{kind}.npy"))

  def counts(self) -> dict:
    return json_files.read_own(self.done_file, _REMEDY)


def _write_chunk(
  done_file: str,
  counts: dict,
  texts: dict[str, Sequence[bytes]],
  arrays: dict[str, np.ndarray],
) -> None:
  """Writes a `_Chunk`'s files beside `done_file`, in a worker's own folder."""
  folder = os.path.dirname(done_file)
  for kind, items in texts.items():
    with open(os.path.join(folder, kind), "wb") as f:
      f.write(_END.join([*items, b""]))
  for kind, array in arrays.items():
    np.save(os.path.join(folder, kind), array)
  json_files.write(done_file, counts)


def _save(function: Callable[..., np.ndarray], *arguments: Any) -> None:
  """Writes function(...) as a task's array; its path is the last argument."""
  *values, output = arguments
  np.save(output, function(*values))


def _total(chunks: Iterable[_Chunk], count: str) -> int:
  return sum(chunk.counts()[count] for chunk in chunks)


def _removed(document: bytes, reason: str, other: bytes = b"") -> bytes:
  """A line of removed.tsv; `other` is a document that it is like."""
  return b"\t".join((document, reason.encode(), other))


# Reading ----------------------------------------------------------------------


def _chunk_file(done_file: str, number: int) -> str:
  """The file that makes a chunk of a reading task whole."""
  stem = done_file.removesuffix(".json")
  return _Chunk(f"{stem}-{number:04d}").done_file


def _read_pieces(
  pieces: list[text_files.Piece], rules: Rules, is_sample: bool,
  done_file: str, output: str,
) -> None:  # fmt: skip
  """Reads and filters the documents of some pieces; the first of a sample."""
  items = documents.read_documents(pieces, rules.form)
  size_of = lambda document: sum(map(len, document.lines))
  batches = text_files.gathered(items, size_of, _CHUNK_CHARS)
  if is_sample:  # a compressed file is one piece of any size
    batches = itertools.islice(batches, 1)
  chunk_file = functools.partial(_chunk_file, done_file)
  write = functools.partial(_filter_chunk, rules)
  make_chunks(output, chunk_file, batches, write)


def _groups(pieces: list[text_files.Piece]) -> list[list[text_files.Piece]]:
  """Consecutive pieces, about a usual piece's bytes together."""
  # A task for each of many small files would take longer than its work.
  sizes: dict[str, float] = {}  # of a file's pieces, on average
  for path, of_file in itertools.groupby(pieces, operator.attrgetter("path")):
    sizes[path] = stores.at(path).state()[0] / len(list(of_file))
  size_of = lambda piece: sizes[piece.path]
  return [*text_files.gathered(pieces, size_of, text_files.PIECE_BYTES)]


def _filter_chunk(
  rules: Rules, batch: list[documents.Document], done_file: str
) -> None:
  """Writes the chunk of a batch of documents, without what filters remove."""
  ids: list[bytes] = []
  texts, removed, counts = [], [], filters.Counts()
  passed = filters.Counts()
  line_hashes, line_documents = [], []  # documents' numbers in the chunk
  for document in batch:
    name = " ".join(document.id.split()).encode()
    if not any(document.lines):
      removed.append(_removed(name, _EMPTY))
      continue
    lines, reason = rules.filters.clean(document.lines, counts)
    if reason:
      removed.append(_removed(name, f"filter {reason}"))
      continue
    filters.signs_of(lines, passed)
    text = "\n".join(lines).encode()
    if rules.max_line_documents:
      for line in text.split(b"\n"):
        # Eight bytes: among a billion lines two have equal hashes by chance in
        # 3 of 100 corpora.
        line_hashes.append(_line_hash(line).digest())
        line_documents.append(len(ids))
    ids.append(name)
    texts.append(text)
  _write_chunk(
    done_file,
    {
      "read": len(batch),
      "documents": len(ids),
      "lines": len(line_hashes),
      "filters": counts,
      "passed": passed,
    },
    {"ids": ids, "text": texts, "removed": removed},
    {
      "line_hashes": np.frombuffer(b"".join(line_hashes), np.uint64),
      "line_documents": np.array(line_documents, np.uint64),
    },
  )


# Lines that recur -------------------------------------------------------------


def _find_recurring(
  chunks: list[_Chunk], part: int, parts: int, most: int
) -> np.ndarray:
  """The hashes of lines of more than `most` documents; the first of these."""
  # Blank lines separate paragraphs, so they may recur.
  blank = np.frombuffer(_line_hash(b"").digest(), np.uint64)
  tables, first = [np.zeros((2, 0), np.uint64)], 0
  for chunk in chunks:
    hashes, owners = chunk.array("line_hashes"), chunk.array("line_documents")
    in_part = (hashes % parts == part) & (hashes != blank)
    tables.append(np.stack([hashes, owners + np.uint64(first)])[:, in_part])
    first += chunk.counts()["documents"]
  lines = np.concatenate(tables, axis=1)
  lines = lines[:, np.argsort(lines[0], kind="stable")]
  # A document counts once for each of its lines.
  hashes, owners = lines[:, near_duplicates.differs(lines)]
  hashes, firsts, counts = np.unique(
    hashes, return_index=True, return_counts=True
  )
  recurs = counts > most
  return np.stack([hashes[recurs], owners[firsts[recurs]]])


@functools.lru_cache(1)
def _recurring(files: tuple[str, ...]) -> np.ndarray:
  """Hashes of lines that recur, sorted, and the document that keeps each."""
  lines = np.concatenate([np.load(path) for path in files], axis=1)
  return np.take(lines, np.argsort(lines[0]), axis=1)  # rows are contiguous


# Sentences and signatures -----------------------------------------------------


def _sign_chunk(
  source: _Chunk,
  first: int,
  recurring: tuple[str, ...],
  rules: Rules,
  output: str,
) -> None:
  """Splits documents, numbered from `first`, into sentences, and signs them."""
  stays = np.ones(0, bool)
  if recurring:
    # A line that recurs stays in its first document.
    hashes = source.array("line_hashes")
    owners = source.array("line_documents") + np.uint64(first)
    known, keepers = _recurring(recurring)
    stays = np.ones(len(hashes), bool)
    if len(known):
      indices = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
      stays = (known[indices] != hashes) | (keepers[indices] == owners)
  rest = iter(stays.tolist())
  texts: list[bytes] = []
  for text in source.texts("text"):
    lines: Iterable[str] = text.decode().split("\n")
    if recurring:
      lines = list(itertools.compress(lines, rest))
    sentences = filter(None, prose.sentences(lines, rules.language))
    texts.append("\n".join(sentences).encode())
  # Documents that hold text of an evaluation set are removed.
  is_evaluated = np.zeros(len(texts), bool)
  if rules.evaluation_sets:
    is_evaluated = near_duplicates.overlaps(texts, evaluation_ngrams(rules))
  ids, kept, keys, removed = [], [], [], []
  names = source.texts("ids")
  for name, text, is_known in zip(names, texts, is_evaluated, strict=True):
    if text and not is_known:
      ids.append(name)
      kept.append(text)
      keys.append(_key(text))
    else:
      removed.append(_removed(name, _EVALUATED if is_known else _EMPTY))
  # What is left is signed, to be compared with all other documents.
  near_duplicates.write_signatures(kept, os.path.dirname(output))
  _write_chunk(
    output,
    {"documents": len(ids), "lines_removed": int(np.sum(~stays))},
    {"ids": ids, "text": kept, "removed": removed},
    {"keys": np.array(keys, np.uint64)},
  )


def _key(text: bytes) -> int:
  """Orders documents; the lowest are held out. Equal ones are duplicates."""
  return int.from_bytes(hashlib.sha256(text).digest()[:8])


@functools.lru_cache(1)
def evaluation_ngrams(rules: Rules) -> np.ndarray:
  """The n-grams of evaluation sets, as `near_duplicates.overlaps` wants."""
  texts, form = [], rules.form.of_all_strings()
  for text in documents.read_strings(rules.evaluation_sets, form):
    if text.strip():
      texts.append(text_files.only_text(text).encode())
  size = near_duplicates.EVALUATION_WORDS
  return np.unique(near_duplicates.ngram_hashes(texts, size).values)


# The corpus -------------------------------------------------------------------


class _Corpus:
  """The documents that stay, in their order, and which are held out."""

  def __init__(self, chunks: list[_Chunk], pairs: Sequence[str], rules: Rules):
    self._chunks, self._rules = chunks, rules
    # NumPy does not concatenate an empty list.
    keys, edges = [np.zeros(0, np.uint64)], [np.zeros((0, 2), np.int64)]
    for chunk in chunks:
      keys.append(chunk.array("keys"))
    for path in pairs:
      edges.append(np.load(path))
    own_keys = np.concatenate(keys)
    # The first document of each one's cluster.
    self.firsts = near_duplicates.clusters(len(own_keys), np.concatenate(edges))
    self.is_first = self.firsts == np.arange(len(own_keys))
    self._stays = self.is_first | rules.keep_duplicates
    # All of a cluster go to the same side.
    self._keys = own_keys[self.firsts]
    self.is_equal = own_keys == self._keys
    self.documents = int(self._stays.sum())
    self.is_cut = self.documents < MIN_DOCUMENTS
    ranked = np.unique(self._keys[self._stays])
    # Few documents, such as one book, are split by pieces instead.
    if self.is_cut:
      keys_of_pieces = [key for key, _ in self.texts()]
      ranked = np.unique(np.array(keys_of_pieces, np.uint64))
    self.problem, self.limit = "", 0
    if len(ranked) < 4:
      self.problem = (
        f"{counted(len(ranked), 'different document')}: too few to train on "
        "and to hold some out: give more text (blank lines and file ends "
        "separate documents)"
      )
      return
    share = round(len(ranked) * rules.heldout_fraction)
    # Lower keys are held out. New text moves few documents.
    self.limit = int(ranked[min(max(2, share), len(ranked) - 2)])

  def texts(self) -> Iterator[tuple[int, bytes]]:
    """(key, sentences on lines) of each document, or piece of a cut one."""
    texts = itertools.compress(self._items("text"), self._stays)
    for key, text in zip(self._keys[self._stays], texts, strict=True):
      if not self.is_cut:
        yield int(key), text
        continue
      sentences = text.split(b"\n")
      for begin in range(0, len(sentences), PIECE_SENTENCES):
        piece = b"\n".join(sentences[begin : begin + PIECE_SENTENCES])
        yield _key(piece), piece

  def duplicates(self) -> Iterator[bytes]:
    """Lines of removed.tsv."""
    if self._rules.keep_duplicates:
      return
    again = ~self.is_first
    wanted = set(self.firsts[again].tolist())
    firsts = {}
    for number, name in enumerate(self._items("ids")):
      if number in wanted:  # it comes before its duplicates
        firsts[number] = name
      elif again[number]:
        reason = _EQUAL if self.is_equal[number] else _SIMILAR
        yield _removed(name, reason, firsts[int(self.firsts[number])])

  def pair(self) -> list[str]:
    """The least similar of some near-duplicates: `Summary.pair`."""
    again = np.flatnonzero(~self.is_first & ~self.is_equal)
    again = again[:: 1 + len(again) // _COMPARED_PAIRS]
    wanted = {*again.tolist(), *self.firsts[again].tolist()}
    texts = {}
    both = zip(self._items("ids"), self._items("text"), strict=True)
    for index, named in enumerate(both):
      if index in wanted:
        texts[index] = named
    pairs: list[tuple[float, int, int]] = []
    firsts = self.firsts[again].tolist()
    for number, first in zip(again.tolist(), firsts, strict=True):
      similarity = near_duplicates.similarity(texts[number][1], texts[first][1])
      pairs.append((similarity, first, number))
    if not pairs:
      return []
    similarity, *numbers = min(pairs)
    (first_name, first_text), (name, text) = (texts[n] for n in numbers)
    parts = first_name, name, *_around_difference(first_text, text)
    return [
      f"{similarity:.2f}",
      *(part.decode(errors="ignore") for part in parts),
    ]

  def _items(self, kind: str) -> Iterator[bytes]:
    for chunk in self._chunks:
      yield from chunk.texts(kind)


def _around_difference(one: bytes, other: bytes) -> tuple[bytes, bytes]:
  """What two texts have at their first difference."""
  shared = 0
  while one[shared : shared + 1] == other[shared : shared + 1] != b"":
    shared += 1
  begin = max(0, shared - _SHOWN_BYTES // 2)
  return one[begin:][:_SHOWN_BYTES], other[begin:][:_SHOWN_BYTES]


# The phases -------------------------------------------------------------------


def clean(
  work: SharedWork, pieces: list[text_files.Piece], rules: Rules,
  is_sample: bool = False,
) -> tuple[str, Summary]:  # fmt: skip
  """(folder with the files of the corpus, their summary).

  Of a sample only the first documents of pieces are read.
  """
  folder, tasks = work.folder("read"), []
  # Reading: pieces to chunks of documents, without what filters remove.
  for number, group in enumerate(_groups(pieces)):
    path = f"{folder}/{number:06d}.json"
    make = functools.partial(_read_pieces, group, rules, is_sample, path)
    tasks.append(Task(path, make, functools.partial(_chunk_file, path)))
  phase = Phase(tasks, work)
  phase.finish("reading")
  sources = [_Chunk(os.path.dirname(path)) for path in phase.chunks()]

  signed = _sign(work, sources, rules)

  # Any part of a band's keys can be searched alone.
  folder, tasks = work.folder("pairs"), []
  parts = 1 + _total(signed, "documents") // _PART_HASHES
  chunks = [chunk.path for chunk in signed]
  for band in range(near_duplicates.BANDS):
    for part in range(parts):
      find = functools.partial(_save, near_duplicates.edges, chunks, band)
      make = functools.partial(find, part, parts, rules.similarity)
      tasks.append(Task(f"{folder}/pairs-{band:02d}-{part:04d}.npy", make))
  pairs = Phase(tasks, work).finish("near-duplicates")

  folder = work.folder("joined")
  path = os.path.join(folder, _SUMMARY)

  def join(output: str) -> None:
    corpus = _Corpus(signed, pairs, rules)
    summary = _write(os.path.dirname(output), sources, signed, corpus)
    json_files.write(output, summary._asdict())

  work.once(Task(path, join), "another worker to write the corpus")
  return folder, Summary(**json_files.read_own(path, _REMEDY))


def _sign(
  work: SharedWork, sources: list[_Chunk], rules: Rules
) -> list[_Chunk]:
  """Documents without lines that recur to sentences and signatures."""
  recurring: tuple[str, ...] = ()
  most, tasks = rules.max_line_documents, []
  if most is not None:
    parts = 1 + _total(sources, "lines") // _PART_HASHES
    folder = work.folder("lines")
    for part in range(parts):
      find = functools.partial(_save, _find_recurring, sources)
      make = functools.partial(find, part, parts, most)
      tasks.append(Task(f"{folder}/lines-{part:04d}.npy", make))
    recurring = tuple(Phase(tasks, work).finish("lines that recur"))
  folder, first, signed, tasks = work.folder("signed"), 0, [], []
  for source in sources:
    chunk = _Chunk(os.path.join(folder, os.path.basename(source.path)))
    make = functools.partial(_sign_chunk, source, first, recurring, rules)
    tasks.append(Task(chunk.done_file, make))
    signed.append(chunk)
    first += source.counts()["documents"]
  Phase(tasks, work).finish("splitting")
  return signed


def _write(
  folder: str, sources: list[_Chunk], signed: list[_Chunk], corpus: _Corpus
) -> Summary:
  """Writes the corpus and the list of removed documents."""
  # A document is its sentences and a blank line.
  sides = {TRAIN: [0, 0], HELDOUT: [0, 0]}
  with (
    open(os.path.join(folder, TRAIN), "wb") as train,
    open(os.path.join(folder, HELDOUT), "wb") as heldout,
  ):
    for key, text in [] if corpus.problem else corpus.texts():
      name, f = (HELDOUT, heldout) if key < corpus.limit else (TRAIN, train)
      f.write(text + b"\n\n")
      sides[name][0] += 1
      sides[name][1] += text.count(b"\n") + 1
  removed: collections.Counter[str] = collections.Counter()
  with open(os.path.join(folder, REMOVED), "wb") as f:
    lists = [chunk.texts("removed") for chunk in (*sources, *signed)]
    for line in itertools.chain(*lists, corpus.duplicates()):
      removed[line.split(b"\t")[1].decode()] += 1
      f.write(line + b"\n")
  totals = {}
  for name in ("filters", "passed"):
    totals[name] = filters.total([c.counts()[name] for c in sources])
  return Summary(
    read=_total(sources, "read"),
    sides=sides,
    cut=corpus.documents if corpus.is_cut else 0,
    removed=dict(removed.most_common()),
    lines_removed=_total(signed, "lines_removed"),
    filtered=totals["filters"],
    passed=totals["passed"],
    pair=corpus.pair(),
    problem=corpus.problem,
  )
