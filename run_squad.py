"""Fine-tunes BERT to find answers in paragraphs (SQuAD), on Horovod ranks.

  python run_squad.py --do_train --do_eval --do_predict \\
    --train_file=squad/train-v1.1.json --predict_file=squad/dev-v1.1.json \\
    --init_checkpoint=runs/first --output_dir=runs/squad

--version_2_with_negative is for SQuAD 2.0, where a question may have no answer.
What the model in --output_dir was trained with need not be given again.
"""

from absl import flags

from common import errors

if __name__ == "__main__":
  errors.leave_when_asked()  # also while TensorFlow is imported

from common import settings
from finetuning import squad
from interop import run_settings
from training import train_loop

if __name__ == "__main__":
  kind, task = squad.SquadConfig, squad.Squad
  settings.define_flags(kind)
  train_loop.run_main(lambda _: run_settings.fine_tune(kind, task, flags.FLAGS))
