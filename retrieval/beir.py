"""BEIR's folders: documents, queries, and which documents answer which query.

The form of Thakur et al. 2021 (arXiv:2104.08663): corpus.jsonl with `_id`,
`title` and `text`, queries.jsonl with `_id` and `text`, and qrels/SPLIT.tsv
with the columns query-id, corpus-id and score, named in its first line.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from common import input_files, json_files, stores
from common.errors import DataError
from corpus import text_files

CORPUS_FILE, QUERIES_FILE = "corpus.jsonl", "queries.jsonl"
_COLUMNS = ["query-id", "corpus-id", "score"]
ID = "_id"
_ID = (str, int)
_DOCUMENT = {"_id": _ID, "title?": (str, None), "text": (str, None)}
_QUERY = {"_id": _ID, "text": str}


class Collection(NamedTuple):
  """Documents, and queries with the documents that answer them."""

  queries: dict[str, str]  # id -> text, of judged queries only
  documents: dict[str, str]  # id -> title and text, joined by a space
  qrels: dict[str, dict[str, int]]  # query -> {document: gain}, 0 is no answer


def is_folder(path: str) -> bool:
  """Whether a folder has BEIR's form."""
  return stores.at(os.path.join(path, CORPUS_FILE)).is_file()


def documents(folder: str) -> Iterator[tuple[str, str]]:
  """(id, title and text) of each document, in the order of the file.

  DataError for a line of another form and for an id that occurs twice.
  """
  path = os.path.join(folder, CORPUS_FILE)
  lines: dict[str, int] = {}
  for line, value in _objects(path, _DOCUMENT):
    name = _once(value, line, path, lines)
    yield name, text_of(value)


def text_of(document: dict) -> str:
  """Title and text of a line of the corpus."""
  parts = document.get("title") or "", document["text"] or ""
  return text_files.only_text(" ".join(parts).strip())


def read(folder: str, split: str = "test") -> Collection:
  """Reads a folder and the judgments of a split.

  DataError, with file and line, for what is not of the form, and for judgments
  of unknown documents or queries.
  """
  corpus = dict(documents(folder))
  queries: dict[str, str] = {}
  lines: dict[str, int] = {}
  path = os.path.join(folder, QUERIES_FILE)
  for line, value in _objects(path, _QUERY):
    name = _once(value, line, path, lines)
    queries[name] = text_files.only_text(value["text"].strip())
  path = os.path.join(folder, "qrels", f"{split}.tsv")
  if not stores.at(path).is_file():
    raise DataError(f"{path}: no such file: --split names one of that folder")
  qrels: dict[str, dict[str, int]] = {}
  for line, query, document, gain in _judgments(path):
    judged = qrels.setdefault(query, {})
    if query not in queries or document not in corpus:
      fault = f"{query!r} is not in {QUERIES_FILE}"
      if query in queries:
        fault = f"{document!r} is not in {CORPUS_FILE}"
    elif not queries[query]:
      fault = f"the query {query!r} has no text"
    elif gain != judged.setdefault(document, gain):
      fault = f"{document!r} has another score for {query!r} above"
    else:
      continue
    raise DataError(f"{path}: line {line}: {fault}: remove the line")
  if not qrels:
    raise DataError(f"{path}: no judgments")
  texts: dict[str, str] = {}
  for name in qrels:
    texts[name] = queries[name]
  return Collection(texts, corpus, qrels)


def _objects(path: str, form: dict) -> Iterator[tuple[int, dict[str, Any]]]:
  """(line, object) of JSON lines; DataError for another form."""
  with input_files.unpacked(path) as (content, _):
    for number, line in enumerate(text_files.utf8_lines(content, path), 1):
      if not line.strip():
        continue
      try:
        yield number, json_files.parse(line, form, strict=False)
      except ValueError as e:
        raise DataError(
          f"{path}: line {number}: no line of BEIR's form ({str(e)[:200]})"
        ) from e


def _once(value: dict, line: int, path: str, lines: dict[str, int]) -> str:
  """The id of an object; DataError if an earlier line has it."""
  name = str(value[ID])
  before = lines.setdefault(name, line)
  where = f"{path}: line {line}"
  if before != line:
    raise DataError(f"{where}: the _id {name!r} is that of line {before}, too")
  return name


def _judgments(path: str) -> Iterator[tuple[int, str, str, int]]:
  """(line, query, document, gain) of a file of judgments."""
  with input_files.unpacked(path) as (content, _):
    for number, line in enumerate(text_files.utf8_lines(content, path), 1):
      cells = input_files.tsv_cells(line)
      if number == 1 and cells != _COLUMNS:
        raise DataError(
          f"{path}: line 1 is {line.strip()[:60]!r}, not the header "
          f"{' '.join(_COLUMNS)} with tabs between them: add it"
        )
      if number == 1 or not cells:
        continue
      try:
        query, document, score = cells
        gain = float(score)
        # A gain is a weight of nDCG, for which BEIR has whole numbers.
        if gain != max(0, int(gain)):
          raise ValueError("its score is no whole number")
      except (ValueError, OverflowError) as e:
        raise DataError(
          f"{path}: line {number}: no query, document and score of 0 or more "
          f"with tabs between them ({e})"
        ) from e
      yield number, query, document, int(gain)
