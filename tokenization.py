"""Text to token ids: google/bert's WordPiece, SentencePiece, sentences.

Scripts for google/bert use its names (`FullTokenizer`, `BasicTokenizer`, ...).
Data is made by the encoder of `load_tokenizer`. Characters are classified by
Python's `unicodedata`; the `tokenizers` library has other Unicode tables.
"""

import collections
import dataclasses
import itertools
import math
import os
import re
import string
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common import input_files
from common.errors import DataError
from common.files import file_sha256

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_TOKENS = (PAD, UNK, CLS, SEP, MASK)

MAX_INPUT_CHARS_PER_WORD = 200

# Words whose pieces an encoder remembers, in about 100 MB at most.
_MAX_CACHED_WORDS = 500_000

SENTENCEPIECE_SPACE = "\u2581"

# google/bert's public surface -------------------------------------------------

_DO_LOWER_CASE = {
  "uncased_L-24_H-1024_A-16": True,
  "uncased_L-12_H-768_A-12": True,
  "multilingual_L-12_H-768_A-12": True,
  "chinese_L-12_H-768_A-12": True,
  "cased_L-12_H-768_A-12": False,
  "cased_L-24_H-1024_A-16": False,
  "multi_cased_L-12_H-768_A-12": False,
}


def published_case(init_checkpoint: str | None) -> bool | None:
  """The do_lower_case of a checkpoint in a folder of google/bert's; or None."""
  folder = re.match(
    r"^.*?([A-Za-z0-9_-]+)/bert_model.ckpt", init_checkpoint or ""
  )
  return _DO_LOWER_CASE.get(folder.group(1)) if folder else None


def validate_case_matches_checkpoint(
  do_lower_case: bool, init_checkpoint: str | None
) -> None:
  """Raises `ValueError` if `do_lower_case` contradicts `published_case`."""
  wants_lower = published_case(init_checkpoint)
  if wants_lower is not None and wants_lower != bool(do_lower_case):
    raise ValueError(
      f"--do_lower_case={do_lower_case} but --init_checkpoint="
      f"{init_checkpoint} was trained on "
      f"{'lower-cased' if wants_lower else 'cased'} text: pass "
      f"--do_lower_case={wants_lower}"
    )


def convert_to_unicode(text: str | bytes) -> str:
  """`text` as str; drops bytes that are not UTF-8."""
  if isinstance(text, str):
    return text
  if isinstance(text, bytes):
    return text.decode("utf-8", "ignore")
  raise ValueError(f"text must be str or bytes, not {type(text).__name__}")


printable_text = convert_to_unicode


def load_vocab(vocab_file: str) -> "collections.OrderedDict[str, int]":
  """Reads a vocabulary: token -> line number; DataError if unreadable."""
  tokens = _tokens_of(convert_to_unicode(input_files.read(vocab_file)))
  return collections.OrderedDict((token, i) for i, token in enumerate(tokens))


def _tokens_of(text: str) -> list[str]:
  """The tokens by line number; blank lines at the end hold none.

  Others may be an unusual space, as in published Chinese vocabularies.
  """
  # `splitlines` would also break at U+2028, a token of Chinese vocabularies.
  text = text.rstrip("\n\r\t ")
  return [line.strip() for line in text.split("\n")] if text else []


def convert_by_vocab(vocab, items) -> list:
  """The values of `items` in `vocab`."""
  return [vocab[item] for item in items]


def convert_tokens_to_ids(vocab, tokens) -> list[int]:
  """The ids of tokens."""
  return convert_by_vocab(vocab, tokens)


def convert_ids_to_tokens(inv_vocab, ids) -> list[str]:
  """The tokens of ids."""
  return convert_by_vocab(inv_vocab, ids)


def whitespace_tokenize(text: str) -> list[str]:
  """The words of a text, which white space separates."""
  return text.split()


# google/bert's "CJK character": the Unified Ideographs, extensions A to E and
# the compatibility blocks, but not Hangul, Hiragana or Katakana.
_CJK_RANGES = (
  (0x4E00, 0x9FFF),
  (0x3400, 0x4DBF),
  (0x20000, 0x2A6DF),
  (0x2A700, 0x2B73F),
  (0x2B740, 0x2B81F),
  (0x2B820, 0x2CEAF),
  (0xF900, 0xFAFF),
  (0x2F800, 0x2FA1F),
)


class _CharMap(dict):
  """A `str.translate` table that a function fills on demand."""

  def __init__(self, function):
    super().__init__()
    self._function = function

  def __missing__(self, code):
    self[code] = value = self._function(chr(code))
    return value


# google/bert's own tests use these three names.
def _is_whitespace(char):
  return char in "\t\n\r" or unicodedata.category(char) == "Zs"


def _is_control(char):
  return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def _is_punctuation(char):
  """Unicode's punctuation, and ASCII's symbols such as $, ^ and `."""
  return char in string.punctuation or unicodedata.category(char)[0] == "P"


def _cleaned(char):
  """What a character becomes before lower-casing; None removes it."""
  if _is_whitespace(char):
    return " "
  if char == "\ufffd" or _is_control(char):
    return None
  return f" {char} " if is_chinese_char(char) else char


def _spaced(char):
  """After NFD: punctuation stands alone."""
  return f" {char} " if _is_punctuation(char) else char


def _is_accent(char):
  """A mark that lower-casing drops and that NFD would sort among others."""
  return unicodedata.combining(char) and unicodedata.category(char) == "Mn"


def _unaccented(char):
  return None if unicodedata.category(char) == "Mn" else _spaced(char)


def is_chinese_char(char: str) -> bool:
  """Whether google/bert takes a character for Chinese, see `_CJK_RANGES`."""
  # Most characters are below U+3400.
  return char >= "\u3400" and any(
    first <= ord(char) <= last for first, last in _CJK_RANGES
  )


def letters_of(text: str) -> int:
  """The number of characters that are no space."""
  return len(text) - sum(map(text.count, " \t\xa0\u3000"))


def spelt_letters(word: str) -> int:
  """The letters of a text that a word, or a piece of one, stands for."""
  # Lower-casing takes a syllable of Hangul apart: its first part counts.
  return len(re.sub("[\u1160-\u11ff]", "", word))


class FullTokenizer:
  """Text -> WordPiece tokens; KeyError for unknown tokens or ids."""

  def __init__(self, vocab_file: str, do_lower_case: bool = True):
    self.vocab = load_vocab(vocab_file)
    self.inv_vocab = {index: token for token, index in self.vocab.items()}
    self.basic_tokenizer = BasicTokenizer(do_lower_case=do_lower_case)
    self.wordpiece_tokenizer = WordpieceTokenizer(vocab=self.vocab)

  def tokenize(self, text: str | bytes) -> list[str]:
    pieces = []
    for word in self.basic_tokenizer.tokenize(text):
      pieces += self.wordpiece_tokenizer.tokenize(word)
    return pieces

  def convert_tokens_to_ids(self, tokens) -> list[int]:
    return convert_by_vocab(self.vocab, tokens)

  def convert_ids_to_tokens(self, ids) -> list[str]:
    return convert_by_vocab(self.inv_vocab, ids)


class BasicTokenizer:
  """Text -> words: cleans, lower-cases, splits at spaces, CJK, punctuation.

  Whole texts, not google/bert's single words, make it ten times as fast: a
  space affects neither NFD nor `lower`'s one context rule (the Greek final
  sigma).
  """

  def __init__(self, do_lower_case: bool = True):
    self.do_lower_case = do_lower_case
    self._clean = _CharMap(_cleaned)
    # Before NFD, whose time is quadratic in successive marks.
    self._strip = _CharMap(lambda c: None if _is_accent(c) else c)
    self._split = _CharMap(_unaccented if do_lower_case else _spaced)
    # ASCII has neither accents nor CJK: one table does both jobs.
    self._ascii = _CharMap(
      lambda c: _spaced(c) if _cleaned(c) == c else _cleaned(c)
    )

  def tokenize(self, text: str | bytes) -> list[str]:
    """The words of a text; each punctuation sign and CJK character is one."""
    text = convert_to_unicode(text)
    if text.isascii():
      if self.do_lower_case:
        text = text.lower()
      return text.translate(self._ascii).split()
    text = text.translate(self._clean)
    if self.do_lower_case:
      text = text.lower().translate(self._strip)
      text = unicodedata.normalize("NFD", text)
    return text.translate(self._split).split()


def word_spans(text: str) -> list[tuple[int, int]]:
  """Where `BasicTokenizer`'s words begin and end, in characters of `text`."""
  return [word.span() for word in re.finditer(r"w+|\.", text.translate(_KINDS))]


# Spaces end words, "." is one alone, "w" goes on.
_KINDS = _CharMap(
  lambda c: " " if _is_whitespace(c)
  else "." if _is_punctuation(c) or is_chinese_char(c) else "w"
)  # fmt: skip


class WordpieceTokenizer:
  """Words -> pieces of the vocabulary, greedily, longest first."""

  def __init__(
    self,
    vocab,
    unk_token=UNK,
    max_input_chars_per_word=MAX_INPUT_CHARS_PER_WORD,
  ):
    self.vocab = vocab
    self.unk_token = unk_token
    self.max_input_chars_per_word = max_input_chars_per_word

  def tokenize(self, text: str | bytes) -> list[str]:
    """Pieces of words: unaffable is un, ##aff, ##able; or one `unk_token`."""
    pieces: list[str] = []
    for word in whitespace_tokenize(convert_to_unicode(text)):
      pieces += self._pieces(word) or [self.unk_token]
    return pieces

  def _pieces(self, word):
    """The pieces of one word; None if it cannot be spelt with them."""
    if len(word) > self.max_input_chars_per_word:
      return None
    pieces, start = [], 0
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


# Encoders ---------------------------------------------------------------------


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
      if len(self) >= _MAX_CACHED_WORDS:
        self.clear()
      self[word] = ids
    return ids


@dataclasses.dataclass(frozen=True)
class TokenizerInfo:
  """The vocabulary that made the records."""

  kind: str  # "wordpiece" or "sentencepiece"
  file: str  # file name without folder, for people
  sha256: str  # of the vocabulary or model file
  vocab_size: int
  do_lower_case: bool
  mask_id: int

  @property
  def case(self) -> str:
    """In words."""
    return "lower-cased" if self.do_lower_case else "cased"

  def is_like(self, other: "TokenizerInfo") -> bool:
    """Whether both give a text the same tokens, by all that is known."""
    known = lambda info: (info.kind, info.sha256, info.do_lower_case)
    return known(self) == known(other)


class WordTokens(NamedTuple):
  """A line's tokens, and how they make words."""

  ids: np.ndarray  # int32 [tokens]
  is_continuation: np.ndarray  # bool [tokens]: of the previous token's word


class _Encoder:
  """What the encoders have in common: ids are positions in a vocabulary."""

  kind: str
  mark: str  # in tokens, not in the text
  file: str
  do_lower_case: bool

  def _set_vocabulary(
    self, tokens: list[str], special: Sequence[str], continues: list[bool]
  ) -> dict[str, int]:
    """token -> id; DataError if one of `special` is missing.

    No text ever gets a repeated token's first id, as in google/bert.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    missing = [token for token in special if token not in ids]
    if missing:
      raise DataError(
        f"{self.file}: the vocabulary lacks {', '.join(missing)}; "
        "tools.train_tokenizer makes one that has them"
      )
    special_ids = [ids[token] for token in special]
    self.tokens, self.vocab_size = tokens, len(tokens)
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
      special_ids
    )
    # bool [vocab_size]: which tokens continue the previous token's word.
    self.is_continuation = np.array(continues)
    self.is_continuation[special_ids] = False
    # int [vocab_size]: the letters that each token spells.
    spelt = [spelt_letters(token.replace(self.mark, "")) for token in tokens]
    self.letters = np.array(spelt)
    self.letters[special_ids] = 0
    return ids

  def info(self) -> TokenizerInfo:
    return TokenizerInfo(
      kind=self.kind,
      file=os.path.basename(self.file),
      sha256=file_sha256(self.file),
      vocab_size=self.vocab_size,
      do_lower_case=self.do_lower_case,
      mask_id=self.mask_id,
    )


def inside_chinese_words(text: str, starts: Sequence[int]) -> np.ndarray:
  """bool [tokens]: which of `starts` are inside one of jieba's words."""
  # Imported here: only Chinese needs it.
  import rjieba

  lengths = np.fromiter(map(len, rjieba.cut(text)), np.int64)
  inside = np.ones(len(text) + 1, bool)
  inside[np.cumsum(lengths) - lengths] = False
  return inside[np.asarray(starts, np.int64)]


def _respaced(words, is_chinese):
  """(text, starts of the words in it): spaces separate words for jieba."""
  parts, starts, size = [], [], 0
  follows_chinese = False
  for word, chinese in zip(words, is_chinese, strict=True):
    if not (chinese and follows_chinese):
      parts.append(" ")
      size += 1
    parts.append(word)
    starts.append(size)
    size += len(word)
    follows_chinese = chinese
  return "".join(parts), starts


class WordPieceEncoder(_Encoder):
  """Lines -> exactly `FullTokenizer`'s ids; DataError for a bad vocabulary."""

  kind, mark = "wordpiece", "##"

  def __init__(self, vocab_file: str, do_lower_case: bool):
    self.file, self.do_lower_case = vocab_file, do_lower_case
    try:
      tokens = _tokens_of(input_files.read(vocab_file).decode())
    except UnicodeDecodeError as e:
      raise DataError(f"{vocab_file}: not a vocabulary in UTF-8: {e}") from e
    continues = [token.startswith("##") for token in tokens]
    vocab = self._set_vocabulary(tokens, SPECIAL_TOKENS, continues)
    self.split_words = BasicTokenizer(do_lower_case).tokenize
    # Ids of a word's pieces; [UNK]'s if no pieces spell it.
    self.pieces_of = _PieceCache(vocab).__getitem__

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each line, int32 [tokens]."""
    encoded = []
    for line in lines:
      pieces = map(self.pieces_of, self.split_words(line))
      ids = list(itertools.chain.from_iterable(pieces))
      encoded.append(np.array(ids, np.int32))
    return encoded

  def encode_rest(self, text: str) -> np.ndarray:
    """As `encode_batch`, of text that goes on inside a line."""
    return self.encode_batch([text])[0]

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    """Tokens of each line with their words: `BasicTokenizer`'s, and jieba's."""
    encoded = []
    for line in lines:
      words = self.split_words(line)
      pieces = list(map(self.pieces_of, words))
      ids = np.array(list(itertools.chain.from_iterable(pieces)), np.int32)
      is_continuation = self.is_continuation[ids]
      # The splitter makes a word of each Chinese character.
      is_chinese = [len(word) == 1 and is_chinese_char(word) for word in words]
      if any(is_chinese):
        firsts = np.cumsum([0, *map(len, pieces[:-1])])
        text, starts = _respaced(words, is_chinese)
        is_continuation[firsts] |= inside_chinese_words(text, starts)
      encoded.append(WordTokens(ids, is_continuation))
    return encoded


def _check_model(model) -> None:
  """Raises `ValueError` for what the library takes and then ends the process.

  A table of normalization is the size of a trie in bytes, the trie's units
  (https://github.com/s-yata/darts-clone) and strings that end with a NUL, to
  whose beginnings the leaves point.
  """
  if any("\0" in p.piece or not math.isfinite(p.score) for p in model.pieces):
    raise ValueError("a piece has a NUL or no finite score")
  if len({piece.piece for piece in model.pieces}) < len(model.pieces):
    raise ValueError("a piece is in it twice")  # the library knows the first
  for spec in (model.normalizer_spec, model.denormalizer_spec):
    if not (table := spec.precompiled_charsmap):
      continue
    size = int.from_bytes(table[:4], "little")
    trie, strings = table[4 : 4 + size], table[4 + size :]
    is_whole = 0 < size == len(trie) and size % 1024 == 0
    units = np.frombuffer(trie[: len(trie) // 4 * 4], "<u4").astype(np.int64)
    leaves = units[units >= 1 << 31] - (1 << 31)
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    farthest = (np.arange(len(units)) ^ offsets) | 0xFF
    inner = farthest[units < 1 << 31]
    if (
      not (is_whole and strings.endswith(b"\0"))
      or inner.max(initial=0) >= len(units)
      or leaves.max(initial=0) >= len(strings)
    ):
      raise ValueError("its table of normalization is damaged")


class SentencePieceEncoder(_Encoder):
  """Lines -> ids of a SentencePiece model; U+2581 begins a word.

  DataError for a file that is no model or lacks a special token, by BERT's name
  or ALBERT's (<pad>, <unk>).
  """

  kind, mark = "sentencepiece", SENTENCEPIECE_SPACE

  def __init__(self, model_file: str, do_lower_case: bool):
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    self.file, self.do_lower_case = model_file, do_lower_case
    data = input_files.read(model_file)
    try:
      model = ModelProto.FromString(data)
      _check_model(model)
      self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except (DecodeError, RuntimeError, ValueError) as e:
      raise DataError(f"{model_file}: not a SentencePiece model: {e}") from e
    tokens = [piece.piece for piece in model.pieces]
    special = []
    for token in SPECIAL_TOKENS:
      alberts = f"<{token[1:-1].lower()}>"
      is_alberts = alberts in tokens and token not in tokens
      special.append(alberts if is_alberts else token)
    continues = [token[:1] != SENTENCEPIECE_SPACE for token in tokens]
    self._set_vocabulary(tokens, special, continues)

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each line, int32 [tokens]."""
    encoded = self._model.encode([self._clean(line) for line in lines])
    return [np.array(ids, np.int32) for ids in encoded]

  def encode_rest(self, text: str) -> np.ndarray:
    """As `encode_batch`, of text that goes on inside a line."""
    # The library begins a line with a space: after a character that no piece
    # has, only a space in the text is one.
    spans = self.encode_spans(f"\ue000{text}")
    return np.array([token for token, _, end in spans if end > 1], np.int32)

  def encode_spans(self, line: str) -> list[tuple]:
    """(id, begin, end) of each token, in characters of the encoded line."""
    encoded = self._model.encode_as_immutable_proto(self._clean(line))
    return [(piece.id, piece.begin, piece.end) for piece in encoded.pieces]

  def _clean(self, line):
    # A lone surrogate, which UTF-8 does not have, becomes "?".
    line = line.encode("utf-8", "replace").decode()
    return line.lower() if self.do_lower_case else line

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    """Tokens of each line; spaces separate words, jieba where it is Chinese."""
    words = []
    for line, ids in zip(lines, self.encode_batch(lines), strict=True):
      continues = self.is_continuation[ids]
      if any(map(is_chinese_char, line)):
        (pieces,) = self._model.encode([self._clean(line)], out_type=str)
        text = "".join(pieces).replace(SENTENCEPIECE_SPACE, " ")
        lengths = np.array(list(map(len, pieces)))
        continues = inside_chinese_words(text, np.cumsum(lengths) - lengths)
      words.append(WordTokens(ids, continues))
    return words


Encoder = WordPieceEncoder | SentencePieceEncoder


def load_tokenizer(
  vocab_file: str | None,
  do_lower_case: bool = True,
  spm_model_file: str | None = None,
  vocab_size: int | None = None,
) -> Encoder:
  """The encoder of the file given; DataError if bad or above `vocab_size`."""
  encoder: Encoder
  if vocab_file and not spm_model_file:
    encoder = WordPieceEncoder(vocab_file, do_lower_case)
  elif spm_model_file and not vocab_file:
    encoder = SentencePieceEncoder(spm_model_file, do_lower_case)
  else:
    raise DataError(
      "give either a WordPiece vocabulary (--vocab_file) or a SentencePiece "
      "model (--spm_model_file)"
    )
  if vocab_size is not None and encoder.vocab_size > vocab_size:
    raise DataError(
      f"{encoder.file} has {encoder.vocab_size} tokens, but the model has "
      f"vocab_size={vocab_size}: use the vocabulary that it was trained with"
    )
  return encoder


def split_sentences(text: str, language: str = "en") -> list[str]:
  """The stripped sentences of a paragraph; line ends count as spaces.

  An ISO 639-1 code without rules falls back to a related language or English.
  """
  import sentencex

  sentences = sentencex.segment(language, " ".join(text.split()))
  return [s.strip() for s in sentences if s.strip()]
