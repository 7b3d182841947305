"""Finds hard negatives: texts that are like the positive, and are none.

  python -m tools.mine_negatives runs/embedder --input=pairs.jsonl \\
    --output=mined.jsonl

The texts most similar to an anchor are its negatives, but for its positives and
equal texts. One too similar is left out, because it most likely is a positive
that nobody marked: as in NV-Retriever (arXiv:2407.15831), a negative's
similarity is at most 95% of the positive's. run_embedder.py reads the output,
with --negative_columns=negatives.
"""

import dataclasses
import json
import os

import numpy as np

from common import input_files
from common.console import tell
from common.errors import UserError
from common.settings import in_group, run_with, setting
from corpus import tables
from finetuning.embedding import Pair, collection_of
from model.tasks import DOCUMENT, QUERY
from retrieval import beir, nearest
from retrieval.texts import is_beir
from tools import embed

_DEPTH = 100  # texts that are looked at, the most similar to an anchor
_text, _mine = in_group("Text"), in_group("Negatives")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningSettings(embed.ModelSettings):
  """Which texts are negatives; the names are the flags'."""

  # fmt: off
  input: str = setting(help=
    "Table of pairs (JSON Lines, CSV, TSV, Parquet), or BEIR's folder.")
  output: str = setting(help="File to write, JSON Lines.")
  corpus: str | None = _text(None,
    "Files with more texts that may be negatives, names and globs.")
  anchor_column: str = _text("anchor", "Column of the anchors.")
  positive_column: str = _text("positive", "Column of the positives.")
  split: str = _text("train",
    "File of judgments of a folder of BEIR's form: qrels/SPLIT.tsv.")
  num_negatives: int = _mine(5,
    "Number of negatives of each pair. A pair for which there are fewer keeps "
    "these, and is left out if there is none.", low=1, high=_DEPTH)
  relative_margin: float = _mine(0.05,
    "Share of the positive's similarity by which that of a negative must be "
    "lower.",
    low=0.0, high=1.0)
  # fmt: on


def _read(settings: MiningSettings) -> beir.Collection:
  """The pairs as a search; DataError for a bad line."""
  if is_beir(settings.input):
    return beir.read(settings.input, settings.split)
  rows, columns = tables.read_table(settings.input), []
  for flag in ("anchor_column", "positive_column"):
    words = getattr(settings, flag), f"--{flag}"
    columns.append(tables.column(settings.input, rows, *words, False))
  return collection_of(map(Pair, *columns))


def key(text: str) -> str:
  """The same for texts that differ in case and spaces only."""
  return " ".join(text.casefold().split())


def choose(
  settings: MiningSettings, positive: float, banned: list[int],
  scores: np.ndarray, numbers: np.ndarray,
) -> list[int]:  # fmt: skip
  """The numbers of a pair's negatives, the hardest first.

  `positive` is its similarity, `banned` are the texts that equal the anchor or
  one of its positives; `scores`, `numbers` [k] are the anchor's of `top_k`.
  """
  # Of a similarity below 0 a share would be more than the whole.
  most = positive - settings.relative_margin * abs(positive)
  (others,) = np.nonzero(~np.isin(numbers, banned))
  others = others[scores[others] <= most]
  return numbers[others][: settings.num_negatives].tolist()


def mine(settings: MiningSettings, model: str) -> None:
  """Writes the pairs with their negatives."""
  input_files.check_not_written([settings.input], "--input", settings.output)
  os.makedirs(os.path.dirname(settings.output) or ".", exist_ok=True)
  collection = _read(settings)
  texts = [*collection.documents.values()]
  if settings.corpus:
    more = settings.texts(settings.corpus)
    for piece in more.pieces:
      input_files.check_not_written([piece.path], "--corpus", settings.output)
    texts += [text for _, text in more.read()]
  candidates: dict[str, str] = {}  # by key
  for text in texts:
    candidates.setdefault(key(text), text)
  candidates.pop("", None)
  contents, numbers = [*candidates.values()], {}
  for number, normal in enumerate(candidates):
    numbers[normal] = number
  anchors, embedder = collection.queries, settings.open(model)
  tell(*embedder.source.lines())
  queries = embed.vectors_of(embedder, anchors.values(), len(anchors), QUERY)
  documents = embed.vectors_of(embedder, contents, len(contents), DOCUMENT)
  if embedder.is_cosine:
    queries, documents = nearest.unit(queries), nearest.unit(documents)
  best = nearest.top_k(queries, documents, _DEPTH, cosine=False)
  count, without, lines = 0, 0, []
  for row, (query, anchor) in enumerate(anchors.items()):
    # An anchor may have several positives, none of which is its negative.
    positives = []
    for name, gain in collection.qrels[query].items():
      if gain and collection.documents[name]:
        positives.append(collection.documents[name])
    banned = [numbers.get(key(text), -1) for text in (anchor, *positives)]
    for positive, number in zip(positives, banned[1:], strict=True):
      similar = queries[row] @ documents[number]
      chosen = choose(settings, similar, banned, best[0][row], best[1][row])
      if not chosen:
        without += 1
        continue
      count += len(chosen)
      negatives = [contents[other] for other in chosen]
      one = dict(anchor=anchor, positive=positive, negatives=negatives)
      lines.append(json.dumps(one, ensure_ascii=False))
  if not lines:
    raise UserError(
      f"{settings.input}: no pair has a negative within the margin: give "
      "--corpus with more texts, or a smaller margin"
    )
  tables.write(settings.output, lines)
  tell(
    f"{settings.output}: {count:,} negatives of {len(lines):,} pairs; "
    f"{without:,} pairs have none and are left out"
  )


if __name__ == "__main__":
  run_with(MiningSettings, mine, arguments=1)
