"""Entities as runs of labelled words, and their precision, recall and F1.

The definition is conlleval's and the default of seqeval
(https://github.com/chakki-works/seqeval), for IOB1, IOB2 and IOBES labels in
any order: I- and E- begin an entity where none of their type goes on.
"""

import re
from collections.abc import Iterable

OUTSIDE = "O"
# M, L and U are other names of I, E and S, in BMES and BILOU.
_OF_ENTITY = re.compile(r"[BIESMLU]-.+", re.DOTALL)
_GOES_ON, _CONTINUES = "BIM", "IMEL"


def types_of(labels: Iterable[str]) -> list[str]:
  """The types of the entities that labels mark; [] if some mark none."""
  others = {*labels} - {OUTSIDE}
  if not all(map(_OF_ENTITY.fullmatch, others)):
    return []
  return sorted({label[2:] for label in others})


def entities_of(labels: Iterable[str]) -> list[tuple[str, int, int]]:
  """(type, first word, last word) of each, in sentences with O after each."""
  found: list[tuple[str, int, int]] = []
  before = OUTSIDE
  for place, label in enumerate(labels):
    same_type = label[1:] == before[1:]
    if same_type and before[0] in _GOES_ON and label[0] in _CONTINUES:
      found[-1] = (*found[-1][:2], place)
    elif label != OUTSIDE:
      found.append((label[2:], place, place))
    before = label
  return found


def scores(
  right: Iterable[str], predicted: Iterable[str], types: Iterable[str]
) -> dict[str, float]:
  """F1, precision and recall over all entities, and as TYPE/f1 of each type.

  Labels are as for `entities_of`. Shares of 1; 0 where nothing is to count.
  """
  results = {}
  all_there, all_found = {*entities_of(right)}, {*entities_of(predicted)}
  for kind in ("", *types):
    there = {e for e in all_there if kind in ("", e[0])}
    found = {e for e in all_found if kind in ("", e[0])}
    both, prefix = len(there & found), f"{kind}/" if kind else ""
    results[f"{prefix}f1"] = 2 * both / max(1, len(there) + len(found))
    results[f"{prefix}precision"] = both / max(1, len(found))
    results[f"{prefix}recall"] = both / max(1, len(there))
  return results
