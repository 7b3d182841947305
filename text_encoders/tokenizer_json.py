"""Text to ids by Hugging Face's tokenizer.json."""

import json
import os
from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders

from common import input_files, json_files
from common.errors import DataError
from common.model_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from text_encoders import base
from text_encoders.characters import has_chinese, without_surrogates

# Role of a special token -> its keys in Hugging Face's files, and usual names.
_ROLES = {
  "pad": (["pad_token"], ["[PAD]", "<pad>"]),
  "unk": (["unk_token"], ["[UNK]", "<unk>"]),
  "cls": (["cls_token", "bos_token"], ["[CLS]", "<s>"]),
  "sep": (["sep_token", "eos_token"], ["[SEP]", "</s>"]),
  "mask": (["mask_token"], ["[MASK]", "<mask>"]),
}


def _special_tokens(file: str, ids: dict[str, int]) -> dict[str, str]:
  """Role -> token, as files beside a tokenizer.json say, else by its name."""
  folder, name = os.path.split(file)
  is_usual = name == TOKENIZER_FILE
  paths = [os.path.join(folder, "special_tokens_map.json")] * is_usual
  paths.append(base.config_beside(file))
  form: dict = {}
  for keys, _ in _ROLES.values():
    for key in keys:
      form[f"{key}?"] = (str, {"content": str}, None)
  content: dict = {}
  for path in paths:
    if os.path.exists(path):
      content |= json_files.read(path, form)
  special: dict[str, str] = {}
  for role, (keys, names) in _ROLES.items():
    for token in [*map(content.get, keys), *names]:
      # An AddedToken is written with its properties.
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
  """A tokenizer's JSON without what changes or cuts a text's tokens."""
  # Special tokens, `special` and those that the file calls so, get names that
  # no text has. So "[MASK]" in a text is text.
  hidden = {}
  for name in special:
    hidden[name] = f"\0{name}"
  content = json.loads(whole.to_str())
  model = content["model"]
  # Dropout leaves out merges by chance; the rest is added by who uses the ids.
  model["dropout"] = None
  for part in ("truncation", "padding", "post_processor"):
    content[part] = None
  for token in content["added_tokens"]:
    name = token["content"]
    if token["special"] or name in hidden:
      hidden[name] = f"\0{name}"
      token |= {"content": hidden[name], "normalized": False}
  vocab = model["vocab"]
  # Unigram's vocabulary is a list, because each token has a score.
  if model["type"] == "Unigram":
    for number, (name, score) in enumerate(vocab):
      vocab[number] = (hidden.get(name, name), score)
  else:
    for name, other in hidden.items():
      if name in vocab:
        vocab[other] = vocab.pop(name)
  if model.get("unk_token") in hidden:
    model["unk_token"] = hidden[model["unk_token"]]
  return content


class HuggingFaceEncoder(base.Encoder):
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
    # A list by id follows: a file with one huge id would exhaust the memory.
    last = max(ids.values(), default=-1)
    if last > 2 * len(ids) + 1000:
      raise DataError(f"{file}: renumber its {len(ids)} tokens: one is {last}")
    tokens = [""] * (last + 1)
    for token, number in ids.items():
      tokens[number] = token
    texts, space = tokens, base.SENTENCEPIECE_SPACE
    # Byte-level tokens are spelt in letters that stand for bytes; for people,
    # and to find spaces, they are decoded.
    parts = content["decoder"], content["pre_tokenizer"]
    if "ByteLevel" in json.dumps(parts):
      decode = decoders.ByteLevel().decode
      texts, space = [decode([token]) for token in tokens], " "
    # Either tokens that go on in a word begin with a mark, or those that begin
    # one do; a file without any mark has words by its pre_tokenizer alone.
    prefix = content["model"].get("continuing_subword_prefix")
    self.mark = prefix or space
    has_spaces = any(text.startswith(space) for text in texts)
    self.marks_spaces = has_spaces and not prefix
    # Bytes need no [UNK]: [PAD], which no text becomes, stands for it.
    usual = base.SPECIAL_BY_ROLE | {"unk": roles.get("pad", base.PAD)}
    self._set_vocabulary(tokens, usual | roles, texts)
    self.special = roles
    # What the library does with spaces is seen by what it makes of one.
    (probe,) = self._encode(["a a"])
    self._splits_words = len({*probe.word_ids}) > 1
    begins_with_space = probe.ids and texts[probe.ids[0]].startswith(space)
    if self.marks_spaces and not begins_with_space:
      self.joiner = " "  # the library marks none where a text begins

  def config(self) -> dict:
    return self.huggingface_config()

  def files(self, name: str) -> dict[str, bytes]:
    beside = json_files.text(self.config(), indent=2).encode()
    return super().files(name) | {base.config_beside(name): beside}

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
    is_metaspace = self.marks_spaces and self.mark == base.SENTENCEPIECE_SPACE
    first = "\ue000" if is_metaspace else "\n"
    (encoding,) = self._encode([first + text])
    _, ends = np.array(encoding.offsets, int).reshape(-1, 2).T
    return np.array(encoding.ids, np.int32)[ends > 1]

  def encode_words(self, lines: Sequence[str]) -> list[base.WordTokens]:
    words = []
    for line, encoding in zip(lines, self._encode(lines), strict=True):
      ids = np.array(encoding.ids, np.int32)
      numbers = np.array(encoding.word_ids)
      continues = np.zeros(len(ids), bool)
      continues[1:] = numbers[1:] == numbers[:-1]
      if not self._splits_words:  # to the library a line is one word
        continues &= self.is_continuation[ids]
      if len(ids) and has_chinese(line):
        # Words are jieba's where a token, or the one before it, is Chinese.
        starts, ends = np.array(encoding.offsets).T
        inside = base.inside_chinese_words(line, starts)
        # Several tokens may be parts of one character.
        inside[1:] |= starts[1:] < ends[:-1]
        chinese = np.array([has_chinese(line[i : i + 1]) for i in starts])
        chinese[1:] |= chinese[:-1]
        continues = np.where(chinese, inside, continues)
      words.append(base.WordTokens(ids, continues))
    return words

  def encode_with_spans(self, text: str) -> base.TokenSpans:
    (encoding,) = self._encode([text])
    spans = []
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
      # A token's offsets may include the space before its word.
      shown = text[start:end]
      start += len(shown) - len(shown.lstrip())
      spans.append((token, start, start + len(shown.strip())))
    return base.TokenSpans.of(spans)
