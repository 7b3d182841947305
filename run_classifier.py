"""Fine-tunes BERT on sentences or pairs of them, on Horovod ranks.

  python run_classifier.py --do_train --do_eval \\
    --task_name=MRPC --data_dir=glue/MRPC --output_dir=runs/mrpc \\
    --init_checkpoint=runs/first --learning_rate=2e-5
  python run_classifier.py --do_predict --predict_file=glue/MRPC/test.tsv \\
    --output_dir=runs/mrpc

The data are a task of GLUE by its name, or any table by its columns
(--train_file, --text_column, --label_column), whose labels are found in it.
What the model in --output_dir was trained with need not be given again.
"""

import functools

from absl import flags

from common import errors

if __name__ == "__main__":
  errors.leave_when_asked()  # also while TensorFlow is imported

from common import settings
from finetuning import classification, finetune
from interop import run_settings
from training import train_loop, training_run


def main(_) -> None:
  """Fine-tunes as the flags say."""
  kind = classification.ClassifierConfig
  config, lines = run_settings.configured(kind, flags.FLAGS)
  config.check_files()
  task = classification.Classification(config)
  job = functools.partial(finetune.finetune, task)
  training_run.start(config, job, lines=lines)


if __name__ == "__main__":
  settings.define_flags(classification.ClassifierConfig)
  train_loop.run_main(main)
