"""Labels of words: named entities (NER), chunks, parts of speech."""

import dataclasses
import os
from typing import ClassVar

import numpy as np

from checkpoints.metrics import BestBy
from common.settings import in_group
from finetuning import entities, packed, tables, windows
from finetuning.labels import LabelledTask
from finetuning.sentences import Sentence, SentenceSettings, read_sentences
from finetuning.task import FinetuningConfig
from finetuning.windows import SILENT
from model import tasks

_data = in_group("Data")
PREDICTIONS_FILE = "predictions.tsv"
_SEPARATORS = str.maketrans("\t\r\n", "   ")  # in that file


@dataclasses.dataclass(frozen=True, kw_only=True)
class NerConfig(SentenceSettings, FinetuningConfig):
  """Settings of run_ner.py; fields are named like its flags."""

  # fmt: off
  max_seq_length: int = _data(128,
    "Tokens of one window (a part of a sentence and two special tokens) at "
    "most, and of one record, which may hold several windows.", low=4)
  doc_stride: int = _data(windows.WORD_STRIDE,
    "Tokens from the beginning of a window of a long sentence to the next one.",
    low=1, high=1 << 20)
  # fmt: on

  kind: ClassVar[str] = tasks.NER
  format: ClassVar[str] = "CoNLL's columns, or JSON lines (.jsonl, .json)"


class Ner(LabelledTask):
  """Predicts a label for each word."""

  config: NerConfig

  def __init__(self, config: NerConfig):
    super().__init__(config)
    self.known_labels = config.label_names or None

  def _sentences(self, part: str) -> list[Sentence]:
    path, labelled = self.config.path(part), part != "predict"
    return read_sentences(path, self.config, labelled)

  def labels_of_data(self):
    labels = []
    for sentence in self._sentences("train"):
      labels += sentence.labels
    return self.config.path("train"), labels

  @property
  def metrics(self) -> list[str]:
    """Of which the first one chooses the best checkpoint."""
    if entities.types_of(self.labels):
      return ["f1", "precision", "recall", "accuracy"]
    return ["accuracy"]

  best_by = property(lambda self: BestBy((self.metrics[0],), True))

  def read(self, part):
    path, sentences, rows = self.config.path(part), self._sentences(part), []
    for sentence in sentences:
      place = f"{path}: a label of the sentence in line {sentence.line}"
      # To predict any label will do.
      for label in sentence.labels or self.labels[:1] * len(sentence.words):
        rows.append(self.row_of(label, place))
      rows.append(SILENT)  # its end
    return NerSource(path, sentences, np.array(rows), self.config)

  def head(self, batch, is_training, dropout_seed=None):
    from finetuning import heads  # it loads TensorFlow

    return heads.tokens(
      batch, self.outputs, self.config, is_training, dropout_seed
    )

  def _names(self, rows: np.ndarray) -> np.ndarray:
    """The labels of rows; a silent word's is O."""
    names = np.array([*self.labels, entities.OUTSIDE])  # SILENT: the last one
    return names[rows.astype(int)]

  def results(self, source, outputs):
    right = self._names(source.rows)
    predicted = self._names(source.of_words(outputs["labels"]))
    types = entities.types_of(self.labels)
    results = entities.scores(right, predicted, types) if types else {}
    is_right = (right == predicted)[source.rows != SILENT]  # without the ends
    return {**results, "accuracy": float(is_right.mean())}

  def write_predictions(self, source, outputs):
    """A word and its label in each line, an empty line after a sentence."""
    path = os.path.join(self.config.output_dir, PREDICTIONS_FILE)
    labels = iter(self._names(source.of_words(outputs["labels"])))
    lines = []
    for sentence in source.sentences:
      for word in sentence.words:
        lines.append(f"{word.translate(_SEPARATORS)}\t{next(labels)}")
      lines.append("")
      next(labels)
    tables.write(path, lines)
    return [f"predictions {path}"]

  def describe(self):
    fields = dataclasses.fields(SentenceSettings)
    return {
      "labels": self.labels,
      "metrics": self.metrics,
      "doc_stride": self.config.doc_stride,
      **{field.name: getattr(self.config, field.name) for field in fields},
      "label_names": [*self.config.label_names],  # as JSON has it
    }


class NerSource(packed.PackedSource):
  """Sentences as packed windows, whose tokens have targets."""

  def __init__(
    self, path: str, sentences: list[Sentence], rows: np.ndarray, config
  ):
    """`rows` are those of the labels of words, numbered as `encode_words`'."""
    self.sentences, self.rows = sentences, rows
    texts = [sentence.words for sentence in sentences]
    limits = config.max_seq_length, config.doc_stride
    parts = windows.encode_words(config.tokenizer(), texts, *limits)
    examples = []
    for number, ids, segments, words in parts:
      where = f"line {sentences[number].line}"
      weight = float((words != SILENT).sum())
      examples.append(packed.Example(ids, segments, where, (), weight))
    super().__init__(path, examples, config)
    self._words = np.full([len(self), self.tokens], SILENT)
    places = zip(parts, self.places.row, self.places.start, strict=True)
    for part, row, start in places:
      self._words[row, start : start + len(part.words)] = part.words
    # SILENT is the last end, without a label.
    self._columns["targets"] = rows[self._words].astype(np.int32)

  def of_words(self, of_tokens: np.ndarray) -> np.ndarray:
    """The words' values, of float32 [rows, S]; SILENT for silent words."""
    return windows.of_words(len(self.rows), self._words, of_tokens)
