"""Labels of words: named entities (NER), chunks, parts of speech."""

import dataclasses
import itertools
from typing import ClassVar

import numpy as np

from checkpoints.metrics import BestBy
from common import tensorflow_v1 as later
from common.settings import in_group
from corpus import tables
from finetuning import entities, packed, task_file, words
from finetuning.behaviour import SINGLE, WORDS, Behaviour, Context, Run
from finetuning.labels import LabelledTask, by_count
from finetuning.sentences import Sentence, SentenceSettings, read_sentences
from finetuning.task import FinetuningConfig
from finetuning.words import SILENT
from model import tasks
from text_encoders.wordpiece import word_spans

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
  doc_stride: int = _data(words.WORD_STRIDE,
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
    labels = [sentence.labels for sentence in self._sentences("train")]
    return self.config.path("train"), itertools.chain.from_iterable(labels)

  @property
  def metrics(self) -> list[str]:
    """Names of metrics; the first one chooses the best checkpoint."""
    model = task_file.binding(self.config)
    saved = model.task.get("metrics") if model else None
    if not saved and entities.types_of(self.labels):
      return ["f1", "precision", "recall", "accuracy"]
    return saved or ["accuracy"]

  best_by = property(lambda self: BestBy((self.metrics[0],), True))

  def read(self, part):
    path, sentences = self.config.path(part), self._sentences(part)
    labels: list[tuple[int, str]] = []
    is_word = []
    for sentence in sentences:
      labels += zip(sentence.lines, sentence.labels, strict=False)
      is_word += [True] * len(sentence.words) + [False]
    rows = np.full(len(is_word), SILENT)
    # To predict any label will do.
    rows[is_word] = self.rows_in(path, "a label", labels) if labels else 0
    return NerSource(path, sentences, rows, self.config)

  def lines(self):
    """Also why there is no F1, with the first place of what is in its way."""
    lines = super().lines()
    others, firsts = entities.others_in(self.labels), []
    for path, counts in self.labels_in.items():
      for label in by_count(counts):
        if label in others:
          others.remove(label)
          firsts.append(f"{label!r} ({path}: line {counts[label][1]})")
    firsts += map(repr, others)
    if firsts:
      more = f" and {len(firsts) - 5} others" if len(firsts) > 5 else ""
      lines.append(
        "no F1, and the best checkpoint is that of the best accuracy: not all "
        "labels mark entities, as B-PER, I-PER and O do, or B, I and O: "
        f"{', '.join(firsts[:5])}{more}"
      )
    elif entities.NO_TYPE in entities.types_of(self.labels):
      lines.append(
        "labels without a type, as B and I, are of entities of one type, "
        f"{entities.NO_TYPE}, as in seqeval"
      )
    return lines

  def head(self, batch, is_training, dropout_seed=None):
    """`heads.HeadOutput` of the label of each token whose target is not SILENT.

    `targets` are int32 [B, S]. The loss is the mean over an example's targets.
    Their number is its weight, so the loss of an update is the mean over all
    targets. Outputs "labels", float32 [B, S], the most likely ones.
    """
    from finetuning import heads  # these load TensorFlow
    from model import kernels, layers

    tf = later.tf
    encoder = heads.encode(batch, self, is_training, dropout_seed)
    matmul, bias, *_ = encoder.label_logits(tasks.TOKENS)
    targets, dtype = tf.reshape(batch.targets, [-1]), encoder.policy.losses
    both = kernels.cross_entropy(
      matmul, bias, tf.maximum(targets, 0), dtype=dtype
    )
    both *= tf.cast(targets > SILENT, tf.float32)
    rows, length = layers.get_shape_list(batch.targets)
    of_rows = tf.transpose(tf.reshape(both, [2, rows, length]), [1, 0, 2])
    slots = layers.get_shape_list(batch.weights)[1]
    # [B, S, E]: 1 for the example of a token; padding, 0, is of none.
    owners = tf.one_hot(batch.input_mask - 1, slots)
    means = tf.matmul(of_rows, owners) / tf.maximum(batch.weights, 1.0)[:, None]
    best = tf.argmax(tf.cast(matmul, tf.float32) + bias, axis=-1)
    best = tf.reshape(tf.cast(best, tf.float32), [rows, length])
    losses, correct = tf.unstack(means, axis=1)
    return heads.HeadOutput(losses, correct, {"labels": best})

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
    path = self.config.output_file(PREDICTIONS_FILE)
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
    """`rows`: the labels' rows of words, numbered as in `encode_words`."""
    self.sentences, self.rows = sentences, rows
    model = task_file.binding(config)
    windows = words.encode_words(
      config.tokenizer(),
      [sentence.words for sentence in sentences],
      config.max_seq_length,
      config.doc_stride,
      not model or model.task.get("space_before_words", True),
    )
    examples = []
    for number, ids, segments, speaks_for in windows:
      where = f"line {sentences[number].lines[0]}"
      weight = float((speaks_for != SILENT).sum())
      examples.append(packed.Example(ids, segments, where, (), weight))
    super().__init__(path, examples, config)
    self._words = np.full([len(self), self.tokens], SILENT)
    parts = self.of_examples(self._words)
    for window, part in zip(windows, parts, strict=True):
      part[:] = window.words
    # SILENT is the last end, without a label.
    targets = rows[self._words].astype(np.int32)
    self._columns = self._columns._replace(targets=targets)

  def of_words(self, of_tokens: np.ndarray) -> np.ndarray:
    """The words' values, from float32 [rows, S]; SILENT for silent words."""
    return words.of_words(len(self.rows), self._words, of_tokens)


# Answers ----------------------------------------------------------------------


class WordBehaviour(Behaviour):
  """Finds entities in texts, or labels the words that a line gives."""

  head = tasks.TOKENS
  form = {"text?": str, "tokens?": [str]}
  kinds = (SINGLE, WORDS)

  def outputs(self, encoder):
    return encoder.label_outputs(self.head)

  def answers(self, inputs, context, run):
    positions, sentences, encoded = [], [], []
    for one in inputs:
      of_text = word_spans(one.text)
      positions.append(of_text)
      sentences.append(one.words or [one.text[a:b] for a, b in of_text])
      encoded.append(sentences[-1])
      # A model that was trained elsewhere gets the text as transformers'
      # pipeline does, our own gets words as in training.
      if not (one.words or context.task.get("space_before_words", True)):
        encoded[-1] = words.tokens_in_text(context.tokenizer, one.text, of_text)
    labels, shares = self._of_words(encoded, context, run)
    types, first = entities.types_of(context.task.get("labels", ())), 0
    in_order = zip(inputs, positions, sentences, strict=True)
    for one, of_text, sentence in in_order:
      own = slice(first, first + len(sentence))
      first = own.stop + 1  # the number of a sentence's end is nobody's
      # Labels such as parts of speech mark no entities.
      if one.words or not types:
        yield {"tokens": [*sentence], "tags": labels[own]}
        continue
      answer: dict = {"text": one.text, "entities": []}
      for kind, begin, last in entities.entities_of(labels[own]):
        start, end = of_text[begin][0], of_text[last][1]
        score = float(shares[own][begin : last + 1].mean())
        entity = {"label": kind, "start": start, "end": end}
        entity |= {"text": one.text[start:end], "score": score}
        answer["entities"].append(entity)
      yield answer

  def _of_words(
    self, sentences, context: Context, run: Run
  ) -> tuple[list[str], np.ndarray]:
    """Labels and their probabilities, numbered as by `encode_words`."""
    stride = context.task.get("doc_stride", words.WORD_STRIDE)
    spaces = context.task.get("space_before_words", True)
    windows = words.encode_words(
      context.tokenizer, sentences, context.max_seq_length, stride, spaces
    )
    of_tokens, speaks_for = [], []
    for window, outputs in zip(windows, run(windows), strict=True):
      of_tokens.append(outputs["probabilities"][: len(window.ids)])
      speaks_for.append(window.words)
    shares = np.concatenate(of_tokens)  # [tokens, labels]
    word_of_token = np.concatenate(speaks_for)
    count = sum(map(len, sentences)) + len(sentences)
    rows = words.of_words(count, word_of_token, shares.argmax(axis=-1))
    highest = words.of_words(count, word_of_token, shares.max(axis=-1))
    # SILENT is the last one.
    names = [*context.labels(shares.shape[-1]), entities.OUTSIDE]
    return [names[row] for row in rows.astype(int)], highest

  def lines(self, answer):
    if "tags" in answer:
      pairs = zip(answer["tokens"], answer["tags"], strict=True)
      return ["  ".join(f"{word}/{tag}" for word, tag in pairs)]
    lines = [answer["text"]]
    for entity in answer["entities"]:
      lines.append("  {score:6.1%}  {label}  {text}".format(**entity))
    return lines if answer["entities"] else [*lines, "  (no entity)"]
