"""Folders with tokenizers of the kinds that are published, made by hand.

`FOLDERS` maps a name to the files of a folder. `TEXTS`, `PAIR` and `WORDS` are
what tests encode with them.
"""

import json
import pathlib

from tokenizers import pre_tokenizers

TEXTS = [
  "The cat sees the dogs.",
  "the Caf\u00e9, a cat and  the dog",
  "\u4e2d\u56fd the cat",
  "a [E1]cat[/E1] and [E1] the dog [/E1] sees.",
]
PAIR = ("The dog sees?", "the cats.")
MASKED = "The cat sees the [MASK] and a [MASK]."
WORDS = ["The", "cat", "sees", "dogs", "."]

BERTS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTAS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
EUROBERTS = ["<|begin|>", "<|pad|>", "<|end|>", "<|mask|>"]
_ENTITIES = ["[E1]", "[/E1]"]
_WORDS = ["the", "cat", "dog", "sees", "and", "caf\u00e9", "cafe", "The", "Cat"]


def _added(name, number, **more):
  token = dict.fromkeys(
    ["single_word", "lstrip", "rstrip", "normalized"], False
  )
  return {"id": number, "content": name, **token, "special": True, **more}


def _template(cls, sep, ids, seps=1, second=1, first=True):
  """TemplateProcessing with `seps` separators between two texts."""
  begin = [{"SpecialToken": {"id": cls, "type_id": 0}}] * first
  a, b = (
    {"Sequence": {"id": x, "type_id": t}} for x, t in [("A", 0), ("B", second)]
  )
  end = [{"SpecialToken": {"id": sep, "type_id": 0}}]
  last = [{"SpecialToken": {"id": sep, "type_id": second}}]
  return {
    "type": "TemplateProcessing", "single": [*begin, a, *end],
    "pair": [*begin, a, *end * seps, b, *last],
    "special_tokens": {
      name: {"id": name, "ids": [ids[name]], "tokens": [name]}
      for name in dict.fromkeys([cls, sep])
    },
  }  # fmt: skip


def _roberta(ids, prefix=False):
  return {
    "type": "RobertaProcessing", "sep": ["</s>", ids["</s>"]],
    "cls": ["<s>", ids["<s>"]], "trim_offsets": True,
    "add_prefix_space": prefix,
  }  # fmt: skip


def _file(model, special, ids, **parts):
  content = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [_added(name, ids[name]) for name in special],
    "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": None, "model": model,
  }  # fmt: skip
  return content | parts


def wordpiece(lower=True, special=BERTS, more=(), **parts):
  """As BERT's: (tokenizer.json's content, ids)."""
  pieces = [
    *_WORDS,
    "##s",
    "##e",
    *"abcdefghiTC.,?'[]/1",
    "\u4e2d",
    "\u56fd",
    "MASK",
  ]
  tokens = [*special, *more, *pieces, "\u00e9", "E", "##1"]
  ids = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
  unknown = next(name for name in special if "unk" in name.lower())
  model = {
    "type": "WordPiece", "unk_token": unknown, "vocab": ids,
    "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
  }  # fmt: skip
  normalizer = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
    "strip_accents": None, "lowercase": lower,
  }  # fmt: skip
  parts.setdefault("post_processor", _template(special[2], special[3], ids))
  parts = {
    "normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}, **parts,
  }  # fmt: skip
  return _file(model, special, ids, **parts), ids


def bpe(
  special=ROBERTAS, more=(), prefix=False, merges=(), unknown=None, **parts
):
  """As GPT-2's, of bytes: (tokenizer.json's content, ids)."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  pairs = [*merges]
  for word in [
    "\u0120the",
    "\u0120cat",
    "\u0120dog",
    "The",
    "\u0120sees",
    "cat",
  ]:
    left = word[0]
    for letter in word[1:]:
      pairs.append([left, letter])
      left += letter
  pairs = [list(pair) for pair in dict.fromkeys(map(tuple, pairs))]
  tokens = [*special, *letters, *("".join(pair) for pair in pairs), *more]
  ids = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
  model = {
    "type": "BPE", "dropout": None, "unk_token": unknown, "vocab": ids,
    "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    "merges": pairs,
  }  # fmt: skip
  steps = {
    "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True,
    "use_regex": True,
  }  # fmt: skip
  parts = {"pre_tokenizer": steps, "decoder": steps, **parts}
  return _file(model, special, ids, **parts), ids


def unigram(seps, special=ROBERTAS):
  """As XLM-R's: (tokenizer.json's content, ids)."""
  words = [f"\u2581{word}" for word in _WORDS]
  tokens = [*special, *words, "\u2581", "s", ".", ",", "?", *"abcdeghint\u00e9"]
  ids = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
  vocab = [[token, -2.0 - number / 8] for token, number in ids.items()]
  model = {
    "type": "Unigram",
    "unk_id": ids["<unk>"],
    "vocab": vocab,
    "byte_fallback": False,
  }
  space = {
    "type": "Metaspace",
    "replacement": "\u2581",
    "prepend_scheme": "always",
    "split": True,
  }
  template = _template("<s>", "</s>", ids, seps, second=0)
  return _file(
    model, special, ids, normalizer={"type": "NFKC"}, pre_tokenizer=space,
    decoder=space, post_processor=template,
  ), ids  # fmt: skip


def _named(special, cls, **more):
  """tokenizer_config.json's content for tokens in BERT's or RoBERTa's order."""
  if special is BERTS:
    names = dict(
      zip(["pad", "unk", "cls", "sep", "mask"], special, strict=True)
    )
  elif special is ROBERTAS:
    names = dict(
      zip(["cls", "pad", "sep", "unk", "mask"], special, strict=True)
    )
  else:
    names = dict(zip(["cls", "pad", "sep", "mask"], special, strict=True))
  config = {f"{role}_token": name for role, name in names.items()}
  return {**config, "tokenizer_class": cls, **more}


def _folders():
  bert, fast = "BertTokenizer", "PreTrainedTokenizerFast"
  roberta = "RobertaTokenizer"
  folders = {}

  def add(name, content, config=None, model="bert", files=None):
    files = {"tokenizer.json": content} if files is None else files
    files["config.json"] = {"model_type": model}
    if config is not None:
      files["tokenizer_config.json"] = config
    folders[name] = files

  for file_lower in (True, False):
    for lower in (True, False, None):
      said = {} if lower is None else {"do_lower_case": lower}
      name = f"bert, {file_lower} in its file, {lower} in its config"
      add(name, wordpiece(file_lower)[0], _named(BERTS, bert, **said))
  said = {"do_lower_case": True, "strip_accents": False}
  add("bert with accents", wordpiece()[0], _named(BERTS, bert, **said))
  said = {"do_lower_case": True, "tokenize_chinese_chars": False}
  add("bert, Chinese whole", wordpiece()[0], _named(BERTS, bert, **said))
  add("bert, of the general class", wordpiece(False)[0], _named(BERTS, fast))
  for name in ("DistilBert", "Electra"):
    cls = f"{name}Tokenizer"
    add(
      name,
      wordpiece(False)[0],
      _named(BERTS, cls, do_lower_case=True),
      name.lower(),
    )
  add(
    "wordpiece without template",
    wordpiece(post_processor=None)[0],
    _named(BERTS, fast),
  )
  content, ids = wordpiece(more=_ENTITIES)
  content["added_tokens"] += [_added(name, ids[name]) for name in _ENTITIES]
  add("entity marks in the file", content, _named(BERTS, fast))
  content, ids = wordpiece(more=_ENTITIES)
  more = {"additional_special_tokens": _ENTITIES}
  add("entity marks in the config", content, _named(BERTS, fast, **more))
  add(
    "entity marks, bert",
    content,
    _named(BERTS, bert, do_lower_case=True, **more),
  )
  content, ids = wordpiece(more=_ENTITIES)
  content["added_tokens"] += [
    _added("[E1]", ids["[E1]"], rstrip=True),
    _added("[/E1]", ids["[/E1]"], lstrip=True),
  ]  # fmt: skip
  add("entity marks that take spaces", content, _named(BERTS, fast))
  content, ids = wordpiece(more=_ENTITIES)
  content["added_tokens"] += [
    _added(name, ids[name], special=False, normalized=True)
    for name in _ENTITIES
  ]
  add("added tokens that are not special", content, _named(BERTS, fast))
  content, ids = wordpiece(special=["<pad>", "<unk>", "<s>", "</s>", "<mask>"])
  content["post_processor"] = _template("<s>", "</s>", ids, 2)
  names = {
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
  }
  add("two separators, wordpiece", content, {**names, "tokenizer_class": fast})
  content, ids = bpe()
  content["post_processor"] = _roberta(ids)
  add("roberta", content, _named(ROBERTAS, roberta), "roberta")
  add(
    "roberta, of the general class", content, _named(ROBERTAS, fast), "roberta"
  )
  said = {"add_prefix_space": True}
  add(
    "roberta with a space before",
    content,
    _named(ROBERTAS, roberta, **said),
    "roberta",
  )
  content, ids = bpe()
  content["added_tokens"][-1]["lstrip"] = True
  content["post_processor"] = _roberta(ids)
  add(
    "roberta, a mask with its space",
    content,
    _named(ROBERTAS, roberta),
    "roberta",
  )
  files = {"vocab.json": ids, "merges.txt": content["model"]["merges"]}
  add(
    "roberta, vocab.json alone",
    None,
    _named(ROBERTAS, roberta),
    "roberta",
    files,
  )
  content, ids = bpe(BERTS, _ENTITIES)
  content["added_tokens"] += [_added(name, ids[name]) for name in _ENTITIES]
  content["added_tokens"][4]["lstrip"] = True
  content["post_processor"] = _template("[CLS]", "[SEP]", ids)
  add("modernbert", content, _named(BERTS, fast), "modernbert")
  content, ids = bpe(BERTS)
  content["post_processor"] = _template("[CLS]", "[SEP]", ids)
  add(
    "modernbert, a mask without its space",
    content,
    _named(BERTS, fast),
    "modernbert",
  )
  content, ids = bpe(EUROBERTS)
  step = {**content["pre_tokenizer"], "use_regex": False}
  pattern = {"Regex": r"'s|\s?\w+|\s?[^\s\w]+|\s+"}
  split = {
    "type": "Split",
    "pattern": pattern,
    "behavior": "Isolated",
    "invert": False,
  }
  content["pre_tokenizer"] = {
    "type": "Sequence",
    "pretokenizers": [split, step],
  }
  begin, end = EUROBERTS[0], EUROBERTS[2]
  template = _template(begin, end, ids)
  content["post_processor"] = {
    "type": "Sequence",
    "processors": [{**step, "type": "ByteLevel"}, template],
  }
  add("eurobert", content, _named(EUROBERTS, fast), "eurobert")
  content = json.loads(json.dumps(content))
  content["post_processor"] = _template(begin, end, ids, first=False)
  add("no token before a text", content, _named(EUROBERTS, fast), "eurobert")
  add("bpe without template", bpe()[0], _named(ROBERTAS, fast), "roberta")
  content, ids = bpe()
  content["post_processor"] = {
    **content["pre_tokenizer"],
    "trim_offsets": False,
  }
  add("bpe that trims alone", content, _named(ROBERTAS, fast), "roberta")
  content, ids = bpe(merges=[["<", "s"], ["<s", ">"], ["<s>", "t"]])
  content["post_processor"] = _roberta(ids)
  add("merges make special tokens", content, _named(ROBERTAS, fast), "roberta")
  content, ids = bpe(prefix=True)
  content["post_processor"] = _roberta(ids, True)
  add(
    "bpe with a space before",
    content,
    _named(ROBERTAS, fast, **said),
    "roberta",
  )
  add(
    "unigram, two separators", unigram(2)[0], _named(ROBERTAS, fast), "roberta"
  )
  add("unigram", unigram(1)[0], _named(ROBERTAS, fast), "roberta")
  add(
    "roberta, vocab.json, a space before", None,
    _named(ROBERTAS, roberta, **said), "roberta", dict(files),
  )  # fmt: skip
  add(
    "roberta without template", bpe()[0], _named(ROBERTAS, roberta), "roberta"
  )
  # Where no file names a class, it follows from the model's type.
  add("bert, no class, cased", wordpiece()[0], {"do_lower_case": False})
  add("bert, no class", wordpiece(False)[0], {"model_max_length": 64})
  add("bert, no config", wordpiece(False)[0])
  content, ids = bpe()
  content["added_tokens"][-1]["lstrip"] = True
  content["post_processor"] = _roberta(ids)
  add("roberta, no class", content, said, "roberta")
  backend = _named(BERTS, "TokenizersBackend")
  add("class of transformers 5", wordpiece(False)[0], backend)
  lower = _named(BERTS, "BertTokenizerFast", do_lower_case=True)
  add("bert, fast class", wordpiece(False)[0], lower)
  content, ids = wordpiece(more=_ENTITIES)
  mark = _added("[E1]", 0, rstrip=True)
  decoder = {str(ids["[E1]"]): {k: mark[k] for k in mark if k != "id"}}
  more = {"added_tokens_decoder": decoder}
  add("entity marks in the decoder", content, _named(BERTS, fast, **more))
  content, ids = wordpiece(more=_ENTITIES)
  more = {"extra_special_tokens": _ENTITIES}
  add("entity marks of transformers 5", content, _named(BERTS, fast, **more))
  return folders


FOLDERS = _folders()


def write(folder: pathlib.Path, name: str) -> None:
  """Writes the files of `FOLDERS[name]`."""
  folder.mkdir(parents=True, exist_ok=True)
  for file, content in FOLDERS[name].items():
    if file.endswith(".txt"):
      text = "\n".join(["#version: 0.2", *map(" ".join, content), ""])
    else:
      text = json.dumps(content)
    (folder / file).write_text(text, encoding="utf-8")
