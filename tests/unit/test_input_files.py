"""What a file holds is told by its first bytes, whoever reads it."""

import bz2
import gzip
import io
import lzma
import os
import pathlib
import re
import tarfile
import zipfile

import numpy as np
import pytest

import predict
from checkpoints import checkpoint_files
from common import input_files, json_files
from common.errors import DataError, UserError
from corpus import tables, text_files
from interop import inference, minimal_pairs
from model import huggingface_weights
from records import data_set, tfrecord
from text_encoders import kinds

POINTER = (
  b"version https://git-lfs.github.com/spec/v1\n"
  b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
  b"\nsize 12345\n"
)
ANNEX = b"/annex/objects/SHA256E-s31390--f50d7ac4c6b9031379986bc362fcefb65f1e\n"


def archived(open_archive):
  buffer = io.BytesIO()
  open_archive(buffer)
  return buffer.getvalue()


def tar(buffer):
  with tarfile.open(fileobj=buffer, mode="w") as archive:
    archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())


def zipped(buffer):
  with zipfile.ZipFile(buffer, "w") as archive:
    archive.writestr("a.txt", "one\n")


KINDS = {
  "git lfs": (POINTER, "holds a Git LFS pointer: run `git lfs pull`"),
  "git annex": (ANNEX, "holds a git-annex pointer: run `git annex get`"),
  "parquet": (b"PAR1\x15\0\x15\x1a" + bytes(20) + b"PAR1", "Parquet: .*jsonl"),
  "arrow": (b"ARROW1\0\0" + b"\xff" * 4 + bytes(20), "Arrow: .*jsonl"),
  "zip": (archived(zipped), "a ZIP archive: unpack it"),
  "tar": (archived(tar), "a tar archive: unpack it"),
  "tar.gz": (gzip.compress(archived(tar)), "a tar archive: unpack it"),
  "lz4": (b"\x04\x22M\x18d@\xa7" + bytes(9), "holds lz4: unpack it"),
}


@pytest.mark.parametrize("content, words", KINDS.values(), ids=KINDS)
def test_what_is_no_text_is_told_by_its_name(tmp_path, content, words):
  """Whatever the file is called."""
  for name in ("wiki_00", "t.jsonl", "t.gz"):
    path = tmp_path / name
    path.write_bytes(content)
    text = text_files.TextFormat(encoding="latin-1")
    with pytest.raises(UserError, match=f"{name}: holds .*{words[6:]}") as e:
      list(text_files.read_lines([str(path)], text))
    assert "--encoding" not in str(e.value)


@pytest.mark.parametrize(
  "first", ["PAR1 is a gene.", "PK", "BZh9 is a name.", "version https://x"]
)
def test_text_that_begins_alike_is_text(tmp_path, first):
  path = tmp_path / "t.txt"
  path.write_text(f"{first}\n")
  assert list(text_files.read_lines([str(path)])) == [first]


RECORD, FORMAT = b'{"text": "a"}\n', input_files.Format
FORMATS = {
  "by name": (FORMAT.CSV, b"a", "a.csv A.CSV.gz"),
  "quotes": (FORMAT.TSV, b'"a\tb', "a.tsv a.TSV.bz2"),
  "not by content": (FORMAT.TEXT, RECORD, "a.txt a.txt.gz"),
  "records": (
    FORMAT.JSON_LINES, b"\xef\xbb\xbf\n " + RECORD * 99,
    "a.jsonl a.ndjson.xz a.json a.json.gz part-00000 download",
  ),
  "one long record": (FORMAT.JSON_LINES, b'{"a": "%s"}' % (b"x" * 99999), "a"),
  "JSON": (FORMAT.JSON, b'{\n "data": []\n}', "a.json"),
  "a list": (FORMAT.JSON, b'[{"a": 1}]', "a.json"),
  "braces": (FORMAT.TEXT, b"{exit} A king.\n", "a part-0 a.md"),
  "braces in braces": (FORMAT.TEXT, b'{"a":' * 99999, "a part-0 a.md"),
  "nothing": (FORMAT.EMPTY, b"", "a.jsonl _SUCCESS a.csv.gz a.gz a.json"),
  "nothing inside": (FORMAT.EMPTY, gzip.compress(b""), "a a.csv _x"),
  "tables": (FORMAT.PARQUET, KINDS["parquet"][0], "a.txt part-0"),
}  # fmt: skip
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("case", FORMATS)
def test_the_format_of_a_file(tmp_path, case):
  want, content, names = FORMATS[case]
  for name in names.split():
    pack = PACK.get(os.path.splitext(name)[1]) if content else None
    (tmp_path / name).write_bytes(pack(content) if pack else content)
    assert input_files.format_of(str(tmp_path / name)) is want, name


def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch):
  """The work of others stays, as the next start may read the file."""
  (tmp_path / "a.gz").write_bytes(gzip.compress(b"a line\n" * 10**5)[:-100])
  with pytest.raises(DataError, match="a.gz: not a whole gzip file"):
    [*text_files.read_lines([str(tmp_path / "a.gz")])]

  def fails(*_):
    raise OSError(116, "Stale file handle")

  monkeypatch.setattr(gzip.GzipFile, "read1", fails)
  monkeypatch.setattr(gzip.GzipFile, "readinto", fails)
  with pytest.raises(OSError, match="Stale file handle"):
    [*text_files.read_lines([str(tmp_path / "a.gz")])]


def test_a_query_ends_no_name():
  for query in ("", "?download=true", "?X-Amz-Signature=a.b/c.txt#d"):
    url = f"https://host/a.b/Texts.jsonl.gz{query}"
    assert input_files.ending(url) == ".jsonl"
  assert input_files.ending("why?.txt") == ".txt"


def test_empty_files_among_others(tmp_path, capsys):
  for name in ("_metadata", "_SUCCESS", "part-0.jsonl", "part-1.jsonl"):
    (tmp_path / name).write_bytes(RECORD if name == "part-1.jsonl" else b"")
  (tmp_path / "_committed_17").write_bytes(b"{")
  paths = input_files.expand_patterns(f"{tmp_path}/*")
  assert [path[-6:] for path in paths] == [".jsonl"] * 2
  assert list(text_files.read_lines(paths)) == ["", "a", ""]
  assert "1 empty file passed over: " in capsys.readouterr().err


def of_checkpoint(path):
  return checkpoint_files.Checkpoint(path.partition(".ckpt")[0] + ".ckpt")


def of_run(path):
  """A checkpoint with a marker, of which a file has become a pointer."""
  files = checkpoint_files.CheckpointFiles(os.path.dirname(path), keep=1)
  files.write(3, {"a": np.ones(3, np.float32)})
  files.wait()
  pathlib.Path(path).write_bytes(POINTER)
  files.newest_whole()


def in_folder(read):
  return lambda path: read(os.path.dirname(path))


def of_sentencepiece(path):
  return kinds.load_tokenizer(spm_model_file=path)


READERS = {
  "text": ("wiki.txt", lambda path: text_files.split_into_pieces([path])),
  "records": ("a.tfrecord", lambda path: tfrecord.RecordSet([path])),
  "a manifest": ("a.manifest.json", data_set.Manifest.load),
  "a vocabulary": ("vocab.txt", kinds.load_tokenizer),
  "sentencepiece": ("spiece.model", of_sentencepiece),
  "a table": ("dev.tsv", tables.read_table),
  "pairs": ("blimp.jsonl", minimal_pairs.read),
  "lines": ("lines.txt", lambda path: list(predict._lines(path, path))),
  "a tokenizer": ("tokenizer.json", lambda p: json_files.read_own(p, "copy")),
  "tensors": ("model.safetensors", in_folder(huggingface_weights.read_tensors)),
  "shapes": ("model.safetensors", in_folder(huggingface_weights.read_shapes)),
  "shards": (
    "model.safetensors.index.json", in_folder(huggingface_weights.files)
  ),
  "pytorch": ("pytorch_model.bin", in_folder(huggingface_weights.files)),
  "values": ("bert_model.ckpt.data-00000-of-00001", of_checkpoint),
  "an index": ("bert_model.ckpt.index", of_checkpoint),
  "a run": ("model.ckpt-3.data-00000-of-00001", of_run),
  "an export": ("saved_model.pb", in_folder(inference.open_export)),
  "variables": (
    "variables/variables.data-00000-of-00001",
    lambda path: inference.open_export(path.partition("/variables")[0]),
  ),
}  # fmt: skip


@pytest.mark.parametrize("file, read", READERS.values(), ids=READERS)
def test_a_pointer_of_git_lfs_is_told_by_every_reader(tmp_path, file, read):
  path = tmp_path / file
  path.parent.mkdir(exist_ok=True)
  (tmp_path / "saved_model.pb").write_bytes(b"")
  path.write_bytes(POINTER)
  told = f"{path}: holds a Git LFS pointer: run `git lfs pull`"
  with pytest.raises(UserError, match=re.escape(told)):
    read(str(path))


def test_a_folder_is_no_file_to_write(tmp_path):
  """It is known before any work is done."""
  for path in (str(tmp_path), f"{tmp_path}/new/"):
    with pytest.raises(UserError, match=f"{path} is a folder: give another"):
      input_files.check_not_written([], "--input_file", path)
  input_files.check_not_written([], "--input_file", f"{tmp_path}/new")
