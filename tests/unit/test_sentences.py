"""Files of labelled words: CoNLL's columns, CoNLL-U, JSON lines."""

import json

import pytest

from common.errors import DataError
from finetuning import sentences
from finetuning.sentences import SentenceSettings


def read(path, content, labelled=True, **settings):
  path.write_bytes(content.encode())
  made = sentences.read_sentences(
    str(path), SentenceSettings(**settings), labelled
  )
  for sentence in made:
    assert len(sentence.lines) == max(1, len(sentence.words))
  return [(one.lines[0], one.words, one.labels) for one in made]


CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

-DOCSTART- -X- -X- O

Peter NNP B-NP B-PER


# NN I-NP O
"""


def test_conlls_columns(tmp_path):
  found = read(tmp_path / "a.txt", CONLL_2003)
  assert found == [
    (3, ["EU", "rejects"], ["B-ORG", "O"]),
    (8, ["Peter"], ["B-PER"]),
    (11, ["#"], ["O"]),  # with as many columns as words have
  ]
  tags = read(tmp_path / "a.txt", CONLL_2003, label_column=2)
  assert tags[0][2] == ["NNP", "VBZ"]
  for column in (None, 4):  # of labels, in the data that it was trained with
    unlabelled = read(
      tmp_path / "a.txt", "EU\nrejects\n\nPeter", labelled=False,
      label_column=column,
    )  # fmt: skip
    assert unlabelled == [(1, ["EU", "rejects"], []), (4, ["Peter"], [])]


def test_tabs_or_spaces(tmp_path):
  for line, word, label in (
    ("New York\tB-LOC", "New York", "B-LOC"),  # tabs: spaces are text
    ("\tO", "", "O"),
    ("10\u00a0000  O ", "10\u00a0000", "O"),
    ("a\u2028b O\r", "a\u2028b", "O"),
    ("#tag\tO", "#tag", "O"),
  ):
    found = read(tmp_path / "a.conll", f"\ufeffx O\n{line}\n \t\r\n")
    assert found == [(1, ["x", word], ["O", label])]


CONLL_U = """# sent_id = 1
# text = don't go
1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tdo\tdo\tAUX\t_\t_\t3\t_\t_\t_
2\tn't\tnot\tPART\t_\t_\t3\t_\t_\t_
2.1\tplease\t_\tINTJ\t_\t_\t_\t_\t_\t_
3\tgo\tgo\tVERB\t_\t_\t0\t_\t_\t_

# text = a comment of as many parts here
1\t#\t#\tSYM\t_\t_\t0\t_\t_\t_
"""


def test_conll_u(tmp_path):
  """Without comments, words that span others, and words that are not there."""
  found = read(tmp_path / "a.conllu", CONLL_U, word_column=2, label_column=4)
  assert found == [
    (4, ["do", "n't", "go"], ["AUX", "PART", "VERB"]),
    (10, ["#"], ["SYM"]),
  ]


def test_a_comment_has_other_columns_than_words(tmp_path):
  text = "# id 7\tdomain=en\nParis _ _ B-LOC\n# _ _ O\n"
  assert read(tmp_path / "a.conll", text)[0][1] == ["Paris", "#"]


def test_json_lines(tmp_path):
  lines = [
    {"tokens": ["New", "York"], "ner_tags": ["B-LOC", "I-LOC"], "id": "0"},
    {"tokens": [], "ner_tags": []},
  ]
  text = "\n".join(map(json.dumps, lines)) + "\n\n"
  assert read(tmp_path / "a.jsonl", text) == [
    (1, ["New", "York"], ["B-LOC", "I-LOC"]),
    (2, [], []),
  ]
  numbers = {"words": ["New", "York"], "pos": [2, "O"]}
  names = dict(label_names=("O", "NN", "NNP"))
  fields = dict(tokens_field="words", tags_field="pos")
  found = read(tmp_path / "b.json", json.dumps(numbers), **fields, **names)
  assert found[0][2] == ["NNP", "O"]
  found = read(tmp_path / "b.json", '{"tokens": ["a"]}', labelled=False)
  assert found == [(1, ["a"], [])]


@pytest.mark.parametrize(
  "name, text, message",
  [
    ("a.txt", "\n-DOCSTART- -X- O\n\n# comment\n", "a.txt: no words"),
    ("a.jsonl", '{"tokens": [], "ner_tags": []}', "a.jsonl: no words"),
    ("a.txt", "a O\nb X O\n", "line 2: the number of its columns is 3, not 2"),
    ("a.txt", "a\nb\n", "line 1: the number of its columns is 1, not 2"),
    ("a.txt", "a\udc80 O".encode("utf-8", "surrogateescape"), "can't decode"),
    ("a.jsonl", '{"tokens": ["a"], "ner_tags": []}', "1: 1 words have 0 l"),
    ("a.jsonl", '{"tokens": ["a"]}', "1: ner_tags is missing; its .*--tags"),
    ("a.jsonl", '{"tokens": "a", "ner_tags": []}', "tokens is 'a', not a l"),
    ("a.jsonl", '{"tokens": ["a"], "ner_tags": [3]}', "3, not text; .*--label"),
  ],
)  # fmt: skip
def test_wrong_files_are_named(tmp_path, name, text, message):
  path = tmp_path / name
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(DataError, match=message) as e:
    sentences.read_sentences(str(path), SentenceSettings(), True)
  assert str(e.value).count(str(path)) == 1


def test_numbers_without_a_label(tmp_path):
  for number in (-1, 2, True):
    text = json.dumps({"tokens": ["a"], "ner_tags": [number]})
    with pytest.raises(DataError, match=r"ner_tags\[0\] is .* from 0 to 1"):
      read(tmp_path / "a.jsonl", text, label_names=("O", "B-A"))


def test_columns_that_are_not_there(tmp_path):
  for settings in ({"word_column": 3}, {"label_column": 3}):
    with pytest.raises(DataError, match="columns is 2, not 3: .*--word_column"):
      read(tmp_path / "a.txt", "a O\n", **settings)
