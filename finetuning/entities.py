"""Entities as runs of labelled words, and their precision, recall and F1.

The definition is conlleval's and the default of seqeval
(https://github.com/chakki-works/seqeval), for IOB1, IOB2 and IOBES labels in
any order: I- and E- begin an entity where none of their type goes on. B, I and
other letters alone are of entities of one type.
"""

import collections
import re
from collections.abc import Iterable

OUTSIDE = "O"
NO_TYPE = "_"  # the one type of B and I alone, as in seqeval
# M, L and U are other names of I, E and S, in BMES and BILOU.
_OF_ENTITY = re.compile(r"[BIESMLU](?:-(.*))?", re.DOTALL)
_GOES_ON, _CONTINUES = "BIM", "IMEL"


def others_in(labels: Iterable[str]) -> list[str]:
  """The labels that are neither an entity's nor O, in their order."""
  labels = [*labels]
  # Letters alone are names of another kind, unless one begins an entity.
  has_bare = not {"B", "I"}.isdisjoint(labels)
  others = []
  for label in labels:
    match = _OF_ENTITY.fullmatch(label)
    if label != OUTSIDE and not (match and (match[1] or has_bare)):
      others.append(label)
  return others


def types_of(labels: Iterable[str]) -> list[str]:
  """The types of the entities that labels mark; [] if some mark none."""
  labels = {*labels}
  if others_in(labels):
    return []
  return sorted({_type_of(label) for label in labels - {OUTSIDE}})


def _type_of(label: str) -> str:
  return label[2:] or NO_TYPE


def entities_of(labels: Iterable[str]) -> list[tuple[str, int, int]]:
  """(type, first word, last word) of each, in sentences with O after each."""
  entities: list[tuple[str, int, int]] = []
  before = OUTSIDE
  for word, label in enumerate(labels):
    same_type = _type_of(label) == _type_of(before)
    if same_type and before[0] in _GOES_ON and label[0] in _CONTINUES:
      kind, first, _ = entities[-1]
      entities[-1] = (kind, first, word)
    elif label != OUTSIDE:
      entities.append((_type_of(label), word, word))
    before = label
  return entities


def scores(
  right: Iterable[str], predicted: Iterable[str], types: Iterable[str]
) -> dict[str, float]:
  """F1, precision and recall over all entities, and as TYPE/f1 of each type.

  Labels are as for `entities_of`. Shares of 1; 0 where nothing is to count.
  """
  # By type, and of all types under "".
  all_right, all_predicted = {*entities_of(right)}, {*entities_of(predicted)}
  counts = []
  for group in (all_right, all_predicted, all_right & all_predicted):
    kinds = collections.Counter(kind for kind, *_ in group)
    counts.append(kinds + collections.Counter({"": len(group)}))
  in_data, predictions, both = counts
  results = {}
  for kind in ("", *types):
    prefix = f"{kind}/" if kind else ""
    total = in_data[kind] + predictions[kind]
    results[f"{prefix}f1"] = 2 * both[kind] / max(1, total)
    results[f"{prefix}precision"] = both[kind] / max(1, predictions[kind])
    results[f"{prefix}recall"] = both[kind] / max(1, in_data[kind])
  return results
