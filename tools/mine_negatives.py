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

import numpy as np

from common import input_files
from common.console import tell
from common.errors import UserError
from common.settings import in_group, run_with, setting
from corpus import tables
from model.tasks import DOCUMENT, QUERY
from retrieval import beir, nearest
from retrieval.texts import is_beir
from tools import embed

_text, _mine = in_group("Text"), in_group("Negatives")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningSettings(embed.ModelSettings):
  """Which texts are negatives; the names are the flags'."""

  # fmt: off
  input: str = setting(help=
    "Table of pairs (JSON Lines, CSV, TSV), or a folder of BEIR's form.")
  output: str = setting(help="File to write, JSON Lines.")
  corpus: str | None = _text(None,
    "Files with more texts that may be negatives, names and globs.")
  anchor_column: str = _text("anchor", "Column of the anchors.")
  positive_column: str = _text("positive", "Column of the positives.")
  split: str = _text("train",
    "File of judgments of a folder of BEIR's form: qrels/SPLIT.tsv.")
  num_negatives: int = _mine(5,
    "Number of negatives of each pair. A pair for which there are fewer keeps "
    "these, and is left out if there is none.", low=1)
  skip: int = _mine(0,
    "Number of the most similar texts, positives not counted, that are no "
    "negatives.", low=0)
  depth: int = _mine(100,
    "Number of the most similar texts that are looked at.", low=1)
  relative_margin: float = _mine(0.05,
    "Share of the positive's similarity by which that of a negative must be "
    "lower.",
    low=0.0, high=1.0)
  absolute_margin: float = _mine(0.0,
    "Difference of cosines by which a negative must be less similar than the "
    "positive.",
    low=0.0, high=2.0)
  # fmt: on


def _read_pairs(settings: MiningSettings) -> list[tuple[str, str]]:
  """(anchor, positive) of each line or judgment; DataError for a bad one."""
  if is_beir(settings.input):
    collection, pairs = beir.read(settings.input, settings.split), []
    for query, judged in collection.qrels.items():
      for document, gain in judged.items():
        text = collection.documents[document]
        if gain and text:
          pairs.append((collection.queries[query], text))
    return pairs
  rows = tables.read_table(settings.input)
  columns = []
  for flag in ("anchor_column", "positive_column"):
    words = getattr(settings, flag), f"--{flag}"
    columns.append(tables.column(settings.input, rows, *words, False))
  return [*zip(*columns, strict=True)]


def key(text: str) -> str:
  """The same for texts that differ in case and spaces only."""
  return " ".join(text.casefold().split())


def _candidates(settings: MiningSettings, pairs: list) -> dict[str, str]:
  """{key: text} of what may be a negative, positives first, in order."""
  candidates: dict[str, str] = {}
  for _, positive in pairs:
    candidates.setdefault(key(positive), positive)
  source = settings.corpus
  if not source and is_beir(settings.input):
    source = settings.input
  if source:
    for _, text in settings.texts(source).read():
      candidates.setdefault(key(text), text)
  candidates.pop("", None)
  return candidates


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
  most = min(most, positive - settings.absolute_margin)
  (others,) = np.nonzero(~np.isin(numbers, banned))
  others = others[settings.skip :]
  others = others[scores[others] <= most]
  return numbers[others][: settings.num_negatives].tolist()


def mine(settings: MiningSettings, model: str) -> None:
  """Writes the pairs with their negatives."""
  input_files.check_not_written([settings.input], "--input", settings.output)
  if settings.skip + settings.num_negatives > settings.depth:
    raise UserError(
      f"--depth={settings.depth}: fewer than --skip={settings.skip} and "
      f"--num_negatives={settings.num_negatives} together"
    )
  pairs = [*dict.fromkeys(_read_pairs(settings))]
  candidates = _candidates(settings, pairs)
  contents, numbers = [*candidates.values()], {}
  for number, normal in enumerate(candidates):
    numbers[normal] = number
  # An anchor may have several positives, none of which is its negative.
  positives: dict[str, list[str]] = {}
  for anchor, positive in pairs:
    positives.setdefault(anchor, []).append(positive)
  anchors = [*positives]
  embedder = settings.open(model)
  queries = embed.vectors_of(embedder, anchors, len(anchors), QUERY)
  documents = embed.vectors_of(embedder, contents, len(contents), DOCUMENT)
  if embedder.is_cosine:
    queries, documents = nearest.unit(queries), nearest.unit(documents)
  best = nearest.top_k(queries, documents, settings.depth, cosine=False)
  count, lines = 0, []
  for row, (anchor, texts) in enumerate(positives.items()):
    banned = [numbers.get(key(text), -1) for text in (anchor, *texts)]
    for positive, number in zip(texts, banned[1:], strict=True):
      similar = queries[row] @ documents[number]
      chosen = choose(settings, similar, banned, best[0][row], best[1][row])
      if chosen:
        count += len(chosen)
        negatives = [contents[other] for other in chosen]
        one = dict(anchor=anchor, positive=positive, negatives=negatives)
        lines.append(json.dumps(one, ensure_ascii=False))
  if not lines:
    raise UserError(
      f"{settings.input}: no pair has a negative within the margins: give "
      "--corpus with more texts, or smaller margins"
    )
  tables.write(settings.output, lines)
  tell(
    f"{settings.output}: {count:,} negatives of {len(lines):,} pairs; "
    f"{len(pairs) - len(lines):,} pairs have none and are left out"
  )


if __name__ == "__main__":
  run_with(MiningSettings, mine, arguments=1)
