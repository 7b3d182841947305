"""Words to windows of tokens, and values of tokens back to words."""

import numpy as np
import pytest
import tokenizers
from samples import LETTERS

from finetuning.words import SILENT, encode_words, of_words
from text_encoders import kinds

CLS, SEP = LETTERS.index("[CLS]"), LETTERS.index("[SEP]")


@pytest.fixture(scope="module")
def encoder(letters):
  return kinds.load_tokenizer(letters, True)


def encode(encoder, sentences, max_seq_length=128, doc_stride=64):
  return encode_words(encoder, sentences, max_seq_length, doc_stride)


def test_a_word_speaks_through_its_first_token(encoder):
  """Of words that become several, or none, or two of the tokenizer's."""
  (window,) = encode(encoder, [["ab", "\u200b", "C", "a.b", "\u200b"]])
  tokens = [encoder.tokens[i] for i in window.ids]
  assert tokens == ["[CLS]", "a", "##b", "c", "a", ".", "b", "[SEP]"]
  assert window.words.tolist() == [-1, 0, -1, 2, 3, -1, -1, -1]
  assert not window.segments.any()


def spoken(window):
  """Numbers of the words that speak in a window."""
  return window.words[window.words != SILENT].tolist()


def test_sentences_without_a_word_that_speaks(encoder):
  for sentence in ([], ["\u200b", ""]):
    (window,) = encode(encoder, [sentence])
    assert window.ids.tolist() == [CLS, SEP] and not spoken(window)
    found = of_words(len(sentence), window.words, np.ones(2))
    assert found.tolist() == [SILENT] * len(sentence)


@pytest.mark.parametrize("length", [4, 6, 12])
@pytest.mark.parametrize("stride", [1, 5, 64])
def test_each_word_of_a_long_sentence_speaks_once(encoder, length, stride):
  rng = np.random.default_rng(length)
  sentences = []
  for count in (1, 3, 30, 50):
    lengths = rng.integers(1, 4, count)
    sentences.append(["x" * n for n in lengths])
  made = encode(encoder, sentences, max_seq_length=length, doc_stride=stride)
  found = []
  for window in made:
    assert len(window.ids) <= length
    assert window.ids[0] == CLS and window.ids[-1] == SEP
    found += spoken(window)
  # Between two sentences is the number of an end.
  ends = {1, 5, 36, 87}
  assert sorted(found) == [n for n in range(87) if n not in ends]


def test_a_word_speaks_where_it_has_most_context(encoder):
  """Eight tokens in windows of six, four apart: words 4, 5 are in both."""
  made = encode(encoder, [list("abcdefgh")], max_seq_length=8, doc_stride=4)
  assert list(map(spoken, made)) == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_values_come_back_to_their_words(encoder):
  sentences = [["ab", "\u200b", "c"], [], list("abcdefgh")]
  made = encode(encoder, sentences, max_seq_length=8, doc_stride=4)
  assert [window.sentence for window in made] == [0, 1, 2, 2]
  values = [np.arange(len(w.ids)) + 10.0 * n for n, w in enumerate(made)]
  words = np.concatenate([window.words for window in made])
  count = 3 + 1 + 0 + 1 + 8 + 1
  found = of_words(count, words, np.concatenate(values)).tolist()
  assert found[:5] == [1, SILENT, 3, SILENT, SILENT]
  assert found[5:] == [21, 22, 23, 24, 25, 32, 33, 34, SILENT]


def test_a_words_tokens_are_its_own_within_a_text(encoder, spm_model):
  """Of WordPiece those of the word alone, of SentencePiece those in a text."""
  given = ["w1", "w12", "w3"]
  (window,) = encode(encoder, [given])
  alone = np.concatenate(encoder.encode_batch(given))
  assert window.ids[1:-1].tolist() == alone.tolist()
  pieces = kinds.load_tokenizer(spm_model_file=spm_model)
  (window,) = encode(pieces, [given])
  (text,) = pieces.encode_batch([" ".join(given)])
  assert window.ids[1:-1].tolist() == text.tolist()
  firsts = [pieces.tokens[i][0] for i in window.ids[window.words != SILENT]]
  assert firsts == ["\u2581"] * 3


def test_words_of_a_byte_level_bpe_have_their_space(bpe_file):
  """The first one, too, as all the others of a text have."""
  encoder = kinds.load_tokenizer(tokenizer_file=bpe_file)
  given = ["cat", ",", "dog", "\u00e9a"]
  (window,) = encode(encoder, [given])
  library = tokenizers.Tokenizer.from_file(bpe_file)
  text = library.encode(f" {' '.join(given)}", add_special_tokens=False).ids
  assert window.ids[1:-1].tolist() == text
  firsts = window.ids[window.words != SILENT]
  assert all(encoder.tokens[i][0] == "\u0120" for i in firsts)
  assert len(firsts) == len(given)
