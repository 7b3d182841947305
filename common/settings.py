"""Settings, each declared once: a field of a frozen dataclass.

  num_epochs: float = setting(3.0, "Passes over the examples.", low=0)

declares the flag (`define_flags`, `from_flags`), the limits of its value
(`check`, which `__post_init__` calls), its entry in --help, and its row in
docs/flags.md (`markdown`).
"""

import dataclasses
import functools
import re
import signal
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import app, flags

from common import command_line
from common.errors import UserError, check_words, run_main

_MOST = (1 << 31) - 1  # of an integer with a lower limit only
_LARGEST_FLOAT = 3.4e38  # float32's, about
# Type of a field -> what --help calls its value, and how absl defines the flag.
_KINDS = {
  bool: ("", flags.DEFINE_bool),
  int: ("integer", flags.DEFINE_integer),
  float: ("number", flags.DEFINE_float),
  str: ("text", flags.DEFINE_string),
  tuple: ("list", flags.DEFINE_list),
}
# The first headings of --help, in this order.
_GROUPS = (
  "Required", "What to do", "Data", "Text", "Model", "Vocabulary",
  "Batches and steps", "Learning rate and optimizer",
  "Precision and compilation", "Ranks and gradients",
  "Checkpoints and reports", "Evaluation",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A flag, as its field declares it."""

  name: str
  kind: type
  default: Any
  help: str  # sentences that stand alone: the unit, what the default means
  group: str = "Flags"  # its heading in --help
  low: float | None = None  # a number may reach `low` and `high`
  high: float | None = None
  above: float | None = None  # a number may not reach `above` and `below`
  below: float | None = None
  choices: Iterable[str] = ()  # the possible values, or items of a list
  json: tuple[str, ...] = ()  # keys in DeepSpeed's JSON: "section.key"
  flag: str = ""  # the flag's name, if it is not the field's
  alias: str = ""  # another name, by which other commands have this flag
  read: Callable | None = None  # makes the field's value from the flag's
  needs: str = ""  # the field without which it means nothing
  excludes: tuple[str, ...] = ()  # fields that contradict it

  @property
  def required(self) -> bool:
    return self.default is dataclasses.MISSING

  @property
  def limits(self) -> str:
    """What a number must be, in words; "" for any number."""
    low, high, above, below = self.low, self.high, self.above, self.below
    if below is not None:
      return f"in {f'({above}' if low is None else f'[{low}'}, {below})"
    if None not in (above, high):
      return f"in ({above}, {high}]"
    if above is not None:
      return f"more than {above:g}" if above else "positive"
    if low is None:
      return ""
    if high is None:
      return f"{low:g} or more"
    if (low, high) == (0, 1) and self.kind is int:
      return "0 or 1"
    return f"{low} to {high if self.kind is int else format(high, 'g')}"

  def problem(self, value) -> str:
    """Why a value is refused; "" if it is not."""
    if self.choices:
      wrong = set(value if self.kind is tuple else [value]) - {*self.choices}
      which = f"{min(wrong)} is " if wrong and self.kind is tuple else ""
      return f"{which}not one of {', '.join(self.choices)}" if wrong else ""
    # So written, NaN is refused as well.
    if self.kind is float and not abs(value) <= _LARGEST_FLOAT:
      return "must be finite, in float32"
    if (
      (self.low is None or value >= self.low)
      and (self.high is None or value <= self.high)
      and (self.above is None or value > self.above)
      and (self.below is None or value < self.below)
    ):
      return ""
    return f"must be {self.limits}"

  def entry(self) -> tuple[str, str, str]:
    """(flag, kind of value, meaning) for people."""
    title = f"--{'[no]' * (self.kind is bool)}{self.flag or self.name}"
    limits, meaning, default = self.limits, self.help, self.default
    if self.high is not None and self.high >= _MOST:
      limits = f"{self.low} or more"
    if self.choices:
      meaning += f" Values: {', '.join(self.choices)}."
    if self.alias:
      meaning += f" Also --{self.alias}."
    words = ", ".join(filter(None, [_KINDS[self.kind][0], limits]))
    if default not in (None, (), "", dataclasses.MISSING):
      shown = str(default).lower() if self.kind is bool else default
      if self.kind is tuple:
        shown = ",".join(default)
      words = "; ".join(filter(None, [words, f"default {shown}"]))
    return title, words, meaning


def setting(default=dataclasses.MISSING, help: str | None = None, **declared):
  """A field that is a flag, required if it has no default.

  `declared` are fields of `Setting`. Without `help` the field holds a dataclass
  of settings, which are in its group.
  """
  metadata = {"setting": {"help": help, **declared}}
  return dataclasses.field(default=default, metadata=metadata)


def in_group(name: str) -> Callable:
  """`setting` with this heading in --help."""
  return functools.partial(setting, group=name)


def _declared(kind: Any) -> Iterator[tuple[dataclasses.Field, Setting | None]]:
  """The fields that `setting` made; None: the field holds a dataclass."""
  # {name} in a help text is this attribute of the dataclass.
  fill = lambda match: getattr(kind, match[1], "")
  for field in dataclasses.fields(kind):
    declared = field.metadata.get("setting")
    if declared is None:
      continue
    if declared["help"] is None:
      yield field, None
      continue
    plain: Any = field.type
    if isinstance(plain, types.UnionType):  # X | None
      plain = plain.__args__[0]
    plain = typing.get_origin(plain) or plain
    json = declared.get("json", ())
    attributes = {
      "name": field.name,
      "kind": str if "read" in declared else plain,
      "default": field.default,
      **({"high": _MOST} if plain is int and "low" in declared else {}),
      **declared,
      "help": re.sub(r"\{(\w+)\}", fill, declared["help"]),
      "json": (json,) if isinstance(json, str) else json,
    }
    yield field, Setting(**attributes)


def settings_of(kind: Any) -> Iterator[Setting]:
  """All flags of a dataclass and of the dataclasses in it."""
  for field, one in _declared(kind):
    if one:
      yield one
    else:
      group = field.metadata["setting"]["group"]
      for inner in settings_of(field.type):
        yield dataclasses.replace(inner, group=group)


def check(settings) -> None:
  """Raises `UserError` for a value that its field or another one forbids."""
  used: dict[str, Setting] = {}
  for _, one in _declared(type(settings)):
    # None is a dataclass, which has checked itself.
    if one and getattr(settings, one.name) not in (None, one.default, []):
      used[one.name] = one
  for one in used.values():
    if one.needs and one.needs not in used:
      raise UserError(f"--{one.name} needs --{one.needs}")
    for other in used.keys() & one.excludes:
      raise UserError(
        f"--{one.name} does not go with --{other}: leave one of them out"
      )
  for one in used.values():
    value = getattr(settings, one.name)
    # `read` has checked its text.
    if not one.read and (problem := one.problem(value)):
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
    # absl checks types alone: `check` has limits, also for values of files. The
    # script's name makes these the flags that --help shows.
    define: Callable = _KINDS[one.kind][1]
    where = {"flag_values": values, "module_name": sys.argv[0]}
    define(name, default, help=one.help, **where)
    values[name].setting = one
    if one.alias:
      flags.DEFINE_alias(one.alias, name, flag_values=values)
  if values is flags.FLAGS:
    app.define_help_flags()
    for name in ("help", "helpshort"):
      values[name].parse = _show_help  # absl's has no groups


def run_with(kind: type, main: Callable, arguments: int | None = 0) -> None:
  """Runs `main(settings, *words)`; `arguments` as for `errors.run_main`."""
  define_flags(kind)
  if arguments != 0:
    flags.FLAGS.set_gnu_getopt()  # flags may follow them
  run_main(
    lambda argv: main(from_flags(kind, flags.FLAGS), *argv[1:]), arguments
  )


def parse(kind: type) -> flags.FlagValues:
  """Defines the flags of a command without arguments, and reads its words."""
  define_flags(kind)
  check_words(command_line.read(sys.argv)[1:], 0)
  return flags.FLAGS


def present(values: flags.FlagValues) -> dict[str, Any]:
  """Name -> value of the flags that the command gives."""
  return {name: values[name].value for name in values if values[name].present}


def from_flags(kind: Any, values: flags.FlagValues):
  """The checked settings of a command, with the defaults of its flags."""
  return make(kind, values.flag_values_dict(), {})


def make(kind: Any, values: dict, contents: dict):
  """The checked settings; `values` goes by the names of flags or fields.

  `contents` has what is read of files that flags name, by the flags' names.
  """
  fields = {}
  for field, one in _declared(kind):
    if one is None:
      fields[field.name] = make(field.type, values, contents)
      continue
    name = one.flag or one.name
    value = values.get(name, values.get(one.name, one.default))
    if value in (None, dataclasses.MISSING) and one.required:
      raise UserError(f"--{name} is missing; see --help")
    if name in contents:
      value = contents[name]
    elif one.read and value is not None:
      value = one.read(value)
    fields[field.name] = value
  settings = kind(**fields)
  check(settings)
  return settings


def _grouped(settings: Iterable[Setting]) -> Iterator[tuple[str, list]]:
  """(heading, `Setting.entry` of its flags), required ones first."""
  groups: dict[str, list] = {name: [] for name in _GROUPS}
  for one in settings:
    group = "Required" if one.required else one.group
    groups.setdefault(group, []).append(one.entry())
  return filter(lambda group: group[1], groups.items())


def _show_help(_) -> None:
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as `| head` does
  shown = []
  for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
    # A flag that a script defined with absl has no `Setting`.
    kind = bool if flag.boolean else str
    plain = dict(kind=kind, default=flag.default, help=flag.help or "")
    shown.append(getattr(flag, "setting", Setting(name=flag.name, **plain)))
  print((sys.modules["__main__"].__doc__ or "").strip())
  margin = " " * 6
  wrap = textwrap.TextWrapper(79, margin, margin, break_on_hyphens=False)
  for group, entries in _grouped(shown):
    print(f"\n{group}:")
    for title, value, meaning in entries:
      print(f"\n  {title}" + (f"  ({value})" if value else ""))
      print(wrap.fill(meaning))
  print("\nabsl's own flags, such as --flagfile: --helpfull.")
  sys.exit()  # absl's ends with status 1


def markdown(heading: str, settings: Iterable[Setting]) -> str:
  """A table of flags, with a row for the heading of each group."""
  lines = [f"## {heading}\n", "| flag | value | meaning |", "|---|---|---|"]
  for group, entries in _grouped(settings):
    lines.append(f"| **{group}** | | |")
    lines += [f"| `{title}` | {a} | {b} |" for title, a, b in entries]
  return "\n".join([*lines, ""])
