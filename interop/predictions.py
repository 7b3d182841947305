"""Predictions for texts: words, labels, answers, entities, embeddings.

A prediction is a dictionary that JSON can hold; `as_lines` shows it to people.
"""

import collections
import operator
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from common import json_files
from common.console import tell
from common.errors import DataError, UserError
from finetuning import entities, task_file, windows
from finetuning.classification import encode_pair, pair_length
from interop.model_source import Source
from model import tasks
from text_encoders.base import MASK
from text_encoders.wordpiece import word_spans

POOLINGS = ("mean", "cls")
_PAIR = "|||"
_NO_ANSWER = "(no answer)"
_BEFORE_MASK = re.compile(rf"\s*{re.escape(MASK)}")
_OTHER_MASKS = re.compile(r"(?!\[MASK\])(?i:\[mask\]|<mask>)")
# The signatures that answer questions, and that label words.
_SPAN, _TOKENS = tasks.QUESTIONS.signature, tasks.TOKENS.signature
_BATCH = 16  # sequences in one run of the graph


class Input(NamedTuple):
  """A text, two texts of a pair, or a question and its paragraph."""

  text: str
  pair: str | None = None
  words: Sequence[str] = []  # of `text`, where they are given


# A line of JSON for a model of these signatures.
_FORMS: dict[str | None, dict] = {
  _SPAN: {"question": str, "context": str},
  _TOKENS: {"text?": str, "tokens?": [str]},
}


def parse_line(line: str, reads: str | None = None) -> Input:
  """Reads a text, or two with a tab or ||| between them, or raises `DataError`.

  For a model that `reads` questions or words (`Predictor.reads`) a line that
  begins with { is JSON. A line of words is one text.
  """
  line, words = line.strip("\r\n "), []
  if reads in _FORMS and line.startswith("{"):
    try:
      content = json_files.parse(line, _FORMS[reads])
    except ValueError as e:
      known = " and ".join(_FORMS[reads]).replace("?", "")
      raise DataError(f"{line[:60]!r} is not JSON with {known}: {e}") from e
    words = content.get("tokens", [])
    keys = "question", "context", "text"
    texts = [content[key] for key in keys if key in content]
    texts = texts or [" ".join(words)]
  elif reads == _TOKENS:
    texts = [line]
  else:
    mark = "\t" if "\t" in line else _PAIR
    texts = [text.strip() for text in line.split(mark)]
  if len(texts) > 2 or not all(map(str.strip, texts)):
    raise DataError(f"{line[:60]!r}: give one text or two, none of them empty")
  return Input(*texts)._replace(words=words)


class Predictor:
  """Makes the kind of predictions that a model is for."""

  def __init__(
    self,
    model,
    source: Source,
    top_k: int = 5,
    embedding: str | None = None,
    max_seq_length: int | None = None,
  ):
    """Of an `inference.Model`; the other arguments are as predict.py's flags.

    Raises `UserError` for too long a length.
    """
    self._model, self._task, self._top_k = model, source.task, top_k
    self._tokenizer, self._embedding = source.tokenizer(), embedding
    self._length = max_seq_length or source.max_seq_length
    task_file.check_length(self._length, source.bert)
    names = set(windows.ANSWER_SETTINGS) & set(self._task)
    settings = {name: self._task[name] for name in names}
    settings["max_seq_length"] = self._length
    self._settings = windows.AnswerSettings(**settings)
    if self.reads == _SPAN:
      self._settings.check()

  def predict(self, inputs: Sequence[Input]) -> list[dict]:
    """Predictions in order; `UserError` for an input that does not fit."""
    groups = collections.defaultdict(list)
    for number, text in enumerate(inputs):
      self._note_other_masks(text)
      groups[self._signature(text)].append(number)
    predictions: list[dict] = [{}] * len(inputs)
    for name, numbers in groups.items():
      group = [inputs[number] for number in numbers]
      if name == _SPAN:
        of_group = self._answers(group)
      elif name == _TOKENS:
        of_group = self._labelled(group)
      else:
        of_group = self._texts(name, group)
      for number, prediction in zip(numbers, of_group, strict=True):
        predictions[number] = prediction
    return predictions

  @property
  def reads(self) -> str | None:
    """The signature that all inputs are for; None if that depends on them."""
    if self._embedding:
      return "encoder"
    for name in (_TOKENS, _SPAN, "classifier"):
      if name in self._model.names():
        return name
    return None

  def _signature(self, one: Input) -> str:
    if self.reads:
      return self.reads
    if MASK in one.text + (one.pair or ""):
      return "masked_lm"
    is_pair = one.pair and "next_sentence" in self._model.names()
    return "next_sentence" if is_pair else "encoder"

  def _note_other_masks(self, one: Input) -> None:
    if self._embedding or "masked_lm" not in self._model.names():
      return
    other = _OTHER_MASKS.search(f"{one.text} {one.pair or ''}")
    if other:
      tell(
        f"{one.text[:60]!r}: {other[0]} is read as text: for a word to find "
        f"write {MASK}"
      )

  # Text to arrays -------------------------------------------------------------

  def _ids(self, text: str, name: str) -> np.ndarray:
    """int32 [tokens]; the tokenizer alone would split [MASK].

    As it does for classifiers, which are trained and evaluated so.
    """
    # The space before a mask is its word's, as in Hugging Face's tokenizers.
    first, *rest = [text] if name == "classifier" else _BEFORE_MASK.split(text)
    mask = np.array([self._tokenizer.mask_id], np.int32)
    ids = self._tokenizer.encode_batch([first])
    for part in rest:
      ids += [mask, self._tokenizer.encode_rest(part)]
    return np.concatenate(ids)

  def _masks(self, ids: np.ndarray) -> np.ndarray:
    return np.flatnonzero(ids == self._tokenizer.mask_id)

  def _encode(self, name: str, one: Input) -> tuple:
    """(prediction that has only the texts, ids, segments) of an input."""
    columns = self._task.get("columns") if name == "classifier" else None
    if columns and (one.pair is None) != (columns["text_pair"] is None):
      wanted = "pairs" if columns["text_pair"] else "single texts"
      raise UserError(
        f"{one.text[:60]!r}: this model was trained on {wanted}; a tab or "
        f"{_PAIR} makes a pair"
      )
    texts = [one.text] if one.pair is None else [one.text, one.pair]
    encoded = [self._ids(text, name) for text in texts]
    ids, segments = encode_pair(self._tokenizer, self._length, *encoded)
    if not self._task.get("segment_ids", True):
      segments = np.zeros_like(segments)
    if name == "masked_lm" and not len(self._masks(ids)):
      raise UserError(
        f"{one.text[:60]!r}...: its [MASK] is beyond the {self._length} "
        "tokens that are read: shorten the text, or give --max_seq_length"
      )
    prediction: dict = dict(zip(("text", "pair"), texts, strict=False))
    cut = pair_length(*encoded) - len(ids)
    if cut:
      prediction["tokens_cut"] = cut
    return prediction, ids, segments

  def _run(self, name: str, examples) -> Iterator[dict]:
    """The outputs of each example, without the batch dimension.

    They are windows, or of `_encode`: both have ids and segments in one place.
    """
    for start in range(0, len(examples), _BATCH):
      batch = examples[start : start + _BATCH]
      _, ids, segments, *_ = zip(*batch, strict=True)
      arrays = {
        "input_ids": _padded(ids),
        "input_mask": _padded([np.ones_like(i) for i in ids]),
        "segment_ids": _padded(segments),
      }
      if name == "masked_lm":
        arrays[tasks.POSITIONS] = _padded([self._masks(i) for i in ids])
      outputs = self._model.run(name, arrays)
      for row in range(len(ids)):
        yield {n: value[row] for n, value in outputs.items()}

  # Arrays to predictions ------------------------------------------------------

  def _texts(self, name: str, inputs) -> Iterator[dict]:
    prediction_of = {
      "encoder": self._embedding_of,
      "next_sentence": self._next_sentence,
      "masked_lm": self._words,
      "classifier": self._label,
    }[name]
    encoded = [self._encode(name, text) for text in inputs]
    outputs = self._run(name, encoded)
    for (texts, ids, _), arrays in zip(encoded, outputs, strict=True):
      yield {**texts, **prediction_of(ids, arrays)}

  def _words(self, ids, outputs) -> dict:
    words, masks = self._tokenizer.texts, []
    count = len(self._masks(ids))
    for log_probs in outputs["log_probs"][:count, : len(words)]:
      mask = []
      for word in np.argsort(-log_probs, kind="stable")[: self._top_k]:
        probability = float(np.exp(log_probs[word]))
        mask.append({"word": words[word], "probability": probability})
      masks.append(mask)
    return {"masks": masks}

  def _next_sentence(self, ids, outputs) -> dict:
    return {"is_next": float(np.exp(outputs["log_probs"][0]))}

  def _embedding_of(self, ids, outputs) -> dict:
    pooling = self._embedding or POOLINGS[0]
    tokens = outputs["sequence_output"][: len(ids)]
    vector = tokens.mean(axis=0) if pooling == "mean" else tokens[0]
    return {"pooling": pooling, "embedding": vector.tolist()}

  def _label(self, ids, outputs) -> dict:
    if "probabilities" not in outputs:
      return {"value": float(outputs["logits"][0])}
    shares = outputs["probabilities"]
    names = self._names(len(shares))
    return {
      "label": names[int(np.argmax(shares))],
      "probabilities": dict(zip(names, shares.tolist(), strict=True)),
    }

  def _names(self, count: int) -> list[str]:
    """Of `count` labels; their numbers if no file names them."""
    names = self._task.get("labels") or list(map(str, range(count)))
    if len(names) != count:
      raise DataError(f"task.json has {len(names)} labels, the model {count}")
    return names

  def _labelled(self, inputs) -> Iterator[dict]:
    """Entities in texts; the labels of given words, or if they are plain."""
    spans, sentences = [], []
    for one in inputs:
      of_text = word_spans(one.text)
      spans.append(of_text)
      sentences.append(one.words or [one.text[a:b] for a, b in of_text])
    labels, shares = self._of_words(sentences)
    types, first = entities.types_of(self._task.get("labels", ())), 0
    for one, of_text, words in zip(inputs, spans, sentences, strict=True):
      place = slice(first, first + len(words))
      first = place.stop + 1
      if one.words or not types:
        yield {"tokens": [*words], "tags": labels[place]}
        continue
      of_entities = []
      for kind, begin, last in entities.entities_of(labels[place]):
        start, end = of_text[begin][0], of_text[last][1]
        score = float(shares[place][begin : last + 1].mean())
        entity = {"label": kind, "start": start, "end": end}
        entity |= {"text": one.text[start:end], "score": score}
        of_entities.append(entity)
      yield {"text": one.text, "entities": of_entities}

  def _of_words(self, sentences) -> tuple[list[str], np.ndarray]:
    """Labels and their probabilities, numbered as by `encode_words`."""
    stride = self._task.get("doc_stride", windows.WORD_STRIDE)
    limits = self._length, stride
    parts = windows.encode_words(self._tokenizer, sentences, *limits)
    outputs = self._run(_TOKENS, parts)
    of_parts, of_words = [], []
    for part, arrays in zip(parts, outputs, strict=True):
      of_parts.append(arrays["probabilities"][: len(part.ids)])
      of_words.append(part.words)
    shares = np.concatenate(of_parts)  # [tokens, labels]
    words = np.concatenate(of_words)
    count = sum(map(len, sentences)) + len(sentences)
    rows = windows.of_words(count, words, shares.argmax(axis=-1))
    highest = windows.of_words(count, words, shares.max(axis=-1))
    # SILENT is the last one.
    names = [*self._names(shares.shape[-1]), entities.OUTSIDE]
    return [names[row] for row in rows.astype(int)], highest

  def _answers(self, inputs) -> Iterator[dict]:
    questions = []
    for number, (text, context, _) in enumerate(inputs):
      if context is None:
        raise UserError(
          f"{text[:60]!r}: this model answers questions: give --question and "
          f"--context, or both in a line with a tab or {_PAIR} between them"
        )
      questions.append(windows.Question(str(number), text, context, ()))
    settings = self._settings
    parts, _ = windows.encode_questions(self._tokenizer, questions, settings)
    outputs = self._run(_SPAN, parts)
    logits, counts = [], [0] * len(questions)
    for part, scores in zip(parts, outputs, strict=True):
      both = np.stack([scores["start_logits"], scores["end_logits"]], -1)
      logits.append(both[: len(part.ids)])
      counts[part.question] += 1
    chosen = windows.choose_answers(questions, parts, logits, settings)
    for question, answers, count in zip(questions, chosen, counts, strict=True):
      best = []
      for answer, share in _by_share(answers.shares(settings))[: self._top_k]:
        best.append({"text": answer.text, "probability": share})
      yield {
        "question": question.text,
        "answer": answers.text(settings.threshold),
        "answers": best,
        "windows": count,
      }


def _by_share(pairs) -> list[tuple]:
  """(anything, its share) by the share, the highest first."""
  return sorted(pairs, key=operator.itemgetter(1), reverse=True)


def _padded(rows) -> np.ndarray:
  """int32 [rows, length of the longest], padded with 0."""
  padded = np.zeros([len(rows), max(map(len, rows))], np.int32)
  for row, values in zip(padded, rows, strict=True):
    row[: len(values)] = values
  return padded


def as_lines(result: dict) -> list[str]:
  """Shows a prediction to people."""
  if "question" in result:
    lines = [result["question"], f"  answer: {result['answer'] or _NO_ANSWER}"]
    for one in result["answers"]:
      text = one["text"] or _NO_ANSWER
      lines.append(f"  {one['probability']:6.1%}  {text}")
    return lines
  if "tags" in result:
    pairs = zip(result["tokens"], result["tags"], strict=True)
    return ["  ".join(f"{word}/{tag}" for word, tag in pairs)]
  lines = [result["text"]]
  if "pair" in result:
    lines[0] += f" {_PAIR} {result['pair']}"
  for entity in result.get("entities", ()):
    lines.append("  {score:6.1%}  {label}  {text}".format(**entity))
  if result.get("entities") == []:
    lines.append("  (no entity)")
  for shares in result.get("masks", ()):
    words = "  ".join(f"{w['word']} {w['probability']:.1%}" for w in shares)
    lines.append(f"  {MASK}  {words}")
  if "is_next" in result:
    lines.append(f"  follows: {result['is_next']:.1%}")
  if "label" in result:
    shares = _by_share(result["probabilities"].items())
    lines.append("  " + "  ".join(f"{name} {p:.1%}" for name, p in shares))
  if "value" in result:
    lines.append(f"  {result['value']:.4f}")
  if "embedding" in result:
    vector = result["embedding"]
    of = "all tokens' mean" if result["pooling"] == "mean" else "[CLS]"
    shown = " ".join(f"{x:.3f}" for x in vector[:6])
    lines.append(f"  {len(vector)} numbers, {of}: {shown} ... (--json: all)")
  if "tokens_cut" in result:
    lines.append(f"  (too long: {result['tokens_cut']} tokens were not read)")
  return lines
