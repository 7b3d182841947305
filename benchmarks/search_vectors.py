"""Time and memory of searching many vectors: exactly, and by the index.

  python -m benchmarks.search_vectors --vectors=1000000 \\
    --like=some.npy >> benchmarks/results/search_vectors.jsonl

The vectors are made of those of --like (tools.embed), which are real: each is
0.8 of one, 0.2 of another and some noise, normalised. Queries are vectors of
the file with more noise. Memory is what the process has beside mapped files.
"""

import argparse
import json
import os
import tempfile
import threading
import time

import numpy as np

from retrieval import index, nearest

_BLOCK = 65_536


class Peak:
  """The most anonymous memory of this process, in MB, while it is entered."""

  def __enter__(self):
    self.most, self._ends = 0, threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()
    return self

  def _watch(self):
    while not self._ends.wait(0.02):
      with open("/proc/self/status") as f:
        line = next(line for line in f if line.startswith("RssAnon"))
      self.most = max(self.most, int(line.split()[1]) >> 10)

  def __exit__(self, *_):
    self._ends.set()
    self._thread.join()


def noisy(random, vectors, scale):
  return vectors + scale * random.standard_normal(vectors.shape, np.float32)


def write(path, like, count):
  """A file of `count` vectors."""
  random = np.random.default_rng(0)
  file = np.lib.format.open_memmap(
    path, "w+", np.float32, (count, like.shape[1])
  )
  for start in range(0, count, _BLOCK):
    rows = min(_BLOCK, count - start)
    one, other = random.integers(0, len(like), [2, rows])
    mixed = 0.8 * like[one] + 0.2 * like[other]
    file[start : start + rows] = nearest.unit(noisy(random, mixed, 0.02))


def timed(function, *arguments):
  with Peak() as peak:
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start, peak.most


def matmul_gflops():
  """The machine's rate now: a product of 2,048 x 2,048, the best of three."""
  square = np.ones([2048, 2048], np.float32)
  seconds = min(timed(np.matmul, square, square)[1] for _ in range(3))
  return 2 * 2048**3 / seconds / 1e9


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--vectors", type=int, default=1_000_000)
  parser.add_argument("--queries", type=int, default=100)
  parser.add_argument("--like", required=True)
  arguments = parser.parse_args()
  count, queries = arguments.vectors, arguments.queries
  like = nearest.unit(np.load(arguments.like))
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "vectors.npy")
    write(path, like, count)
    documents = np.load(path, mmap_mode="r")
    some = documents[:: count // queries][:queries]
    asked = noisy(np.random.default_rng(1), some, 0.03)
    result = {
      "vectors": count,
      "size": like.shape[1],
      "queries": queries,
      "load": os.getloadavg()[0],
      "cores": os.cpu_count(),
      "matmul_gflops": matmul_gflops(),
    }
    (_, exact), seconds, peak = timed(nearest.top_k, asked, documents, 10)
    _, one, _ = timed(nearest.top_k, asked[:1], documents, 10)
    result |= {
      "exact_seconds": seconds,
      "exact_one_query_seconds": one,
      "exact_gflops": 2 * documents.size * queries / seconds / 1e9,
      "exact_peak_mb": peak,
    }
    print(json.dumps(result), flush=True)
    file = os.path.join(folder, "index")
    arguments = file, [*documents.shape], True, lambda: documents
    opened, seconds, peak = timed(index.opened, *arguments)
    result |= {
      "index_build_seconds": seconds,
      "index_build_peak_mb": peak,
      "index_mb": os.path.getsize(file) >> 20,
    }
    (_, found), seconds, peak = timed(opened.search, asked, 10)
    shared = [len({*a} & {*b}) / 10 for a, b in zip(exact, found, strict=True)]
    result |= {
      "index_ms_per_query": 1e3 * seconds / queries,
      "index_recall_of_exact_10": float(np.mean(shared)),
    }
  print(json.dumps(result))


if __name__ == "__main__":
  main()
