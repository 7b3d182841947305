"""How the texts of either side of a search are read by an embedder."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from finetuning.windows import encode_pair
from model.tasks import POOLINGS
from text_encoders.base import Encoder


class Side(NamedTuple):
  """What queries have in common, or documents."""

  tokenizer: Encoder
  prompt: str  # before each text
  max_seq_length: int
  pooled: slice  # the tokens whose outputs a text's vector is the mean of

  def encode(self, texts: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
    """Each text's ids, int32 [n], and how many tokens were cut off."""
    prompted = [self.prompt + text for text in texts]
    for tokens in self.tokenizer.encode_batch(prompted):
      ids, _, cut = encode_pair(self.tokenizer, self.max_seq_length, tokens)
      yield ids, cut


def of_task(task: dict, side: str, tokenizer: Encoder, length: int) -> Side:
  """A side of an embedder's task.json; UserError for a prompt that fills it.

  Without `include_prompt` the tokens up to the end of the prompt do not count
  for a vector, [CLS] neither, as in sentence-transformers.
  """
  prompt, first = task.get("prompts", {}).get(side, ""), 0
  if prompt:
    # A space at its end may be a part of the text's first token.
    [tokens] = tokenizer.encode_batch([prompt.rstrip()])
    before, after = tokenizer.template(1)
    end = len(before) + len(tokens)
    if end + len(after) >= length:
      raise UserError(
        f"the {side} prompt {prompt!r} leaves no room for a text in {length} "
        "tokens"
      )
    first = 0 if task.get("include_prompt", True) else end
  is_cls = task.get("pooling", POOLINGS[0]) == "cls"
  pooled = slice(0, 1) if is_cls else slice(first, None)
  return Side(tokenizer, prompt, length, pooled)
