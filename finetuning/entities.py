"""Entities as runs of labelled words, and their precision, recall and F1.

The definition is conlleval's and the default of seqeval
(https://github.com/chakki-works/seqeval), for IOB1, IOB2 and IOBES labels in
any order: I- and E- begin an entity where none of their type goes on.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"
# M, L and U are other names of I, E and S, in BMES and BILOU.
_OF_ENTITY = re.compile(r"[BIESMLU]-.+", re.DOTALL)
_GOES_ON, _CONTINUES = "BIM", "IMEL"


class Entity(NamedTuple):
  """A run of words, by their numbers."""

  type: str
  first: int
  last: int


def types_of(labels: Iterable[str]) -> list[str]:
  """The types of the entities that labels mark; [] if some mark none.

  Such are parts of speech, for example.
  """
  others = {*labels} - {OUTSIDE}
  if not all(map(_OF_ENTITY.fullmatch, others)):
    return []
  return sorted({label[2:] for label in others})


def entities_of(labels: Iterable[str]) -> list[Entity]:
  """The entities in one sentence, or in several with O after each."""
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
  right: Sequence[str], predicted: Sequence[str], types: Iterable[str]
) -> dict[str, float]:
  """F1, precision and recall over all entities, and as TYPE/f1 of each type.

  Labels are as for `entities_of`. Shares of 1; 0 where nothing is to count.
  """
  there, found = {*entities_of(right)}, {*entities_of(predicted)}
  results = _shares(there, found)
  for kind in types:
    of_type = ({e for e in some if e.type == kind} for some in (there, found))
    for name, share in _shares(*of_type).items():
      results[f"{kind}/{name}"] = share
  return results


def _shares(there: set[Entity], found: set[Entity]) -> dict[str, float]:
  both = len(there & found)
  return {
    "f1": 2 * both / max(1, len(there) + len(found)),
    "precision": both / max(1, len(found)),
    "recall": both / max(1, len(there)),
  }
