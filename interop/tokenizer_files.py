"""The tokenizer of a Hugging Face folder that gives our ids, and the reverse.

transformers' own BertTokenizer builds its pipeline from the vocabulary alone,
with words of 100 characters at most where google/bert has 200. So the folder
names transformers' general class, which takes tokenizer.json as it is.
"""

import json
import os
import re
from typing import NamedTuple

from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto

import tokenization
from common import json_files
from common.errors import DataError

VOCAB_FILE, MODEL_FILE = "vocab.txt", "spiece.model"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_MOST_TOKENS = 1 << 24


class Vocabulary(NamedTuple):
  """A WordPiece vocabulary or a SentencePiece model."""

  file: str  # VOCAB_FILE or MODEL_FILE
  content: bytes


# str.lower makes a capital sigma at a word's end another letter than elsewhere
# (Unicode 3.13, Final_Sigma); the library lower-cases single letters.
_CASED, _IGNORED = r"[\p{Lu}\p{Ll}\p{Lt}]", r"[\p{M}\p{Cf}\p{Lm}\p{Sk}'’.:·]"
_FINAL_SIGMA = (
  f"(?<={_CASED}|{_CASED}{_IGNORED}|{_CASED}{_IGNORED}{_IGNORED})"
  f"Σ(?!{_IGNORED}*{_CASED})"
)


def normalizer(do_lower_case: bool):
  """The `tokenizers` normalizer that cleans text as google/bert does."""
  from tokenizers import Regex, normalizers

  bert = normalizers.BertNormalizer(
    clean_text=True,
    handle_chinese_chars=True,
    strip_accents=do_lower_case,
    lowercase=do_lower_case,
  )
  if not do_lower_case:
    return bert
  sigma = normalizers.Replace(Regex(_FINAL_SIGMA), "ς")
  return normalizers.Sequence([sigma, bert])


def make_tokenizer(file: str, is_wordpiece: bool, do_lower_case: bool):
  """A `tokenizers.Tokenizer` with the ids of our encoder, and that encoder.

  Unlike ours it takes "[MASK]" and such in a text for the token.

  Raises:
    DataError: as the encoder, or for a SentencePiece model of another kind than
      train_tokenizer.py makes.
  """
  from tokenizers import AddedToken, processors

  if is_wordpiece:
    tokenizer, encoder = _wordpiece_tokenizer(file, do_lower_case)
  else:
    tokenizer, encoder = _sentencepiece_tokenizer(file, do_lower_case)
  special = special_tokens(encoder)
  _, _, cls, sep, _ = special
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{cls}:0 $A:0 {sep}:0",
    pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
    special_tokens=[(cls, int(encoder.cls_id)), (sep, int(encoder.sep_id))],
  )
  tokenizer.add_special_tokens(
    [AddedToken(token, normalized=False, special=True) for token in special]
  )
  return tokenizer, encoder


def special_tokens(encoder: tokenization.Encoder) -> list[str]:
  """Its [PAD], [UNK], [CLS], [SEP] and [MASK], which ALBERT spells <pad> ..."""
  ids = encoder.pad_id, encoder.unk_id, encoder.cls_id, encoder.sep_id
  return [encoder.tokens[i] for i in (*ids, encoder.mask_id)]


def _wordpiece_tokenizer(vocab_file: str, do_lower_case: bool):
  """`make_tokenizer`'s, before the special tokens.

  It differs where the library's Unicode tables differ from Python's: in rare
  characters, most of them newer than Unicode 10, and those of private use.
  """
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  encoder = tokenization.WordPieceEncoder(vocab_file, do_lower_case)
  tokenizer = Tokenizer(
    models.WordPiece(
      vocab=dict(tokenization.load_vocab(vocab_file)),
      unk_token=tokenization.UNK,
      max_input_chars_per_word=tokenization.MAX_INPUT_CHARS_PER_WORD,
    )
  )
  tokenizer.normalizer = normalizer(do_lower_case)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece(prefix="##")
  return tokenizer, encoder


def _sentencepiece_tokenizer(model_file: str, do_lower_case: bool):
  """`make_tokenizer`'s, before the special tokens.

  It differs in letters with several combining marks, since the library's
  normalizer loses some, and where two ways to cut a word are equally likely
  (". .." and ".. ."): each takes another.
  """
  from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
  )

  encoder = tokenization.SentencePieceEncoder(model_file, do_lower_case)
  pieces, charsmap = _read_model(model_file)
  tokenizer = Tokenizer(models.Unigram(pieces, unk_id=int(encoder.unk_id)))
  steps = [normalizers.Precompiled(charsmap)] if charsmap else []
  if do_lower_case:
    sigma = normalizers.Replace(Regex(_FINAL_SIGMA), "ς")
    steps = [sigma, normalizers.Lowercase(), *steps]
  steps += [
    normalizers.Strip(),
    normalizers.Replace(Regex(" {2,}"), " "),
  ]
  tokenizer.normalizer = normalizers.Sequence(steps)
  space = dict(
    replacement=tokenization.SENTENCEPIECE_SPACE, prepend_scheme="always"
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**space)
  tokenizer.decoder = decoders.Metaspace(**space)
  return tokenizer, encoder


def _read_model(model_file: str) -> tuple[list, bytes]:
  """[(piece, score), ...] and the charsmap of a model that has been loaded."""
  with open(model_file, "rb") as f:
    model = ModelProto.FromString(f.read())
  trainer, normalization = model.trainer_spec, model.normalizer_spec
  piece = model.SentencePiece
  if not (
    {p.type for p in model.pieces}
    <= {piece.NORMAL, piece.UNKNOWN, piece.CONTROL}
    and trainer.model_type == trainer.UNIGRAM
    and not (trainer.treat_whitespace_as_suffix or trainer.byte_fallback)
    and normalization.add_dummy_prefix
    and normalization.remove_extra_whitespaces
    and normalization.escape_whitespaces
  ):
    raise DataError(
      f"{model_file}: not a unigram model as train_tokenizer.py makes them "
      "(BPE, bytes, symbols of the user's, or another use of spaces): "
      "tokenizer.json would give other ids. Convert without --spm_model_file"
    )
  pieces = [(p.piece, p.score) for p in model.pieces]
  return pieces, normalization.precompiled_charsmap


def write_tokenizer(
  folder: str, vocabulary: Vocabulary, do_lower_case: bool, max_length: int
) -> None:
  """Writes the vocabulary, tokenizer.json and tokenizer_config.json.

  `max_length` is the longest text, in tokens; raises as `make_tokenizer`.
  """
  path = os.path.join(folder, vocabulary.file)
  with open(path, "wb") as f:
    f.write(vocabulary.content)
  tokenizer, encoder = make_tokenizer(
    path, vocabulary.file == VOCAB_FILE, do_lower_case
  )
  tokenizer.save(os.path.join(folder, TOKENIZER_FILE))
  names = [f"{name}_token" for name in ("pad", "unk", "cls", "sep", "mask")]
  content = {
    **dict(zip(names, special_tokens(encoder), strict=True)),
    "do_lower_case": do_lower_case,
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    "model_max_length": max_length,
    "tokenizer_class": "PreTrainedTokenizerFast",
  }
  json_files.write(os.path.join(folder, TOKENIZER_CONFIG_FILE), content)


def read_vocabulary(folder: str) -> Vocabulary | None:
  """vocab.txt or spiece.model, or vocab.txt as tokenizer.json has it.

  None without a tokenizer, or if tokenizer.json is not WordPiece; DataError for
  a damaged file.
  """
  for name in (VOCAB_FILE, MODEL_FILE):
    path = os.path.join(folder, name)
    if os.path.exists(path):
      return read_file(path, name)
  path = os.path.join(folder, TOKENIZER_FILE)
  if not os.path.exists(path):
    return None
  try:
    content = json_files.read(path)
    model = content["model"]
    if model.get("type", "WordPiece") != "WordPiece":
      return None
    vocab = dict(model["vocab"])
    vocab |= {t["content"]: t["id"] for t in content.get("added_tokens") or ()}
    if not 0 <= max(vocab.values()) < _MOST_TOKENS or min(vocab.values()) < 0:
      raise ValueError("impossible ids")
    lines = [""] * (max(vocab.values()) + 1)  # an id without a token: blank
    for token, number in vocab.items():
      lines[number] = token
  except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
    raise DataError(f"{path}: not a readable tokenizer ({e!r})") from e
  text = "".join(f"{line}\n" for line in lines)
  return Vocabulary(VOCAB_FILE, text.encode())


def read_file(path: str, name: str) -> Vocabulary:
  """A vocabulary under the name VOCAB_FILE or MODEL_FILE."""
  with open(path, "rb") as f:
    return Vocabulary(name, f.read())


def is_same(one: Vocabulary, other: Vocabulary) -> bool:
  """Whether two vocabularies have the same tokens in the same order."""
  if one.file != other.file or one.file != VOCAB_FILE:
    return one == other
  lines = [v.content.removesuffix(b"\n").split(b"\n") for v in (one, other)]
  return [x.strip() for x in lines[0]] == [x.strip() for x in lines[1]]


def size(vocabulary: Vocabulary) -> int:
  """The number of tokens; DataError for a damaged SentencePiece model."""
  if vocabulary.file == VOCAB_FILE:
    return len(vocabulary.content.removesuffix(b"\n").split(b"\n"))
  try:
    return len(ModelProto.FromString(vocabulary.content).pieces)
  except DecodeError as e:
    raise DataError("not a SentencePiece model, or a damaged one") from e


def longest_text(folder: str) -> int | None:
  """The longest text, in tokens, of a folder's tokenizer; None: no limit."""
  longest = _read_object(folder, TOKENIZER_CONFIG_FILE).get("model_max_length")
  # A huge number means no limit; `bool` is an `int`.
  return longest if type(longest) is int and longest > 0 else None


def reads_lower_case(folder: str, given: bool | None = None) -> bool | None:
  """Whether the folder's tokenizer lower-cases; None if its files do not say.

  `given` decides between files that contradict each other.

  Raises:
    DataError: a file is damaged, they contradict each other, or the tokenizer
      differs from google/bert's.
  """
  config = _read_object(folder, TOKENIZER_CONFIG_FILE)
  text = json.dumps(_read_object(folder, TOKENIZER_FILE).get("normalizer"))
  found = re.search(r'"lowercase": (true|false)', text)
  lower = config.get("do_lower_case")
  if found:
    normalizes = found[1] == "true"
    if lower not in (None, normalizes):
      if given is None:
        raise DataError(
          f"{folder}: {TOKENIZER_CONFIG_FILE} has do_lower_case={lower}, but "
          f"{TOKENIZER_FILE} lowercase={normalizes}: give --do_lower_case or "
          "--nodo_lower_case"
        )
      lower = given
    lower = normalizes if lower is None else lower
  if not isinstance(lower, bool | None):
    raise DataError(
      f"{os.path.join(folder, TOKENIZER_CONFIG_FILE)}: do_lower_case is "
      f"{lower!r}, not true or false"
    )
  bert = {"tokenize_chinese_chars": True, "strip_accents": lower}
  for key, usual in bert.items():
    value = config.get(key)
    if value is not None and lower is not None and value != usual:
      raise DataError(
        f"{os.path.join(folder, TOKENIZER_CONFIG_FILE)}: {key} is {value}, but "
        f"google/bert's tokenizer with do_lower_case={lower} has {usual}: it "
        "would give other tokens"
      )
  return lower


def _read_object(folder: str, name: str) -> dict:
  """The object in a JSON file; {} without the file."""
  path = os.path.join(folder, name)
  if not os.path.exists(path):
    return {}
  found = json_files.read(path)
  if not isinstance(found, dict):
    raise DataError(f"{path}: not a JSON object")
  return found
