"""Data work that is stopped, shared by ranks, or told to do something else."""

import contextlib
import fcntl
import glob
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import runs
from samples import contents, create, settings_of, write_documents

from common import errors
from data import corpus, creation, records, text_files, work_dir


class Stopped(BaseException):
  """Stands for the end of the process."""


def stop_after(patch, module, name, calls):
  """Lets `module.name` be called so often; then everything ends."""
  original, left = getattr(module, name), [calls]

  def counted(*arguments, **named):
    left[0] -= 1
    if left[0] < 0:
      raise Stopped
    return original(*arguments, **named)

  patch.setattr(module, name, counted)
  return left


def stopped_at(settings, module, name, calls=0):
  """Makes records until `stop_after` ends it."""
  with pytest.MonkeyPatch.context() as patch:
    stop_after(patch, module, name, calls)
    with pytest.raises(Stopped):
      creation.create(settings)


@pytest.fixture
def many_pieces(monkeypatch):
  monkeypatch.setattr(text_files, "PIECE_BYTES", 1500)
  monkeypatch.setattr(corpus, "CHUNK_BYTES", 700)


def test_stopped_at_any_file_it_goes_on_to_the_same_bytes(
  tmp_path, texts, letters, many_pieces
):
  """Every file appears by os.replace, so that is where it is stopped."""
  make = lambda out: create(
    tmp_path, texts, letters, output_file=f"{tmp_path}/{out}/train.tfrecord",
    num_shards=3, dupe_factor=2,
  )  # fmt: skip
  whole = make("whole")
  want = contents(tmp_path / "whole")
  stops, kept = 0, set()
  while True:
    out = f"stopped{stops}"
    with pytest.MonkeyPatch.context() as patch:
      left = stop_after(patch, os, "replace", stops)
      with contextlib.suppress(Stopped):
        make(out)
    if left[0] >= 0:
      break
    again = make(out)
    assert contents(tmp_path / out) == want, f"stopped at file {stops}"
    assert again.manifest == whole.manifest
    kept.add(again.kept)
    stops += 1
  assert stops > 25  # chunks, journal, shards, indexes, results, the moves
  assert "" in kept and any("3 of 3 shards" in k for k in kept)
  assert len(kept) == 5  # nothing; text with 0, 1, 2 and 3 shards


def test_what_was_written_after_the_journal_goes(
  tmp_path, texts, letters, many_pieces
):
  settings = settings_of(tmp_path, texts, letters)
  creation.create(settings)
  want = contents(tmp_path / "out")
  stopped_at(settings, corpus.StoreWriter, "_write_journal", 5)
  for name in ("tokens", "sentences.i64", "starts.i64"):
    with open(f"{settings.work_folder}/store/{name}", "ab") as f:
      f.write(b"\xff" * (1 << 20))  # more than is still to come
  creation.create(settings)
  assert contents(tmp_path / "out") == want


def test_other_settings_delete_what_was_made(tmp_path, texts, letters, capfd):
  first = settings_of(tmp_path, texts, letters)
  stopped_at(first, records.Manifest, "save")
  assert "keeps what is finished: the same command" in capfd.readouterr().err
  summary = create(tmp_path, texts, letters, dupe_factor=2)
  err = capfd.readouterr().err
  assert "text or settings (dupe_factor): deleted it" in err
  assert summary.kept == "" and summary.manifest.settings["dupe_factor"] == 2
  # Text that has changed is other work too.
  stopped_at(first, records.Manifest, "save")
  write_documents(tmp_path / "a.txt", 41, seed=1)
  summary = creation.create(first)
  assert "(files): deleted it" in capfd.readouterr().err
  assert summary.manifest.counts["documents"] == 61


def test_a_folder_that_is_not_ours_stays(tmp_path, texts, letters):
  settings = settings_of(tmp_path, texts, letters)
  os.makedirs(settings.work_folder)
  path = f"{settings.work_folder}/novel.txt"
  open(path, "w").close()
  with pytest.raises(errors.UserError, match="novel.txt, which this"):
    creation.create(settings)
  assert os.path.exists(path)


def test_only_one_at_a_time(tmp_path, texts, letters):
  settings = settings_of(tmp_path, texts, letters)
  os.makedirs(settings.folder)
  with work_dir.work_folder(settings.work_folder, {}, work_dir.ALONE):
    with pytest.raises(errors.UserError, match="another process works there"):
      creation.create(settings)


def test_a_half_deleted_folder_is_emptied(tmp_path, texts, letters):
  """Deleting is stopped after any number of files."""
  settings = settings_of(tmp_path, texts, letters, num_shards=2)
  creation.create(settings)
  want = contents(tmp_path / "out")
  other = settings_of(tmp_path, texts, letters, num_shards=2, dupe_factor=2)
  for deletions in range(1, 10, 2):
    stopped_at(settings, records.Manifest, "save")
    stopped_at(other, os, "unlink", deletions)
    assert os.listdir(settings.work_folder)
    assert creation.create(settings).kept == ""
    assert contents(tmp_path / "out") == want


_WRITER, _SAVE = corpus.StoreWriter, (records.Manifest, "save")


@pytest.mark.parametrize(
  "stop, name, size",
  [
    *(((_WRITER, "append", 1), "*/*.[0-9]", size) for size in (0, 9, 60)),
    *(
      ((_WRITER, "_write_journal", 5), f"store/{name}", size)
      for name in ("tokens", "sentences.i64", "starts.i64")
      for size in (None, 8)
    ),
    *(
      (_SAVE, f"store/{name}", None)
      for name in ("tokens", "sentences.i64", "documents.i64")
    ),
    (_SAVE, "store/counts.json", 9),
    (_SAVE, "shards/train.tfrecord.result", 9),
  ],
)
def test_a_file_that_lost_bytes_is_refused(
  tmp_path, texts, letters, many_pieces, stop, name, size
):
  """A chunk of tokens, the store's files, what a shard holds."""
  settings = settings_of(tmp_path, texts, letters, num_shards=1)
  stopped_at(settings, *stop)
  paths = glob.glob(f"{settings.work_folder}/{name}")
  assert paths
  for path in paths:
    os.unlink(path) if size is None else os.truncate(path, size)
  last = name.rpartition("/")[2].removesuffix("*.[0-9]")
  with pytest.raises(errors.DataError, match=f"{last}.*damaged.*; start the"):
    creation.create(settings)
  assert creation.create(settings).kept == ""


def test_published_records_stay(tmp_path, texts, letters):
  """The end of the other ranks is waited for after the manifest is there."""
  settings = settings_of(tmp_path, texts, letters, num_shards=2)
  stopped_at(settings, work_dir, "_remove")
  files = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
  want = {path.name: path.read_bytes() for path in files}
  assert len(want) == 5
  # As with any number of workers.
  summary = create(tmp_path, texts, letters, num_shards=2, num_workers=2)
  assert "2 of 2 shards made before" in summary.kept
  assert contents(tmp_path / "out") == want


def test_published_records_stay_when_others_are_gone(tmp_path, texts, letters):
  settings = settings_of(tmp_path, texts, letters, num_shards=2)
  creation.create(settings)
  before = contents(tmp_path / "out")
  other = settings_of(tmp_path, texts, letters, num_shards=2, dupe_factor=2)
  stopped_at(other, creation, "_publish")
  os.unlink(f"{other.work_folder}/shards/train-00001-of-00002.tfrecord")
  with pytest.raises(errors.DataError, match="00001-of-.* is gone: start"):
    creation.create(other)
  assert contents(tmp_path / "out") == before


def test_records_that_lost_a_file_are_made_again(tmp_path, texts, letters):
  """Also by a command whose manifest is the one that is there."""
  settings = settings_of(tmp_path, texts, letters, num_shards=2)
  creation.create(settings)
  before = contents(tmp_path / "out")
  os.unlink(tmp_path / "out" / "train-00001-of-00002.tfrecord")
  creation.create(settings)
  assert contents(tmp_path / "out") == before


def test_what_is_waited_for_is_said(monkeypatch, capsys):
  monkeypatch.setattr(work_dir, "_SAY_SECONDS", 0)
  answers = iter([False, False, True])
  work_dir.wait_until(lambda: next(answers), "rank 1 to end")
  assert (
    capsys.readouterr().err == 2 * "waiting for rank 1 to end: 0:00 so far\n"
  )


# Processes --------------------------------------------------------------------


def command(tmp_path, text, letters, out, *more):
  return [
    sys.executable,
    "create_pretraining_data.py",
    f"--input_file={text}",
    f"--vocab_file={letters}",
    f"--output_file={tmp_path}/{out}/train.tfrecord",
    "--max_seq_length=32",
    "--max_predictions_per_seq=6",
    *more,
  ]


def wait_for(condition):
  end = time.monotonic() + runs.HANG_SECONDS
  while not condition():
    assert time.monotonic() < end, "it takes too long"
    time.sleep(0.01)


def test_killed_it_keeps_shards_and_leaves_no_process(
  tmp_path,
  letters,
):
  write_documents(tmp_path / "long.txt", 1000)
  more = ["--num_shards=8", "--num_workers=2", "--dupe_factor=20"]
  start = lambda out: subprocess.Popen(
    command(tmp_path, tmp_path / "long.txt", letters, out, *more),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  work = tmp_path / "killed" / "train.tfrecord.unfinished"
  process = start("killed")
  made = lambda: sorted((work / "shards").glob("*.result"))
  wait_for(lambda: len(made()) >= 2)
  children = psutil.Process(process.pid).children(recursive=True)
  assert len(children) >= 2
  process.kill()
  process.communicate()
  _, alive = psutil.wait_procs(children, timeout=runs.HANG_SECONDS)
  assert not alive
  finished = {p.stem: p.with_suffix("").stat().st_mtime_ns for p in made()}
  assert 2 <= len(finished) < 8
  again = start("killed")
  out, _ = again.communicate(timeout=runs.HANG_SECONDS)
  assert again.returncode == 0
  assert f"{len(finished)} of 8 shards made before" in out
  for name, when in finished.items():
    assert (tmp_path / "killed" / name).stat().st_mtime_ns == when
  other = start("whole")
  other.communicate(timeout=runs.HANG_SECONDS)
  assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def started(tmp_path, letters, until):
  """(process, its work folder) of long work, when such a file is there."""
  write_documents(tmp_path / "long.txt", 1000)
  process = subprocess.Popen(
    command(
      tmp_path, tmp_path / "long.txt", letters, "out", "--dupe_factor=50",
      "--num_shards=8", "--num_workers=2",
    ),
    stderr=subprocess.PIPE,
    text=True,
  )  # fmt: skip
  work = tmp_path / "out" / "train.tfrecord.unfinished"
  wait_for(lambda: list(work.glob(until)))
  return process, work


def test_a_worker_that_dies_is_told(tmp_path, letters):
  process, _ = started(tmp_path, letters, until="shards/*.tmp")
  is_worker = lambda p: "spawn_main" in " ".join(p.cmdline())
  children = psutil.Process(process.pid).children()
  next(filter(is_worker, children)).kill()
  _, err = process.communicate(timeout=runs.HANG_SECONDS)
  assert process.returncode == 1
  assert err.splitlines()[-1] == (
    "create_pretraining_data.py: error: a worker process died, most likely for "
    "lack of memory: give fewer --num_workers"
  )
  assert "the same command resumes from it" in err


@pytest.mark.parametrize("number", errors.STOP_SIGNALS)
def test_a_signal_stops_it(tmp_path, letters, number):
  process, work = started(tmp_path, letters, until="shards/*.result")
  process.send_signal(number)
  _, err = process.communicate(timeout=runs.HANG_SECONDS)
  assert process.returncode == 1
  assert err.splitlines()[-2:] == [
    f"{work} keeps what is finished: the same command resumes from it",
    f"create_pretraining_data.py: stopped by signal {number}",
  ]


# Ranks ------------------------------------------------------------------------


def environment(rank, size, run="1"):
  return {
    **os.environ,
    "HOROVOD_RANK": str(rank),
    "HOROVOD_SIZE": str(size),
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": run,
  }


def test_ranks_share_the_work(tmp_path, texts, letters, many_pieces):
  settings = lambda out: settings_of(
    tmp_path, texts, letters, num_shards=4,
    output_file=f"{tmp_path}/{out}/train.tfrecord",
  )  # fmt: skip
  alone = creation.create(settings("alone"))
  results = {}

  def work(rank):
    ranks = work_dir.Ranks(rank, 3, 3, "run")
    summary = creation.create(settings("three"), ranks)
    results[rank] = summary and summary.manifest

  threads = [threading.Thread(target=work, args=[rank]) for rank in (2, 1, 0)]
  for thread in threads:
    thread.start()
    time.sleep(0.2)  # rank 0 comes last, the others wait for it
  for thread in threads:
    thread.join(runs.HANG_SECONDS)
  assert results == {0: alone.manifest, 1: None, 2: None}
  assert contents(tmp_path / "three") == contents(tmp_path / "alone")


def test_ranks_with_other_flags_are_told(tmp_path, texts, letters):
  start = lambda rank, copies: subprocess.Popen(
    command(tmp_path, texts, letters, "out", f"--dupe_factor={copies}"),
    env=environment(rank, 2),
    stderr=subprocess.PIPE,
    text=True,
  )
  root, other = start(0, 2), start(1, 3)
  _, err = other.communicate(timeout=runs.HANG_SECONDS)
  root.terminate()
  root.communicate(timeout=runs.HANG_SECONDS)
  assert other.returncode == 1
  assert "rank 1 has other text or settings than rank 0 (dupe_" in err


def test_ranks_without_a_launcher_are_told(monkeypatch):
  monkeypatch.setenv("HOROVOD_SIZE", "2")
  monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
  monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_PORT", raising=False)
  with pytest.raises(errors.UserError, match="start them by horovodrun"):
    work_dir.ranks_of_environment()


def test_a_full_disk_can_be_freed(tmp_path, monkeypatch):
  """A folder of work is emptied also where its plan cannot be written."""
  folder = tmp_path / "work"
  (folder / "shards").mkdir(parents=True)
  (folder / "shards" / "a").write_text("a")
  work_dir.json_files.write(str(folder / work_dir._PLAN), {"plan": {"a": 1}})

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(work_dir.json_files, "write", full)
  work_dir._empty(str(folder))
  assert work_dir._contents(str(folder)) == []
  assert work_dir.plan_of(str(folder)) is None
  with pytest.raises(OSError, match="No space"):  # and then there is room
    with work_dir.work_folder(str(folder), {"a": 2}, work_dir.ALONE):
      pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
  def lacking(*_):
    raise OSError(38, "Function not implemented")

  monkeypatch.setattr(fcntl, "flock", lacking)
  folder = str(tmp_path / "work")
  with work_dir.work_folder(folder, {"a": 1}, work_dir.ALONE):
    pass
  told = f"{folder}: cannot be locked (Function not implemented)"
  assert told in capsys.readouterr().err and not os.path.exists(folder)
