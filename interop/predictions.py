"""Predictions for texts: words, labels, answers, embeddings.

Each prediction is a dictionary that JSON can hold; `as_lines` shows one to a
person. Checkpoints and exports are both run through `inference.Model`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from common import json_files
from common.errors import DataError, UserError
from finetuning import squad, windows
from finetuning.classification import encode_pair, pair_length
from interop import inference
from interop.model_source import Source
from tokenization import MASK

POOLINGS = ("mean", "cls")
_PAIR = "|||"
_BATCH = 16  # sequences in one run of the graph


class Input(NamedTuple):
  """A text, two texts of a pair, or a question and its paragraph."""

  text: str
  pair: str | None = None


def parse_line(line: str, may_be_json: bool) -> Input:
  """The input of a line: a text, or two with a tab or ||| between them.

  With `may_be_json` (see `Predictor.answers_questions`) a line that begins with
  { is JSON with "question" and "context"; else it is text.

  Raises:
    DataError: a text is empty, or the JSON has something else in it.
  """
  line = line.strip("\r\n ")
  if may_be_json and line.startswith("{"):
    try:
      found = json_files.parse(line)
    except ValueError as e:
      raise DataError(
        f"{line[:60]!r}: begins with {{, but is not JSON ({e})"
      ) from e
    both = [found.get(name) for name in ("question", "context")]
    if not all(isinstance(text, str) and text.strip() for text in both):
      raise DataError(
        f'{line[:60]!r}: "question" and "context" must be texts that are not '
        "empty"
      )
    return Input(*both)
  parts = line.split("\t") if "\t" in line else line.split(_PAIR)
  if len(parts) > 2:
    raise DataError(f"{line[:60]!r}: {len(parts)} texts, not one or two")
  texts = [part.strip() for part in parts]
  if not all(texts):
    raise DataError(f"{line[:60]!r}: a text is empty")
  return Input(*texts)


class Predictor:
  """Makes the kind of predictions that a model is for."""

  def __init__(
    self,
    model: inference.Model,
    source: Source,
    top_k: int = 5,
    embedding: str | None = None,
    max_seq_length: int | None = None,
  ):
    """Prepares predictions, as flags of predict.py with these names say.

    Raises:
      UserError: the model does not have this length.
    """
    self._model, self._task, self._top_k = model, source.task, top_k
    self._tokenizer, self._embedding = source.tokenizer(), embedding
    self._length = max_seq_length or source.max_seq_length
    most = source.bert.max_position_embeddings
    if not 4 <= self._length <= most:
      raise UserError(
        f"--max_seq_length={self._length}: must be 4 to the BERT config's "
        f"max_position_embeddings={most}"
      )
    names = self._task.keys() & set(squad.ANSWER_SETTINGS)
    known = {name: self._task[name] for name in names}
    known["max_seq_length"] = self._length
    self._settings = squad.AnswerSettings(**known)
    if self.answers_questions:
      self._settings.check()

  def predict(self, inputs: Sequence[Input]) -> list[dict]:
    """A prediction of each input, in their order.

    Raises:
      UserError: the model cannot do what an input asks for.
    """
    groups = {}
    for number, one in enumerate(inputs):
      groups.setdefault(self._kind(one), []).append(number)
    found = {}
    for kind, numbers in groups.items():
      made = kind(self, [inputs[n] for n in numbers])
      found.update(zip(numbers, made, strict=True))
    return [found[n] for n in range(len(inputs))]

  @property
  def answers_questions(self) -> bool:
    """Whether an input is a question and its paragraph."""
    return not self._embedding and "span" in self._model.names()

  def _kind(self, one: Input):
    if self._embedding:
      return Predictor._embeddings
    if self.answers_questions:
      return Predictor._answers
    if "classifier" in self._model.names():
      return Predictor._labels
    if MASK in one.text + (one.pair or ""):
      return Predictor._words
    return Predictor._next_sentence if one.pair else Predictor._embeddings

  # Text to arrays -------------------------------------------------------------

  def _ids(self, text: str) -> np.ndarray:
    """int32 [tokens]; tokenizers would split [MASK], here it is the mask."""
    ids = []
    for part in self._tokenizer.encode_batch(text.split(MASK)):
      ids += [self._tokenizer.mask_id, *part]
    return np.array(ids[1:], np.int32)

  def _encode(self, inputs) -> tuple[list, list[dict]]:
    """(ids, segments) of each, and predictions that have their texts."""
    examples, begun = [], []
    for one in inputs:
      a, made = self._ids(one.text), {"text": one.text}
      b = None if one.pair is None else self._ids(one.pair)
      if b is not None:
        made["pair"] = one.pair
      ids, segments = encode_pair(self._tokenizer, self._length, a, b)
      if cut := pair_length(a, b) - len(ids):
        made["tokens_cut"] = cut
      examples.append((ids, segments))
      begun.append(made)
    return examples, begun

  def _run(self, name: str, examples, positions=None) -> Iterator[dict]:
    """The outputs of each example: arrays without the batch's dimension."""
    for start in range(0, len(examples), _BATCH):
      ids, segments = zip(*examples[start : start + _BATCH], strict=True)
      inputs = ids, [np.ones_like(i) for i in ids], segments
      arrays = dict(zip(inference.INPUTS, map(_padded, inputs), strict=True))
      if positions is not None:
        arrays[inference.POSITIONS] = _padded(positions[start : start + _BATCH])
      outputs = self._model.run(name, arrays)
      for row in range(len(ids)):
        yield {n: value[row] for n, value in outputs.items()}

  # Arrays to predictions ------------------------------------------------------

  def _words(self, inputs) -> list[dict]:
    examples, made = self._encode(inputs)
    mask = self._tokenizer.mask_id
    positions = [np.flatnonzero(ids == mask) for ids, _ in examples]
    for one, places in zip(inputs, positions, strict=True):
      if not len(places):
        raise UserError(
          f"{one.text[:60]!r}...: its [MASK] is beyond the {self._length} "
          "tokens that are read: shorten the text, or give --max_seq_length"
        )
    found = self._run("masked_lm", examples, positions)
    for one, places, outputs in zip(made, positions, found, strict=True):
      words, one["masks"] = self._tokenizer.tokens, []
      for known in outputs["log_probs"][: len(places), : len(words)]:
        best = np.argsort(-known, kind="stable")[: self._top_k]
        one["masks"].append(
          [
            {"word": words[i], "probability": float(np.exp(known[i]))}
            for i in best
          ]
        )
    return made

  def _next_sentence(self, inputs) -> list[dict]:
    examples, made = self._encode(inputs)
    found = self._run("next_sentence", examples)
    for one, outputs in zip(made, found, strict=True):
      one["is_next"] = float(np.exp(outputs["log_probs"][0]))
    return made

  def _embeddings(self, inputs) -> list[dict]:
    """The last layer's output: the mean over all tokens, or that of [CLS]."""
    examples, made = self._encode(inputs)
    pooling = self._embedding or POOLINGS[0]
    found = self._run("encoder", examples)
    for one, (ids, _), outputs in zip(made, examples, found, strict=True):
      tokens = outputs["sequence_output"][: len(ids)]
      vector = tokens.mean(axis=0) if pooling == "mean" else tokens[0]
      one |= {"pooling": pooling, "embedding": [float(x) for x in vector]}
    return made

  def _labels(self, inputs) -> list[dict]:
    columns = self._task.get("columns")
    for one in inputs if columns else ():
      if (one.pair is None) != (columns["text_pair"] is None):
        wanted = "pairs" if columns["text_pair"] else "single texts"
        raise UserError(
          f"{one.text[:60]!r}: this model was trained on {wanted}; a tab or "
          f"{_PAIR} makes a pair"
        )
    examples, made = self._encode(inputs)
    found = self._run("classifier", examples)
    for one, outputs in zip(made, found, strict=True):
      if "probabilities" not in outputs:
        one["value"] = float(outputs["logits"][0])
        continue
      shares = outputs["probabilities"]
      names = self._task.get("labels") or list(map(str, range(len(shares))))
      if len(names) != len(shares):
        raise DataError(
          f"task.json has {len(names)} labels, but the model {len(shares)}"
        )
      one["label"] = names[int(np.argmax(shares))]
      one["probabilities"] = dict(zip(names, map(float, shares), strict=True))
    return made

  def _answers(self, inputs) -> list[dict]:
    for one in inputs:
      if one.pair is None:
        raise UserError(
          f"{one.text[:60]!r}: this model answers questions: give --question "
          f"and --context, or both in a line with a tab or {_PAIR} between them"
        )
    questions = [
      windows.Question(str(n), one.text, one.pair, ())
      for n, one in enumerate(inputs)
    ]
    made = squad.encode_questions(
      self._tokenizer, questions, self._settings
    ).windows
    found = self._run("span", [(w.ids, w.segments) for w in made])
    parts = [([], []) for _ in questions]
    for window, outputs in zip(made, found, strict=True):
      logits = np.stack([outputs["start_logits"], outputs["end_logits"]], -1)
      own, scores = parts[window.question]
      own.append(window)
      scores.append(logits[: len(window.ids)])
    return [
      self._answer(question, *part)
      for question, part in zip(questions, parts, strict=True)
    ]

  def _answer(self, question, own, scores) -> dict:
    settings = self._settings
    found, null = windows.best_answers(
      question, own, scores, settings.n_best_size, settings.max_answer_length
    )
    ranked = sorted(
      squad.candidates(found, null, settings), key=lambda pair: -pair[1]
    )
    return {
      "question": question.text,
      "answer": squad.chosen_text(found, null, settings),
      "answers": [
        {"text": answer.text, "probability": share}
        for answer, share in ranked[: self._top_k]
      ],
      "windows": len(own),
    }


def _padded(rows) -> np.ndarray:
  """int32 [rows, length of the longest], padded with 0."""
  made = np.zeros([len(rows), max(map(len, rows))], np.int32)
  for row, values in zip(made, rows, strict=True):
    row[: len(values)] = values
  return made


def as_lines(made: dict) -> list[str]:
  """A prediction for a person."""
  if "question" in made:
    answers = [
      f"  {one['probability']:6.1%}  {one['text'] or '(no answer)'}"
      for one in made["answers"]
    ]
    chosen = made["answer"] or "(no answer)"
    return [made["question"], f"  answer: {chosen}", *answers]
  lines = [
    made["text"] + (f" {_PAIR} {made['pair']}" if "pair" in made else "")
  ]
  for shares in made.get("masks", ()):
    words = "  ".join(f"{w['word']} {w['probability']:.1%}" for w in shares)
    lines.append(f"  {MASK}  {words}")
  if "is_next" in made:
    lines.append(f"  follows: {made['is_next']:.1%}")
  if "label" in made:
    shares = sorted(made["probabilities"].items(), key=lambda pair: -pair[1])
    lines.append("  " + "  ".join(f"{name} {p:.1%}" for name, p in shares))
  if "value" in made:
    lines.append(f"  {made['value']:.4f}")
  if "embedding" in made:
    vector = made["embedding"]
    of = "all tokens' mean" if made["pooling"] == "mean" else "[CLS]"
    shown = " ".join(f"{x:.3f}" for x in vector[:6])
    lines.append(f"  {len(vector)} numbers, {of}: {shown} ... (--json: all)")
  if "tokens_cut" in made:
    lines.append(f"  (too long: {made['tokens_cut']} tokens were not read)")
  return lines
