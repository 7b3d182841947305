"""Record files: TensorFlow reads what we write; damage is told, not read."""

import dataclasses
import io
import itertools
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from common.errors import DataError
from common.files import file_sha256
from common.tensorflow_v1 import tf
from records import tfrecord


def written(path, payloads):
  """Writes records; returns what a manifest says of them."""
  with tfrecord.shard_writer(str(path)) as writer:
    for payload in payloads:
      writer.write(payload)
  return writer.info


@pytest.fixture
def record_file(tmp_path):
  """(path, payloads) of ten records of different lengths."""
  payloads = [bytes([i]) * (5 * i + 1) for i in range(10)]
  path = str(tmp_path / "x.tfrecord")
  sizes = written(path, payloads), os.path.getsize(path), file_sha256(path)
  assert sizes[0] == tfrecord.ShardInfo("x.tfrecord", 10, *sizes[1:])
  return path, payloads


@pytest.mark.parametrize("with_index", [True, False])
def test_files_round_trip(record_file, with_index):
  path, payloads = record_file
  if not with_index:
    os.unlink(path + tfrecord.INDEX_SUFFIX)
  assert list(tfrecord.RecordSet([path])) == payloads
  by_tensorflow = tf.python_io.tf_record_iterator(path)
  assert list(by_tensorflow) == payloads
  # What TensorFlow writes is the same.
  with tf.python_io.TFRecordWriter(path + "2") as writer:
    for payload in payloads:
      writer.write(payload)
  with open(path, "rb") as ours, open(path + "2", "rb") as theirs:
    assert ours.read() == theirs.read()


def test_numbers_run_through_the_files(record_file, tmp_path):
  path, payloads = record_file
  other = str(tmp_path / "y.tfrecord")
  written(other, [b"last"])
  both = tfrecord.RecordSet([path, other])
  assert len(both) == 11 and both.read(10) == b"last"
  several = np.array([3, 10, 0, 3])
  assert both.read_many(several) == [payloads[3], b"last", b"\0", payloads[3]]
  assert both.locate(9) == (path, 9) and both.locate(10) == (other, 0)


def test_reading_ahead_asks_for_the_bytes_of_the_records(
  record_file, tmp_path, monkeypatch
):
  large = str(tmp_path / "y.tfrecord")
  written(large, [bytes(300_000), b"last"])
  both = tfrecord.RecordSet([record_file[0], large])
  offsets = [np.load(p + tfrecord.INDEX_SUFFIX) for p in both.paths]
  asked = []

  def fadvise(fd, start, size, advice):
    assert advice == os.POSIX_FADV_WILLNEED and size <= 1 << 17
    asked.append((os.path.realpath(f"/proc/self/fd/{fd}"), start, start + size))

  monkeypatch.setattr(os, "posix_fadvise", fadvise)
  both.read_ahead(8, 3)
  first, *rest = asked
  assert first == (record_file[0], offsets[0][8], offsets[0][10])
  assert len(rest) == 3 and {path for path, _, _ in rest} == {large}
  ends = [0, *(end for _, _, end in rest)]
  assert [start for _, start, _ in rest] == ends[:3]
  assert rest[-1][2] == offsets[1][1]
  asked.clear()
  both.read_ahead(11, 2)
  assert sorted(asked) == [
    (record_file[0], 0, offsets[0][1]),
    (large, offsets[1][1], offsets[1][2]),
  ]


def change_byte(path, position):
  with open(path, "r+b") as f:
    f.seek(position)
    old = f.read(1)[0]
    f.seek(position)
    f.write(bytes([old ^ 0x10]))


def test_damage_is_named(record_file):
  path, payloads = record_file
  offsets = np.load(path + tfrecord.INDEX_SUFFIX)
  change_byte(path, int(offsets[7]) + 12 + 3)  # in the data
  opened = tfrecord.RecordSet([path])
  assert opened.read(6) == payloads[6]
  with pytest.raises(DataError, match=r"x\.tfrecord: record 7 .* is damaged"):
    opened.read(7)
  change_byte(path, int(offsets[4]))  # a length
  with pytest.raises(DataError, match="record 4 .* is damaged"):
    tfrecord.RecordSet([path]).read(4)
  os.unlink(path + tfrecord.INDEX_SUFFIX)
  with pytest.raises(DataError, match="record 4 .*damaged length"):
    tfrecord.RecordSet([path])


@pytest.mark.parametrize("kept", [5, 20], ids=["header", "data"])
def test_truncated_file(record_file, kept):
  path, _ = record_file
  last = int(np.load(path + tfrecord.INDEX_SUFFIX)[-2])
  os.truncate(path, last + kept)
  with pytest.raises(DataError, match="not the index of"):
    tfrecord.RecordSet([path])
  os.unlink(path + tfrecord.INDEX_SUFFIX)
  message = rf"x\.tfrecord: record 9 at byte {last} .*cut off"
  with pytest.raises(DataError, match=message):
    tfrecord.RecordSet([path])


def test_verify_file(record_file):
  path, payloads = record_file
  info = written(path, payloads)
  tfrecord.verify_file(path, info)
  words = r"x\.tfrecord: .*not those of its manif"
  for changes in ({"records": 9}, {"bytes": 5}, {"sha256": "ab"}):
    with pytest.raises(DataError, match=words):
      tfrecord.verify_file(path, dataclasses.replace(info, **changes))


def test_every_damaged_byte_is_found(record_file):
  path, _ = record_file
  index = path + tfrecord.INDEX_SUFFIX
  places = [(f, i) for f in (path, index) for i in range(os.path.getsize(f))]
  tfrecord.verify_file(path)
  for file, place in places:
    change_byte(file, place)
    with pytest.raises(DataError, match=r"x\.tfrecord"):
      tfrecord.verify_file(path)
    change_byte(file, place)
  tfrecord.verify_file(path)


def test_an_index_of_other_records_is_found(record_file):
  path, _ = record_file
  offsets = np.load(path + tfrecord.INDEX_SUFFIX)
  for wrong in (np.delete(offsets, 3), offsets + np.eye(11, dtype=int)[5]):
    with open(path + tfrecord.INDEX_SUFFIX, "wb") as f:
      np.save(f, wrong)
    tfrecord.RecordSet([path])  # opening takes it: the framing is not read
    with pytest.raises(DataError, match="has other records than"):
      tfrecord.verify_file(path)


@pytest.mark.parametrize(
  "name, data, words",
  [
    ("x", b"", "x: the file is empty"),
    ("x", None, "x: Is a directory"),
    ("nowhere", b"", "nowhere: No such file"),
    ("x", b"this is no record file at all\n", "x: record 0 .*not a TFRecord"),
  ],
  ids=["empty", "folder", "none", "text"],
)
def test_unreadable_files(tmp_path, name, data, words):
  path = tmp_path / "x"
  path.mkdir() if data is None else path.write_bytes(data)
  with pytest.raises(DataError, match=words):
    tfrecord.RecordSet([str(tmp_path / name)])


def archive_of(array):
  out = io.BytesIO()
  np.savez(out, array)
  return out.getvalue()


TOP = np.iinfo(np.int64).max


@pytest.mark.parametrize(
  "wrong",
  [
    lambda index: index[:-1],
    lambda index: index.astype(np.int32),
    lambda index: index.astype(object),  # pickled: it could be code
    # Differences that wrap around to what a record may take.
    lambda index: np.array([0, TOP, -TOP + 16, -20, index[-1]]),
    lambda index: b"noise",
    archive_of,
  ],
  ids="short int32 code overflow noise archive".split(),
)
def test_index_of_another_file(record_file, wrong):
  path, _ = record_file
  made = wrong(np.load(path + tfrecord.INDEX_SUFFIX))
  with open(path + tfrecord.INDEX_SUFFIX, "wb") as f:
    f.write(made) if isinstance(made, bytes) else np.save(f, made)
  with pytest.raises(DataError, match=r"x\.tfrecord\.index: .*not the index"):
    tfrecord.RecordSet([path])


def test_offsets_that_fall_are_found_at_any_place(record_file, monkeypatch):
  monkeypatch.setattr(tfrecord, "_CHECKED_AT_ONCE", 3)
  path, _ = record_file
  tfrecord.RecordSet([path])
  index = np.load(path + tfrecord.INDEX_SUFFIX)
  for place in range(1, len(index) - 1):
    for value in (index[place - 1] + 15, index[place + 1] - 15, -1):
      wrong = index.copy()
      wrong[place] = value
      np.save(path + ".npy", wrong)
      os.replace(path + ".npy", path + tfrecord.INDEX_SUFFIX)
      with pytest.raises(DataError, match="not the index of"):
        tfrecord.RecordSet([path])


def test_records_take_little_memory(tmp_path, monkeypatch):
  """8 bytes each to write and to scan them, none with an index."""
  monkeypatch.setattr(tfrecord, "_CHECKED_AT_ONCE", 1000)
  path, count = str(tmp_path / "x.tfrecord"), 50_000

  def peak(function):
    tracemalloc.start()
    try:
      result = function()
      return result, tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  _, most = peak(lambda: written(path, itertools.repeat(b"", count)))
  assert most < 15 * count + (1 << 20)  # and the file's buffer
  indexed, most = peak(lambda: tfrecord.RecordSet([path]))
  assert len(indexed) == count and most < 2 * count
  os.unlink(path + tfrecord.INDEX_SUFFIX)
  scanned, most = peak(lambda: tfrecord.RecordSet([path]))
  assert len(scanned) == count and most < 15 * count


def test_more_files_than_may_be_open(tmp_path):
  """In a process of its own: the limit stays lowered."""
  path = str(tmp_path / "x.tfrecord")
  written(path, [b"one"])
  code = (
    "import resource, sys\n"
    "from records import tfrecord\n"
    "limit = resource.RLIMIT_NOFILE\n"
    "resource.setrlimit(limit, (64, 1000))\n"
    "files = tfrecord.RecordSet([sys.argv[1]] * 350)\n"
    "assert files.read(349) == b'one'\n"
    "tfrecord.RecordSet([sys.argv[1]] * 400)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, path], capture_output=True, text=True
  )
  assert done.stderr.splitlines()[-1].endswith(
    "400 record files are more than may be open: the limit is 1000 (ulimit "
    "-Hn). Make the records with fewer --num_shards."
  )
