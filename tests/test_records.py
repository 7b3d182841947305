"""Records: the manifest says what they are, and the command shows it."""

import dataclasses
import json

import pytest

import records
import tfrecord
import tokenization


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
  tokenizer=tokenization.TokenizerInfo("wordpiece", "v.txt", "ab", 100, True),
  settings={"random_seed": 1},
  counts={"examples": 3, "unigram_entropy": 6.5},
  files=(tfrecord.ShardInfo("x.tfrecord", 3, 30, "cd"),),
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
