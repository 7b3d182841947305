"""Data work that is stopped, shared by ranks, or told to do something else."""

import concurrent.futures
import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import runs
from samples import contents, create, write_documents
from stopping import Stopped, stop_after, stopped_at_files

from common import errors
from common.errors import STOPPED_STATUS
from corpus import text_files
from records import creation, data_set, shards, token_store
from workers import launchers, work_dir


def stopped_at(settings, module, name, calls=0):
  """Makes records until `stop_after` ends it."""
  with pytest.MonkeyPatch.context() as patch:
    stop_after(patch, module, name, calls)
    with pytest.raises(Stopped):
      creation.create(settings)


@pytest.fixture
def many_pieces(monkeypatch):
  monkeypatch.setattr(text_files, "PIECE_BYTES", 1500)
  monkeypatch.setattr(token_store, "CHUNK_BYTES", 700)


def test_stopped_at_any_file_it_goes_on_to_the_same_bytes(
  tmp_path, make, many_pieces
):
  small = dict(num_shards=3, dupe_factor=2)
  whole = make(out="whole", **small)
  want, kept = contents(tmp_path / "whole"), []
  for number in stopped_at_files(
    lambda n: make(out=f"stop{n}", **small), every=2
  ):
    again = make(out=f"stop{number}", **small)
    assert contents(tmp_path / f"stop{number}") == want, number
    assert again.manifest == whole.manifest
    kept.append(again.kept)
  assert len(kept) > 13  # chunks, shards, indexes, results, the moves
  assert "" in kept and any("3 of 3 shards" in k for k in kept)
  assert len(set(kept)) == 5  # nothing; text with 0, 1, 2 and 3 shards


def test_the_plan_of_unfinished_work_keeps_its_names(settings_for):
  """Work of a release with other names, or of another version, begins anew."""
  settings = settings_for()
  stopped_at(settings, data_set.Manifest, "save")
  with open(f"{settings.work_folder}/0/plan.json") as f:
    plan = json.load(f)
  assert sorted(plan) == sorted(
    "input_file output_file prose text_field encoding vocab_file "
    "spm_model_file tokenizer_file do_lower_case objective cross_documents "
    "do_whole_word_mask max_seq_length max_predictions_per_seq random_seed "
    "dupe_factor masked_lm_prob short_seq_prob examples_per_record "
    "dynamic_masks num_shards files tokenizer version".split()
  )
  assert plan["version"] == 5


def test_other_settings_delete_what_was_made(
  tmp_path, settings_for, make, capfd
):
  first = settings_for()
  stopped_at(first, data_set.Manifest, "save")
  assert "keeps what is finished: the same command" in capfd.readouterr().err
  summary = make(dupe_factor=2)
  err = capfd.readouterr().err
  assert "text or settings (dupe_factor): deleted it" in err
  assert summary.kept == "" and summary.manifest.settings["dupe_factor"] == 2
  # Text that has changed is other work too.
  stopped_at(first, data_set.Manifest, "save")
  write_documents(tmp_path / "a.txt", 41, seed=1)
  summary = creation.create(first)
  assert "(files): deleted it" in capfd.readouterr().err
  assert summary.manifest.counts["documents"] == 61


def test_a_folder_that_others_use_stays(settings_for):
  """A user's file, or another process that works there."""
  settings = settings_for()
  os.makedirs(settings.work_folder)
  path = f"{settings.work_folder}/novel.txt"
  open(path, "w").close()
  with pytest.raises(errors.UserError, match="novel.txt, which this"):
    creation.create(settings)
  os.unlink(path)
  job = work_dir.Job(settings.work_folder, {"a": 1}, "--output_file")
  with work_dir.work_folder(job, work_dir.alone()):
    with pytest.raises(errors.UserError, match="another process works there"):
      creation.create(settings)


def test_a_half_deleted_folder_is_emptied(tmp_path, settings_for):
  settings = settings_for(num_shards=2)
  creation.create(settings)
  want = contents(tmp_path / "out")
  other = settings_for(num_shards=2, dupe_factor=2)
  for deletions in range(1, 10, 2):
    stopped_at(settings, data_set.Manifest, "save")
    stopped_at(other, os, "unlink", deletions)
    assert os.listdir(settings.work_folder)
    assert creation.create(settings).kept == ""
    assert contents(tmp_path / "out") == want


def test_workers_that_come_at_once_join_one_attempt(tmp_path, monkeypatch):
  """After work of another plan, and in a new run of the same plan."""
  old, new = ({"a": number} for number in (1, 2))
  job = work_dir.Job(str(tmp_path / "work"), old, "--output_file")
  with pytest.raises(Stopped), work_dir.work_folder(job, work_dir.alone()):
    raise Stopped
  job, path = job._replace(plan=new), f"{job.folder}/1"
  abandon, mkdir = work_dir._abandon, os.mkdir

  def slow_abandon(*arguments):
    monkeypatch.setattr(work_dir, "_abandon", abandon)
    assert work_dir._join_attempt(job, work_dir.Worker("b", 1, 2)) == path
    abandon(*arguments)

  monkeypatch.setattr(work_dir, "_abandon", slow_abandon)
  assert work_dir._join_attempt(job, work_dir.Worker("b", 0, 2)) == path

  def slow_mkdir(folder, *more):
    mkdir(folder, *more)  # by another worker
    mkdir(folder, *more)

  monkeypatch.setattr(os, "mkdir", slow_mkdir)
  assert work_dir._join_attempt(job, work_dir.Worker("c", 0, 2)) == path


_WRITER, _SAVE = token_store.StoreWriter, (data_set.Manifest, "save")


@pytest.mark.parametrize(
  "stop, name, size",
  [
    *(((_WRITER, "append", 1), "pieces/*.[0-9]", size) for size in (0, 60)),
    (_SAVE, "store/sentences.i64", None),
    (_SAVE, "store/counts.json", 9),
    (_SAVE, "shards/train.tfrecord.result", 9),
  ],
)
def test_a_file_that_lost_bytes_is_refused(
  settings_for, many_pieces, stop, name, size
):
  settings = settings_for(num_shards=1)
  stopped_at(settings, *stop)
  paths = glob.glob(f"{settings.work_folder}/0/work/{name}")
  assert paths
  for path in paths:
    os.unlink(path) if size is None else os.truncate(path, size)
  last = name.rpartition("/")[2].removesuffix("*.[0-9]")
  with pytest.raises(errors.DataError, match=f"{last}.*damaged.*; start the"):
    creation.create(settings)
  assert creation.create(settings).kept == ""


@pytest.mark.parametrize("lost", ["new", "old"])
def test_published_records_stay_when_others_are_gone(
  tmp_path, settings_for, lost
):
  """Records that lost a file are made again, also if the manifest is there."""
  settings, name = settings_for(num_shards=2), "train-00001-of-00002.tfrecord"
  creation.create(settings)
  before = contents(tmp_path / "out")
  if lost == "old":
    os.unlink(tmp_path / "out" / name)
    creation.create(settings)
  else:
    other = settings_for(num_shards=2, dupe_factor=2)
    stopped_at(other, creation._Creation, "publish")
    os.unlink(f"{other.work_folder}/0/work/shards/{name}")
    with pytest.raises(errors.DataError, match="00001-of-.* is gone: start"):
      creation.create(other)
  assert contents(tmp_path / "out") == before


def test_what_is_waited_for_is_said(monkeypatch, capsys):
  monkeypatch.setattr(work_dir, "_REPORT_SECONDS", 0)
  answers = iter([False, False, True])
  work_dir.wait_until(lambda: next(answers), "rank 1 to end", lambda: None)
  said = 2 * "waiting for rank 1 to end: 0:00 so far\n"
  assert capsys.readouterr().err == said


# Processes --------------------------------------------------------------------


def command(tmp_path, text, letters, out, *more):
  return [
    sys.executable, "create_pretraining_data.py", f"--input_file={text}",
    f"--vocab_file={letters}", f"--output_file={tmp_path}/{out}/train.tfrecord",
    "--max_seq_length=32", "--max_predictions_per_seq=6", *more,
  ]  # fmt: skip


def wait_for(condition):
  end = time.monotonic() + runs.HANG_SECONDS
  while not condition():
    assert time.monotonic() < end, "it takes too long"
    time.sleep(0.01)


def start(tmp_path, letters, out, copies):
  """Begins work of some seconds: (process, its work folder)."""
  text = tmp_path / "long.txt"
  if not text.exists():  # written again it would be other text
    write_documents(text, 1000)
  more = ["--num_shards=8", "--num_workers=2", f"--dupe_factor={copies}"]
  process = subprocess.Popen(
    command(tmp_path, text, letters, out, *more),
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  return process, tmp_path / out / "train.tfrecord.unfinished"


def test_killed_it_keeps_shards_and_leaves_no_process(tmp_path, letters):
  process, work = start(tmp_path, letters, "killed", 10)
  made = lambda: sorted(work.glob("0/work/shards/*.result"))
  wait_for(lambda: len(made()) >= 2)
  children = psutil.Process(process.pid).children(recursive=True)
  assert len(children) >= 2
  process.kill()
  process.communicate()
  _, alive = psutil.wait_procs(children, timeout=runs.HANG_SECONDS)
  assert not alive
  finished = {p.stem: p.with_suffix("").stat().st_mtime_ns for p in made()}
  assert 2 <= len(finished) < 8
  again, _ = start(tmp_path, letters, "killed", 10)
  out, _ = again.communicate(timeout=runs.HANG_SECONDS)
  assert again.returncode == 0
  assert f"{len(finished)} of 8 shards made before" in out
  for name, when in finished.items():
    assert (tmp_path / "killed" / name).stat().st_mtime_ns == when
  create(
    tmp_path, f"{tmp_path}/long.txt", letters, out="whole", num_shards=8,
    dupe_factor=10,
  )  # fmt: skip
  assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
  "until, last_lines",
  [
    (
      "0/leases/*.result.0/*.tmp",
      "create_pretraining_data.py: error: a worker process died, most likely "
      "for lack of memory: give fewer --num_workers",
    ),
    (
      "0/work/shards/*.result",
      "SIGTERM: stopped as asked: the same command completes it\n"
      "{work} keeps what is finished: the same command resumes from it",
    ),
  ],
  ids=["a worker dies", "SIGTERM"],
)
def test_an_end_is_told(tmp_path, letters, until, last_lines):
  process, work = start(tmp_path, letters, "out", 50)
  wait_for(lambda: list(work.glob(until)))
  ended = process
  if "leases" in until:
    is_worker = lambda p: "spawn_main" in " ".join(p.cmdline())
    children = psutil.Process(process.pid).children()
    ended = next(filter(is_worker, children))
  ended.send_signal(signal.SIGTERM if ended is process else signal.SIGKILL)
  _, err = process.communicate(timeout=runs.HANG_SECONDS)
  assert process.returncode == (STOPPED_STATUS if ended is process else 1)
  assert err.endswith(f"{last_lines.format(work=work)}\n")
  assert "the same command resumes from it" in err


# Workers ----------------------------------------------------------------------


def share(settings, numbers, count, at_a_time):
  """Makes records by workers in threads; what each of them returns."""

  def make(number):
    return creation.create(settings, work_dir.Worker("run", number, count))

  with concurrent.futures.ThreadPoolExecutor(at_a_time) as threads:
    return list(threads.map(make, numbers))


def test_16_workers_of_which_4_run_at_a_time(
  tmp_path, settings_for, make, many_pieces
):
  """Each piece is made once, and the last worker leaves the records alone."""
  alone = make(out="alone", num_shards=7)
  many = settings_for(out="many", num_shards=7)
  made = []

  def counted(module, name):
    original = getattr(module, name)

    def call(*arguments):
      made.append(os.path.basename(arguments[-1]))
      original(*arguments)

    return call

  with pytest.MonkeyPatch.context() as patch:
    for module, name in (
      (token_store, "tokenize_piece"),
      (shards, "build_shard"),
    ):
      patch.setattr(module, name, counted(module, name))
    summaries = share(many, range(15), 16, at_a_time=4)
    assert len(made) == len(set(made)) > 10
    summary = next(filter(None, summaries))
    assert summary.manifest == alone.manifest
    assert summaries.count(None) == 14
    files = ["end.json", "plan.json", "runs", "workers"]
    assert sorted(os.listdir(f"{many.work_folder}/0")) == files
    before = len(made)
    assert share(many, [15], 16, at_a_time=1) == [None]
    assert len(made) == before
  assert contents(tmp_path / "many") == contents(tmp_path / "alone")


_KILLED_AT = """
import os, signal
from corpus import text_files
from records import creation, shards, token_store
from workers import shared_work, work_dir
text_files.PIECE_BYTES, token_store.CHUNK_BYTES = 1500, 700
def die(*arguments, **named):
  os.kill(os.getpid(), signal.SIGKILL)
{} = die
import create_pretraining_data
from common.settings import run_with
run_with(creation.CreationSettings, create_pretraining_data.main)
"""


@pytest.mark.parametrize(
  "place",
  [
    "token_store.tokenize_piece", "token_store._tokenize_chunk",
    "token_store.StoreWriter.append", "token_store.StoreWriter.finish",
    "shards.build_shard", "shared_work.leases.deliver",
    "shared_work.SharedWork.publish", "work_dir.Attempt.finish",
    "work_dir.Attempt.leave",
  ],
)  # fmt: skip
def test_a_killed_worker_is_replaced_at_once(
  tmp_path, texts, letters, settings_for, make, many_pieces, place
):
  python, _, *flags = command(tmp_path, texts, letters, "out", "--run=a")
  flags += ["--num_shards=3", "--num_workers=1", "--dupe_factor=3"]
  flags += ["--workers=2", "--worker=0"]
  killed = subprocess.run(
    [python, "-c", _KILLED_AT.format(place), *flags], timeout=runs.HANG_SECONDS
  )
  assert killed.returncode == -signal.SIGKILL
  settings, began = settings_for(num_shards=3), time.monotonic()
  creation.create(settings, work_dir.Worker("a", 1, 2))
  assert time.monotonic() - began < 30  # a lease of another machine takes 60
  # The killed one comes again, as a job does that is started again.
  assert creation.create(settings, work_dir.Worker("a", 0, 2)) is None
  make(out="alone", num_shards=3)
  assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_an_error_ends_all_workers(tmp_path, settings_for):
  """Also one that comes later; with the text mended the run starts over.

  Who has seen it and comes again tries again.
  """
  settings, bad = settings_for(), tmp_path / "a.txt"
  text = bad.read_bytes()
  bad.write_bytes(text + b"\xff\n")
  for number in (0, 1):
    with pytest.raises(errors.DataError, match="a.txt: line .*not text in"):
      creation.create(settings, work_dir.Worker("a", number, 3))
  bad.write_bytes(text)
  assert creation.create(settings, work_dir.Worker("a", 2, 3))


def test_done_is_what_is_on_the_disk(tmp_path, settings_for, capfd):
  """In one job, which a batch script or a pod may start twice."""
  settings, first = settings_for(num_shards=2), work_dir.Worker("a", 0, 8)
  other = settings_for(num_shards=2, dupe_factor=2)
  assert creation.create(settings, first)
  for late in (first, work_dir.Worker("a", 1, 8)):
    assert creation.create(settings, late) is None
  shards = lambda: [
    path.read_bytes() for path in sorted((tmp_path / "out").glob("train-*"))
  ]
  want = shards()
  for name in ("train-00001-of-00002.tfrecord", "train.manifest.json"):
    os.unlink(tmp_path / "out" / name)
    assert creation.create(settings, first)
    assert shards() == want
  assert creation.create(other, first)
  # Two plans at the same time cannot be of one run; one after another can.
  job = work_dir.Job(settings.work_folder, {"a": 1}, "--output_file")
  with work_dir.work_folder(job, first) as attempt:
    with pytest.raises(errors.UserError, match="first one of its run .a, "):
      creation.create(settings, work_dir.Worker("a", 1, 8))
    attempt.finish("no text")
  job = job._replace(folder=f"{tmp_path}/killed")
  with contextlib.suppress(KeyboardInterrupt):
    with work_dir.work_folder(job, first):
      raise KeyboardInterrupt
  with work_dir.work_folder(job._replace(plan={"a": 2}), first):
    assert "(a): deleted it" in capfd.readouterr().err
  # What ended with an error may have been mended without a change of text.
  with contextlib.suppress(errors.DataError):
    with work_dir.work_folder(job, first):
      raise errors.DataError("no pyarrow")
  with work_dir.work_folder(job, first):
    pass


def test_the_same_command_helps(settings_for, monkeypatch):
  settings = settings_for(num_shards=2)
  publish = creation._Creation.publish
  workers = f"{settings.work_folder}/0/workers"

  def with_the_other(*arguments):
    wait_for(lambda: len(os.listdir(workers)) == 2)
    publish(*arguments)

  monkeypatch.setattr(creation._Creation, "publish", with_the_other)
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    first, second = threads.map(creation.create, [settings] * 2)
  assert (first is None) != (second is None)
  assert not os.path.exists(settings.work_folder)


HOROVOD = {
  "HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2",
  "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
  "HOROVOD_GLOO_RENDEZVOUS_PORT": "80",
}  # fmt: skip
BATCH = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}
STEP = BATCH | {"SLURM_STEP_ID": "2"}
SHELL = STEP | {"SLURM_PTY_PORT": "1"}
ARRAY = {
  "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1",
  "SLURM_ARRAY_TASK_COUNT": "16", "SLURM_ARRAY_JOB_ID": "6",
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "records-2"}


@pytest.mark.parametrize(
  "flags, environ, want",
  [
    ({}, HOROVOD, ("10.0.0.1:80", 1, 4, 2)),
    ({}, STEP, ("7:2", 3, 8, 1)),
    # Not a task of a step, but a shell, or started in one; a step of a shell.
    *(({}, environ, None) for environ in (BATCH, SHELL, {"SLURM_PROCID": ""})),
    ({}, SHELL | {"SLURM_TASK_PID": str(os.getpid())}, ("7:2", 3, 8, 1)),
    ({}, SHELL | HOROVOD, ("10.0.0.1:80", 1, 4, 2)),
    ({}, STEP | ARRAY, ("6", 4, 16, 1)),
    ({}, STEP | ARRAY | HOROVOD, ("10.0.0.1:80", 1, 4, 2)),
    ({"workers": 3}, POD, ("records", 2, 3, 1)),
    ({"workers": 9, "worker": 8, "run": "x"}, {}, ("x", 8, 9, 1)),
    ({"workers": 9, "worker": 8, "run": "x"}, ARRAY, ("x", 8, 9, 1)),
    ({"workers": 2, "worker": 2, "run": "x"}, {}, "must be 0 to 1"),
    ({}, {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "all of them the same --"),
    ({"workers": 2, "run": "x"}, {}, "and each its --worker"),
  ],
)
def test_launchers_are_known(flags, environ, want):
  settings = launchers.WorkerSettings(**flags)
  if not isinstance(want, str):
    worker = launchers.worker_of(settings, environ)
    assert worker == want or (want is None and worker[1:] == (0, 1, 1))
  else:
    with pytest.raises(errors.UserError, match=want):
      launchers.worker_of(settings, environ)
  assert launchers.worker_of(launchers.WorkerSettings(), {})[1:] == (0, 1, 1)


def test_a_full_disk_can_be_freed(tmp_path, monkeypatch):
  """The work of another plan is deleted where no new plan can be written."""
  job = lambda plan: work_dir.Job(str(tmp_path / "work"), plan, "--out")
  with contextlib.suppress(KeyboardInterrupt):
    with work_dir.work_folder(job({"a": 1}), work_dir.alone()) as work:
      os.makedirs(f"{work.folder}/shards")
      raise KeyboardInterrupt

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(work_dir.json_files, "write", full)
  with pytest.raises(OSError, match="No space"):  # and then there is room
    with work_dir.work_folder(job({"a": 2}), work_dir.alone()):
      pass
  assert not os.path.exists(work.folder)


def test_after_the_end_nothing_is_damaged(tmp_path):
  job = work_dir.Job(str(tmp_path / "work"), {"a": 1}, "--out")
  with work_dir.work_folder(job, work_dir.alone()) as attempt:
    attempt.finish()
    raise errors.DataError("a file is gone")
  assert not (tmp_path / "work").exists()


def test_a_helper_that_leaves_last_keeps_the_end_for_late_workers(tmp_path):
  """Else the second of an array would make all again."""
  job = work_dir.Job(str(tmp_path / "work"), {"a": 1}, "--out")
  begun = []
  with work_dir.work_folder(job, work_dir.alone()):
    with work_dir.work_folder(job, work_dir.Worker("a", 0, 2)) as attempt:
      attempt.finish()
  with work_dir.work_folder(job, work_dir.Worker("a", 1, 2)) as attempt:
    attempt.stop_if_over()
    begun.append(attempt)
  assert not begun and not (tmp_path / "work").exists()
