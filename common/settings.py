"""Settings, each declared once: a field of a frozen dataclass.

  @dataclasses.dataclass(frozen=True)
  class Settings:
    input_file: str = setting(help="Text file to read.")
    num_epochs: float = setting(3.0, "Passes over the examples.", low=0)

    def __post_init__(self):
      check(self)

The field is the flag (`define_flags`, `from_flags`), the limits of its value
(`check`), its entry in --help, and its row in docs/flags.md (`markdown`).
"""

import dataclasses
import functools
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator

from absl import app, flags

from common.errors import UserError, run_main

_MOST = (1 << 31) - 1  # of an integer with a lower limit only
_LARGEST_FLOAT = 3.4e38  # float32's, about
_KINDS = {
  bool: ("", flags.DEFINE_bool),
  int: ("integer", flags.DEFINE_integer),
  float: ("number", flags.DEFINE_float),
  str: ("text", flags.DEFINE_string),
  tuple: ("list", flags.DEFINE_list),
}
# The first headings of --help, in this order.
_GROUPS = (
  "Required",
  "What to do",
  "Data",
  "Model",
  "Batches and steps",
  "Learning rate and optimizer",
  "Precision and compilation",
  "Ranks and gradients",
  "Checkpoints and reports",
  "Evaluation",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A flag, as its field declares it.

  Attributes:
    help: sentences that stand alone, with the unit and what the default means.
    group: its heading in --help.
    low, high: limits of a number that it may reach.
    above, below: limits of a number that it may not reach.
    choices: the values that there are, or the items of a list.
    json: its keys in DeepSpeed's JSON, a dot after each section.
    flag: the flag's name, if it is not the field's.
    read: makes the field's value of the flag's.
  """

  name: str
  kind: type
  default: object
  help: str
  group: str = "Flags"
  low: float | None = None
  high: float | None = None
  above: float | None = None
  below: float | None = None
  choices: Iterable[str] = ()
  json: tuple[str, ...] | str = ()
  flag: str = ""
  read: Callable | None = None

  @property
  def required(self) -> bool:
    """Whether the command line must have it."""
    return self.default is dataclasses.MISSING

  @property
  def limits(self) -> str:
    """What a number must be, in words; "" for any number."""
    low, high, above, below = self.low, self.high, self.above, self.below
    if below is not None:
      return f"in {f'({above}' if low is None else f'[{low}'}, {below})"
    if above is not None:
      return "positive"
    if low is None:
      return ""
    if high is None:
      return "not negative"
    if (low, high) == (0, 1) and self.kind is int:
      return "0 or 1"
    return f"{low} to {high if self.kind is int else format(high, 'g')}"

  def problem(self, value) -> str:
    """What is wrong with a value; "" if nothing is."""
    if self.choices:
      many = self.kind is tuple
      unknown = sorted(set(value if many else [value]) - set(self.choices))
      which = f"{unknown[0]} is " if unknown and many else ""
      listed = f"{which}not one of {', '.join(self.choices)}"
      return listed if unknown else ""
    if self.kind is float and not abs(value) <= _LARGEST_FLOAT:
      return "must be finite, in float32"
    if (
      (self.low is None or value >= self.low)
      and (self.high is None or value <= self.high)
      and (self.above is None or value > self.above)
      and (self.below is None or value < self.below)
    ):
      return ""
    return f"must be {self.limits}".replace("be not", "not be")

  def entry(self) -> tuple[str, str, str]:
    """The flag, what its value is, and what it means, for people."""
    title = f"--{'[no]' * (self.kind is bool)}{self.flag or self.name}"
    limits, meaning, default = self.limits, self.help, self.default
    if self.high is not None and self.high >= _MOST:
      limits = f"{self.low} or more"
    if self.choices:
      meaning += f" Values: {', '.join(self.choices)}."
    words = ", ".join(filter(None, [_KINDS[self.kind][0], limits]))
    if default not in (None, (), "", dataclasses.MISSING):
      shown = str(default).lower() if self.kind is bool else default
      words = "; ".join(filter(None, [words, f"default {shown}"]))
    return title, words, meaning


def setting(default=dataclasses.MISSING, help: str | None = None, **declared):
  """A field that is a flag; `declared` as in `Setting`.

  Without a default the flag is required. Without `help` the field holds a
  dataclass of settings, which are flags too, all in its group.
  """
  metadata = {"setting": {"help": help, **declared}}
  return dataclasses.field(default=default, metadata=metadata)


def in_group(name: str) -> Callable:
  """`setting` with this heading in --help."""
  return functools.partial(setting, group=name)


def _declared(kind: type) -> Iterator[tuple[dataclasses.Field, Setting | None]]:
  """The fields that `setting` made; None: it holds a dataclass of them."""
  own_help = getattr(kind, "help_here", {})
  for field in dataclasses.fields(kind):
    declared = field.metadata.get("setting")
    if declared is None:
      continue
    if declared["help"] is None:
      yield field, None
      continue
    plain = field.type
    if isinstance(plain, types.UnionType):  # X | None
      plain = plain.__args__[0]
    plain = typing.get_origin(plain) or plain
    declared = {
      "name": field.name,
      "kind": str if "read" in declared else plain,
      "default": field.default,
      **declared,
      "help": own_help.get(field.name, declared["help"]),
    }
    if plain is int and "low" in declared:
      declared.setdefault("high", _MOST)
    if isinstance(declared.get("json"), str):
      declared["json"] = (declared["json"],)
    yield field, Setting(**declared)


def settings_of(kind: type) -> Iterator[Setting]:
  """All flags of a dataclass, those of dataclasses in it included.

  The class attribute `help_here` has the help, by name, of flags that mean
  something else in a subclass than where they are declared.
  """
  for field, one in _declared(kind):
    if one:
      yield one
    else:
      group = field.metadata["setting"]["group"]
      for inner in settings_of(field.type):
        yield dataclasses.replace(inner, group=group)


def check(settings) -> None:
  """Raises `UserError` for a value that its field does not allow."""
  for field, one in _declared(type(settings)):
    value = getattr(settings, field.name)
    if one is None or one.read or value is None:
      continue
    if problem := one.problem(value):
      value = ",".join(value) if one.kind is tuple else value
      raise UserError(f"--{one.name}={value}: {problem}")


def define_flags(kind: type, values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the flags of a dataclass for the script that runs."""
  for one in settings_of(kind):
    name, default = one.flag or one.name, one.default
    if one.required:
      default = None
    elif one.kind is tuple:
      default = list(default)
    define, about = _KINDS[one.kind][1], (one.help,)
    if one.choices and one.kind is str:
      define, about = flags.DEFINE_enum, (list(one.choices), one.help)
    where = {"flag_values": values, "module_name": sys.argv[0]}
    define(name, default, *about, **where, required=one.required)
    values[name].setting = one
  if values is flags.FLAGS:
    app.define_help_flags()
    for name in ("help", "helpshort"):
      values[name].parse = _show_help  # absl's has no groups


def run_with(kind: type, main: Callable, arguments: int | None = 0) -> None:
  """Runs a command: `main` gets its settings and its other words.

  Args:
    arguments: how many of these there are, as for `errors.run_main`.
  """
  define_flags(kind)
  if arguments != 0:
    flags.FLAGS.set_gnu_getopt()  # flags may follow them
  run_main(
    lambda argv: main(from_flags(kind, flags.FLAGS), *argv[1:]), arguments
  )


def from_flags(kind: type, values: flags.FlagValues, found: dict | None = None):
  """A dataclass with the flags' values, checked.

  Args:
    found: values of flags that are not on the command line, by name.
  """
  made = {}
  for field, one in _declared(kind):
    if one is None:
      made[field.name] = from_flags(field.type, values, found)
      continue
    flag = values[one.flag or one.name]
    value = flag.value
    if found and not flag.present:
      value = found.get(one.name, value)
    made[field.name] = one.read(value) if one.read else value
  made = kind(**made)
  check(made)
  return made


def _grouped(settings: Iterable[Setting]) -> Iterator[tuple[str, list]]:
  """(heading, `Setting.entry` of its flags), required ones first."""
  groups = {name: [] for name in _GROUPS}
  for one in settings:
    group = "Required" if one.required else one.group
    groups.setdefault(group, []).append(one.entry())
  return filter(lambda group: group[1], groups.items())


def _setting_of(flag: flags.Flag) -> Setting:
  """That of a flag; or like it, if a script has defined the flag itself."""
  return getattr(flag, "setting", None) or Setting(
    name=flag.name,
    kind=bool if flag.boolean else str,
    default=flag.default,
    help=flag.help or "",
  )


def _show_help(_) -> None:
  """What --help does: this program's flags by their groups."""
  own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
  print(sys.modules["__main__"].__doc__.strip())
  margin = " " * 6
  wrap = textwrap.TextWrapper(79, margin, margin, break_on_hyphens=False)
  for group, entries in _grouped(map(_setting_of, own)):
    print(f"\n{group}:")
    for title, value, meaning in entries:
      print(f"\n  {title}" + (f"  ({value})" if value else ""))
      print(wrap.fill(meaning))
  print("\nabsl's own flags, such as --flagfile: --helpfull.")
  sys.exit(1)  # as absl's --help does


def markdown(script: str, kind: type) -> str:
  """Tables of a script's flags."""
  lines = [f"## {script}\n"]
  for group, entries in _grouped(settings_of(kind)):
    lines += [f"### {group}\n", "| flag | value | meaning |", "|---|---|---|"]
    lines += [f"| `{title}` | {a} | {b} |" for title, a, b in entries]
    lines.append("")
  return "\n".join(lines)
