"""Entities as runs of labelled words, and their precision, recall and F1.

The definition is conlleval's and seqeval's (https://github.com/chakki-works/
seqeval, its default mode): an entity is right if its words and its type are. It
holds for IOB1, IOB2 and IOBES labels, whatever their order: I- and E- begin an
entity where none of their type goes on.
"""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"
# Its first letter says where a word stands in its entity. M, L and U are other
# names of I, E and S, in BMES and BILOU.
_OF_ENTITY = re.compile(r"[BIESMLU]-.+", re.DOTALL)
_GOES_ON, _CONTINUES = "BIM", "IMEL"


class Entity(NamedTuple):
  """A run of words."""

  type: str
  first: int  # number of its first word
  last: int  # of its last word


def mark_entities(labels: Sequence[str]) -> bool:
  """Whether labels are parts of entities and O, not parts of speech, say."""
  others = [label for label in labels if label != OUTSIDE]
  return bool(others) and all(map(_OF_ENTITY.fullmatch, others))


def entities_of(labels: Sequence[str]) -> list[Entity]:
  """The entities in one sentence, whose labels `mark_entities`."""
  found: list[Entity] = []
  before = OUTSIDE
  for place, label in enumerate(labels):
    same_type = label[1:] == before[1:]
    if same_type and before[0] in _GOES_ON and label[0] in _CONTINUES:
      found[-1] = found[-1]._replace(last=place)
    elif label != OUTSIDE:
      found.append(Entity(label[2:], place, place))
    before = label
  return found


def scores(
  right: Iterable[Sequence[str]],
  predicted: Iterable[Sequence[str]],
  types: Iterable[str],
) -> dict[str, float]:
  """Precision, recall and F1 over all entities, and as TYPE/f1 of each type.

  Arguments are the labels of sentences. Shares of 1; 0 where there is nothing
  to count, as in seqeval.
  """
  wanted: collections.Counter = collections.Counter()
  got: collections.Counter = collections.Counter()
  shared: collections.Counter = collections.Counter()
  for labels, guesses in zip(right, predicted, strict=True):
    there, found = set(entities_of(labels)), set(entities_of(guesses))
    wanted.update(entity.type for entity in there)
    got.update(entity.type for entity in found)
    shared.update(entity.type for entity in there & found)
  results = _shares(shared.total(), got.total(), wanted.total())
  for one in types:
    of_type = _shares(shared[one], got[one], wanted[one])
    results |= {f"{one}/{name}": value for name, value in of_type.items()}
  return results


def _shares(shared: int, got: int, wanted: int) -> dict[str, float]:
  return {
    "f1": 2 * shared / max(1, got + wanted),
    "precision": shared / max(1, got),
    "recall": shared / max(1, wanted),
  }
