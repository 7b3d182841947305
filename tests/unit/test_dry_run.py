"""Dry runs: sizes that are measured, what they say of others, free memory."""

import dataclasses
import math
import re
import subprocess
import sys
import types

import pytest
import runs
from samples import write_config

from common import errors
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import training_plan
from gradients import distributed, layout
from training import dry_run, evaluation, train_loop

CHECKPOINT_MB, FIXED_MB = 60.0, 700.0
UPDATE, RECORD = 0.25, 0.1  # seconds


def plan_of_four(micro_batch=8, **stage):
  """A million updates of four micro-batches."""
  plan = training_plan.resolve(
    ranks=1, records=None, train_batch_size=micro_batch, num_warmup_steps=0,
    num_train_steps=4 * 10**6, num_accumulation_steps=4,
  )  # fmt: skip
  return dataclasses.replace(plan, stage=training_plan.Stage(**stage))


class Known(dry_run.Job):
  """A job whose needs are known: it starts no children."""

  record_mb = 12.0
  ends_at = math.inf  # MB of which the process is ended

  def measure(self, size, limit_mb):
    self.tried.append(size)
    peak_mb = FIXED_MB + self.record_mb * size
    if peak_mb > min(limit_mb, self.ends_at):
      return None
    return dry_run.Measured(
      size=size, peak_mb=peak_mb, gpu_mb=None, checkpoint_mb=CHECKPOINT_MB,
      micro_seconds=size * RECORD, update_seconds=UPDATE,
      parts={"TensorFlow": FIXED_MB - 50.0, "weights": 50.0},
      parameters={"embeddings": 10, "encoder": 20},
    )  # fmt: skip


def known(micro_batch=8, here=1, free_mb=8000.0, **needs):
  config = types.SimpleNamespace(keep_checkpoints=5)
  plan = plan_of_four(micro_batch)
  job = Known(None, config, plan, here, here, free_mb, None)
  for name, value in {"tried": [], **needs}.items():
    object.__setattr__(job, name, value)
  return job


def test_the_planned_size_is_measured_where_its_arithmetic_allows_it():
  job = known(64)
  measured = dry_run.first_size(job, record_flops=1e9)
  assert job.tried == [64] and measured.record_mb == pytest.approx(12.0)
  assert measured.seconds_of(3, 64) == pytest.approx(UPDATE + 3 * 64 * RECORD)
  # Else a smaller one, which what stays and what a record adds extend.
  job = known(64)
  measured = dry_run.first_size(job, record_flops=1e11)
  assert job.tried == [6]
  assert sum(measured.parts.values()) == pytest.approx(FIXED_MB)
  assert measured.seconds_of(2, 12) == pytest.approx(UPDATE + 2 * 12 * RECORD)


def test_a_planned_size_that_does_not_fit_is_halved():
  job = known(64, ends_at=1000.0)
  assert dry_run.first_size(job, 1e9).size == 16 and job.tried == [64, 32, 16]
  with pytest.raises(UserError, match="one record does not fit"):
    dry_run.first_size(known(64, free_mb=500.0), 1e9)


# Of the memory that there really is.
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("here", [1, 2])
@pytest.mark.parametrize("record_mb", [0.7, 12.0, 310.0])
def test_the_largest_micro_batch_is_found(record_mb, here, share):
  room = (0.9 * 10_000 - CHECKPOINT_MB) / here
  needs = dict(record_mb=record_mb, ends_at=share * room)
  job = known(32, here, free_mb=10_000.0, **needs)
  largest = dry_run.find_largest(job, dry_run.first_size(job, 1e9)).size
  best = int((share * room - FIXED_MB) / record_mb)
  assert 15 / 16 * best - 1 <= largest <= best


def test_a_stage_takes_the_time_of_its_own_updates():
  measured = dry_run.first_size(known(here=2), 1e9)
  one, four = measured.seconds_of(1, 8), measured.seconds_of(4, 8)
  plan = plan_of_four(first_update=10**6 - 10)
  assert dry_run.duration(measured, plan, math.inf) == (10, 10 * four)
  assert dry_run.duration(measured, plan, 3.5 * four) == (3, 3 * four)
  # From 8 records, in two updates: 8 and 16 of them.
  plan = plan_of_four(first_update=10**6 - 10, ramp=((1, 8), (1, 16)))
  grown = one + measured.seconds_of(2, 8)
  count, seconds = dry_run.duration(measured, plan, math.inf)
  assert count == 10 and seconds == pytest.approx(grown + 8 * four)
  count, seconds = dry_run.duration(measured, plan, one * 1.5)
  assert count == 1 and seconds == pytest.approx(one)


SCREEN = """\
  parameters                                              30
    embeddings                                            10
    encoder                                               20
  memory of micro-batches of 8 records (measured), MB
    TensorFlow                                           650
    weights                                               50
    activations and buffers                               96
    copy of what is saved, in rank 0 only                 60
    total                                                856
    each further record                                   12
    available, for 2 ranks here                        8,000
  fits; with 10% left free, the largest is about --train_batch_size=239
  time without network and evaluations: 3.45 s an update, 39.9 days in total
  disk: 0.059 GB a checkpoint, 0.41 GB for --keep_checkpoints=5, the best and\
 one more"""


def test_the_screen():
  job = known(here=2)
  measured = dry_run.first_size(job, 1e9)
  assert "\n".join(dry_run.lines(job, measured)) == SCREEN
  large = dataclasses.replace(job, plan=plan_of_four(1000))
  screen = "\n".join(dry_run.lines(large, measured))
  assert "DOES NOT FIT" in screen and "1,000 records (from 8), MB" in screen


@pytest.mark.slow
def test_stores_of_gradients_are_counted_once(tmp_path):
  """102 MB, of an update of two micro-batches: no part of the graph."""
  config = write_config(tmp_path / "c.json", vocab_size=400_000, hidden_size=64)
  parts = []
  for micro_batch in (8, 4):
    done = subprocess.run(
      [
        sys.executable, "run_pretraining.py", "--dry_run", "--xla=off",
        f"--bert_config_file={config}", "--max_seq_length=32",
        "--max_predictions_per_seq=5", "--global_batch_size=8",
        f"--train_batch_size={micro_batch}",
      ],
      cwd=runs.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    row = r"gradients +([\d,]+)\n.*\n +TensorFlow and the graph +([\d,]+)\n"
    numbers = re.search(row, done.stderr).groups()
    parts.append([int(number.replace(",", "")) for number in numbers])
  (gradients, graph), (more_gradients, same_graph) = parts
  assert more_gradients - gradients > 90
  assert abs(same_graph - graph) < 40


def test_a_child_that_takes_too_much_is_ended():
  job = dry_run.Job(None, None, None, 1, 1, 1.0, None)
  assert job.try_size(4) is None


def test_free_memory_is_that_of_the_cgroup(tmp_path, monkeypatch):
  """Of a group above this one, without the cache that can be dropped."""
  monkeypatch.setattr(dry_run, "_CGROUPS", str(tmp_path))
  monkeypatch.setattr(dry_run.pathlib.Path, "read_text", read_text)
  mb = 2**20
  (tmp_path / "a/b").mkdir(parents=True)
  for folder, most in ((tmp_path / "a/b", "max"), (tmp_path / "a", 30 * mb)):
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{20 * mb}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {4 * mb}\n")
  assert dry_run.free_memory_mb() == 14.0
  (tmp_path / "a/memory.max").write_text("max\n")
  assert dry_run.free_memory_mb() > 14.0


def read_text(path):
  """As for a process in the cgroup /a/b."""
  if str(path) == "/proc/self/cgroup":
    return "1:name=x:/z\n0::/a/b\n"
  with open(path) as f:
    return f.read()


def tf_error(kind, said):
  return getattr(tf.errors, f"{kind}Error")(None, None, said)


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
  for error in (
    MemoryError(), tf_error("ResourceExhausted", "OOM when allocating\nx"),
  ):  # fmt: skip
    message = str(evaluation.clear_error(error))
    assert message.startswith("out of memory (") and "\n" not in message
  other = tf_error("Internal", "Something else")
  assert evaluation.clear_error(other) is other


def test_a_rank_that_is_planned_has_its_share():
  comm = dry_run.PlannedRanks(4)
  with tf.Graph().as_default():
    part = comm.reducescatter(tf.zeros([8, 3]), "part")
    assert part.shape == [2, 3]
    assert comm.allgather(part, "whole").shape == [8, 3]
    assert comm.allgather(part, "unequal", rows=7).shape == [7, 3]


def test_matrices_are_dealt_to_ranks_that_are_planned():
  """Shares of three ranks are unequal: rank 0 has two of four matrices."""
  with tf.Graph().as_default():
    pairs = []
    for number, size in enumerate((4, 4, 2, 3)):
      variable = tf.get_variable(f"v{number}", [size, size])
      pairs.append((tf.ones([size, size]), variable))
    dealt = layout.VariableLayout(comm=dry_run.PlannedRanks(3))
    results = dealt.by_matrix(lambda wholes: wholes, *zip(*pairs, strict=True))
    assert [r.shape for r in results] == [v.shape for _, v in pairs]


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
