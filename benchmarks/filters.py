"""Speed of the filters of text, and their decisions beside datatrove's.

  python -m benchmarks.filters TEXT... [--sample=8]

prints the MB/s of each published filter and of whole settings files, on one
core, over every eighth document. Where datatrove, spacy and nltk are installed
(`pip install datatrove spacy nltk`, in an environment of its own), it also
prints how many decisions about documents of 50 words or more are equal, what
the others are, and both speeds, measured in turns for each document.
"""

import argparse
import collections
import contextlib
import json
import time

from corpus import documents
from corpus.filters import Counts, Filters

NAMES = ("c4", "gopher", "fineweb")


def lines_of(name):
  return json.loads(Filters.load(name).source)["filters"]


def of(lines):
  return Filters(json.dumps({"filters": lines}))


def is_repetition(line):
  return line["filter"].startswith(("repeated", "top_sequence"))


def read(patterns, sample):
  form = documents.DocumentFormat()
  paths = documents.expand_patterns(patterns)
  pieces = documents.split_into_pieces(paths, form)
  found = (d.lines for p in pieces for d in documents.read_documents(p, form))
  return [lines for i, lines in enumerate(found) if i % sample == 0]


def size_of(texts):
  return sum(len("\n".join(lines).encode()) for lines in texts) / 1e6


def speed(filters, texts):
  counts = Counts()
  start = time.process_time()
  for lines in texts:
    filters.clean(lines, counts)
  return size_of(texts) / (time.process_time() - start)


def print_speeds(texts):
  chains = {}
  for name in NAMES:
    lines = lines_of(name)
    chains |= {json.dumps(line): [line] for line in lines}
    chains[f"{name}.json without sequences"] = [
      line for line in lines if "sequence" not in line["filter"]
    ]
    chains[f"{name}.json"] = lines
  for label, lines in chains.items():
    print(f"{speed(of(lines), texts):7.1f} MB/s  {label}", flush=True)


def pairs_with_datatrove():
  """{name: (our filters, datatrove's)} of equal bounds."""
  from datatrove.pipeline import filters as datatrove

  gopher, fineweb = lines_of("gopher"), lines_of("fineweb")
  first = [line["filter"] for line in fineweb].index("punctuated_lines")
  return {
    "gopher_quality": (
      of([line for line in gopher if not is_repetition(line)]),
      datatrove.GopherQualityFilter(),
    ),
    "gopher_repetition": (
      of([line for line in gopher if is_repetition(line)]),
      datatrove.GopherRepetitionFilter(),
    ),
    "c4": (
      of(lines_of("c4")),
      datatrove.C4QualityFilter(min_num_sentences=3, min_words_per_line=5),
    ),
    "fineweb": (
      of(fineweb[first:]),
      datatrove.FineWebQualityFilter(char_duplicates_ratio=0.1),
    ),
  }


def compare(name, ours, theirs, texts):
  from datatrove.data import Document
  from datatrove.utils.text import split_into_parts

  theirs.filter(Document(text="It loads its tokenizer. A b c d e.", id=""))
  seconds, decisions = collections.Counter(), collections.Counter()
  for lines in texts:
    split_into_parts.cache_clear()
    start = time.process_time()
    _, own = ours.clean(lines, Counts())
    middle = time.process_time()
    kept = theirs.filter(Document(text="\n".join(lines), id=""))
    seconds["theirs"] += time.process_time() - middle
    seconds["ours"] += middle - start
    decisions[own, "" if kept is True else kept[1]] += 1
  equal = sum(n for pair, n in decisions.items() if all(pair) or not any(pair))
  both = sum(n for pair, n in decisions.items() if all(pair))
  size = size_of(texts)
  print(
    f"{name}: {equal / len(texts):.2%} equal, {both} removed by both; "
    f"{size / seconds['ours']:.1f} and {size / seconds['theirs']:.2f} MB/s"
  )
  for (own, other), count in decisions.most_common():
    if bool(own) != bool(other):
      print(f"  {count} ours: {own or 'kept'}; theirs: {other or 'kept'}")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("text", nargs="+")
  parser.add_argument("--sample", type=int, default=8)
  args = parser.parse_args()
  texts = read(",".join(args.text), args.sample)
  print(f"{len(texts):,} documents, {size_of(texts):.1f} MB")
  print_speeds(texts)
  with contextlib.suppress(ImportError):
    pairs = pairs_with_datatrove()
    long = [lines for lines in texts if len(" ".join(lines).split()) >= 50]
    print(f"beside datatrove, {len(long):,} documents of 50 words or more:")
    for name, (ours, theirs) in pairs.items():
      compare(name, ours, theirs, long)


if __name__ == "__main__":
  main()
