"""Fine-tunes BERT to find answers in paragraphs (SQuAD), on Horovod ranks.

  python run_squad.py --do_train --do_eval --do_predict \\
    --train_file=squad/train-v1.1.json --predict_file=squad/dev-v1.1.json \\
    --init_checkpoint=runs/first --output_dir=runs/squad

--version_2_with_negative is for SQuAD 2.0, where a question may have no answer.
What the model in --output_dir was trained with need not be given again.
"""

import functools

from absl import flags

from common import errors

if __name__ == "__main__":
  errors.leave_when_asked()  # also while TensorFlow is imported

from common import settings
from finetuning import finetune, squad
from interop import run_settings
from training import train_loop, training_run


def main(_) -> None:
  """Fine-tunes as the flags say."""
  kind = squad.SquadConfig
  config, lines = run_settings.configured(kind, flags.FLAGS)
  config.check_files()
  task = squad.Squad(config)
  job = functools.partial(finetune.finetune, task)
  training_run.start(config, job, lines=lines)


if __name__ == "__main__":
  settings.define_flags(squad.SquadConfig)
  train_loop.run_main(main)
