"""Runs a command on much text within little memory, and says how little.

  python -m benchmarks.memory_bound --text=train.txt --text_mb=4000 \\
    --limit_mb=2000 -- -m tools.train_tokenizer --input_file=TEXT \\
    --output_file=FOLDER/vocab.txt --vocab_size=8192

The command gets a file for TEXT, and a folder that is removed for FOLDER. The
file has the text of --text again and again, varied: documents are put together
of halves of two, and in each sentence a word is exchanged. The limit is a
control group's, which counts the page cache too (Linux, as root; without it
only the use is measured). One JSON line; use is what processes have beside the
page cache, sampled twice a second.
"""

import contextlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import psutil
from absl import flags

from benchmarks import measuring
from common import errors

FLAGS = flags.FLAGS


def vary(source: str, size: int, output: str) -> None:
  """Writes about `size` bytes of varied text."""
  text = pathlib.Path(source).read_text(encoding="utf-8")
  documents = [d.split("\n") for d in text.split("\n\n") if d.strip()]
  rng = random.Random(7)
  words = [w for d in documents[::7] for s in d[:2] for w in s.split()[:4]]
  written = 0
  with open(output, "w", encoding="utf-8") as f:
    while written < size:
      one, two = rng.choice(documents), rng.choice(documents)
      for sentence in one[: len(one) // 2] + two[len(two) // 2 :]:
        tokens = sentence.split(" ")
        tokens[int(rng.random() * len(tokens))] = rng.choice(words)
        written += f.write(" ".join(tokens) + "\n")
      written += f.write("\n")


@contextlib.contextmanager
def memory_limit(size: int):
  """A control group with that limit, in bytes: its folder; None without root.

  Its processes must have ended when the block does.
  """
  groups = pathlib.Path("/proc/self/cgroup").read_text(encoding="ascii")
  ours = dict(line.split(":", 2)[1:] for line in groups.splitlines())
  name = f"memory_bound-{os.getpid()}"
  if "memory" in ours:  # control groups of version 1
    root, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
    folder = pathlib.Path(f"{root}{ours['memory']}/../{name}")
  else:
    folder = pathlib.Path(f"/sys/fs/cgroup{ours['']}/../{name}")
    file = "memory.max"
  try:
    folder.mkdir()
    (folder / file).write_text(str(size))
  except OSError as e:
    measuring.tell(f"no limit: {e}")
    yield None
    return
  try:
    yield folder
  finally:
    folder.rmdir()


def own_memory(process: psutil.Process) -> list[int]:
  """Bytes that a process and those below it have, without mapped files."""
  sizes = [0]
  for p in [process, *process.children(recursive=True)]:
    with contextlib.suppress(psutil.Error):  # it has ended
      memory = p.memory_info()
      sizes.append(memory.rss - memory.shared)
  return sizes


def main(words) -> None:
  with (
    tempfile.TemporaryDirectory() as folder,
    memory_limit(FLAGS.limit_mb * 1_000_000) as group,
  ):
    text = os.path.join(folder, "text.txt")
    vary(FLAGS.text, FLAGS.text_mb * 1_000_000, text)
    command = [sys.executable]
    for word in words[1:]:
      command.append(word.replace("TEXT", text).replace("FOLDER", folder))
    together = one = 0
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=sys.stderr)
    if group:
      (group / "cgroup.procs").write_text(str(process.pid))
    while process.poll() is None:
      sizes = own_memory(psutil.Process(process.pid))
      together, one = max(together, sum(sizes)), max(one, *sizes)
      time.sleep(0.5)
    if process.returncode:
      raise errors.UserError("the command failed, see above")
    measuring.show(
      {
        "command": " ".join(words[1:]),
        "text_mb": round(os.path.getsize(text) / 1e6),
        "limit_mb": FLAGS.limit_mb if group else None,
        "peak_mb_of_all_processes": round(together / 1e6),
        "peak_mb_of_one_process": round(one / 1e6),
        "seconds": round(time.monotonic() - began, 1),
      }
    )


if __name__ == "__main__":
  flags.DEFINE_string("text", None, "Text to vary.", required=True)
  flags.DEFINE_integer("text_mb", 1024, "Text to make.")
  flags.DEFINE_integer("limit_mb", 2000, "Memory that is allowed.")
  errors.run_main(main, arguments=None)
