"""Shows what a model learned: words, labels, answers, entities or vectors.

  python predict.py runs/first 'paris is the capital of [MASK] .'
  python predict.py runs/first 'it rained . ||| so we stayed in .'
  python predict.py runs/classifier 'a charming film' --json
  python predict.py runs/squad --question='who?' --context='it was me .'
  python predict.py runs/embedder --nearest_in=articles.txt 'who was it?'
  python predict.py runs/ner 'Ada Lovelace lived in London.'
  python predict.py served/first/1 --input=lines.txt

MODEL is a run folder, a checkpoint's name, a Hugging Face folder or an exported
folder. Texts are arguments, lines of --input, or lines of standard input; two
with a tab or ||| between them are a pair. A line that begins with { is JSON:
for a model that answers questions {"question": "...", "context": "..."}, for a
model that labels words {"text": "..."}, or {"tokens": ["...", "..."]}.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from common import input_files
from common.console import tell
from common.errors import DataError, UserError
from common.settings import in_group, run_with, setting
from corpus import text_files
from finetuning.behaviour import Input
from interop import embedding, model_source, predictions
from model.tasks import POOLINGS

_input, _output = in_group("Input"), in_group("Output")
_AT_ONCE = 64  # inputs that are read before their predictions are shown


@dataclasses.dataclass(frozen=True)
class PredictSettings:
  """What to predict, and how to show it; the names are the flags'."""

  # fmt: off
  input: str | None = _input(None,
    "File with a text on each line; - is standard input.")
  question: str | None = _input(None,
    "Question to answer, by a model that answers questions.")
  context: str | None = _input(None,
    "Paragraph that may answer --question.")
  nearest_in: str | None = _input(None,
    "File with a text on each line. The answer is the nearest --top_k of "
    "these, by the vectors of an embedder or of any encoder.",
    excludes=("question", "embedding"))
  max_seq_length: int | None = _input(None,
    "Tokens of one text at most; the end of a longer one is not read. Default: "
    "as in training, or the longest that the model can read.", low=4)
  top_k: int = _output(5,
    "Words, answers or nearest texts to show at most.", low=1)
  json: bool = _output(False, "Write JSON lines with all numbers.")
  embedding: str | None = _output(None,
    "Show the text as a vector, whatever the model is for. mean: the mean of "
    "the last layer over all tokens. cls: the last layer at [CLS].",
    choices=POOLINGS)
  parts: model_source.Given = setting(
    model_source.NOTHING_GIVEN, group="Parts of the model")
  # fmt: on


def read_inputs(
  settings: PredictSettings, texts: Sequence[str], parse: Callable[[str], Input]
) -> Iterator[Input]:
  """Inputs of checked flags, arguments or a file; `UserError` for none."""
  if settings.question is not None:
    yield Input(settings.question, settings.context)
    return
  path = settings.input or "-"
  name = "standard input" if path == "-" else path
  what = "text" if texts else f"{name}: line"
  is_empty = True
  for number, line in enumerate(texts or _lines(path, name), 1):
    # An empty argument is a mistake, an empty line of a file separates.
    if texts or line.strip():
      is_empty = False
      try:
        yield parse(line)
      except DataError as e:
        raise DataError(f"{what} {number}: {e}") from e
  if is_empty:
    raise UserError(f"{name}: there is no text in it")


def _lines(path: str, name: str) -> Iterator[str]:
  """The lines of a file, or of standard input for "-", which are UTF-8."""
  stdin = contextlib.nullcontext(sys.stdin.buffer)
  with stdin if path == "-" else input_files.open_input(path) as file:
    yield from text_files.utf8_lines(file, name)


def main(settings: PredictSettings, name: str, *texts: str) -> None:
  """Prints predictions of the model `name`."""
  texts = () if texts == ("-",) else texts  # standard input
  # Before the model takes its time.
  question = (settings.question, settings.context)
  has_question = question != (None, None)
  if has_question + bool(texts) + (settings.input is not None) > 1:
    raise UserError(
      "give texts as arguments, --input, or --question with --context: one of "
      "these"
    )
  if has_question and not all(text and text.strip() for text in question):
    raise UserError("give both --question and --context, not empty")
  for text in texts:
    if os.path.isfile(text):
      raise UserError(
        f"{text} is a file: give --input={text} to read a text on each of its "
        "lines (or the name itself on standard input)"
      )
  for flag, path in (
    ("input", settings.input), ("nearest_in", settings.nearest_in),
  ):  # fmt: skip
    if path not in (None, "-") and not os.path.exists(path):
      raise UserError(f"--{flag}={path}: there is no such file")
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as `| head` does
  source = model_source.find(name, settings.parts)
  predictor = open_predictor(source, settings)
  notes = source.lines()
  if not settings.max_seq_length and "max_seq_length" not in source.task:
    notes.append(
      f"{source.path}: nothing says how long its texts were: assumed "
      f"--max_seq_length={source.max_seq_length}"
    )
  tell(*notes)
  inputs = read_inputs(settings, texts, predictor.parse)
  typed = not (texts or settings.question) and (
    settings.input in (None, "-") and sys.stdin.isatty()
  )
  if typed:
    tell("type a text and Enter; Ctrl-D ends")
  # Who types waits for each answer; a file's lines share the graph's runs.
  while group := list(itertools.islice(inputs, 1 if typed else _AT_ONCE)):
    for answer, lines in predictor.predict(group):
      print(*([json.dumps(answer)] if settings.json else lines), sep="\n")
  predictor.close()


def open_predictor(source: model_source.Source, settings: PredictSettings):
  """A `Predictor`, or for --nearest_in what answers like one."""
  if settings.nearest_in:
    path, texts = settings.nearest_in, {}
    for number, line in enumerate(_lines(path, path), 1):
      if line.strip():
        texts[number] = line.strip()
    if not texts:
      raise UserError(f"--nearest_in={path}: there is no text in it")
    embedder = embedding.open_embedder(source, settings.max_seq_length)
    return embedding.NearestTexts(embedder, texts, settings.top_k)
  return predictions.load(
    source,
    top_k=settings.top_k,
    embedding=settings.embedding,
    max_seq_length=settings.max_seq_length,
  )


if __name__ == "__main__":
  run_with(PredictSettings, main, arguments=None)
