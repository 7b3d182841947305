"""Hugging Face's tokenizer files: of our vocabulary, and whether theirs agree.

transformers' BertTokenizer allows words of 100 characters at most, google/bert
200. So the folder names its general class, which follows tokenizer.json.
"""

import json
import os
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

import tokenization
from common import files, input_files, json_files, stores
from common.errors import DataError, UserError
from common.model_files import TASK_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from text_encoders import Encoder, config_beside

_FORM = {
  "do_lower_case?": (bool, None), "tokenizer_class?": (str, None),
  "never_split?": (list, None), "additional_special_tokens?": (list, None),
  "added_tokens?": ([{"id": int, "content": str}], None),
  "normalizer?": (dict, None),
  "model?": {"type?": str, "vocab?": (dict, list)},
}  # fmt: skip
_ADDED_FILE = "added_tokens.json"
_SPLIT = "the list of added tokens that are split here"
_MOVED = "the list of ids that are others here"
# What Hugging Face's files say where text becomes tokens as in google/bert.
_RULES: dict[str, Sequence] = {
  "tokenizer_class": (
    "None", "Bert", "DistilBert", "Electra", "PreTrained", "TokenizersBackend",
  ),
  "do_basic_tokenize": (True, None), "tokenize_chinese_chars": (True, None),
  "word_tokenizer_type": ("basic", None),
  "subword_tokenizer_type": ("wordpiece", None),
  "pre_tokenizer": ({"type": "BertPreTokenizer"},),
  "model.type": ("WordPiece",), "model.unk_token": (tokenization.UNK,),
  "model.continuing_subword_prefix": ("##",),
  "model.max_input_chars_per_word": (
    tokenization.MAX_INPUT_CHARS_PER_WORD, 100,  # transformers' default
  ),
  _SPLIT: ([],), _MOVED: ({},),
}  # fmt: skip

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


def normalizer(lower: bool):
  """Cleans text as google/bert does."""
  bert = normalizers.BertNormalizer(strip_accents=lower, lowercase=lower)
  return normalizers.Sequence([_FINAL_SIGMA, bert]) if lower else bert


def make_tokenizer(encoder: Encoder, segment_ids: bool = True) -> Tokenizer:
  """A tokenizer with the ids of an encoder.

  Without `segment_ids` the second text of a pair is of segment 0, too. Unlike
  the encoder it reads "[MASK]" and other special tokens in a text as tokens.
  """
  tokenizer = _MAKERS[encoder.kind](encoder)
  cls, sep = encoder.special["cls"], encoder.special["sep"]
  second = int(segment_ids)
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{cls}:0 $A:0 {sep}:0",
    pair=f"{cls}:0 $A:0 {sep}:0 $B:{second} {sep}:{second}",
    special_tokens=[(cls, encoder.cls_id), (sep, encoder.sep_id)],
  )
  tokenizer.add_special_tokens([*encoder.special.values()])
  return tokenizer


def special_ids(encoder: Encoder) -> dict[str, int]:
  """Those of "pad", "unk" (if there is one), "cls", "sep" and "mask"."""
  return {role: getattr(encoder, f"{role}_id") for role in encoder.special}


def _of_wordpiece(encoder: Encoder) -> Tokenizer:
  """Differs from the encoder in rare characters: Unicode tables differ."""
  tokenizer = Tokenizer(
    models.WordPiece(
      vocab=dict(tokenization.load_vocab(encoder.file)),
      unk_token=tokenization.UNK,
      max_input_chars_per_word=tokenization.MAX_INPUT_CHARS_PER_WORD,
    )
  )
  tokenizer.normalizer = normalizer(encoder.do_lower_case)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece(prefix="##")
  return tokenizer


def _of_sentencepiece(encoder: Encoder) -> Tokenizer:
  """Differs from the encoder where a letter has several combining marks.

  The library loses some of them. It also chooses otherwise between equally
  likely segmentations (". .." and ".. .").
  """
  content = input_files.read(encoder.file)
  model = sentencepiece_model_pb2.ModelProto.FromString(content)
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
      f"{encoder.file}: not a unigram model as tools.train_tokenizer makes it "
      "(BPE, bytes, symbols of the user's, or another use of spaces): "
      "tokenizer.json would give other ids. Convert with --to=tensorflow, and "
      "the checkpoint that it writes without this file beside it"
    )
  pieces = [(piece.piece, piece.score) for piece in model.pieces]
  tokenizer = Tokenizer(models.Unigram(pieces, unk_id=encoder.unk_id))
  steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
  charsmap = normalization.precompiled_charsmap
  if charsmap:
    steps = [normalizers.Precompiled(charsmap), *steps]
  if encoder.do_lower_case:
    steps = [_FINAL_SIGMA, normalizers.Lowercase(), *steps]
  tokenizer.normalizer = normalizers.Sequence(steps)
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  tokenizer.decoder = decoders.Metaspace()
  return tokenizer


_MAKERS = {"wordpiece": _of_wordpiece, "sentencepiece": _of_sentencepiece}


def write_tokenizer(
  folder: str,
  encoder: Encoder,
  max_length: int,
  segment_ids: bool = True,
  has_segments: bool = True,
) -> None:
  """Writes tokenizer_config.json, and a tokenizer.json if there is none yet.

  A model without segments takes no ids of them.
  """
  if encoder.kind in _MAKERS:
    content = make_tokenizer(encoder, segment_ids).to_str(pretty=True).encode()
    # tokenizer.save() raises a bare Exception on a full disk.
    files.write(os.path.join(folder, TOKENIZER_FILE), content)
  else:  # its own file may give a second text another segment
    has_segments = has_segments and segment_ids
  inputs = ["input_ids", "attention_mask"]
  if has_segments:
    inputs.insert(1, "token_type_ids")
  config = encoder.huggingface_config()
  config |= {"model_input_names": inputs, "model_max_length": max_length}
  json_files.write(os.path.join(folder, TOKENIZER_CONFIG_FILE), config)


# What a folder's files say ----------------------------------------------------


def read(folder: str, name: str) -> dict:
  """A JSON file about a tokenizer; {} without it."""
  path = os.path.join(folder, name)
  if not stores.at(path).exists():
    return {}
  return json_files.read_own(path, "copy the model's files again", _FORM)


def own_case(path: str) -> bool | None:
  """What the `config_beside` says; None without it."""
  return read(*os.path.split(config_beside(path))).get("do_lower_case")


def said_case(
  path: str, kind: type[Encoder] = tokenization.WordPieceEncoder
) -> dict[str, bool | None]:
  """File -> do_lower_case of a vocabulary, if it says it; the first decides.

  A tokenizer.json itself, else a `config_beside` of its own, else those of its
  folder; the last is the folder, whose name may be one of google/bert's.
  """
  if kind is tokenization.HuggingFaceEncoder:
    return {path: kind(path, False).do_lower_case}
  config = config_beside(path)
  folder, name = os.path.split(config)
  lower = own_case(path)
  if lower is not None and name != TOKENIZER_CONFIG_FILE:
    return {config: lower}
  cases: dict[str, bool | None] = {}
  for name in (TASK_FILE, TOKENIZER_CONFIG_FILE):
    cases[os.path.join(folder, name)] = read(folder, name).get("do_lower_case")
  normalizer = json.dumps(read(folder, TOKENIZER_FILE).get("normalizer"))
  match = re.search(r'"lowercase": (true|false)', normalizer)
  if match:
    cases[os.path.join(folder, TOKENIZER_FILE)] = match[1] == "true"
  published = os.path.join(os.path.abspath(folder), "bert_model.ckpt")
  return {**cases, folder: tokenization.published_case(published)}


def case(
  cases: dict[str, bool | None], flag: bool | None, name: str
) -> tuple[bool, list[str], list[str]]:
  """(do_lower_case, a line if it is assumed, lines about files that differ).

  `cases` are as `said_case`, `flag` is --do_lower_case, `name` is for people.
  """
  known = {file: lower for file, lower in cases.items() if lower is not None}
  if not known and flag is not None:
    return flag, [], []
  if not known:
    line = (
      f"{name}: nothing says whether it is of lower-cased text: assumed "
      "--do_lower_case; give --nodo_lower_case if it is cased"
    )
    return True, [line], []
  first, lower = next(iter(known.items()))
  if flag not in (None, lower):
    raise UserError(
      f"--do_lower_case={flag}, but {name} was trained on "
      f"{'lower-cased' if lower else 'cased'} text ({first}): leave the flag "
      "out"
    )
  line = f"{name}: do_lower_case={lower} as {first} says, against "
  others = [file for file in known if known[file] != lower]
  return lower, [], [line + file for file in others]


def named(settings) -> dict[str, Any]:
  """Flag -> file; {} if `settings` name none, `UserError` if they name two."""
  files = {}
  for flag in tokenization.VOCABULARIES:
    if getattr(settings, flag):
      files[flag] = getattr(settings, flag)
  if len(files) > 1:
    raise UserError(f"give only one of {tokenization.VOCABULARY_FLAGS}")
  return files


def load(
  files: dict[str, Any], do_lower_case: bool | None
) -> tuple[Encoder, list[str]]:
  """The encoder of a vocabulary in its case, and lines about that.

  `files` are as `named`. Raises a `UserError` if the flag contradicts the files
  beside the vocabulary, or if these are of another tokenizer.
  """
  no_file = (tokenization.WordPieceEncoder.flag, "")  # is refused below
  flag, path = next(iter(files.items()), no_file)
  cases = said_case(path, tokenization.BY_FLAG[flag])
  lower, _, lines = case(cases, do_lower_case, path)
  encoder = tokenization.load_tokenizer(**files, do_lower_case=lower)
  compare(encoder, path)
  cased = 0
  for text in {*encoder.texts}.difference(tokenization.SPECIAL_TOKENS):
    cased += encoder.lower(text) != text
  if lower and cased > encoder.vocab_size // 20:
    lines.append(
      f"{path}: {cased:,} of its tokens have capitals or accents, which "
      "lower-casing removes: give --nodo_lower_case if it is cased"
    )
  return encoder, lines


def fits(path: str) -> bool:
  """Whether google/bert's rules read a vocab.txt as files beside it say."""
  lower, *_ = case(said_case(path), None, path)
  try:
    compare(tokenization.WordPieceEncoder(path, lower), path)
  except DataError:
    return False
  return True


def compare(encoder: Encoder, path: str) -> None:
  """Raises `DataError` if files beside `path` make other tokens of text.

  They are about vocab.txt. Where they only say another case, `case` has a line.
  """
  folder, name = os.path.split(path)
  words = tokenization.WordPieceEncoder
  if (encoder.kind, name) != (words.kind, words.usual_name):
    return
  config = read(folder, TOKENIZER_CONFIG_FILE)
  kind = re.sub("Tokenizer(Fast)?$", "", str(config.get("tokenizer_class")))
  tokenizer = read(folder, TOKENIZER_FILE)
  for field, value in tokenizer.get("model", {}).items():
    tokenizer[f"model.{field}"] = value
  bert = normalizers.BertNormalizer
  berts = [normalizer(True), normalizer(False), bert(lowercase=True)]
  berts += [bert(lowercase=False), bert(lowercase=True, strip_accents=True)]
  accepted = [json.loads(steps.__getstate__()) for steps in berts]
  if kind == "Bert":  # the class sets the rest by its config
    of_file = tokenizer.get("normalizer") or {}
    accepted.append({**of_file, "type": "BertNormalizer"})
  rules = {**_RULES, "normalizer": accepted}
  rules["strip_accents"] = (encoder.do_lower_case, None)
  for file, fields in {
    TOKENIZER_CONFIG_FILE: {**config, "tokenizer_class": kind},
    TOKENIZER_FILE: {**tokenizer, _MOVED: _moved(tokenizer, encoder)},
    _ADDED_FILE: {"added_tokens": [*read(folder, _ADDED_FILE)]},
  }.items():
    fields[_SPLIT] = _split(fields, encoder)
    for field, value in fields.items():
      if value not in rules.get(field, [value]):
        raise DataError(
          f"{os.path.join(folder, file)}: {field} is {reprlib.repr(value)}, "
          "which is not google/bert's tokenizer: give another model, its own "
          f"{TOKENIZER_FILE} as --tokenizer_file, or move the file away if it "
          "is not about this vocabulary"
        )


def _moved(tokenizer: dict, encoder: Encoder) -> dict:
  """token -> id of the tokens that a tokenizer.json numbers otherwise."""
  vocab = tokenizer.get("model.vocab")
  if not isinstance(vocab, dict):
    return {}
  ours = tokenization.load_vocab(encoder.file)
  theirs = {token.strip(): number for token, number in vocab.items()}
  for token in tokenizer.get("added_tokens") or ():
    theirs[token["content"]] = token["id"]
  moved = {}
  for token in {**ours, **theirs}:
    # "" is an unusual space, see `load_vocab`.
    if token and theirs.get(token) != ours.get(token):
      moved[token] = theirs.get(token)
  return moved


def _split(fields: dict, encoder: Encoder) -> list[str]:
  """The added tokens that an encoder splits, but for google/bert's own."""
  split = []
  for name in ("added_tokens", "never_split", "additional_special_tokens"):
    for token in fields.get(name) or ():
      text = str(token.get("content") if isinstance(token, dict) else token)
      # Twice, because an added token is one inside of a word, too.
      (ids,) = encoder.encode_batch([2 * text])
      is_whole = [encoder.tokens[number] for number in ids] == [text, text]
      if not is_whole and text not in tokenization.SPECIAL_TOKENS:
        split.append(text)
  return split
