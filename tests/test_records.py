"""Records: TensorFlow reads what we write, and damage is told, not read."""

import dataclasses
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import records
from tensorflow_v1 import tf


def feature_values(record):
  """name -> list of values, by TensorFlow."""
  example = tf.train.Example.FromString(record)
  return {
    name: list(
      feature.float_list.value
      if feature.HasField("float_list")
      else feature.int64_list.value
    )
    for name, feature in example.features.feature.items()
  }


@settings(deadline=None, max_examples=200)
@given(
  st.dictionaries(
    st.text(min_size=1, max_size=200).filter(lambda s: s.isprintable()),
    st.one_of(
      st.lists(st.integers(0, 2**63 - 1), max_size=20),
      st.lists(st.integers(0, 300), min_size=60, max_size=300),
      st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=5,
  )
)
def test_example_round_trip(features):
  arrays = {
    name: np.array(v, np.float32 if v and type(v[0]) is float else np.int64)
    for name, v in features.items()
  }
  assert feature_values(records.encode_example(arrays)) == features


def test_rows_are_encoded_as_single_examples():
  rng = np.random.default_rng(0)
  batch = {
    "ids": rng.integers(0, 30522, (5, 64), dtype=np.int32),
    "small": rng.integers(0, 100, (5, 3)),
    "weights": rng.random((5, 7), np.float32),
  }
  batch["ids"][2] = 1  # a row of short varints between long ones
  assert records.encode_examples(batch) == [
    records.encode_example({k: v[i] for k, v in batch.items()})
    for i in range(5)
  ]


def test_bytes_are_those_of_tensorflow():
  # One feature: with several the order of a map is free.
  values = [0, 1, 127, 128, 16384, 30521, 2**40]
  want = tf.train.Example(
    features=tf.train.Features(
      feature={
        "x" * 130: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
      }
    )
  ).SerializeToString()
  assert records.encode_example({"x" * 130: np.array(values)}) == want


def test_unencodable_features():
  with pytest.raises(ValueError, match="negative value -1"):
    records.encode_example({"x": np.array([3, -1])})
  with pytest.raises(ValueError, match=r"feature x has shape \(1, 1\)"):
    records.encode_example({"x": np.array([[3]])})
  with pytest.raises(ValueError):
    records.encode_examples({"x": np.ones((2, 1)), "y": np.ones((3, 1))})


@pytest.fixture
def record_file(tmp_path):
  """(path, payloads) of ten records of different lengths."""
  payloads = [bytes([i]) * (5 * i + 1) for i in range(10)]
  path = str(tmp_path / "x.tfrecord")
  with records.ShardWriter(path) as writer:
    for payload in payloads:
      writer.write(payload)
  assert writer.info == records.ShardInfo(
    "x.tfrecord", 10, os.path.getsize(path), records.file_sha256(path)
  )
  return path, payloads


@pytest.mark.parametrize("with_index", [True, False])
def test_files_round_trip(record_file, with_index):
  path, payloads = record_file
  if not with_index:
    os.unlink(path + records.INDEX_SUFFIX)
  assert list(records.RecordSet([path])) == payloads
  by_tensorflow = tf.python_io.tf_record_iterator(path)
  assert list(by_tensorflow) == payloads


def test_files_of_tensorflow_are_read(tmp_path):
  path = str(tmp_path / "tf.tfrecord")
  with tf.python_io.TFRecordWriter(path) as writer:
    writer.write(b"one")
    writer.write(b"two" * 1000)
  assert list(records.RecordSet([path])) == [b"one", b"two" * 1000]


def test_numbers_run_through_the_files(record_file, tmp_path):
  path, payloads = record_file
  other = str(tmp_path / "y.tfrecord")
  with records.ShardWriter(other) as writer:
    writer.write(b"last")
  both = records.RecordSet([path, other])
  assert len(both) == 11 and both.read(10) == b"last"
  several = np.array([3, 10, 0, 3])
  assert both.read_many(several) == [payloads[3], b"last", b"\0", payloads[3]]
  assert both.locate(9) == (path, 9) and both.locate(10) == (other, 0)


def test_reading_ahead_asks_for_the_bytes_of_the_records(
  record_file, tmp_path, monkeypatch
):
  """Over the end of a file and around the end of all; in parts, if large."""
  large = str(tmp_path / "y.tfrecord")
  with records.ShardWriter(large) as writer:
    writer.write(bytes(300_000))
    writer.write(b"last")
  both = records.RecordSet([record_file[0], large])
  offsets = [np.load(p + records.INDEX_SUFFIX) for p in both.paths]
  asked = []

  def fadvise(fd, start, size, advice):
    assert advice == os.POSIX_FADV_WILLNEED and size <= 1 << 17
    asked.append((os.path.realpath(f"/proc/self/fd/{fd}"), start, start + size))

  monkeypatch.setattr(os, "posix_fadvise", fadvise)
  both.read_ahead(8, 3)
  first, *rest = asked
  assert first == (record_file[0], offsets[0][8], offsets[0][10])
  assert len(rest) == 3 and {path for path, _, _ in rest} == {large}
  assert [start for _, start, _ in rest] == [0, *(end for _, _, end in rest)][
    :3
  ]
  assert rest[-1][2] == offsets[1][1]
  asked.clear()
  both.read_ahead(11, 2)
  assert sorted(asked) == [
    (record_file[0], 0, offsets[0][1]),
    (large, offsets[1][1], offsets[1][2]),
  ]


def test_an_error_leaves_no_file(tmp_path):
  with pytest.raises(RuntimeError):
    with records.ShardWriter(str(tmp_path / "x")) as writer:
      writer.write(b"one")
      raise RuntimeError
  assert os.listdir(tmp_path) == []


def change_byte(path, position):
  with open(path, "r+b") as f:
    f.seek(position)
    old = f.read(1)[0]
    f.seek(position)
    f.write(bytes([old ^ 0x10]))


def test_damaged_record_is_named(record_file):
  path, payloads = record_file
  offsets = np.load(path + records.INDEX_SUFFIX)
  change_byte(path, int(offsets[7]) + 12 + 3)  # in the data
  opened = records.RecordSet([path])
  assert opened.read(6) == payloads[6]
  with pytest.raises(
    records.DataError, match=r"x\.tfrecord: record 7 .* is damaged"
  ):
    opened.read(7)


def test_damaged_length_is_named(record_file):
  path, _ = record_file
  offsets = np.load(path + records.INDEX_SUFFIX)
  change_byte(path, int(offsets[4]))
  with pytest.raises(records.DataError, match="record 4 .* is damaged"):
    records.RecordSet([path]).read(4)
  os.unlink(path + records.INDEX_SUFFIX)
  with pytest.raises(records.DataError, match="record 4 .*damaged length"):
    records.RecordSet([path])


@pytest.mark.parametrize("kept, words", [(5, "in its header"), (20, "cut off")])
def test_truncated_file(record_file, kept, words):
  path, _ = record_file
  last = int(np.load(path + records.INDEX_SUFFIX)[-2])
  os.truncate(path, last + kept)
  with pytest.raises(records.DataError, match="index does not fit"):
    records.RecordSet([path])
  os.unlink(path + records.INDEX_SUFFIX)
  with pytest.raises(records.DataError, match=f"record 9 .*{words}"):
    records.RecordSet([path])


def test_unreadable_files(tmp_path, record_file):
  empty = tmp_path / "empty.tfrecord"
  empty.touch()
  with pytest.raises(records.DataError, match=r"empty\.tfrecord.*empty"):
    records.RecordSet([str(empty)])
  with pytest.raises(records.DataError, match="nowhere: No such file"):
    records.RecordSet([str(tmp_path / "nowhere")])
  text = tmp_path / "text.tfrecord"
  text.write_text("this is no record file at all\n")
  with pytest.raises(records.DataError, match="not a TFRecord file"):
    records.RecordSet([str(text)])
  path, _ = record_file
  with open(path + records.INDEX_SUFFIX, "wb") as f:
    f.write(b"noise")
  with pytest.raises(records.DataError, match=r"\.index: not a record index"):
    records.RecordSet([path])


def test_index_of_another_file(record_file):
  path, _ = record_file
  index = np.load(path + records.INDEX_SUFFIX)
  for wrong in (index[:-1], index[::-1], index.astype(np.int32), index[None]):
    with open(path + records.INDEX_SUFFIX, "wb") as f:
      np.save(f, wrong)
    with pytest.raises(records.DataError, match="index does not fit"):
      records.RecordSet([path])


def test_expand_patterns(tmp_path):
  for name in ("b-1", "b-0", "a", "b-0.index", "b.manifest.json", "b-2.tmp"):
    (tmp_path / name).touch()
  found = records.expand_patterns(f"{tmp_path}/b*, {tmp_path}/a,{tmp_path}/b-0")
  assert found == [str(tmp_path / n) for n in ("a", "b-0", "b-1")]
  with pytest.raises(records.DataError, match=r"c\*: no such file"):
    records.expand_patterns(f"{tmp_path}/a,{tmp_path}/c*")
  with pytest.raises(records.DataError, match="no input files"):
    records.expand_patterns(" ,")


MANIFEST = records.Manifest(
  max_seq_length=128,
  max_predictions_per_seq=20,
  examples_per_record=1,
  masking="static",
  tokenizer=records.TokenizerInfo("wordpiece", "v.txt", "ab", 100, True),
  settings={"random_seed": 1},
  counts={"examples": 3, "unigram_entropy": 6.5},
  files=(records.ShardInfo("x.tfrecord", 3, 30, "cd"),),
)


def test_manifest_round_trip(tmp_path):
  path = str(tmp_path / "x.manifest.json")
  MANIFEST.save(path)
  assert records.Manifest.load(path) == MANIFEST
  assert records.find_manifest(str(tmp_path / "x.tfrecord")) == (path, MANIFEST)
  assert records.find_manifest(str(tmp_path / "y.tfrecord")) is None


@pytest.mark.parametrize(
  "change, words",
  [
    ({"version": 99}, "manifest version 99"),
    ({"surprise": 1}, "surprise"),
    ({"files": None}, "not a manifest"),
    ({"tokenizer": {"kind": "x"}}, "not a manifest"),
  ],
)
def test_unfit_manifests(tmp_path, change, words):
  path = tmp_path / "x.manifest.json"
  path.write_text(json.dumps({**dataclasses.asdict(MANIFEST), **change}))
  with pytest.raises(records.DataError, match=words):
    records.Manifest.load(str(path))


def test_manifest_that_is_no_json(tmp_path):
  path = tmp_path / "x.manifest.json"
  path.write_text('{"version": 1,')
  with pytest.raises(
    records.DataError, match="x.manifest.json: not a readable"
  ):
    records.Manifest.load(str(path))
