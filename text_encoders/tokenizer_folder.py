"""Hugging Face's tokenizers as transformers reads them from a folder.

tokenizer.json has a tokenizer's steps. tokenizer_config.json beside it, by its
`tokenizer_class`, changes some of them and names the special tokens.
"""

import copy
import json
import operator
import os
import re
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Tokenizer, pre_tokenizers, processors

from common import input_files, json_files
from common.errors import DataError
from common.model_files import THEIR_CONFIG, TOKENIZER_FILE
from text_encoders import base

# Of it and merges.txt beside it tokenizer.json can be made.
VOCABULARY_FILE = "vocab.json"
SPECIAL_FILE = "special_tokens_map.json"

# Role of a special token -> its keys in Hugging Face's files, and usual names.
_ROLES = {
  "pad": (["pad_token"], ["[PAD]", "<pad>"]),
  "unk": (["unk_token"], ["[UNK]", "<unk>"]),
  "cls": (["cls_token", "bos_token"], ["[CLS]", "<s>"]),
  "sep": (["sep_token", "eos_token"], ["[SEP]", "</s>"]),
  "mask": (["mask_token"], ["[MASK]", "<mask>"]),
}
_TOKEN = (str, {"content": str})
FORM: dict = {
  "tokenizer_class?": (str, None), "add_prefix_space?": (bool, None),
  "do_lower_case?": (bool, None), "strip_accents?": (bool, None),
  "tokenize_chinese_chars?": (bool, None),
  "added_tokens_decoder?": dict,
  "additional_special_tokens?": (None, [_TOKEN]),
  "extra_special_tokens?": (None, dict, [_TOKEN]),
}  # fmt: skip
for _keys, _ in _ROLES.values():
  for _key in _keys:
    FORM[f"{_key}?"] = (*_TOKEN, None)
# Classes, or types of models, that set the steps of a BertNormalizer, and those
# that set whether a space is put before a text.
_LIKE_BERT = (
  "bert", "distilbert", "electra", "convbert", "mobilebert", "mpnet",
)  # fmt: skip
_LIKE_GPT2 = ("roberta", "gpt2", "longformer", "bart", "deberta")
# An id that no vocabulary has: it stands for the tokens of a text.
_A_TEXT = 1 << 30
NOTHING: dict = {1: [[], []], 2: [[], [], []]}  # `around` texts


class TokenizerFolder(NamedTuple):
  """What the files of a folder say."""

  content: dict  # tokenizer.json's, changed as its config says
  config: dict  # tokenizer_config.json's keys that say it
  special: dict[str, str]  # role -> token
  # Number of texts -> special tokens' ids before, between and after them.
  around: dict[int, list[list[int]]]
  has_default_template: bool  # `around` is BERT's, since the file has nothing
  is_changed: bool  # whether tokenizer.json alone gives other tokens


def opened(file: str, content: bytes | str) -> Tokenizer:
  """Raises `DataError` for what is no tokenizer.json."""
  # Workers and ranks share the cores, so the library starts no threads.
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  try:
    return Tokenizer.from_buffer(
      content.encode() if isinstance(content, str) else content
    )
  except Exception as e:  # the library has no other class
    raise DataError(f"{file}: not a tokenizer.json: {e}") from e


def read(file: str) -> TokenizerFolder:
  """Reads a tokenizer.json, or vocab.json; `DataError` if it is not one."""
  if has_merges(file):
    library = _of_merges(file)
  else:
    library = opened(file, input_files.read(file))
  config = config_of(file)
  ids = library.get_vocab(with_added_tokens=True)
  # Lists by id follow: a file with one huge id would exhaust the memory.
  last = max(ids.values(), default=-1)
  if last > 2 * len(ids) + 1000:
    raise DataError(f"{file}: renumber its {len(ids)} tokens: one is {last}")
  text = library.to_str()
  before, content = json.loads(text), json.loads(text)
  special = _lay_over(content, config, ids)
  processor = content["post_processor"]
  adds_none = around(file, processor) == NOTHING
  adds_none = adds_none and {"cls", "sep"} <= special.keys()
  if adds_none:
    # The file adds no special tokens; this project always does.
    cls, sep = special["cls"], special["sep"]
    template = bert_template(cls, sep, ids)
    if family(config) in _LIKE_GPT2:
      template = _roberta_template(cls, sep, ids)
    steps = [json.loads(template.__getstate__())]
    if processor:
      steps.insert(0, processor)
    processor = {"type": "Sequence", "processors": steps}
    content["post_processor"] = processor
  is_changed = content != before or has_merges(file)
  return TokenizerFolder(
    content, config, special, around(file, processor), adds_none, is_changed
  )


def with_space_before(folder: TokenizerFolder) -> TokenizerFolder:
  """The same tokenizer, to which each text begins with a space.

  So words that are given one by one have the tokens that they have in a text.
  """
  content = copy.deepcopy(folder.content)
  splitter = content["pre_tokenizer"] or {}
  if "add_prefix_space" in splitter:
    splitter["add_prefix_space"] = True
  elif "ByteLevel" in json.dumps(splitter):
    # This step comes after others, which would each get a space.
    steps = [{"type": "Prepend", "prepend": " "}]
    if content["normalizer"]:
      steps.insert(0, content["normalizer"])
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
  is_changed = folder.is_changed or content != folder.content
  return folder._replace(content=content, is_changed=is_changed)


def has_segments(folder: TokenizerFolder) -> bool:
  """Whether it gives the second text of a pair another segment."""
  library = _probe(TOKENIZER_FILE, folder.content["post_processor"])
  return any(library.encode("a", "a").type_ids)


def with_segments(folder: TokenizerFolder) -> TokenizerFolder:
  """The same tokenizer, to which the second text of a pair is of segment 1."""
  if has_segments(folder):
    return folder
  content, special = copy.deepcopy(folder.content), dict[Any, dict]()
  library = opened(TOKENIZER_FILE, json.dumps(content))
  template: dict = {"type": "TemplateProcessing", "special_tokens": special}
  for count, around in folder.around.items():
    pieces = template["single" if count == 1 else "pair"] = []
    for part, ids in enumerate(around):
      if part:  # the ids are after a text
        text = {"id": "AB"[part - 1], "type_id": part - 1}
        pieces.append({"Sequence": text})
      for number in ids:
        name = library.id_to_token(number)
        special[name] = {"id": name, "ids": [number], "tokens": [name]}
        pieces.append({"SpecialToken": {"id": name, "type_id": part // 2}})
  steps = [template]
  former = json.dumps(content["post_processor"])
  if '"trim_offsets": true' in former:
    begins = '"add_prefix_space": true' in former
    splitter = processors.ByteLevel(add_prefix_space=begins, trim_offsets=True)
    steps.insert(0, json.loads(splitter.__getstate__()))
  content["post_processor"] = {"type": "Sequence", "processors": steps}
  return folder._replace(content=content, is_changed=True)


def has_merges(file: str) -> bool:
  """Whether the file is RoBERTa's vocabulary, to which merges belong."""
  return os.path.basename(file) == VOCABULARY_FILE


def merges_beside(file: str) -> str:
  """Where the merges of a vocab.json are."""
  return os.path.join(os.path.dirname(file), "merges.txt")


def bert_template(cls: str, sep: str, ids: dict[str, int], second: int = 1):
  """[CLS] A [SEP] and [CLS] A [SEP] B [SEP], B of the segment `second`."""
  return processors.TemplateProcessing(
    single=f"{cls}:0 $A:0 {sep}:0",
    pair=f"{cls}:0 $A:0 {sep}:0 $B:{second} {sep}:{second}",
    special_tokens=[(cls, ids[cls]), (sep, ids[sep])],
  )


def _roberta_template(cls: str, sep: str, ids: dict[str, int]):
  """<s> A </s> and <s> A </s></s> B </s>."""
  return processors.RobertaProcessing(
    (sep, ids[sep]), (cls, ids[cls]), add_prefix_space=False
  )


def _name(token):
  """An AddedToken is written as its text, or with its properties."""
  return token["content"] if isinstance(token, dict) else token


def config_of(file: str) -> dict:
  """What files beside a tokenizer's say, by `FORM`; `DataError` for jieba's."""
  folder, name = os.path.split(file)
  paths = [base.config_beside(file)]
  if name in (TOKENIZER_FILE, VOCABULARY_FILE):
    paths.insert(0, os.path.join(folder, SPECIAL_FILE))
  config: dict = {}
  for path in paths:
    if os.path.exists(path):
      for key, value in json_files.read(path, FORM).items():
        if f"{key}?" in FORM:
          config[key] = value
  decoder = config.get("added_tokens_decoder") or {}
  try:
    json_files.expect([*decoder.values()], [{"content": str}])
  except ValueError as e:
    raise DataError(f"{paths[-1]}: added_tokens_decoder: {e}") from e
  path = os.path.join(folder, THEIR_CONFIG)
  if os.path.exists(path) and not config.get("tokenizer_class"):
    # transformers takes the class of the model's type.
    form = {"model_type?": (str, None), "tokenizer_class?": (str, None)}
    model = json_files.read(path, form)
    name = model.get("tokenizer_class") or model.get("model_type")
    config["tokenizer_class"] = name
  if family(config) == "roformer":
    raise DataError(f"{file}: RoFormer's tokenizer first cuts words by jieba")
  if has_merges(file) and family(config) not in ("", *_LIKE_GPT2):
    raise DataError(f"{file}: of {config['tokenizer_class']}, not RoBERTa's")
  return config


def family(config: dict) -> str:
  """A class without its end, or a model's type, in small letters."""
  name = config.get("tokenizer_class") or ""
  return re.sub("tokenizer(fast)?$", "", name.lower())


def _of_merges(file: str) -> Tokenizer:
  """RoBERTa's tokenizer, of vocab.json and merges.txt beside it."""
  try:
    model = tokenizers.models.BPE.from_file(file, merges_beside(file))
    tokenizer = Tokenizer(model)
    template = _roberta_template("<s>", "</s>", tokenizer.get_vocab())
  except Exception as e:  # the library has no other class
    raise DataError(
      f"{file}: not RoBERTa's vocabulary with merges.txt: {e!r}"
    ) from e
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  # RoBERTa's mask stands for a word with the space before it.
  mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
  tokenizer.add_special_tokens(["<s>", "</s>", mask])
  tokenizer.post_processor = template
  return tokenizer


def _lay_over(content: dict, config: dict, ids: dict[str, int]) -> dict:
  """Changes tokenizer.json's `content` as transformers does by its config.

  Also `ids`, where it adds tokens. Returns role -> special token.
  """
  kind, splitter = family(config), content["pre_tokenizer"]
  set_case(content["normalizer"], config)
  if "add_prefix_space" in (splitter or {}):
    default = kind not in _LIKE_GPT2 and splitter["add_prefix_space"]
    splitter["add_prefix_space"] = config.get("add_prefix_space", default)
  known = {}
  for token in content["added_tokens"]:
    known[token["content"]] = token
  for token in (config.get("added_tokens_decoder") or {}).values():
    name = token["content"]
    known[name] = _added(name, ids, known.get(name, {}) | token)
  others = config.get("additional_special_tokens") or []
  more = config.get("extra_special_tokens") or []
  more = [*more.values()] if isinstance(more, dict) else more
  special: dict[str, Any] = {}
  for role, (keys, names) in _ROLES.items():
    for token in [*map(config.get, keys), *names]:
      if _name(token) in ids:
        special.setdefault(role, token)
  for token in [*special.values(), *others, *more]:
    name = _name(token)
    if name not in known:
      about = token if isinstance(token, dict) else {}
      known[name] = _added(name, ids, about | {"special": True})
  content["added_tokens"] = sorted(
    known.values(), key=operator.itemgetter("id")
  )
  return {role: _name(token) for role, token in special.items()}


def set_case(normalizer: dict | None, config: dict) -> None:
  """Changes a normalizer as BERT's classes do by their config."""
  kind = (normalizer or {}).get("type")
  if normalizer and kind == "BertNormalizer" and family(config) in _LIKE_BERT:
    # A key that is not there has the class's default.
    normalizer["lowercase"] = config.get("do_lower_case", True)
    normalizer["strip_accents"] = config.get("strip_accents")
    chinese = config.get("tokenize_chinese_chars", True)
    normalizer["handle_chinese_chars"] = chinese


def _added(name: str, ids: dict[str, int], about: dict) -> dict:
  """An entry of `added_tokens`; a new token gets the next id."""
  entry = {"id": ids.setdefault(name, len(ids)), "content": name}
  for key in ("single_word", "lstrip", "rstrip"):
    entry[key] = about.get(key, False)
  entry["normalized"] = about.get("normalized", not about.get("special"))
  entry["special"] = about.get("special", False)
  return entry


def _probe(file: str, processor: dict | None) -> Tokenizer:
  """A post-processor alone, for texts of one token that is never special."""
  probe: dict = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
    "normalizer": None, "pre_tokenizer": None, "decoder": None,
    "post_processor": processor,
    "model": {"type": "WordLevel", "vocab": {"a": _A_TEXT}, "unk_token": "a"},
  }  # fmt: skip
  return opened(file, json.dumps(probe))


def around(file: str, processor: dict | None) -> dict[int, list[list[int]]]:
  """What a post-processor puts around texts; see `TokenizerFolder`."""
  library, by_count = _probe(file, processor), {}
  for count in (1, 2):
    parts: list[list[int]] = [[]]
    for token in library.encode("a", "a" if count == 2 else None).ids:
      if token == _A_TEXT:
        parts.append([])
      else:
        parts[-1].append(token)
    if len(parts) != count + 1:
      raise DataError(f"{file}: its post_processor repeats or drops a text")
    by_count[count] = parts
  return by_count
