"""Leases: one worker does a piece of work, and another if that one is gone."""

import concurrent.futures
import contextlib
import fcntl
import os
import time
from unittest import mock

import pytest

from workers import leases, shared_work, work_dir


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The folder of some workers, whose beats are fast."""
  monkeypatch.setattr(leases, "BEAT_SECONDS", 0.01)
  for name in (leases.WORKERS, leases.LEASES):
    (tmp_path / name).mkdir()
  return str(tmp_path)


def killed(folder):
  """A worker of another machine, which was killed."""
  held = leases.Leases(folder, "killed")
  with open(os.path.join(folder, leases.WORKERS, "killed"), "w") as f:
    f.write("another machine")
  return held


def looked(watch, wanted):
  """What a watch sees when it is no longer in doubt, after how many looks."""
  for looks in range(1, 1000):
    lives, gone = watch.look()
    if wanted in lives | gone:
      return lives, gone, looks
    time.sleep(0.001)
    watch._last_look = 0.0  # a beat later
  raise AssertionError("always in doubt")


def test_many_workers_take_a_lease_once(folder):
  names = [str(number) for number in range(40)]
  with leases.heart(folder) as first, leases.heart(folder) as second:
    take = lambda taker: [taker.take(name) for name in names]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
      results = list(threads.map(take, [first, second] * 4))
  for number, name in enumerate(names):
    taken = [result[number] for result in results if result[number]]
    assert taken == [os.path.join(folder, leases.LEASES, f"{name}.0")]
  made = os.listdir(os.path.join(folder, leases.LEASES))
  assert len(made) == len(names)  # of those that were slower nothing stays


def test_a_worker_that_leaves_gives_its_leases_back(folder):
  with leases.heart(folder) as second:
    with leases.heart(folder) as first:
      assert first.take("a").endswith("a.0")
      assert second.take("a") is None
    assert second.take("a").endswith("a.1")
    assert second.take("a") is None


def test_a_lease_whose_owner_is_not_known_is_free(folder):
  """A power cut can leave its file without bytes."""
  with leases.heart(folder) as worker:
    lease = worker.take("a")
    os.truncate(os.path.join(lease, "owner"), 0)
    assert worker.take("a").endswith("a.1")
    assert worker.take("a") is None


def test_a_killed_worker_elsewhere_is_lost_after_its_beats(folder):
  held = killed(folder)
  assert held.take("a").endswith("a.0")
  watch = leases.Watch(folder)
  _, gone, looks = looked(watch, "killed")
  assert "killed" in gone and looks == leases.LOST_BEATS + 2
  # A watcher counts its own looks, whatever time went by while it was stopped.
  other = leases.Watch(folder)
  other.look()
  other._last_look -= 10_000.0
  assert other.look() == (frozenset(), frozenset())
  with leases.heart(folder) as other:
    assert other.take("a") is None
    assert other._replace(gone=gone).take("a").endswith("a.1")


@pytest.mark.parametrize("when", [0, 2**32])
def test_a_wrong_clock_does_not_matter(folder, when):
  """A worker lives as long as its time changes, to whatever."""
  killed(folder)
  path = os.path.join(folder, leases.WORKERS, "killed")
  watch = leases.Watch(folder)
  for beat in range(3 * leases.LOST_BEATS):
    os.utime(path, (when - beat, when - beat))
    watch._last_look = 0.0
    lives, gone = watch.look()
    assert not gone and ("killed" in lives) == (beat > 0)


def test_the_beats_of_a_worker_elsewhere_tell(folder, monkeypatch):
  monkeypatch.setattr(leases, "LOST_BEATS", 10**6)  # of a slow machine
  for module, name, value in (
    (leases, "_MACHINE", "another machine"),
    (fcntl, "flock", mock.Mock(side_effect=OSError(38, "no such function"))),
  ):
    with contextlib.ExitStack() as stack:
      with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        held = stack.enter_context(leases.heart(folder))
        if module is fcntl:
          lives, gone, _ = looked(leases.Watch(folder), held.worker)
      if module is leases:
        lives, gone, _ = looked(leases.Watch(folder), held.worker)
      assert lives == {held.worker} and not gone


def test_the_lock_tells_at_once_on_one_machine(folder, monkeypatch):
  with leases.heart(folder) as held:
    assert leases.Watch(folder).look() == ({held.worker}, frozenset())
    monkeypatch.setattr(os, "unlink", lambda *_: None)  # as if it was killed
  assert leases.Watch(folder).look() == (frozenset(), {held.worker})


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_worker_made_too_late_is_dropped(folder, tmp_path, fails):
  """It was suspended; meanwhile another did it and removed what it is of."""
  path = tmp_path / "a.done"

  def make(output):
    path.write_text("whole")
    if fails:
      raise FileNotFoundError(2, "no such file", "a.0")
    with open(output, "w") as f:
      f.write("part")
    return "part"

  task = leases.Task(str(path), make)
  assert leases.do(leases.Leases(folder, "slept"), task) is None
  assert path.read_text() == "whole"
  make_nothing = lambda output: os.stat(f"{output}/a.0")
  alone = leases.Task(str(tmp_path / "b.done"), make_nothing)
  with pytest.raises(OSError):
    leases.do(leases.Leases(folder, "first"), alone)


def test_no_name_is_of_bytes_that_a_power_cut_takes(tmp_path):
  calls = mock.Mock()
  with (
    mock.patch.object(leases.files, "sync", calls.sync),
    mock.patch.object(leases.os, "replace", calls.replace),
  ):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("a", "b", "done"):
      (scratch / name).touch()
    leases.deliver(str(scratch), f"{tmp_path}/done")
  steps = [(call[0], os.path.basename(call[1][0])) for call in calls.mock_calls]
  names = ("a", "b", "done")
  assert steps == [(do, name) for do in ("sync", "replace") for name in names]


def test_a_worker_is_noticed_that_came_and_left_between_two_looks(folder):
  with leases.heart(folder) as held:
    attempt = work_dir.Attempt(folder, None, held)
    changes = []
    for comes in (False, True, False):
      if comes:
        with leases.heart(folder):
          pass
      attempt._next_look = 0.0
      changes.append(attempt.has_lost_workers())
  assert changes == [True, True, False]


def test_a_missing_chunk_is_not_the_end_of_a_piece(tmp_path):
  """Another worker joined the chunks, and is removing them."""
  chunk_file = lambda number: str(tmp_path / f"a.{number}")
  task = leases.Task(str(tmp_path / "a.done"), None, chunk_file)
  for number in range(3):
    (tmp_path / f"a.{number}").touch()
  (tmp_path / "a.done").write_text('{"chunks": 3}')
  phase = shared_work.Phase(
    [task], shared_work.SharedWork(mock.MagicMock(), mock.MagicMock())
  )
  for _ in range(2):
    assert [*phase.chunks()] == [chunk_file(number) for number in range(3)]
    (tmp_path / "a.1").unlink(missing_ok=True)


def test_a_worker_that_slept_changes_nothing(folder, tmp_path):
  place = tmp_path / "place"
  place.mkdir()
  first = leases.Leases(folder, "slept")
  old = first.take("a")
  with leases.heart(folder) as held:
    new = held.take("a")
  assert old != new
  for scratch in (new, old):
    for name in ("a", "a.done"):
      with open(os.path.join(scratch, name), "w") as f:
        f.write(name)
  for scratch in (new, old):
    leases.deliver(scratch, str(place / "a.done"))
    assert sorted(os.listdir(place)) == ["a", "a.done"]
