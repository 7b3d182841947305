"""Trains a WordPiece vocabulary, a SentencePiece model or a byte-level BPE.

  python -m tools.train_tokenizer --input_file='runs/corpus/train.txt' \\
      --output_file=vocab.txt --vocab_size=8192

The same text and flags give the same file.
"""

import collections
import dataclasses
import io
import os
import random
from collections.abc import Iterable, Iterator

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from common import errors, files, input_files, json_files
from common.console import counted, tell
from common.settings import run_with, setting
from corpus import text_files
from text_encoders import base, tokenizer_files, wordpiece
from text_encoders.characters import letters_of, spelt_letters
from text_encoders.sentencepiece_model import SentencePieceEncoder
from text_encoders.tokenizer_json import HuggingFaceEncoder

_MAX_VOCAB_SIZE = 1 << 22  # for which the libraries allocate memory at once
_MAX_ALPHABET = 6000  # characters of a WordPiece vocabulary: enough for Chinese
_AT_ONCE = 10_000  # times that the library gets a word, in one string
# A part of a line is no longer: SentencePiece, by default, leaves longer out.
_MAX_PART_BYTES = 4192


def _parts(lines: Iterable[str]) -> Iterator[str]:
  """Lines that are not blank, long ones in parts, cut at spaces if possible."""
  most = _MAX_PART_BYTES // 4  # characters that certainly fit
  for line in lines:
    begin = 0
    fits = len(line) <= most or len(line.encode()) <= _MAX_PART_BYTES
    while begin < len(line):
      end = len(line) if fits else begin + most
      if end < len(line):
        end = line.rfind(" ", begin + 1, end) + 1 or end
      if line[begin:end].strip():
        yield line[begin:end]
      begin = end


def sample(lines: Iterable[str], size: int) -> list[str]:
  """Parts of lines in their order, the same each time: `size` bytes at most."""
  # Each part draws a number. If the parts held are too many, the share that is
  # kept halves, and those with higher numbers go. So one pass gives a sample of
  # text of any length.
  chance, share, held = random.Random(1), 1.0, 0
  parts: list[tuple[float, str]] = []
  for part in _parts(lines):
    draw = chance.random()
    if draw >= share:
      continue
    parts.append((draw, part))
    held += len(part.encode())
    while held > size:
      share /= 2
      parts = [(draw, part) for draw, part in parts if draw < share]
      held = sum(len(part.encode()) for _, part in parts)
  if share < 1.0:
    tell(f"learning from {share:.2g} of the lines, chosen by chance")
  return [part for _, part in parts]


def _merge(words: list[str], counts: dict, vocab_size: int) -> dict[str, int]:
  """Trains on words by how often they occur; returns token -> id."""
  # Named letters make runs agree: the library numbers others in the order of a
  # hash table, and these numbers decide ties between merges.
  inside: set[str] = set()
  for word in words:
    inside.update(word[1:])
  required = list(base.SPECIAL_TOKENS)
  required += [f"##{letter}" for letter in sorted(inside)]
  tokenizer = Tokenizer(tokenizers.models.WordPiece(unk_token=base.UNK))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  trainer = tokenizers.trainers.WordPieceTrainer(
    vocab_size=vocab_size, special_tokens=required,
    limit_alphabet=len(set().union(*words)), show_progress=False,
  )  # fmt: skip

  def repeated() -> Iterator[str]:  # each word as often as it is counted
    for word in words:
      for done in range(0, counts[word], _AT_ONCE):
        yield " ".join([word] * min(_AT_ONCE, counts[word] - done))

  tokenizer.train_from_iterator(repeated(), trainer)
  return tokenizer.get_vocab(with_added_tokens=True)


def train_wordpiece(
  lines: Iterable[str], path: str, vocab_size: int, do_lower_case: bool = True
) -> None:
  """Writes a WordPiece vocabulary, one token a line.

  [PAD] is id 0; then [UNK], [CLS], [SEP], [MASK], single characters, and pieces
  in the order in which they were merged. Words with characters that are too
  rare to fit become [UNK]. DataError if `vocab_size` spells no word of `lines`.
  """
  split = wordpiece.BasicTokenizer(do_lower_case).tokenize
  words: collections.Counter[str] = collections.Counter()
  limit, total = wordpiece.MAX_INPUT_CHARS_PER_WORD, 0
  for line in lines:
    total += letters_of(line)
    # Longer words are [UNK] for any vocabulary, and the time of merging grows
    # with the square of their length.
    words.update(word for word in split(line) if len(word) <= limit)
  if not words:
    raise errors.DataError(
      f"the text has no word of at most {limit} letters to train a vocabulary "
      "on: give more, or --tokenizer=sentencepiece for text without spaces"
    )
  # A character may need two tokens: at the start of words and inside them.
  room = max(0, vocab_size - len(base.SPECIAL_TOKENS)) // 2
  letters: collections.Counter[str] = collections.Counter()
  for word, count in words.items():
    for letter in word:
      letters[letter] += count
  # Sorted twice, so that equally frequent letters have one order.
  ranked = sorted(sorted(letters), key=letters.__getitem__, reverse=True)
  alphabet = frozenset(ranked[: min(_MAX_ALPHABET, room)])
  kept = sorted(word for word in words if alphabet.issuperset(word))
  if not kept:
    raise errors.DataError(
      f"--vocab_size={vocab_size} is too small: its characters spell no word "
      "of the text"
    )
  spelt = sum(words[word] * spelt_letters(word) for word in kept)
  unknown = 1 - spelt / total
  if unknown >= 0.001:
    tell(
      f"{unknown:.1%} of the letters are left out: of words with rare "
      f"characters or with more than {limit} letters, or marks that "
      "lower-casing drops (text without spaces needs --tokenizer=sentencepiece)"
    )
  ids = _merge(kept, words, vocab_size)
  vocab = "\n".join([*sorted(ids, key=ids.__getitem__), ""])
  files.write(path, vocab.encode())


def train_sentencepiece(
  lines: Iterable[str], path: str, vocab_size: int, do_lower_case: bool = True
) -> None:
  """Writes a SentencePiece unigram model.

  [PAD] is id 0, then [UNK], [CLS], [SEP], [MASK]; no text becomes the last
  three, control symbols. The encoder must get the same `do_lower_case`.
  DataError if the text is too small for `vocab_size`.
  """
  if do_lower_case:
    lines = map(str.lower, lines)
  # A list, because the library would hide an error while it reads.
  parts = list(_parts(lines))
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(parts), model_writer=model,
      vocab_size=vocab_size, hard_vocab_limit=False,
      character_coverage=0.9995,  # the library's advice for large alphabets
      max_sentence_length=_MAX_PART_BYTES,
      num_threads=1,  # more threads sum floats in another order
      pad_id=0, unk_id=1, bos_id=-1, eos_id=-1,
      pad_piece=base.PAD, unk_piece=base.UNK,
      control_symbols=[base.CLS, base.SEP, base.MASK], minloglevel=2,
    )  # fmt: skip
  except RuntimeError as e:
    raise errors.DataError(
      f"no SentencePiece model of {vocab_size} pieces from this text: {e}"
    ) from e
  files.write(path, model.getvalue())


def train_bpe(
  lines: Iterable[str], path: str, vocab_size: int, do_lower_case: bool = True
) -> None:
  """Writes a tokenizer.json of byte-level BPE.

  [PAD] is id 0, then [UNK], [CLS], [SEP], [MASK] and the 256 bytes, so that no
  text is unknown. DataError if `vocab_size` is too small for these.
  """
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  first = [*base.SPECIAL_TOKENS, *letters]
  if vocab_size < len(first):
    raise errors.DataError(
      f"--vocab_size={vocab_size} is too small: give {len(first)} or more, for "
      "the special tokens and all bytes"
    )
  tokenizer = Tokenizer(tokenizers.models.BPE())
  tokenizer.normalizer = normalizers.NFC()
  if do_lower_case:
    steps = [normalizers.NFC(), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(steps)
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  special = []
  for token in base.SPECIAL_TOKENS:
    special.append(AddedToken(token, lstrip=token == base.MASK, special=True))
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=special, initial_alphabet=letters,
    show_progress=False,
  )  # fmt: skip
  tokenizer.train_from_iterator(lines, trainer)
  cls, sep = (base.CLS, 2), (base.SEP, 3)
  tokenizer.post_processor = tokenizers.processors.BertProcessing(sep, cls)
  files.write(path, tokenizer.to_str(pretty=True).encode())


# The command ------------------------------------------------------------------

# What trains, and what reads the result.
_TRAINERS = {
  "wordpiece": (train_wordpiece, wordpiece.WordPieceEncoder),
  "sentencepiece": (train_sentencepiece, SentencePieceEncoder),
  "bpe": (train_bpe, HuggingFaceEncoder),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to train on which text; the names are the flags'."""

  # fmt: off
  input_file: str = setting(help=
    "Text files, .txt or .jsonl, plain, gzip, bzip2, xz or zstd: names, globs "
    "and URLs (s3://...), comma-separated.")
  output_file: str = setting(help="Vocabulary (vocab.txt) or model to write.",
    alias="output")
  text_field: str = setting(*text_files.TEXT_FIELD)
  encoding: str = setting(*text_files.ENCODING)
  vocab_size: int = setting(30522,
    "Tokens of the vocabulary at most; small texts may give fewer.",
    low=1, high=_MAX_VOCAB_SIZE)
  sample_mb: int = setting(64,
    "Megabytes of text to learn from at most; of more, some lines by chance. "
    "For sentencepiece memory is 20 times as much.", low=1)
  tokenizer: str = setting("wordpiece",
    "What to train. wordpiece: BERT's vocab.txt. sentencepiece: a unigram "
    "model. bpe: a byte-level BPE, as Hugging Face's tokenizer.json.",
    choices=tuple(_TRAINERS))
  do_lower_case: bool | None = setting(None,
    "Lower-case the text; a WordPiece vocabulary loses accents, too. Scripts "
    "that use the vocabulary find this beside it. Default: true, but false for "
    "text that tools.prepare_corpus made of another language than English.")
  # fmt: on


def main(args: Settings) -> None:
  """Trains a vocabulary and prints its size."""
  text = text_files.TextFormat("", args.text_field, args.encoding)
  paths = input_files.expand_patterns(args.input_file)
  input_files.check_not_written(paths, "--input_file", args.output_file)
  lower = args.do_lower_case
  if lower is None:
    lower = False not in map(tokenizer_files.case_beside, paths)
  os.makedirs(os.path.dirname(args.output_file) or ".", exist_ok=True)
  tell(f"reading {counted(len(paths), 'file')} ...")
  train, kind = _TRAINERS[args.tokenizer]
  lines = sample(text_files.read_lines(paths, text), args.sample_mb * 10**6)
  train(lines, args.output_file, args.vocab_size, lower)
  beside = base.config_beside(args.output_file)
  json_files.write(beside, {"do_lower_case": lower})  # not of another one
  encoder = kind(args.output_file, lower)
  json_files.write(beside, encoder.config())
  size = encoder.vocab_size
  print(f"{args.output_file}: {size:,} tokens ({args.tokenizer})")
  print(f"{beside}: do_lower_case={lower}")
  if size < args.vocab_size:
    print(f"The text gave no more; --vocab_size was {args.vocab_size:,}.")


if __name__ == "__main__":
  run_with(Settings, main)
