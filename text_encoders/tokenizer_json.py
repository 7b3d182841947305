"""Text to ids by Hugging Face's tokenizer.json."""

import copy
import functools
import json
from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders

from common import input_files, json_files
from common.errors import DataError
from common.model_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from text_encoders import base, tokenizer_folder
from text_encoders.characters import has_chinese, without_surrogates

_HIDDEN = "\0"  # begins the name of a token that no text becomes


def _reading_text(content: dict, hidden_names: Iterable[str]) -> dict:
  """tokenizer.json's content without what changes or cuts a text's tokens."""
  # The hidden special tokens get names that no text has, so "[SEP]" in a text
  # is text. Other special tokens, such as marks of entities, stay tokens.
  hidden = {}
  for name in hidden_names:
    hidden[name] = _HIDDEN + name
  content = copy.deepcopy(content)
  model = content["model"]
  # Dropout leaves out merges by chance; the rest is added by who uses the ids.
  model["dropout"] = None
  for part in ("truncation", "padding", "post_processor"):
    content[part] = None
  for token in content["added_tokens"]:
    name = token["content"]
    if name in hidden:
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
  if model["type"] == "BPE":
    # A BPE that was trained on special tokens has merges that make them.
    prefix, kept = model["continuing_subword_prefix"] or "", []
    for left, right in model["merges"]:
      if hidden.keys().isdisjoint(
        [left, right, left + right.removeprefix(prefix)]
      ):
        kept.append((left, right))
    model["merges"] = kept
  if model.get("unk_token") in hidden:
    model["unk_token"] = hidden[model["unk_token"]]
  return content


class HuggingFaceEncoder(base.Encoder):
  """Lines -> ids of a tokenizer.json, which decides the case itself."""

  kind, flag, usual_name = "huggingface", "tokenizer_file", TOKENIZER_FILE
  remedy = f"{TOKENIZER_CONFIG_FILE} beside it may name others"

  def __init__(self, file: str, do_lower_case: bool = False):
    self._folder = folder = tokenizer_folder.read(file)
    self.has_default_template = folder.has_default_template
    roles, self._templates = folder.special, {}
    for count, around in folder.around.items():
      self._templates[count] = [np.array(ids, np.int32) for ids in around]
    content = _reading_text(folder.content, roles.values())
    self._library = tokenizer_folder.opened(file, json.dumps(content))
    ids = self._library.get_vocab(with_added_tokens=True)
    normalizer = self._library.normalizer
    lowers = bool(normalizer) and "a" in normalizer.normalize_str("A")
    super().__init__(file, lowers)
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, number in ids.items():
      tokens[number] = token.removeprefix(_HIDDEN)
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
    word = next(filter(str.isalpha, texts), "a")
    (probe,) = self._encode([f"{word} {word}"])
    self._splits_words = len({*probe.word_ids}) > 1
    begins_with_space = probe.ids and texts[probe.ids[0]].startswith(space)
    if self.marks_spaces and not begins_with_space:
      self.joiner = " "  # the library marks none where a text begins

  def with_space_before(self) -> "HuggingFaceEncoder":
    encoder = copy.copy(self)
    encoder._folder = tokenizer_folder.with_space_before(self._folder)
    return encoder

  def with_segments(self) -> "HuggingFaceEncoder":
    """The encoder as it is published beside a model with segments."""
    encoder = copy.copy(self)
    encoder._folder = tokenizer_folder.with_segments(self._folder)
    return encoder

  def template(self, count: int) -> list[np.ndarray]:
    return self._templates[count]

  def config(self) -> dict:
    config = {**super().config(), **self._folder.config}
    for role, name in self.special.items():
      config[f"{role}_token"] = name
    return config

  def huggingface_config(self) -> dict:
    config = super().huggingface_config()
    splitter = self._folder.content["pre_tokenizer"] or {}
    # transformers 4 takes false where its config does not say this.
    if "add_prefix_space" in splitter:
      config["add_prefix_space"] = splitter["add_prefix_space"]
    return config

  def library_tokenizer(self) -> Tokenizer | None:
    if not self._folder.is_changed:
      return None
    return tokenizer_folder.opened(self.file, json.dumps(self._folder.content))

  def files(self, name: str) -> dict[str, bytes]:
    beside = json_files.text(self.config(), indent=2).encode()
    copies = {base.config_beside(name): beside}
    if not tokenizer_folder.has_merges(self.file):
      return copies | super().files(name)
    if not tokenizer_folder.has_merges(name):
      return copies | {name: json.dumps(self._folder.content).encode()}
    merges = tokenizer_folder.merges_beside(name)
    path = tokenizer_folder.merges_beside(self.file)
    return copies | super().files(name) | {merges: input_files.read(path)}

  @functools.cached_property
  def _seeing_masks(self) -> Tokenizer:
    """The library, to which the mask in a text is a token."""
    roles = {**self.special}
    del roles["mask"]
    content = _reading_text(self._folder.content, roles.values())
    return tokenizer_folder.opened(self.file, json.dumps(content))

  def encode_with_masks(self, text: str) -> np.ndarray:
    text = without_surrogates(self.masks.sub(self.special["mask"], text))
    encoding = self._seeing_masks.encode(text, add_special_tokens=False)
    return np.array(encoding.ids, np.int32)

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
    # Splitters differ in what they join: white space to white space, signs to
    # signs.
    joins_none = "." if text[:1].isspace() else "\n"
    first = "\ue000" if is_metaspace else joins_none
    (encoding,) = self._encode([first + text])
    _, ends = np.array(encoding.offsets, int).reshape(-1, 2).T
    return np.array(encoding.ids, np.int32)[ends > 1]

  def encode_word(self, word: str, space_before: bool = True) -> np.ndarray:
    if space_before:
      return super().encode_word(word)
    encoding = self._library.encode(
      [without_surrogates(word)], is_pretokenized=True, add_special_tokens=False
    )
    return np.array(encoding.ids, np.int32)

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
