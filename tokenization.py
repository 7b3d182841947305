"""google/bert's tokenization by its names, for scripts that import it."""

from text_encoders.characters import is_control as _is_control
from text_encoders.characters import is_punctuation as _is_punctuation
from text_encoders.characters import is_whitespace as _is_whitespace
from text_encoders.kinds import load_tokenizer
from text_encoders.tokenizer_files import published_case
from text_encoders.wordpiece import (
  BasicTokenizer,
  WordpieceTokenizer,
  convert_by_vocab,
  convert_to_unicode,
  load_vocab,
)

printable_text = convert_to_unicode
whitespace_tokenize = str.split
convert_tokens_to_ids = convert_ids_to_tokens = convert_by_vocab


def validate_case_matches_checkpoint(
  do_lower_case: bool, init_checkpoint: str | None
) -> None:
  """Raises `ValueError` if `do_lower_case` contradicts `published_case`."""
  wants_lower = published_case(init_checkpoint)
  if wants_lower not in (None, bool(do_lower_case)):
    raise ValueError(
      f"--do_lower_case={do_lower_case} but --init_checkpoint="
      f"{init_checkpoint} was trained on "
      f"{'lower-cased' if wants_lower else 'cased'} text: pass "
      f"--do_lower_case={wants_lower}"
    )


class FullTokenizer:
  """Text -> WordPiece tokens; KeyError for unknown tokens or ids."""

  def __init__(self, vocab_file: str, do_lower_case: bool = True):
    self.vocab = load_vocab(vocab_file)
    self.inv_vocab = {index: token for token, index in self.vocab.items()}
    self.basic_tokenizer = BasicTokenizer(do_lower_case=do_lower_case)
    self.wordpiece_tokenizer = WordpieceTokenizer(vocab=self.vocab)

  def tokenize(self, text: str | bytes) -> list[str]:
    pieces = []
    for word in self.basic_tokenizer.tokenize(text):
      pieces += self.wordpiece_tokenizer.tokenize(word)
    return pieces

  def convert_tokens_to_ids(self, tokens) -> list[int]:
    return convert_by_vocab(self.vocab, tokens)

  def convert_ids_to_tokens(self, ids) -> list[str]:
    return convert_by_vocab(self.inv_vocab, ids)
