"""Near-duplicates: exactness, speed and memory; JSON lines.

  python -m benchmarks.near_duplicates TEXT.txt [PYTHON-WITH-DATATROVE]

TEXT.txt has blank lines between documents (`benchmarks/mixed_corpus.py` makes
some). First, of 10,000 documents 4,000 are copies of others with 0, 1, 5 or 20%
of the words changed; clusters are compared with the exact Jaccard similarity of
all pairs, of sets of words that are not hashed. Then all steps on one core, at
40 and 400 MB, and beside datatrove's MinHash with its own parameters, in turns.
"""

import collections
import functools
import itertools
import json
import random
import re
import resource
import sys
import tempfile
import time

import numpy as np

from benchmarks import measuring
from corpus import near_duplicates

PIECE_DOCUMENTS = 800  # about 2 MB
CHANGES = (0, 0.01, 0.05, 0.2)
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
WORD = re.compile(rb"[\xe3-\xed]..|(?:[0-9a-z]|[\x80-\xe2\xee-\xff])+", re.S)


def documents_of(path: str, megabytes: float):
  """So much text; after its end again in other letters, so nothing recurs."""
  with open(path, "rb") as f:
    texts = [text for text in re.split(rb"\n\n+", f.read()) if text.strip()]
  left = megabytes * 1e6
  for shift in range(len(LETTERS)):
    table = bytes.maketrans(LETTERS, LETTERS[shift:] + LETTERS[:shift])
    for text in texts:
      if left <= 0:
        return
      yield text.translate(table)
      left -= len(text)


def ours(documents, threshold: float = 0.8):
  """The first document of each one's cluster."""
  count, folders, left = 0, [], iter(documents)
  with tempfile.TemporaryDirectory() as root:
    while texts := list(itertools.islice(left, PIECE_DOCUMENTS)):
      folders.append(tempfile.mkdtemp(dir=root))
      near_duplicates.write_signatures(texts, folders[-1])
      count += len(texts)
    edges = [
      near_duplicates.edges(folders, band, 0, 1, threshold)
      for band in range(near_duplicates.BANDS)
    ]
    return near_duplicates.clusters(count, np.concatenate(edges))


def datatrove(documents) -> None:
  """Its steps up to the clusters; each with the tasks that it needs."""
  from datatrove.data import Document
  from datatrove.executor import LocalPipelineExecutor
  from datatrove.pipeline import dedup

  texts = [Document(t.decode(), str(i)) for i, t in enumerate(documents)]
  with tempfile.TemporaryDirectory() as root:
    signatures, buckets, clusters = (f"{root}/{name}" for name in "sbc")
    for step, tasks in (
      ([texts, dedup.MinhashDedupSignature(signatures)], 1),
      ([dedup.MinhashDedupBuckets(signatures, buckets)], 14),
      ([dedup.MinhashDedupCluster(buckets, clusters)], 1),
    ):
      logs = tempfile.mkdtemp(dir=root)
      LocalPipelineExecutor(step, tasks, workers=1, logging_dir=logs).run()


def planted(path: str, count: int = 10_000) -> list[bytes]:
  """Documents of 30 to 300 words, then copies."""
  rng, everything = random.Random(1), b" ".join(documents_of(path, 30)).split()
  begins = range(0, len(everything), 300)
  originals = [
    everything[begin : begin + rng.randrange(30, 300)]
    for begin in rng.sample(begins, count * 6 // 10)
  ]
  copies = [[*words] for words in originals[: count - len(originals)]]
  for i, words in enumerate(copies):
    for k in range(len(words)):
      if rng.random() < CHANGES[i % 4]:
        words[k] = rng.choice(everything)
  return list(map(b" ".join, originals + copies))


def similarities(documents: list[bytes]):
  """(pairs [m, 2] with common shingles, their similarities [m]), exactly."""
  owners, sizes = collections.defaultdict(list), []
  for number, document in enumerate(documents):
    words = WORD.findall(document.lower())
    starts = range(max(1, len(words) - 4))
    shingles = {tuple(words[i : i + 5]) for i in starts}
    sizes.append(len(shingles))
    for shingle in shingles:
      owners[shingle].append(number)
  common = collections.Counter(
    (i, j) for group in owners.values() for j in group for i in group if i < j
  )
  pairs, both = np.array(list(common)), np.array(list(common.values()))
  return pairs, both / (np.array(sizes)[pairs].sum(axis=1) - both)


def quality(path: str, threshold: str) -> dict:
  """Recall of near pairs, and precision of removed documents."""
  documents = planted(path)
  pairs, values = similarities(documents)
  near = pairs[values >= float(threshold)]
  exact = near_duplicates.clusters(len(documents), near)
  firsts = ours(documents, float(threshold))
  is_removed = firsts < np.arange(len(documents))
  line = {
    "threshold": float(threshold),
    "recall": np.mean(firsts[near[:, 0]] == firsts[near[:, 1]]),
    "precision": np.mean((exact < np.arange(len(exact)))[is_removed]),
    "near_pairs": len(near),
  }
  for k, change in enumerate(CHANGES):
    copies = np.arange(6000 + k, 10_000, 4)
    is_near = np.isin(copies * 10_000 + copies - 6000, near @ [1, 10_000])
    is_found = firsts[copies] == firsts[copies - 6000]
    line[f"near_{change:.0%}_changed"] = is_near.sum()
    line[f"found_{change:.0%}_changed"] = is_found.sum()
  return {name: round(float(value), 4) for name, value in line.items()}


def speed(function, path: str, megabytes: str) -> dict:
  function(documents_of(path, 0.1))  # what it loads does not count
  documents = documents_of(path, float(megabytes))
  before = time.process_time()  # the machine may do other work
  function(documents)
  seconds = time.process_time() - before
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
  return {
    "megabytes": float(megabytes),
    "megabytes_per_cpu_second": round(float(megabytes) / seconds, 2),
    "peak_megabytes": round(peak),
  }


def main(path: str, other_python: str = "") -> None:
  """Each measurement is a process of its own: a peak of memory is inherited."""
  cases = [("quality", value) for value in (0.5, 0.6, 0.7, 0.8, 0.9)]
  cases += [("ours", 40), ("ours", 400)]
  if other_python:
    cases += [("datatrove", 10), ("ours", 10)] * 3
  for kind, value in cases:
    python = other_python if kind == "datatrove" else sys.executable
    command = [python, "-m", "benchmarks.near_duplicates", kind, path, value]
    (line,) = measuring.json_lines(measuring.run(command))
    measuring.show(line)


if __name__ == "__main__":
  measurements = {
    "quality": quality,
    "ours": functools.partial(speed, ours),
    "datatrove": functools.partial(speed, datatrove),
  }
  kind, *of = sys.argv[1:]
  if kind in measurements:
    print("\n" + json.dumps({"kind": kind, **measurements[kind](*of)}))
  else:
    main(kind, *of)
