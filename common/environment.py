"""Says how to make the environment, where Python lacks packages of it."""

import importlib.metadata
import importlib.util
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_others = sys.excepthook  # of a debugger, say


def _is_whole() -> bool:
  """Whether this Python has what requirements.txt names, and TensorFlow."""
  with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as f:
    names = re.findall(r"^([\w.-]+)==", f.read(), re.M)
  try:
    for name in names:
      importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    return False
  return importlib.util.find_spec("tensorflow") is not None


def explain(kind, error, trace) -> None:
  """A `sys.excepthook`: one line for a package that is missing."""
  if kind is not ModuleNotFoundError or _is_whole():
    _others(kind, error, trace)
    return
  print(
    f"{os.path.basename(sys.argv[0])}: error: {error} in {sys.executable}: "
    f"`make -C {ROOT} env` makes the environment, if it is not there yet; "
    f"`source {ROOT}/.venv/bin/activate` enters it",
    file=sys.stderr,
  )
