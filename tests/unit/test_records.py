"""Records: the manifest says what they are, and the command shows it."""

import json
import math
import os
import re

import numpy as np
import pytest
from samples import (
  encode_example,
  listing,
  parsed,
  write_shard,
  write_vocabulary,
)

from common import errors, input_files
from common.files import file_sha256
from common.tensorflow_v1 import tf
from records import data_set, record_report, tfrecord
from text_encoders import kinds
from text_encoders.base import SPECIAL_TOKENS, TokenizerInfo
from tools import inspect_records, train_tokenizer


def test_expand_patterns(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("b-1", "b-0", "a", "b-0.index", "b.manifest.json", "b-2.tmp"):
    (tmp_path / name).touch()
  for name in ("d[1]", "d1", "e*", "ef"):
    (tmp_path / name).touch()
  os.makedirs("x")
  os.makedirs("z/y")
  os.symlink("z/y", "y")
  for name in ("a.txt", "b.txt", "c.md"):
    (tmp_path / "y" / name).touch()
  for patterns, want in {
    "b*, a,b-0": ["a", "b-0", "b-1"],
    "d[1],a": ["a", "d[1]"],
    "d[1-2]": ["d1"],
    "e*": ["e*"],
    "e?": ["e*", "ef"],
    "b.manifest.json": ["b.manifest.json"],
    "*.json,a": ["a", "b.manifest.json"],
  }.items():
    assert input_files.expand_patterns(patterns) == want, patterns
  for patterns, words in {
    "a,c*": r"c\*: no such file",
    " ,": "no input files",
    "b-0.*,a": r"b-0\.\*: matches b-0.index, which is a folder, a link",
    "a,x": "x: matches x, which is a folder",
    "y": r"y: is a folder: name its files, as y/\*.txt",
    "z,a": r"z: is a folder: name its files, as z/\*\*/\*.txt",
    "d[2]": r"d\[2\]: no such file \(from",
  }.items():
    with pytest.raises(data_set.DataError, match=words):
      input_files.expand_patterns(patterns)


MANIFEST = data_set.Manifest(
  max_seq_length=128,
  max_predictions_per_seq=20,
  examples_per_record=2,
  masking="dynamic",
  tokenizer=TokenizerInfo("wordpiece", "v", "ab", 100, True, 4),
  settings={"masked_lm_prob": 0.15, "do_whole_word_mask": True},
  counts={"examples": 5, "unigram_entropy": 6.5},
  files=(tfrecord.ShardInfo("x.tfrecord", 3, 30, "cd"),),
)


def test_manifest_round_trip(tmp_path):
  path = str(tmp_path / "x.manifest.json")
  MANIFEST.save(path)
  assert listing(str(tmp_path / "x.tfrecord")) == (path, MANIFEST)
  assert listing(str(tmp_path / "y.tfrecord")) is None


@pytest.mark.parametrize(
  "path, value, words",
  [
    ("version", 99, "version is 99, not 1"),
    ("files", [], "files"),
    ("files.0.records", 0, "files.*records is 0"),
    ("tokenizer.mask_id", 100, "tokenizer.mask_id"),
    ("settings.masked_lm_prob", 1.5, "settings.masked_lm_prob"),
    ("counts.examples", "5", "counts.examples"),
    ("counts.examples", 7, "counts.examples"),  # 3 records of 2 hold 6
    ("", '{"x": 1}', "version is missing"),
    ("", '{"version": 1,', "not readable as JSON"),
  ],
)
def test_unfit_manifests(tmp_path, path, value, words):
  """They are not taken for another program's: lengths would be others."""
  file = tmp_path / f"x{data_set.MANIFEST_SUFFIX}"
  MANIFEST.save(str(file))
  whole = json.loads(file.read_text())
  part, (*keys, last) = whole, path.split(".")
  for key in keys:
    part = part[int(key) if key.isdigit() else key]
  part[last] = value
  file.write_text(json.dumps(whole) if path else value)
  said = rf"x\.manifest\.json: .*{words}"
  with pytest.raises(data_set.DataError, match=said):
    listing(str(tmp_path / "x.tfrecord"))


def test_a_link_to_records_has_their_manifest(packed_run, tmp_path):
  (there,) = tmp_path.glob("*.manifest.json")
  here = tmp_path / "here"
  here.mkdir()
  (here / "data-0.tfrecord").symlink_to(tmp_path / "data-0.tfrecord")
  (here / "other.tfrecord").symlink_to(tmp_path / "data-1.tfrecord")
  paths = [str(here / "data-0.tfrecord"), str(here / "other.tfrecord")]
  found = data_set.find_manifests(paths)
  assert [*found] == paths[:1] and found[paths[0]][0] == str(there)
  own = data_set.find_manifests([str(tmp_path / "data-0.tfrecord")])
  assert data_set.digest(paths[:1], found) == data_set.digest([*own], own)
  assert data_set.digest(paths, found) is None


@pytest.mark.parametrize(
  "key", ['"version": 2', '"files": ["a.js"]', '"version": 1, "files": []']
)
def test_a_manifest_of_another_program_is_let_be(tmp_path, key):
  app, path = tmp_path / "app.manifest.json", str(tmp_path / "x.tfrecord")
  app.write_text(f'{{"name": "app", {key}}}')
  assert listing(path) is None
  MANIFEST.save(str(tmp_path / "x.manifest.json"))
  assert listing(path)[1] == MANIFEST
  app.write_text('{"name": "app", "vers')
  words = "app.manifest.json: not readable"
  with pytest.raises(data_set.DataError, match=words):
    listing(path)


# The command ------------------------------------------------------------------

VOCAB = [*SPECIAL_TOKENS, *"the cat dog sat play on mat .".split()]
VOCAB += ["##ing", "##s"]
S, P = 16, 5


def record_of(*examples, dynamic=False, size=1):
  """A record of examples: two segments' tokens (seen|was to predict), label."""
  rows = {n: [] for n in ("input_ids", "input_mask", "segment_ids")}
  masked = {"masked_lm_positions": [], "masked_lm_ids": []}
  for number, (a, b, _) in enumerate(examples, 1):
    tokens = [*f"[CLS] {a} [SEP]".split(), *f"{b} [SEP]".split()]
    for i, token in enumerate(tokens):
      seen, *was = token.split("|")
      if was:
        masked["masked_lm_positions"].append(len(rows["input_ids"]))
        masked["masked_lm_ids"].append(VOCAB.index(*was))
      rows["input_ids"].append(VOCAB.index(seen))
      rows["input_mask"].append(number)
      rows["segment_ids"].append(int(i >= len(a.split()) + 2))
  filled = lambda values, n: np.array(values + [0] * (n - len(values)))
  made = {name: filled(values, S) for name, values in rows.items()}
  made["next_sentence_labels"] = filled([e[2] for e in examples], size)
  if dynamic:
    made["is_continuation"] = np.array(
      [VOCAB[i].startswith("##") for i in made["input_ids"]], np.int64
    )
    return made
  weights = filled([1.0] * len(masked["masked_lm_ids"]), P).astype(np.float32)
  made |= {name: filled(values, P) for name, values in masked.items()}
  return made | {"masked_lm_weights": weights}


ONE = ("the [MASK]|cat sat play [MASK]|##ing", "on dog|the mat|mat .", 0)
TWO = ("dog [MASK]|##s", "##ing . cat", 1)


def write_set(folder, files, **changes):
  """Writes records by file name, the vocabulary beside, and the manifest."""
  vocab_file = write_vocabulary(folder / "vocab.txt", VOCAB)
  infos = [write_shard(folder / name, made) for name, made in files.items()]
  first, *_ = next(iter(files.values()))
  tokenizer = TokenizerInfo(
    "wordpiece", "vocab.txt", file_sha256(vocab_file), len(VOCAB), True,
    VOCAB.index("[MASK]"),
  )  # fmt: skip
  values = dict(
    max_seq_length=S,
    max_predictions_per_seq=P,
    examples_per_record=len(first["next_sentence_labels"]),
    masking="dynamic" if "is_continuation" in first else "static",
    tokenizer=tokenizer,
    settings={"masked_lm_prob": 0.3, "do_whole_word_mask": True},
    counts={"examples": 5, "unigram_entropy": 1.23456},
    files=tuple(infos),
  )
  manifest = data_set.Manifest(**values | changes)
  manifest.save(str(folder / f"x{data_set.MANIFEST_SUFFIX}"))
  return manifest


@pytest.fixture
def look(capsys):
  """The command, in this process.

  Words of it -> (what is printed, lines on stderr but progress and its error).
  """

  def run(*words):
    settings, names = parsed(inspect_records.InspectSettings, words)
    error = []
    try:
      inspect_records.main(settings, *names)
    except errors.UserError as e:
      error.append(str(e))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not re.search(r" MB\b", line)]
    return out, lines + error

  return run


def test_a_look(tmp_path, look):
  """All that the command prints of two records, checked by hand."""
  made = [record_of(ONE, size=3), record_of(TWO, ("cat", "dog", 0), size=3)]
  counts = {"examples": 3, "unigram_entropy": 1.23456}
  manifest = write_set(tmp_path, {"a": made}, counts=counts)
  sha256, size = manifest.tokenizer.sha256, manifest.files[0].bytes / 1e6
  out, told = look(tmp_path / "a*", "--num_examples=3")
  assert not told
  assert (
    out
    == f"""\
{tmp_path}/x.manifest.json
  lengths     16 tokens, at most 5 to predict
  packing     examples in a record: at most 3, 1.50 on average
  masks       static, in the records
  tokenizer   wordpiece vocab.txt, 15 tokens, lower-cased, SHA-256
              {sha256}
  settings    masked_lm_prob=0.3, do_whole_word_mask=True
  counts      examples 3, unigram entropy 1.235
  files       1 with 2 records, {size:.1f} MB

{{seen|was}} is a token to predict, as the model sees it and as it was.

a, record 0
  12 tokens, 4 to predict; B follows A
  A: [CLS] the {{[MASK]|cat}} sat play{{[MASK]|##ing}} [SEP]
  B: on {{dog|the}} {{mat|mat}} . [SEP]

a, record 1, example 1 of 2
  8 tokens, 1 to predict; B is from elsewhere
  A: [CLS] dog{{[MASK]|##s}} [SEP]
  B: ##ing . cat [SEP]

a, record 1, example 2 of 2
  5 tokens, 0 to predict; B follows A
  A: [CLS] cat [SEP]
  B: dog [SEP]

  records     2 in 1 file
  fill        78.1% of the tokens are not padding, 20.0% of them to predict
  examples    1.50 in a record; B is from elsewhere in 33.3%

1 file, 2 records, all checksums right
"""
  )


def test_a_look_at_records_without_masks(tmp_path, look):
  example = ("the cat play ##ing ##s", "dog play ##s on", 0)
  made = [record_of(example, dynamic=True) for _ in range(40)]
  write_set(tmp_path, {"a": made})
  out, told = look(tmp_path / "a", "--num_examples=40")
  assert not told
  assert "masks       dynamic, drawn when records are read" in out
  assert "read: with a manifest, here once.\n{seen|was} is a" in out
  texts = re.findall("  A: (.*)\n  B: (.*)\n", out)
  assert len(texts) == 40 and len(set(texts)) > 10
  for a, b in texts:
    shown = re.sub(r"\{[^|]+\|(##)?([^}]+)\}", r"\2", f"{a} {b}")
    assert shown == "[CLS] the cat playings [SEP] dog plays on [SEP]"
    for pieces in (("play", "##ing", "##s"), ("play", "##s")):
      chosen = {f"|{p}}}" in (a if len(pieces) == 3 else b) for p in pieces}
      assert len(chosen) == 1


def test_files_of_google_bert(tmp_path, look):
  path = str(tmp_path / "google")
  with tf.python_io.TFRecordWriter(path) as writer:
    for features in (record_of(ONE), record_of(TWO)):
      example = tf.train.Example()
      for name, values in reversed(features.items()):
        kind = "float_list" if values.dtype == np.float32 else "int64_list"
        getattr(example.features.feature[name], kind).value.extend(values)
      writer.write(example.SerializeToString())
  vocabulary = write_vocabulary(tmp_path / "vocab.txt", VOCAB)
  out, told = look(path, f"--vocab_file={vocabulary}")
  assert not told
  assert f"{path}\n  no manifest\n" in out
  assert "  A: [CLS] the {[MASK]|cat} sat play{[MASK]|##ing} [SEP]\n" in out
  assert "1 file, 2 records, all checksums right\n" in out
  out, told = look(path)
  assert not told
  assert "Ids, not words: --vocab_file, --spm_model_file or" in out
  assert "  A: 2 5 {4|6} 8 9 {4|13} 3\n" in out


def test_pieces_of_sentencepiece(tmp_path, look):
  text = "Ein Mops kam in die Küche ## und stahl dem Koch ein Ei"
  model = tmp_path / "m.model"
  train_tokenizer.train_sentencepiece([text] * 20, str(model), 50, False)
  encoder = kinds.load_tokenizer(do_lower_case=False, spm_model_file=str(model))
  (ids,) = encoder.encode_batch([text])
  tokens = [encoder.cls_id, *ids, encoder.sep_id, *ids, encoder.sep_id]
  size, place = len(tokens), 3  # which is to be predicted
  features = {
    "input_ids": np.array(tokens),
    "input_mask": np.ones(size, int),
    "segment_ids": np.arange(size) >= len(ids) + 2,
    "next_sentence_labels": np.array([1]),
    "masked_lm_positions": np.array([place]),
    "masked_lm_ids": np.array([tokens[place]]),
    "masked_lm_weights": np.ones(1),
  }
  features["input_ids"][place] = encoder.mask_id
  write_shard(tmp_path / "a", [features])
  out, told = look(tmp_path / "a", f"--spm_model_file={model}")
  assert not told
  a, b = re.findall("  A: (.*?)\n  B: (.*?)\n\n", out, re.DOTALL)[0]
  assert b.split() == f"{text} [SEP]".split()
  shown = re.sub(r"\{\[MASK\]\|\u2581?(.*?)\}", r"\1", a)
  assert shown != a and shown.split() == f"[CLS] {text} [SEP]".split()


def test_the_vocabulary_is_found_by_its_hash(tmp_path, look):
  (tmp_path / "records").mkdir()
  manifest = write_set(tmp_path / "records", {"a": [record_of(ONE)]})
  path, vocab_file = (tmp_path / f"records/{n}" for n in ("a", "vocab.txt"))
  vocab_file.rename(tmp_path / "vocab.txt")
  # Of that name, but not that.
  vocab_file.write_text("\n".join([*VOCAB, "more"]))
  assert "[CLS] the {[MASK]|cat}" in look(path)[0]
  (tmp_path / "vocab.txt").rename(tmp_path / "mine.txt")
  out, _ = look(path)
  assert "Ids, not words" in out and "2 5 {4|6}" in out
  out, _ = look(path, f"--vocab_file={tmp_path}/mine.txt")
  assert "[CLS] the {[MASK]|cat}" in out
  assert look(path, f"--vocab_file={vocab_file}")[1] == [
    f"{vocab_file} has SHA-256 {file_sha256(str(vocab_file))}, but the records "
    f"were made with vocab.txt of SHA-256 {manifest.tokenizer.sha256}: give "
    "that file"
  ]


def test_all_damage_is_told(tmp_path, look):
  names = ["bit", "good", "ids", "sha"]
  made = [record_of(ONE), record_of(TWO), record_of(ONE)]
  bad = record_of(TWO)
  bad["input_ids"][3] = len(VOCAB)
  write_set(tmp_path, {n: [*made, bad] if n == "ids" else made for n in names})
  offsets = np.load(tmp_path / "bit.index")
  with open(tmp_path / "bit", "r+b") as f:
    f.seek(offsets[1] + 40)
    f.write(b"\xff")
  write_shard(tmp_path / "sha", [*made[:2], record_of(TWO)])
  paths = [tmp_path / name for name in names]
  out, told = look(*paths, "--num_examples=4")
  for line, words in zip(
    told,
    [
      f"{tmp_path}/bit: record 1 at byte {offsets[1]} is damaged (checksum",
      f"{tmp_path}/ids: record 3 at byte {offsets[3]}: input_ids holds 15, exp",
      f"{tmp_path}/sha: records, bytes or SHA-256 are not those",
    ],
    strict=False,
  ):
    assert line.startswith(f"error: {words}")
  assert told[3:] == ["3 of 4 files are damaged"]
  assert "  records     3 in 1 file; 3 other files are damaged\n" in out
  assert "no more examples of bit: " in out and "good, record 0" in out
  # Neither the manifest nor records that the sample leaves out are checked.
  out, told = look(tmp_path / "sha", "--noverify")
  assert not told
  assert out.endswith("1 file, 3 records, not verified\n")


@pytest.mark.parametrize(
  "change, words",
  [
    (None, "not a tf.train.Example"),
    ({"segment_ids": None}, "no feature 'segment_ids'"),
    ({"segment_ids": [7] * 8}, "segment_ids holds 7, expected 0 to 1"),
    ({"input_ids": [1] * 9}, "input_ids has 9 values of int64"),
    ({"input_mask": [1.0] * 8}, "input_mask has 8 values of float32"),
    ({"input_mask": [3] * 8}, "input_mask holds 3, expected 0 to 2"),
    ({"input_mask": [1, 1, 0, 1, 1, 0, 0, 0]}, "input_mask is not 1 for"),
    ({"input_mask": [1, 1, 2, 2, 1, 1, 0, 0]}, "input_mask is not 1 for"),
    ({"masked_lm_ids": [7, 9, 0]}, "ids holds 9, expected 0 to 8"),
    ({"masked_lm_positions": [1, 7, 0]}, "positions holds 7, padding"),
    ({"masked_lm_positions": [1, 1, 0]}, "positions holds a position twice"),
    ({"masked_lm_weights": [1, 1, 0]}, "weights has 3 values of int64"),
    ({"masked_lm_weights": [math.nan, 1, 0]}, "holds nan, expected 0 or 1"),
  ],
)
def test_records_of_another_shape(tmp_path, change, words):
  sound = {
    "input_ids": [2, 5, 3, 5, 6, 3, 0, 0],
    "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
    "segment_ids": [0, 0, 0, 1, 1, 1, 0, 0],
    "next_sentence_labels": [1, 0],
    "masked_lm_positions": [1, 3, 0],
    "masked_lm_ids": [7, 8, 0],
    "masked_lm_weights": [1.0, 1.0, 0.0],
  }
  with tfrecord.shard_writer(str(tmp_path / "a")) as writer:
    for values in (sound, sound | (change or {})):
      arrays = {n: np.array(v) for n, v in values.items() if v is not None}
      encoded = encode_example(arrays)
      writer.write(encoded if change or values is sound else b"\x0a")
  files = tfrecord.RecordSet([str(tmp_path / "a")])
  features = data_set.record_features(8, 3, 2, 9)
  record = record_report.read_record(files, 0, features)
  assert record["masked_lm_positions"].tolist() == [1, 3, 0]
  with pytest.raises(
    data_set.DataError, match=rf"a: record 1 at byte.*{words}"
  ):
    record_report.read_record(files, 1, features)


def test_a_sample(tmp_path, look):
  made = [record_of(ONE if i < 1000 else TWO) for i in range(2000)]
  write_set(tmp_path, {"a": made[:500], "b": made[500:]})
  out, told = look(tmp_path / "[ab]", "--noverify", "--num_examples=0")
  assert not told and "[CLS]" not in out
  assert "2,000 in 2 files; the counts below are from 1,000 of them\n" in out
  assert "in a record; B is from elsewhere in 33.3%\n" in out
  out, _ = look(tmp_path / "[ab]", "--num_examples=0", "--num_workers=1")
  assert "  records     2,000 in 2 files\n" in out
  assert "in a record; B is from elsewhere in 50.0%\n" in out


def test_data_sets_are_shown_one_by_one(tmp_path, look):
  for name, example in (("x", ONE), ("y", TWO)):
    (tmp_path / name).mkdir()
    write_set(tmp_path / name, {n: [record_of(example)] for n in "ac"})
    os.unlink(tmp_path / name / "c")
  os.unlink(tmp_path / "y" / "vocab.txt")
  (tmp_path / "y" / "b").write_bytes((tmp_path / "x" / "a").read_bytes())
  out, _ = look(f"{tmp_path}/*/a", tmp_path / "y" / "b", "--num_examples=1")
  titles = [line for line in out.splitlines() if line.startswith("/")]
  names = ("x/x.manifest.json", "y/x.manifest.json", "y/b")
  assert titles == [f"{tmp_path}/{name}" for name in names]
  assert out.count("a, record 0") == 2 and out.count("b, record 0") == 1
  assert out.count("  missing     1, such as c\n") == 2
  assert out.endswith("3 files, 3 records, all checksums right\n")
  # A glob that the shell expands gives the files beside the records, too.
  names = [tmp_path / "x" / n for n in ("a", "a.index", "x.manifest.json")]
  assert look(*names)[0].endswith("1 file, 1 record, all checksums right\n")
