"""The kinds of tokenizers: their table, and the flags that name their files."""

import dataclasses
import os
from typing import Any, ClassVar

from common.errors import DataError, UserError
from common.settings import in_group
from text_encoders.base import Encoder
from text_encoders.sentencepiece_model import SentencePieceEncoder
from text_encoders.tokenizer_json import HuggingFaceEncoder
from text_encoders.wordpiece import WordPieceEncoder

# The kinds of tokenizers, each with the flag that names its file.
ENCODERS = (WordPieceEncoder, SentencePieceEncoder, HuggingFaceEncoder)
KINDS = {encoder.kind: encoder for encoder in ENCODERS}
BY_FLAG = {encoder.flag: encoder for encoder in ENCODERS}
# Flag -> the name of such a file beside a published checkpoint.
VOCABULARIES = {encoder.flag: encoder.usual_name for encoder in ENCODERS}
VOCABULARY_FLAGS = "--vocab_file, --spm_model_file or --tokenizer_file"
_file = in_group("Vocabulary")


@dataclasses.dataclass(frozen=True)
class VocabularyFiles:
  """Settings that name a vocabulary: a flag for each kind, in `BY_FLAG`."""

  # What --help says about the vocabulary of a command.
  whose_vocabulary: ClassVar[str] = ""
  default_vocabulary: ClassVar[str] = ""
  # fmt: off
  vocab_file: str | None = _file(None,
    "WordPiece vocabulary (vocab.txt){whose_vocabulary}.{default_vocabulary}")
  spm_model_file: str | None = _file(None,
    "SentencePiece model{whose_vocabulary}, instead of --vocab_file."
    "{default_vocabulary}")
  tokenizer_file: str | None = _file(None,
    "Hugging Face tokenizer.json{whose_vocabulary}, instead of --vocab_file. "
    "It decides the case itself.{default_vocabulary}")
  # fmt: on

  def named_vocabulary(self) -> dict[str, Any]:
    """Flag -> file; {} if no flag names one, `UserError` if two do."""
    files = {}
    for flag in BY_FLAG:
      if getattr(self, flag):
        files[flag] = getattr(self, flag)
    if len(files) > 1:
      raise UserError(f"give only one of {VOCABULARY_FLAGS}")
    return files


def load_tokenizer(
  vocab_file: str | None = None,
  do_lower_case: bool = True,
  vocab_size: int | None = None,
  **files: str | None,
) -> Encoder:
  """The encoder of one file, by its flag; DataError if bad or too large."""
  files["vocab_file"] = vocab_file
  named = [(flag, path) for flag, path in files.items() if path]
  if len(named) != 1:
    raise DataError(f"name one vocabulary: give {VOCABULARY_FLAGS}")
  flag, path = named[0]
  if os.path.isdir(path):
    inside = []
    for kind, name in VOCABULARIES.items():
      inside.append(f"--{kind}={os.path.join(path, name)}")
    raise DataError(
      f"{path} is a folder: give the file in it, as {' or '.join(inside)}"
    )
  encoder = BY_FLAG[flag](path, do_lower_case)
  if vocab_size is not None and encoder.vocab_size > vocab_size:
    raise DataError(
      f"{encoder.file} has {encoder.vocab_size} tokens, but the model has "
      f"vocab_size={vocab_size}: use the vocabulary that it was trained with"
    )
  return encoder
