"""What the encoders of all kinds of tokenizers have in common."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from common import input_files, stores
from common.errors import DataError
from common.files import file_sha256
from common.model_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from text_encoders.characters import spelt_letters

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_TOKENS = (PAD, UNK, CLS, SEP, MASK)
SPECIAL_BY_ROLE = {"pad": PAD, "unk": UNK, "cls": CLS, "sep": SEP, "mask": MASK}

SENTENCEPIECE_SPACE = "\u2581"


@dataclasses.dataclass(frozen=True)
class TokenizerInfo:
  """The vocabulary that made the records."""

  kind: str  # an `Encoder.kind`
  file: str  # file name without folder, for people
  sha256: str  # of the vocabulary or model file
  vocab_size: int
  do_lower_case: bool
  mask_id: int

  @property
  def case(self) -> str:
    return "lower-cased" if self.do_lower_case else "cased"

  def is_like(self, other: "TokenizerInfo") -> bool:
    """Whether both give a text the same tokens, by all that is known."""
    own = self.kind, self.sha256, self.do_lower_case
    return own == (other.kind, other.sha256, other.do_lower_case)


class WordTokens(NamedTuple):
  """A line's tokens, and how they make words."""

  ids: np.ndarray  # int32 [tokens]
  is_continuation: np.ndarray  # bool [tokens]: of the previous token's word


class TokenSpans(NamedTuple):
  """int32 arrays [tokens]: token i is from text[starts[i] : ends[i]].

  A token that is only a space has no characters: start == end.
  """

  ids: np.ndarray
  starts: np.ndarray
  ends: np.ndarray

  @classmethod
  def of(cls, tokens: Sequence[tuple]) -> "TokenSpans":
    """Makes spans from the (id, start, end) of each token."""
    return cls(*np.array(tokens, np.int32).reshape(-1, 3).T)

  def with_dropped(self, text: str) -> "TokenSpans":
    """Gives tokens also the characters that a tokenizer dropped.

    Combining marks (uncased), soft hyphens, joiners and marks of direction join
    the token before them, as a mark joins its letter; after a space or at the
    beginning of the text, the token after them. Spaces, and dropped characters
    alone between spaces, join none.
    """
    count = len(text)
    # The sums of `depth` are the numbers of tokens that show each character.
    depth = np.zeros(count + 1, np.int32)
    np.add.at(depth, self.starts, 1)
    np.add.at(depth, self.ends, -1)
    is_space = np.array([char.isspace() for char in text], bool)
    is_dropped = (np.cumsum(depth)[:count] == 0) & ~is_space
    positions = np.arange(count + 1)
    # Begin and end of the dropped characters around each position.
    first = np.where(np.append(False, is_dropped), 0, positions)
    first = np.maximum.accumulate(first)
    last = np.where(np.append(is_dropped, False), count, positions)
    last = np.minimum.accumulate(last[::-1])[::-1]
    first = np.where(np.append(True, is_space)[first], first, positions)
    starts, ends = first[self.starts], last[self.ends]
    return TokenSpans(self.ids, starts.astype("i4"), ends.astype("i4"))

  def covering(self, first: int, last: int) -> tuple | None:
    """First and last token with characters in text[first:last], or None."""
    starts, ends = np.maximum(self.starts, first), np.minimum(self.ends, last)
    inside = np.flatnonzero(starts < ends)
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


class Encoder:
  """Text to ids, which are positions in the tokens of a kind of files."""

  kind: str  # as records name it
  flag: str  # names such a file
  usual_name: str  # of such a file beside a published model
  # Which tokens `mark` begins: those after a space, or those that go on in the
  # word of the token before them.
  marks_spaces: bool
  mark: str
  remedy = "tools.train_tokenizer makes one that has them"
  has_default_template = False  # instead of a file's own, which has none
  joiner = ""  # what a line needs that goes on after another
  tokens: list[str]
  texts: list[str]  # the tokens for people, with marks
  special: dict[str, str]  # role, such as "mask" -> special token

  def __init__(self, file: str, do_lower_case: bool):
    """DataError for a file that is bad or lacks a special token."""
    self.file, self.do_lower_case = file, do_lower_case

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each line, int32 [tokens]."""
    raise NotImplementedError

  def encode_rest(self, text: str) -> np.ndarray:
    """As `encode_batch`, of text that goes on inside a line."""
    return self.encode_batch([text])[0]

  def encode_word(self, word: str, space_before: bool = True) -> np.ndarray:
    """As after a space inside of a text, or else as the library's word."""
    del space_before  # most kinds of tokenizers give both the same tokens
    return self.encode_rest(f" {word}")

  @property
  def masks(self) -> re.Pattern:
    """Finds the mask in a text, by its name in the vocabulary or as [MASK]."""
    return re.compile(rf"\[MASK\]|{re.escape(self.special['mask'])}")

  def encode_with_masks(self, text: str) -> np.ndarray:
    """As `encode_batch`, of a text in which `masks` are tokens."""
    # The space before a mask is its word's.
    first, *rest = re.split(rf"\s*(?:{self.masks.pattern})", text)
    pieces = self.encode_batch([first])
    for piece in rest:
      pieces += [np.array([self.mask_id], np.int32), self.encode_rest(piece)]
    return np.concatenate(pieces)

  def template(self, count: int) -> list[np.ndarray]:
    """The special tokens before, between and after `count` texts, one or two.

    int32 arrays, one more than texts.
    """
    cls, sep = np.array([[self.cls_id], [self.sep_id]], np.int32)
    return [cls, *[sep] * count]

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    """Tokens of each line with its words, which are jieba's where Chinese."""
    raise NotImplementedError

  def encode_with_spans(self, text: str) -> TokenSpans:
    """The tokens of a text with the characters that they come from.

    Characters that no token shows, such as marks that lower-casing drops, are
    in no span.
    """
    raise NotImplementedError

  def library_tokenizer(self) -> Tokenizer | None:
    """Hugging Face's tokenizer with these ids, without special tokens.

    None: the encoder's own file is one. DataError if the library cannot do it.
    """
    return None

  def with_space_before(self) -> "Encoder":
    """The encoder as it is published beside a model of words.

    transformers' tokenizer then gives words the tokens that they have here.
    """
    return self

  def special_ids(self) -> dict[str, int]:
    """Ids by role: "pad", "unk" (if there is one), "cls", "sep" and "mask"."""
    return {role: getattr(self, f"{role}_id") for role in self.special}

  def lower(self, text: str) -> str:
    """What lower-casing makes of one of `texts`."""
    return text.lower()

  def config(self) -> dict:
    """What tokenizer_config.json beside the file says."""
    return {"do_lower_case": self.do_lower_case}

  def huggingface_config(self) -> dict:
    """The content of tokenizer_config.json beside a tokenizer.json."""
    content: dict = {"do_lower_case": self.do_lower_case}
    for role, token in self.special.items():
      content[f"{role}_token"] = token
    # The class that follows tokenizer.json.
    return content | {"tokenizer_class": "PreTrainedTokenizerFast"}

  def files(self, name: str) -> dict[str, bytes]:
    """A copy called `name`, and the files that it needs: name -> content."""
    return {name: input_files.read(self.file)}

  def digest(self) -> str:
    """The SHA-256 of all `files`, in hex."""
    files = sorted(self.files(os.path.basename(self.file)).items())
    return hashlib.sha256(repr(files).encode()).hexdigest()

  def _set_vocabulary(
    self, tokens: list[str], special: dict[str, str], texts: list[str]
  ) -> dict[str, int]:
    """token -> id; DataError if one of `special` is missing."""
    # Arrays over the vocabulary answer for a whole line of ids at once.
    self.special = special
    self.tokens, self.vocab_size, self.texts = tokens, len(tokens), []
    ids, continues, letters = {}, [], []
    for number, (token, text) in enumerate(zip(tokens, texts, strict=True)):
      # The last of repeated tokens gets the text, as in google/bert.
      ids[token] = number
      self.texts.append(text or f"[{number}]")
      continues.append(text.startswith(self.mark) != self.marks_spaces)
      letters.append(spelt_letters(text.replace(self.mark, "")))
    missing = []
    for token in dict.fromkeys(special.values()):  # one may have two roles
      if token not in ids:
        missing.append(token)
    if missing:
      raise DataError(
        f"{self.file}: the vocabulary lacks {', '.join(missing)}; {self.remedy}"
      )
    numbers = [ids[token] for token in special.values()]
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = numbers
    # bool [vocab_size]: which tokens continue the previous token's word.
    self.is_continuation = np.array(continues)
    self.is_continuation[numbers] = False
    # int [vocab_size]: the letters that each token spells.
    self.letters = np.array(letters)
    self.letters[numbers] = 0
    return ids

  def info(self) -> TokenizerInfo:
    name, sha256 = os.path.basename(self.file), file_sha256(self.file)
    lower, mask = self.do_lower_case, self.mask_id
    return TokenizerInfo(self.kind, name, sha256, self.vocab_size, lower, mask)


def inside_chinese_words(text: str, starts: Sequence[int]) -> np.ndarray:
  """bool [tokens]: which of `starts` are inside one of jieba's words."""
  # Imported here: only Chinese needs it.
  import rjieba

  lengths = np.fromiter(map(len, rjieba.cut(text)), np.int64)
  inside = np.ones(len(text) + 1, bool)
  inside[np.cumsum(lengths) - lengths] = False
  return inside[np.asarray(starts, np.int64)]


def config_beside(path: str) -> str:
  """Where tokenizer_config.json of a vocabulary, or of text for one, is."""
  folder, name = os.path.split(path)
  # Hugging Face's folders have one tokenizer each, of one of these names.
  if name in ("vocab.txt", "vocab.json", TOKENIZER_FILE):
    return os.path.join(folder, TOKENIZER_CONFIG_FILE)
  return stores.beside(path, f".{TOKENIZER_CONFIG_FILE}")
