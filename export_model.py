"""Exports a trained model as a SavedModel, for TensorFlow Serving and others.

  python export_model.py runs/first --output_dir=served/first/1

MODEL is the folder of a run (run_pretraining.py, run_classifier.py,
run_squad.py), of which the best checkpoint by evaluation is taken, or a
checkpoint's name. The signatures are those of `inference`; config, vocabulary
and labels are in assets.extra, so that predict.py needs nothing else.
"""

import dataclasses

import mixed_precision
from common.errors import UserError
from common.settings import run_with, setting
from interop import inference, model_source


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to export; the names are the flags'."""

  # fmt: off
  output_dir: str | None = setting(None,
    "Folder to make. TensorFlow Serving wants NAME/1, NAME/2, ...")
  signatures: tuple = setting((),
    "Signatures to export: encoder, masked_lm, next_sentence, classifier, "
    "span. Default: all that the checkpoint has.")
  precision: str = setting("fp32",
    "Type of the matrix multiplications. Weights, inputs and outputs stay as "
    "they are.", choices=mixed_precision.TYPES)
  given: model_source.Given = setting(
    model_source.NOTHING_GIVEN, group="Parts of the model")
  # fmt: on


def main(settings: Settings, model: str) -> None:
  if not settings.output_dir:
    raise UserError("--output_dir is missing: the folder to make")
  source = model_source.find(model, settings.given)
  if source.is_export:
    raise UserError(f"{source.path}: exported already; name a checkpoint")
  model = inference.open_checkpoint(
    source, settings.signatures, settings.precision
  )
  difference = inference.export(model, source, settings.output_dir)
  print(f"checkpoint  {source.path} ({source.chosen})")
  for line in source.assumed:
    print(f"assumed     {line}")
  for name in model.names():
    signature = model.signatures[name]
    print(f"  {name}: {', '.join(sorted(signature.inputs))}")
    print(f"    -> {', '.join(sorted(signature.outputs))}")
  print(f"serving_default is {model.names()[-1]}")
  print(
    f"exported    {settings.output_dir}: opened again, its answers differ by "
    f"at most {difference:.1g}"
  )


if __name__ == "__main__":
  run_with(Settings, main, arguments=1)
