"""The commands that closing screens propose, in one place for a test."""

import os
import shlex
import sys
from collections.abc import Iterator

from common.environment import ROOT
from model.tasks import BY_KIND, LABELS, PRETRAINING

_LENGTH = 128  # --max_seq_length of fine-tuning
NO_FOLDER = (
  "no Hugging Face folder can be written of this model: {} (see "
  "docs/encoders.md). predict.py and convert_checkpoint.py --to=saved_model "
  "use it; for such a folder start from another model"
)


def python(script: str, *words: str, **flags) -> list[str]:
  """A command of this project: a script, or `-m` and a module's name."""
  command = [os.path.relpath(os.path.join(ROOT, script))]
  if script.startswith(("tools.", "benchmarks.")):
    command = ["-m", script]
  return [os.path.relpath(sys.executable), *command, *words, *flag_words(flags)]


def flag_words(flags: dict) -> list[str]:
  """{"a": 1, "b": True, "c": False, "d": None} -> --a=1 --b --noc."""
  words = []
  for name, value in flags.items():
    if isinstance(value, bool):
      words.append(f"--{name}" if value else f"--no{name}")
    elif value is not None:
      words.append(f"--{name}={value}")
  return words


def after(
  folder: str,
  kind: str = PRETRAINING,
  positions: int = _LENGTH,
  pairs: bool = False,
  converts: bool = True,
  average: bool = False,
) -> dict[str, list[str]]:
  """The commands for a run of a `kind` of task, by what they are for.

  `positions`: how long the model's texts may be; `pairs`: whether it classifies
  pairs of texts; `converts`: whether Hugging Face has such models; `average`:
  whether its average of weights was evaluated.
  """
  folder = os.path.normpath(folder)
  # The texts have dots for words: the model may have learned any language.
  texts = ("... ||| ...",) if pairs else BY_KIND[kind].example
  predict = python("predict.py", folder, *texts)
  commands = {"predict (your text in the place of ...)": predict}
  if kind == PRETRAINING:
    length = {"max_seq_length": positions} if positions < _LENGTH else {}
    commands["fine-tune on a table (columns sentence and label)"] = python(
      LABELS.script,
      do_train=True,
      init_checkpoint=folder,
      train_file="train.tsv",
      **length,
      output_dir=f"{folder}_classifier",
    )
  if converts:
    commands["convert to Hugging Face"] = python(
      "convert_checkpoint.py",
      folder,
      average=average or None,
      output=f"{folder}_hugging_face",
    )
  return commands


def wrapped(command: list[str], mark: str = "  ") -> str:
  """The command after `mark`, in lines of 80 columns if its words allow it."""
  first, *words = map(shlex.quote, command)
  lines = [mark + first]
  for word in words:
    if len(lines[-1]) + len(word) > 76:
      lines[-1] += " \\"
      lines.append(f"    {word}")
    else:
      lines[-1] += f" {word}"
  return "\n".join(lines)


def lines(commands: dict) -> Iterator[str]:
  """The commands under what they are for."""
  for title, command in commands.items():
    yield f"{title}:\n{wrapped(command)}"
