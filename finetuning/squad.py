"""Answers as spans of a paragraph: SQuAD 1.1 and 2.0."""

import dataclasses
import operator
from typing import ClassVar

import numpy as np

from checkpoints import metrics
from common import json_files
from common import tensorflow_v1 as later
from common.errors import DataError
from common.settings import in_group
from finetuning import packed, spans, squad_metric
from finetuning.behaviour import PAIRS, Behaviour
from finetuning.spans import AnswerSettings, Question
from finetuning.task import FinetuningConfig, FinetuningTask
from model import tasks

_data = in_group("Data")

PREDICTIONS_FILE = "predictions.json"
NBEST_FILE = "nbest_predictions.json"
NULL_ODDS_FILE = "null_odds.json"
_NO_ANSWER = "(no answer)"
_OUTSIDE = -1e30  # a score whose softmax is 0
# SQuAD 1.1 and 2.0; `json_files.expect` has the notation.
_QUESTION = {
  "id": (str, float),
  "question": str,
  "answers?": [{"text": str, "answer_start": int}],
  "is_impossible?": bool,
}
_FORMAT = {"data": [{"paragraphs": [{"context": str, "qas": [_QUESTION]}]}]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquadConfig(AnswerSettings, FinetuningConfig):
  """Settings of run_squad.py; fields are named like its flags."""

  # fmt: off
  eval_file: str | None = _data(None,
    "File to evaluate on: {format}. Default: --predict_file.")
  # fmt: on

  kind: ClassVar[str] = tasks.SQUAD
  format: ClassVar[str] = "JSON in SQuAD's format"

  def __post_init__(self):
    super().__post_init__()
    self.check()

  def path(self, part):
    if part == "eval" and not self.eval_file and self.predict_file:
      return self.predict_file
    return super().path(part)


class Squad(FinetuningTask):
  """Finds the answer to each question in its paragraph, if there is one."""

  config: SquadConfig
  best_by = metrics.BestBy(("f1",), True)

  def read(self, part):
    config, path = self.config, self.config.path(part)
    if part == "predict" and config.do_eval and path == config.path("eval"):
      return self.evaluation_set
    return SquadSource(path, config, part)

  def head(self, batch, is_training, dropout_seed=None):
    """`heads.HeadOutput` of an answer's first and last token in each example.

    The loss is the mean of two cross entropies over the example's own tokens.
    In https://arxiv.org/abs/1810.04805 (section 4.2) and google/bert, padding
    counts too. `targets`, [B, E, 2], count from the row's first token. Outputs
    "logits", float32 [B, S, 2].
    """
    from finetuning import heads  # these load TensorFlow
    from model import layers

    tf = later.tf
    encoder = heads.encode(batch, self, is_training, dropout_seed)
    features = encoder.features(tasks.QUESTIONS)
    logits = span_logits(features, encoder.bert, encoder.policy)
    # Tokens of other examples in the row, and padding, cannot be answers.
    _, slots = layers.get_shape_list(batch.weights)
    numbers = tf.range(1, slots + 1, dtype=batch.input_mask.dtype)
    # [B, E, S]
    is_own = tf.equal(batch.input_mask[:, None, :], numbers[:, None])
    scores = tf.where_v2(  # [B, E, 2, S]
      is_own[:, :, None, :], tf.transpose(logits, [0, 2, 1])[:, None], _OUTSIDE
    )
    log_probs = tf.nn.log_softmax(scores)
    of_targets = tf.gather(log_probs, batch.targets, batch_dims=3)
    best = tf.argmax(scores, axis=-1, output_type=tf.int32)
    return heads.HeadOutput(
      -tf.reduce_mean(of_targets, axis=-1),
      tf.cast(tf.reduce_all(tf.equal(best, batch.targets), -1), tf.float32),
      {"logits": logits},
    )

  def results(self, source, outputs):
    right, best, odds = {}, {}, {}
    for question in source.questions:
      right[question.id] = [text for text, _ in question.answers]
    for name, answers in source.answers(outputs["logits"]).items():
      best[name] = answers.text()
      odds[name] = answers.null_odds
    if not self.config.version_2_with_negative:
      return squad_metric.evaluate_v1(right, best)
    threshold = self.config.null_score_diff_threshold
    return squad_metric.evaluate_v2(right, best, odds, threshold)

  def write_predictions(self, source, outputs):
    """SQuAD's official format: id -> text; also the n best and null odds."""
    config = self.config
    texts, odds = {}, {}
    candidates: dict[str, list] = {}
    for question, answers in source.answers(outputs["logits"]).items():
      texts[question] = answers.text(config.threshold)
      odds[question] = answers.null_odds
      candidates[question] = []
      for answer, share in answers.shares(config):
        shown = {"text": answer.text, "probability": share}
        candidates[question].append(shown | answer._asdict())
    files = {PREDICTIONS_FILE: texts, NBEST_FILE: candidates}
    if config.version_2_with_negative:
      files[NULL_ODDS_FILE] = odds
    lines = []
    for name, value in files.items():
      path = config.output_file(name)
      json_files.write(path, value)
      lines.append(f"predictions {path}")
    return lines

  def describe(self):
    return {name: getattr(self.config, name) for name in spans.ANSWER_SETTINGS}


def span_logits(features, bert, policy):
  """float32 [B, S, 2]: start and end scores of each token, from [B, S, H]."""
  from finetuning import heads  # it loads TensorFlow
  from model import kernels, layers

  tf = later.tf
  weights, bias = heads.variables(tasks.QUESTIONS, 2, bert)
  shape = layers.get_shape_list(features, 3)
  # Not in policy.heads: this matmul is cheap, and in 16 bits neighbours in a
  # long paragraph would have equal scores.
  matrix = tf.cast(layers.reshape_to_matrix(features), policy.losses)
  weights = tf.cast(weights, policy.losses)
  scores = tf.matmul(matrix, weights, transpose_b=True)
  scores = kernels.add_bias(scores, bias)
  return tf.cast(tf.reshape(scores, [*shape[:2], 2]), tf.float32)


class SquadSource(packed.PackedSource):
  """A SQuAD file as packed windows."""

  def __init__(self, path: str, config: SquadConfig, part: str):
    """Reads and encodes for a `part`.

    "train" skips questions whose answers are not in their paragraphs, as
    google/bert does. "eval" counts them in the metrics, which compare texts,
    but not in the loss. "predict" needs no answers.
    """
    self._config, self._skips = config, part == "train"
    answered = part != "predict"
    self.questions = read_squad(path, config.version_2_with_negative, answered)
    self._windows, answers = spans.encode_questions(
      config.tokenizer(), self.questions, config
    )
    with_answers = [n for n, q in enumerate(self.questions) if q.answers]
    # Numbers of questions without their answer.
    self._lost = [n for n in with_answers if answered and answers[n] is None]
    # A few are normal in published files; if all are, offsets count otherwise.
    if self._lost and self._lost == with_answers:
      raise DataError(
        f"{path}: none of the {len(with_answers):,} answers is found in its "
        f"paragraph; the first: {_shown(self.questions[with_answers[0]])}"
      )
    lost = set(self._lost)
    # Training on them would teach that such questions have no answer.
    if self._skips:
      self._windows = [w for w in self._windows if w.question not in lost]
    examples = []
    for window in self._windows:
      number, weight = window.question, float(window.question not in lost)
      target = spans.target_span(window, answers[number])
      name = self.questions[number].id
      examples.append(
        packed.Example(window.ids, window.segments, name, target, weight)
      )
    super().__init__(path, examples, config)
    # Targets count from the row's first token.
    self._columns.targets[self.record_of, self.slot_of] += self.starts[:, None]

  def line(self) -> str:
    line = super().line()
    if not self._lost:
      return line
    what = "skipped" if self._skips else "not in the loss"
    return (
      f"{line}; {len(self._lost):,} of {len(self.questions):,} questions are "
      f"{what}: their answers are not found; the first: "
      f"{_shown(self.questions[self._lost[0]])}"
    )

  def answers(self, logits: np.ndarray) -> dict[str, spans.Answers]:
    """Question id -> answers, from float32 [rows, S, 2]."""
    answers = spans.choose_answers(
      self.questions, self._windows, self.of_examples(logits), self._config
    )
    return {q.id: a for q, a in zip(self.questions, answers, strict=True)}


def _shown(question: Question) -> str:
  """A question whose answer is not found, and why."""
  text, start = question.answers[0]
  there = question.context[max(0, start) : max(0, start + len(text))]
  return (
    f"question {question.id}: the answer {text!r} is not at answer_start "
    f"{start}, where {there!r} stands, or has no token"
  )


def read_squad(
  path: str, version_2: bool, needs_answers: bool
) -> list[Question]:
  """The questions of a SQuAD 1.1 or 2.0 file; `DataError` for other formats."""
  content = json_files.read(path, _FORMAT, "not readable as SQuAD's format: {}")
  questions: dict[str, Question] = {}
  for article in content["data"]:
    for paragraph in article["paragraphs"]:
      for entry in paragraph["qas"]:
        answers = []
        if not entry.get("is_impossible", False):
          for answer in entry.get("answers", ()):
            if answer["text"].strip():
              answers.append((answer["text"], answer["answer_start"]))
        # JSON may have numbers, but predictions.json names ids as text.
        name = str(entry["id"])
        if name in questions:
          raise DataError(f"{path}: two questions have the id {name}")
        says = entry.get("is_impossible") or "answers" in entry
        if needs_answers and not (answers or (version_2 and says)):
          raise DataError(
            f"{path}: question {name} has no answer: if that is right, say so "
            "by is_impossible, or no answers, and --version_2_with_negative"
          )
        questions[name] = Question(
          name, entry["question"], paragraph["context"], tuple(answers)
        )
  if not questions:
    raise DataError(f"{path}: no questions")
  return list(questions.values())


# Answers ----------------------------------------------------------------------


class QuestionBehaviour(Behaviour):
  """Answers questions by spans of their paragraphs, cut into windows."""

  head = tasks.QUESTIONS
  form = {"question": str, "context": str}
  kinds = (PAIRS,)

  def outputs(self, encoder):
    features = encoder.features(self.head)
    logits = span_logits(features, encoder.bert, encoder.policy)
    start, end = later.tf.unstack(logits, axis=-1)
    return {"start_logits": start, "end_logits": end}

  def check(self, context):
    self._settings(context).check()

  def _settings(self, context) -> AnswerSettings:
    known = context.task.keys() & {*spans.ANSWER_SETTINGS}
    values = {name: context.task[name] for name in known}
    return AnswerSettings(**values | {"max_seq_length": context.max_seq_length})

  def answers(self, inputs, context, run):
    questions, settings = [], self._settings(context)
    for number, (text, paragraph, _) in enumerate(inputs):
      questions.append(Question(str(number), text, paragraph, ()))
    windows, _ = spans.encode_questions(context.tokenizer, questions, settings)
    # Logits without the padding of their batch.
    logits, counts = [], [0] * len(questions)
    for window, scores in zip(windows, run(windows), strict=True):
      both = np.stack([scores["start_logits"], scores["end_logits"]], -1)
      logits.append(both[: len(window.ids)])
      counts[window.question] += 1
    chosen = spans.choose_answers(questions, windows, logits, settings)
    share = operator.itemgetter(1)
    for question, answers, count in zip(questions, chosen, counts, strict=True):
      best = sorted(answers.shares(settings), key=share, reverse=True)
      best = best[: context.top_k]
      yield {
        "question": question.text,
        "answer": answers.text(settings.threshold),
        "answers": [{"text": a.text, "probability": p} for a, p in best],
        "windows": count,
      }

  def lines(self, answer):
    lines = [answer["question"], f"  answer: {answer['answer'] or _NO_ANSWER}"]
    for one in answer["answers"]:
      lines.append(f"  {one['probability']:6.1%}  {one['text'] or _NO_ANSWER}")
    return lines
