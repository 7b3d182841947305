"""Labels of words: named entities (NER), chunks, parts of speech."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from checkpoints.metrics import BestBy
from common.errors import DataError
from common.settings import in_group
from finetuning import entities, heads, packed, sentences, tables, words
from finetuning.finetune import FinetuningConfig
from finetuning.labels import LabelledTask
from model import model_flops
from model.tasks import NER

_data = in_group("Data")
PREDICTIONS_FILE = "predictions.tsv"
_SEPARATORS = str.maketrans("\t\r\n", "   ")  # in that file


@dataclasses.dataclass(frozen=True, kw_only=True)
class NerConfig(
  words.WindowSettings, sentences.SentenceSettings, FinetuningConfig
):
  """Settings of run_ner.py; fields are named like its flags."""

  # fmt: off
  train_file: str | None = _data(None,
    "Sentences to train on: JSON lines (.jsonl, .json), or else CoNLL's "
    "columns.")
  eval_file: str | None = _data(None,
    "Sentences to evaluate on, which chooses the best checkpoint: JSON lines "
    "(.jsonl, .json), or else CoNLL's columns.")
  predict_file: str | None = _data(None,
    "Sentences whose words to label: JSON lines (.jsonl, .json), or else "
    "CoNLL's columns.")
  # fmt: on

  kind: ClassVar[str] = NER


class Ner(LabelledTask):
  """Predicts a label for each word."""

  config: NerConfig

  def __init__(self, config: NerConfig):
    super().__init__(config)
    self.known_labels = config.label_names or None

  def _sentences(self, part: str) -> list[sentences.Sentence]:
    path, labelled = self.config.path(part), part != "predict"
    return sentences.read_sentences(path, self.config, labelled)

  def labels_of_data(self):
    labels = [one for s in self._sentences("train") for one in s.labels]
    return f"{self.config.path('train')}: it", labels

  @functools.cached_property
  def metrics(self) -> list[str]:
    """The first one chooses the best checkpoint."""
    of_entities = ["f1", "precision", "recall"]
    is_plain = not entities.mark_entities(self.labels)
    return ["accuracy"] if is_plain else [*of_entities, "accuracy"]

  best_by = property(lambda self: BestBy((self.metrics[0],), True))

  def read(self, part):
    path, read = self.config.path(part), self._sentences(part)
    rows = [np.zeros(len(sentence.words), int) for sentence in read]
    if part != "predict":
      rows = [self._rows_of(path, sentence) for sentence in read]
    return NerSource(path, read, rows, self.config)

  def _rows_of(self, path: str, sentence: sentences.Sentence) -> np.ndarray:
    """int [words], of the labels."""
    rows = [*map(self.row_of, sentence.labels)]
    if None in rows:
      label = sentence.labels[rows.index(None)]
      raise DataError(
        f"{path}: the sentence of line {sentence.line} has the label "
        f"{self.unknown(label)}"
      )
    return np.array(rows, int)

  def head(self, batch, is_training, dropout_seed=None):
    return heads.tokens(
      batch, len(self.labels), self.config, is_training, dropout_seed
    )

  def matmuls(self, rows, source):
    bert, policy = self.config.bert, self.config.policy
    places, labels = rows * source.tokens, len(self.labels)
    return [
      *model_flops.encoder(bert, policy, rows, source.tokens),
      *model_flops.features(bert, policy, places),
      *model_flops.dense(1, places, bert.hidden_size, labels, policy.heads),
    ]

  def _names(self, rows: Sequence[np.ndarray]) -> list[list[str]]:
    """The labels of each sentence's words, from rows of the head or SILENT."""
    names = np.array([*self.labels, entities.OUTSIDE])  # SILENT: the last one
    return [names[of_words.astype(int)].tolist() for of_words in rows]

  def results(self, source, outputs):
    right = self._names(source.rows)
    found = self._names(source.of_words(outputs["labels"]))
    flat = itertools.chain.from_iterable
    is_right = [a == b for a, b in zip(flat(right), flat(found), strict=True)]
    results = {}
    if "f1" in self.metrics:
      types = {label[2:] for label in self.labels if label != entities.OUTSIDE}
      results = entities.scores(right, found, sorted(types))
    return {**results, "accuracy": sum(is_right) / len(is_right)}

  def write_predictions(self, source, outputs):
    """A word and its label in each line, an empty line after a sentence."""
    path = os.path.join(self.config.output_dir, PREDICTIONS_FILE)
    found = self._names(source.of_words(outputs["labels"]))
    with tables.written(path) as f:
      for sentence, labels in zip(source.sentences, found, strict=True):
        for word, label in zip(sentence.words, labels, strict=True):
          print(word.translate(_SEPARATORS), label, sep="\t", file=f)
        print(file=f)
    return [f"predictions {path}"]

  def describe(self):
    saved = (*sentences.SENTENCE_SETTINGS, "doc_stride")
    return {
      "labels": self.labels,
      "metrics": self.metrics,
      **{name: getattr(self.config, name) for name in saved},
      "label_names": list(self.config.label_names),
    }


class NerSource(packed.PackedSource):
  """Sentences as packed windows, whose words have targets."""

  def __init__(
    self,
    path: str,
    read: Sequence[sentences.Sentence],
    rows: Sequence[np.ndarray],
    config: NerConfig,
  ):
    """`rows`, int [words] of each sentence, are those of its words' labels."""
    self.sentences, self.rows = read, rows
    self._windows = words.encode_sentences(
      config.tokenizer(), [sentence.words for sentence in read], config
    )
    examples = [
      packed.Example(
        window.ids,
        window.segments,
        f"line {read[window.sentence].line}",
        weight=float(len(window.spoken)),
      )
      for window in self._windows
    ]
    super().__init__(path, examples, config)
    # In place of the examples' targets there are the tokens'.
    targets = np.full([len(self), self.tokens], heads.NO_LABEL, np.int32)
    for window, place in self._placed(targets):
      place[window.words >= 0] = rows[window.sentence][window.spoken]
    self._columns["targets"] = targets

  def _placed(self, of_tokens: np.ndarray) -> Iterator[tuple]:
    """Each window, and what of [rows, S, ...] belongs to its tokens."""
    places = self.places
    for window, row, start in zip(
      self._windows, places.row, places.start, strict=True
    ):
      yield window, of_tokens[row, start : start + len(window.ids)]

  def of_words(self, of_tokens: np.ndarray) -> list[np.ndarray]:
    """[words] of each sentence, from [rows, S]; SILENT for a silent word."""
    counts = [len(sentence.words) for sentence in self.sentences]
    values = [place for _, place in self._placed(of_tokens)]
    return words.values_of_words(counts, self._windows, values)
