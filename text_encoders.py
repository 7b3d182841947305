"""Encoders: text to ids by the file of a tokenizer.

`Encoder` is what all kinds of files have in common. Here are SentencePiece's
and Hugging Face's; tokenization.py has WordPiece's and the table of all.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders

from common import input_files, json_files
from common.errors import DataError
from common.files import file_sha256
from common.model_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_TOKENS = (PAD, UNK, CLS, SEP, MASK)
SPECIAL_BY_ROLE = {"pad": PAD, "unk": UNK, "cls": CLS, "sep": SEP, "mask": MASK}

SENTENCEPIECE_SPACE = "\u2581"

# google/bert's "CJK character": the Unified Ideographs, extensions A to E and
# the compatibility blocks, but not Hangul, Hiragana or Katakana.
_CHINESE = re.compile(
  "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
  "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)


def has_chinese(text: str) -> bool:
  """Whether google/bert takes a character of a text for Chinese."""
  return bool(_CHINESE.search(text))


def letters_of(text: str) -> int:
  """The number of characters that are no space."""
  return len(text) - sum(map(text.count, " \t\xa0\u3000"))


def spelt_letters(word: str) -> int:
  """The letters of a text that a word, or a piece of one, stands for."""
  # Lower-casing takes a syllable of Hangul apart: its first part counts.
  return letters_of(re.sub("[\u1160-\u11ff]", "", word))


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
    theirs = other.kind, other.sha256, other.do_lower_case
    return theirs == (self.kind, self.sha256, self.do_lower_case)


class WordTokens(NamedTuple):
  """A line's tokens, and how they make words."""

  ids: np.ndarray  # int32 [tokens]
  is_continuation: np.ndarray  # bool [tokens]: of the previous token's word


def without_surrogates(text: str) -> str:
  """A lone surrogate, which UTF-8 does not have, becomes "?"."""
  return text.encode("utf-8", "replace").decode()


class TokenSpans(NamedTuple):
  """int32 arrays [tokens]: token i is from text[starts[i] : ends[i]].

  A token that is only a space has no characters: start == end.
  """

  ids: np.ndarray
  starts: np.ndarray
  ends: np.ndarray

  @classmethod
  def of(cls, tokens: Sequence[tuple]) -> "TokenSpans":
    """Of (id, start, end) of each token."""
    return cls(*np.array(tokens, np.int32).reshape(-1, 3).T)

  def with_dropped(self, text: str) -> "TokenSpans":
    """Gives tokens also the characters that a tokenizer dropped.

    Combining marks (uncased), soft hyphens, joiners and marks of direction join
    the token before them, as a mark joins its letter; after a space or at the
    beginning of the text, the token after them. Spaces, and dropped characters
    alone between spaces, join none.
    """
    count = len(text)
    depth = np.zeros(count + 1, np.int32)  # its sums: tokens over a character
    np.add.at(depth, self.starts, 1)
    np.add.at(depth, self.ends, -1)
    is_space = np.array(list(map(str.isspace, text)), bool)
    is_dropped = (np.cumsum(depth)[:count] == 0) & ~is_space
    positions = np.arange(count + 1)
    # Begin and end of the dropped characters around each position.
    first = np.where(np.append(False, is_dropped), 0, positions)
    first = np.maximum.accumulate(first)
    last = np.where(np.append(is_dropped, False), count, positions)
    last = np.minimum.accumulate(last[::-1])[::-1]
    opens = np.append(True, is_space)[first]
    first = np.where(opens, first, positions)
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

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    """Tokens of each line with its words, which are jieba's where Chinese."""
    raise NotImplementedError

  def encode_with_spans(self, text: str) -> TokenSpans:
    """The tokens of a text with the characters that they come from.

    Characters that no token shows, such as marks that lower-casing drops, are
    in no span.
    """
    raise NotImplementedError

  def lower(self, text: str) -> str:
    """What lower-casing makes of one of `texts`."""
    return text.lower()

  def config(self) -> dict:
    """What tokenizer_config.json beside the file says."""
    return {"do_lower_case": self.do_lower_case}

  def huggingface_config(self) -> dict:
    """What it says beside a tokenizer.json."""
    content: dict = {"do_lower_case": self.do_lower_case}
    for role, token in self.special.items():
      content[f"{role}_token"] = token
    # The class that follows tokenizer.json.
    return content | {"tokenizer_class": "PreTrainedTokenizerFast"}

  def files(self, name: str) -> dict[str, bytes]:
    """A copy called `name`, and the files that it needs: name -> content."""
    return {name: input_files.read(self.file)}

  def _set_vocabulary(
    self, tokens: list[str], special: dict[str, str], texts: list[str]
  ) -> dict[str, int]:
    """token -> id; DataError if one of `special` is missing.

    No text ever gets a repeated token's first id, as in google/bert.
    """
    self.special = special
    self.tokens, self.vocab_size, self.texts = tokens, len(tokens), []
    ids, continues, letters = {}, [], []
    for number, (token, text) in enumerate(zip(tokens, texts, strict=True)):
      ids[token] = number
      self.texts.append(text or f"[{number}]")
      continues.append(text.startswith(self.mark) != self.marks_spaces)
      letters.append(spelt_letters(text.replace(self.mark, "")))
    names = dict.fromkeys(special.values())
    missing = ", ".join([token for token in names if token not in ids])
    if missing:
      raise DataError(
        f"{self.file}: the vocabulary lacks {missing}; {self.remedy}"
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


def _check_model(model) -> None:
  """Raises `ValueError` for what the library takes and then ends the process.

  A table of normalization is the size of a trie in bytes, the trie's units
  (https://github.com/s-yata/darts-clone) and strings that end with a NUL, to
  whose beginnings the leaves point.
  """
  pieces = set()
  for piece in model.pieces:
    if "\0" in piece.piece or not math.isfinite(piece.score):
      raise ValueError("a piece has a NUL or no finite score")
    if piece.piece in pieces:  # the library knows the first
      raise ValueError("a piece is in it twice")
    pieces.add(piece.piece)
  for spec in (model.normalizer_spec, model.denormalizer_spec):
    table = spec.precompiled_charsmap
    if not table:
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


class SentencePieceEncoder(Encoder):
  """Lines -> ids of a SentencePiece model; U+2581 begins a word.

  Special tokens have BERT's names or ALBERT's (<pad>, <unk>).
  """

  kind, flag, usual_name = "sentencepiece", "spm_model_file", "spiece.model"
  marks_spaces, mark = True, SENTENCEPIECE_SPACE

  def __init__(self, model_file: str, do_lower_case: bool):
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    super().__init__(model_file, do_lower_case)
    data = input_files.read(model_file)
    try:
      model = ModelProto.FromString(data)
      _check_model(model)
      self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except (DecodeError, RuntimeError, ValueError) as e:
      raise DataError(f"{model_file}: not a SentencePiece model: {e}") from e
    tokens = [piece.piece for piece in model.pieces]
    special = {}
    for role, token in SPECIAL_BY_ROLE.items():
      alberts = f"<{role}>"
      is_alberts = alberts in tokens and token not in tokens
      special[role] = alberts if is_alberts else token
    self._set_vocabulary(tokens, special, tokens)

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    encoded = self._model.encode([self._clean(line) for line in lines])
    return [np.array(ids, np.int32) for ids in encoded]

  def encode_rest(self, text: str) -> np.ndarray:
    # The library begins a line with a space: after a character that no piece
    # has, only a space in the text is one.
    pieces = self._pieces(f"\ue000{text}")
    return np.array([token for token, _, end in pieces if end > 1], np.int32)

  def _pieces(self, line: str) -> list[tuple]:
    """(id, begin, end) of each token, in characters of the encoded line."""
    encoded = self._model.encode_as_immutable_proto(self._clean(line))
    return [(piece.id, piece.begin, piece.end) for piece in encoded.pieces]

  def _clean(self, line):
    line = without_surrogates(line)
    return line.lower() if self.do_lower_case else line

  def _is_space(self, token: int) -> bool:
    return not self.tokens[token].strip(SENTENCEPIECE_SPACE)

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    words = []
    for line, ids in zip(lines, self.encode_batch(lines), strict=True):
      continues = self.is_continuation[ids]
      if has_chinese(line):
        text, starts = "", []
        for piece in self._model.encode(self._clean(line), out_type=str):
          starts.append(len(text))
          text += piece.replace(SENTENCEPIECE_SPACE, " ")
        continues = inside_chinese_words(text, starts)
      words.append(WordTokens(ids, continues))
    return words

  def encode_with_spans(self, text: str) -> TokenSpans:
    places: list[int] = []  # in the text, of the encoded line's characters
    for place, char in enumerate(text):
      places += [place] * len(char.lower() if self.do_lower_case else char)
    places.append(len(text))
    shown = set()  # characters that tokens show
    for char in set(text):
      for token, _, _ in self._pieces(char):
        if not self._is_space(token):
          shown.add(char)
    spans = []
    for token, begin, end in self._pieces(text):
      # A piece may begin with the space before its word. If a character gives
      # several pieces (an ellipsis gives three), only the last has it.
      inside = []
      if not self._is_space(token):
        for place in places[begin : max(end, begin + 1)]:
          if place < len(text) and text[place] in shown:
            inside.append(place)
      if inside:
        spans.append((token, inside[0], inside[-1] + 1))
      else:
        spans.append((token, places[begin], places[begin]))
    return TokenSpans.of(spans)


# Hugging Face's tokenizer.json ------------------------------------------------

# Role of a special token -> its keys in Hugging Face's files, and usual names.
_ROLES = {
  "pad": (["pad_token"], ["[PAD]", "<pad>"]),
  "unk": (["unk_token"], ["[UNK]", "<unk>"]),
  "cls": (["cls_token", "bos_token"], ["[CLS]", "<s>"]),
  "sep": (["sep_token", "eos_token"], ["[SEP]", "</s>"]),
  "mask": (["mask_token"], ["[MASK]", "<mask>"]),
}


def config_beside(path: str) -> str:
  """Where tokenizer_config.json of a vocabulary, or of text for one, is."""
  folder, name = os.path.split(path)
  # Hugging Face's folders have one tokenizer each, of one of these names.
  if name in ("vocab.txt", TOKENIZER_FILE):
    return os.path.join(folder, TOKENIZER_CONFIG_FILE)
  return f"{path}.{TOKENIZER_CONFIG_FILE}"


def _special_tokens(file: str, ids: dict[str, int]) -> dict[str, str]:
  """Role -> token, as files beside a tokenizer.json say, else by its name."""
  folder, name = os.path.split(file)
  paths = [config_beside(file)]
  if name == TOKENIZER_FILE:
    paths.insert(0, os.path.join(folder, "special_tokens_map.json"))
  form: dict = {}
  for keys, _ in _ROLES.values():
    for key in keys:
      form[f"{key}?"] = (str, {"content": str}, None)
  content: dict = {}
  for path in filter(os.path.exists, paths):
    content |= json_files.read(path, form)
  special: dict[str, str] = {}
  for role, (keys, names) in _ROLES.items():
    for token in [*map(content.get, keys), *names]:
      if isinstance(token, dict):
        token = token["content"]
      if token in ids:
        special.setdefault(role, token)
  return special


def _opened(file: str, content: bytes) -> Tokenizer:
  """Raises `DataError` for what is no tokenizer.json."""
  # Workers and ranks share the cores, so the library starts no threads.
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  try:
    return Tokenizer.from_buffer(content)
  except Exception as e:  # the library has no other class
    raise DataError(f"{file}: not a tokenizer.json: {e}") from e


def _reading_text(whole: Tokenizer, special: Iterable[str]) -> dict:
  """A tokenizer's JSON without what changes or cuts a text's tokens.

  Special tokens, `special` and those that it calls so, get names that no text
  has: so "[MASK]" in a text is text.
  """
  hidden = {name: f"\0{name}" for name in special}
  content = json.loads(whole.to_str())
  model = content["model"]
  model["dropout"] = None  # of merges, by chance
  for part in ("truncation", "padding", "post_processor"):
    content[part] = None
  for token in content["added_tokens"]:
    name = token["content"]
    if token["special"] or name in hidden:
      hidden[name] = f"\0{name}"
      token |= {"content": hidden[name], "normalized": False}
  vocab = model["vocab"]
  if model["type"] == "Unigram":  # the only one with a list
    model["vocab"] = [(hidden.get(name, name), score) for name, score in vocab]
  else:
    for name, other in hidden.items():
      if name in vocab:
        vocab[other] = vocab.pop(name)
  if model.get("unk_token") in hidden:
    model["unk_token"] = hidden[model["unk_token"]]
  return content


def _with_chinese_words(
  line: str, offsets: Sequence[tuple], continues: np.ndarray
) -> np.ndarray:
  """`continues` of a line's tokens, but by jieba's words around Chinese."""
  starts, ends = np.array(offsets).T
  inside = inside_chinese_words(line, starts)
  inside[1:] |= starts[1:] < ends[:-1]  # parts of one character
  chinese = np.array([has_chinese(line[i : i + 1]) for i in starts])
  chinese[1:] |= chinese[:-1]
  return np.where(chinese, inside, continues)


class HuggingFaceEncoder(Encoder):
  """Lines -> ids of a tokenizer.json, which decides the case itself."""

  kind, flag, usual_name = "huggingface", "tokenizer_file", TOKENIZER_FILE
  remedy = f"{TOKENIZER_CONFIG_FILE} beside it may name others"

  def __init__(self, file: str, do_lower_case: bool = False):
    whole = _opened(file, input_files.read(file))
    ids = whole.get_vocab(with_added_tokens=True)
    roles = _special_tokens(file, ids)
    content = _reading_text(whole, roles.values())
    self._library = _opened(file, json.dumps(content).encode())
    normalizer = whole.normalizer
    lowers = bool(normalizer) and "a" in normalizer.normalize_str("A")
    super().__init__(file, lowers)
    last = max(ids.values(), default=-1)
    if last > 2 * len(ids) + 1000:
      raise DataError(f"{file}: renumber its {len(ids)} tokens: one is {last}")
    tokens = [""] * (last + 1)
    for token, number in ids.items():
      tokens[number] = token
    texts, space = tokens, SENTENCEPIECE_SPACE
    parts = content["decoder"], content["pre_tokenizer"]
    if "ByteLevel" in json.dumps(parts):
      decode = decoders.ByteLevel().decode
      texts, space = [decode([token]) for token in tokens], " "
    prefix = content["model"].get("continuing_subword_prefix")
    self.mark = prefix or space
    has_spaces = any(text.startswith(space) for text in texts)
    self.marks_spaces = has_spaces and not prefix
    # Bytes need no [UNK]: [PAD], which no text becomes, stands for it.
    usual = SPECIAL_BY_ROLE | {"unk": roles.get("pad", PAD)}
    self._set_vocabulary(tokens, usual | roles, texts)
    self.special = roles
    (probe,) = self._encode(["a a"])
    self._splits_words = len({*probe.word_ids}) > 1
    begins_with_space = probe.ids and texts[probe.ids[0]].startswith(space)
    if self.marks_spaces and not begins_with_space:
      self.joiner = " "  # the library marks none where a text begins

  def config(self) -> dict:
    return self.huggingface_config()

  def files(self, name: str) -> dict[str, bytes]:
    beside = json_files.text(self.config(), indent=2).encode()
    return super().files(name) | {config_beside(name): beside}

  def _encode(self, lines: Sequence[str]) -> list:
    """The library's encodings, with words and characters."""
    lines = [without_surrogates(line) for line in lines]
    try:
      return self._library.encode_batch(lines, add_special_tokens=False)
    except Exception as e:  # of a letter without a token, where [UNK] lacks
      raise DataError(f"{self.file}: {e}") from e

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    encodings = self._encode(lines)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]

  def encode_rest(self, text: str) -> np.ndarray:
    # The library may begin a text with a space, but this character is no part
    # of a word's tokens, so that only a space in the text is one.
    is_metaspace = self.marks_spaces and self.mark == SENTENCEPIECE_SPACE
    first = "\ue000" if is_metaspace else "\n"
    (encoding,) = self._encode([first + text])
    _, ends = np.array(encoding.offsets, int).reshape(-1, 2).T
    return np.array(encoding.ids, np.int32)[ends > 1]

  def encode_words(self, lines: Sequence[str]) -> list[WordTokens]:
    words = []
    for line, encoding in zip(lines, self._encode(lines), strict=True):
      ids = np.array(encoding.ids, np.int32)
      numbers = np.array(encoding.word_ids)
      continues = np.zeros(len(ids), bool)
      continues[1:] = numbers[1:] == numbers[:-1]
      if not self._splits_words:  # to the library a line is one word
        continues &= self.is_continuation[ids]
      if len(ids) and has_chinese(line):
        continues = _with_chinese_words(line, encoding.offsets, continues)
      words.append(WordTokens(ids, continues))
    return words

  def encode_with_spans(self, text: str) -> TokenSpans:
    (encoding,) = self._encode([text])
    spans = []
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
      shown = text[start:end]
      start += len(shown) - len(shown.lstrip())
      spans.append((token, start, start + len(shown.strip())))
    return TokenSpans.of(spans)
