"""Windows over paragraphs: characters of tokens, answers in and out."""

import itertools
import tracemalloc
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import write_vocabulary

from finetuning import spans as answering
from finetuning import windows
from finetuning.spans import AnswerSettings
from text_encoders import kinds
from text_encoders.base import SPECIAL_TOKENS, Encoder, TokenSpans


def cut_by(max_seq_length, doc_stride):
  return AnswerSettings(max_seq_length=max_seq_length, doc_stride=doc_stride)


def best_of(n_best_size, max_answer_length):
  return AnswerSettings(
    n_best_size=n_best_size, max_answer_length=max_answer_length
  )


VOCABULARY = [
  *SPECIAL_TOKENS,
  "the", "cafe", "un", "##aff", "##able", "paris", ",", ".", "\u4e2d", "\u03bf",
  "##\u03c2", "i", "##stanbul", "'", "s",
]  # fmt: skip


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("words") / "vocab.txt"
  return write_vocabulary(path, VOCABULARY)


@pytest.fixture(scope="module")
def wordpiece(vocab_file):
  return kinds.load_tokenizer(vocab_file)


def parts_of(spans, text):
  return [text[a:b] for a, b in zip(spans.starts, spans.ends, strict=True)]


def surfaces(tokenizer, text):
  spans = tokenizer.encode_with_spans(text)
  return spans, parts_of(spans, text)


def test_wordpiece_spans(wordpiece):
  for text, parts in (
    ("The unaffable cafe.", ["The", "un", "aff", "able", "cafe", "."]),
    ("caf\u00e9, Paris", ["caf\u00e9", ",", "Paris"]),
    # The accent is a character of its own, which no token has.
    ("cafe\u0301 Paris", ["cafe", "Paris"]),
    ("\u4e2d\u4e2d the", ["\u4e2d", "\u4e2d", "the"]),
    ("xyzzy\u00a0Paris's", ["xyzzy", "Paris", "'", "s"]),
    ("\u0130stanbul", ["\u0130", "stanbul"]),  # lower() gives two characters
    ("\u039f\u03a3", ["\u039f", "\u03a3"]),  # the final sigma looks around
    ("  \t", []),
  ):
    assert surfaces(wordpiece, text)[1] == parts


@given(st.text(max_size=40))
def test_any_text_has_spans_in_order(wordpiece, text):
  spans = wordpiece.encode_with_spans(text)
  assert spans.ids.tolist() == wordpiece.encode_batch([text])[0].tolist()
  assert (spans.starts < spans.ends).all()
  assert (np.diff(spans.starts) >= 0).all() and (np.diff(spans.ends) >= 0).all()
  assert (spans.ends <= len(text)).all()


@pytest.fixture
def sentencepiece(spm_model):
  return kinds.load_tokenizer(spm_model_file=spm_model)


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


def test_a_character_of_several_sentencepiece_tokens(sentencepiece):
  """To the library only the last of the three dots of an ellipsis has it."""
  text = "\u0130 cat\u2026 mat"
  spans, found = surfaces(sentencepiece, text)
  dots = spans.ids == sentencepiece.tokens.index(".")
  assert np.array(found)[dots].tolist() == ["\u2026"] * 3


def test_dropped_characters_belong_to_a_token(wordpiece):
  for text, parts in (
    ("cafe\u0301 Paris", ["cafe\u0301", "Paris"]),
    ("un\u00adaffable\u200c, ", ["un\u00ad", "aff", "able\u200c", ","]),
    # At the begin, after a space, and alone between two.
    ("\u200e\u0301the \u200fcafe \u200b .",
     ["\u200e\u0301the", "\u200fcafe", "."]),
    ("'\u200fthe\u200f'\u200f", ["'\u200f", "the\u200f", "'\u200f"]),
    ("the\u2028cafe\x0bs\ufffd", ["the", "cafe\x0bs\ufffd"]),
    ("\u0301 \u200b", []),
  ):  # fmt: skip
    spans = wordpiece.encode_with_spans(text).with_dropped(text)
    assert parts_of(spans, text) == parts


def cut(context, spans, tokens):
  return context[spans.starts[tokens[0]] : spans.ends[tokens[1]]].strip()


def there_and_back(tokenizer, context, answer):
  """The answer of a question that a model which learned it would give."""
  place = context.index(answer)
  question = answering.Question("q", "?", context, ((answer, place),))
  spans = tokenizer.encode_with_spans(context)
  shown = spans.with_dropped(context)
  tokens = answering.answer_tokens(question, spans)
  if tokens is None:
    return None
  made = answering.make_windows(
    tokenizer, 0, spans.ids[:2], shown, cut_by(60, 9)
  )
  scores = []
  for window in made:
    first, last = answering.target_span(window, tokens)
    scores.append(logits(len(window.ids), **{f"s{first}": 9, f"e{last}": 9}))
  (found,) = answering.choose_answers([question], made, scores, best_of(1, 60))
  return found.text()


# Answers that begin or end in what a tokenizer drops.
DROPPED = [
  "caf\u00e9", "\u00c9mile", "\u0939\u093f\u0928\u094d\u0926\u0940\u0902",
  "\u0e17\u0e35\u0e48", "\u0633\u064e\u0644\u0627\u0645\u064c",
  "\u05e9\u05dc\u05b8\u05d5\u05b9", "\u2764\ufe0f", "\u0645\u06cc\u200c",
  "cafe\u00ad", "\ufeffthe", "\u200ethe\u200f", "cafe\u0301 Paris\u0301\u0302",
]  # fmt: skip


FLAGS = {
  "vocab_file": "vocab_file", "spm_model": "spm_model_file",
  "bpe_file": "tokenizer_file",
}  # fmt: skip


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("kind", FLAGS)
def test_answers_with_dropped_characters(request, kind, lower):
  named = {FLAGS[kind]: request.getfixturevalue(kind)}
  tokenizer = kinds.load_tokenizer(**named, do_lower_case=lower)
  for form, answer in itertools.product(("NFC", "NFD"), DROPPED):
    answer = unicodedata.normalize(form, answer)
    # In the first window, and in a later one.
    for context in (f"the {answer} cafe", f"{'cafe ' * 80}{answer} . the"):
      assert there_and_back(tokenizer, context, answer) == answer


def test_a_joiner_that_sentencepiece_takes_for_a_space(sentencepiece):
  """It is the begin of the next word's piece, and belongs to the one before."""
  for answer in ("cat\u200c", "cat mat"):
    assert there_and_back(sentencepiece, "cat\u200ccat mat", answer) == answer


def test_answers_that_are_wholly_dropped_are_not_found(wordpiece):
  for answer in ("\u0301", "\u200b", "\u0301\u200d"):
    assert there_and_back(wordpiece, f"the cafe{answer} s", answer) is None
    assert there_and_back(wordpiece, f"the {answer} s", answer) is None


_MIXED = st.text(
  "ae\u0301\u0302\u200d\u00ad\ufb03\u2026\ud55c\ud800 '.\u00a0", max_size=20
)


@pytest.fixture
def bpe(bpe_file):
  return kinds.load_tokenizer(tokenizer_file=bpe_file)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "bpe"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_MIXED, st.data())
def test_any_answer_is_found_again(request, kind, text, data):
  """What tokens show, as an answer, are tokens that show the same."""
  tokenizer = request.getfixturevalue(kind)
  spans = tokenizer.encode_with_spans(text)
  shown = spans.with_dropped(text)
  if not len(spans.ids):
    return
  numbers = st.integers(0, len(spans.ids) - 1)
  first, last = sorted([data.draw(numbers), data.draw(numbers)])
  start, end = shown.starts[first], shown.ends[last]
  tokens = spans.covering(start, end)
  if tokens is not None:
    assert cut(text, shown, tokens) == text[start:end].strip()


SPECIAL = Encoder("vocab.txt", True)
SPECIAL.cls_id, SPECIAL.sep_id = 2, 3


def spans_of(count):
  """Tokens of one character, apart by a space."""
  places = np.arange(count, dtype=np.int32)
  return TokenSpans(places + 100, 2 * places, 2 * places + 1)


def two_windows(number=0):
  """Of a question of 2 tokens and a paragraph of 10."""
  asked, limits = np.array([50, 51], np.int32), cut_by(11, 4)
  return answering.make_windows(SPECIAL, number, asked, spans_of(10), limits)


def test_windows_of_a_long_paragraph():
  made = two_windows(7)
  # 11 - 2 - 3 = 6 tokens of the paragraph each: 0-5, 4-9.
  assert [w.spans.ids.tolist() for w in made] == [
    [100, 101, 102, 103, 104, 105],
    [104, 105, 106, 107, 108, 109],
  ]
  assert made[0].ids.tolist() == [2, 50, 51, 3, 100, 101, 102, 103, 104, 105, 3]
  assert made[0].segments.tolist() == [0] * 4 + [1] * 7
  assert made[0].offset == 4 and made[0].question == 7
  assert [w.first for w in made] == [0, 4]
  # 104 has 1 to its right in the first and 0 to its left in the second; 105
  # has 0 and 1.
  assert made[0].is_best.tolist() == [True] * 5 + [False]
  assert made[1].is_best.tolist() == [False] + [True] * 5


def test_a_stride_larger_than_a_window_skips_nothing():
  made = answering.make_windows(
    SPECIAL, 0, np.zeros(1, int), spans_of(9), cut_by(8, 100)
  )
  assert sorted({i for w in made for i in w.spans.ids}) == list(range(100, 109))


def best_windows(count, room, stride):
  """(first token, past the last) of each window, and int [count]: the best."""
  parts, best = [], np.full(count, -1)
  for number, (start, stop, is_best) in enumerate(
    windows.parts_of(count, room, stride)
  ):
    parts.append((start, stop))
    assert (best[start:stop][is_best] == -1).all()
    best[start:stop][is_best] = number
  return parts, best.tolist()


@given(st.integers(0, 300), st.integers(1, 60), st.integers(1, 80))
def test_the_best_window_by_the_plain_formula(count, room, stride):
  parts, best = best_windows(count, room, stride)
  assert all(stop - start <= room for start, stop in parts)

  def context(window, token):
    start, stop = parts[window]
    if not start <= token < stop:
      return -1
    return min(token - start, stop - 1 - token) + 0.01 * (stop - start)

  expected = [
    max(range(len(parts)), key=lambda window: context(window, token))
    for token in range(count)
  ]
  assert best == expected


def test_the_best_window_takes_memory_by_the_tokens():
  """Not by windows times tokens, which are 400 MB here."""
  count = 80_000
  tracemalloc.start()
  for _ in windows.parts_of(count, 384, 128):
    pass
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 100 * count


CONTEXT = "a b c d e f g h i j"


def question(text, first):
  return answering.Question("q", "?", CONTEXT, ((text, first),) if text else ())


def test_targets():
  first, second = two_windows()

  def target(window, question):
    return answering.target_span(
      window, answering.answer_tokens(question, spans_of(10))
    )

  assert target(first, question("b c", 2)) == (5, 6)
  assert target(second, question("b c", 2)) == (0, 0)  # not in it
  assert target(first, question("f g", 10)) == (0, 0)  # only half of it
  assert target(second, question("f g", 10)) == (5, 6)
  assert target(first, question(" c ", 3)) == (6, 6)
  assert target(first, question(None, 0)) == (0, 0)


def test_the_first_answer_that_stands_there():
  places = ("b", 1), ("b", -17), ("b", 99), ("c d", 4), ("e", 8)
  for answers, want in ((places, (2, 3)), (places[:3], None)):
    asked = question(None, 0)._replace(answers=answers)
    assert answering.answer_tokens(asked, spans_of(10)) == want


def test_white_space_does_not_tell_an_answer_apart():
  """As in google/bert, which compares texts with one space between words."""
  for context, text, first, found in (
    ("a b  c d", "b c", 2, "b  c"),
    ("a b\nc d", "b c", 2, "b\nc"),
    ("a b\u00a0c d", "b c", 2, "b\u00a0c"),
    ("a b\u202f c d", "b\u3000c", 2, "b\u202f c"),
    ("a b c d", " b c ", 2, "b c"),  # the start of its first letter
    ("a       b       c d", "b c d", 8, "b       c d"),
    ("a b c", "b c\n", 2, "b c"),  # at the end of the context
    ("a b, c", "b c", 2, None),
    ("a bc d", "b d", 2, None),
    ("a b c", "b", 1, None),  # a start beside it
    ("a b c", "c", 10**30, None),
  ):
    places = [n for n, char in enumerate(context) if not char.isspace()]
    spans = TokenSpans.of([(100 + n, n, n + 1) for n in places])
    asked = answering.Question("1", "?", context, ((text, first),))
    tokens = answering.answer_tokens(asked, spans)
    assert (tokens and cut(context, spans, tokens)) == found


def logits(length, **scores):
  """Places that are not named have -9."""
  made = np.full((length, 2), -9.0)
  for name, score in scores.items():
    made[int(name[1:]), 0 if name[0] == "s" else 1] = score
  return made


def test_best_answers():
  made = two_windows()
  scores = [
    # In the first window: "b" to "c"; [CLS]; a start in the question; an end
    # before its start.
    logits(11, s0=1.0, e0=2.0, s1=9.0, s5=5.0, e6=4.0, s9=6.0, e4=7.0),
    logits(11, s0=0.5, e0=0.5, s6=3.0, e7=3.0),  # "g" to "h"
  ]
  asked, limits = [question(None, 0)], best_of(3, 3)
  (answers,) = answering.choose_answers(asked, made, scores, limits)
  assert [a.text for a in answers.best[:2]] == ["b c", "g h"]
  assert [a.score for a in answers.best[:2]] == [9.0, 6.0]
  assert answers.null.score == 1.0  # of the window where it is lowest
  shares = [share for _, share in answers.shares(limits)]
  assert sum(shares) == pytest.approx(1.0)
  # Answers of one token are not "b c".
  (short,) = answering.choose_answers(asked, made, scores, best_of(3, 1))
  assert "b c" not in [a.text for a in short.best]


def test_a_start_counts_where_it_has_the_most_around_it():
  made = two_windows()
  # Token 105 ("f") begins an answer in the first window, where it is last.
  scores = [logits(11, s9=9.0, e9=9.0), logits(11, s5=1.0, e5=1.0)]
  asked = [question(None, 0)]
  (answers,) = answering.choose_answers(asked, made, scores, best_of(1, 3))
  assert answers.best[0] == ("f", 1.0, 1.0)
