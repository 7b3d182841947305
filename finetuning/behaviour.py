"""What a head does in a trained model: reads texts, and answers.

A head's module has one `Behaviour` beside its training; `interop.heads` lists
them. An answer is a dictionary that JSON can hold.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from common import json_files
from common.errors import DataError
from finetuning.windows import encode_pair
from model.tasks import Head
from text_encoders.base import Encoder

INPUTS = ("input_ids", "input_mask", "segment_ids")
PAIR = "|||"  # between the two texts of a pair
# The kinds of inputs, as a message names them.
SINGLE, WORDS = "single texts", "lists of words"
PAIRS = (
  f"pairs of texts (a tab or {PAIR} between them; or --question and --context)"
)


class Input(NamedTuple):
  """A text, two texts of a pair, or a question and its paragraph."""

  text: str
  pair: str | None = None
  words: Sequence[str] = ()  # of `text`, if they are given

  @property
  def kind(self) -> str:
    if self.pair is not None:
      return PAIRS
    return WORDS if self.words else SINGLE


class Context(NamedTuple):
  """What answers depend on besides the weights."""

  tokenizer: Encoder
  task: dict[str, Any]  # as task.json has it
  max_seq_length: int
  top_k: int = 5  # most words or answers of a prediction
  pooling: str = "mean"  # from tokens to a vector: "mean" or "cls"

  def labels(self, count: int) -> list[str]:
    """The names of `count` labels; their numbers if no file names them."""
    names = self.task.get("labels") or [*map(str, range(count))]
    if len(names) != count:
      raise DataError(f"task.json has {len(names)} labels, the model {count}")
    return names

  def masks(self, ids: np.ndarray) -> np.ndarray:
    """int [masks]: the positions of [MASK]."""
    return np.flatnonzero(ids == self.tokenizer.mask_id)


# Runs the model on examples, whose fields 1 and 2 are int32 [n] ids and
# segments. Yields an example's outputs by name, with the batch's padding.
Run = Callable[[Sequence], Iterator[dict[str, np.ndarray]]]


class Encoded(NamedTuple):
  """A text or pair as the model's input."""

  texts: dict[str, Any]  # "text", "pair" if it is one, "tokens_cut" if any are
  ids: np.ndarray  # int32 [n]
  segments: np.ndarray  # int32 [n]


class Behaviour:
  """What one head of a trained model computes, reads and answers."""

  head: Head | None = None  # None: the encoder itself
  inputs: tuple[str, ...] = INPUTS  # int32, of its signature
  form: dict[str, Any] = {}  # of a line of JSON; {}: JSON is a text as others
  kinds: tuple[str, ...] = (SINGLE, PAIRS)  # of inputs that it may read
  sees_masks = True  # [MASK] in a text is that token

  @property
  def signature(self) -> str:
    return self.head.signature if self.head else "encoder"

  def outputs(self, encoder) -> dict:
    """Tensors of the signature, [B, ...] by name, of a `heads.HeadInput`."""
    raise NotImplementedError

  def arrays(self, ids: Sequence[np.ndarray], context: Context) -> dict:
    """Values of inputs beyond `INPUTS`, lists of int [n] arrays by name."""
    return {}

  def reads(self, context: Context) -> tuple[str, ...]:
    """The `kinds` of a model with this task.json."""
    return self.kinds

  def check(self, context: Context) -> None:
    """Raises `UserError` for settings that leave no room for a text."""

  def answers(
    self, inputs: Sequence[Input], context: Context, run: Run
  ) -> Iterator[dict]:
    """The answers in order; `UserError` for an input that does not fit.

    Here a text or pair has an answer by itself.
    """
    encoded = [self.encode(one, context) for one in inputs]
    for one, outputs in zip(encoded, run(encoded), strict=True):
      yield {**one.texts, **self.answer(one.ids, outputs, context)}

  def answer(self, ids: np.ndarray, outputs: dict, context: Context) -> dict:
    """The answer for tokens [n], of outputs without the batch dimension."""
    raise NotImplementedError

  def lines(self, answer: dict) -> list[str]:
    """An answer for people."""
    title = answer["text"]
    if "pair" in answer:
      title += f" {PAIR} {answer['pair']}"
    lines = [title]
    for line in self.answer_lines(answer):
      lines.append(f"  {line}")
    if "tokens_cut" in answer:
      lines.append(f"  (too long: {answer['tokens_cut']} tokens were not read)")
    return lines

  def answer_lines(self, answer: dict) -> list[str]:
    """The part of `lines` below the text."""
    raise NotImplementedError

  def parse(self, line: str) -> Input:
    """A text, or two with a tab or ||| between them; else `DataError`.

    If the head has a `form`, a line that begins with { is JSON.
    """
    line = line.strip("\r\n ")
    texts: list[str] = []
    words: Sequence[str] = ()
    if self.form and line.startswith("{"):
      try:
        content = json_files.parse(line, self.form)
      except ValueError as e:
        known = " and ".join(self.form).replace("?", "")
        raise DataError(f"{line[:60]!r} is not JSON with {known}: {e}") from e
      words = content.pop("tokens", ())
      for key in self.form:
        if key.removesuffix("?") in content:
          texts.append(content[key.removesuffix("?")])
      texts = texts or [" ".join(words)]
    elif PAIRS in self.kinds:
      mark = "\t" if "\t" in line else PAIR
      texts = [text.strip() for text in line.split(mark)]
    else:
      texts = [line]
    if len(texts) > 2 or not all(map(str.strip, texts)):
      raise DataError(
        f"{line[:60]!r}: give one text or two, none of them empty"
      )
    return Input(*texts)._replace(words=words)

  def encode(self, one: Input, context: Context) -> Encoded:
    """An input's tokens, cut to the longest that the model takes."""
    texts = [one.text] if one.pair is None else [one.text, one.pair]
    tokenizer, parts = context.tokenizer, []
    for text in texts:
      if self.sees_masks:
        parts.append(tokenizer.encode_with_masks(text))
      else:
        parts += tokenizer.encode_batch([text])
    ids, segments, cut = encode_pair(tokenizer, context.max_seq_length, *parts)
    # A model that never saw the second segment's embedding gets none of it.
    if not context.task.get("segment_ids", True):
      segments = np.zeros_like(segments)
    named: dict[str, Any] = dict(zip(("text", "pair"), texts, strict=False))
    if cut:
      named["tokens_cut"] = cut
    return Encoded(named, ids, segments)


def text_and_shares(pairs) -> str:
  """(text, share) pairs as "a 62.1%  b 30.0%"."""
  return "  ".join(f"{text} {share:.1%}" for text, share in pairs)
