"""Finds the texts of a file that answer a question, by vectors of a model.

  python -m tools.search runs/embedder --documents=a.jsonl --query='who fell?'
  python -m tools.search runs/embedder --documents=a.jsonl --vectors=a.npy
  python -m tools.search runs/embedder --documents=scifact --evaluate
  python -m tools.search runs/embedder --documents=scifact --evaluate \\
    --rerank=runs/classifier_of_pairs

MODEL is what tools.embed takes. Without --query or --queries each line of
standard input is a query. --evaluate measures the model by a folder of BEIR's
form, beside BM25, which knows words only.
"""

import dataclasses
import functools
import itertools
import json
import signal
import sys
from collections.abc import Iterator

import numpy as np

from common import input_files, json_files, stores
from common.console import Progress, tell
from common.errors import DataError, UserError
from common.settings import in_group, run_with, setting
from corpus import text_files
from interop import model_source, predictions
from model.tasks import CLASSIFIER, DOCUMENT, QUERY
from retrieval import beir, bm25, index, measures, nearest, texts
from tools import embed

_AT_ONCE = 64  # queries of a file that are searched together
_SHOWN = 300  # characters of a text
_query, _search, _value = map(in_group, ("Query", "Search", "Evaluation"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings(embed.ModelSettings):
  """What to search, and how; the names are the flags'."""

  # fmt: off
  documents: str = setting(help=
    "Files with the texts to search, names and globs, or a folder of BEIR's "
    "form.")
  query: str | None = _query(None, "Text to find answers to.",
    excludes=("queries", "evaluate"))
  queries: str | None = _query(None,
    "Files with queries, in the forms of --documents.", excludes=("evaluate",))
  top_k: int = _search(5, "Texts to show of each query.", low=1)
  json: bool = _search(False, "Write JSON lines, with the whole texts.")
  vectors: str | None = _search(None,
    "File *.npy that tools.embed made of --documents. Default: they are "
    "embedded now.")
  index: str | None = _search(None,
    "File of an index for approximate search among millions of texts, made if "
    "it is not there. Default: the search is exact.")
  rerank: str | None = _search(None,
    "Classifier or regression of pairs, of run_classifier.py, that reads the "
    "query with each of the --rerank_depth best texts and orders these.")
  rerank_depth: int = _search(50, "Texts that --rerank orders.", low=1,
    needs="rerank")
  rerank_label: str | None = _search(None,
    "The label of --rerank whose probability is a text's score. Default: the "
    "last one.", needs="rerank")
  evaluate: bool = _value(False,
    "Measure the search by the judgments of a folder of BEIR's form.")
  split: str = _value("test", "File of judgments: qrels/SPLIT.tsv.",
    needs="evaluate")
  bm25: bool = _value(True, "Measure BM25, too.")
  # fmt: on


class Reranker:
  """Orders texts by a model that reads each together with the query."""

  def __init__(self, settings: SearchSettings, documents: texts.OnDisk):
    source = model_source.find(str(settings.rerank))
    task = source.task
    labels = task.get("labels") or [""]
    label = settings.rerank_label or labels[-1]
    columns = task.get("columns") or {}
    reads_pairs = task["task"] == CLASSIFIER and columns.get("text_pair", True)
    if not reads_pairs or label not in labels:
      problem = f"its labels are {', '.join(labels)}, not {label}"
      if not reads_pairs:
        problem = f"reads no pairs ({task['task']})"
      raise UserError(
        f"--rerank={settings.rerank}: {problem}: name a classifier or "
        "regression of pairs of run_classifier.py, and its --rerank_label"
      )
    self._label = labels.index(label) - len(labels)
    tell(*source.lines())
    self._predictor = predictions.load(source)
    self._documents, self.depth = documents, settings.rerank_depth

  def order(self, query: str, scores: np.ndarray, numbers: np.ndarray) -> None:
    """Orders a query's first documents, in place; others stay behind these."""
    first, pairs = numbers[: self.depth], []
    for number in first:
      # An empty text is no text of a pair for the model.
      pairs.append((query or ".", self._documents[number][1] or "."))
    new = np.empty(len(first), np.float32)
    for row, answer in enumerate(self._predictor.answers(pairs)):
      shares = answer.get("probabilities")
      new[row] = [*shares.values()][self._label] if shares else answer["value"]
    order = np.argsort(-new, kind="stable")
    scores[: len(first)], numbers[: len(first)] = new[order], first[order]
    rest = scores[len(first) :]
    rest[:] = new.min() - 1 - np.arange(len(rest))


class Search:
  """A model, and documents with their vectors or their index."""

  def __init__(
    self, settings: SearchSettings, model: str, documents: texts.OnDisk
  ):
    if not len(documents):
      raise DataError(f"--documents={settings.documents}: no texts")
    self._reranker = None
    if settings.rerank:
      self._reranker = Reranker(settings, documents)
    self._embedder = settings.open(model)
    tell(*self._embedder.source.lines())
    size = len(documents), self._embedder.size

    def vectors() -> np.ndarray:
      if settings.vectors:
        return _read_vectors(settings.vectors, size)
      items = (documents[n][1] for n in range(len(documents)))
      return embed.vectors_of(self._embedder, items, len(documents), DOCUMENT)

    cosine = self._embedder.is_cosine
    if settings.index:
      opened = index.opened(settings.index, size, cosine, vectors)
      self._nearest = functools.partial(index.search, opened, cosine=cosine)
    else:
      self._nearest = functools.partial(
        nearest.top_k, documents=vectors(), cosine=cosine
      )

  def find(self, queries: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores, float32 [q, k], and documents' numbers, the best first."""
    most = max(k, self._reranker.depth if self._reranker else 0)
    vectors = self._embedder.embed(queries, QUERY)
    scores, numbers = self._nearest(vectors, k=most)
    if self._reranker:
      with Progress("re-ranking", len(queries), "queries") as bar:
        for row, query in enumerate(queries):
          self._reranker.order(query, scores[row], numbers[row])
          bar.at(row + 1)
    return scores[:, :k], numbers[:, :k]


def _read_vectors(path: str, size: tuple[int, int]) -> np.ndarray:
  """The vectors of a file, which stay there; DataError for other ones."""
  input_files.expect_plain([path], input_files.PARQUET)
  problem = "no array"
  try:
    vectors = np.load(stores.at(path).local(), mmap_mode="r")
    problem = f"{vectors.dtype} of the shape {vectors.shape}"
  except (ValueError, EOFError):
    vectors = np.empty(0)
  if vectors.shape != size or vectors.dtype.kind != "f":
    raise DataError(
      f"{path}: {problem}, but --documents and the model have floats of the "
      f"shape {size}: make it by tools.embed, of these"
    )
  return vectors


def evaluate(settings: SearchSettings, model: str) -> list[str]:
  """The lines of a table: a row for each kind of search."""
  collection = beir.read(settings.documents, settings.split)
  rows: dict[str, measures.Results] = {}
  if settings.bm25:
    rows["BM25"] = measures.evaluate(collection, *bm25.search(collection))
  search = Search(settings, model, texts.OnDisk(collection.documents.items()))
  queries = [*collection.queries.values()]
  best = search.find(queries, measures.SEARCHED)
  title = f"{model}, then {settings.rerank}" if settings.rerank else model
  rows[title] = measures.evaluate(collection, *best)
  if settings.json:
    return [json.dumps(rows)]
  lines = [
    f"{settings.documents}: {len(queries):,} queries of "
    f"{settings.split}, {len(collection.documents):,} documents",
    "".join(f"{name:>12}" for name in rows[title]),
  ]
  for name, results in rows.items():
    values = [f"{value:12.4f}" for value in results.values()]
    lines.append("".join(values) + f"  {name}")
  return lines


def _read_queries(settings: SearchSettings) -> Iterator[str]:
  """The queries of a flag, a file, or the lines of standard input."""
  if settings.query is not None:
    return iter([settings.query])
  if settings.queries:  # which are looked for before documents are embedded
    return (text for _, text in settings.texts(settings.queries, QUERY).read())
  lines = text_files.utf8_lines(sys.stdin.buffer, "standard input")
  return filter(None, map(str.strip, lines))


def _answer_lines(settings, query: str, answers: list[dict]) -> list[str]:
  if settings.json:
    return [json_files.text({"query": query, "results": answers})]
  lines = [query]
  for rank, answer in enumerate(answers, 1):
    text = " ".join(answer["text"].split())
    shown = text[:_SHOWN] + "..." * (len(text) > _SHOWN)
    lines.append(f"{rank:3}. {answer['score']:.4f}  {answer['id']}: {shown}")
  return lines


def main(settings: SearchSettings, model: str) -> None:
  """Searches, or measures the search."""
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as `| head` does
  if settings.evaluate:
    print(*evaluate(settings, model), sep="\n")
    return
  if settings.query is not None and not settings.query.strip():
    raise UserError("--query: it is empty")
  queries = _read_queries(settings)
  documents = texts.OnDisk(settings.texts(settings.documents).read())
  search = Search(settings, model, documents)
  # Who types waits for each answer.
  is_typed = not (settings.query or settings.queries) and sys.stdin.isatty()
  if is_typed:
    tell("type a query and Enter; Ctrl-D ends")
  while batch := [*itertools.islice(queries, 1 if is_typed else _AT_ONCE)]:
    best = zip(batch, *search.find(batch, settings.top_k), strict=True)
    for query, scores, numbers in best:
      answers = []
      for score, number in zip(scores, numbers, strict=True):
        name, text = documents[number]
        answers.append({"id": name, "score": float(score), "text": text})
      print(*_answer_lines(settings, query, answers), sep="\n", flush=True)


if __name__ == "__main__":
  run_with(SearchSettings, main, arguments=1)
