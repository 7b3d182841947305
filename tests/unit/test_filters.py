"""Filters of text: what each removes, their settings files and their counts."""

import importlib.util
import json
import os
import pickle
import sys

import pytest

from common import errors
from corpus import filters, report
from corpus.filters import Counts, Filters

LETTERS = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(300)]


def filters_of(*lines):
  return Filters(json.dumps({"filters": list(lines)}))


def cleaned(text, *lines):
  return filters_of(*lines).clean(text.split("\n"), Counts())


def words(count):
  """Text of so many different words."""
  return " ".join(LETTERS[:count])


# Each has a text inside of its bound, and one just outside.
DOCUMENTS = {
  "lines": ({"min": 2}, "a\n\nb", "a"),
  "words": ({"min": 50, "max": 60}, words(50), words(49)),
  "words, too many": ({"min": 50, "max": 60}, words(60), words(61)),
  "mean_word_length": ({"min": 3, "max": 10}, "to what", "to whom is"),
  "mean_word_length, too long": ({"min": 3, "max": 10},
    "abcdefghijkl abcdefgh", "abcdefghijkl abcdefghi"),
  "sentences": ({"min": 3}, "A b. C d!\nE", 'A b. c d "e."\nE f 3.5'),
  "sentences, Chinese": ({"min": 2}, "你好。再见。", "你好再见。"),
  "sentences, quoted": ({"min": 2}, 'He went. "Why?"', "He went.) why"),
  "hashes_per_word": ({"max": 0.1}, f"# {words(9)}", f"# # {words(10)}"),
  "ellipses_per_word": ({"max": 0.1}, f"{words(10)}...", f"{words(9)}... a…"),
  "bullet_lines": ({"max": 0.5}, "- a\nb\n\n• c\nd", "- a\n* b\n\n• c\nd"),
  "ellipsis_lines": ({"max": 0.5}, "a...\nb", "a...\nb\n\nc…"),
  "words_with_letters": ({"min": 0.8}, "a b c d2 5", "a b c 4 5"),
  "stop_words": ({"min": 2}, "The cat and a dog", "the cat, the dog"),
  "stop_words, German": ({"min": 1, "words": ["und", "über"]},
    "ÜBER alles", "the and"),
  "punctuated_lines": ({"min": 0.5}, "a.\nb\n\nc?\nd", "a.\nb\n\nc,\nd"),
  "punctuated_lines, other scripts": ({"min": 1}, "好。\nहै।\nنعم؟", "好、"),
  "short_lines": ({"max": 0.5},
    f"{'a' * 30}\n{'b' * 31}", f"{'a' * 30}\n{'b' * 30}\n{'c' * 31}"),
  "short_lines, of 5": ({"max": 0, "characters": 5}, "abcdef", "abcde"),
  "lines_per_word": ({"max": 0.5}, "a b\n\nc d", "a\nb c"),
  "repeated_lines": ({"max": 0.3}, "a\na\nb\nc", "a\na\nb"),
  "repeated_paragraphs": ({"max": 0.3}, "a\n\na\n\nb\n\nc", "a\n\na\n\n\nb"),
  "repeated_line_characters": ({"max": 0.2},
    "ab\nab\ncdefghij", "abc\nabc\ncdefg"),
  "repeated_paragraph_characters": ({"max": 0.2},
    "ab\n\nab\n\ncdefghij", "abcd\n\nabcd\n\ncde"),
  # 2 x 3 of 30 characters, and 3 x 3.
  "top_sequence": ({"size": 2, "max": 0.2},
    "a b c d e a b fghijklmnopqrstu", "a b c a b e a b fghijklmnopqrs"),
  "top_sequence, none twice": ({"size": 3, "max": 0}, "a b c d", "a b c a b c"),
  # 1 x 9 of 60 characters, and of 59.
  "repeated_sequences": ({"size": 5, "max": 0.151},
    f"a b c d e {'x' * 40} a b c d e", f"a b c d e {'x' * 38} a b c d e"),
  "text": ({"text": "Lorem Ipsum", "max": 0}, "lorem", "a lorem ipsum b"),
  "listed_words": ({"words": ["bad", "Very wrong"], "max": 0},
    "badly, very; wrongly", "It was “BAD”, he said"),
  "listed_words, phrase": ({"words": ["bad", "Very wrong"], "max": 0},
    "very much wrong", "this is very\nwrong."),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_just_inside_and_just_outside(name):
  bounds, inside, outside = DOCUMENTS[name]
  line = {"filter": name.split(",")[0], **bounds}
  assert cleaned(inside, line) == (inside.split("\n"), "")
  left, reason = cleaned(outside, line)
  assert left == [] and reason.startswith(line["filter"])


LINES = {
  "line_punctuated": ({"min": 1},
    ["a b.", "c!”", "好。"], ["a b", "c...", "d…"]),
  "line_words": ({"min": 3}, ["a b c"], ["a b"]),
  "line_longest_word": ({"max": 5}, ["abcde abc"], ["a abcdef"]),
  "line_policy": ({"max": 0},
    ["Java scripts and cookies"],
    ["Enable JavaScript", "Our Privacy Policy", "This site uses cookies."]),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_lines_just_inside_and_just_outside(name):
  bounds, inside, outside = LINES[name]
  counts = Counts()
  text = [*inside, "", *outside, "", *inside]
  chain = filters_of({"filter": name, **bounds})
  left, reason = chain.clean(text, counts)
  assert left == [*inside, "", "", *inside] and reason == ""
  assert sorted(counts[name].pop("examples")) == sorted(outside)[:3]
  assert counts[name] == {
    "documents": 0, "lines": len(outside),
    "characters": sum(map(len, outside)),
  }  # fmt: skip


def test_all_filters_have_a_test():
  tested = {name.split(",")[0] for name in (*DOCUMENTS, *LINES)}
  assert tested | {"language"} == {*filters._DOCUMENTS, *filters._LINES}
  # Short documents have all numbers: nothing is divided by 0.
  options = {"size": 10, "text": "x", "words": ["x"]}
  for name in {*filters._DOCUMENTS} - {"language"}:
    takes = filters._DOCUMENTS[name].options.keys() & options.keys()
    line = {"filter": name, "min": 0, **{k: options[k] for k in takes}}
    for text in ("", "a", "a b", "."):
      cleaned(text, line)


@pytest.mark.parametrize("size", range(2, 11))
def test_sequences_are_those_of_all_places(size):
  text = "a b c d e f g h i j k l x a b c d e f g h i j k l a b c a b c a b c"
  document = filters._Document([text])
  every = text.split()
  all_of = [
    " ".join(every[place : place + size])
    for place in range(len(every) - size + 1)
  ]
  twice = [place for place, text in enumerate(all_of) if all_of.count(text) > 1]
  places, numbers = (found.tolist() for found in document.recurring(size))
  assert places == twice
  numbered = {
    (number, all_of[place])
    for place, number in zip(places, numbers, strict=True)
  }
  texts = {all_of[place] for place in twice}
  assert len(numbered) == len({n for n, _ in numbered}) == len(texts)


def test_filters_go_in_the_order_of_the_file():
  line = {"filter": "text", "text": "a\tb\nc", "max": 0}
  assert cleaned("d a\tb\nc", line) == ([], "text a b c")
  lines = {"filter": "line_words", "min": 2}
  document = {"filter": "words", "min": 3}
  assert cleaned("a\nb c", lines, document) == ([], "words")
  assert cleaned("a\nb c", document, lines) == (["b c"], "")


# Settings files ---------------------------------------------------------------


def test_published_filters():
  good = [
    f"The {' '.join(LETTERS[i : i + 10])} and have." for i in range(0, 300, 10)
  ]
  for name in ("c4", "gopher", "fineweb"):
    chain = pickle.loads(pickle.dumps(Filters.load(name)))
    assert chain.clean(good, Counts()) == (good, "")
  numbers = ["The and have " + "1000000 " * 99 + ".", *good[:2]]
  for name in ("gopher", "fineweb"):
    left, reason = Filters.load(name).clean(numbers, Counts())
    assert (left, reason) == ([], "words_with_letters")
  left, _ = Filters.load("c4").clean([*good, "No end", "Short."], Counts())
  assert left == good


def test_citation_marks_leave_lines():
  chain, counts = filters_of({"filter": "citations"}), Counts()
  text = "See[1] that [citation needed].\n\n[edit]\na [2b] x[]\n[3 4]"
  left, reason = chain.clean(text.split("\n"), counts)
  assert left == ["See that .", "", "a [2b] x", "[3 4]"] and not reason
  removed = counts["citations"]
  assert (removed["lines"], removed["documents"]) == (3, 0)
  assert len(removed["examples"]) == 3
  # C4's go first, or no line here would end in punctuation.
  lines = ["The words of a line with marks end here.[4]"] * 3
  left, _ = Filters.load("c4").clean(lines, Counts())
  assert left == ["The words of a line with marks end here."] * 3


WRONG = {
  '[{"filter": "wrds", "min": 1}]': "wrds.*words",
  '[{"filter": "words"}]': "words has min, max or both",
  '[{"filter": "words", "min": 1, "mx": 2}]': "no mx",
  '[{"filter": "words", "min": "1"}]': "min is '1', not a number",
  '[{"filter": "top_sequence", "max": 1}]': "size is missing",
  '[{"filter": "citations", "max": 0}]': "citations has no min",
  "{}": "filters is {}, not a list",
  "": "Expecting value",
  "\udcff": "'utf-8' codec can't",
}


@pytest.mark.parametrize("content", WRONG)
def test_wrong_settings_are_named(tmp_path, content):
  path = tmp_path / "mine.json"
  text = f'{{"filters": {content}}}'
  path.write_bytes(text.encode(errors="surrogateescape"))
  with pytest.raises(errors.DataError, match=WRONG[content]) as e:
    Filters.load(str(path))
  assert str(e.value).startswith(f"{path}: ") and "\n" not in str(e.value)
  with pytest.raises(errors.DataError, match="gophr.*c4, fineweb, gopher"):
    Filters.load("gophr")
  with pytest.raises(errors.DataError) as e:  # a folder
    Filters.load(str(tmp_path))
  assert str(e.value).count(str(tmp_path)) == 1


def load(folder, line):
  """The filter of a settings file."""
  path = folder / "mine.json"
  path.write_text(json.dumps({"filters": [line]}))
  return Filters.load(str(path))


def test_words_of_a_file_are_part_of_the_settings(tmp_path):
  """So that other words make another corpus, and workers need no file."""
  listed = tmp_path / "bad.txt"
  line = {"filter": "listed_words", "file": str(listed), "max": 0}
  with pytest.raises(errors.DataError, match=r"bad\.txt"):
    load(tmp_path, line)
  listed.write_text("bad word\n\nwrong\n")
  chain = load(tmp_path, line)
  os.unlink(listed)
  counts = Counts()
  assert chain.clean(["A bad, bad word."], counts) == ([], "listed_words")
  assert chain.clean(["A bad thing."], counts) == (["A bad thing."], "")
  listed.write_text("other\n")
  assert load(tmp_path, line) != chain
  listed.write_bytes(b"fine\n\xff\n")
  with pytest.raises(errors.DataError, match=r"bad\.txt: line 2: not UTF-8"):
    load(tmp_path, line)


def test_language_without_its_library(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "py3langid", None)
  filters._language_model.cache_clear()
  with pytest.raises(errors.UserError, match="install -r requirements/text"):
    load(tmp_path, {"filter": "language", "code": "en", "min": 1})


def test_language(tmp_path, monkeypatch):
  if importlib.util.find_spec("py3langid"):
    line = {"filter": "language", "code": "en", "min": 0.65}
    german = "Das ist ein Satz in deutscher Sprache, und dieser ist auch einer."
    assert cleaned("This is a sentence in the English language.", line)[1] == ""
    assert cleaned(german, line)[1] == "language en"

  class Model:
    def rank(self, text):
      german = 0.9 if "und" in text else 0.2
      return [("de", german), ("en", 1 - german)]

  monkeypatch.setattr(filters, "_language_model", Model)
  line = {"filter": "language", "code": "de", "min": 0.65}
  assert cleaned("Hund und Katze", line)[1] == ""
  assert cleaned("dog and cat", line)[1] == "language de"
  with pytest.raises(errors.DataError, match="knows no xx, but de, en"):
    load(tmp_path, line | {"code": "xx"})


OTHER_LANGUAGES = {
  "fr": ({"filter": "stop_words", "min": 2}, "stop_words .*=fr: .*the .words"),
  "de": ({"filter": "language", "code": "en", "min": 0}, '"code": "de"'),
  "zh": ({"filter": "ellipses_per_word", "max": 0.1}, "leave it out"),
  "th": ({"filter": "words", "min": 50}, "words is not for .* leave it out"),
}


@pytest.mark.parametrize("language", OTHER_LANGUAGES)
def test_filters_of_another_language_are_refused(tmp_path, language):
  line, words = OTHER_LANGUAGES[language]
  path = tmp_path / "mine.json"
  path.write_text(json.dumps({"filters": [line]}))
  with pytest.raises(errors.DataError, match=words):
    Filters.load(str(path), language)
  with pytest.raises(
    errors.DataError, match="filter .* --language=" + language
  ):
    Filters.load("gopher", language)
  line = {"filter": "stop_words", "words": ["le"], "min": 1}
  path.write_text(json.dumps({"filters": [line]}))
  Filters.load(str(path), "fr")
  Filters.load("c4", "fr")


# Counts -----------------------------------------------------------------------


def test_counts_add_up_to_those_of_one_worker():
  chain = filters_of(
    {"filter": "line_words", "min": 2}, {"filter": "words", "min": 4}
  )
  texts = [[f"a{i} b c", f"d{i}"] + ["e f"] * (i % 3) for i in range(20)]
  parts, whole = [Counts(), Counts(), Counts()], Counts()
  for i, lines in enumerate(texts):
    chain.clean(lines, parts[i // 7])
    chain.clean(lines, whole)
  through_json = [json.loads(json.dumps(part)) for part in parts]
  total = filters.total(through_json)
  assert total == whole
  documents, lines = total["words"], total["line_words"]
  assert documents["documents"] == 7 and lines["lines"] == 20
  assert len(lines["examples"]) == 1  # all begin alike, but for a number
  assert filters.total([total, Counts()]) == total


def test_report_page():
  counts = Counts()
  counts.add("words", 1, 0, "<script>alert(1)</script> & more" * 100)
  summary = report.Summary(4, {"a<b.txt": [1000, 5]}, 0, {}, 0, counts)
  page = summary.page()
  assert "<script" not in page and "http" not in page and "src=" not in page
  assert "a&lt;b.txt" in page and "&lt;script&gt;" in page
  assert '<td class="number">25.00%</td>' in page
  assert '<td class="number">1,000</td>' in page
  assert len(page) < 3000  # an example is a beginning
