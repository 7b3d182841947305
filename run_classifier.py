"""Fine-tunes BERT on sentences or pairs of them, on Horovod ranks.

  python run_classifier.py --do_train --do_eval \\
    --task_name=MRPC --data_dir=glue/MRPC --output_dir=runs/mrpc \\
    --init_checkpoint=runs/first --learning_rate=2e-5
  python run_classifier.py --do_predict --predict_file=glue/MRPC/test.tsv \\
    --output_dir=runs/mrpc

The data are a task of GLUE by its name, or any table by its columns
(--train_file, --text_column, --label_column), whose labels are found in it.
With --multi_label a text may have several labels, or none.
What the model in --output_dir was trained with need not be given again.
"""

from finetuning import multi_label
from finetuning.classification import ClassifierConfig
from interop import run_settings

if __name__ == "__main__":
  run_settings.run_finetuning(ClassifierConfig, multi_label.task_of)
