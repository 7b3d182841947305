"""Settings: their flags, limits and help, and docs/flags.md."""

import dataclasses
import os
import re
import subprocess
import sys
from typing import ClassVar

import pytest
import runs
import trained
from absl import flags
from test_architecture import ENTRY_POINTS

from common import settings
from common.errors import UserError
from common.settings import in_group, setting
from tools import flags_reference

# What a number counts, or is.
_NOUNS = re.compile(
  r"\b(seed|stage|columns|stride|factor|share|exponent|learning rate|number"
  r"|norm|ratio|speed|difference|records?|examples?|tokens|updates|steps"
  r"|warm-up steps|micro-batches|batches|epochs|ranks|all-reduces|threads"
  r"|checkpoints|minutes|evaluations|overflows|answers|words|copies|processes"
  r"|megabytes|probability|cosines|texts)\b",
  re.I,
)


@dataclasses.dataclass(frozen=True)
class Inner:
  beta: float = setting(0.5, "Factor on x.", low=0, below=1)

  def __post_init__(self):
    settings.check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
  # fmt: off
  count: int = setting(3, "Number of {unit} to read.", low=1)
  speed: float | None = setting(None, "Speed in updates per second.", above=0)
  ratio: float = setting(4.0, "Ratio of x to y.", above=1.5)
  parts: tuple = in_group("Data")((), "Parts to read.", choices=("a", "b"))
  size: int = setting(help="File of this size.", flag="size_file", read=len,
    alias="file")
  inner: Inner = setting(group="Inside")
  # fmt: on
  derived: int = 0  # no flag
  unit: ClassVar[str] = "records"

  def __post_init__(self):
    settings.check(self)


class Other(Outer):
  unit = "examples"


def parsed(kind, *words):
  values = flags.FlagValues()
  settings.define_flags(kind, values)
  values(["command", *words])
  return values


def test_flags_make_the_dataclass():
  values = parsed(Outer, "--size_file=xy", "--parts=a,b", "--beta=0.25")
  given = {"count": 7} | settings.present(values)
  want = Outer(count=7, parts=["a", "b"], size=2, inner=Inner(0.25))
  assert settings.make(Outer, given, {}) == want
  assert settings.make(Outer, given, {"size_file": 9}).size == 9
  by_alias = settings.from_flags(Outer, parsed(Outer, "--file=xyz"))
  assert by_alias.size == 3
  with pytest.raises(UserError, match="--size_file is missing; see --help"):
    settings.from_flags(Outer, parsed(Outer, "--count=2"))
  for kind in (Outer, Other):
    said = parsed(kind, "--size_file=x")["count"].help
    assert said == f"Number of {kind.unit} to read."


def parts_of(kind):
  """Dataclasses of settings in `kind`: (dataclass, its own flags)."""
  inner, own = [], []
  for field in dataclasses.fields(kind):
    if "setting" in field.metadata:
      is_part = field.metadata["setting"]["help"] is None
      (inner if is_part else own).append(field)
  names = {field.name for field in own}
  yield kind, [o for o in settings.settings_of(kind) if o.name in names]
  for field in inner:
    yield from parts_of(field.type)


def wrong_values(one):
  if one.choices:
    yield ["no"] if one.kind is tuple else "no"
  if one.kind is float:
    yield from (float("nan"), 10**39)
  limits = (one.low, -1), (one.high, 1), (one.above, 0), (one.below, 0)
  yield from (limit + more for limit, more in limits if limit is not None)


def right_value(one):
  if one.choices:
    return [*one.choices][-1]
  return {bool: True, str: "x", tuple: ("x",)}.get(one.kind, 2)


@pytest.mark.parametrize("kind", [Outer, *map(flags_reference.settings_class,
  flags_reference.COMMANDS)])  # fmt: skip
def test_each_setting_refuses_what_its_row_forbids(kind):
  for part, own in parts_of(kind):
    fields = dataclasses.fields(part)
    defaults = {field.name: field.default for field in fields}
    defaults |= {one.name: None for one in own if one.required}
    rights = {one.name: right_value(one) for one in own}

    def refused(words, values, part=part, defaults=defaults):
      made = object.__new__(part)
      vars(made).update(defaults | values)
      with pytest.raises(UserError, match=words):
        settings.check(made)

    for one in own:
      right, needed = {one.name: rights[one.name]}, {}
      if one.needs:
        refused(f"^--{one.name} needs --{one.needs}$", right)
        needed = {one.needs: rights[one.needs]}
      for value in () if one.read else wrong_values(one):
        shown = "no" if one.choices else value
        words = f"^--{one.name}={shown}: (must|no)"
        refused(words, needed | {one.name: value})
      for other in one.excludes:
        words = f"^--{one.name} does not go with --{other}: leave one of them"
        refused(words, needed | right | {other: rights[other]})


@pytest.mark.parametrize(
  "change, words",
  [
    ({"count": 0}, "--count=0: must be 1 to 2147483647"),
    ({"count": 10**400}, "--count=1000"),
    ({"speed": 0.0}, "--speed=0.0: must be positive"),
    ({"ratio": 1.5}, "--ratio=1.5: must be more than 1.5"),
    ({"parts": ["a", "c"]}, "--parts=a,c: c is not one of a, b"),
    ({"inner": {"beta": 1.0}}, r"--beta=1.0: must be in \[0, 1\)"),
  ],
)
def test_limits_in_words(change, words):
  with pytest.raises(UserError, match=words):
    Outer(size=0, inner=Inner(**change.pop("inner", {})), **change)


@pytest.mark.parametrize("command", flags_reference.COMMANDS)
def test_help_stands_alone(command):
  """absl shows flags by the alphabet, and --helpfull those of all modules."""
  shown = [*settings.settings_of(flags_reference.settings_class(command))]
  for one in shown:
    assert re.match("[A-Z]", one.help) and one.help.endswith("."), one
    assert not re.match(r"(Of|Its|So|The same)\b", one.help), one
    assert not re.search(r"\bsamples?\b", one.help), one
    assert one.kind not in (int, float) or _NOUNS.search(one.help), one
  assert len({one.name for one in shown}) == len(shown)


def test_the_reference_is_of_all_commands_as_they_are():
  names = (name.split()[-1] for name in flags_reference.COMMANDS)
  listed = {name.removesuffix(".py") for name in names}
  # The last has no flags, and docker/launch_srun.sh calls it.
  others = {"tools.__init__", "tools.flags_reference", "tools.srun_ranks"}
  assert listed == ENTRY_POINTS - others
  with open(os.path.join(runs.ROOT, "docs/flags.md"), encoding="utf-8") as f:
    assert f.read() == flags_reference.reference(), flags_reference.__doc__


def answer(folder, tensorflow, *words, **environment):
  """What a command says where `tensorflow` is the module of that name."""
  (folder / "tensorflow.py").write_text(f"{tensorflow}\n")
  path = f"{folder}:{runs.ROOT}"
  return subprocess.run(
    [sys.executable, *words],
    cwd=runs.ROOT, env={**os.environ, "PYTHONPATH": path, **environment},
    capture_output=True, text=True,
  )  # fmt: skip


def test_help_has_this_programs_flags_by_group(tmp_path):
  script = "create_pretraining_data.py"
  done = answer(tmp_path, "", script, "--help")
  for words in (["-h"], ["--dupe_factor=5", "-h"]):
    again = answer(tmp_path, "", script, *words)
    assert (again.returncode, again.stdout) == (0, done.stdout)
  with open(os.path.join(runs.ROOT, "CITATION.cff"), encoding="utf-8") as f:
    version = re.search(r"^version: (.*)$", f.read(), re.M)[1]
  shown = answer(tmp_path, "", script, "--version")
  assert shown.stdout == f"Perseus-BERT {version}\n" and not shown.returncode
  said = done.stdout
  assert said.startswith("Text to pre-training records")
  assert re.findall(r"^(\w.*):$", said, re.M)[-5:] == [
    "Required", "Text", "Vocabulary", "Records", "Shards and workers",
  ]  # fmt: skip
  shown = "\n  --max_seq_length  (integer, 8 to 65536; default 128)\n      Tok"
  assert shown in said and "--logtostderr" not in said


@pytest.mark.parametrize(
  "command", ["run_squad.py", "-m tools.evaluate_grammar"]
)
def test_help_does_without_tensorflow(tmp_path, command):
  """Which takes seconds to load; the modules that use it are imported."""
  said = answer(
    tmp_path, "raise ImportError('loaded')", *command.split(), "--help"
  )
  assert not said.stderr
  command = command.replace("-m", "python -m")
  for one in settings.settings_of(flags_reference.settings_class(command)):
    assert re.search(
      rf"^  --(\[no\])?{one.flag or one.name}\b", said.stdout, re.M
    )


def test_a_command_says_that_it_starts_tensorflow(tmp_path):
  """On rank 0, before what takes seconds; a program of others does not."""
  other = tmp_path / "theirs.py"
  other.write_text("import modeling\n")
  command = ["run_pretraining.py", "--dry_run", "--bert_config_file=tiny"]
  ends = "raise SystemExit('loaded')"
  for words, rank, said in (
    (command, "0", "starting TensorFlow ...\nloaded\n"),
    (command, "1", "loaded\n"),
    ([other], "0", "loaded\n"),
  ):
    done = answer(tmp_path, ends, *words, HOROVOD_RANK=rank)
    assert done.stderr == said


def test_wrong_data_is_told_before_tensorflow_starts(tmp_path, letters):
  """Also by a training whose model is a checkpoint, which TensorFlow reads."""
  model, table = tmp_path / "model", tmp_path / "a.tsv"
  trained.write_model(model, "pretraining", letters)
  table.write_text("sentence\tlabel\na b\tx\n")
  start = f"--init_checkpoint={model}"
  for command, data, said in (
    ("run_pretraining.py", ["--input_file"], "not a TFRecord file: make"),
    ("run_classifier.py",
     ["--label_column=no", "--max_seq_length=8", "--train_file"],
     "line 2 has no 'no'"),
  ):  # fmt: skip
    *flag, last = data
    done = answer(
      tmp_path, "raise SystemExit('loaded')", command, "--do_train", start,
      f"--output_dir={tmp_path}/run", *flag, f"{last}={table}",
    )  # fmt: skip
    assert f"{command}: error: {table}: {said}" in done.stderr
    assert "TensorFlow ..." not in done.stderr
