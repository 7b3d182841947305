"""TensorFlow's 1.x API in graph mode, quietly: import `tf` from here only.

Importing `tf` loads TensorFlow, for seconds: google/bert's scripts build graphs
right after it. Modules that also serve commands which check their flags and
files first import this one as `later`: `later.tf` loads it when it is used. Set
TF_CPP_MIN_LOG_LEVEL=0 to see its start-up messages.
"""

import contextlib
import multiprocessing
import os
import re
import sys
import tempfile
import time

from common.console import tell
from common.environment import ROOT

# The graph's collection of variables that a checkpoint may lack when a run
# resumes from it: another start of the run had no use for them. They then keep
# their initial values.
OPTIONAL_VARIABLES = "optional_variables"

# What TensorFlow 2.21 prints while it loads, at any log level.
_CHATTER = re.compile(
  rb"^(WARNING: All log messages before absl::InitializeLog"
  rb"|I\d{4} .*(oneDNN custom operations are on|computation_placer)).*\n",
  re.M,
)


@contextlib.contextmanager
def _without_chatter():
  """Holds stderr back, then writes it without the lines of `_CHATTER`."""
  sys.stderr.flush()
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as held:
    os.dup2(held.fileno(), 2)
    try:
      yield
    finally:
      sys.stderr.flush()
      os.dup2(stderr, 2)
      os.close(stderr)
      held.seek(0)
      sys.stderr.write(_CHATTER.sub(b"", held.read()).decode(errors="replace"))


def _import_quietly():
  # A script of this project says what it waits for, on one rank, and not in its
  # child processes; one that only imports these modules does not.
  script = getattr(sys.modules["__main__"], "__file__", None) or ""
  folder = os.path.dirname(os.path.abspath(script))
  is_command = folder in (ROOT, os.path.join(ROOT, "tools"))
  is_first = os.environ.get("HOROVOD_RANK", "0") == "0"
  if is_command and is_first and not multiprocessing.parent_process():
    tell("starting TensorFlow ...")  # for seconds
  level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # Read once, with the first list of devices; without it --xla=auto compiles
  # nothing on a CPU.
  of_xla = os.environ.get("TF_XLA_FLAGS", "")
  if "--tf_xla_cpu_global_jit" not in of_xla:
    os.environ["TF_XLA_FLAGS"] = f"{of_xla} --tf_xla_cpu_global_jit".strip()
  quiet = _without_chatter() if level != "0" else contextlib.nullcontext()
  # Asking for an absent tf_keras delays `tf.keras`, 40% of the import.
  is_open = "TF_USE_LEGACY_KERAS" not in os.environ
  os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
  with quiet:
    import tensorflow.compat.v1 as tf

    if is_open:
      del os.environ["TF_USE_LEGACY_KERAS"]
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
  return tf


def __getattr__(name: str):
  if name != "tf":
    raise AttributeError(name)
  return globals().setdefault("tf", _import_quietly())


def monotonic_seconds():
  """float64, `time.monotonic()` when the graph runs: nobody sets that clock."""
  # Nor does --deterministic forbid it, as it does tf.timestamp.
  tf = sys.modules[__name__].tf
  return tf.ensure_shape(tf.numpy_function(time.monotonic, [], tf.float64), [])
