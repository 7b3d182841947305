"""Fine-tunes BERT to find answers in paragraphs (SQuAD), on Horovod ranks.

  python run_squad.py --do_train --do_eval --do_predict \\
    --train_file=squad/train-v1.1.json --predict_file=squad/dev-v1.1.json \\
    --bert_config_file=runs/first/bert_config.json --vocab_file=vocab.txt \\
    --init_checkpoint=runs/first/model.ckpt-100000 --output_dir=runs/squad

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
from training import train_loop, training_run


def main(_) -> None:
  """Fine-tunes as the flags say."""
  config = squad.SquadConfig.from_flags(flags.FLAGS)
  task = squad.Squad(config)
  training_run.start(config, functools.partial(finetune.finetune, task))


if __name__ == "__main__":
  settings.define_flags(squad.SquadConfig)
  train_loop.run_main(main)
