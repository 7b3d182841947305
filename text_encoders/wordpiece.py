"""google/bert's tokens: words, and their pieces in a vocabulary."""

import collections
import itertools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, normalizers

from common import input_files
from common.errors import DataError
from text_encoders import base, characters

MAX_INPUT_CHARS_PER_WORD = 200

# Words whose pieces an encoder remembers, in about 100 MB at most.
_MAX_CACHED_WORDS = 500_000


def convert_to_unicode(text: str | bytes) -> str:
  """`text` as str; drops bytes that are not UTF-8."""
  if isinstance(text, str):
    return text
  if isinstance(text, bytes):
    return text.decode("utf-8", "ignore")
  raise ValueError(f"text must be str or bytes, not {type(text).__name__}")


def load_vocab(vocab_file: str) -> "collections.OrderedDict[str, int]":
  """Reads a vocabulary: token -> line number; DataError if unreadable."""
  text = convert_to_unicode(input_files.read(vocab_file)).lstrip("\ufeff")
  tokens = _tokens_of(text, vocab_file)
  # The last of equal tokens gives its number, as in google/bert.
  return collections.OrderedDict(zip(tokens, range(len(tokens)), strict=True))


def _tokens_of(text: str, file: str) -> list[str]:
  """The tokens by line number; blank lines at the end hold none.

  Others may be an unusual space, as in published Chinese vocabularies.
  """
  if text.lstrip().startswith("{") and '"model"' in text:
    raise DataError(f"{file} is a tokenizer.json: give it as --tokenizer_file")
  # `splitlines` would also break at U+2028, a token of Chinese vocabularies.
  text = text.rstrip("\n\r\t ")
  return [line.strip() for line in text.split("\n")] if text else []


def convert_by_vocab(vocab, items) -> list:
  """The values of `items` in `vocab`."""
  return [vocab[item] for item in items]


class _CharMap(dict):
  """A `str.translate` table that a function fills on demand."""

  def __init__(self, function):
    super().__init__()
    self._function = function

  def __missing__(self, code):
    self[code] = value = self._function(chr(code))
    return value


# What characters become; None removes them. google/bert's steps are: clean,
# lower-case, strip accents, split at punctuation.


def _cleaned(char):
  """A character before lower-casing."""
  if characters.is_whitespace(char):
    return " "
  if char == "\ufffd" or characters.is_control(char):
    return None
  return f" {char} " if characters.has_chinese(char) else char


def _spaced(char):
  """After NFD: punctuation stands alone."""
  return f" {char} " if characters.is_punctuation(char) else char


def _without_accent(char):
  """Drops a mark that NFD would sort among others."""
  is_accent = unicodedata.category(char) == "Mn"
  return None if is_accent and unicodedata.combining(char) else char


def _unaccented(char):
  return None if unicodedata.category(char) == "Mn" else _spaced(char)


def _kind(char):
  """A space ends a word, "." is a word alone, "w" goes on."""
  if characters.is_whitespace(char):
    return " "
  is_alone = characters.is_punctuation(char) or characters.has_chinese(char)
  return "." if is_alone else "w"


# All tokenizers share the tables, which hold what was met so far.
_CLEAN, _KINDS = _CharMap(_cleaned), _CharMap(_kind)
# Before NFD, whose time is quadratic in successive marks.
_STRIP = _CharMap(_without_accent)
_SPLIT_CASED, _SPLIT_LOWER = _CharMap(_spaced), _CharMap(_unaccented)
# ASCII has neither accents nor Chinese, so that one table does all steps.
_ASCII: dict[int, str | None] = {}
for _code in range(128):
  _char = _cleaned(chr(_code))
  _ASCII[_code] = _spaced(_char) if _char == chr(_code) else _char


class BasicTokenizer:
  """Text -> words: cleans, lower-cases, splits at spaces, CJK, punctuation.

  Whole texts, not google/bert's single words, make it ten times as fast: a
  space affects neither NFD nor `lower`'s one context rule (the Greek final
  sigma).
  """

  def __init__(self, do_lower_case: bool = True):
    self.do_lower_case = do_lower_case

  def tokenize(self, text: str | bytes) -> list[str]:
    """The words of a text; each punctuation sign and CJK character is one."""
    text = convert_to_unicode(text)
    # ASCII, most of English, needs one table only.
    if text.isascii():
      if self.do_lower_case:
        text = text.lower()
      return text.translate(_ASCII).split()
    text = text.translate(_CLEAN)
    if not self.do_lower_case:
      return text.translate(_SPLIT_CASED).split()
    text = text.lower().translate(_STRIP)
    return unicodedata.normalize("NFD", text).translate(_SPLIT_LOWER).split()


def word_spans(text: str) -> list[tuple[int, int]]:
  """Where `BasicTokenizer`'s words begin and end, in characters of `text`."""
  return [w.span() for w in re.finditer(r"w+|\.", text.translate(_KINDS))]


class WordpieceTokenizer:
  """Words -> pieces of the vocabulary, greedily, longest first."""

  def __init__(
    self,
    vocab,
    unk_token=base.UNK,
    max_input_chars_per_word=MAX_INPUT_CHARS_PER_WORD,
  ):
    self.vocab = vocab
    self.unk_token = unk_token
    self.max_input_chars_per_word = max_input_chars_per_word

  def tokenize(self, text: str | bytes) -> list[str]:
    """Pieces of words: unaffable is un, ##aff, ##able; or one `unk_token`."""
    pieces: list[str] = []
    for word in convert_to_unicode(text).split():
      pieces += self._pieces(word) or [self.unk_token]
    return pieces

  def _pieces(self, word):
    """The pieces of one word; None if it cannot be spelt with them."""
    if len(word) > self.max_input_chars_per_word:
      return None
    pieces, start = [], 0
    # Greedy: the longest piece that begins at `start`, again and again.
    while start < len(word):
      prefix = "##" if start else ""
      for end in range(len(word), start, -1):
        piece = prefix + word[start:end]
        if piece in self.vocab:
          break
      else:
        return None
      pieces.append(piece)
      start = end
    return pieces


# str.lower makes a capital sigma at a word's end another letter than elsewhere
# (Unicode 3.13, Final_Sigma); the library lower-cases letter by letter.
_CASED, _IGNORED = r"[\p{Lu}\p{Ll}\p{Lt}]", r"[\p{M}\p{Cf}\p{Lm}\p{Sk}'’.:·]"
FINAL_SIGMA = normalizers.Replace(
  Regex(
    f"(?<={_CASED}|{_CASED}{_IGNORED}|{_CASED}{_IGNORED}{_IGNORED})"
    f"Σ(?!{_IGNORED}*{_CASED})"
  ),
  "ς",
)


def bert_normalizer(lower: bool):
  """Cleans text as google/bert does."""
  bert = normalizers.BertNormalizer(strip_accents=lower, lowercase=lower)
  return normalizers.Sequence([FINAL_SIGMA, bert]) if lower else bert


class _PieceCache(dict):
  """word -> tuple of its pieces' ids, in memory of a bounded size."""

  def __init__(self, vocab: dict[str, int]):
    super().__init__()
    self._vocab = vocab
    self._tokenize = WordpieceTokenizer(vocab).tokenize

  def __missing__(self, word):
    ids = tuple(convert_by_vocab(self._vocab, self._tokenize(word)))
    # A longer word, which is unknown, may be as long as its line.
    if len(word) <= MAX_INPUT_CHARS_PER_WORD:
      # Frequent words come back soon, so starting anew costs little.
      if len(self) >= _MAX_CACHED_WORDS:
        self.clear()
      self[word] = ids
    return ids


class WordPieceEncoder(base.Encoder):
  """Lines -> exactly `FullTokenizer`'s ids."""

  kind, flag, usual_name = "wordpiece", "vocab_file", "vocab.txt"
  marks_spaces, mark = False, "##"

  def __init__(self, vocab_file: str, do_lower_case: bool):
    super().__init__(vocab_file, do_lower_case)
    try:
      text = input_files.read(vocab_file).decode("utf-8-sig")
      tokens = _tokens_of(text, vocab_file)
    except UnicodeDecodeError as e:
      raise DataError(f"{vocab_file}: not a vocabulary in UTF-8: {e}") from e
    vocab = self._set_vocabulary(tokens, base.SPECIAL_BY_ROLE, tokens)
    self.split_words = BasicTokenizer(do_lower_case).tokenize
    # Ids of a word's pieces; [UNK]'s if no pieces spell it.
    self.pieces_of = _PieceCache(vocab).__getitem__

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    encoded = []
    for line in lines:
      # The hot loop of making records: all of it runs in C but for new words.
      pieces = map(self.pieces_of, self.split_words(line))
      ids = list(itertools.chain.from_iterable(pieces))
      encoded.append(np.array(ids, np.int32))
    return encoded

  def encode_words(self, lines: Sequence[str]) -> list[base.WordTokens]:
    encoded = []
    for line in lines:
      words = self.split_words(line)
      pieces = list(map(self.pieces_of, words))
      ids = np.array(list(itertools.chain.from_iterable(pieces)), np.int32)
      is_continuation = self.is_continuation[ids]
      # The splitter makes a word of each Chinese character.
      is_chinese = [
        len(word) == 1 and characters.has_chinese(word) for word in words
      ]
      if any(is_chinese):
        firsts = np.cumsum([0, *map(len, pieces[:-1])])
        # For jieba spaces separate words, but not two Chinese ones.
        text, starts, follows_chinese = "", [], False
        for word, chinese in zip(words, is_chinese, strict=True):
          if not (chinese and follows_chinese):
            text += " "
          starts.append(len(text))
          text += word
          follows_chinese = chinese
        is_continuation[firsts] |= base.inside_chinese_words(text, starts)
      encoded.append(base.WordTokens(ids, is_continuation))
    return encoded

  def encode_with_spans(self, text: str) -> base.TokenSpans:
    words = self.split_words(text)
    shown = {}  # what a character becomes in words
    for char in set(text):
      shown[char] = "".join(self.split_words(char))
    # The positions in the text of the words' characters, one after the other.
    positions: list[int] = []
    for position, char in enumerate(text):
      positions += [position] * len(shown[char])
    if len(positions) != sum(map(len, words)):
      return self._spans_of_words(text)
    spans, begin = [], 0
    for word in words:
      ids = self.pieces_of(word)
      sizes = [len(self.tokens[token].removeprefix("##")) for token in ids]
      if sum(sizes) != len(word):  # the word is unknown: one [UNK]
        ids, sizes = ids[:1], [len(word)]
      for token, size in zip(ids, sizes, strict=True):
        spans.append((token, positions[begin], positions[begin + size - 1] + 1))
        begin += size
    return base.TokenSpans.of(spans)

  def _spans_of_words(self, text: str) -> base.TokenSpans:
    """Spans that are as long as the word, between spaces, that they are in."""
    # For texts in which a character changed by its neighbours, as a final
    # sigma does: which of the text's characters a token shows is not known.
    spans, end = [], 0
    for word in text.split():
      start = text.index(word, end)
      end = start + len(word)
      for part in self.split_words(word):
        for token in self.pieces_of(part):
          spans.append((token, start, end))
    return base.TokenSpans.of(spans)

  def lower(self, text: str) -> str:
    return "".join(BasicTokenizer().tokenize(text))

  def config(self) -> dict:
    lower = self.do_lower_case
    rules = {"strip_accents": lower, "tokenize_chinese_chars": True}
    return super().config() | rules

  def library_tokenizer(self) -> Tokenizer:
    # It differs from the encoder in rare characters: Unicode tables differ.
    tokenizer = Tokenizer(
      tokenizers.models.WordPiece(
        vocab=dict(load_vocab(self.file)),
        unk_token=base.UNK,
        max_input_chars_per_word=MAX_INPUT_CHARS_PER_WORD,
      )
    )
    tokenizer.normalizer = bert_normalizer(self.do_lower_case)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece(prefix="##")
    return tokenizer
