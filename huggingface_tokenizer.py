"""The tokenizer of a Hugging Face folder that gives our ids, and the reverse.

transformers' own BertTokenizer builds its pipeline from the vocabulary alone,
with words of 100 characters at most where google/bert has 200. So the folder
names transformers' general class, which takes tokenizer.json as it is.
"""

import json
import os
import re

import json_files
import tokenization
from errors import DataError

VOCAB_FILE, TOKENIZER_FILE = "vocab.txt", "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# str.lower makes a capital sigma at a word's end another letter than elsewhere
# (Unicode 3.13, Final_Sigma); the library lower-cases letter by letter.
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


def wordpiece_tokenizer(vocab_file: str, do_lower_case: bool):
  """A `tokenizers.Tokenizer` with the ids of `tokenization.WordPieceEncoder`.

  It differs where the library's Unicode tables differ from Python's: in rare
  characters, most of them newer than Unicode 10, and those of private use.
  Unlike our encoder it takes "[MASK]" and the like in a text for the token.

  Raises:
    DataError: as of `WordPieceEncoder`.
  """
  from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
  )

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
  cls, sep = tokenization.CLS, tokenization.SEP
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{cls}:0 $A:0 {sep}:0",
    pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
    special_tokens=[(cls, int(encoder.cls_id)), (sep, int(encoder.sep_id))],
  )
  tokenizer.add_special_tokens(
    [
      AddedToken(token, normalized=False, special=True)
      for token in tokenization.SPECIAL_TOKENS
    ]
  )
  return tokenizer


def write_tokenizer(
  folder: str, vocab_file: str, do_lower_case: bool, max_length: int
) -> None:
  """Writes vocab.txt, tokenizer.json and tokenizer_config.json into a folder.

  Args:
    folder: where to.
    vocab_file: a WordPiece vocabulary.
    do_lower_case: whether the model was trained on lower-cased text.
    max_length: tokens that the model has positions for.

  Raises:
    DataError: as of `wordpiece_tokenizer`.
  """
  tokenizer = wordpiece_tokenizer(vocab_file, do_lower_case)
  tokenizer.save(os.path.join(folder, TOKENIZER_FILE))
  with open(vocab_file, "rb") as f:
    vocabulary = f.read()
  with open(os.path.join(folder, VOCAB_FILE), "wb") as f:
    f.write(vocabulary)
  content = {
    "cls_token": tokenization.CLS,
    "do_lower_case": do_lower_case,
    "mask_token": tokenization.MASK,
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    "model_max_length": max_length,
    "pad_token": tokenization.PAD,
    "sep_token": tokenization.SEP,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": tokenization.UNK,
  }
  json_files.write(os.path.join(folder, TOKENIZER_CONFIG_FILE), content)


# -----------------------------------------------------------------------------
# Reading
# -----------------------------------------------------------------------------


def read_vocabulary(folder: str) -> bytes | None:
  """The content of vocab.txt, from tokenizer.json if there is no such file.

  None if there is neither, or a tokenizer of another kind than WordPiece.

  Raises:
    DataError: a file is damaged.
  """
  path = os.path.join(folder, VOCAB_FILE)
  if os.path.exists(path):
    with open(path, "rb") as f:
      return f.read()
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
    lines = [""] * (max(vocab.values()) + 1)  # an id without a token: blank
    for token, number in vocab.items():
      lines[number] = token
  except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
    raise DataError(f"{path}: no tokenizer that can be read ({e!r})") from e
  return "".join(f"{line}\n" for line in lines).encode()


def reads_lower_case(folder: str) -> bool | None:
  """Whether the folder's tokenizer lower-cases; None if it does not say.

  Raises:
    DataError: a file is damaged, or the tokenizer works otherwise than
      google/bert's.
  """
  said = {}
  for name in (TOKENIZER_CONFIG_FILE, TOKENIZER_FILE):
    path = os.path.join(folder, name)
    if os.path.exists(path):
      said[name] = json_files.read(path)
      if not isinstance(said[name], dict):
        raise DataError(f"{path}: not a JSON object")
  config = said.get(TOKENIZER_CONFIG_FILE, {})
  text = json.dumps(said.get(TOKENIZER_FILE, {}).get("normalizer"))
  found = re.search(r'"lowercase": (true|false)', text)
  lower = config.get("do_lower_case", found and found[1] == "true")
  bert = {"tokenize_chinese_chars": True, "strip_accents": lower}
  for key, usual in bert.items():
    value = config.get(key)
    if value is not None and lower is not None and value != usual:
      raise DataError(
        f"{os.path.join(folder, TOKENIZER_CONFIG_FILE)}: {key} is {value}, but "
        f"google/bert's tokenizer with do_lower_case={lower} has {usual}: the "
        "text would become other tokens"
      )
  return lower
