"""Exports a trained model as a SavedModel, for TensorFlow Serving and others.

  python export_model.py runs/first --output_dir=served/first/1

MODEL is the folder of a run (run_pretraining.py, run_classifier.py,
run_squad.py), of which the best checkpoint by evaluation is taken, or a
checkpoint's name. The signatures are those of `inference`; config, vocabulary
and labels are in assets.extra, so that predict.py needs nothing else.
"""

import mixed_precision
from common import errors
from common.errors import UserError
from common.tensorflow_v1 import tf
from interop import inference, model_source
from training import flags_common

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  flags = tf.flags
  FLAGS.set_gnu_getopt()  # flags may follow MODEL
  flags.DEFINE_string(
    "output_dir",
    None,
    "Folder to make. TensorFlow Serving wants NAME/1, NAME/2, ...",
  )
  flags.DEFINE_list(
    "signatures",
    [],
    "encoder, masked_lm, next_sentence, classifier, span. Default: all that "
    "the checkpoint has.",
  )
  flags.DEFINE_enum(
    "precision",
    "fp32",
    list(mixed_precision.TYPES),
    "Type of the matmuls; weights, inputs and outputs stay as they are.",
  )
  flags_common.define_source_flags()
  flags.adopt_module_key_flags(flags_common)  # so that --help shows them


def main(argv) -> None:
  if not FLAGS.output_dir:
    raise UserError("--output_dir is missing: the folder to make")
  given = {name: FLAGS[name].value for name in model_source.Given._fields}
  source = model_source.find(argv[1], model_source.Given(**given))
  if source.is_export:
    raise UserError(f"{source.path}: exported already; name a checkpoint")
  model = inference.open_checkpoint(source, FLAGS.signatures, FLAGS.precision)
  difference = inference.export(model, source, FLAGS.output_dir)
  print(f"checkpoint  {source.path} ({source.chosen})")
  for line in source.assumed:
    print(f"assumed     {line}")
  for name in model.names():
    signature = model.signatures[name]
    print(f"  {name}: {', '.join(sorted(signature.inputs))}")
    print(f"    -> {', '.join(sorted(signature.outputs))}")
  print(f"serving_default is {model.names()[-1]}")
  print(
    f"exported    {FLAGS.output_dir}: opened again, its answers differ by at "
    f"most {difference:.1g}"
  )


if __name__ == "__main__":
  define_flags()
  errors.run_main(main, arguments=1)
