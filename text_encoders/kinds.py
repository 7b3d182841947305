"""The table of the kinds of tokenizers."""

from common.errors import DataError
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
  encoder = BY_FLAG[flag](path, do_lower_case)
  if vocab_size is not None and encoder.vocab_size > vocab_size:
    raise DataError(
      f"{encoder.file} has {encoder.vocab_size} tokens, but the model has "
      f"vocab_size={vocab_size}: use the vocabulary that it was trained with"
    )
  return encoder
