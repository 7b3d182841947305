"""The files beside a vocabulary: Hugging Face's are written here, and read.

They say whether its text is lower-cased, and whether another tokenizer than
google/bert's reads it.
"""

import json
import os
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, normalizers

from common import files, json_files, model_files, stores
from common.errors import DataError, UserError
from common.model_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from text_encoders import base, kinds, tokenizer_folder, wordpiece
from text_encoders.tokenizer_json import HuggingFaceEncoder

_FORM = {
  **tokenizer_folder.FORM, "never_split?": (list, None),
  "model_input_names?": ([str], None),
  "added_tokens?": ([{"id": int, "content": str}], None),
  "normalizer?": (dict, None), "model?": {"type?": str, "vocab?": (dict, list)},
}  # fmt: skip
_LISTS = (
  "added_tokens", "never_split", "additional_special_tokens",
  "extra_special_tokens", "added_tokens_decoder",
)  # fmt: skip
_OTHERS = "the list of tokens that are others here"
_AROUND = "what it puts around texts"
# What Hugging Face's files say where text becomes tokens as in google/bert.
_RULES: dict[str, Sequence] = {
  "tokenizer_class": (
    "", "bert", "distilbert", "electra", "pretrained", "tokenizersbackend",
  ),
  "do_basic_tokenize": (True, None), "tokenize_chinese_chars": (True, None),
  "pre_tokenizer": ({"type": "BertPreTokenizer"},),
  "model.type": ("WordPiece", None),
  _OTHERS: ([],),
}  # fmt: skip


def make_tokenizer(
  encoder: base.Encoder, segment_ids: bool = True
) -> Tokenizer:
  """A tokenizer with the ids of an encoder that has a `library_tokenizer`.

  Without `segment_ids` the second text of a pair is of segment 0, too. Unlike
  the encoder it reads "[MASK]" and other special tokens in a text as tokens.
  """
  tokenizer = encoder.library_tokenizer()
  assert tokenizer is not None
  cls, sep = encoder.special["cls"], encoder.special["sep"]
  ids = {cls: encoder.cls_id, sep: encoder.sep_id}
  tokenizer.post_processor = tokenizer_folder.bert_template(
    cls, sep, ids, int(segment_ids)
  )
  tokenizer.add_special_tokens([*encoder.special.values()])
  return tokenizer


def write_tokenizer(
  folder: str,
  encoder: base.Encoder,
  max_length: int,
  segment_ids: bool = True,
  has_segments: bool = True,
) -> None:
  """Writes tokenizer_config.json, and a tokenizer.json if there is none yet.

  `has_segments`: whether the model has segments; else it takes no ids of them.
  """
  if isinstance(encoder, HuggingFaceEncoder):
    # Its own file is there, unless it gives other tokens, or second texts the
    # segment 0.
    has_segments = has_segments and segment_ids
    published = encoder.with_segments() if has_segments else encoder
    tokenizer = published.library_tokenizer()
  else:
    tokenizer = make_tokenizer(encoder, segment_ids)
  if tokenizer:
    # tokenizer.save() raises a bare Exception on a full disk.
    content = tokenizer.to_str(pretty=True).encode()
    files.write(os.path.join(folder, TOKENIZER_FILE), content)
  inputs = ["input_ids", "attention_mask"]
  if has_segments:
    inputs.insert(1, "token_type_ids")
  # transformers' BertTokenizer allows words of 100 characters at most,
  # google/bert 200. So the config names the general class, which follows
  # tokenizer.json.
  config = encoder.huggingface_config()
  config |= {"model_input_names": inputs, "model_max_length": max_length}
  json_files.write(os.path.join(folder, TOKENIZER_CONFIG_FILE), config)


# What a folder's files say ----------------------------------------------------


def published_case(init_checkpoint: str | None) -> bool | None:
  """The do_lower_case of a checkpoint in a folder of google/bert's; or None."""
  pattern = r"(uncased|multilingual|chinese|cased)_L-\d+_H-\d+_A-\d+/bert_model"
  match = re.search(pattern, init_checkpoint or "")
  return match[1] != "cased" if match else None


def read(folder: str, name: str) -> dict:
  """A JSON file about a tokenizer; {} without it."""
  path = os.path.join(folder, name)
  if not stores.at(path).exists():
    return {}
  return json_files.read_own(path, "copy the model's files again", _FORM)


def case_beside(path: str) -> bool | None:
  """The do_lower_case of the `config_beside` a vocabulary or text, or None."""
  return read(*os.path.split(base.config_beside(path))).get("do_lower_case")


def cases_by_file(
  path: str, kind: type[base.Encoder] = wordpiece.WordPieceEncoder
) -> dict[str, bool | None]:
  """File -> the do_lower_case of a vocabulary, or None; the first decides."""
  if kind is HuggingFaceEncoder:  # the file itself decides
    return {path: kind(path, False).do_lower_case}
  config = base.config_beside(path)
  folder, name = os.path.split(config)
  lower = case_beside(path)
  # A config that is about this vocabulary alone hides those of the folder.
  if lower is not None and name != TOKENIZER_CONFIG_FILE:
    return {config: lower}
  cases: dict[str, bool | None] = {}
  for name in (model_files.TASK_FILE, TOKENIZER_CONFIG_FILE):
    cases[os.path.join(folder, name)] = read(folder, name).get("do_lower_case")
  normalizer = read(folder, TOKENIZER_FILE).get("normalizer")
  if os.path.basename(path) == wordpiece.WordPieceEncoder.usual_name:
    tokenizer_folder.set_case(normalizer, tokenizer_folder.config_of(path))
  match = re.search(r'"lowercase": (true|false)', json.dumps(normalizer))
  if match:
    cases[os.path.join(folder, TOKENIZER_FILE)] = match[1] == "true"
  # Last the folder's name, which may be one of google/bert's.
  published = os.path.join(os.path.abspath(folder), "bert_model.ckpt")
  return {**cases, folder: published_case(published)}


def choose_case(
  cases: dict[str, bool | None], flag: bool | None, name: str
) -> tuple[bool, list[str], list[str]]:
  """(do_lower_case, a line if it is assumed, lines about files that differ).

  `cases`: see `cases_by_file`; `flag`: --do_lower_case; `name`: the model's or
  the vocabulary's, for messages. `UserError` if the flag contradicts a file.
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
  lines = []
  for file in known:
    if known[file] != lower:
      lines.append(
        f"{name}: do_lower_case={lower} as {first} says, against {file}"
      )
  return lower, [], lines


def load(
  files: dict[str, Any], do_lower_case: bool | None
) -> tuple[base.Encoder, list[str]]:
  """The encoder of a vocabulary in its case, and lines about that.

  `files`: flag -> file. Raises a `UserError` if the flag contradicts the files
  beside the vocabulary, or if these are of another tokenizer.
  """
  no_file = (wordpiece.WordPieceEncoder.flag, "")  # is refused below
  flag, path = next(iter(files.items()), no_file)
  cases = cases_by_file(path, kinds.BY_FLAG[flag])
  lower, _, lines = choose_case(cases, do_lower_case, path)
  encoder = kinds.load_tokenizer(**files, do_lower_case=lower)
  compare(encoder, path)
  if encoder.has_default_template:
    cls, sep = encoder.special["cls"], encoder.special["sep"]
    lines.append(
      f"{path}: it adds no special tokens: a text becomes {cls} text {sep} "
      "here, and in what convert_checkpoint.py writes"
    )
  texts = {*encoder.texts}.difference(base.SPECIAL_TOKENS)
  cased = sum(encoder.lower(text) != text for text in texts)
  if lower and cased > encoder.vocab_size // 20:
    remedy = "give --nodo_lower_case"
    if encoder.kind == HuggingFaceEncoder.kind:
      remedy = f'write "do_lower_case": false into {base.config_beside(path)}'
    lines.append(
      f"{path}: {cased:,} of its tokens have capitals or accents, which "
      f"lower-casing removes: {remedy} if it is cased"
    )
  return encoder, lines


def fits(path: str) -> bool:
  """Whether google/bert's rules read a vocab.txt as files beside it say."""
  lower, *_ = choose_case(cases_by_file(path), None, path)
  try:
    compare(wordpiece.WordPieceEncoder(path, lower), path)
  except DataError:
    return False
  return True


def compare(encoder: base.Encoder, path: str) -> None:
  """Raises `DataError` if files beside a vocab.txt make other tokens of text.

  Where they only say another case, `choose_case` has a line.
  """
  folder, name = os.path.split(path)
  if not name == encoder.usual_name == wordpiece.WordPieceEncoder.usual_name:
    return  # the files are about another vocabulary
  config = read(folder, TOKENIZER_CONFIG_FILE)
  tokenizer_folder.config_of(path)  # of a class that is read at all
  # A model's type says no class here: any model may have google/bert's tokens.
  has_class = config.get("tokenizer_class")
  model = config if has_class else read(folder, model_files.THEIR_CONFIG)
  family = tokenizer_folder.family(model)
  tokenizer = read(folder, TOKENIZER_FILE)
  tokenizer["model.type"] = tokenizer.get("model", {}).get("type")
  tokenizer[_AROUND] = tokenizer_folder.around(
    os.path.join(folder, TOKENIZER_FILE), tokenizer.get("post_processor")
  )
  # google/bert's normalizer as this project and as transformers write it.
  bert = normalizers.BertNormalizer
  steps = [
    wordpiece.bert_normalizer(True), wordpiece.bert_normalizer(False),
    bert(lowercase=True), bert(lowercase=False),
    bert(lowercase=True, strip_accents=True),
  ]  # fmt: skip
  accepted = [json.loads(one.__getstate__()) for one in steps]
  if family == "bert":  # the class sets the rest by its config
    in_file = tokenizer.get("normalizer") or {}
    accepted.append({**in_file, "type": "BertNormalizer"})
  cls, sep = [encoder.cls_id], [encoder.sep_id]
  own = {1: [cls, sep], 2: [cls, sep, sep]}
  rules = {
    **_RULES, "normalizer": accepted, _AROUND: (tokenizer_folder.NOTHING, own),
    "strip_accents": (encoder.do_lower_case, None),
  }  # fmt: skip
  ids, added = wordpiece.load_vocab(encoder.file), "added_tokens.json"
  for file, fields in {
    TOKENIZER_CONFIG_FILE: {**config, "tokenizer_class": family},
    TOKENIZER_FILE: tokenizer,
    tokenizer_folder.SPECIAL_FILE: read(folder, tokenizer_folder.SPECIAL_FILE),
    added: {"added_tokens": [*read(folder, added)]},
  }.items():
    fields[_OTHERS] = _other_tokens(fields, ids, encoder)
    for field, value in fields.items():
      if value not in rules.get(field, [value]):
        raise DataError(
          f"{os.path.join(folder, file)}: {field} is {reprlib.repr(value)}, "
          "which is not google/bert's tokenizer: give another model, its own "
          f"{TOKENIZER_FILE} as --tokenizer_file, or move the file away if it "
          "is not about this vocabulary"
        )


def _other_tokens(
  fields: dict, ids: dict[str, int], encoder: base.Encoder
) -> list[str]:
  """The tokens of a file that a vocabulary lacks, or has by another id."""
  vocab = fields.get("model", {}).get("vocab")
  numbers = dict(vocab) if isinstance(vocab, dict) else {}
  others: dict[str, None] = {}
  for name in _LISTS:
    tokens = fields.get(name) or ()
    for token in tokens.values() if isinstance(tokens, dict) else tokens:
      content = token if isinstance(token, dict) else {"content": token}
      text = str(content["content"])
      numbers[text] = content.get("id", ids.get(text, -1))
      # google/bert splits other marks of the user's in a text.
      is_special = text in base.SPECIAL_TOKENS
      if not is_special and len(encoder.encode_batch([text])[0]) > 1:
        others[text] = None
  for text, number in numbers.items():
    # A blank token is an unusual space, see `load_vocab`.
    if text.strip() and ids.get(text.strip()) != number:
      others[text] = None
  return [*others]
