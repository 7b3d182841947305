"""The flags of the command that runs, and what is wrong with them in one line.

What docs/coming_from.md has for another project's flag is part of the line.
"""

import os
import pathlib
import re
import sys

from absl import flags

from common.console import tell

VERSION = "1.0.0"  # as in CITATION.cff
_OTHER_PROJECTS = pathlib.Path(__file__).parents[1] / "docs" / "coming_from.md"


def read(argv: list[str]) -> list[str]:
  """The words that are no flags; a wrong flag ends the program."""
  ends = argv[1:2] + argv[-1:]
  if "-h" in ends:
    argv = [argv[0], "--help"]
  elif "--version" in ends:
    print(f"Perseus-BERT {VERSION}")
    sys.exit()
  try:
    for word in argv[1:]:
      if word.startswith("--flagfile=") and word.endswith(".json"):
        raise flags.Error(f"{word[11:]} is JSON: a flag file has one a line")
    return flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as e:
    nearest = str(e).partition("Did you mean: ")[2].removesuffix(" ?")
    remedy = f"did you mean --{nearest}?" if nearest else "see --help"
    remedy = replacement_for(e.flagname) or remedy
    problem = f"there is no --{e.flagname}; {remedy}"
  except flags.Error as e:
    # absl: "flag --NAME=VALUE: reason"
    problem = str(e).removeprefix("flag ").removeprefix("ERROR:: ")
    if name := re.match(r"--(\w+)=", problem):
      flag = flags.FLAGS[name[1]]
      wanted = "true or false" if flag.boolean else flag.parser.syntactic_help
      problem = problem.removesuffix(str(e.__context__)) + f"must be {wanted}"
    problem = f"{problem}; see --help"
  tell(f"{os.path.basename(argv[0])}: error: {problem}")
  sys.exit(1)


def replacement_for(name: str) -> str:
  """What the page has for another project's flag; "" for a flag of nobody."""
  page = _OTHER_PROJECTS.read_text(encoding="utf-8")
  for foreign, replacement in re.findall(r"^\| (.*?) \| (.*) \|$", page, re.M):
    names = re.findall(r"`--([\w-]+)", foreign)
    if name.replace("-", "_") in " ".join(names).replace("-", "_").split():
      plain = re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", replacement)
      return f"docs/coming_from.md has in its place: {plain}"
  return ""
