"""Windows over paragraphs: characters of tokens, answers in and out."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenization
from finetuning import offsets, windows
from finetuning.offsets import TokenSpans

VOCABULARY = [
  *tokenization.SPECIAL_TOKENS,
  "the", "cafe", "un", "##aff", "##able", "paris", ",", ".", "\u4e2d", "\u03bf",
  "##\u03c2", "i", "##stanbul", "'", "s",
]  # fmt: skip


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
  path = tmp_path_factory.mktemp("words") / "vocab.txt"
  path.write_text("".join(f"{t}\n" for t in VOCABULARY), encoding="utf-8")
  return tokenization.load_tokenizer(str(path))


def surfaces(tokenizer, text):
  spans = offsets.encode_with_spans(tokenizer, text)
  parts = [text[a:b] for a, b in zip(spans.starts, spans.ends, strict=True)]
  return spans, parts


@pytest.mark.parametrize(
  "text, parts",
  [
    ("The unaffable cafe.", ["The", "un", "aff", "able", "cafe", "."]),
    ("caf\u00e9, Paris", ["caf\u00e9", ",", "Paris"]),
    # The accent is a character of its own, which no token has.
    ("cafe\u0301 Paris", ["cafe", "Paris"]),
    ("\u4e2d\u4e2d the", ["\u4e2d", "\u4e2d", "the"]),
    ("xyzzy\u00a0Paris's", ["xyzzy", "Paris", "'", "s"]),
    ("\u0130stanbul", ["\u0130", "stanbul"]),  # lower() gives two characters
    ("\u039f\u03a3", ["\u039f", "\u03a3"]),  # the final sigma looks around
    ("", []),
    ("  \t", []),
  ],
)
def test_wordpiece_spans(wordpiece, text, parts):
  spans, found = surfaces(wordpiece, text)
  assert found == parts
  assert spans.ids.tolist() == wordpiece.encode_batch([text])[0].tolist()


@given(st.text(max_size=40))
def test_any_text_has_spans_in_order(wordpiece, text):
  spans = offsets.encode_with_spans(wordpiece, text)
  assert spans.ids.tolist() == wordpiece.encode_batch([text])[0].tolist()
  assert (spans.starts < spans.ends).all()
  assert (np.diff(spans.starts) >= 0).all() and (np.diff(spans.ends) >= 0).all()
  assert (spans.ends <= len(text)).all()


@pytest.fixture
def sentencepiece(spm_model):
  return tokenization.load_tokenizer(None, True, spm_model)


@pytest.mark.parametrize(
  "text", ["The  cat sat", " Paris .", "\u0130n Paris", "", "the\u00a0mat"]
)
def test_sentencepiece_spans(sentencepiece, text):
  spans, found = surfaces(sentencepiece, text)
  assert spans.ids.tolist() == sentencepiece.encode_batch([text])[0].tolist()
  # Nothing but spaces is left out, and no token with a letter has one around.
  kept = [c for a, b in zip(spans.starts, spans.ends, strict=True)
          for c in range(a, b)]  # fmt: skip
  assert set(kept) >= {i for i, c in enumerate(text) if not c.isspace()}
  assert all(part.strip() in (part, "") for part in found)


SPECIAL = types.SimpleNamespace(cls_id=2, sep_id=3)


def spans_of(count):
  """Tokens of one character, apart by a space."""
  places = np.arange(count, dtype=np.int32)
  return TokenSpans(places + 100, 2 * places, 2 * places + 1)


def test_windows_of_a_long_paragraph():
  made = windows.make_windows(
    SPECIAL, 7, np.array([50, 51], np.int32), spans_of(10), 11, 4
  )
  # 11 - 2 - 3 = 6 tokens of the paragraph each: 0-5, 4-9.
  assert [w.spans.ids.tolist() for w in made] == [
    [100, 101, 102, 103, 104, 105],
    [104, 105, 106, 107, 108, 109],
  ]
  assert made[0].ids.tolist() == [2, 50, 51, 3, 100, 101, 102, 103, 104, 105, 3]
  assert made[0].segments.tolist() == [0] * 4 + [1] * 7
  assert made[0].offset == 4 and made[0].question == 7
  # 104 has 1 to its right in the first and 0 to its left in the second; 105
  # has 0 and 1.
  assert made[0].is_best.tolist() == [True] * 5 + [False]
  assert made[1].is_best.tolist() == [False] + [True] * 5


def test_a_stride_larger_than_a_window_skips_nothing():
  made = windows.make_windows(SPECIAL, 0, np.zeros(1, int), spans_of(9), 8, 100)
  assert sorted({i for w in made for i in w.spans.ids}) == list(range(100, 109))


CONTEXT = "a b c d e f g h i j"


def question(text, first):
  return windows.Question("q", "?", CONTEXT, ((text, first),) if text else ())


def test_targets():
  first, second = windows.make_windows(
    SPECIAL, 0, np.array([50, 51]), spans_of(10), 11, 4
  )
  target = windows.target_span
  assert target(first, question("b c", 2)) == (5, 6)
  assert target(second, question("b c", 2)) == (0, 0)  # not in it
  assert target(first, question("f g", 10)) == (0, 0)  # only half of it
  assert target(second, question("f g", 10)) == (5, 6)
  assert target(first, question(" c ", 3)) == (6, 6)
  assert target(first, question(None, 0)) == (0, 0)


def logits(length, **scores):
  """Places that are not named have -9."""
  made = np.full((length, 2), -9.0)
  for name, score in scores.items():
    made[int(name[1:]), 0 if name[0] == "s" else 1] = score
  return made


def test_best_answers():
  made = windows.make_windows(
    SPECIAL, 0, np.array([50, 51]), spans_of(10), 11, 4
  )
  scores = [
    # In the first window: "b" to "c"; [CLS]; a start in the question; an end
    # before its start.
    logits(11, s0=1.0, e0=2.0, s1=9.0, s5=5.0, e6=4.0, s9=6.0, e4=7.0),
    logits(11, s0=0.5, e0=0.5, s6=3.0, e7=3.0),  # "g" to "h"
  ]
  answers, null = windows.best_answers(question(None, 0), made, scores, 3, 3)
  assert [a.text for a in answers[:2]] == ["b c", "g h"]
  assert answers[0].score == 9.0 and answers[1].score == 6.0
  assert null.score == 1.0  # of the window where it is lowest
  assert sum(windows.shares([*answers, null])) == pytest.approx(1.0)
  # Answers of one token are not "b c".
  short, _ = windows.best_answers(question(None, 0), made, scores, 3, 1)
  assert "b c" not in [a.text for a in short]


def test_a_start_counts_where_it_has_the_most_around_it():
  made = windows.make_windows(
    SPECIAL, 0, np.array([50, 51]), spans_of(10), 11, 4
  )
  # Token 105 ("f") begins an answer in the first window, where it is last.
  scores = [logits(11, s9=9.0, e9=9.0), logits(11, s5=1.0, e5=1.0)]
  answers, _ = windows.best_answers(question(None, 0), made, scores, 1, 3)
  assert answers[0] == ("f", 1.0, 1.0)
