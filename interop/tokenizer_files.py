"""Hugging Face's tokenizer files from our vocabulary, and the reverse.

transformers' BertTokenizer allows words of 100 characters at most, google/bert
200. So the folder names its general class, which follows tokenizer.json.
"""

import json
import os
import re
from typing import NamedTuple

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

import tokenization
from checkpoints import description
from checkpoints.description import TASK_FILE, VOCABULARIES
from common import json_files
from common.errors import DataError
from interop import model_config

VOCAB_FILE, MODEL_FILE = VOCABULARIES.values()
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_MOST_TOKENS = 1 << 24
_SPECIAL = ("pad", "unk", "cls", "sep", "mask")


class Vocabulary(NamedTuple):
  """A WordPiece vocabulary or a SentencePiece model."""

  file: str  # VOCAB_FILE or MODEL_FILE
  content: bytes

  def lines(self) -> list[bytes]:
    """The tokens of a WordPiece vocabulary."""
    lines = self.content.removesuffix(b"\n").split(b"\n")
    return [line.strip() for line in lines]


# Writing ----------------------------------------------------------------------

# str.lower makes a capital sigma at a word's end another letter than elsewhere
# (Unicode 3.13, Final_Sigma); the library lower-cases letter by letter.
_CASED, _IGNORED = r"[\p{Lu}\p{Ll}\p{Lt}]", r"[\p{M}\p{Cf}\p{Lm}\p{Sk}'’.:·]"
_FINAL_SIGMA = normalizers.Replace(
  Regex(
    f"(?<={_CASED}|{_CASED}{_IGNORED}|{_CASED}{_IGNORED}{_IGNORED})"
    f"Σ(?!{_IGNORED}*{_CASED})"
  ),
  "ς",
)


def normalizer(do_lower_case: bool):
  """Cleans text as google/bert does."""
  bert = normalizers.BertNormalizer(
    clean_text=True,
    handle_chinese_chars=True,
    strip_accents=do_lower_case,
    lowercase=do_lower_case,
  )
  return normalizers.Sequence([_FINAL_SIGMA, bert]) if do_lower_case else bert


def make_tokenizer(
  file: str, is_wordpiece: bool, do_lower_case: bool, segment_ids: bool = True
):
  """A `tokenizers.Tokenizer` with the ids of our encoder, and that encoder.

  Without `segment_ids` the second text of a pair is of segment 0, too.
  Unlike ours it reads "[MASK]" and other special tokens in a text as tokens.
  """
  make = _wordpiece_tokenizer if is_wordpiece else _sentencepiece_tokenizer
  tokenizer, encoder = make(file, do_lower_case)
  special = special_tokens(encoder)
  _, _, cls, sep, _ = special
  second = int(segment_ids)
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{cls}:0 $A:0 {sep}:0",
    pair=f"{cls}:0 $A:0 {sep}:0 $B:{second} {sep}:{second}",
    special_tokens=[(t, encoder.tokens.index(t)) for t in (cls, sep)],
  )
  tokenizer.add_special_tokens(
    [AddedToken(token, normalized=False, special=True) for token in special]
  )
  return tokenizer, encoder


def special_tokens(encoder: tokenization.Encoder) -> list[str]:
  """[PAD], [UNK], [CLS], [SEP] and [MASK], which ALBERT names otherwise."""
  return [encoder.tokens[getattr(encoder, f"{name}_id")] for name in _SPECIAL]


def _wordpiece_tokenizer(vocab_file: str, do_lower_case: bool):
  """Differs from the encoder in rare characters: Unicode tables differ."""
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
  """Differs from the encoder where a letter has several combining marks.

  The library loses some of them. It also chooses otherwise between equally
  likely segmentations (". .." and ".. .").
  """
  encoder = tokenization.SentencePieceEncoder(model_file, do_lower_case)
  with open(model_file, "rb") as f:
    model = _read_model(f.read())
  trainer, normalization = model.trainer_spec, model.normalizer_spec
  if not (
    {piece.type for piece in model.pieces} <= {1, 2, 3}  # also unknown, control
    and trainer.model_type == trainer.UNIGRAM
    and not trainer.treat_whitespace_as_suffix
    and not trainer.byte_fallback
    and normalization.add_dummy_prefix
    and normalization.remove_extra_whitespaces
    and normalization.escape_whitespaces
  ):
    raise DataError(
      f"{model_file}: not a unigram model as tools.train_tokenizer makes them "
      "(BPE, bytes, symbols of the user's, or another use of spaces): "
      "tokenizer.json would give other ids. Convert with --to=tensorflow, and "
      "the checkpoint that it writes without this file beside it"
    )
  pieces = [(piece.piece, piece.score) for piece in model.pieces]
  tokenizer = Tokenizer(models.Unigram(pieces, unk_id=int(encoder.unk_id)))
  steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
  if charsmap := normalization.precompiled_charsmap:
    steps = [normalizers.Precompiled(charsmap), *steps]
  if do_lower_case:
    steps = [_FINAL_SIGMA, normalizers.Lowercase(), *steps]
  tokenizer.normalizer = normalizers.Sequence(steps)
  space = dict(
    replacement=tokenization.SENTENCEPIECE_SPACE, prepend_scheme="always"
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**space)
  tokenizer.decoder = decoders.Metaspace(**space)
  return tokenizer, encoder


def _read_model(content: bytes):
  """A `ModelProto`; `DataError` for other content."""
  try:
    return sentencepiece_model_pb2.ModelProto.FromString(content)
  except DecodeError as e:
    raise DataError("not a SentencePiece model, or damaged") from e


def write_tokenizer(
  folder: str,
  vocabulary: Vocabulary,
  do_lower_case: bool,
  max_length: int,
  segment_ids: bool = True,
) -> None:
  """Writes the vocabulary, tokenizer.json and tokenizer_config.json."""
  path = os.path.join(folder, vocabulary.file)
  with open(path, "wb") as f:
    f.write(vocabulary.content)
  is_wordpiece = vocabulary.file == VOCAB_FILE
  tokenizer, encoder = make_tokenizer(
    path, is_wordpiece, do_lower_case, segment_ids
  )
  # tokenizer.save() raises a bare Exception on a full disk.
  with open(os.path.join(folder, TOKENIZER_FILE), "w", encoding="utf-8") as f:
    f.write(tokenizer.to_str(pretty=True))
  names = [f"{name}_token" for name in _SPECIAL]
  content = {
    **dict(zip(names, special_tokens(encoder), strict=True)),
    "do_lower_case": do_lower_case,
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    "model_max_length": max_length,
    "tokenizer_class": "PreTrainedTokenizerFast",
  }
  json_files.write(os.path.join(folder, TOKENIZER_CONFIG_FILE), content)


# Reading ----------------------------------------------------------------------


def read_vocabulary(folder: str) -> Vocabulary | None:
  """vocab.txt, spiece.model, or the tokens of a WordPiece tokenizer.json."""
  for name in (VOCAB_FILE, MODEL_FILE):
    path = os.path.join(folder, name)
    if os.path.exists(path):
      return read_file(path, name)
  path = os.path.join(folder, TOKENIZER_FILE)
  if not os.path.exists(path):
    return None
  content = model_config.read_object(path)
  try:
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
  """Reads a vocabulary; its new `name` is VOCAB_FILE or MODEL_FILE."""
  with open(path, "rb") as f:
    return Vocabulary(name, f.read())


def is_same(one: Vocabulary, other: Vocabulary) -> bool:
  """Whether two vocabularies have the same tokens in the same order."""
  if one.file != other.file or one.file != VOCAB_FILE:
    return one == other
  return one.lines() == other.lines()


def size(vocabulary: Vocabulary) -> int:
  """Number of tokens; `DataError` for a damaged SentencePiece model."""
  if vocabulary.file == VOCAB_FILE:
    return len(vocabulary.lines())
  return len(_read_model(vocabulary.content).pieces)


def longest_text(folder: str) -> int | None:
  """The most tokens that the tokenizer makes of a text, if known."""
  longest = _read_object(folder, TOKENIZER_CONFIG_FILE).get("model_max_length")
  # A large number stands for no limit; `bool` is an `int`.
  return longest if type(longest) is int and longest > 0 else None


def cases(folder: str) -> dict[str, bool]:
  """What a file says, for people -> whether the text is lower-cased by it."""
  config = _read_object(folder, TOKENIZER_CONFIG_FILE)
  text = json.dumps(_read_object(folder, TOKENIZER_FILE).get("normalizer"))
  match = re.search(r'"lowercase": (true|false)', text)
  found = {}
  for file, key, lower in (
    (TOKENIZER_CONFIG_FILE, "do_lower_case", config.get("do_lower_case")),
    (TOKENIZER_FILE, "lowercase", match and match[1] == "true"),
    (
      TASK_FILE,
      "do_lower_case",
      description.read(folder).task.get("do_lower_case"),
    ),
  ):
    path = os.path.join(folder, file)
    if not isinstance(lower, bool | None):
      raise DataError(f"{path}: {key} is {lower!r}, not true or false")
    if lower is not None:
      found[f"{path} has {key}={json.dumps(lower)}"] = lower
  return found


def reads_lower_case(folder: str, given: bool | None = None) -> bool | None:
  """Whether the folder's model reads lower-cased text; None if no file says it.

  Raises `DataError` if the files contradict google/bert's tokenizer, or each
  other without `given`.
  """
  said = cases(folder)
  found = {*said.values()}
  if len(found) > 1 and given is None:
    raise DataError(
      f"{', '.join(said)}: correct the wrong one, or give --do_lower_case or "
      "--nodo_lower_case, which decides; to pre-train, the manifest of the "
      "records decides"
    )
  lower = given if len(found) > 1 else next(iter(found), None)
  config = _read_object(folder, TOKENIZER_CONFIG_FILE)
  usual = {
    "tokenize_chinese_chars": True, "handle_chinese_chars": True,
    "strip_accents": lower,
  }  # fmt: skip
  read = {TOKENIZER_CONFIG_FILE: config}
  if not str(config.get("tokenizer_class", "")).startswith("Bert"):
    # transformers' BertTokenizer sets its own normalizer by the config.
    normalizer = _read_object(folder, TOKENIZER_FILE).get("normalizer")
    if isinstance(normalizer, dict) and normalizer.get("lowercase") == lower:
      read[TOKENIZER_FILE] = normalizer
  for name, said_there in read.items():
    for key, value in usual.items():
      if lower is not None and said_there.get(key) not in (None, value):
        raise DataError(
          f"{os.path.join(folder, name)}: {key} is {said_there[key]}, but "
          f"google/bert's tokenizer with do_lower_case={lower} has {value}: "
          "the text would become other tokens"
        )
  return lower


def _read_object(folder: str, name: str) -> dict:
  """{} without the file."""
  path = os.path.join(folder, name)
  return model_config.read_object(path) if os.path.exists(path) else {}
