"""TensorFlow as this project uses it: the 1.x API in graph mode, quietly.

Import `tf`, and `profiler`, which 1.x lacks, from here and nowhere else. This
is the one module that acts when it is imported: TensorFlow reads its log level
while it loads, and scripts written for google/bert call `tf.placeholder` and
`tf.get_variable` right after `import tensorflow.compat.v1 as tf`, which needs
graph mode to be on already.
Set TF_CPP_MIN_LOG_LEVEL=0 to see TensorFlow's own start-up messages.
"""

import contextlib
import os
import re
import sys
import tempfile

# What TensorFlow 2.21 prints while it loads, at any log level: absl's
# notice that logging is not initialised, and oneDNN's that it is on.
_CHATTER = re.compile(
  rb"^(WARNING: All log messages before absl::InitializeLog"
  rb"|I\d{4} .*(oneDNN custom operations are on|computation_placer)).*\n",
  re.M,
)


@contextlib.contextmanager
def _without_chatter():
  """Holds stderr back and passes on all of it but the lines of `_CHATTER`."""
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


@contextlib.contextmanager
def _without_keras():
  """`tf.keras` is imported when it is used, not with TensorFlow.

  It is 40% of the import's time. TensorFlow does without when it looks for the
  older package, tf_keras, and that is not installed.
  """
  if "TF_USE_LEGACY_KERAS" in os.environ:
    yield
    return
  os.environ["TF_USE_LEGACY_KERAS"] = "1"
  try:
    yield
  finally:
    del os.environ["TF_USE_LEGACY_KERAS"]


def _import_quietly():
  level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  quiet = _without_chatter() if level != "0" else contextlib.nullcontext()
  with quiet, _without_keras():
    import tensorflow
    import tensorflow.compat.v1 as tf
    from tensorflow.core.protobuf import tensor_bundle_pb2

    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
  return tf, tensorflow.profiler.experimental, tensor_bundle_pb2


tf, profiler, tensor_bundle_pb2 = _import_quietly()

__all__ = ["profiler", "tensor_bundle_pb2", "tf"]
