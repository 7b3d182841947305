"""BEIR's folders: documents, queries, and which documents answer which query.

The form of Thakur et al. 2021 (arXiv:2104.08663): corpus.jsonl with `_id`,
`title` and `text`, queries.jsonl with `_id` and `text`, and qrels/SPLIT.tsv
with the columns query-id, corpus-id and score, named in its first line.
"""

import os
from typing import NamedTuple

from common import stores
from common.errors import DataError
from corpus import tables
from retrieval import texts

_COLUMNS = "query-id", "corpus-id", "score"
_HEADER = f"a header with {', '.join(_COLUMNS)}"


class Collection(NamedTuple):
  """Documents, and queries with the documents that answer them."""

  queries: dict[str, str]  # id -> text, of judged queries only
  documents: dict[str, str]  # id -> title and text, joined by a space
  qrels: dict[str, dict[str, int]]  # query -> {document: gain}, 0 is no answer


def read(folder: str, split: str = "test") -> Collection:
  """Reads a folder and the judgments of a split.

  DataError, with file and line, for what is not of the form, and for judgments
  of unknown documents or queries.
  """
  documents = _texts(os.path.join(folder, texts.CORPUS_FILE))
  queries = _texts(os.path.join(folder, texts.QUERIES_FILE))
  path = os.path.join(folder, "qrels", f"{split}.tsv")
  if not stores.at(path).is_file():
    raise DataError(f"{path}: no such file: name a split that is there")
  rows, columns = tables.read_table(path), []
  for name in _COLUMNS:
    columns.append(tables.column(path, rows, name, _HEADER))
  scores = tables.numbers(path, rows, _COLUMNS[-1], columns.pop())
  judged: dict[str, str] = {}
  qrels: dict[str, dict[str, int]] = {}
  for row, query, document, gain in zip(rows, *columns, scores, strict=True):
    gains = qrels.setdefault(query, {})
    if query not in queries:
      fault = f"{query!r} is not in {texts.QUERIES_FILE}"
    elif document not in documents:
      fault = f"{document!r} is not in {texts.CORPUS_FILE}"
    elif not queries[query]:
      fault = f"the query {query!r} has no text"
    elif gain != max(0, int(gain)):
      # It is a weight of nDCG, for which BEIR has whole numbers.
      fault = f"the score {gain:g} is no whole number of 0 or more"
    elif gain != gains.setdefault(document, int(gain)):
      fault = f"{document!r} has another score for {query!r} above"
    else:
      judged[query] = queries[query]
      continue
    raise DataError(f"{path}: line {row.line}: {fault}: remove the line")
  return Collection(judged, documents, qrels)


def _texts(path: str) -> dict[str, str]:
  """Id -> text of a file of JSON lines; DataError for an id that is twice."""
  by_id: dict[str, str] = {}
  for name, text in texts.of_beir(path).read():
    if name in by_id:
      raise DataError(f"{path}: two lines have the _id {name!r}: remove one")
    by_id[name] = text
  return by_id
