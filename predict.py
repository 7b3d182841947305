"""Shows what a model learned: text in, words, labels, answers or vectors out.

  python predict.py runs/first 'paris is the capital of [MASK] .'
  python predict.py runs/first 'it rained . ||| so we stayed in .'
  python predict.py runs/classifier 'a charming film' --json
  python predict.py runs/squad --question='who?' --context='it was me .'
  python predict.py served/first/1 --input=lines.txt

MODEL is a run folder, a checkpoint's name, or an exported folder. Texts are
arguments, lines of --input, or lines of standard input; two with a tab or |||
between them are a pair. For a model that answers questions a line that begins
with { is JSON: {"question": "...", "context": "..."}.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator

from common import errors
from common.errors import DataError, UserError
from common.tensorflow_v1 import tf
from interop import inference, model_source, predictions
from training import flags_common

FLAGS = tf.flags.FLAGS

_AT_ONCE = 64  # inputs that are read before their predictions are shown


def define_flags() -> None:
  flags = tf.flags
  FLAGS.set_gnu_getopt()  # flags may follow MODEL
  flags.DEFINE_string(
    "input", None, "File with a text on each line; - is standard input."
  )
  flags.DEFINE_string("question", None, "For a model that answers questions.")
  flags.DEFINE_string("context", None, "The paragraph that may answer it.")
  flags.DEFINE_integer(
    "top_k", 5, "Words or answers to show at most.", lower_bound=1
  )
  flags.DEFINE_bool("json", False, "JSON lines with all numbers.")
  flags.DEFINE_enum(
    "embedding",
    None,
    list(predictions.POOLINGS),
    "The text as a vector, whatever the model is for: of the last layer the "
    "mean over all tokens, or that of [CLS].",
  )
  flags.DEFINE_integer(
    "max_seq_length",
    None,
    "Most tokens of a text; of a longer one the end is not read. Default: as "
    "in training, or what the model can if nothing says it.",
  )
  flags_common.define_source_flags()
  flags.adopt_module_key_flags(flags_common)  # so that --help shows them


def read_inputs(
  texts: list[str], may_be_json: bool
) -> Iterator[predictions.Input]:
  """Texts of the flags, the arguments, or standard input.

  Raises:
    UserError: they contradict each other, or there is no text.
  """
  asked = FLAGS.question is not None or FLAGS.context is not None
  if asked + bool(texts) + (FLAGS.input is not None) > 1:
    raise UserError(
      "give texts as arguments, --input, or --question with --context: one of "
      "these"
    )
  if asked:
    if not (FLAGS.question or "").strip() or not (FLAGS.context or "").strip():
      raise UserError("give both --question and --context, not empty")
    yield predictions.Input(FLAGS.question, FLAGS.context)
    return
  path = FLAGS.input or "-"
  name = "standard input" if path == "-" else path
  lines, what = _lines(path, name), f"{name}: line"
  if texts:
    lines, what = texts, "text"
  found = False
  for number, line in enumerate(lines, 1):
    if texts or line.strip():
      found = True
      try:
        yield predictions.parse_line(line, may_be_json)
      except DataError as e:
        raise DataError(f"{what} {number}: {e}") from e
  if not found:
    raise UserError(f"{name}: there is no text in it")


def _lines(path: str, name: str) -> Iterator[str]:
  """The lines of a file, or of standard input for "-", which are UTF-8."""
  with contextlib.ExitStack() as stack:
    file = sys.stdin.buffer
    if path != "-":
      file = stack.enter_context(open(path, "rb"))
    for number, line in enumerate(file, 1):
      try:
        yield line.decode("utf-8-sig" if number == 1 else "utf-8")
      except UnicodeDecodeError as e:
        raise DataError(
          f"{name}: line {number}, byte {e.start + 1}: not UTF-8 "
          f"(0x{line[e.start]:02x}): convert the text to UTF-8"
        ) from e


def main(argv) -> None:
  # A vocabulary may hold what the terminal's encoding does not.
  sys.stdout.reconfigure(errors="backslashreplace")
  source = model_source.find(argv[1], FLAGS)
  model = inference.open_model(source)
  predictor = predictions.Predictor(
    model, source, FLAGS.top_k, FLAGS.embedding, FLAGS.max_seq_length
  )
  lines = source.lines()
  if not FLAGS.max_seq_length and "max_seq_length" not in source.task:
    lines.append(
      f"{source.path}: nothing says how long its texts were: assumed "
      f"--max_seq_length={source.max_seq_length}"
    )
  for line in lines:
    print(line, file=sys.stderr)
  inputs = read_inputs(argv[2:], predictor.answers_questions)
  by_hand = not argv[2:] and FLAGS.input in (None, "-") and sys.stdin.isatty()
  while group := list(itertools.islice(inputs, 1 if by_hand else _AT_ONCE)):
    for made in predictor.predict(group):
      lines = predictions.as_lines(made)
      print(*([json.dumps(made)] if FLAGS.json else lines), sep="\n")
  model.close()


if __name__ == "__main__":
  define_flags()
  errors.run_main(main, arguments=None)
