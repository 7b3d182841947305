"""Text in every form gives the same sentences, wherever it is cut."""

import gzip
import json

import pytest
from backports import zstd
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import errors
from pretraining_data import text_files
from pretraining_data.text_files import TextFormat


def sentences(*paths, **text):
  return list(
    text_files.read_lines([str(p) for p in paths], TextFormat(**text))
  )


@settings(deadline=None, max_examples=150)
@given(
  st.binary(min_size=1, max_size=300).map(
    lambda b: b.replace(b"a", b"\n").replace(b"\x00", b"\n\n")
  ),
  st.integers(1, 60),
)
def test_pieces_hold_each_line_once(tmp_path_factory, content, piece_bytes):
  assume(not content.startswith((b"\xff\xfe", b"\xfe\xff")))
  path = tmp_path_factory.getbasetemp() / "pieces.txt"
  path.write_bytes(content)
  want = [
    line.decode("utf-8", "ignore").strip() for line in content.split(b"\n")
  ]
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
  bad = sum(
    line.decode("utf-8", "ignore") != line.decode("utf-8", "replace")
    for line in content.split(b"\n")
  )
  assert sum(b.bad_lines for b in batches) == bad


TEXT = "One here.\nTwo there.\n\nThree 中文。\n" * 300


@pytest.mark.parametrize(
  "name, compress",
  [
    ("t.txt.gz", gzip.compress),
    ("t.txt.zst", zstd.compress),
    # Files put together are one file to both formats.
    ("u.gz", lambda b: gzip.compress(b[:50]) + gzip.compress(b[50:])),
    ("u.zst", lambda b: zstd.compress(b[:50]) + zstd.compress(b[50:])),
  ],
)
def test_compressed_files(tmp_path, name, compress):
  path = tmp_path / name
  path.write_bytes(compress(TEXT.encode()))
  assert sentences(path) == TEXT.split("\n")[:-1]
  (piece,) = text_files.split_into_pieces([str(path)])
  batches = list(text_files.read_batches(piece, TextFormat()))
  assert sum(b.bytes for b in batches) == len(TEXT.encode())
  assert sum(b.bytes_on_disk for b in batches) == path.stat().st_size
  path.write_bytes(compress(TEXT.encode())[:-6])
  with pytest.raises(
    errors.DataError, match=f"{name}: not a whole (gzip|zstd)"
  ):
    sentences(path)
  path.write_bytes(b"no such format")
  with pytest.raises(
    errors.DataError, match=f"{name}: not a whole (gzip|zstd)"
  ):
    sentences(path)


@pytest.mark.parametrize("name", ["t.jsonl", "t.ndjson", "t.jsonl.gz"])
def test_json_lines(tmp_path, name):
  records = [
    {"id": 1, "text": "One.\nTwo. \n\n\nThree."},
    {"text": "", "id": 2},
    {"text": "lone \ud800 half"},
  ]
  content = "\n".join(map(json.dumps, records)).encode() + b"\n\n"
  path = tmp_path / name
  path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
  got = sentences(path)
  assert got == ["", "One.", "Two.", "Three.", "", "", "", "", "lone  half", ""]


@pytest.mark.parametrize(
  "line, words",
  [
    ("{", r"the record at byte 14 is not JSON"),
    ("[" * 100_000, r"the record at byte 14 is not JSON"),
    ("[1]", r"no text in a field 'text' \(its fields: none\)"),
    (
      '{"title": "x", "body": 1}',
      r"no text.*fields: title, body\).*text_field",
    ),
    ('{"text": 1}', "no text"),
  ],
)
def test_bad_json_lines(tmp_path, line, words):
  path = tmp_path / "t.jsonl"
  path.write_text('{"text": "a"}\n' + line + "\n")
  with pytest.raises(errors.DataError, match=words):
    sentences(path)


def test_the_text_field_is_named(tmp_path):
  path = tmp_path / "t.jsonl"
  path.write_text('{"body": "a"}\n')
  assert sentences(path, text_field="body") == ["", "a", ""]


def test_a_long_line_is_several(tmp_path, monkeypatch):
  monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 16)
  path = tmp_path / "t.txt"
  path.write_text("short\n" + "one two three four five\n" + "中" * 12 + "\nend")
  got = sentences(path)
  assert got == [
    "short", "one two three", "four five", "中" * 5, "中" * 5, "中" * 2, "end",
  ]  # fmt: skip
  # No piece but the one in which it starts reads it.
  monkeypatch.setattr(text_files, "PIECE_BYTES", 8)
  assert sentences(path) == got


def test_a_long_record_is_an_error(tmp_path, monkeypatch):
  monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 1 << 20)
  path = tmp_path / "t.jsonl"
  path.write_text('{"text": "' + "a" * (1 << 20) + '"}\n')
  with pytest.raises(errors.DataError, match="byte 0 is longer than 1 MB"):
    sentences(path)


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
  assert text_files.split_prose(lines, language) == want


def test_prose_of_files(tmp_path):
  plain, json_lines = tmp_path / "t.txt", tmp_path / "t.jsonl"
  plain.write_text("Mr. Smith came. He left.\n\nA new one\nwas here.\n")
  json_lines.write_text(json.dumps({"text": "One. Two\nthree."}) + "\n")
  assert sentences(plain, prose="en") == [
    "Mr. Smith came.", "He left.", "", "A new one was here.",
  ]  # fmt: skip
  assert sentences(json_lines, prose="en") == ["", "One.", "Two three.", ""]
