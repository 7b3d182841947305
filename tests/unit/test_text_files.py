"""Text in every form gives the same sentences, wherever it is cut."""

import bz2
import gzip
import io
import json
import lzma

import pytest
from backports import zstd
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common import errors, input_files
from corpus import prose, text_files
from corpus.text_files import TextFormat


def is_plain(content):
  """Whether it does not begin as a file of another kind."""
  f = io.BufferedReader(io.BytesIO(content))
  every = input_files._KINDS
  return input_files.kind_of(f, "x", *every) is input_files.PLAIN


def sentences(path, content=None, **text):
  """The sentences of a file; of this content if there is one."""
  if content is not None:
    path.write_bytes(
      content if isinstance(content, bytes) else content.encode()
    )
  return list(text_files.read_lines([str(path)], TextFormat(**text)))


@settings(deadline=None, max_examples=150)
@given(
  st.binary(min_size=1, max_size=300).map(
    lambda b: (
      b.decode("utf-8", "ignore").replace("a", "\n").replace("\0", "\n\n") + "é"
    ).encode()
  ),
  st.integers(1, 60),
)
def test_pieces_hold_each_line_once(tmp_path_factory, content, piece_bytes):
  assume(not content.startswith(b"\xef\xbb\xbf") and is_plain(content))
  path = tmp_path_factory.getbasetemp() / "pieces.txt"
  path.write_bytes(content)
  want = [line.decode().strip() for line in content.split(b"\n")]
  if content.endswith(b"\n"):
    want.pop()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text_files, "PIECE_BYTES", piece_bytes)
    pieces = text_files.split_into_pieces([str(path)])
    assert len(pieces) == -(-len(content) // piece_bytes)
    batches = [
      b for p in pieces for b in text_files.read_batches(p, TextFormat())
    ]
  assert [s for b in batches for s in b.sentences] == want
  assert sum(b.bytes for b in batches) == len(content)
  assert sum(b.bytes_on_disk for b in batches) == len(content)


TEXT = "One here.\nTwo there.\n\nThree 中文。\n" * 300


@pytest.mark.parametrize(
  "name, compress",
  [
    ("t.txt.gz", gzip.compress),
    ("t.txt.zst", zstd.compress),
    # The name need not tell.
    ("wiki_00", gzip.compress),
    ("t.txt", bz2.compress),
    ("t.zst", lzma.compress),
    # Files put together are one file to both formats.
    ("u.gz", lambda b: gzip.compress(b[:50]) + gzip.compress(b[50:])),
    ("u.xz", lambda b: lzma.compress(b[:50]) + lzma.compress(b[50:])),
  ],
)
def test_compressed_files(tmp_path, name, compress):
  path = tmp_path / name
  assert sentences(path, compress(TEXT.encode())) == TEXT.split("\n")[:-1]
  (piece,) = text_files.split_into_pieces([str(path)])
  batches = list(text_files.read_batches(piece, TextFormat()))
  assert sum(b.bytes for b in batches) == len(TEXT.encode())
  assert sum(b.bytes_on_disk for b in batches) == path.stat().st_size
  damaged = f"{name}: not a whole (gzip|bzip2|xz|zstd) file"
  with pytest.raises(errors.DataError, match=damaged):
    sentences(path, compress(TEXT.encode())[:-6])
  if path.suffix in (".gz", ".bz2", ".xz", ".zst"):
    with pytest.raises(errors.DataError, match=damaged):
      sentences(path, b"no such format")


@pytest.mark.parametrize(
  "name, compress", [("t.JSONL.xz", lzma.compress), ("t.jsonl", bytes)]
)
def test_json_lines(tmp_path, name, compress):
  records = [
    {"id": 1, "text": "One.\nTwo. \n\n\nThree."},
    {"text": "", "id": 2},
    {"text": "lone \ud800 half\0"},
  ]
  content = "\n".join(map(json.dumps, records)).encode() + b"\n\n"
  got = sentences(tmp_path / name, compress(content))
  assert got == ["", "One.", "Two.", "Three.", "", "", "", "", "lone  half", ""]
  content = compress(b'{"body": "a"}\n')
  got = sentences(tmp_path / name, content, text_field="body")
  assert got == ["", "a", ""]


def test_a_long_line_is_several(tmp_path, monkeypatch):
  monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 16)
  path = tmp_path / "t.txt"
  text = "short\n" + "one two three four five\n" + "中" * 12 + "\nend"
  got = sentences(path, text)
  assert got == [
    "short", "one two three", "four five", "中" * 5, "中" * 5, "中" * 2, "end",
  ]  # fmt: skip
  # No piece but the one in which it starts reads it.
  monkeypatch.setattr(text_files, "PIECE_BYTES", 8)
  assert sentences(path) == got


def test_a_long_line_of_json_is_several(tmp_path, monkeypatch):
  monkeypatch.setattr(prose, "MAX_PARAGRAPH", 10)
  got = list(prose.sentences(["and so on"] * 5, "en"))
  assert got == ["and so on and so on"] * 2 + ["and so on"]
  monkeypatch.setattr(prose, "MAX_PARAGRAPH", 12)
  path = tmp_path / "t.jsonl"
  text = json.dumps({"text": "one two three four\n" + "x" * 15})
  want = ["", "one two", "three four", "x" * 12, "xxx", ""]
  assert sentences(path, text) == want
  # A long document comes in several batches.
  monkeypatch.setattr(text_files, "_BATCH_BYTES", 5)
  (piece,) = text_files.split_into_pieces([str(path)])
  batches = list(text_files.read_batches(piece, TextFormat()))
  assert [s for b in batches for s in b.sentences] == want
  assert len(batches) > 4
  assert sum(b.bytes for b in batches) == path.stat().st_size


SPANISH = "El señor\n\ncafé"


@pytest.mark.parametrize("name", ["t.txt", "t.txt.zst", "t.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "cp037"])
def test_another_encoding(tmp_path, name, encoding, monkeypatch):
  monkeypatch.setattr(text_files, "_PART_CHARS", 5)
  monkeypatch.setattr(text_files, "PIECE_BYTES", 8)
  is_json = name == "t.jsonl"
  spelt = json.dumps({"text": SPANISH}, ensure_ascii=False)
  data = (spelt if is_json else SPANISH).encode(encoding)
  path = tmp_path / name
  data = zstd.compress(data) if path.suffix == ".zst" else data
  want = ["El señor", "", "café"]
  if is_json:
    want = ["", "El señor", "café", ""]
  assert sentences(path, data, encoding=encoding) == want
  with pytest.raises(errors.DataError, match=f"{name}: .*--encoding"):
    sentences(path)  # as UTF-8


REFUSED = {
  "another encoding": (b"ab\ncaf\xe9\n", "utf-8", "line 2: not text in utf-8"),
  "after a mark": (b"\xef\xbb\xbfcaf\xe9\n", "utf-8", "line 1: not text"),
  "nul": ("ab\nc".encode("utf-16-le"), "utf-8", r"line 1: .*\(a NUL"),
  "nul in latin-1": ("a\n".encode("utf-16-le"), "latin-1", "latin-1 .a NUL"),
  "mark of utf-16": ("ab".encode("utf-16"), "utf-8", "line 1: .*--encoding"),
  "a half": (b"\xfe\xff\0a\0\n\0b\0c\xd8\0\0x", "utf-16", "line 2: not"),
  "no mark": ("ab".encode("utf-16-le"), "utf-16", "line 1: .*with BOM"),
  "cut": ("日本\n".encode("shift_jis") + b"\x81", "shift_jis", "line 2: not"),
  "an escaped half": (b"a\\ud800", "unicode_escape", "line 1: not text"),
  "far": (b"ab\n" * 5000 + b"\xe9\n" + b"ab\n" * 5000, "ascii", "line 5001: "),
  "far and long": (b"a" * 99_999 + b"\nb\xe9", "ascii", "line 2: not text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_text_in_no_such_encoding_is_refused(tmp_path, name, monkeypatch):
  content, encoding, words = REFUSED[name]
  path = tmp_path / "t.txt"
  monkeypatch.setattr(text_files, "_BUFFER_BYTES", 4)
  with pytest.raises(errors.DataError, match=words) as e:
    sentences(path, content, encoding=encoding)
  assert str(path) in str(e.value) and "\n" not in str(e.value)
  for unknown in ("", "x", "base64", "a\0"):
    with pytest.raises(errors.DataError, match="--encoding=.*text encodings"):
      TextFormat(encoding=unknown)


REFUSED_JSON = {
  "not json": ("t.jsonl", "{", "line 2: no JSON object"),
  "deep": ("t.jsonl", "[" * 100_000, "line 2: .*nested too deeply"),
  "a list": ("t.jsonl", "[1]", r"line 2: .*it is \[1\], not an object"),
  "no field": ("t.jsonl", '{"body": 1}', "--text_field=text: text is missing"),
  "no text": ("t.jsonl", '{"text": 1}', "line 2: .*text is 1, not text"),
  "too long": ("t.jsonl", '"' + "a" * (1 << 20), "byte 14 is longer than 1 MB"),
  "json": ("t.json", "{}", "line 2: .*text is missing"),
  "large letters": ("t.csv.GZ", "a,b", r"t\.csv\.GZ: holds a .*--text_fi"),
}


@pytest.mark.parametrize("case", REFUSED_JSON)
def test_bad_json_is_refused(tmp_path, case, monkeypatch):
  name, line, words = REFUSED_JSON[case]
  monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 1 << 20)
  with pytest.raises(errors.DataError, match=words):
    sentences(tmp_path / name, '{"text": "a"}\n' + line + "\n")


@pytest.mark.parametrize(
  "language, lines, want",
  [
    # A paragraph a line; wrapped lines; a heading stands alone.
    ("en", ["One here. Two there!"], ["One here.", "Two there!"]),
    ("en", ["It was the", "best. It was"], ["It was the best.", "It was"]),
    ("en", ["Chapter 1", "It was."], ["Chapter 1", "It was."]),
    ("en", ["In May,", "Anna left."], ["In May, Anna left."]),
    ("en", ["a b", "", "c d"], ["a b", "", "c d"]),
    ("zh", ["今天天气好。我去北京。"], ["今天天气好。", "我去北京。"]),
    ("zh", ["今天" * 9 + "今天天", "气好。"], ["今天" * 10 + "天气好。"]),
    ("zh", ["目录", "天气好。"], ["目录", "天气好。"]),
    ("zh", ["今天，", "天气好。"], ["今天，天气好。"]),
    ("zh", ["标题 One", "今天。"], ["标题 One", "今天。"]),
    ("fr", ["Elle vient. Ça va ?"], ["Elle vient.", "Ça va ?"]),
  ],
)  # fmt: skip
def test_prose(language, lines, want):
  assert list(prose.sentences(lines, language)) == want


def test_prose_of_files(tmp_path):
  text = "Mr. Smith came. He left.\n\nA new one\nwas here.\n"
  want = ["Mr. Smith came.", "He left.", "", "A new one was here."]
  assert sentences(tmp_path / "t.txt", text, prose="en") == want
  text = json.dumps({"text": "One. Two\nthree."}) + "\n"
  want = ["", "One.", "Two three.", ""]
  assert sentences(tmp_path / "t.jsonl", text, prose="en") == want
