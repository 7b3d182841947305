"""Flags that say what a model's files do not, and contradict none."""

import dataclasses

from common.errors import UserError
from common.settings import setting


@dataclasses.dataclass(frozen=True)
class Given:
  """Flags that add what the model's files do not say, and contradict none."""

  # fmt: off
  bert_config_file: str | None = setting(None,
    "JSON file with the BERT config. Default: as found beside the model.")
  vocab_file: str | None = setting(None,
    "WordPiece vocabulary that the model was trained with. Default: as found "
    "beside the model or its training data.")
  spm_model_file: str | None = setting(None,
    "SentencePiece model that the model was trained with, instead of "
    "--vocab_file. Default: as found beside the model or its training data.")
  do_lower_case: bool | None = setting(None,
    "Lower-case the text, as uncased models expect. Default: as found beside "
    "the model, or else true.")
  # fmt: on


NOTHING_GIVEN = Given()


def case(
  said: bool | None, said_by: str, given: bool | None, model: str
) -> tuple[bool, list[str]]:
  """do_lower_case by files or else by the flag, and a line if it is assumed."""
  if said is None and given is not None:
    return given, []
  if said is None:
    return True, [
      f"{model}: nothing says whether it is of lower-cased text: assumed "
      "--do_lower_case; give --nodo_lower_case if it is cased"
    ]
  if given not in (None, said):
    raise UserError(
      f"--do_lower_case={given}, but the model was trained on "
      f"{'lower-cased' if said else 'cased'} text ({said_by}): leave the flag "
      "out"
    )
  return said, []
