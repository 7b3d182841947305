"""Makes records of much text within little memory, and says how little.

  python -m benchmarks.memory_bound --input_file=train.txt \\
    --vocab_file=vocab.txt --text_mb=1024 --limit_mb=2000

The text is that of --input_file again and again, varied: documents are put
together of halves of two, and in each sentence a word is exchanged. The limit
is a control group's, which counts the page cache too (Linux, as root; without
it only the use is measured). One JSON line; use is what processes have beside
the page cache, sampled twice a second.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time

import psutil
from absl import flags

from common import errors

FLAGS = flags.FLAGS
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def define_flags() -> None:
  flags.DEFINE_string("input_file", None, "Text to vary.", required=True)
  flags.DEFINE_string("vocab_file", None, "Vocabulary.", required=True)
  flags.DEFINE_integer("text_mb", 1024, "Text to make.")
  flags.DEFINE_integer("limit_mb", 2000, "Memory that is allowed.")


def vary(source: str, size: int, output: str) -> None:
  """Writes about `size` bytes of varied text."""
  with open(source, encoding="utf-8") as f:
    documents = [d.split("\n") for d in f.read().split("\n\n") if d.strip()]
  rng = random.Random(7)
  words = [w for d in documents[::7] for s in d[:2] for w in s.split()[:4]]
  written = 0
  with open(output, "w", encoding="utf-8") as f:
    while written < size:
      rng.shuffle(documents)
      for one, two in zip(documents[::2], documents[1::2], strict=False):
        lines = []
        for sentence in one[: len(one) // 2] + two[len(two) // 2 :]:
          tokens = sentence.split(" ")
          tokens[int(rng.random() * len(tokens))] = rng.choice(words)
          lines.append(" ".join(tokens))
        written += f.write("\n".join(lines) + "\n\n")
        if written >= size:
          break


class Limit:
  """A control group with a memory limit; none without the right to make one."""

  def __init__(self, size: int):
    """`size` in bytes."""
    self.folder = None
    try:
      folder, file = self._place()
      os.mkdir(folder)
      self.folder = folder
      self._write(file, size)
    except OSError as e:
      print(f"no limit: {e}", file=sys.stderr)

  @staticmethod
  def _place():
    """(folder to make, name of its limit) in control groups 2 or 1."""
    name = f"memory_bound-{os.getpid()}"
    with open("/proc/self/cgroup", encoding="ascii") as f:
      groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in f)
    if "memory" in groups:
      root, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
      return f"{root}{groups['memory']}/../{name}", file
    return f"/sys/fs/cgroup{groups['']}/../{name}", "memory.max"

  def _write(self, file, value):
    with open(os.path.join(self.folder, file), "w", encoding="ascii") as f:
      f.write(str(value))

  def enter(self) -> None:
    """Puts the calling process into the group."""
    if self.folder:
      self._write("cgroup.procs", os.getpid())

  def close(self) -> None:
    """Removes the group; its processes must have ended."""
    if self.folder:
      os.rmdir(self.folder)


def own_memory(process: psutil.Process) -> list[int]:
  """Bytes that a process and those below it have, without mapped files."""
  sizes = []
  for p in [process, *process.children(recursive=True)]:
    try:
      memory = p.memory_info()
      sizes.append(memory.rss - memory.shared)
    except psutil.Error:  # it has ended
      continue
  return sizes


def main(_) -> None:
  with tempfile.TemporaryDirectory() as folder:
    text = os.path.join(folder, "text.txt")
    vary(FLAGS.input_file, FLAGS.text_mb * 1_000_000, text)
    limit = Limit(FLAGS.limit_mb * 1_000_000)
    command = [
      sys.executable,
      os.path.join(_ROOT, "create_pretraining_data.py"),
      f"--input_file={text}",
      f"--vocab_file={FLAGS.vocab_file}",
      f"--output_file={folder}/records/train.tfrecord",
      "--dynamic_masks",
    ]
    began = time.monotonic()
    process = subprocess.Popen(
      command, stdout=subprocess.PIPE, text=True, preexec_fn=limit.enter
    )
    watched = psutil.Process(process.pid)
    together = one = 0
    while process.poll() is None:
      sizes = own_memory(watched)
      together, one = max(together, sum(sizes)), max(one, *sizes, 0)
      time.sleep(0.5)
    if process.returncode:
      raise errors.UserError("create_pretraining_data.py failed, see above")
    print(process.stdout.read(), file=sys.stderr)
    result = {
      "text_mb": round(os.path.getsize(text) / 1e6),
      "limit_mb": FLAGS.limit_mb if limit.folder else None,
      "peak_mb_of_all_processes": round(together / 1e6),
      "peak_mb_of_one_process": round(one / 1e6),
      "seconds": round(time.monotonic() - began, 1),
    }
    limit.close()
  print(json.dumps(result))


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
