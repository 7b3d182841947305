"""Tables of labelled text: TSV, CSV, JSON Lines."""

import decimal

import pytest

from common.errors import DataError
from corpus import tables


def write(path, text):
  path.write_bytes(text.encode(errors="surrogateescape"))
  return str(path)


def test_three_formats_say_the_same(tmp_path):
  for name, text in (
    ("a.tsv", 'text\tlabel\nsay "hi", you\t1\r\nb\t0\n'),
    ("a.csv", 'text,label\n"say ""hi"", you",1\nb,0\n'),
    ("a.jsonl", '{"text": "say \\"hi\\", you", "label": 1}\n\n'
                '{"text": "b", "label": 0}'),
  ):  # fmt: skip
    path = write(tmp_path / name, text)
    rows = tables.read_table(path)
    assert tables.column(path, rows, "text", "--a") == ['say "hi", you', "b"]
    assert tables.column(path, rows, "label", "--a") == ["1", "0"]


def test_a_line_end_in_a_csv_field(tmp_path):
  path = write(tmp_path / "a.csv", 'text,label\n"two\nlines",1\nb,0\n')
  first, second = tables.read_table(path)
  assert (first.line, second.line) == (2, 4)
  assert first.values["text"] == "two\nlines"


def test_a_value_that_json_does_not_have_is_shown():
  """Tables of Parquet have decimals and dates."""
  rows = [tables.Row(7, {"score": decimal.Decimal("0.5")})]
  with pytest.raises(DataError, match="line 7 has \"0.5\" where 'score' shou"):
    tables.column("a.parquet", rows, "score", "--score_column")


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl"])
def test_an_empty_file_has_no_rows(tmp_path, ending):
  with pytest.raises(DataError, match=f"a.{ending}: no rows"):
    tables.read_table(write(tmp_path / f"a.{ending}", ""))


def test_a_few_odd_rows_are_told_and_left_out(tmp_path, capsys):
  text = "a\tb\n" + "1\t2\n" * 200 + "only one\n"
  path = write(tmp_path / "a.tsv", text)
  assert len(tables.read_table(path)) == 200
  assert "1 of 201 rows" in capsys.readouterr().err
  path = write(tmp_path / "b.tsv", "a\tb\n1\t2\nx\n")
  with pytest.raises(DataError, match="b.tsv: 1 of 2 rows .* line 3 has 1"):
    tables.read_table(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_carriage_return_in_a_field_is_text(tmp_path, end):
  for name, lines, texts in (
    ("a.tsv", ["text\tlabel", "two\rwords\t1", "\rb\r\t0", ""],
     ["two\rwords", "\rb\r"]),
    ("a.csv", ["text,label", '"two\rwords",1', "b,0", ""],
     ["two\rwords", "b"]),
  ):  # fmt: skip
    rows = tables.read_table(
      write(tmp_path / name, end.join(lines)), None, True
    )
    assert [row.values["text"] for row in rows] == texts
    assert [row.values["label"] for row in rows] == ["1", "0"]
    assert [row.line for row in rows] == [2, 3]


def test_rows_that_must_all_be_there(tmp_path):
  for name, text in (
    ("a.tsv", "a\tb\n1\t2\n\n3\t4\n\n"), ("a.csv", "a,b\n1,2\n\n3,4\n"),
    ("a.jsonl", '{"a": 1}\n{"a": 2}\n \n{"a": 3}\n\n'),
  ):  # fmt: skip
    path = write(tmp_path / name, text)
    with pytest.raises(DataError, match=f"{name}: .* first line 3 is empty"):
      tables.read_table(path, all_rows=True)
    assert tables.read_table(path)[-1].line == 4


@pytest.mark.parametrize(
  "name, text, words",
  [
    ("a.tsv", "text\tlabel\n", "a.tsv: no rows"),
    ("a.tsv", "text\ttext\nx\ty\n", "two columns have one name"),
    ("a.csv", 'text,label\n"open,1\n', "line 2"),
    (
      "a.csv",
      "text,label\nb\rc,1\n",
      r"line 2: .*new-line character .* field\)$",
    ),
    ("a.jsonl", '{"a": 1}\n{"a":\n', "line 2 is no JSON object"),
    ("a.jsonl", "[1]\n", r"line 1 is no JSON object: it is \[1\]"),
    ("a.xlsx", "x", "a.xlsx: no JSON lines, .*.tsv"),
    ("a.tsv", "text\n\udcff\n", r"a.tsv: line 2: not UTF-8 \(0xff\)"),
  ],
)
def test_errors(tmp_path, name, text, words):
  with pytest.raises(DataError, match=words):
    tables.read_table(write(tmp_path / name, text))


def test_a_column_that_is_not_there(tmp_path):
  path = write(tmp_path / "a.jsonl", '{"text": "x"}\n{"words": "y"}\n')
  rows = tables.read_table(path)
  with pytest.raises(DataError, match="line 2 has no 'text'; .* words: .*--a$"):
    tables.column(path, rows, "text", "--a")
  path = write(tmp_path / "b.csv", "text,label\n,1\nx,\n")
  assert tables.column(path, tables.read_table(path), "text", "--a") == [
    "",
    "x",
  ]


@pytest.mark.parametrize(
  "value, words",
  [
    ("null", "has null where 'label' should be; its columns are a, label"),
    ("NaN", "has NaN where 'label' should be"),
    ('{"is": 1}', 'has {"is": 1} where'),
    ('"  "', 'has "  " where'),
  ],
)
def test_a_column_without_a_value(tmp_path, value, words):
  rows = '{"a": "x", "label": true}\n{"a": "y", "label": %s}\n' % value
  path = write(tmp_path / "a.jsonl", rows)
  with pytest.raises(DataError, match=f"a.jsonl: line 2 {words}"):
    rows = tables.read_table(path)
    tables.column(path, rows, "label", "--a", may_be_empty=False)
