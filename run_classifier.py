"""Fine-tunes BERT on sentences or pairs of them, on Horovod ranks.

  python run_classifier.py --task_name=MRPC --data_dir=glue/MRPC ...
  python run_classifier.py --train_file=train.tsv --eval_file=dev.csv \\
    --text_column=sentence --label_column=label ...

GLUE's tasks by name, or any table by its columns: labels are found in it.
What the model in --output_dir was trained with need not be given again.
"""

import functools

from absl import flags

from common import settings
from finetuning import classification, finetune
from training import train_loop, training_run


def main(_) -> None:
  config = classification.ClassifierConfig.from_flags(flags.FLAGS)
  task = classification.Classification(config)
  training_run.start(config, functools.partial(finetune.finetune, task))


if __name__ == "__main__":
  settings.define_flags(classification.ClassifierConfig)
  train_loop.run_main(main)
