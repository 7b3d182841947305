"""The side of transformers_finetune.py that labels words, in plain Python.

Apart from that script so that it can be tested without PyTorch. Imports nothing
of this project: what it counts is an independent check of ours.
"""


def read_sentences(path: str) -> list:
  """(words, labels) of each sentence in CoNLL's columns."""
  sentences, words, labels = [], [], []
  with open(path, encoding="utf-8") as f:
    for line in [*f, ""]:
      fields = line.split()
      if fields and fields[0] != "-DOCSTART-":
        words.append(fields[0])
        labels.append(fields[-1])
      elif words:
        sentences.append((words, labels))
        words, labels = [], []
  return sentences


def chunks(labels: list) -> set:
  """(first, last, type) of the entities in a sentence's IOB2 labels.

  As conlleval: I- begins an entity where none of its type goes on.
  """
  found, first = set(), None
  for place, label in enumerate([*labels, "O"]):
    before = labels[place - 1] if place else "O"
    goes_on = label.startswith("I-") and label[1:] == before[1:]
    if first is not None and not goes_on:
      found.add((first, place - 1, before[2:]))
      first = None
    if first is None and label != "O":
      first = place
  return found


def scores(right: list, predicted: list) -> dict:
  """Entity precision, recall and F1 in percent, and accuracy of the words."""
  wanted, got, shared, words, same = 0, 0, 0, 0, 0
  for labels, guesses in zip(right, predicted, strict=True):
    ours, theirs = chunks(labels), chunks(guesses)
    wanted, got = wanted + len(ours), got + len(theirs)
    shared += len(ours & theirs)
    words += len(labels)
    same += sum(a == b for a, b in zip(labels, guesses, strict=True))
  shares = {
    "precision": shared / max(1, got),
    "recall": shared / max(1, wanted),
    "f1": 2 * shared / max(1, wanted + got),
    "accuracy": same / max(1, words),
  }
  return {name: round(100 * share, 2) for name, share in shares.items()}
