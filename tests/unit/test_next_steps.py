"""The commands that closing screens propose."""

import os
import shlex
import sys

import pytest
import runs

from common import settings
from model import tasks
from tools import flags_reference
from training import next_steps


@pytest.mark.parametrize("kind", tasks.BY_KIND)
def test_their_scripts_and_flags_exist(kind):
  for command in next_steps.after("runs/first/", kind).values():
    python, script, *words = command
    assert os.path.samefile(python, sys.executable)
    assert os.path.samefile(script, f"{runs.ROOT}/{os.path.basename(script)}")
    settings_class = flags_reference.settings_class(os.path.basename(script))
    known = {
      one.flag or one.name for one in settings.settings_of(settings_class)
    }
    given = (word for word in words if word.startswith("--"))
    assert {word[2:].partition("=")[0] for word in given} <= known
    assert any("runs/first" in word for word in words)
  assert (
    "fine-tune on a table (columns sentence and label)"
    in next_steps.after("a", kind)
  ) == (kind == tasks.PRETRAINING)


def test_a_model_of_few_positions_is_fine_tuned_on_short_texts():
  (command,) = (c for c in next_steps.after("a").values() if "--do_train" in c)
  assert not any("max_seq_length" in word for word in command)
  few = next_steps.after("a", positions=48).values()
  (command,) = (c for c in few if "--do_train" in c)
  assert "--max_seq_length=48" in command


def test_a_model_gets_what_it_takes():
  pair = next_steps.after("a", "classifier", pairs=True, converts=False)
  assert len(pair) == 1
  of_weights, of_average = (
    next_steps.after("a", average=average)["convert to Hugging Face"]
    for average in (False, True)
  )
  assert {*of_average} - {*of_weights} == {"--average"}


@pytest.mark.parametrize(
  "kind, pairs, texts",
  [
    ("pretraining", False, ["... [MASK] ..."]),
    ("classifier", False, ["..."]),
    ("classifier", True, ["... ||| ..."]),
    ("ner", False, ["..."]),
    ("squad", False, ["--question=...", "--context=..."]),
  ],
)
def test_texts_are_of_no_language(kind, pairs, texts):
  """The model may have learned French, Chinese or proteins."""
  predict, *_ = next_steps.after("runs/français", kind, pairs=pairs).values()
  assert predict[3:] == texts


def test_lines_paste_and_fit():
  """Also with a blank in a folder's name."""
  commands = next_steps.after("a folder")
  shown = "\n".join(next_steps.lines(commands)).splitlines()
  titles = [line for line in shown if not line.startswith(" ")]
  assert titles == [f"{title}:" for title in commands]
  text = "\n".join(line for line in shown if line.startswith(" "))
  pasted = [shlex.split(line) for line in text.replace("\\\n", "").splitlines()]
  assert pasted == [*commands.values()]
  assert max(map(len, shown)) <= 80
