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

from common import files, input_files, json_files, stores
from common.errors import DataError, UserError
from common.model_files import TASK_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from text_encoders import base, kinds, wordpiece
from text_encoders.tokenizer_json import HuggingFaceEncoder

_FORM = {
  "do_lower_case?": (bool, None), "tokenizer_class?": (str, None),
  "never_split?": (list, None), "additional_special_tokens?": (list, None),
  "added_tokens?": ([{"id": int, "content": str}], None),
  "normalizer?": (dict, None),
  "model?": {"type?": str, "vocab?": (dict, list)},
}  # fmt: skip
_ADDED_FILE = "added_tokens.json"
# What Hugging Face's files say where text becomes tokens as in google/bert.
_RULES: dict[str, Sequence] = {
  "tokenizer_class": (
    "None", "Bert", "DistilBert", "Electra", "PreTrained", "TokenizersBackend",
  ),
  "do_basic_tokenize": (True, None), "tokenize_chinese_chars": (True, None),
  "pre_tokenizer": ({"type": "BertPreTokenizer"},),
  "model.type": ("WordPiece", None),
  "the list of tokens that are others here": ([],),
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


def make_tokenizer(
  encoder: base.Encoder, segment_ids: bool = True
) -> Tokenizer:
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


def special_ids(encoder: base.Encoder) -> dict[str, int]:
  """Those of "pad", "unk" (if there is one), "cls", "sep" and "mask"."""
  return {role: getattr(encoder, f"{role}_id") for role in encoder.special}


def _of_wordpiece(encoder: base.Encoder) -> Tokenizer:
  """Differs from the encoder in rare characters: Unicode tables differ."""
  tokenizer = Tokenizer(
    models.WordPiece(
      vocab=dict(wordpiece.load_vocab(encoder.file)),
      unk_token=base.UNK,
      max_input_chars_per_word=wordpiece.MAX_INPUT_CHARS_PER_WORD,
    )
  )
  tokenizer.normalizer = normalizer(encoder.do_lower_case)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece(prefix="##")
  return tokenizer


def _of_sentencepiece(encoder: base.Encoder) -> Tokenizer:
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
  encoder: base.Encoder,
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
  pattern = r"^.*?([A-Za-z0-9_-]+)/bert_model.ckpt"
  match = re.match(pattern, init_checkpoint or "")
  return _DO_LOWER_CASE.get(match[1]) if match else None


def read(folder: str, name: str) -> dict:
  """A JSON file about a tokenizer; {} without it."""
  path = os.path.join(folder, name)
  if not stores.at(path).exists():
    return {}
  return json_files.read_own(path, "copy the model's files again", _FORM)


def own_case(path: str) -> bool | None:
  """What the `config_beside` says; None without it."""
  return read(*os.path.split(base.config_beside(path))).get("do_lower_case")


def said_case(
  path: str, kind: type[base.Encoder] = wordpiece.WordPieceEncoder
) -> dict[str, bool | None]:
  """File -> do_lower_case of a vocabulary, if it says it; the first decides.

  A tokenizer.json itself, else a `config_beside` of its own, else those of its
  folder; the last is the folder, whose name may be one of google/bert's.
  """
  if kind is HuggingFaceEncoder:
    return {path: kind(path, False).do_lower_case}
  config = base.config_beside(path)
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
  return {**cases, folder: published_case(published)}


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


def load(
  files: dict[str, Any], do_lower_case: bool | None
) -> tuple[base.Encoder, list[str]]:
  """The encoder of a vocabulary in its case, and lines about that.

  `files`: flag -> file. Raises a `UserError` if the flag contradicts the files
  beside the vocabulary, or if these are of another tokenizer.
  """
  no_file = (wordpiece.WordPieceEncoder.flag, "")  # is refused below
  flag, path = next(iter(files.items()), no_file)
  cases = said_case(path, kinds.BY_FLAG[flag])
  lower, _, lines = case(cases, do_lower_case, path)
  encoder = kinds.load_tokenizer(**files, do_lower_case=lower)
  compare(encoder, path)
  texts = {*encoder.texts}.difference(base.SPECIAL_TOKENS)
  cased = sum(encoder.lower(text) != text for text in texts)
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
    compare(wordpiece.WordPieceEncoder(path, lower), path)
  except DataError:
    return False
  return True


def compare(encoder: base.Encoder, path: str) -> None:
  """Raises `DataError` if files beside `path` make other tokens of text.

  They are about vocab.txt. Where they only say another case, `case` has a line.
  """
  folder, name = os.path.split(path)
  words = wordpiece.WordPieceEncoder
  if (encoder.kind, name) != (words.kind, words.usual_name):
    return
  config = read(folder, TOKENIZER_CONFIG_FILE)
  kind = re.sub("Tokenizer(Fast)?$", "", str(config.get("tokenizer_class")))
  tokenizer = read(folder, TOKENIZER_FILE)
  tokenizer["model.type"] = tokenizer.get("model", {}).get("type")
  bert = normalizers.BertNormalizer
  berts = [normalizer(True), normalizer(False), bert(lowercase=True)]
  berts += [bert(lowercase=False), bert(lowercase=True, strip_accents=True)]
  accepted = [json.loads(steps.__getstate__()) for steps in berts]
  if kind == "Bert":  # the class sets the rest by its config
    of_file = tokenizer.get("normalizer") or {}
    accepted.append({**of_file, "type": "BertNormalizer"})
  rules = {**_RULES, "normalizer": accepted}
  rules["strip_accents"] = (encoder.do_lower_case, None)
  ids = wordpiece.load_vocab(encoder.file)
  for file, fields in {
    TOKENIZER_CONFIG_FILE: {**config, "tokenizer_class": kind},
    TOKENIZER_FILE: tokenizer,
    _ADDED_FILE: {"added_tokens": [*read(folder, _ADDED_FILE)]},
  }.items():
    fields["the list of tokens that are others here"] = _others(fields, ids)
    for field, value in fields.items():
      if value not in rules.get(field, [value]):
        raise DataError(
          f"{os.path.join(folder, file)}: {field} is {reprlib.repr(value)}, "
          "which is not google/bert's tokenizer: give another model, its own "
          f"{TOKENIZER_FILE} as --tokenizer_file, or move the file away if it "
          "is not about this vocabulary"
        )


def _others(fields: dict, ids: dict[str, int]) -> list[str]:
  """Tokens of a file that are none in a vocabulary, or have another id."""
  vocab = fields.get("model", {}).get("vocab")
  numbers = dict(vocab) if isinstance(vocab, dict) else {}
  for name in ("added_tokens", "never_split", "additional_special_tokens"):
    for token in fields.get(name) or ():
      content = token if isinstance(token, dict) else {"content": token}
      text = str(content["content"])
      numbers[text] = content.get("id", ids.get(text, -1))
  # A blank token is an unusual space, see `load_vocab`.
  others = [text for text in numbers if ids.get(text.strip()) != numbers[text]]
  return [text for text in others if text.strip()]
