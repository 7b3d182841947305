"""An index on the disk, for approximate search among millions of vectors.

It is faiss' inverted file (Jegou et al. 2011, "Product Quantization for Nearest
Neighbor Search"): k-means cuts the vectors, float16, into lists, and a search
reads the lists whose centres are nearest to the query. The lists stay on the
disk, of which the system keeps in memory what is read.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from common import files, input_files
from common.console import Progress
from common.errors import DataError, needing
from retrieval import nearest

_BLOCK = 65_536  # vectors that are added at once
_PER_CENTRE = 40  # vectors that k-means reads for each list
_LISTS_READ = 64  # for a query; more find more, and take longer


def search(
  index, queries: np.ndarray, k: int, cosine: bool = True
) -> tuple[np.ndarray, np.ndarray]:
  """Similarities [q, k] and numbers, nearly always those of `nearest.top_k`."""
  k = min(k, index.ntotal)
  if cosine:
    queries = nearest.unit(queries)
  index.nprobe = _LISTS_READ
  scores, numbers = index.search(queries, k)
  # -1: the lists that were read hold fewer vectors than that.
  while (numbers < 0).any() and index.nprobe < index.nlist:
    index.nprobe *= 4
    scores, numbers = index.search(queries, k)
  return scores, numbers


def opened(
  path: str, size: tuple[int, int], cosine: bool, vectors: Callable
) -> Any:
  """The index of a file, which is made of `vectors()` if there is none.

  `size` is their shape. DataError for the index of other vectors, UserError
  without the library.
  """
  with needing("search", "--index"):
    import faiss
  if not os.path.exists(path):
    with files.atomic_write(path) as f:
      index = _built(faiss, nearest.unit if cosine else np.asarray, vectors())
      faiss.write_index(index, f.name)
  input_files.expect_plain([path])
  try:
    index = faiss.read_index(path, faiss.IO_FLAG_MMAP)
  except RuntimeError as e:
    raise DataError(f"{path}: no index of faiss: remove it") from e
  shape = index.ntotal, index.d
  if shape != size:
    raise DataError(
      f"{path}: an index of vectors of the shape {shape}, but these have "
      f"{size}: remove the file, so that it is made again"
    )
  return index


def _built(faiss, prepared: Callable, vectors: np.ndarray):
  """An index in memory; the same vectors give the same one."""
  count, width = vectors.shape
  lists = max(1, min(int(4 * count**0.5), count // _PER_CENTRE))
  index = faiss.index_factory(
    width, f"IVF{lists},SQfp16", faiss.METRIC_INNER_PRODUCT
  )
  # K-means reads vectors of all parts of the file, always the same ones.
  some = np.linspace(0, count - 1, min(count, lists * _PER_CENTRE)).astype(int)
  index.train(prepared(vectors[some]))
  with Progress("making the index", count, "vectors") as bar:
    for start in range(0, count, _BLOCK):
      index.add(prepared(vectors[start : start + _BLOCK]))
      bar.at(min(start + _BLOCK, count))
  return index
