"""The exact nearest vectors, by blocks: memory does not grow with documents."""

import numpy as np

from common.errors import DataError

# Documents whose similarities to some queries are in memory at once, and the
# number of those queries: 64 MB of float32.
_DOCUMENTS, _QUERIES = 16_384, 1_024
# A matrix product is of whole multiples of these, the rest zeros: at the edge
# of a BLAS library's tiles, and in small products, numbers may be added in
# another order.
_DOCUMENT_TILE, _QUERY_TILE = 1_024, 16


def unit(vectors: np.ndarray) -> np.ndarray:
  """Vectors [n, d] of length 1, float32; zeros stay zeros."""
  vectors = np.asarray(vectors, np.float32)
  lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
  return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


def top_k(
  queries: np.ndarray,
  documents: np.ndarray,
  k: int,
  cosine: bool = True,
  block: int = _DOCUMENTS,
) -> tuple[np.ndarray, np.ndarray]:
  """The k most similar documents of each query, the best first.

  `queries` [q, d], `documents` [n, d], of any float type, perhaps mapped from
  a file, of which `block` rows are read at once. Returns similarities, float32
  [q, min(k, n)], cosines or else dot products, and the documents' numbers,
  int64. Of equal similarities the lower number is first. The result does not
  depend on `block`. DataError for a vector that is not finite.
  """
  k = min(k, len(documents))
  queries, lengths = _checked(queries, 0, "query")
  if cosine:
    queries = queries / lengths[:, np.newaxis]
  scores = np.full([len(queries), k], -np.inf, np.float32)
  numbers = np.full([len(queries), k], len(documents), np.int64)
  for start in range(0, len(documents), block):
    part, lengths = _checked(
      documents[start : start + block], start, "document"
    )
    for first in range(0, len(queries), _QUERIES):
      rows = slice(first, first + _QUERIES)
      similar = _product(queries[rows], part)
      if cosine:
        similar /= lengths
      scores[rows], numbers[rows] = _merged(
        scores[rows], numbers[rows], similar, start
      )
  return scores, numbers


def _checked(vectors, start: int, what: str) -> tuple[np.ndarray, np.ndarray]:
  """Float32 vectors and their lengths; `start` numbers the first, for errors.

  The length of zeros is 1.
  """
  vectors = np.asarray(vectors, np.float32)
  lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
  if not np.isfinite(lengths).all():
    number = start + int(np.argmin(np.isfinite(lengths)))
    raise DataError(
      f"the vector of {what} {number}, counted from 0, is not finite: embed "
      "the texts again"
    )
  lengths[lengths == 0] = 1
  return vectors, lengths


def _product(queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
  """Dot products [q, n], each the same whatever stands beside it."""
  rows, columns = len(queries), len(documents)
  queries = np.pad(queries, [(0, -rows % _QUERY_TILE), (0, 0)])
  documents = np.pad(documents, [(0, -columns % _DOCUMENT_TILE), (0, 0)])
  return (queries @ documents.T)[:rows, :columns]


def _merged(
  scores: np.ndarray, numbers: np.ndarray, similar: np.ndarray, start: int
) -> tuple[np.ndarray, np.ndarray]:
  """The best k of those so far [q, k] and of a block's similarities [q, n].

  The block's documents are numbered from `start`, above all others.
  """
  k = scores.shape[1]
  # Sorting all similarities would take longer than computing them. Only those
  # above the worst so far count; an equal one has a higher number.
  better = similar > scores[:, -1:]
  if similar.shape[1] > k and better.sum() > 4 * scores.size:
    floor = np.partition(similar, -k, axis=1)[:, -k, np.newaxis]
    better &= similar >= floor
  rows, columns = np.nonzero(better)
  row = np.concatenate([np.repeat(np.arange(len(scores)), k), rows])
  score = np.concatenate([scores.ravel(), similar[rows, columns]])
  number = np.concatenate([numbers.ravel(), columns + start])
  order = np.lexsort([number, -score, row])
  starts = np.searchsorted(row[order], np.arange(len(scores)))
  best = order[starts[:, np.newaxis] + np.arange(k)]
  return score[best], number[best]
