"""Fine-tunes BERT on sentences or pairs of them, on Horovod ranks.

  python run_classifier.py --task_name=MRPC --data_dir=glue/MRPC ...
  python run_classifier.py --train_file=train.tsv --eval_file=dev.csv \\
    --text_column=sentence --label_column=label ...

GLUE's tasks by name, or any table by its columns: labels are found in it.
What the model in --output_dir was trained with need not be given again.
"""

import functools

from common.tensorflow_v1 import tf
from finetuning import classification, finetune, metrics
from training import flags_common, train_loop, training_run

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  """google/bert's flags with its meaning where it has them, and ours."""
  flags = tf.flags
  flags_common.define_finetuning_flags(max_seq_length=128)
  flags.DEFINE_string(
    "task_name",
    None,
    "One of GLUE's: "
    + ", ".join(classification.GLUE)
    + ". Without it: a table, by the names of its columns.",
  )
  flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with GLUE's train.tsv, dev.tsv and test.tsv; files that are named "
    "win over it.",
  )
  for part, what in (
    ("train", "train on"),
    ("eval", "evaluate on; it chooses the best checkpoint"),
    ("predict", "label"),
  ):
    flags.DEFINE_string(
      f"{part}_file", None, f"Table (.tsv, .csv or .jsonl) to {what}."
    )
  flags.DEFINE_string(
    "text_column", None, "Column of the text; default: sentence."
  )
  flags.DEFINE_string(
    "text_pair_column", None, "Column of the second text of a pair."
  )
  flags.DEFINE_string(
    "label_column", None, "Column of the label; default: label."
  )
  flags.DEFINE_bool("regression", False, "The labels are numbers to predict.")
  flags.DEFINE_list(
    "metrics",
    [],
    "The first one chooses the best checkpoint; default: accuracy, or pearson "
    "and spearman: " + ", ".join(metrics.CLASSIFICATION),
  )
  flags.adopt_module_key_flags(flags_common)  # so that --help shows them


def main(_) -> None:
  config = classification.ClassifierConfig.from_flags(FLAGS)
  task = classification.Classification(config)
  training_run.start(config, functools.partial(finetune.finetune, task))


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
