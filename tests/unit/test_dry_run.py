"""Dry runs: sizes that are measured, what they say of others, free memory."""

import concurrent.futures
import dataclasses
import math
import sys
import threading
import types

import numpy as np
import pytest
import runs

from common import errors
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import training_plan
from gradients import distributed
from training import dry_run, evaluation, train_loop

CHECKPOINT_MB, START_MB = 60.0, 700.0
UPDATE, RECORD = 0.25, 0.1  # seconds


class Known:
  """Stands for `dry_run.Job`: micro-batches whose needs are known."""

  def __init__(
    self, record_mb=12.0, here=1, ends_at=np.inf, record_seconds=RECORD
  ):
    self.here, self.ends_at = here, ends_at
    self.record_mb, self.record_seconds = record_mb, record_seconds
    self.tried = []

  def measure(self, size, limit_mb):
    self.tried.append(size)
    if self.peak(size) > min(limit_mb, self.ends_at):
      return None
    return dry_run.Measured(
      size=size, mb=self.peak(size), gpu_mb=None, checkpoint_mb=CHECKPOINT_MB,
      micro_seconds=size * self.record_seconds, update_seconds=UPDATE,
      parts={"TensorFlow": 450.0, "weights": 50.0},
      parameters={"embeddings": 10, "encoder": 20},
    )  # fmt: skip

  def peak(self, size):
    return START_MB + self.record_mb * size


def begun(job, target, tokens=512, free_mb=8000.0):
  needs = dry_run.Needs(job, free_mb)
  needs.begin(target, tokens)
  return needs


def test_the_planned_size_is_measured_where_it_fits_and_is_quick():
  job = Known()
  needs = begun(job, 64, tokens=128)
  assert job.tried == [4, 64] and needs.last.size == 64
  assert needs.peak_mb(64) == job.peak(64)
  assert needs.seconds(3, 64) == pytest.approx(UPDATE + 3 * 64 * RECORD)


def test_a_larger_size_is_extended_from_smaller_ones():
  for job in (Known(record_seconds=1.0), Known(record_mb=100)):
    needs = begun(job, 1000, free_mb=4000.0)
    assert max(job.tried) <= 100 and needs.last.size < 1000
    assert needs.peak_mb(1000) == pytest.approx(job.peak(1000), rel=1e-6)
    wanted = UPDATE + 2000 * job.record_seconds
    assert needs.seconds(2, 1000) == pytest.approx(wanted, rel=1e-6)
    most = (0.9 * 4000 - CHECKPOINT_MB - START_MB) / job.record_mb
    assert needs.largest == min(int(most), 32 * needs.last.size)


# Of the memory that there really is.
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("here", [1, 2])
@pytest.mark.parametrize("record_mb", [0.7, 12.0, 310.0])
def test_the_largest_micro_batch_is_found(record_mb, here, share):
  room = (0.9 * 10_000 - CHECKPOINT_MB) / here
  job = Known(record_mb=record_mb, here=here, ends_at=share * room)
  needs = begun(job, 32, tokens=128, free_mb=10_000.0)
  before = len(job.tried)
  needs.find_largest()
  best = int((share * room - START_MB) / record_mb)
  assert 0.96 * best - 1 <= needs.last.size <= best
  # `_FARTHEST`, what fits by the line, and 2% more; or halving from there.
  assert len(job.tried) - before <= (3 if share == 1.0 else 9)


def test_what_stays_may_be_most_of_the_memory():
  """Of one measured size nothing says what a record adds."""
  # 975 MB a rank: three records.
  needs = begun(Known(record_mb=90.0, here=4), 2, free_mb=4400.0)
  assert needs.fits(2) and not needs.fits(4)
  needs.find_largest()
  assert needs.last.size == needs.largest == 3


def test_a_planned_size_that_was_tried_does_not_fit():
  job = Known(ends_at=1400.0)
  needs = begun(job, 64, tokens=128)
  assert job.tried == [4, 64, 34] and not needs.fits(64)
  assert needs.largest == 34 and needs.fits(34)


def test_a_model_that_does_not_fit_at_all():
  with pytest.raises(UserError, match="one record does not fit"):
    begun(Known(), 64, tokens=128, free_mb=500.0)


def plan_of_four(**stage):
  """A million updates of four micro-batches of 8."""
  plan = training_plan.resolve(
    ranks=1, records=None, train_batch_size=8, num_train_steps=4 * 10**6,
    num_warmup_steps=0, num_accumulation_steps=4,
  )  # fmt: skip
  return dataclasses.replace(plan, stage=training_plan.Stage(**stage))


def test_a_stage_takes_the_time_of_its_own_updates():
  needs = begun(Known(here=2), 8)
  one, four = needs.seconds(1, 8), needs.seconds(4, 8)
  plan = plan_of_four(first_update=10**6 - 10)
  assert dry_run.duration(needs, plan, math.inf) == (10, 10 * four)
  assert dry_run.duration(needs, plan, 3.5 * four) == (3, 3 * four)
  # From 8 records, in two updates: 8 and 16 of them.
  plan = plan_of_four(first_update=10**6 - 10, ramp=((1, 8), (1, 16)))
  grown = one + needs.seconds(2, 8)
  count, seconds = dry_run.duration(needs, plan, math.inf)
  assert count == 10 and seconds == pytest.approx(grown + 8 * four)
  count, seconds = dry_run.duration(needs, plan, one * 1.5)
  assert count == 1 and seconds == pytest.approx(one)


def test_the_screen_has_80_columns():
  needs = begun(Known(here=2), 8)
  config = types.SimpleNamespace(keep_checkpoints=5)
  plan = plan_of_four()
  lines = list(dry_run.lines(needs, config, plan))
  assert max(map(len, lines)) <= 80
  said = "\n".join(lines)
  assert "micro-batches of 8 records (measured), MB" in said
  assert "fits; with 10% left free, the largest is --train_batch_size=" in said
  assert "(extrapolated)" in said
  assert "0.35 GB for --keep_checkpoints=5 and the best" in said
  assert "3.45 s an update, 39.9 days in total" in said
  plan = dataclasses.replace(plan, micro_batch=1000)
  said = "\n".join(dry_run.lines(needs, config, plan))
  assert "DOES NOT FIT" in said and "extrapolated from 8), MB" in said


def test_a_child_that_takes_too_much_is_ended():
  job = dry_run.Job(None, None, None, 1, 1, None)
  assert job.measure(4, limit_mb=1.0) is None


def test_free_memory_is_that_of_the_cgroup(tmp_path, monkeypatch):
  """Of a group above this one, without the cache that can be dropped."""
  monkeypatch.setattr(dry_run, "_CGROUPS", str(tmp_path))
  mb = 2**20
  (tmp_path / "a/b").mkdir(parents=True)
  for folder, most in ((tmp_path / "a/b", "max"), (tmp_path / "a", 300 * mb)):
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{100 * mb}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {40 * mb}\n")
  assert list(dry_run._cgroup_mb("/a/b")) == [240.0]
  assert 0 < dry_run.free_memory_mb() < 1 << 24


def tf_error(kind, said):
  return getattr(tf.errors, f"{kind}Error")(None, None, said)


@pytest.mark.parametrize(
  "error",
  [
    MemoryError(),
    tf_error("ResourceExhausted", "OOM when allocating tensor\nx"),
    tf_error("Internal", "Failed: Out of memory while trying to"),
  ],
)
def test_missing_memory_is_one_line_with_what_to_lower(error):
  message = str(evaluation.clear_error(error))
  assert message.startswith("out of memory (") and "\n" not in message
  assert "--train_batch_size" in message and "--recompute" in message
  other = tf_error("Internal", "Something else")
  assert evaluation.clear_error(other) is other


def test_a_training_without_memory_ends_in_one_line(
  tiny_run, tmp_path, monkeypatch, capsys
):
  """XLA's error, which has no class of its own, in the first update."""
  run = tf.Session.run

  def without_memory(session, fetches, feed_dict=None, *rest, **named):
    if feed_dict is None:
      return run(session, fetches, feed_dict, *rest, **named)
    said = "Out of memory while trying to allocate 9 bytes.\n\t [[x]]"
    raise tf_error("Internal", said)

  monkeypatch.setattr(tf.Session, "run", without_memory)
  monkeypatch.setattr(sys, "argv", ["run_pretraining.py"])
  monkeypatch.setattr(errors.app, "run", lambda main, **_: main(sys.argv))
  monkeypatch.setattr(errors, "STOP_SIGNALS", ())
  with pytest.raises(SystemExit) as ended:
    train_loop.run_main(lambda _: runs.pretrain(tiny_run, tmp_path / "run"))
  assert ended.value.code == 1
  said = capsys.readouterr().err
  assert "Traceback" not in said
  *_, line = said.strip().splitlines()
  assert line.startswith("run_pretraining.py: error: out of memory (Out of")
  for remedy in ("--train_batch_size", "--recompute", "--find_batch_size"):
    assert remedy in line


def test_a_rank_that_is_planned_has_its_share():
  comm = dry_run.PlannedRanks(4)
  with tf.Graph().as_default():
    part = comm.reducescatter(tf.zeros([8, 3]), "part")
    assert part.shape == [2, 3]
    assert comm.allgather(part, "whole").shape == [8, 3]


def test_a_process_takes_the_gpu_of_its_sessions(monkeypatch):
  comm, told, config = distributed.Comm(), [], tf.config
  for owner, name in (
    (config, "set_visible_devices"), (config.experimental, "set_memory_growth")
  ):  # fmt: skip
    monkeypatch.setattr(owner, name, lambda *a: told.append(a))
  for name in ("intra", "inter"):
    set_threads = f"set_{name}_op_parallelism_threads"
    monkeypatch.setattr(config.threading, set_threads, lambda _: None)

  def settled(rank, ranks, gpus):
    """What a rank of this host takes, and its session's list."""
    monkeypatch.setattr(config, "list_physical_devices", lambda _: gpus)
    comm.local_rank, comm.local_size = rank, ranks
    told.clear()
    distributed.settled(comm, 1)
    options = distributed.session_config(comm).gpu_options
    assert options.allow_growth
    return told, options.visible_device_list

  assert settled(1, 2, ["a", "b"]) == ([("b", "GPU"), ("b", True)], "1")
  # Slurm's --gpus-per-task shows each rank its own.
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
  assert settled(1, 2, ["own"]) == ([("own", "GPU"), ("own", True)], "0")
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
  for rank, ranks, gpus in ((1, 2, ["own"]), (2, 3, ["a", "b"])):
    words = f"{ranks} ranks on a host with {len(gpus)} GPUs"
    with pytest.raises(UserError, match=words):
      settled(rank, ranks, gpus)


class Rank(distributed.Comm):
  """One of two ranks in threads."""

  size, given, barrier = 2, [None, None], threading.Barrier(2)

  def __init__(self, rank):
    self.rank = rank

  def gather(self, values):
    self.barrier.wait()
    self.given[self.rank] = values
    self.barrier.wait()
    return np.stack(self.given)


def test_ranks_that_disagree_name_flags_and_values():
  texts = "--seed=1\n--precision=bf16\n--zero=0", "--seed=1\n--precision=fp16"

  def check(rank):
    Rank(rank).check_equal("all", "the same")
    try:
      Rank(rank).check_equal("a flag", texts[rank])
    except UserError as e:
      return str(e)

  with concurrent.futures.ThreadPoolExecutor(2) as ranks:
    said = list(ranks.map(check, range(2)))
  assert said[0] == said[1]
  assert said[0] == (
    "a flag of rank [1] differs from rank 0's: rank 0 has --precision=bf16, "
    "rank 1 has --precision=fp16; rank 0 has --zero=0, rank 1 has nothing. "
    "Give all hosts the same files and flags"
  )
