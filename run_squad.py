"""Fine-tunes BERT to find answers in paragraphs (SQuAD), on Horovod ranks.

  python run_squad.py --do_train --do_eval --do_predict \\
    --train_file=squad/train-v1.1.json --predict_file=squad/dev-v1.1.json \\
    --init_checkpoint=runs/first --output_dir=runs/squad

--version_2_with_negative is for SQuAD 2.0, where a question may have no answer.
What the model in --output_dir was trained with need not be given again.
"""

from finetuning.squad import Squad, SquadConfig
from interop import run_settings

if __name__ == "__main__":
  run_settings.run_finetuning(SquadConfig, Squad)
