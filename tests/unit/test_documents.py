"""Documents are the same from any format, in any cut into pieces."""

import functools
import gzip
import json
import lzma
import sys

import pytest
from backports import zstd
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from common.errors import DataError, UserError
from corpus import documents, text_files
from corpus.documents import Document, DocumentFormat
from corpus.text_files import TextFormat


@functools.cache
def arrow():
  """pyarrow, an optional requirement: tests that need it skip without it."""
  pytest.importorskip("pyarrow", reason="pip install -r requirements/text.txt")
  import pyarrow
  import pyarrow.parquet

  return pyarrow


FORM = DocumentFormat()


def read(*paths, form=FORM):
  paths = documents.expand_patterns(",".join(map(str, paths)))
  pieces = documents.split_into_pieces(paths, form)
  return list(documents.read_documents(pieces, form))


def of_field(**text):
  return DocumentFormat(TextFormat(**text))


def texts(*paths, form=FORM):
  return [document.lines for document in read(*paths, form=form)]


def refused(path, content, words, form=FORM):
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(DataError, match=f"{path.name}: {words}") as e:
    read(path, form=form)
  assert "\n" not in str(e.value) and str(e.value).count(str(path)) == 1


# Plain text -------------------------------------------------------------------


def by_hand(path, content):
  """Documents of plain text: blank lines are between them."""
  place, found, is_new = 0, [], True
  for line in content.split(b"\n"):
    text = line.decode("utf-8-sig" if place == 0 else "utf-8").strip()
    if text and is_new:
      found.append(Document(f"{path}:{place}", []))
    if text:
      found[-1].lines.append(text)
    is_new = not text
    place += len(line) + 1
  return found


LINES = st.lists(
  st.sampled_from(["", " ", "\t", "a", "bc d", " é", "\u3000", "x" * 9])
)


@settings(deadline=None, max_examples=300)
@given(
  lines=LINES.filter("".join),
  end=st.sampled_from(["\n", "\r\n"]),
  mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
  closed=st.booleans(),
  piece_bytes=st.integers(1, 12),
)
@example(["a", "", "b"], "\n", b"", True, 2)  # a border at the blank line
@example(["a", "", "b"], "\n", b"", True, 3)  # and after it
@example(["", "a"], "\n", b"\xef\xbb\xbf", False, 3)
def test_documents_of_plain_text_in_any_pieces(
  tmp_path_factory, lines, end, mark, closed, piece_bytes
):
  path = tmp_path_factory.getbasetemp() / "plain.txt"
  content = mark + (end.join(lines) + end * closed).encode()
  path.write_bytes(content)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text_files, "PIECE_BYTES", piece_bytes)
    pieces = documents.split_into_pieces([documents.Source(str(path))], FORM)
    assert len(pieces) == -(-len(content) // piece_bytes)
    assert read(path) == by_hand(path, content)


@settings(deadline=None, max_examples=100)
@given(st.text(" ab\n", min_size=1), st.integers(1, 9), st.integers(2, 6))
def test_long_lines_are_no_borders(
  tmp_path_factory, text, piece_bytes, line_bytes
):
  assume(
    all(line.strip() or len(line) < line_bytes - 1 for line in text.split("\n"))
  )
  path = tmp_path_factory.getbasetemp() / "long.txt"
  path.write_text(text)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text_files, "MAX_LINE_BYTES", line_bytes)
    whole = read(path)
    patch.setattr(text_files, "PIECE_BYTES", piece_bytes)
    assert read(path) == whole
  joined = lambda found: ["".join(" ".join(d.lines).split()) for d in found]
  assert joined(whole) == joined(by_hand(path, text.encode()))


def test_a_document_without_end_is_cut(tmp_path, monkeypatch):
  monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 10)
  path = tmp_path / "t.txt"
  path.write_text("1234\n" * 5 + "\nb\n")
  want = [(0, ["1234"] * 2), (10, ["1234"] * 2), (20, ["1234"]), (26, ["b"])]
  want = [Document(f"{path}:{place}", lines) for place, lines in want]
  assert read(path) == want
  monkeypatch.setattr(text_files, "PIECE_BYTES", 7)
  assert read(path) == want


def test_a_whole_file_is_one_document(tmp_path, monkeypatch):
  monkeypatch.setattr(text_files, "PIECE_BYTES", 4)
  path, empty = tmp_path / "a.rst", tmp_path / "b.rst"
  path.write_text("\n\nTitle\n=====\n\n\nText\r\nmore \n\n")
  empty.write_text("")  # as __init__.py often is
  form = DocumentFormat(whole_files=True)
  want = ["Title", "=====", "", "", "Text", "more"]
  assert read(tmp_path / "*", form=form) == [Document(f"{path}:2", want)]
  with pytest.raises(DataError, match="b.rst: the file is empty"):
    read(empty)


COMPRESS = {
  "": bytes,
  ".gz": gzip.compress,
  ".xz": lzma.compress,
  ".zst": zstd.compress,
}


@pytest.mark.parametrize(
  "ending, encoding",
  [("", "utf-8"), (".gz", "utf-8-sig"), (".xz", "utf-16"), (".zst", "cp1252")],
)
@pytest.mark.parametrize(
  "name, content",
  [
    ("t.txt", "a\n é \n\nb\n"),
    ("t.jsonl", '{"text": "\\na\\né"}\n{"text": "b"}\n'),
    ("t.csv", 'text,n\n"a\né",1\nb,2\n'),
  ],
)
def test_compression_and_encoding(tmp_path, ending, name, content, encoding):
  path = tmp_path / (name + ending)
  path.write_bytes(COMPRESS[ending](content.encode(encoding)))
  form = of_field(encoding=encoding.removesuffix("-sig"))
  assert texts(path, form=form) == [["a", "é"], ["b"]]
  if ending:
    refused(path, path.read_bytes()[:-3], "not a whole", form)


# Records ----------------------------------------------------------------------


def test_a_record_of_json_is_a_document(tmp_path, monkeypatch):
  path = tmp_path / "t.jsonl"
  rows = [
    {"id": "x", "text": " \nOne. Two.\n \nThree.\n"},
    {"id": 7, "text": "b"},
    {"text": "c\0d"},
    {"id": None, "text": "\ud800"},
    {"id": "", "text": None},
  ]
  lines = [json.dumps(row) + "\n" for row in rows]
  lines.insert(2, "\n")
  path.write_text("".join(lines))
  starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
  want = [
    Document("x", ["One. Two.", "", "Three."]),
    Document("7", ["b"]),
    Document(f"{path}:{starts[3]}", ["cd"]),
    # Without text: they are there to be counted.
    Document(f"{path}:{starts[4]}", []),
    Document(f"{path}:{starts[5]}", []),
  ]
  assert read(path) == want
  monkeypatch.setattr(text_files, "PIECE_BYTES", 20)
  assert read(path) == want
  ids = [d.id for d in read(path, form=DocumentFormat(id_field="no"))]
  assert ids[:2] == [f"{path}:0", f"{path}:{starts[1]}"]


def test_a_field_that_is_not_there(tmp_path):
  content = '{"text": "a"}\n{"title": 1, "body": "b"}\n'
  words = "line 2: .*text is missing; it has the fields title, body"
  refused(tmp_path / "t.jsonl", content, words)


# Tables -----------------------------------------------------------------------


def test_rows_of_csv(tmp_path):
  path = tmp_path / "t.csv"
  path.write_text('\n"id","text"\na,"x, ""y""\n\nz"\n\n,\n,' + "w" * 200_000)
  assert read(path) == [
    Document("a", ['x, "y"', "", "z"]),
    Document(f"{path}:1", []),
    Document(f"{path}:2", ["w" * 200_000]),
  ]


def test_quotes_are_text_in_tsv(tmp_path):
  path = tmp_path / "t.tsv"
  path.write_text('id\ttext\r\n1\t"a\r\n\n2\tb "c"\n"\t""d"\n')
  assert read(path) == [
    Document("1", ['"a']), Document("2", ['b "c"']), Document('"', ['""d"']),
  ]  # fmt: skip
  refused(path, "id\ttext\n1\ta\n2\n", "line 3: .*1 cells, but 2 .*: write a")


def test_a_source_names_its_field(tmp_path):
  (tmp_path / "a:b.jsonl").write_text('{"body": "a", "text": "c"}\n')
  (tmp_path / "t.csv").write_text("text,title\nx,y\n")
  names = f"{tmp_path}/a:*.jsonl:body", f"{tmp_path}/t.csv:title"
  assert texts(*names, f"{tmp_path}/a:b.jsonl") == [["c"], ["a"], ["y"]]
  # What is missing is said before any work.
  for name, words in {
    "a:b.jsonl:no": "no is missing",
    "t.csv:no": "of its 2",
  }.items():
    sources = documents.expand_patterns(f"{tmp_path}/{name}")
    with pytest.raises(DataError, match=words):
      documents.split_into_pieces(sources, FORM)
  with pytest.raises(DataError, match="JSON that is not a record a line"):
    (tmp_path / "a.json").write_text("[\n1]")
    read(tmp_path / "a.json")


SETS = {
  "glue.tsv": ('1\ta "b\t\nx\ty\tz\t3\n', ["1", 'a "b', *"xyz3"]),
  "ner.txt": ("-DOCSTART- -X- O\n\nEU NNP B-ORG\nsays VB O\n\nA b.\n",
    ["-DOCSTART-", "EU says", "A b."]),
  "bio.tsv": ("EU\tB\nsays\tO\n\nYes\tO\n", ["EU says", "Yes"]),
  "ner.jsonl": ('{"id": 1, "tokens": ["EU", "says"]}\n',
    ["EU says", "EU", "says"]),
  "dev-v2.0.json": ('{\n"data": [{"paragraphs": [{"context": "c"}]}]}', ["c"]),
  "squad.json": ('{"data": [{"title": "t", "x": null}]}', ["t"]),
  "t.csv": ('a,b\n"c, d",e\n', ["a", "b", "c, d", "e"]),
  "pairs.csv": ("c,c\nd,e\n", ["c", "c", "d", "e"]),
  "line.txt": (f"{'so ' * 12}did I\n", ["so " * 12 + "did I"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_all_strings_of_an_evaluation_set(tmp_path, name):
  content, want = SETS[name]
  (tmp_path / name).write_text(content)
  sources = documents.expand_patterns(f"{tmp_path}/{name}")
  for form in (FORM, DocumentFormat(whole_files=True)):
    form = form.of_all_strings()
    pieces = documents.split_into_pieces(sources, form)
    assert list(documents.read_strings(pieces, form)) == want


BAD_TABLES = {
  "unquoted": ("id,text\n1,a\n\n2,b, c\n", "line 4: .*3 cells, but 2 in the"),
  "short": ("id,text\n1,a\n2\n", "line 3: .*1 cells, but 2 in the header"),
  "never ends": ('id,text\n1,"a\n2,b\n', "line 2: .*unexpected end of data"),
  "quotes": ('id,text\n1,"a" b\n', "line 2: .*expected after '\"'.*quotes"),
  "no column": ("id,body\n1,a\n", "none of its 2 columns is .* .id, body"),
  "empty": ("", "the file is empty"),
  "wrong bytes": (b"text\nb\ncaf\xe9\n", "line 3: not text in utf-8"),
}


@pytest.mark.parametrize("content, words", BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_is_named(tmp_path, content, words):
  refused(tmp_path / "t.csv", content, words)


ROWS = {
  "n": list(range(9)),
  "text": ["a\n\nb", None, "", "é\0", *"efghi"],
  "id": ["x", None, "z", "", *"vwstu"],
}


def write_parquet(path, rows, at_once=2):
  arrow().parquet.write_table(arrow().table(rows), path, row_group_size=at_once)


def write_arrow(path, rows, at_once=2, writer="new_file"):
  table = arrow().table(rows)
  with getattr(arrow().ipc, writer)(str(path), table.schema) as f:
    f.write_table(table, max_chunksize=at_once)


WRITERS = {
  "parquet": write_parquet,
  "file": write_arrow,
  "stream": functools.partial(write_arrow, writer="new_stream"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("piece_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("name", ["t.parquet", "other"])
def test_tables_of_pyarrow(tmp_path, monkeypatch, writer, piece_bytes, name):
  path = tmp_path / name
  WRITERS[writer](path, ROWS)
  monkeypatch.setattr(text_files, "PIECE_BYTES", piece_bytes)
  monkeypatch.setattr(documents, "_BATCH_ROWS", 2 if piece_bytes > 200 else 1)
  pieces = documents.split_into_pieces([documents.Source(str(path))], FORM)
  assert len(pieces) == {1: 5, 1 << 20: 1}.get(piece_bytes, len(pieces))
  assert read(path)[:4] == [
    Document("x", ["a", "", "b"]),
    Document(f"{path}:1", []),
    Document("z", []),
    Document(f"{path}:3", ["é"]),
  ]
  assert [d.id for d in read(path)[4:]] == list("vwstu")
  form = DocumentFormat(id_field="n")
  assert [d.id for d in read(path, form=form)] == list("012345678")
  form = DocumentFormat(TextFormat(text_field="id"), "text")
  assert texts(path, form=form)[:3] == [["x"], [], ["z"]]


@pytest.mark.parametrize("writer", WRITERS)
def test_columns_with_and_without_text(tmp_path, writer):
  path, pyarrow = tmp_path / "t", arrow()
  words = pyarrow.array(["a", None, "a"])
  for column in (words.cast(pyarrow.large_string()), words.dictionary_encode()):
    WRITERS[writer](path, {"text": column})
    assert texts(path) == [["a"], [], ["a"]]
  WRITERS[writer](path, ROWS)
  if writer != "stream":
    WRITERS[writer](path, {"text": pyarrow.nulls(2), "id": ["a", "b"]})
    assert texts(path) == [[], []]
    strings = documents.read_strings(
      documents.split_into_pieces(
        documents.expand_patterns(str(path)), FORM.of_all_strings()
      ),
      FORM.of_all_strings(),
    )
    assert list(strings) == ["a", "b"]
  WRITERS[writer](path, ROWS)
  for field, said in {
    "n": r"--text_field=n holds int64, not text: name another \(n, text, id",
    "body": r"none of its 3 columns is --text_field=body: .*\(n, text, id\)",
  }.items():
    with pytest.raises(DataError, match=said):
      read(path, form=of_field(text_field=field))


def test_a_field_is_named_as_the_command_names_it(tmp_path):
  for name, text in {
    "a.jsonl": '{"body": "x"}\n',
    "a.csv": "body\nx\n",
  }.items():
    (tmp_path / name).write_text(text)
    for field, said in (("n", "FILES:n"), ("", "--text_field=text")):
      source = documents.Source(str(tmp_path / name), field)
      with pytest.raises(DataError, match=f"{name}: .*{said}: "):
        documents.split_into_pieces([source], FORM)


def test_bad_utf8_in_a_column_is_named(tmp_path):
  pyarrow, path = arrow(), tmp_path / "t"
  column = pyarrow.array([b"good"] * 300 + [b"caf\xe9"])
  buffers = column.buffers()
  wrong = pyarrow.Array.from_buffers(pyarrow.string(), len(column), buffers)
  write_arrow(path, {"text": wrong}, 1000)
  with pytest.raises(DataError, match="t: row 256 or a later one: .*UTF8"):
    read(path)


@pytest.mark.parametrize("writer", WRITERS)
def test_damaged_tables_are_named(tmp_path, writer):
  path = tmp_path / "t"
  WRITERS[writer](path, {"text": ["abcdefg " * 100] * 500}, 100)
  whole = path.read_bytes()
  words = "damaged .*: copy the file again"
  refused(path, whole[: len(whole) * 2 // 3], words)
  if writer == "parquet":
    rows = {"text": [f"{n:05}" * 50 for n in range(400)]}
    arrow().parquet.write_table(
      arrow().table(rows), path, row_group_size=200, write_page_checksum=True
    )
    content = bytearray(path.read_bytes())
    group = arrow().parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start = group.data_page_offset
    content[start : start + 200] = bytes(200)
    refused(path, bytes(content), "row 200 or a later one: damaged")


def test_without_pyarrow(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  content = b"PAR1\x15\0\x15\x1a" + bytes(20) + b"PAR1"
  (tmp_path / "t.parquet").write_bytes(content)
  words = "t.parquet: only pyarrow reads it.*-r requirements/text.txt"
  with pytest.raises(UserError, match=words):
    read(tmp_path / "t.parquet")


def saved(folder, rows, files):
  """What datasets.Dataset.save_to_disk writes."""
  folder.mkdir()
  names = [f"data-{n:05}-of-{files:05}.arrow" for n in range(files)]
  state = {"_data_files": [{"filename": name} for name in names]}
  (folder / "state.json").write_text(json.dumps(state))
  (folder / "dataset_info.json").write_text("{}")
  for number, name in enumerate(names):
    write_arrow(folder / name, {"text": rows[number::files]}, 2, "new_stream")
    write_arrow(folder / "cache-1.arrow", {"text": ["no"]}, 2, "new_stream")


def test_folders_of_datasets(tmp_path):
  saved(tmp_path / "one", list("abcde"), 2)
  assert texts(tmp_path / "one") == [[x] for x in "acebd"]
  first = read(f"{tmp_path / 'one'}/")[0]
  assert first.id == f"{tmp_path / 'one'}/data-00000-of-00002.arrow:0"
  (tmp_path / "a").mkdir()
  with pytest.raises(DataError, match="which is a folder"):
    read(tmp_path / "a")
  for content, words in {
    '{"splits": ["x", "y"]}': f"holds several .*, {tmp_path}/x,{tmp_path}/y",
    "{}": "dataset_dict.json: .*splits is missing",
  }.items():
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(DataError, match=words):
      read(tmp_path)


def test_folders_that_datasets_saves(tmp_path):
  datasets = pytest.importorskip("datasets", reason="pip install datasets")
  rows = [f"row {n}" for n in range(50)]
  made = datasets.Dataset.from_dict({"text": rows, "id": range(50)})
  made.save_to_disk(tmp_path / "a", num_shards=3)
  assert read(tmp_path / "a") == [
    Document(str(n), [row]) for n, row in enumerate(rows)
  ]
  odd = made.filter(lambda row: row["id"] % 2)
  odd.save_to_disk(tmp_path / "odd")
  assert texts(tmp_path / "odd") == [[row] for row in rows[1::2]]
  made.to_json(tmp_path / "a.json")
  assert texts(tmp_path / "a.json") == [[row] for row in rows]
  datasets.DatasetDict(x=made, y=odd).save_to_disk(tmp_path / "both")
  with pytest.raises(DataError, match=f"{tmp_path}/both/x,{tmp_path}/both/y"):
    read(tmp_path / "both")
