"""Time and memory of searching many vectors: exactly, and by the index.

  python -m benchmarks.search_vectors --vectors=1000000 \\
    --like=some.npy >> benchmarks/results/search_vectors.jsonl

The vectors are made of those of --like (tools.embed), which are real: each is
0.8 of one, 0.2 of another and some noise, normalised. Queries are vectors of
the file with more noise. Memory is what the process has beside mapped files.
"""

import argparse
import os
import pathlib
import tempfile
import threading
import time

import numpy as np

from benchmarks import measuring
from retrieval import index, nearest

_BLOCK = 65_536


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
    noise = random.standard_normal(mixed.shape, np.float32)
    file[start : start + rows] = nearest.unit(mixed + 0.02 * noise)


def timed(function, *arguments):
  """What it returns, its seconds, and the most anonymous memory in MB."""
  most, ends = 0, threading.Event()

  def watch():
    nonlocal most
    while not ends.wait(0.02):
      status = pathlib.Path("/proc/self/status").read_text()
      kilobytes = status.split("RssAnon:")[1].split()[0]
      most = max(most, int(kilobytes) >> 10)

  watcher = threading.Thread(target=watch)
  watcher.start()
  start = time.perf_counter()
  result = function(*arguments)
  seconds = time.perf_counter() - start
  ends.set()
  watcher.join()
  return result, seconds, most


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--vectors", type=int, default=1_000_000)
  parser.add_argument("--queries", type=int, default=100)
  parser.add_argument("--like", required=True)
  arguments = parser.parse_args()
  count, queries = arguments.vectors, arguments.queries
  like = nearest.unit(np.load(arguments.like))
  with tempfile.TemporaryDirectory() as folder:
    path, file = f"{folder}/vectors.npy", f"{folder}/index"
    write(path, like, count)
    documents = np.load(path, mmap_mode="r")
    some = documents[:: count // queries][:queries]
    noise = np.random.default_rng(1).standard_normal(some.shape, np.float32)
    asked, square = some + 0.03 * noise, np.ones([2048, 2048], np.float32)
    product = min(timed(np.matmul, square, square)[1] for _ in range(3))
    result = {
      "vectors": count,
      "size": like.shape[1],
      "queries": queries,
      "load": os.getloadavg()[0],
      "cores": os.cpu_count(),
      "matmul_gflops": 2 * 2048**3 / product / 1e9,
    }
    (_, exact), seconds, peak = timed(nearest.top_k, asked, documents, 10)
    result |= {"exact_seconds": seconds, "exact_peak_mb": peak}
    one = timed(nearest.top_k, asked[:1], documents, 10)[1]
    result["exact_one_query_seconds"] = one
    opened, seconds, peak = timed(
      index.opened, file, documents.shape, True, lambda: documents
    )
    result |= {"index_build_seconds": seconds, "index_build_peak_mb": peak}
    (_, found), seconds, _ = timed(index.search, opened, asked, 10)
    shared = [len({*a} & {*b}) / 10 for a, b in zip(exact, found, strict=True)]
    measuring.show(
      result
      | {
        "index_mb": os.path.getsize(file) >> 20,
        "index_ms_per_query": 1e3 * seconds / queries,
        "index_recall_of_exact_10": float(np.mean(shared)),
      }
    )


if __name__ == "__main__":
  main()
