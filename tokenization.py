"""Text to token ids: google/bert's WordPiece, SentencePiece, sentences.

Two layers:
- google/bert's public names (`FullTokenizer`, `BasicTokenizer`, ...) in pure
  Python, for scripts written against it and as the reference for the rest.
- `WordPieceEncoder` and `SentencePieceEncoder`, which make data: whole batches
  of lines to int32 ids. `load_tokenizer` picks one.

What is a letter, a mark or a punctuation sign is asked of Python's own
`unicodedata` in both layers. So they cannot disagree, whereas the Unicode
tables compiled into the `tokenizers` library are of another version.
This module does not need TensorFlow, so that data workers start fast.
"""

import collections
import dataclasses
import itertools
import os
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from data import tfrecord

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_TOKENS = (PAD, UNK, CLS, SEP, MASK)

# google/bert's WordpieceTokenizer; the `tokenizers` library's default is 100.
MAX_INPUT_CHARS_PER_WORD = 200

# Words whose pieces an encoder remembers: about 100 MB at most. Text repeats
# its words, so a few hundred thousand of them cover almost every lookup.
_MAX_CACHED_WORDS = 500_000

SENTENCEPIECE_SPACE = "\u2581"

# -----------------------------------------------------------------------------
# google/bert's public surface
# -----------------------------------------------------------------------------

_UNCASED_MODELS = frozenset(
  (
    "uncased_L-24_H-1024_A-16",
    "uncased_L-12_H-768_A-12",
    "multilingual_L-12_H-768_A-12",
    "chinese_L-12_H-768_A-12",
  )
)
_CASED_MODELS = frozenset(
  (
    "cased_L-12_H-768_A-12",
    "cased_L-24_H-1024_A-16",
    "multi_cased_L-12_H-768_A-12",
  )
)


def published_case(init_checkpoint: str | None) -> bool | None:
  """The do_lower_case of a checkpoint in one of google/bert's own folders.

  None for any other: only the names of those folders are known.
  """
  match = re.match(
    r"^.*?([A-Za-z0-9_-]+)/bert_model.ckpt", init_checkpoint or ""
  )
  if match and match.group(1) in _UNCASED_MODELS | _CASED_MODELS:
    return match.group(1) in _UNCASED_MODELS
  return None


def validate_case_matches_checkpoint(
  do_lower_case: bool, init_checkpoint: str | None
) -> None:
  """Catches a published cased checkpoint used uncased, and the reverse.

  Only google/bert's own folder names are known; anything else passes.

  Raises:
    ValueError: `do_lower_case` contradicts the checkpoint's folder name.
  """
  wants_lower = published_case(init_checkpoint)
  if wants_lower is not None and wants_lower != bool(do_lower_case):
    raise ValueError(
      f"--do_lower_case={do_lower_case} but --init_checkpoint="
      f"{init_checkpoint} was trained on "
      f"{'lower-cased' if wants_lower else 'cased'} text: pass "
      f"--do_lower_case={wants_lower}"
    )


def convert_to_unicode(text: str | bytes) -> str:
  """`text` as str; bytes are taken as UTF-8, bad sequences are dropped.

  Raises:
    ValueError: neither str nor bytes.
  """
  if isinstance(text, str):
    return text
  if isinstance(text, bytes):
    return text.decode("utf-8", "ignore")
  raise ValueError(f"text must be str or bytes, not {type(text).__name__}")


def printable_text(text: str | bytes) -> str:
  """`text` as str for printing and logging; as `convert_to_unicode`."""
  return convert_to_unicode(text)


def load_vocab(vocab_file: str) -> "collections.OrderedDict[str, int]":
  """Reads a vocabulary: token -> line number, in the file's order.

  Lines end at "\\n" only: Chinese vocabularies hold U+2028 and the like as
  tokens, at which `str.splitlines` would break.

  Raises:
    DataError: the file cannot be read.
  """
  try:
    with open(vocab_file, "rb") as f:
      text = convert_to_unicode(f.read())
  except OSError as e:
    raise DataError(f"{vocab_file}: {e.strerror}") from e
  lines = text.split("\n")
  if not lines[-1]:
    lines.pop()  # what follows the last line's end
  vocab = collections.OrderedDict()
  for index, line in enumerate(lines):
    vocab[line.strip()] = index
  return vocab


def convert_by_vocab(vocab, items) -> list:
  """[vocab[item] for every item]; KeyError names the one that is missing."""
  return [vocab[item] for item in items]


def convert_tokens_to_ids(vocab, tokens) -> list[int]:
  """Ids of tokens (`vocab` as from `load_vocab`)."""
  return convert_by_vocab(vocab, tokens)


def convert_ids_to_tokens(inv_vocab, ids) -> list[str]:
  """Tokens of ids (`inv_vocab`: id -> token)."""
  return convert_by_vocab(inv_vocab, ids)


def whitespace_tokenize(text: str) -> list[str]:
  """The words of a text, as `str.split` separates them."""
  return text.split()


class FullTokenizer:
  """Text -> WordPiece tokens, as google/bert's."""

  def __init__(self, vocab_file: str, do_lower_case: bool = True):
    self.vocab = load_vocab(vocab_file)
    self.inv_vocab = {index: token for token, index in self.vocab.items()}
    self.basic_tokenizer = BasicTokenizer(do_lower_case=do_lower_case)
    self.wordpiece_tokenizer = WordpieceTokenizer(vocab=self.vocab)

  def tokenize(self, text: str | bytes) -> list[str]:
    """The tokens of a text."""
    return [
      piece
      for word in self.basic_tokenizer.tokenize(text)
      for piece in self.wordpiece_tokenizer.tokenize(word)
    ]

  def convert_tokens_to_ids(self, tokens) -> list[int]:
    """Ids of tokens; KeyError for one that is not in the vocabulary."""
    return convert_by_vocab(self.vocab, tokens)

  def convert_ids_to_tokens(self, ids) -> list[str]:
    """Tokens of ids; KeyError for one outside of the vocabulary."""
    return convert_by_vocab(self.inv_vocab, ids)


class BasicTokenizer:
  """Text -> words: cleans, lower-cases, splits at spaces, CJK, punctuation."""

  def __init__(self, do_lower_case: bool = True):
    self.do_lower_case = do_lower_case

  def tokenize(self, text: str | bytes) -> list[str]:
    """The words of a text; each punctuation sign and CJK character is one."""
    text = convert_to_unicode(text)
    text = self._tokenize_chinese_chars(self._clean_text(text))
    words = []
    for word in whitespace_tokenize(text):
      if self.do_lower_case:
        word = self._run_strip_accents(word.lower())
      words.extend(self._run_split_on_punc(word))
    return whitespace_tokenize(" ".join(words))

  def _clean_text(self, text):
    kept = (c for c in text if not _is_removed(c))
    return "".join(" " if _is_whitespace(c) else c for c in kept)

  def _tokenize_chinese_chars(self, text):
    return "".join(
      f" {c} " if self._is_chinese_char(ord(c)) else c for c in text
    )

  def _is_chinese_char(self, cp):
    return is_chinese_char(chr(cp))

  def _run_strip_accents(self, text):
    decomposed = unicodedata.normalize("NFD", text)
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn")

  def _run_split_on_punc(self, text):
    spaced = ((c, _is_punctuation(c)) for c in text)
    groups = itertools.groupby(spaced, key=lambda pair: pair[1])
    words = []
    for is_punctuation, pairs in groups:
      chars = [c for c, _ in pairs]
      words.extend(chars if is_punctuation else ["".join(chars)])
    return words


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
    """Pieces of words separated by spaces.

    A word with a part that no piece covers, or of too many characters, is one
    `unk_token`. "unaffable" becomes un, ##aff, ##able.
    """
    pieces = []
    for word in whitespace_tokenize(convert_to_unicode(text)):
      pieces.extend(self._pieces(word) or [self.unk_token])
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


# google/bert's "CJK character": the Unified Ideographs, extensions A to E and
# the compatibility blocks. Hangul, Hiragana and Katakana are not among them:
# they are spelt with pieces like any alphabet.
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

# Symbols such as $, ^ and ` are no punctuation to Unicode, but are here.
_ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def _is_whitespace(char):
  """Space, tab, newline, carriage return, or a Unicode space separator."""
  return char in " \t\n\r" or unicodedata.category(char) == "Zs"


def _is_control(char):
  """A control or format character, except those that separate words."""
  return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def _is_punctuation(char):
  """Unicode punctuation, or an ASCII sign that is no letter or digit."""
  return char in _ASCII_PUNCTUATION or unicodedata.category(char)[0] == "P"


def _is_removed(char):
  return char in "\0\ufffd" or _is_control(char)


# -----------------------------------------------------------------------------
# The fast path
# -----------------------------------------------------------------------------


class _CharMap(dict):
  """A `str.translate` table filled by a function as characters turn up."""

  def __init__(self, function):
    super().__init__()
    self._function = function

  def __missing__(self, code):
    self[code] = value = self._function(chr(code))
    return value


def _cleaned(char):
  """What a character becomes before lower-casing."""
  if _is_removed(char):
    return None
  if _is_whitespace(char):
    return " "
  if is_chinese_char(char):
    return f" {char} "
  return char


def _spaced(char):
  """What a character becomes after accents came apart: signs stand alone."""
  return f" {char} " if _is_punctuation(char) else char


def _is_accent(char):
  """A mark that lower-casing drops and that NFD would sort among others."""
  return unicodedata.combining(char) and unicodedata.category(char) == "Mn"


def _unaccented(char):
  return None if unicodedata.category(char) == "Mn" else _spaced(char)


def is_chinese_char(char: str) -> bool:
  """Whether a character is a Chinese one to google/bert, see `_CJK_RANGES`."""
  # Everything below U+3400 is not, which is most of what is asked.
  return char >= "\u3400" and any(
    first <= ord(char) <= last for first, last in _CJK_RANGES
  )


class WordSplitter:
  """`BasicTokenizer.tokenize`, about ten times as fast.

  Whole lines go through `str.translate`, `lower` and NFD. That equals
  google/bert's work on single words because a space neither takes part in NFD
  nor in the one context rule of `lower` (the Greek final sigma).
  """

  def __init__(self, do_lower_case: bool):
    self._do_lower_case = do_lower_case
    self._clean = _CharMap(_cleaned)
    # Before NFD, whose time is quadratic in the marks that follow each other;
    # those that it takes apart itself are few.
    self._strip = _CharMap(lambda c: None if _is_accent(c) else c)
    self._split = _CharMap(_unaccented if do_lower_case else _spaced)
    # ASCII has neither accents nor CJK: one table does both jobs.
    self._ascii = _CharMap(lambda c: c if _cleaned(c) == c else _cleaned(c))
    for code in range(128):
      if _cleaned(chr(code)) == chr(code):
        self._ascii[code] = _spaced(chr(code))

  def __call__(self, text: str) -> list[str]:
    """The words of a line."""
    if text.isascii():
      if self._do_lower_case:
        text = text.lower()
      return text.translate(self._ascii).split()
    text = text.translate(self._clean)
    if self._do_lower_case:
      text = text.lower().translate(self._strip)
      text = unicodedata.normalize("NFD", text)
    return text.translate(self._split).split()


class _IsChinese(dict):
  """word -> whether it is a Chinese character, which `WordSplitter` sets apart.

  Filled as words turn up; longer words are not kept.
  """

  def __missing__(self, word):
    if len(word) > 1:
      return False
    self[word] = is_chinese = is_chinese_char(word)
    return is_chinese


class _PieceCache(dict):
  """word -> tuple of ids, filled by the `tokenizers` library's WordPiece."""

  def __init__(self, vocab: dict[str, int]):
    super().__init__()
    # Imported here: training and reading records do without it.
    from tokenizers import models

    self._vocab = vocab
    # The model alone, so that nothing of the text is taken for a special
    # token: "[MASK]" in a text has been split at its brackets before.
    self._model = models.WordPiece(
      vocab=vocab,
      unk_token=UNK,
      max_input_chars_per_word=MAX_INPUT_CHARS_PER_WORD,
    )
    self._reference = WordpieceTokenizer(vocab)

  def __missing__(self, word):
    if len(word) > MAX_INPUT_CHARS_PER_WORD:
      return (self._vocab[UNK],)  # not kept: it may be as long as its line
    if len(self) >= _MAX_CACHED_WORDS:
      self.clear()
    try:
      ids = tuple(token.id for token in self._model.tokenize(word))
    except UnicodeEncodeError:  # a lone surrogate: Rust strings have none
      ids = tuple(self._vocab[p] for p in self._reference.tokenize(word))
    self[word] = ids
    return ids


def _checked_vocab(vocab_file: str) -> "collections.OrderedDict[str, int]":
  """A vocabulary fit for making data, or a DataError that says why not."""
  vocab = load_vocab(vocab_file)
  with open(vocab_file, "rb") as f:
    data = f.read()
  try:
    text = data.decode()
  except UnicodeDecodeError as e:
    line = data.count(b"\n", 0, e.start) + 1
    raise DataError(
      f"{vocab_file}: line {line} is not UTF-8: "
      "the vocabulary is damaged or no text"
    ) from e
  if not vocab:
    raise DataError(f"{vocab_file}: the vocabulary is empty")
  missing = [token for token in SPECIAL_TOKENS if token not in vocab]
  if missing:
    raise DataError(
      f"{vocab_file}: the vocabulary lacks {', '.join(missing)}, one token a "
      "line; train_tokenizer.py makes one that has them"
    )
  # A token that stands twice leaves an id that no text ever gets. Blank lines
  # are let be: published Chinese vocabularies hold unusual spaces as tokens.
  if len(vocab) <= max(vocab.values()):
    for index, token in enumerate(t.strip() for t in text.split("\n")):
      if token and vocab[token] != index:
        raise DataError(
          f"{vocab_file}: {token!r} stands on lines {index + 1} and "
          f"{vocab[token] + 1}; every token must be there once"
        )
  return vocab


@dataclasses.dataclass(frozen=True)
class TokenizerInfo:
  """What the tokens mean: which vocabulary made the records."""

  kind: str  # "wordpiece" or "sentencepiece"
  file: str  # file name without folder, for people
  sha256: str  # of the vocabulary or model file
  vocab_size: int
  do_lower_case: bool
  mask_id: int | None = None  # of [MASK]; needed for dynamic masks


class WordTokens(NamedTuple):
  """A line's tokens, and how they make words."""

  ids: np.ndarray  # int32 [tokens]
  goes_on: np.ndarray  # bool [tokens]: belongs to the word of the token before


def _has_chinese(line: str) -> bool:
  return not line.isascii() and any(map(is_chinese_char, line))


def inside_chinese_words(text: str, starts: Sequence[int]) -> np.ndarray:
  """Which tokens start inside of a word, as jieba finds words.

  Args:
    text: any text with Chinese in it.
    starts: where the tokens start in it, in characters.

  Returns:
    bool [tokens].
  """
  # Imported here: only Chinese needs it.
  import rjieba

  lengths = np.fromiter(map(len, rjieba.cut(text)), np.int64)
  inside = np.ones(len(text) + 1, bool)
  inside[np.cumsum(lengths) - lengths] = False
  return inside[np.asarray(starts, np.int64)]


def _respaced(words, is_chinese):
  """(text, starts of the words in it): spaces where no word can be found."""
  parts = [
    word if chinese and before else " " + word
    for word, chinese, before in zip(
      words, is_chinese, [False, *is_chinese], strict=False
    )
  ]
  ends = np.cumsum(list(map(len, parts)))
  return "".join(parts), ends - list(map(len, words))


class WordPieceEncoder:
  """Lines -> ids of exactly `FullTokenizer`'s tokens, fast.

  Attributes:
    vocab_size: lines of the vocabulary.
    pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
    is_continuation: bool [vocab_size], True for ids of ## pieces, which go on
      with the word that the token before them began.
    tokens: list of str [vocab_size], as in the file.
  """

  def __init__(self, vocab_file: str, do_lower_case: bool):
    """Loads the vocabulary.

    Raises:
      DataError: it is missing or empty, lacks a special token, or has a token
        twice.
    """
    vocab = _checked_vocab(vocab_file)
    self._file, self._do_lower_case = vocab_file, do_lower_case
    self.vocab_size = max(vocab.values()) + 1
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
      vocab[token] for token in SPECIAL_TOKENS
    )
    self.is_continuation = np.zeros(self.vocab_size, bool)
    self.tokens = [""] * self.vocab_size
    for token, index in vocab.items():
      self.tokens[index] = token
      self.is_continuation[index] = token.startswith("##")
    self._split = WordSplitter(do_lower_case)
    self._is_chinese = _IsChinese()
    self._pieces = _PieceCache(dict(vocab))

  def split_words(self, text: str) -> list[str]:
    """The words of a text, as `BasicTokenizer` makes them."""
    return self._split(text)

  def pieces_of(self, word: str) -> tuple:
    """Ids of a word's pieces; of [UNK] alone, if no pieces make it."""
    return self._pieces[word]

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each line: int32 [tokens of the line]."""
    find = self._pieces.__getitem__
    flatten = itertools.chain.from_iterable
    return [
      np.array(list(flatten(map(find, self._split(line)))), np.int32)
      for line in lines
    ]

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    """Token ids of each line, and which of them go on with a word.

    Words are what `BasicTokenizer` makes, and Chinese words, see
    `inside_chinese_words`.
    """
    return [self._encode_words(line) for line in lines]

  def _encode_words(self, line):
    words = self._split(line)
    pieces = [self._pieces[word] for word in words]
    ids = np.array(list(itertools.chain.from_iterable(pieces)), np.int32)
    goes_on = self.is_continuation[ids]
    if not line.isascii():
      is_chinese = [self._is_chinese[word] for word in words]
      if any(is_chinese):
        firsts = np.cumsum([0, *map(len, pieces[:-1])])
        goes_on[firsts] |= inside_chinese_words(*_respaced(words, is_chinese))
    return WordTokens(ids, goes_on)

  def info(self) -> TokenizerInfo:
    """What the manifest says about the tokens."""
    return TokenizerInfo(
      kind="wordpiece",
      file=os.path.basename(self._file),
      sha256=tfrecord.file_sha256(self._file),
      vocab_size=self.vocab_size,
      do_lower_case=self._do_lower_case,
      mask_id=int(self.mask_id),
    )


class SentencePieceEncoder:
  """Lines -> ids of a SentencePiece model; as `WordPieceEncoder`.

  `is_continuation` is True for ordinary pieces that do not start with U+2581;
  `do_lower_case` is the argument.
  """

  def __init__(self, model_file: str, do_lower_case: bool):
    """Loads the model.

    Raises:
      DataError: it is missing, no SentencePiece model, or lacks one of the
        pieces [PAD] [UNK] [CLS] [SEP] [MASK] (ALBERT's <pad> and <unk> will
        do).
    """
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    self._file, self.do_lower_case = model_file, do_lower_case
    try:
      with open(model_file, "rb") as f:
        data = f.read()
    except OSError as e:
      raise DataError(f"{model_file}: {e.strerror}") from e
    try:
      pieces = ModelProto.FromString(data).pieces
      self.tokens = [piece.piece for piece in pieces]
      if "\0" in "".join(self.tokens):
        raise ValueError("a piece has a NUL: the library ends the process")
      self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except (DecodeError, RuntimeError, ValueError) as e:
      raise DataError(f"{model_file}: not a SentencePiece model") from e
    self.vocab_size = len(self.tokens)
    if not np.isfinite([piece.score for piece in pieces]).all():
      raise DataError(f"{model_file}: damaged: a piece's score is not finite")
    vocab = {piece: i for i, piece in enumerate(self.tokens)}
    if len(vocab) < self.vocab_size:
      raise DataError(f"{model_file}: damaged: a piece is there twice")
    ids = [
      vocab.get(token, vocab.get(token.lower().strip("[]").join("<>")))
      for token in SPECIAL_TOKENS
    ]
    missing = [t for t, i in zip(SPECIAL_TOKENS, ids, strict=True) if i is None]
    if missing:
      raise DataError(
        f"{model_file}: the SentencePiece model lacks {', '.join(missing)}; "
        "train_tokenizer.py --tokenizer=sentencepiece makes one that has them"
      )
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = ids
    self.is_continuation = np.array(
      [not piece.startswith(SENTENCEPIECE_SPACE) for piece in self.tokens]
    )
    self.is_continuation[ids] = False

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each line: int32 [tokens of the line]."""
    return [
      np.array(ids, np.int32)
      for ids in self._model.encode([self._clean(line) for line in lines])
    ]

  def encode_spans(self, line: str) -> list[tuple]:
    """(id, begin, end) of each token, in characters of what is encoded.

    That is the line, lower-cased with `do_lower_case`.
    """
    found = self._model.encode_as_immutable_proto(self._clean(line))
    return [(piece.id, piece.begin, piece.end) for piece in found.pieces]

  def _clean(self, line):
    # A lone surrogate, which UTF-8 cannot say, becomes "?".
    line = line.encode("utf-8", "replace").decode()
    return line.lower() if self.do_lower_case else line

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    """Token ids of each line, and which of them go on with a word.

    Words are apart by spaces; in a line with Chinese they are jieba's, see
    `inside_chinese_words`.
    """
    encoded = self.encode_batch(lines)
    goes_on = [self.is_continuation[ids] for ids in encoded]
    chinese = [i for i, line in enumerate(lines) if _has_chinese(line)]
    pieces = self._model.encode(
      [self._clean(lines[i]) for i in chinese], out_type=str
    )
    for i, surfaces in zip(chinese, pieces, strict=True):
      text = "".join(surfaces).replace(SENTENCEPIECE_SPACE, " ")
      lengths = np.array(list(map(len, surfaces)))
      goes_on[i] = inside_chinese_words(text, np.cumsum(lengths) - lengths)
    return list(map(WordTokens, encoded, goes_on))

  def info(self) -> TokenizerInfo:
    """What the manifest says about the tokens."""
    return TokenizerInfo(
      kind="sentencepiece",
      file=os.path.basename(self._file),
      sha256=tfrecord.file_sha256(self._file),
      vocab_size=self.vocab_size,
      do_lower_case=self.do_lower_case,
      mask_id=int(self.mask_id),
    )


Encoder = WordPieceEncoder | SentencePieceEncoder


def load_tokenizer(
  vocab_file: str | None,
  do_lower_case: bool = True,
  spm_model_file: str | None = None,
  vocab_size: int | None = None,
) -> Encoder:
  """The encoder of a WordPiece vocabulary or of a SentencePiece model.

  Args:
    vocab_file, spm_model_file: one of them.
    do_lower_case: whether text is lower-cased.
    vocab_size: of the model that is to read its tokens, if there is one.

  Raises:
    DataError: neither or both files are given, the file does not do (see the
      encoders), or it has more tokens than `vocab_size`.
  """
  if bool(vocab_file) == bool(spm_model_file):
    raise DataError(
      "give either a WordPiece vocabulary (--vocab_file) or a SentencePiece "
      "model (--spm_model_file)"
    )
  encoder = (
    SentencePieceEncoder(spm_model_file, do_lower_case)
    if spm_model_file
    else WordPieceEncoder(vocab_file, do_lower_case)
  )
  if vocab_size is not None and encoder.vocab_size > vocab_size:
    raise DataError(
      f"{vocab_file or spm_model_file} has {encoder.vocab_size} tokens, but "
      f"the model has vocab_size={vocab_size}: use the vocabulary that it was "
      "trained with"
    )
  return encoder


# -----------------------------------------------------------------------------
# Sentences
# -----------------------------------------------------------------------------


def split_sentences(text: str, language: str = "en") -> list[str]:
  """The sentences of a paragraph, without the space around them.

  Args:
    text: prose; line ends in it count as spaces.
    language: ISO 639-1 code ("en", "zh", ...); an unknown one falls back to a
      related language or English.
  """
  import sentencex

  sentences = sentencex.segment(language, " ".join(text.split()))
  return [s.strip() for s in sentences if s.strip()]
