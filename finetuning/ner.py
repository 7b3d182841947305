"""Labels of words: named entities (NER), chunks, parts of speech."""

import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from checkpoints.metrics import BestBy
from common.settings import in_group
from finetuning import entities, heads, packed, sentences, tables, windows
from finetuning.finetune import FinetuningConfig
from finetuning.labels import LabelledTask
from finetuning.windows import SILENT
from model import model_flops
from model.tasks import NER

_data = in_group("Data")
PREDICTIONS_FILE = "predictions.tsv"
_SEPARATORS = str.maketrans("\t\r\n", "   ")  # in that file


@dataclasses.dataclass(frozen=True, kw_only=True)
class NerConfig(sentences.SentenceSettings, FinetuningConfig):
  """Settings of run_ner.py; fields are named like its flags."""

  # fmt: off
  max_seq_length: int = _data(128,
    "Tokens of one window (a part of a sentence and two special tokens) at "
    "most, and of one record, which may hold several windows.", low=4)
  doc_stride: int = _data(windows.WORD_STRIDE,
    "Tokens from the beginning of a window of a long sentence to the next one.",
    low=1, high=1 << 20)
  # fmt: on

  kind: ClassVar[str] = NER
  format: ClassVar[str] = "CoNLL's columns, or JSON lines (.jsonl, .json)"


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
    labels = {one for s in self._sentences("train") for one in s.labels}
    return self.config.path("train"), labels

  @property
  def metrics(self) -> list[str]:
    """Of which the first one chooses the best checkpoint."""
    of_entities = ["f1", "precision", "recall"]
    is_plain = not entities.types_of(self.labels)
    return ["accuracy"] if is_plain else [*of_entities, "accuracy"]

  best_by = property(lambda self: BestBy((self.metrics[0],), True))

  def read(self, part):
    path, read, rows = self.config.path(part), self._sentences(part), []
    for sentence in read:
      place = f"{path}: a label of the sentence in line {sentence.line}"
      # To predict any label will do.
      for label in sentence.labels or self.labels[:1] * len(sentence.words):
        rows.append(self.row_of(label, place))
      rows.append(SILENT)  # its end
    return NerSource(path, read, np.array(rows), self.config)

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

  def _names(self, rows: np.ndarray) -> np.ndarray:
    """The labels of rows; a silent word's is O."""
    names = np.array([*self.labels, entities.OUTSIDE])  # SILENT: the last one
    return names[rows.astype(int)]

  def results(self, source, outputs):
    right = self._names(source.rows)
    found = self._names(source.of_words(outputs["labels"]))
    is_right = (right == found)[source.rows != SILENT]  # without the ends
    labels, types = [right, found], entities.types_of(self.labels)
    of_entities = entities.scores(*labels, types) if types else {}
    return {**of_entities, "accuracy": float(is_right.mean())}

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
    fields = dataclasses.fields(sentences.SentenceSettings)
    return {
      "labels": self.labels,
      "metrics": self.metrics,
      "doc_stride": self.config.doc_stride,
      **{field.name: getattr(self.config, field.name) for field in fields},
      "label_names": [*self.config.label_names],  # as JSON has it
    }


class NerSource(packed.PackedSource):
  """Sentences as packed windows, whose tokens have targets."""

  def __init__(self, path: str, read: list, rows: np.ndarray, config):
    """`rows` are those of the labels of words, numbered as `encode_words`'."""
    self.sentences, self.rows = read, rows
    texts = [sentence.words for sentence in read]
    limits = config.max_seq_length, config.doc_stride
    self._windows = windows.encode_words(config.tokenizer(), texts, *limits)
    examples = []
    for sentence, ids, segments, words in self._windows:
      where = f"line {read[sentence].line}"
      weight = float((words != SILENT).sum())
      examples.append(packed.Example(ids, segments, where, (), weight))
    super().__init__(path, examples, config)
    targets = np.full([len(self), self.tokens], heads.NO_LABEL, np.int32)
    for window, part in zip(self._windows, self._parts(targets), strict=True):
      part[:] = rows[window.words]  # SILENT is the last end, without a label
    self._columns["targets"] = targets

  def _parts(self, of_tokens: np.ndarray) -> Iterator[np.ndarray]:
    """What each window has of an array [rows, S]."""
    places = zip(self._windows, self.places.row, self.places.start, strict=True)
    for window, row, start in places:
      yield of_tokens[row, start : start + len(window.ids)]

  def of_words(self, of_tokens: np.ndarray) -> np.ndarray:
    """The words' values, of float32 [rows, S]; SILENT for silent words."""
    parts = self._parts(of_tokens)
    return windows.of_words(len(self.rows), self._windows, parts)
