"""What a run leaves, how that is damaged, and how two such runs differ."""

import collections
import contextlib
import dataclasses
import glob
import os

from benchmarks.faults import recorded_run
from checkpoints import checkpoint_files, metrics
from common import errors, json_files
from common.tensorflow_v1 import tf

# Of keys of reports that differ between runs that are otherwise equal to the
# last bit.
_MEASURED = ("_seconds", "_per_second", "_memory_mb", "mfu")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The parts of a run that are compared.

  Attributes:
    arrays: of the last checkpoint, by name.
    reports: update -> the lines of metrics.jsonl about it, without speeds.
    consumed: update -> what its micro-batches were, rank by rank, as
      `recorded_run` wrote it; as it was done last.
    redone: differences between that and how it was done before.
  """

  arrays: dict
  reports: dict[int, list]
  consumed: dict[int, list]
  redone: list[str]

  def records(self) -> list[int]:
    """Record numbers in the order of the stream."""
    return [
      number
      for _, ranks in sorted(self.consumed.items())
      for micro_batches in ranks
      for _, numbers, _ in micro_batches
      for number in numbers
    ]


def read(folder: str, setting, starts: int, last_update: int) -> Outcome:
  """Reads a folder whose run is complete after `starts` starts."""
  prefix = f"{folder}/run/{checkpoint_files.PREFIX}-{last_update}"
  reader = tf.train.load_checkpoint(prefix)
  names = reader.get_variable_to_shape_map()
  arrays = {name: reader.get_tensor(name) for name in names}
  reports = collections.defaultdict(list)
  for report in json_files.read_lines(f"{folder}/run/{metrics.METRICS_FILE}"):
    kept = {k: v for k, v in report.items() if not k.endswith(_MEASURED)}
    reports[report["global_step"]].append(kept)
  consumed: dict[int, list] = {}
  redone: list[str] = []
  for start in range(1, starts + 1):
    by_rank = [
      recorded_run.read(f"{folder}/consumed-{start}-{rank}")
      for rank in range(setting.ranks)
    ]
    for update in sorted(set().union(*by_rank)):
      ranks = [updates[update] for updates in by_rank]
      for now, before in zip(ranks, consumed.get(update, ranks), strict=True):
        if now[: len(before)] != before[: len(now)]:
          redone.append(f"start {start}: other records in update {update}")
      counts = {len(done) for done in ranks}
      if max(counts) > setting.accumulation:
        redone.append(f"start {start}: too many micro-batches of {update}")
      elif counts == {setting.accumulation}:  # else it was abandoned
        consumed[update] = ranks
  return Outcome(arrays, reports, consumed, redone)


def compare(got: Outcome, want: Outcome) -> tuple[list[str], int, int]:
  """(differences in words, records lost, records repeated)."""
  problems = list(got.redone)
  same_bits = lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes()
  if unequal := _unequal(got.arrays, want.arrays, same_bits):
    problems.append(f"{len(unequal)} arrays differ, as {unequal[0]}")
  if unequal := _unequal(got.reports, want.reports):
    problems.append(f"metrics.jsonl differs in updates {unequal[:5]}")
  if unequal := _unequal(got.consumed, want.consumed):
    problems.append(f"other records or masks in updates {unequal[:5]}")
  had = collections.Counter(got.records())
  due = collections.Counter(want.records())
  return problems, (due - had).total(), (had - due).total()


def newest_checkpoints(output_dir: str) -> list[int]:
  """Updates of those that are whole, newest first."""
  files, whole = checkpoint_files.CheckpointFiles(output_dir, 1), []
  for step in files.steps():
    with contextlib.suppress(errors.UserError):
      files.check(step)
      whole.append(step)
  return whole


def damage(kind: str, chance: float, output_dir: str) -> None:
  """Damages the newest of several checkpoints."""
  steps = newest_checkpoints(output_dir)
  if len(steps) < 2:
    return  # the one before was being deleted
  prefix = os.path.join(output_dir, checkpoint_files.PREFIX)
  files = sorted(glob.glob(f"{prefix}-{steps[0]}.*"))
  path = files[int(chance * len(files))]
  offset = int(chance * len(files) % 1 * os.path.getsize(path))
  if kind == "delete":
    os.unlink(path)
  elif kind == "cut":
    os.truncate(path, offset)
  else:
    with open(path, "r+b") as f:
      content = bytearray(f.read())
      content[offset] ^= 0x10
      f.seek(0)
      f.write(content)


def _unequal(got: dict, want: dict, same=lambda a, b: a == b) -> list:
  """The keys that one lacks, or whose values differ."""
  both = got.keys() & want.keys()
  differ = {key for key in both if not same(got[key], want[key])}
  return sorted(differ | (got.keys() ^ want.keys()))
