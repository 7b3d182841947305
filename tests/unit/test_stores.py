"""Files at URLs are as files: read through a cache, written when whole."""

import concurrent.futures
import contextlib
import fcntl
import gzip
import http.server
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading

import fsspec
import pytest
import runs
from fsspec.implementations.memory import MemoryFileSystem
from samples import contents, create, feature_values, write_documents

from common import input_files, stores
from common.errors import DataError, UserError
from corpus import documents, text_files
from corpus.documents import DocumentFormat
from records import data_set, record_files, record_shape, tfrecord
from retrieval import texts
from text_encoders import tokenizer_files
from tools import prepare_corpus
from workers import launchers, shared_work


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  folder = tmp_path_factory.mktemp("cache") / "inside"
  monkeypatch.setenv("PERSEUS_CACHE", str(folder))
  MemoryFileSystem.store.clear()
  MemoryFileSystem.pseudo_dirs[:] = [""]
  return folder


def put(url, content):
  with fsspec.open(url, "wb") as f:
    f.write(content)


def there(store):
  """File name -> bytes."""
  return {os.path.basename(n): f.getvalue() for n, f in store.store.items()}


def copies(cache):
  return sorted(p for p in cache.iterdir() if p.suffix != ".tmp")


class Flaky(MemoryFileSystem):
  """A store that ends connections when `left` bytes have gone over them."""

  protocol = "flaky"
  store: dict = {}
  pseudo_dirs = [""]
  left = 0

  def _open(self, path, mode="rb", **options):
    return FlakyFile(super()._open(path, mode, **options))


class FlakyFile(contextlib.closing):
  def __enter__(self):
    return self

  def __getattr__(self, name):
    return getattr(self.thing, name)

  def _go(self, count):
    Flaky.left -= count
    if Flaky.left < 0:
      raise ConnectionResetError("the connection\nended")

  def read(self, size):
    block = self.thing.read(min(size, 100))
    self._go(len(block))
    return block

  def write(self, block):
    self._go(len(block))
    return self.thing.write(block)


class Hosted(MemoryFileSystem):
  """A store whose own names lack the host, as SFTP's."""

  protocol = "hosted"
  store: dict = {}
  pseudo_dirs = [""]

  @classmethod
  def _strip_protocol(cls, path):
    inside = path.removeprefix("hosted://host").strip("/")
    return f"/{inside}" if inside else ""


@pytest.fixture
def flaky():
  fsspec.register_implementation("flaky", Flaky, clobber=True)
  Flaky.store.clear()
  Flaky.left = sys.maxsize
  return Flaky


# Reading ----------------------------------------------------------------------


def test_names_and_globs():
  for name in ("b.txt", "a.txt", "a.txt.index", "sub/c.txt", "x[1].txt"):
    put(f"memory://data/{name}", b"x")
  expand = input_files.expand_patterns
  found = [f"memory://data/{n}" for n in ("a.txt", "b.txt")]
  assert expand("memory://data/?.txt") == found
  found = [f"memory://data/{n}" for n in ("sub/c.txt", "x[1].txt")]
  assert expand("memory://data/**/*.txt")[-2:] == found
  # A name of a file is no glob.
  names = ["memory://data/a.txt", "memory://data/x[1].txt"]
  assert expand(", ".join(reversed(names))) == names
  with pytest.raises(DataError, match="memory://data/no: no such file"):
    expand("memory://data/no")
  with pytest.raises(DataError, match="data/sub, which is a folder"):
    expand("memory://data/s*")


def test_a_glob_keeps_the_host():
  fsspec.register_implementation("hosted", Hosted, clobber=True)
  names = [f"hosted://host/{n}" for n in ("a.txt", "data/b.txt", "data/x[1]")]
  for name in names:
    put(name, b"x")
  for glob, found in (
    ("*", names[:1]), ("data/*", names[1:]), ("**/x[[]1]", names[2:]),
    ("d*/b.txt", names[1:2]), ("data/?.txt", names[1:2]),
  ):  # fmt: skip
    matches = stores.at(f"hosted://host/{glob}").matches()
    assert [name for name, is_file in matches.items() if is_file] == found
  assert stores.at(names[1]).is_file()


def test_a_changed_object_is_copied_again(cache):
  put("memory://a.txt", b"one\n")
  assert list(text_files.read_lines(["memory://a.txt"])) == ["one"]
  assert [p.read_bytes() for p in copies(cache)] == [b"one\n"]
  (copy,) = copies(cache)
  before = os.stat(copy).st_mtime_ns
  states = shared_work.states_of(["memory://a.txt"])
  shared_work.expect_unchanged(states)
  assert list(text_files.read_lines(["memory://a.txt"])) == ["one"]
  assert os.stat(copy).st_mtime_ns == before
  put("memory://a.txt", b"two\n")  # of equal size
  assert list(text_files.read_lines(["memory://a.txt"])) == ["two"]
  with pytest.raises(DataError, match="memory://a.txt was changed while"):
    shared_work.expect_unchanged(states)


def test_documents_have_the_url(tmp_path, monkeypatch):
  monkeypatch.setattr(text_files, "PIECE_BYTES", 4)
  put("memory://d/t.txt", b"one\n\ntwo\n")
  put("memory://d/t.jsonl.gz", gzip.compress(b'{"text": "three"}\n'))
  put("memory://d/t.csv", b"id,text\nx,four\n")
  form = DocumentFormat()
  paths = documents.expand_patterns("memory://d/*")
  pieces = documents.split_into_pieces(paths, form)
  found = list(documents.read_documents(pieces, form))
  assert found == [
    ("x", ["four"]),
    ("memory://d/t.jsonl.gz:0", ["three"]),
    ("memory://d/t.txt:0", ["one"]),
    ("memory://d/t.txt:5", ["two"]),
  ]


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_tables_of_pyarrow(tmp_path, name):
  pytest.importorskip("pyarrow", reason="see requirements/text.txt")
  import pyarrow
  import pyarrow.parquet

  table = pyarrow.table({"text": ["a", "b"]})
  if name == "t.parquet":
    pyarrow.parquet.write_table(table, tmp_path / name)
  else:
    with pyarrow.ipc.new_stream(str(tmp_path / name), table.schema) as f:
      f.write_table(table)
  url = f"memory://s/{name}"
  put(url, (tmp_path / name).read_bytes())
  put("memory://s/state.json", json.dumps({"_data_files": []}).encode())
  (piece,) = documents.split_into_pieces(
    [documents.Source(url)], DocumentFormat()
  )
  found = list(documents.read_documents([piece], DocumentFormat()))
  assert found == [(f"{url}:0", ["a"]), (f"{url}:1", ["b"])]
  assert documents.expand_patterns("memory://s") == []  # a data set


def _read(url):
  return list(text_files.read_lines([url]))


def test_processes_share_the_copies(tmp_path, cache):
  path = tmp_path / "store" / "t.txt"
  path.parent.mkdir()
  path.write_text("line\n" * 200_000)
  # Of the library: this module would load TensorFlow in each process.
  spawn = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(3, spawn) as pool:
    found = list(pool.map(input_files.read, [f"file://{path}"] * 6))
  assert set(found) == {b"line\n" * 200_000}
  assert len(copies(cache)) == 1


def test_a_copy_that_another_process_makes_is_awaited(cache):
  put("memory://t.txt", b"ours")
  path = stores.at("memory://t.txt").local()
  os.unlink(path)
  with (
    open(path + ".tmp", "wb") as theirs,
    concurrent.futures.ThreadPoolExecutor(1) as pool,
  ):
    fcntl.flock(theirs, fcntl.LOCK_EX)
    found = pool.submit(stores.at("memory://t.txt").local)
    with pytest.raises(concurrent.futures.TimeoutError):
      found.result(0.3)
    theirs.write(b"theirs")
    theirs.flush()
    os.replace(theirs.name, path)
    fcntl.flock(theirs, fcntl.LOCK_UN)
    assert found.result(10) == path
  with open(path, "rb") as f:
    assert f.read() == b"theirs"


def test_over_http(tmp_path, cache):
  pytest.importorskip("aiohttp", reason="see requirements/stores.txt")
  (tmp_path / "t.txt").write_text("over\nHTTP\n")

  class Quiet(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *arguments):
      super().__init__(*arguments, directory=str(tmp_path))

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert _read(f"{url}/t.txt") == ["over", "HTTP"]
    # This server tells of another text of the same size by its date alone.
    (tmp_path / "t.txt").write_text("OVER\nhttp\n")
    os.utime(tmp_path / "t.txt", (2**31, 2**31))
    assert _read(f"{url}/t.txt") == ["OVER", "http"]
    # A server that ignores a query has a file, and no folder.
    assert not texts.is_beir(f"{url}/t.txt?download=true")
    assert tokenizer_files.case_beside(f"{url}/t.txt?download=true") is None
    record = f"{url}/t.tfrecord?download=true"
    with tfrecord.shard_writer(str(tmp_path / "t.tfrecord")) as writer:
      writer.write(b"a record")
    assert len(tfrecord.RecordSet([record])) == 1
    (tmp_path / "t.tfrecord.index").unlink()
    assert len(tfrecord.RecordSet([record])) == 1
    with pytest.raises(DataError, match="no.txt: no such file"):
      input_files.expand_patterns(f"{url}/no.txt")
    server.shutdown()


# What fails -------------------------------------------------------------------


def test_a_store_that_fails_in_the_middle(flaky, cache):
  put("flaky://t.txt", b"line\n" * 100)
  Flaky.left = 250
  words = "flaky://t.txt: ConnectionResetError: the connection: start the same"
  with pytest.raises(UserError, match=words) as e:
    _read("flaky://t.txt")
  # The work of other pieces stays for the next start.
  assert not isinstance(e.value, DataError) and "\n" not in str(e.value)
  assert not copies(cache)
  Flaky.left = sys.maxsize
  assert _read("flaky://t.txt") == ["line"] * 100


def test_an_object_of_unknown_size(flaky, cache, monkeypatch):
  put("flaky://t.txt", b"line\n")
  info = Flaky.info
  without = lambda *names, **o: {**info(*names, **o), "size": None}
  monkeypatch.setattr(Flaky, "info", without)
  assert _read("flaky://t.txt") == ["line"]
  assert stores.at("flaky://t.txt").state()[0] == 0  # a number, to add up


def test_a_store_that_fails_does_not_damage_an_index(flaky, tmp_path, cache):
  path = str(tmp_path / "a.tfrecord")
  with tfrecord.shard_writer(path) as writer:
    writer.write(b"a")
  for suffix in ("", tfrecord.INDEX_SUFFIX):
    with open(path + suffix, "rb") as f:
      put(f"flaky://a.tfrecord{suffix}", f.read())
  assert len(tfrecord.RecordSet(["flaky://a.tfrecord"])) == 1
  tfrecord.verify_file("flaky://a.tfrecord")
  for copy in copies(cache):
    if copy.name.endswith(tfrecord.INDEX_SUFFIX):
      copy.unlink()
  Flaky.left = 10
  with pytest.raises(UserError, match="start the same command again"):
    tfrecord.RecordSet(["flaky://a.tfrecord"])


def test_an_object_that_is_cut_off(flaky, cache, monkeypatch):
  put("flaky://t.txt", b"line\n" * 100)
  info = Flaky.info
  longer = lambda *names, **o: {**info(*names, **o), "size": 600}
  monkeypatch.setattr(Flaky, "info", longer)
  with pytest.raises(UserError, match="t.txt: not all 600 bytes came"):
    _read("flaky://t.txt")
  assert not copies(cache)


@pytest.mark.parametrize(
  "url, lacking, words",
  [
    ("s3://b/t.txt", "s3fs", "b/t.txt: Install s3fs .*stores.txt"),
    ("nowhere://t.txt", "s3fs", "nowhere://t.txt: .*not known: nowhere"),
    ("memory://t.txt", "fsspec", "pip install -r requirements/stores"),
  ],
)
def test_stores_that_cannot_be_reached(url, lacking, words, monkeypatch):
  monkeypatch.setitem(sys.modules, lacking, None)  # also where it is installed
  with pytest.raises(UserError, match=words) as e:
    input_files.expand_patterns(url)
  assert "\n" not in str(e.value)
  assert stores.at("/tmp").state()  # files need none of it


# Records ----------------------------------------------------------------------


def test_text_and_records_in_a_store(tmp_path, make, cache):
  make(num_shards=3)
  want = contents(tmp_path / "out")
  given = "a.txt", "b.txt.gz"
  for name in given:
    put(f"memory://text/{name}", (tmp_path / name).read_bytes())
  url = "memory://made/train.tfrecord"

  def made():
    return {n: c for n, c in there(MemoryFileSystem).items() if n not in given}

  in_store = dict(input_file="memory://text/*", output_file=url)
  summary = make(num_shards=3, **in_store)
  assert made() == want
  assert summary.manifest_path == "memory://made/train.manifest.json"
  assert not list(cache.glob("*.unfinished"))
  paths = input_files.expand_patterns("memory://made/train-*.tfrecord")
  assert len(paths) == 3
  (_, manifest), *_ = data_set.find_manifests(paths).values()
  assert manifest == summary.manifest
  local = sorted(map(str, (tmp_path / "out").glob("*.tfrecord")))
  assert list(tfrecord.RecordSet(paths)) == list(tfrecord.RecordSet(local))
  # A data set that is made again removes its own files and no others.
  put("memory://made/other.txt", b"")
  make(num_shards=2, **in_store)
  assert len(made()) == 6 and "other.txt" in made()


def test_records_that_train_are_those_of_the_store(tmp_path, make):
  import input_pipeline

  make(num_shards=2)
  pattern = "out/train-*.tfrecord"
  sources = []
  for start in (f"{tmp_path}/", f"file://{tmp_path}/"):
    shape = record_shape.of_manifest(record_files.find(start + pattern), 100)
    sources.append(
      input_pipeline.Source(record_files.find(start + pattern), shape)
    )
  on_disk, in_store = sources
  assert in_store.paths == [f"file://{path}" for path in on_disk.paths]
  # Runs go by these: they may go on with either.
  assert in_store.fingerprint() == on_disk.fingerprint()
  read = lambda source: [feature_values(record) for record in source.set]
  assert str(read(in_store)) == str(read(on_disk))
  index = tmp_path / "out" / "train-00000-of-00002.tfrecord.index"
  index.write_bytes(index.read_bytes()[:-8])
  with pytest.raises(DataError, match=r"file://.*\.index: damaged, or not"):
    tfrecord.RecordSet(in_store.paths)


def test_a_store_that_fails_while_records_are_moved(tmp_path, make, flaky):
  make(num_shards=3)
  want = contents(tmp_path / "out")
  url = "flaky://made/train.tfrecord"
  total = sum(map(len, want.values()))
  for left in (0, total // 3, total // 2):
    Flaky.left = left
    with pytest.raises(UserError, match=r"flaky://made/.*: ConnectionReset"):
      make(num_shards=3, output_file=url)
    made = there(Flaky)
    assert made == {name: want[name] for name in made} != want
    assert "train.manifest.json" not in made
  Flaky.left = total
  summary = make(num_shards=3, output_file=url)
  assert "3 of 3 shards made before" in summary.kept
  assert there(Flaky) == want


def test_workers_write_to_a_store(tmp_path, letters):
  write_documents(tmp_path / "a.txt", 60)
  url = f"file://{tmp_path}"
  create(tmp_path, f"{tmp_path}/a.txt", letters)
  with pytest.raises(UserError, match="file://.*/new/.*: FileNotFoundError"):
    stores.at(f"{url}/new/x").write(b"")
  (tmp_path / "new").mkdir()
  summary = create(
    tmp_path, f"{url}/a.txt", letters, num_workers=2,
    output_file=f"{url}/new/train.tfrecord",
  )  # fmt: skip
  assert re.match("file://.*/new/train.manifest.json", summary.manifest_path)
  assert contents(tmp_path / "new") == contents(tmp_path / "out")


# A corpus ---------------------------------------------------------------------


@pytest.fixture
def same_date(monkeypatch):
  """The report has the time of the command."""
  monkeypatch.setattr(prepare_corpus.time, "strftime", lambda *_: "today")


def prepare(texts, place):
  prepare_corpus.prepare(
    prepare_corpus.CorpusSettings(
      output_dir=place,
      corpus=texts,
      heldout_fraction=0.2,
      language="fr",
      workers=launchers.WorkerSettings(num_workers=1),
    )
  )


def test_a_corpus_in_a_store(tmp_path, flaky, cache, same_date):
  text = tmp_path / "a.txt"
  write_documents(text, 60)
  prepare(str(text), str(tmp_path / "disk"))
  want = contents(tmp_path / "disk")
  assert "train.txt.tokenizer_config.json" in want
  url = "flaky://made"
  Flaky.left = len(want["report.html"]) + len(want["train.txt"]) - 1
  with pytest.raises(UserError, match=r"flaky://made/.*: ConnectionReset"):
    prepare(str(text), url)
  made = there(Flaky)
  assert made == {name: want[name] for name in made} != want
  Flaky.left = sys.maxsize
  prepare(str(text), url)
  assert there(Flaky) == want and not list(cache.glob("*.unfinished"))
  # What reads the text finds its case there.
  assert tokenizer_files.case_beside(f"{url}/train.txt") is False


_KILLED = """
import os, shutil, signal, sys
def die(source, place, _):
  place.write(source.read(100))
  place.flush()
  if hasattr(source, "name"):  # it is no report
    os.kill(os.getpid(), signal.SIGKILL)
  place.write(source.read())
shutil.copyfileobj = die
from common.settings import run_with
from tools import prepare_corpus
run_with(prepare_corpus.CorpusSettings, prepare_corpus.main)
"""


def test_a_kill_in_the_middle_of_an_upload(tmp_path, same_date):
  text, made = tmp_path / "a.txt", tmp_path / "made"
  write_documents(text, 60)
  made.mkdir()
  url = f"file://{made}"
  flags = [f"--corpus={text}", f"--output_dir={url}", "--language=fr"]
  flags += ["--heldout_fraction=0.2", "--num_workers=1"]
  killed = subprocess.run(
    [sys.executable, "-c", _KILLED, *flags], timeout=runs.HANG_SECONDS
  )
  assert killed.returncode == -signal.SIGKILL
  assert [path.name for path in made.iterdir()] == ["report.html"]
  prepare(str(text), url)
  prepare(str(text), str(tmp_path / "disk"))
  assert contents(made) == contents(tmp_path / "disk")


# A run ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_reads_records_of_a_store(tiny_run, tmp_path):
  config, files = tiny_run
  runs.complete(tiny_run, tmp_path / "disk")
  at_urls = config, f"file://{files}"
  runs.complete(at_urls, tmp_path / "store")
  assert runs.metrics(tmp_path / "store") == runs.metrics(tmp_path / "disk")
